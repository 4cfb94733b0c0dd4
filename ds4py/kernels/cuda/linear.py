"""One packed matrix on a CUDA device, ready to multiply batches of any size.

Owns: which way to multiply suits a batch. Refuses to know: launch geometry, layers. Invariant: only
packed bytes are kept; what is decoded at a time is a bounded piece.

| rows of the batch             | product                                                          |
|-------------------------------|------------------------------------------------------------------|
| up to 16                      | `few`: on the packed bytes, weights exact, sums in float32       |
| up to 64, bfloat16            | `fused`: decoded inside the product, weights rounded to bfloat16 |
| more, or more than 16 float32 | `decoded`: pieces decoded to the precision, then cuBLAS          |

Estimated, not yet measured: by the bytes they move and the instructions on each weight (8 to 14), a
decoded piece costs about as much as four launches of `few`, each with four rows; and twice to four
times as much as decoding inside the product, until that has to decode a weight more than once.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn.functional import linear

from ds4py.kernels.cuda.launch import decode, has_kernel, multiply_few, multiply_many
from ds4py.quant.tensor import QuantTensor

FEW_ROWS: Final = 16
FUSED_ROWS: Final = 64

_PIECE_VALUES: Final = 1 << 26
"""Weights decoded at once: 128 MiB in bfloat16."""

_ALIGNED_ROWS: Final = 16
"""Pieces begin at multiples of it, so that all are compiled for alike addresses."""


class PackedProduct:
    """A matrix `[N, K]` that stays packed.

    Args:
        tensor: In a format with kernels; shared, not copied.
        dtype: float32 or bfloat16: the arithmetic of many rows.
    """

    def __init__(self, tensor: QuantTensor, dtype: torch.dtype):
        self._tensor = tensor
        self._dtype = dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[T, N]` for `[T, K]`, both float32 or both in `dtype`; see the module's table."""
        n_rows = x.shape[0]
        if n_rows <= FEW_ROWS:
            return self.few(x)
        rows = x.to(self._dtype)
        if n_rows <= FUSED_ROWS and self._dtype is torch.bfloat16:
            return self.fused(rows).to(x.dtype)
        return self.decoded(rows).to(x.dtype)

    def few(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply exact weights; a row's result does not depend on its neighbours' values."""
        return multiply_few(x, self._tensor, x.dtype)

    def fused(self, x: torch.Tensor) -> torch.Tensor:
        """Decode inside the product."""
        return multiply_many(x, self._tensor, self._dtype)

    def decoded(self, x: torch.Tensor) -> torch.Tensor:
        """Decode pieces of the matrix and multiply those."""
        N, K = self._tensor.shape
        step = max(_PIECE_VALUES // K // _ALIGNED_ROWS, 1) * _ALIGNED_ROWS
        if step >= N:
            return linear(x, decode(self._tensor, self._dtype))
        y = x.new_empty((x.shape[0], N))
        for start in range(0, N, step):
            piece = self._tensor.part(start, min(step, N - start))
            own = y[:, start : start + step]
            torch.mm(x, decode(piece, self._dtype).t(), out=own)
        return y

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Return some rows of the matrix: int64 `[R]` to float32 `[R, K]`."""
        return decode(self._tensor, torch.float32, index)


def product(tensor: QuantTensor, dtype: torch.dtype) -> PackedProduct | None:
    """Return the product of a matrix `[N, K]`, or None where there are no kernels for it."""
    return PackedProduct(tensor, dtype) if has_kernel(tensor) else None
