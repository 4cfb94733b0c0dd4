"""Arithmetic of the decode step as Triton kernels, and what such a step reads.

Owns: kernels that see many sessions at once through the addresses of their caches. Refuses to know:
weights, layers, graphs. Invariant: nothing here waits for the device, and everything that changes
from one step to the next is read from tensors on it, so that a recorded step can be replayed.

Modules with kernels need `triton`, so import them only where there is a CUDA device.
"""
