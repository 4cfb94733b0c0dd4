"""Keys and values of one session in one layer, in any type that a cache can have.

Owns: the tensors of a cache for each type, 8-bit codes with their scales. Refuses to know:
attention, sessions. Invariant: in a type of floats, what is written is only rounded to it; so a
cache of the products' own type gives back exactly their numbers.

Codes are those of Q8_0: integers of 8 bits, and a float32 scale for every 32 values of a head (or
the largest part of 32 that divides its width), a 127th of the largest of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from ds4py.kernels.cache import LARGEST_CODE, SMALLEST_CODED, CacheTensor, block_size

_TOKENS: Final = 1  # the axis of a cache's tensors along which tokens lie


class KvRows(NamedTuple):
    """A session's cache in one layer: keys of all groups, then values.

    Args:
        values: `[2 G, C, D]`, float32, bfloat16, float16, or int8 codes.
        scales: Of codes: float32 `[2 G, C, D / block_size(D)]`.
    """

    values: torch.Tensor
    scales: torch.Tensor | None = None

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Store float32 `[2 G, T, D]` from position `start` on."""
        end = start + rows.shape[1]
        if self.scales is None:
            self.values[:, start:end].copy_(rows)
            return
        blocks = _blocks(rows, self.scales)
        largest = blocks.abs().amax(3)
        inverse = torch.where(largest < SMALLEST_CODED, 0.0, LARGEST_CODE / largest)
        codes = (blocks * inverse.unsqueeze(3)).round_()
        self.values[:, start:end].copy_(codes.flatten(2))
        torch.mul(largest, 1 / LARGEST_CODE, out=self.scales[:, start:end])

    def read(self, end: int, dtype: torch.dtype, start: int = 0) -> torch.Tensor:
        """Return the rows from `start` to `end` as floats `[2 G, T, D]`; may share memory."""
        values = self.values[:, start:end]
        if self.scales is None:
            return values.to(dtype)
        blocks = _blocks(values, self.scales) * self.scales[:, start:end].unsqueeze(3)
        return blocks.to(dtype).flatten(2)


def _blocks(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Part the values of each row by their scale: `[2 G, T, D]` to `[2 G, T, scales, values]`."""
    return rows.reshape(*rows.shape[:2], scales.shape[2], -1)


@dataclass(frozen=True, slots=True)
class KvForm:
    """How a layer keeps keys and values.

    Args:
        shape: `(2 G, C, D)`.
        dtype: float32, bfloat16, float16, or int8 for codes with scales.
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def has_scales(self) -> bool:
        """Whether a layer has a second tensor."""
        return self.dtype is torch.int8

    @property
    def n_tensors(self) -> int:
        """Tensors of a session's cache in this layer."""
        return 2 if self.has_scales else 1

    @property
    def values(self) -> CacheTensor:
        """The tensor of keys and values."""
        return CacheTensor(self.shape, self.dtype, _TOKENS)

    def tensors(self) -> list[CacheTensor]:
        """Describe a session's cache in this layer."""
        if not self.has_scales:
            return [self.values]
        planes, rows, width = self.shape
        scales = (planes, rows, width // block_size(width))
        return [self.values, CacheTensor(scales, torch.float32, _TOKENS)]
