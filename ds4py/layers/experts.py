"""Products with one packed matrix per expert, for rows that are grouped by expert.

Owns: grouping, which product suits a device and a number of rows, decoding only what a product
needs. Refuses to know: routing. Invariant: only packed bytes are kept; what is decoded at a time is
a bounded piece, or one expert where that is larger. On an accelerator nothing here makes the host
wait.

| device      | rows                | product                                                     |
|-------------|---------------------|-------------------------------------------------------------|
| CPU         | any                 | bfloat16: kernels on packed rows, `kernels/cpu/linear.py`;  |
|             |                     | float32, and formats without a kernel: `one_by_one`         |
| accelerator | fewer than experts  | each row's own matrix, on its packed bytes, `packed`;       |
|             |                     | formats without a kernel: a decoded copy of it, `gathered`  |
| accelerator | more                | pieces of the experts and `torch`'s `grouped_mm`, `grouped` |

`grouped_mm` keeps the host running for bfloat16 only, and is not in every torch that ds4py runs
with; without it all rows are multiplied as few are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Final

import torch
from torch.nn.functional import linear

from ds4py.kernels import cuda
from ds4py.kernels.cpu import linear as cpu
from ds4py.kernels.cpu.blocks import LAYOUTS
from ds4py.kernels.cpu.compare import trusts_products
from ds4py.quant.tensor import QuantTensor

_CPU_PIECE_VALUES: Final = 1 << 20
"""Weights decoded at once on the CPU: fewer show the fixed cost of some thirty operations, more
leave the third-level cache."""

_DEVICE_PIECE_VALUES: Final = 1 << 26
"""Weights decoded at once elsewhere: 256 MiB in float32, and about as much again while decoding."""

_FEW_ROWS: Final = 3
"""Rows of one expert for which the CPU multiplies float32 faster than it rounds to bfloat16."""

GroupedProduct = Callable[[torch.Tensor, "ExpertGroups", QuantTensor, torch.dtype], torch.Tensor]
"""Rows `[M, K]`, their groups, the matrices `[X, N, K]`, precision -> float32 `[M, N]`."""

_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None)


class ExpertGroups:
    """Rows sorted by their expert.

    Args:
        experts: Every row's expert, integers `[M]`.
        n_experts: Experts that there are, `X`.
    """

    def __init__(self, experts: torch.Tensor, n_experts: int):
        self.experts, self.order = experts.sort(stable=True)
        numbers = torch.arange(n_experts, device=experts.device)
        self.ends = torch.searchsorted(self.experts, numbers, right=True, out_int32=True)

    @cached_property
    def present(self) -> list[tuple[int, int, int]]:
        """(expert, first row, end) of every expert that has rows; makes the host wait."""
        ends = self.ends.tolist()
        starts = [0, *ends[:-1]]
        bounds = zip(range(len(ends)), starts, ends, strict=True)
        return [(expert, start, end) for expert, start, end in bounds if start < end]


class ExpertProduct:
    """The matrices of all experts for one place in the layer.

    Args:
        tensor: `[X, N, K]`; its bytes are taken over, and may change.
        dtype: float32 for exactness, bfloat16 for speed.
    """

    def __init__(self, tensor: QuantTensor, dtype: torch.dtype):
        self._tensor = tensor
        self._dtype = dtype
        self._has_kernel = cuda.has_kernel(tensor)
        on_cpu = tensor.device.type == "cpu" and dtype is torch.bfloat16
        form = tensor.format.name
        packs = on_cpu and form in LAYOUTS and trusts_products(form)
        self._blocks = cpu.ExpertBlocks(tensor) if packs else None

    def __call__(self, x: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
        """Return float32 `[M, N]` for float32 rows `[M, K]`, both in the groups' order."""
        if self._blocks is not None:
            return self._blocks(x, groups.present)
        n_rows, n_experts = x.shape[0], self._tensor.shape[0]
        product = choose(
            self._tensor.device, self._dtype, n_rows, n_experts, has_kernel=self._has_kernel
        )
        return product(x, groups, self._tensor, self._dtype)


