"""Launching the Triton kernels: geometry, arguments, device.

Owns: how many programs and warps a product gets, when Triton is imported. Refuses to know: the
kernels' insides, which product suits a batch. Invariant: a launch never waits for the device and
allocates only its result, so that it may be captured into a CUDA graph once it has run before (the
first run compiles the kernel and uploads a codebook).

On tensors in host memory the launches work only with Triton's interpreter, which tests use.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any, Final

import torch
from gguf import quants

from ds4py.kernels.cuda.layouts import LAYOUTS, Layout
from ds4py.kernels.memory import check_launch
from ds4py.quant.bits import table
from ds4py.quant.tensor import QuantTensor

_FULL_WARPS: Final = 8192
"""Warps that keep a large device busy (132 multiprocessors hold 64 each): a product with fewer rows
splits each among several."""

_MAX_WARPS: Final = 4
_WARP: Final = 32

_OPTIONS: Final[dict[str, Any]] = {"enable_fp_fusion": True}
"""Multiply-add in one step: half the arithmetic. Not left to the default, which changes."""

_GEMM_ROWS: Final = 64
_GEMM_BYTES: Final = 64
"""Packed bytes of a row that the product of many tokens decodes at once."""

_DECODE_WARPS: Final = 4

_INTEGERS: Final = (torch.int32, torch.int64)


def has_kernel(tensor: QuantTensor) -> bool:
    """Return whether the kernels can multiply with a tensor where it is."""
    return tensor.device.type == "cuda" and tensor.format.name in LAYOUTS and _has_triton()


def multiply_few(
    x: torch.Tensor,
    tensor: QuantTensor,
    dtype: torch.dtype,
    experts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply some rows with exact weights, accumulating in float32.

    Args:
        x: float32 or bfloat16 `[T, K]`.
        tensor: `[N, K]`, or `[X, N, K]` with `experts`; in a format of `LAYOUTS`.
        dtype: Of the result.
        experts: The matrix of each row of `x`, int32 or int64 `[T]` on the device. The caller has
            checked the range.

    Returns:
        `[T, N]` on the same device.

    Raises:
        KernelError: Rows, matrix or experts are of another type or size, elsewhere, or lie
            otherwise.
    """
    layout = LAYOUTS[tensor.format.name]
    _check_product(x, tensor)
    n_tokens, n_rows = x.shape[0], tensor.shape[-2]
    if experts is not None:
        check_launch(
            experts, "experts of rows", dtypes=_INTEGERS, shape=(n_tokens,), device=x.device
        )
    tokens = 1 if experts is not None or n_tokens == 1 else 2 if n_tokens == 2 else 4
    n_programs = n_rows * -(-n_tokens // tokens)
    n_parts = _parts(tensor, layout)
    n_warps = _warps(n_programs, n_parts, layout)
    y = torch.empty((n_tokens, n_rows), dtype=dtype, device=x.device)
    with _device_of(x):
        _kernels().gemv[(n_programs,)](
            x,
            tensor.raw,
            tensor.raw if experts is None else experts,
            _table(tensor),
            y,
            n_tokens,
            n_rows,
            n_parts,
            FORMAT=tensor.format.name,
            **layout.constants,
            TILE=_tile(layout, n_warps),
            TOKENS=tokens,
            GROUPED=experts is not None,
            num_warps=n_warps,
            **_OPTIONS,
        )
    return y


def multiply_many(x: torch.Tensor, tensor: QuantTensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply many rows, decoding each weight once for up to 64 of them.

    Args:
        x: float32 or bfloat16 `[T, K]`; weights are rounded to its type.
        tensor: `[N, K]` in a format of `LAYOUTS`.
        dtype: Of the result.

    Returns:
        `[T, N]` on the same device.

    Raises:
        KernelError: Rows or matrix are of another type or size, elsewhere, or lie otherwise.
    """
    layout = LAYOUTS[tensor.format.name]
    _check_product(x, tensor)
    n_tokens, n_rows = x.shape[0], tensor.shape[0]
    tokens = 16 if n_tokens <= 16 else 32 if n_tokens <= 32 else 64
    y = torch.empty((n_tokens, n_rows), dtype=dtype, device=x.device)
    with _device_of(x):
        _kernels().gemm[(-(-n_tokens // tokens), -(-n_rows // _GEMM_ROWS))](
            x,
            tensor.raw,
            _table(tensor),
            y,
            n_tokens,
            n_rows,
            _parts(tensor, layout),
            FORMAT=tensor.format.name,
            **layout.constants,
            TILE=_GEMM_BYTES // layout.lanes,
            TOKENS=tokens,
            ROWS=_GEMM_ROWS,
            num_warps=4,
            **_OPTIONS,
        )
    return y


def decode(
    tensor: QuantTensor, dtype: torch.dtype, index: torch.Tensor | None = None
) -> torch.Tensor:
    """Decode packed rows in one pass.

    Args:
        tensor: `[..., K]` in a format of `LAYOUTS`; its rows are numbered through.
        dtype: Of the result.
        index: The rows to decode, int32 or int64 `[R]` on the device; None for all. The caller
            has checked the range.

    Returns:
        `[R, K]`, equal to the format's decoder value by value.

    Raises:
        KernelError: The matrix or the index lies otherwise.
    """
    layout = LAYOUTS[tensor.format.name]
    _check_blocks(tensor)
    if index is not None:
        check_launch(index, "index of rows", dtypes=_INTEGERS, shape=(None,), device=tensor.device)
    n_parts = _parts(tensor, layout)
    tile = _tile(layout, _DECODE_WARPS)
    n_rows = tensor.raw.shape[0] if index is None else index.shape[0]
    y = torch.empty((n_rows, tensor.shape[-1]), dtype=dtype, device=tensor.device)
    with _device_of(tensor.raw):
        _kernels().decode[(n_rows * -(-n_parts // tile),)](
            tensor.raw,
            tensor.raw if index is None else index,
            _table(tensor),
            y,
            n_parts,
            FORMAT=tensor.format.name,
            **layout.constants,
            TILE=tile,
            CHOSEN=index is not None,
            num_warps=_DECODE_WARPS,
            **_OPTIONS,
        )
    return y


def _check_product(x: torch.Tensor, tensor: QuantTensor) -> None:
    check_launch(
        x,
        f"rows for {tensor.name}",
        dtypes=(torch.float32, torch.bfloat16),
        shape=(None, tensor.shape[-1]),
        device=tensor.device,
    )
    _check_blocks(tensor)


def _check_blocks(tensor: QuantTensor) -> None:
    kind = tensor.format
    row_bytes = tensor.shape[-1] // kind.block_values * kind.block_bytes
    check_launch(
        tensor.raw,
        f"blocks of {tensor.name}",
        dtypes=(torch.uint8,),
        shape=(math.prod(tensor.shape[:-1]), row_bytes),
        device=tensor.device,
    )


def _warps(n_programs: int, n_parts: int, layout: Layout) -> int:
    """Return how many warps share a row: enough to fill a device, none without parts."""
    warps = 1
    while warps < _MAX_WARPS and n_programs * warps < _FULL_WARPS:
        if _tile(layout, warps) >= n_parts:
            break
        warps *= 2
    return warps


def _tile(layout: Layout, n_warps: int) -> int:
    """Return how many parts that many warps take at once; whole blocks for every format."""
    return n_warps * _WARP * layout.grain // layout.lanes


def _parts(tensor: QuantTensor, layout: Layout) -> int:
    return tensor.raw.shape[1] // layout.block_bytes * layout.parts


def _table(tensor: QuantTensor) -> torch.Tensor:
    """Return the codebook of a format that has one; other kernels do not look at it."""
    return table(_codebook, tensor.device) if tensor.format.name == "IQ2_XXS" else tensor.raw


def _codebook() -> torch.Tensor:
    """Return the magnitudes of IQ2_XXS, uint8 `[256, 8]`."""
    source: Any = quants.IQ2_XXS
    source.init_grid()
    return torch.from_numpy(source.grid.reshape(256, 8)).to(torch.uint8)


def _device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make a tensor's device the one that Triton launches on."""
    if tensor.device.type == "cuda":
        return torch.cuda.device(tensor.device)
    return nullcontext()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _kernels() -> ModuleType:
    # not at the top: Triton is absent on some platforms, and takes time to import
    return importlib.import_module("ds4py.kernels.cuda.gemm")
