"""Products with packed blocks on CUDA devices, written in Triton.

Owns: what the rest of ds4py may use of it. Refuses to know: layers, files, routing. Invariant:
importing this imports no Triton; that happens when a device first needs a kernel.
"""

from ds4py.quant.kernels.cuda.launch import decode, has_kernel, multiply_few, multiply_many
from ds4py.quant.kernels.cuda.products import PackedProduct, product

__all__ = ["PackedProduct", "decode", "has_kernel", "multiply_few", "multiply_many", "product"]
