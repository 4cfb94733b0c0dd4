"""Kernels for CUDA devices, most of them written in Triton.

Owns: products with packed blocks, and the arithmetic of decode steps that see many sessions at once
through the addresses of their caches. Refuses to know: layers, files, routing, graphs. Invariant:
importing this imports no Triton; that happens when a device first needs a kernel. Nothing in a
decode step waits for the device, and everything that changes from one step to the next is read from
tensors on it, so that a recorded step can be replayed.

Modules with kernels need `triton`, so import them only where there is a CUDA device.
"""

from ds4py.kernels.cuda.launch import decode, has_kernel, multiply_few, multiply_many
from ds4py.kernels.cuda.linear import PackedProduct, product

__all__ = ["PackedProduct", "decode", "has_kernel", "multiply_few", "multiply_many", "product"]
