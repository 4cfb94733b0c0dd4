"""Microscaling blocks of 4-bit floats (E2M1) with an 8-bit scale: MXFP4, NVFP4.

Owns: their layouts. Scales are read from tables of 256 entries, because a scale is one byte. The
tables hold half the nominal scale and the codes twice the nominal value, so that codes are
integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch

from ds4py.quant.bits import lookup16, planes, table

_E2M1_DOUBLED: Final = (0, 1, 2, 3, 4, 6, 8, 12)


def mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Decode MXFP4: uint8 `[N, 17]` -> float32 `[N, 32]`.

    0 exponent of the scale (a power of two), 1-16 codes: value `i` in the low and value `i + 16`
    in the high nibble of byte `i`.
    """
    scale = _scales(table(_e8m0_halved, blocks.device), blocks[:, :1])
    return lookup16(_e2m1, planes(blocks[:, 1:], 4)).flatten(1).to(torch.float32).mul_(scale)


def nvfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Decode NVFP4: uint8 `[N, 36]` -> float32 `[N, 64]`.

    0-3 scales of each 16 values, 4-35 codes, eight bytes for each 16 values: value `i` in the low
    and value `i + 8` in the high nibble of byte `i`.
    """
    scale = _scales(table(_ue4m3_halved, blocks.device), blocks[:, :4]).unsqueeze(-1)
    codes = planes(blocks[:, 4:].reshape(-1, 4, 8), 4).flatten(2)
    return lookup16(_e2m1, codes).to(torch.float32).mul_(scale).flatten(1)


def _scales(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return `values[codes]`: float32 `[256]`, uint8 `[N, G]` -> float32 `[N, G]`."""
    return values.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def _e2m1() -> torch.Tensor:
    return torch.tensor([*_E2M1_DOUBLED, *(-v for v in _E2M1_DOUBLED)], dtype=torch.int8)


def _e8m0_halved() -> torch.Tensor:
    """Half of `2 ** (code - 127)`; code 255 is no NaN here, like everywhere in GGML."""
    return torch.tensor([math.ldexp(0.5, code - 127) for code in range(256)], dtype=torch.float32)


def _ue4m3_halved() -> torch.Tensor:
    """Half of the E4M3 magnitude; the sign bit is ignored, and 0x7f (NaN) counts as 0."""
    return torch.tensor([_ue4m3(code) / 2 for code in range(256)], dtype=torch.float32)


def _ue4m3(code: int) -> float:
    exponent, fraction = (code >> 3) & 15, code & 7
    if code == 0x7F:
        return 0.0
    if exponent == 0:
        return math.ldexp(fraction, -9)
    return math.ldexp(8 + fraction, exponent - 10)


DECODERS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "MXFP4": mxfp4,
    "NVFP4": nvfp4,
}
