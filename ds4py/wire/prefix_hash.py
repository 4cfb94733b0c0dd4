"""The rolling hash over a token prefix that travels with each span (wire-protocol.md#prefix-hash).

Owns: the two constants and the arithmetic. Refuses to know: who compares. Invariant:
`extend(extend(INIT, a), b) == extend(INIT, a + b)`.

It is FNV-1a over four *little-endian* bytes a token (although tokens travel big-endian) with a
start value of its own, so FNV libraries do not match.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

INIT: Final = 0x14650FB0739D0383
"""Hash of the empty prefix."""

_PRIME: Final = 0x100000001B3
_MASK: Final = 2**64 - 1
# A zero byte only multiplies: runs of leading zero bytes collapse into one multiplication.
_PRIME_2: Final = _PRIME**2 & _MASK
_PRIME_3: Final = _PRIME**3 & _MASK


def extend(h: int, tokens: Iterable[int]) -> int:
    """Return the hash of a prefix with hash `h` followed by `tokens` (each 0 to 2^32-1)."""
    for token in tokens:
        h = (h ^ token & 0xFF) * _PRIME & _MASK
        if token < 1 << 16:
            h = (h ^ token >> 8) * _PRIME_3 & _MASK
        elif token < 1 << 24:
            h = (h ^ token >> 8 & 0xFF) * _PRIME & _MASK
            h = (h ^ token >> 16) * _PRIME_2 & _MASK
        else:
            h = (h ^ token >> 8 & 0xFF) * _PRIME & _MASK
            h = (h ^ token >> 16 & 0xFF) * _PRIME & _MASK
            h = (h ^ token >> 24) * _PRIME & _MASK
    return h


def prefix_hash(tokens: Iterable[int]) -> int:
    """Return the hash of a whole prefix."""
    return extend(INIT, tokens)
