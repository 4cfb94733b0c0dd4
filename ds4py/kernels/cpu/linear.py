"""Products with packed weights on the CPU, for any number of rows.

Owns: which way suits a number of rows, and formats that kernels do not understand. Refuses to know:
biases, layers, float32 exactness. Invariant: the packed form is the only copy of the weights, and
both ways use the same numbers.

A small batch multiplies packed rows directly (`gemv.py`), at a cost that grows little with the
batch; a large one decodes pieces of the matrix to bfloat16 and multiplies those.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch
from torch.nn.functional import linear

from ds4py.gguf.kinds import type_id
from ds4py.kernels.cpu.activations import quantize
from ds4py.kernels.cpu.blocks import GROUP, LAYOUTS
from ds4py.kernels.cpu.gemv import PackedRows
from ds4py.kernels.memory import KernelBuffer
from ds4py.quant.formats import format_of
from ds4py.quant.tensor import QuantTensor

FEW_ROWS: Final = 12
"""Largest batch that multiplies packed rows directly."""

_DECODE_VALUES: Final = 1 << 21
"""Weights decoded at once for a large batch: 4 MiB of bfloat16, so that they stay in the cache."""

_ROUND_VALUES: Final = 1 << 20
"""Weights rounded at once; bounds the temporary memory."""


class BlockWeights:
    """A matrix `[N, K]` that the CPU multiplies in packed form.

    Formats without a kernel are rounded to Q8_0 once.

    Args:
        tensor: A two-dimensional block-quantized matrix on the CPU, whose bytes this takes over:
            they change.
    """

    def __init__(self, tensor: QuantTensor):
        known = tensor if tensor.format.name in LAYOUTS else as_q8_0(tensor)
        self.packed = PackedRows(known.raw, known.format.name)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[T, N]` for contiguous `[T, K]`, both float32 or both bfloat16.

        Raises:
            KernelError: The rows lie otherwise. Asked for however many there are, so that what
                works for a long prompt works for a short one.
        """
        KernelBuffer(x, x.dtype, "activations")
        if x.shape[0] > FEW_ROWS:
            return multiply_decoded(self.packed, x.bfloat16()).to(x.dtype)
        y = KernelBuffer.empty((x.shape[0], self.packed.n_rows))
        self.packed.multiply(quantize(x.float()), y)
        return y.tensor.to(x.dtype)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Return some rows of the matrix: int64 `[R]` to float32 `[R, K]`."""
        return self.packed.rows(index)


class ExpertBlocks:
    """One matrix for each expert, `[X, N, K]`, in packed form.

    Args:
        tensor: Of a format that kernels understand, on the CPU; its bytes are taken over.
    """

    def __init__(self, tensor: QuantTensor):
        self._packed = PackedRows(tensor.raw, tensor.format.name)
        self._n_rows = tensor.shape[1]
        self._parts: dict[int, PackedRows] = {}

    def __call__(self, x: torch.Tensor, groups: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Multiply float32 `[M, K]`.

        Args:
            x: Rows, those of an expert behind each other.
            groups: Expert, first row, end; together all rows.

        Returns:
            float32 `[M, N]`.
        """
        y = KernelBuffer.empty((x.shape[0], self._n_rows))
        codes = quantize(x) if any(end - start <= FEW_ROWS for _, start, end in groups) else None
        for expert, start, end in groups:
            part = self._part(expert)
            if codes is not None and end - start <= FEW_ROWS:
                part.multiply(codes, y, rows=(start, end))
            else:
                y.tensor[start:end] = multiply_decoded(part, x[start:end].bfloat16())
        return y.tensor

    def _part(self, expert: int) -> PackedRows:
        if expert not in self._parts:
            first = expert * self._n_rows
            self._parts[expert] = self._packed.part(first, first + self._n_rows)
        return self._parts[expert]


def multiply_decoded(packed: PackedRows, x: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 `[T, N]` for `[T, K]`, by decoding the matrix piece by piece."""
    step = max(_DECODE_VALUES // packed.width, 1)
    ends = [*range(0, packed.n_rows, step), packed.n_rows]
    parts = [linear(x, packed.decode(start, end)) for start, end in pairwise(ends)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def kept_format(tensor: QuantTensor) -> str:
    """Return the format in which `BlockWeights` keeps a matrix."""
    return tensor.format.name if tensor.format.name in LAYOUTS else "Q8_0"


def as_q8_0(tensor: QuantTensor) -> QuantTensor:
    """Round a matrix to the nearest of 255 levels in each group of 32 values."""
    rows, groups = tensor.shape[0], tensor.shape[1] // GROUP
    kind = format_of(type_id("Q8_0"), tensor=tensor.name)
    raw = torch.empty((rows, groups, kind.block_bytes), dtype=torch.uint8)
    step = max(_ROUND_VALUES // tensor.shape[1], 1)
    for start in range(0, rows, step):
        part = tensor.part(start, min(step, rows - start))
        values = part.decode().view(-1, groups, GROUP)
        scale = (values.abs().amax(2, keepdim=True) / 127).half()
        codes = (values / scale.float().where(scale != 0, 1)).round_().clamp_(-127, 127)
        raw[start : start + step, :, :2] = scale.view(torch.uint8)
        raw[start : start + step, :, 2:] = codes.to(torch.int8).view(torch.uint8)
    return QuantTensor(tensor.name, kind, tensor.shape, raw.view(rows, -1))
