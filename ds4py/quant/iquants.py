"""Blocks whose codes index codebooks: IQ1_S to IQ4_XS.

Owns: their layouts, given in each decoder's docstring as byte ranges. The codebooks are constants
of the formats and are taken from the `gguf` package when a device first needs them. Invariant: in
all of them the value is exact in float32 whatever the order of the products.

A codebook row holds the magnitudes of 8 (IQ1, IQ2) or 4 (IQ3) consecutive values; signs come from
their own bits, of which a 7-bit code stores the first seven and the eighth makes their number even.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from gguf import quants

from ds4py.quant.bits import (
    fields,
    halves,
    lookup,
    lookup16,
    planes,
    septets,
    steps,
    table,
    words16,
    words32,
)

_EIGHTH: Final = 0.125
"""IQ1 adds or subtracts this to every codebook value; `_shifted_grid` holds eight times the sum."""


def iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    """Decode IQ2_XXS: uint8 `[N, 66]` -> float32 `[N, 256]`.

    0-1 d, then for each 32 values 8 bytes: four codebook indices, and a word of four 7-bit sign
    codes under a 4-bit scale.
    """
    pairs = words32(blocks, 2, 16).view(-1, 2)
    index, words = (part.clone(memory_format=torch.contiguous_format) for part in pairs.unbind(1))
    # magnitudes and signs are one lookup, as the products of all pairs fit the second-level cache
    joined = torch.add(_bytes(index), _bytes(septets(words)), alpha=256)
    codes = lookup(table(_signed_grid, blocks.device), joined)
    return _scaled(codes, _top_scales(words.view(-1, 8), 0.125), blocks)


def iq2_xs(blocks: torch.Tensor) -> torch.Tensor:
    """Decode IQ2_XS: uint8 `[N, 74]` -> float32 `[N, 256]`.

    0-1 d, 2-65 a word of 16 bits for each 8 values (9-bit codebook index, 7-bit sign code), 66-73
    4-bit scales of each 16 values.
    """
    words = words16(blocks, 2, 32)
    codes = _codebook("IQ2_XS", words & 511).mul_(_signs7(words >> 9))
    return _scaled(codes, _half_steps(fields(blocks[:, 66:], 4), 0.25), blocks)


def iq2_s(blocks: torch.Tensor) -> torch.Tensor:
    """Decode IQ2_S: uint8 `[N, 82]` -> float32 `[N, 256]`.

    0-1 d, 2-33 low 8 bits of the codebook indices, 34-65 signs, 66-73 high 2 bits of the indices,
    74-81 4-bit scales of each 16 values.
    """
    index = _joined(blocks[:, 2:34], fields(blocks[:, 66:74], 2))
    codes = _codebook("IQ2_S", index).mul_(_signs8(blocks[:, 34:66]))
    return _scaled(codes, _half_steps(fields(blocks[:, 74:], 4), 0.25), blocks)


def iq3_xxs(blocks: torch.Tensor) -> torch.Tensor:
    """Decode IQ3_XXS: uint8 `[N, 98]` -> float32 `[N, 256]`.

    0-1 d, 2-65 codebook indices, 66-97 for each 32 values a word of four 7-bit sign codes under a
    4-bit scale.
    """
    words = words32(blocks, 66, 8)
    codes = _codebook("IQ3_XXS", blocks[:, 2:66]).view(-1, 8).mul_(_signs7(_bytes(septets(words))))
    return _scaled(codes, _top_scales(words, 0.25), blocks)


def iq3_s(blocks: torch.Tensor) -> torch.Tensor:
    """Decode IQ3_S: uint8 `[N, 110]` -> float32 `[N, 256]`.

    0-1 d, 2-65 low 8 bits of the codebook indices, 66-73 their ninth bits, 74-105 signs, 106-109
    4-bit scales of each 32 values.
    """
    index = _joined(blocks[:, 2:66], fields(blocks[:, 66:74], 1))
    codes = _codebook("IQ3_S", index).view(-1, 32, 8).mul_(_signs8(blocks[:, 74:106]))
    return _scaled(codes, _odd(fields(blocks[:, 106:], 4)), blocks)


def iq1_s(blocks: torch.Tensor) -> torch.Tensor:
    """Decode IQ1_S: uint8 `[N, 50]` -> float32 `[N, 256]`.

    0-1 d, 2-33 low 8 bits of the codebook indices, 34-49 for each 32 values a word of 16 bits:
    four times 3 high index bits, a 3-bit scale, and the direction of the shift.
    """
    words = words16(blocks, 34, 8)
    high = steps(words, 3) | (words >> 15 << 3).unsqueeze(-1)
    codes = lookup(table(_shifted_grid, blocks.device), _joined(blocks[:, 2:34], high.flatten(1)))
    return _scaled(codes, _odd((words >> 12) & 7).mul_(_EIGHTH), blocks)


def iq1_m(blocks: torch.Tensor) -> torch.Tensor:
    """Decode IQ1_M: uint8 `[N, 56]` -> float32 `[N, 256]`.

    0-31 low 8 bits of the codebook indices, 32-47 for each 8 values a nibble (3 high index bits,
    direction of the shift), 48-55 four words: 3-bit scales of each 16 values in the low twelve
    bits, one nibble of d in the upper four.
    """
    index = _joined(blocks[:, :32], fields(blocks[:, 32:48], 4))
    words = words16(blocks, 48, 4)
    scale = _odd(steps(words, 3).flatten(1)).mul_(_EIGHTH).mul_(_scattered_half(words))
    return _apply(lookup(table(_shifted_grid, blocks.device), index), scale)


def iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    """Decode IQ4_NL: uint8 `[N, 18]` -> float32 `[N, 32]`.

    0-1 d, 2-17 codes: value `i` in the low and value `i + 16` in the high nibble of byte `i`.
    """
    codes = lookup16(_iq4_values, planes(blocks[:, 2:], 4)).flatten(1)
    return codes.to(torch.float32).mul_(halves(blocks, 0))


def iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    """Decode IQ4_XS: uint8 `[N, 136]` -> float32 `[N, 256]`.

    0-1 d, 2-3 high 2 bits and 4-7 low 4 bits of the scales of each 32 values (stored plus 32),
    8-135 codes, 16 bytes for each 32 values as in IQ4_NL.
    """
    codes = lookup16(_iq4_values, planes(blocks[:, 8:].reshape(-1, 8, 16), 4))
    scale = fields(blocks[:, 4:8], 4).bitwise_or_(fields(blocks[:, 2:4], 2) << 4)
    return _scaled(codes, scale.to(torch.float32).sub_(32), blocks)


def _scaled(codes: torch.Tensor, factors: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return `codes * factors * d` where `d` is the block's first binary16 number.

    `factors` is float32 `[N, groups]` and is changed.
    """
    return _apply(codes, factors.mul_(halves(blocks, 0)))


