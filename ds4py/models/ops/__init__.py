"""Pieces of arithmetic that architectures share: norm, rotary positions, attention.

Owns: formulas on tensors. Refuses to know: weights' names, layers, sessions. Invariant: float32 in,
float32 inside, except where a docstring says otherwise.
"""
