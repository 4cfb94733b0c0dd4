"""What architectures share: products with weights, norm, rotary positions, attention, caches.

Owns: formulas on tensors. Refuses to know: weights' names, architectures, sessions. Invariant:
float32 in, float32 inside, except where a docstring says otherwise.
"""