def _apply(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply 256 codes a block with float32 scales `[N, groups]`."""
    groups = scale.shape[1]
    values = codes.view(-1, groups, 256 // groups).to(torch.float32)
    return values.mul_(scale.unsqueeze(-1)).view(-1, 256)


def _half_steps(scale: torch.Tensor, unit: float) -> torch.Tensor:
    return scale.to(torch.float32).add_(0.5).mul_(unit)


def _top_scales(words: torch.Tensor, unit: float) -> torch.Tensor:
    """Return `(2 s + 1) * unit` for the upper four bits `s` of int32 words."""
    odd = (words >> 27).bitwise_and_(30).bitwise_or_(1)  # the shift keeps the sign
    return odd.to(torch.float32).mul_(unit)


def _odd(scale: torch.Tensor) -> torch.Tensor:
    return scale.to(torch.float32).mul_(2).add_(1)


def _joined(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return indices of more than eight bits, int32."""
    return low | (high.to(torch.int32) << 8)


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """Return the bytes of int32 words as int32 `[4 * N]`."""
    return words.view(torch.uint8).view(-1).to(torch.int32)


def _signs7(codes: torch.Tensor) -> torch.Tensor:
    return lookup(table(_sign_rows, codes.device, 7), codes)


def _signs8(codes: torch.Tensor) -> torch.Tensor:
    return lookup(table(_sign_rows, codes.device, 8), codes)


def _sign_rows(n_bits: int) -> torch.Tensor:
    """Return int8 `[2 ** n_bits, 8]` of +-1; with 7 bits the number of minus signs is even."""
    codes = torch.arange(1 << n_bits)
    bits = (codes.unsqueeze(-1) >> torch.arange(8)) & 1
    if n_bits == 7:
        bits[:, 7] = bits.sum(1) % 2
    return (1 - 2 * bits).to(torch.int8)


def _scattered_half(words: torch.Tensor) -> torch.Tensor:
    """Collect a binary16 number from the upper nibbles of four words `[N, 4]`, lowest first."""
    number = words[:, 0] >> 12
    for i in (1, 2, 3):
        number = number | (words[:, i] >> 12 << 4 * i)
    return number.to(torch.int16).view(torch.float16).to(torch.float32).unsqueeze(-1)


def _codebook(name: str, index: torch.Tensor) -> torch.Tensor:
    """Return codebook rows: index `[N, ...]` -> int8 `[N, ..., 8 or 4]`."""
    return lookup(table(magnitudes, index.device, name), index)


def magnitudes(name: str) -> torch.Tensor:
    """Return a codebook of the `gguf` package, int8 `[K, 8 or 4]`."""
    source = getattr(quants, name)
    source.init_grid()
    return torch.from_numpy(source.grid.reshape(source.grid_shape)).to(torch.int8)


def _signed_grid() -> torch.Tensor:
    """Return the IQ2_XXS codebook with signs, int8 `[128 * 256, 8]`: row 256 * signs + index."""
    return (_sign_rows(7).unsqueeze(1) * magnitudes("IQ2_XXS")).view(-1, 8)


def _shifted_grid() -> torch.Tensor:
    """Return eight times the IQ1 codebook, shifted up, then shifted down: int8 `[4096, 8]`."""
    grid = magnitudes("IQ1_S") * 8
    return torch.cat((grid + 1, grid - 1))


def _iq4_values() -> torch.Tensor:
    return torch.tensor(quants.IQ4_NL.kvalues, dtype=torch.int8)


DECODERS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "IQ2_XXS": iq2_xxs,
    "IQ2_XS": iq2_xs,
    "IQ2_S": iq2_s,
    "IQ3_XXS": iq3_xxs,
    "IQ3_S": iq3_s,
    "IQ1_S": iq1_s,
    "IQ1_M": iq1_m,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
}
