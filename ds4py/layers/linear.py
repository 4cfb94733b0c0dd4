"""Matrix products with packed weights: the one way models multiply.

Owns: which product suits a format, a device and a precision. Refuses to know: layers, files.
Invariant: a row's result depends on the batch only through the sizes that select a kernel, and
never on which other matrices the process holds.

| device, precision | format          | product                                             |
|-------------------|-----------------|-----------------------------------------------------|
| CPU, bfloat16     | F32, F16, BF16  | kept as bfloat16 (oneDNN)                           |
| CPU, bfloat16     | block formats   | kernels on packed rows, `kernels/cpu/linear.py`     |
| CUDA              | with kernels    | on packed bytes or decoded, `kernels/cuda`          |
| everything else   | all             | decoded at each call, then an ordinary product      |

Products that decode at each call may keep the decoded weights while a `KeepBudget` lasts; the
values, and so the results, are the same either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final, Protocol

import torch
from torch.nn.functional import linear

from ds4py.errors import ModelError
from ds4py.kernels import cuda
from ds4py.kernels.cpu import linear as cpu
from ds4py.kernels.cpu.activations import Quantized
from ds4py.kernels.cpu.compare import trusts_products
from ds4py.kernels.memory import KernelBuffer
from ds4py.quant.plain import NATIVE
from ds4py.quant.tensor import QuantTensor

_PIECE_VALUES: Final = 1 << 24
"""Weights decoded at once; bounds the temporary memory to 64 MiB in float32."""


class Product(Protocol):
    """One packed matrix `[N, K]`, ready to multiply."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[T, N]` for `[T, K]`, both float32 or both in the product's type."""

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Return some rows of the matrix: int64 `[R]` to float32 `[R, K]`."""


class KeepBudget:
    """Memory that decoded weights may take besides the packed ones.

    Args:
        n_bytes: 0 keeps nothing.
    """

    def __init__(self, n_bytes: int):
        self._left = n_bytes

    def take(self, n_bytes: int) -> bool:
        """Reserve memory if there is enough."""
        if n_bytes > self._left:
            return False
        self._left -= n_bytes
        return True


class PackedLinear:
    """`x @ W.T + bias`, the rows of several matrices one below the other.

    Matrices that follow each other with the same format become one product, so a fused QKV or
    gate-and-up costs one call.

    Args:
        tensors: Matrices `[N_i, K]` on one device. Their bytes are taken over, and may change.
        dtype: float32 or bfloat16: the arithmetic.
        bias: float32 `[sum(N_i)]`, or None.
        budget: Memory for decoded weights; None keeps none.

    Attributes:
        dtype: As given.
        name: The matrices' names in the file.

    Raises:
        ModelError: The matrices have different widths.
    """

    def __init__(
        self,
        tensors: Sequence[QuantTensor],
        *,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        budget: KeepBudget | None = None,
    ):
        width = tensors[0].shape[-1]
        for tensor in tensors:
            if len(tensor.shape) != 2 or tensor.shape[1] != width:
                raise ModelError(
                    tensor.name, got=f"shape {tensor.shape}", expected=f"[rows, {width}]"
                )
        self.dtype = dtype
        self.name = " + ".join(tensor.name for tensor in tensors)
        self._n_rows = sum(tensor.shape[0] for tensor in tensors)
        self._bias = None if bias is None else bias.to(dtype)
        self._products = [
            _product(_stacked(list(group)), dtype, budget or KeepBudget(0))
            for _, group in groupby(tensors, key=lambda tensor: tensor.format.name)
        ]
        self._only = self._products[0] if len(self._products) == 1 and bias is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[T, N]` for contiguous `[T, K]`, both float32 or both in `dtype`."""
        if self._only is not None:  # the usual case, on the path of every decoded token
            return self._only(x)
        parts = [product(x) for product in self._products]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return y if self._bias is None else y + self._bias.to(y.dtype)

    @property
    def n_rows(self) -> int:
        """Rows of all matrices, `N`."""
        return self._n_rows

    def exact_for(self, n_rows: int) -> bool:
        """Whether products of so many float32 rows have float32 sums."""
        return self.dtype is torch.float32 or (self.is_packed and n_rows <= cpu.FEW_ROWS)

    @property
    def is_packed(self) -> bool:
        """Whether `multiply` can run."""
        return all(isinstance(product, cpu.BlockWeights) for product in self._products)

    def multiply(self, x: Quantized, y: KernelBuffer, *, add: bool = False) -> None:
        """Multiply rounded activations, on the CPU (only if `is_packed`).

        Args:
            x: Activations `[T, K]`.
            y: float32 `[T, N]`; gets the result.
            add: Add it to what `y` holds.

        Raises:
            KernelError: The sizes do not fit.
        """
        y.expect("result of a product", (x.n_rows, self._n_rows))
        start = 0
        for product in self._products:
            assert isinstance(product, cpu.BlockWeights)
            product.packed.multiply(x, y, column=start, add=add)
            start += product.packed.n_rows
        if self._bias is not None:
            y.tensor.add_(self._bias)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Return some rows of the only matrix: int64 `[R]` to float32 `[R, K]`."""
        assert self._only is not None, "rows are numbered inside one matrix"
        return self._only.rows(index)


class DenseWeights:
    """A matrix kept in the precision of the arithmetic; for formats without blocks."""

    def __init__(self, tensor: QuantTensor, dtype: torch.dtype):
        self._weight = tensor.decode(dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x @ W.T`."""
        return linear(x.to(self._weight.dtype), self._weight).to(x.dtype)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Return some rows as float32 `[R, K]`."""
        return self._weight.index_select(0, index).float()


class DecodedWeights:
    """A packed matrix that is decoded, piece by piece, at each call; the reference product.

    Args:
        tensor: The matrix; shared, not copied.
        dtype: Type of the arithmetic.
        budget: Asked once whether the decoded pieces may stay.
    """

    def __init__(self, tensor: QuantTensor, dtype: torch.dtype, budget: KeepBudget):
        self._tensor = tensor
        self._dtype = dtype
        rows, columns = tensor.shape
        self._step = max(_PIECE_VALUES // columns, 1)
        keeps = budget.take(rows * columns * dtype.itemsize)
        self._kept: dict[int, torch.Tensor] | None = {} if keeps else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x @ W.T`."""
        rows, starts = x.to(self._dtype), range(0, self._tensor.shape[0], self._step)
        parts = [linear(rows, self._piece(start)) for start in starts]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).to(x.dtype)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Return some rows as float32 `[R, K]`."""
        return self._tensor.rows(index, torch.float32)

    def _piece(self, start: int) -> torch.Tensor:
        if self._kept is not None and start in self._kept:
            return self._kept[start]
        # kept or not, the pieces are the same: a product's rounding may depend on its size
        rows = min(self._step, self._tensor.shape[0] - start)
        piece = self._tensor.part(start, rows).decode(self._dtype)
        if self._kept is not None:
            self._kept[start] = piece
        return piece


def _product(tensor: QuantTensor, dtype: torch.dtype, budget: KeepBudget) -> Product:
    if (on_cuda := cuda.product(tensor, dtype)) is not None:
        return on_cuda
    if dtype is torch.bfloat16 and tensor.device.type == "cpu":
        if tensor.format.name in NATIVE:
            return DenseWeights(tensor, dtype)
        form = cpu.kept_format(tensor)
        if trusts_products(form):
            return cpu.BlockWeights(tensor)
    return DecodedWeights(tensor, dtype, budget)


def _stacked(tensors: Sequence[QuantTensor]) -> QuantTensor:
    """Put matrices of one format below each other."""
    if len(tensors) == 1:
        return tensors[0]
    raw = torch.cat([tensor.raw for tensor in tensors])
    name = " + ".join(tensor.name for tensor in tensors)
    return QuantTensor(name, tensors[0].format, (raw.shape[0], tensors[0].shape[1]), raw)
