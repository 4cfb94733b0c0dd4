"""The one door through which memory reaches compiled code.

Owns: the checks that an address is worth taking, and holding on to the memory behind it. Refuses to
know: kernels. Invariant: behind an address that leaves this module lies memory of the stated type
and shape, without gaps, on the stated device, for as long as its `KernelBuffer` lives.

A kernel sees an address and sizes, nothing else: a column slice, a transpose or another type would
be read as something that it is not. So nothing else in ds4py asks a tensor for its address
(`tests/test_architecture.py` looks), and what does not fit raises. Nothing is copied here: whether
a copy is cheap enough is for the caller to decide, who can also arrange not to need one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import torch

from ds4py.errors import KernelError

ALIGNMENT: Final = 16
"""Bytes. torch's allocators begin there; kernels of a GPU load as much at once from a cache."""

_CPU: Final = torch.device("cpu")


class KernelBuffer:
    """Contiguous memory that compiled code may read and write; a view of a tensor, never a copy.

    Args:
        tensor: Any tensor; kept alive, not copied.
        dtype: The element type that it must have.
        name: What it is to the kernel, for the error.
        device: Where it must be.

    Attributes:
        tensor: The same tensor.
        dtype: Its element type.
        shape: Its shape.
        address: Of its first element, in bytes.
        row_bytes: Distance between the items of the first axis, in bytes.

    Raises:
        KernelError: It has another type, is elsewhere, or its elements do not lie side by side.
    """

    __slots__ = ("address", "dtype", "row_bytes", "shape", "tensor")

    def __init__(
        self, tensor: torch.Tensor, dtype: torch.dtype, name: str, device: torch.device = _CPU
    ):
        if tensor.dtype is not dtype or tensor.device != device or not tensor.is_contiguous():
            raise KernelError(
                name, got=_described(tensor), expected=f"contiguous {dtype} on {device}"
            )
        self.tensor = tensor
        self.dtype = dtype
        self.shape = tuple(tensor.shape)
        self.address: int = tensor.data_ptr()
        self.row_bytes = tensor.stride(0) * tensor.itemsize if self.shape else 0

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> KernelBuffer:
        """Return new memory of the process with arbitrary content."""
        return cls(torch.empty(tuple(shape), dtype=dtype), dtype, "new memory")

    def expect(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        """Check that a kernel may take it for what the kernel assumes.

        Args:
            name: What it is to the kernel, for the error.
            shape: The shape that it must have.
            dtype: The element type that it must have.

        Raises:
            KernelError: It has another one.
        """
        if self.shape != shape or self.dtype is not dtype:
            raise KernelError(
                name,
                got=f"{self.dtype} of shape {self.shape}",
                expected=f"{dtype} of shape {shape}",
            )

    def rows(self, start: int, end: int) -> KernelBuffer:
        """Return some items of the first axis; shares the memory."""
        return KernelBuffer(self.tensor[start:end], self.dtype, "rows", self.tensor.device)


def check_launch(
    tensor: torch.Tensor,
    name: str,
    *,
    dtypes: Collection[torch.dtype],
    shape: tuple[int | None, ...],
    device: torch.device,
    rows_apart: bool = False,
) -> torch.Tensor:
    """Check what goes to a Triton kernel, which takes the address itself.

    Args:
        tensor: Any tensor.
        name: What it is to the kernel, for the error.
        dtypes: The element types that it may have.
        shape: What it must have; None for an axis of any length.
        device: Where it must be.
        rows_apart: The kernel is told how far the items of the first axis are apart; only each of
            them must be contiguous.

    Returns:
        The same tensor.

    Raises:
        KernelError: Something differs.
    """
    fits = len(tensor.shape) == len(shape) and all(
        wanted is None or wanted == found for wanted, found in zip(shape, tensor.shape, strict=True)
    )
    dense = (tensor[:1] if rows_apart else tensor).is_contiguous()
    if not (fits and dense and tensor.dtype in dtypes and tensor.device == device):
        kinds = " or ".join(str(dtype) for dtype in dtypes)
        axes = ", ".join("any" if size is None else str(size) for size in shape)
        lying = "rows" if rows_apart else "memory"
        raise KernelError(
            name,
            got=_described(tensor),
            expected=f"{kinds} of shape ({axes}) on {device}, contiguous {lying}",
        )
    return tensor


def cache_address(tensor: torch.Tensor) -> int:
    """Return where a cache begins, for a kernel that reads caches through a table of addresses.

    The cache must stay where it is until the kernel has run.

    Raises:
        KernelError: Its elements do not lie side by side, or it begins between two loads.
    """
    address = KernelBuffer(tensor, tensor.dtype, "cache", tensor.device).address
    if address % ALIGNMENT:
        raise KernelError(
            "cache", got=f"address {address:#x}", expected=f"a multiple of {ALIGNMENT}"
        )
    return address


def _described(tensor: torch.Tensor) -> str:
    return (
        f"{tensor.dtype} of shape {tuple(tensor.shape)} with strides {tensor.stride()} "
        f"on {tensor.device}"
    )
