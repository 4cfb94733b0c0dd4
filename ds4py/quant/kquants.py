"""Super-blocks of 256 values with two levels of scales: Q2_K to Q6_K.

Owns: their layouts, given in each decoder's docstring as byte ranges. In all of them the value is
the group's scale times a small code, minus the group's minimum where there is one; the products
are exact in float32, so only the final difference rounds.

Codes of one half of a super-block (128 values) share bytes: field `f` of byte `i` belongs to value
`32 f + i`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from ds4py.quant.bits import halves, planes, words32


def q2_k(blocks: torch.Tensor) -> torch.Tensor:
    """Decode Q2_K: uint8 `[N, 84]` -> float32 `[N, 256]`.

    0-15 scale (low nibble) and minimum (high nibble) of each 16 values, 16-79 codes of 2 bits,
    80-81 d, 82-83 dmin.
    """
    codes = planes(blocks[:, 16:80].reshape(-1, 2, 32), 2)
    words = words32(blocks, 0, 4)
    pairs = torch.stack((words, words >> 4)).bitwise_and_(0x0F0F0F0F)
    return _scaled(codes, *_with_factors(pairs, halves(blocks, 80, 2)))


def q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """Decode Q3_K: uint8 `[N, 110]` -> float32 `[N, 256]`.

    0-31 high bits of the codes (bit `b` of byte `i` belongs to value `32 b + i`), 32-95 low two
    bits, 96-107 sixteen 6-bit scales (eight bytes of low nibbles, four of high 2-bit fields),
    108-109 d. Codes are stored plus 4, scales plus 32.
    """
    low = planes(blocks[:, 32:96].reshape(-1, 2, 32), 2)
    high = planes(blocks[:, :32], 1).view(-1, 2, 4, 32)
    codes = low.bitwise_or_(high << 2).view(torch.int8).sub_(4)
    scale = planes(blocks[:, 96:104], 4).flatten(1)
    scale.bitwise_or_(planes(blocks[:, 104:108], 2).flatten(1) << 4)
    scale = scale.view(torch.int8).sub_(32).to(torch.float32).mul_(halves(blocks, 108))
    return _scaled(codes, scale)


def q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """Decode Q4_K: uint8 `[N, 144]` -> float32 `[N, 256]`.

    0-1 d, 2-3 dmin, 4-15 scales and minima, 16-143 codes: each 32 bytes hold 32 values in their
    low and the next 32 in their high nibbles.
    """
    codes = planes(blocks[:, 16:].reshape(-1, 4, 32), 4)
    return _scaled(codes, *scales_and_minima(blocks))


def q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """Decode Q5_K: uint8 `[N, 176]` -> float32 `[N, 256]`.

    As Q4_K, with the fifth bits at 16-47 (bit `b` of byte `i` belongs to value `32 b + i`) and the
    low nibbles at 48-175.
    """
    codes = planes(blocks[:, 48:].reshape(-1, 4, 32), 4)
    codes.bitwise_or_(planes(blocks[:, 16:48], 1).view(-1, 4, 2, 32) << 4)
    return _scaled(codes, *scales_and_minima(blocks))


def q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """Decode Q6_K: uint8 `[N, 210]` -> float32 `[N, 256]`.

    0-127 low nibbles (64 bytes per half: 64 values in the low, 64 in the high nibbles), 128-191
    high two bits, 192-207 signed scale of each 16 values, 208-209 d. Codes are stored plus 32.
    """
    codes = planes(blocks[:, :128].reshape(-1, 2, 64), 4).view(-1, 2, 4, 32)
    codes.bitwise_or_(planes(blocks[:, 128:192].reshape(-1, 2, 32), 2) << 4)
    scale = blocks[:, 192:208].view(torch.int8).to(torch.float32).mul_(halves(blocks, 208))
    return _scaled(codes.view(torch.int8).sub_(32), scale)


def scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 scales and minima `[N, 8]` of Q4_K and Q5_K.

    Of the twelve bytes, the first four hold scales 0-3 and the next four minima 0-3 in their low
    six bits; the last four hold the low nibbles of scales 4-7 and, in the high nibble, of minima
    4-7, whose upper two bits are the upper two bits of the first eight bytes.
    """
    words = words32(blocks, 4, 3).t().contiguous()
    first, last = words[:2], words[2]
    upper = (first >> 2).bitwise_and_(0x30303030)
    upper |= torch.stack((last, last >> 4)).bitwise_and_(0x0F0F0F0F)
    low = first & 0x3F3F3F3F
    return _with_factors(torch.stack((low, upper), 2), halves(blocks, 0, 2))


def _with_factors(codes: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 scales and minima `[N, groups]`.

    `codes` is int32 `[2, N, groups / 4]`, the bytes of all scales before those of all minima;
    `factors` is float32 `[N, 2]`.
    """
    values = codes.view(torch.uint8).to(torch.float32).mul_(factors.t().unsqueeze(2))
    return values[0], values[1]


def _scaled(
    codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `scale * codes - minimum`: codes of 256 values per block, `[N, groups]` factors."""
    groups = scale.shape[1]
    values = codes.view(-1, groups, 256 // groups).to(torch.float32)
    values.mul_(scale.unsqueeze(-1))
    if minimum is not None:
        values.sub_(minimum.unsqueeze(-1))
    return values.view(-1, 256)


DECODERS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
