"""What kernels know of a session's cache: its tensors, a batch's segments, rows of 8-bit codes.

Owns: `CacheTensor`, `Segment`, which values of a row share a scale. Refuses to know: layers, who
owns a cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One tensor of a session's cache.

    Args:
        shape: Shape for one session.
        dtype: Element type.
        token_axis: Axis along which the tokens' rows lie, the oldest first, as evenly as their
            number allows; None for memory that a session needs as a whole from its first token.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    token_axis: int | None = None


Cache = Sequence[torch.Tensor]
"""One session's cache, as described by `Slice.cache_layout`."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one session inside a batch.

    Args:
        cache: The session's cache: rows before `pos0` are read, rows from `pos0` written.
        pos0: Position of the first token.
        n_tokens: Tokens, at least 1.
    """

    cache: Cache
    pos0: int
    n_tokens: int


LARGEST_CODE: Final = 127.0
SMALLEST_CODED: Final = 1e-30
"""Blocks of smaller values count as zeros: the inverse of their scale may be no float32."""

_BLOCK: Final = 32


def block_size(width: int) -> int:
    """Return how many values of a head share a scale."""
    return math.gcd(width, _BLOCK)