def choose(
    device: torch.device,
    dtype: torch.dtype,
    n_rows: int,
    n_experts: int,
    *,
    has_kernel: bool = False,
) -> GroupedProduct:
    """Return the product that suits; see the module's table.

    Args:
        device: Where matrices and rows are.
        dtype: The product's precision.
        n_rows: Rows of the batch.
        n_experts: Experts that there are.
        has_kernel: Whether `kernels/cuda` can multiply with the format there.
    """
    if device.type == "cpu":
        return one_by_one
    if n_rows < n_experts or _grouped_mm is None or dtype is not torch.bfloat16:
        return packed if has_kernel else gathered
    return grouped


def one_by_one(
    x: torch.Tensor, groups: ExpertGroups, tensor: QuantTensor, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply the rows of one expert after the other; see `ExpertProduct`.

    Large matrices are decoded in pieces, small ones several at a time.
    """
    _, N, K = tensor.shape
    step = max(_CPU_PIECE_VALUES // K, 1)
    together = max(step // N, 1)
    y = x.new_empty((x.shape[0], N))
    for number in range(0, len(groups.present), together):
        some = groups.present[number : number + together]
        matrices = [tensor.expert(expert).raw for expert, _, _ in some]
        for first in range(0, N, step):
            raw = torch.stack([matrix[first : first + step] for matrix in matrices])
            weights = _decoded(tensor, raw, torch.float32)
            for (_, start, end), part in zip(some, weights, strict=True):
                rows, own = x[start:end], slice(first, first + step)
                kind = torch.float32 if end - start <= _FEW_ROWS else dtype
                y[start:end, own] = linear(rows.to(kind), part.to(kind))
    return y


def packed(
    x: torch.Tensor, groups: ExpertGroups, tensor: QuantTensor, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply every row by its expert's packed matrix; see `ExpertProduct`.

    Weights are exact and rows stay float32, whatever the precision: rounding them saves nothing.
    """
    del dtype
    return cuda.multiply_few(x, tensor, torch.float32, groups.experts)


def gathered(
    x: torch.Tensor, groups: ExpertGroups, tensor: QuantTensor, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply every row by a copy of its expert's matrix; see `ExpertProduct`."""
    X, N, K = tensor.shape
    step = max(_DEVICE_PIECE_VALUES // (N * K), 1)
    matrices = tensor.raw.view(X, N, -1)
    parts = []
    pairs = zip(torch.split(x.to(dtype), step), torch.split(groups.experts, step), strict=True)
    for rows, experts in pairs:
        weights = _decoded(tensor, matrices.index_select(0, experts), dtype)
        parts.append(torch.bmm(weights, rows.unsqueeze(2)).squeeze(2))
    return torch.cat(parts).float()


def grouped(
    x: torch.Tensor, groups: ExpertGroups, tensor: QuantTensor, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply the rows of some experts at a time; see `ExpertProduct`.

    All rows take part in the product of every piece, as only the device knows which belong to it:
    those of the experts before it form a group of their own, whose results are not used.
    """
    assert _grouped_mm is not None, "chosen only where torch has it"
    X, N, K = tensor.shape
    step = max(_DEVICE_PIECE_VALUES // (N * K), 1)
    matrices = tensor.raw.view(X, N, -1)
    rows = x.to(dtype)
    y = rows.new_empty((x.shape[0], N))
    bounds = torch.nn.functional.pad(groups.ends, (1, 0))
    for first in range(0, X, step):
        weights = _decoded(tensor, matrices[first : first + step], dtype)
        weights = torch.cat((torch.zeros_like(weights[:1]), weights))
        ends = bounds[first : first + weights.shape[0]]
        part = _grouped_mm(rows, weights.transpose(1, 2), offs=ends)
        # rows behind the piece are not computed here, and are replaced by the next pieces
        y = torch.where((groups.experts >= first).unsqueeze(1), part, y)
    return y.float()


def _decoded(tensor: QuantTensor, raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `[..., K]` for some of a tensor's packed rows, uint8 `[..., bytes per row]`."""
    kind, rows = tensor.format, raw.reshape(-1, raw.shape[-1])
    if cuda.has_kernel(tensor):
        part = QuantTensor(tensor.name, kind, (rows.shape[0], tensor.shape[-1]), rows)
        values = cuda.decode(part, dtype)
    else:
        values = kind.decode(rows.view(-1, kind.block_bytes)).to(dtype)
    return values.view(*raw.shape[:-1], -1)
