"""Products with packed blocks beside torch's with decoded ones, on random blocks.

Owns: the blocks, the comparison. Refuses to know: what follows from it. Invariant: what a kernel is
compared with uses no kernel.
"""

from __future__ import annotations

from typing import Final

import torch

from ds4py.gguf.kinds import type_id
from ds4py.kernels.cpu.activations import quantize
from ds4py.kernels.cpu.blocks import LAYOUTS
from ds4py.kernels.cpu.gemv import PackedRows
from ds4py.kernels.cpu.trust import ROWS, TRUST, Comparison, relative_error
from ds4py.kernels.memory import KernelBuffer
from ds4py.quant.formats import format_of
from ds4py.quant.tensor import QuantTensor

_N_ROWS: Final = 72  # not a multiple of the rows that a thread takes at a time
_WIDTH: Final = 1024
_LIMIT: Final = 2e-3
"""Measured: 5e-4 at most. Weights have 13 bits, those of bfloat16 eight: they are off by 1.7e-3,
hence twice as much for them."""


def trusts_products(form: str) -> bool:
    """Say whether this processor multiplies with blocks of a format as torch does."""
    return TRUST.in_kernel(kernel_name(form), lambda: compare_products(form))


def kernel_name(form: str) -> str:
    """Return how verdicts call the products with a format."""
    return f"products with {form}"


def compare_products(form: str) -> Comparison:
    """Compare products and decoded rows of some hundred random blocks with torch's.

    Args:
        form: Name of the format, one of `LAYOUTS`.
    """
    weights = random_matrix(form, _N_ROWS, _WIDTH)
    exact = weights.decode().double()
    packed = PackedRows(weights.raw.clone(), form)
    generator = torch.Generator().manual_seed(1)
    errors = []
    for n_rows in ROWS:
        x = torch.randn((n_rows, _WIDTH), generator=generator)
        y = KernelBuffer.empty((n_rows, _N_ROWS))
        # memory that was just freed may hold the right values: what is not written must show
        y.tensor.fill_(float("nan"))
        packed.multiply(quantize(x), y)
        errors.append(relative_error(y.tensor, x.double() @ exact.T))
    some = torch.arange(0, _N_ROWS, 5)
    errors.append(relative_error(packed.rows(some), exact[some]))
    errors.append(relative_error(packed.decode(0, _N_ROWS), exact) / 2)
    return Comparison(error=float(torch.tensor(errors).max()), limit=_LIMIT)


def random_matrix(form: str, n_rows: int, width: int) -> QuantTensor:
    """Return a matrix of random codes, with factors of about the same size and either sign."""
    kind, layout = format_of(type_id(form), tensor=form), LAYOUTS[form]
    generator = torch.Generator().manual_seed(0)
    n_blocks = n_rows * width // kind.block_values
    size = (n_blocks, kind.block_bytes)
    blocks = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    for factor in layout.factors:
        signs = torch.randint(0, 2, (n_blocks,), generator=generator) * 2 - 1
        values = (1 + torch.rand(n_blocks, generator=generator)) * 1e-3 * signs
        blocks[:, factor.at : factor.at + 2] = values.half().view(torch.uint8).view(-1, 2)
    return QuantTensor(form, kind, (n_rows, width), blocks.view(n_rows, -1))
