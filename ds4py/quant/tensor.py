"""A weight tensor that stays packed: raw blocks, format, logical shape.

Owns: the bytes, and the arithmetic between rows, blocks and bytes. Refuses to know: files, layers,
products. Invariant: `raw` is contiguous uint8 `[prod(shape[:-1]), bytes per row]` in memory of its
own, so that the file which the bytes came from may be unmapped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from ds4py.errors import ModelError
from ds4py.quant.formats import QuantFormat, format_of
from ds4py.quant.plain import NATIVE

# Values decoded at once. On the CPU a million is where the fixed cost of some ten operations
# stops to show and their temporaries still fit the caches (measured for 2^17 to 2^20); on an
# accelerator a chunk only bounds the temporary memory.
_CPU_CHUNK_VALUES: Final = 1 << 20
_DEVICE_CHUNK_VALUES: Final = 1 << 26

_UPLOAD_BYTES: Final = 64 << 20
"""Host memory that an upload to another device may take besides the tensor."""


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """Packed weights on one device.

    Args:
        name: The tensor's name in the file.
        format: How a block is laid out.
        shape: Row-major: `(rows, columns)`, `(experts, rows, columns)` or `(n,)`.
        raw: uint8 `[prod(shape[:-1]), bytes per row]`, contiguous.
    """

    name: str
    format: QuantFormat
    shape: tuple[int, ...]
    raw: torch.Tensor

    @classmethod
    def from_bytes(
        cls,
        name: str,
        type_id: int,
        shape: tuple[int, ...],
        data: memoryview,
        device: torch.device | str,
    ) -> QuantTensor:
        """Copy a tensor's bytes to `device`.

        Args:
            name: The tensor's name in the file.
            type_id: GGML tensor type id.
            shape: Logical shape, row-major, at least one axis.
            data: Exactly the tensor's bytes, contiguous; only read, and not kept.
            device: Where the packed weights shall live.

        Raises:
            UnsupportedQuantError: The type has no decoder.
            ModelError: The shape is not usable with the type, or `data` has another size.
        """
        kind = format_of(type_id, tensor=name)
        rows, row_bytes = _geometry(name, kind, shape)
        if data.nbytes != rows * row_bytes:
            raise ModelError(
                name,
                got=f"{data.nbytes} bytes",
                expected=f"{rows * row_bytes} bytes for {kind.name} of shape {shape}",
            )
        raw = _own(np.frombuffer(data, np.uint8), torch.device(device))
        return cls(name, kind, shape, raw.view(rows, row_bytes))

    @property
    def n_bytes(self) -> int:
        """Bytes of packed weights."""
        return self.raw.numel()

    @property
    def device(self) -> torch.device:
        """Where the packed weights live."""
        return self.raw.device

    def part(self, start: int, count: int) -> QuantTensor:
        """Return some rows of a matrix; shares the bytes."""
        raw = self.raw[start : start + count]
        return QuantTensor(self.name, self.format, (count, self.shape[-1]), raw)

    def expert(self, number: int) -> QuantTensor:
        """Return one matrix of `(experts, rows, columns)`; shares the bytes."""
        return self.part(number * self.shape[1], self.shape[1])

    def decode(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the whole tensor in its logical shape, in new memory."""
        return self._decoded(self.raw, dtype).view(self.shape)

    def rows(self, index: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Decode only some rows, as an embedding lookup does.

        Args:
            index: Row numbers, int32 or int64 `[T]` on the tensor's device; rows of all experts
                are numbered through. The caller has checked the range.
            dtype: Type of the result.

        Returns:
            `[T, columns]`, equal to `decode(dtype)` with the leading axes merged, at `index`.
        """
        return self._decoded(self.raw.index_select(0, index), dtype).view(-1, self.shape[-1])

    def _decoded(self, raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Decode packed rows `[R, bytes per row]` to flat `[R * columns]`."""
        if native := NATIVE.get(self.format.name):
            return _converted(raw.view(native), dtype).view(-1)
        blocks = raw.view(-1, self.format.block_bytes)
        n_blocks, block_values = blocks.shape[0], self.format.block_values
        on_cpu = raw.device.type == "cpu"
        step = (_CPU_CHUNK_VALUES if on_cpu else _DEVICE_CHUNK_VALUES) // block_values
        if n_blocks <= step:
            return self.format.decode(blocks).to(dtype).view(-1)
        values = torch.empty((n_blocks, block_values), dtype=dtype, device=raw.device)
        for start in range(0, n_blocks, step):
            values[start : start + step] = self.format.decode(blocks[start : start + step])
        return values.view(-1)


def _converted(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert plain values into new memory, without a detour so that large integers stay exact."""
    if (values.dtype, dtype) == (torch.float16, torch.bfloat16):
        values = values.to(torch.float32)  # torch's direct conversion is several times slower
    return values.to(dtype, copy=True)


def _geometry(name: str, kind: QuantFormat, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, bytes per row)."""
    if not shape or min(shape) < 1 or shape[-1] % kind.block_values:
        raise ModelError(
            name,
            got=f"shape {shape}",
            expected=f"positive axes, the last one a multiple of {kind.block_values} "
            f"for {kind.name}",
        )
    return math.prod(shape[:-1]), shape[-1] // kind.block_values * kind.block_bytes


def _own(source: np.ndarray[tuple[int], np.dtype[np.uint8]], device: torch.device) -> torch.Tensor:
    """Copy bytes to a device, with a bounded detour through host memory."""
    target = torch.empty(source.size, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        target.numpy()[:] = source
        return target
    for start in range(0, source.size, _UPLOAD_BYTES):
        piece = torch.tensor(source[start : start + _UPLOAD_BYTES])
        target[start : start + piece.numel()].copy_(piece)
    return target
