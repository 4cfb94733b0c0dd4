"""How compiled kernels take blocks of weights apart.

Owns: for each format, the code that turns one block into small integers, and where its binary16
factors are. Refuses to know: what is done with them. Invariant: with the factors `d` and `m`,
`d * scale * code - m * minimum` is the value that the decoders in `ds4py.quant` give, up to
rounding; the layouts are told there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from ds4py.kernels.cpu.jit import I1, I8, I16, I32, I64, Code, Value, Words, vector
from ds4py.quant.iquants import magnitudes

GROUP: Final = 32
"""Values whose codes lie in one vector."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The integers of one block.

    Args:
        codes: int16 `[32]` for every 32 values.
        scales: int16 `[n]`, each for the same number of values; None: all are 1.
        minima: int16 `[n]`; None: all are 1, if the format has minima.
    """

    codes: list[Value]
    scales: Value | None = None
    minima: Value | None = None


@dataclass(frozen=True, slots=True)
class Factor:
    """A binary16 number in a block.

    Args:
        at: Byte where it is.
        unit: What it is multiplied with.
        n_bits: Its largest product with codes and scales is up to `2^n` times as large.
    """

    at: int
    unit: float
    n_bits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """A format that kernels understand.

    Args:
        n_values: Values of a block.
        n_bytes: Bytes of a block.
        code_bits: Codes are from `-2^n` to `2^n - 1`.
        scale_bits: Scales and minima too, for another `n`.
        d_at: Where in the block the factor of the scales is.
        m_at: Where the factor of the minima is; None: there are none.
        d_unit: What the factor is multiplied with.
        m_unit: As `d_unit`.
        wide: First byte and end of the codes, where products want the scales multiplied out.
        n_scales: Scales of a block, and minima if it has any; only with `wide`.
        paired: Whether codes are nibbles of 128 bytes in the order of Q4_K.
        take_apart: Writes the code that reads the block at an address.
    """

    n_values: int
    n_bytes: int
    code_bits: int
    scale_bits: int = 0
    d_at: int = 0
    m_at: int | None = None
    d_unit: float = 1.0
    m_unit: float = 1.0
    wide: tuple[int, int] | None = None
    n_scales: int = 0
    paired: bool = False
    take_apart: Callable[[Code, Value], Parts]

    @property
    def header(self) -> int:
        """Bytes of the multiplied scales and minima, int16, before the codes of a wide block."""
        return 2 * self.n_scales * (1 if self.m_at is None else 2)

    @property
    def kept_bytes(self) -> int:
        """Bytes that a block takes in memory."""
        return self.n_bytes if self.wide is None else self.header + self.wide[1] - self.wide[0]

    @property
    def factors(self) -> list[Factor]:
        """The factors of a block."""
        d = Factor(self.d_at, self.d_unit, self.code_bits + self.scale_bits)
        return [d] if self.m_at is None else [d, Factor(self.m_at, self.m_unit, self.scale_bits)]


def _bytes(k: Code, at: Value, offset: int, n: int) -> Value:
    return k.load(vector(I8, n), at, offset)


def _field(k: Code, value: Value, bit: int, n_bits: int, to: int = 0) -> Value:
    """Move some bits of every byte to another place."""
    n, moved = value.type.count, value
    if bit > to:
        moved = k.b.lshr(value, k.full(I8, n, bit - to))
    elif bit < to:
        moved = k.b.shl(value, k.full(I8, n, to - bit))
    return k.b.and_(moved, k.full(I8, n, ((1 << n_bits) - 1) << to))


def _low(k: Code, value: Value) -> Value:
    return _field(k, value, 0, 4)


def _high(k: Code, value: Value) -> Value:
    return _field(k, value, 4, 4)


def _nibbles(k: Code, at: Value, offset: int) -> Value:
    """Read 16 bytes: the low nibbles of all, then the high ones."""
    pairs = _bytes(k, at, offset, 16)
    return k.join(_low(k, pairs), _high(k, pairs))


def _unsigned(k: Code, codes: Value) -> Value:
    return k.b.zext(codes, vector(I16, codes.type.count))


def _signed(k: Code, codes: Value, less: int = 0) -> Value:
    if less:
        codes = k.b.sub(codes, k.full(I8, codes.type.count, less))
    return k.b.sext(codes, vector(I16, codes.type.count))


def _fifth_bits(k: Code, at: Value, offset: int) -> Value:
    """Read 32 bits as 32 bytes that are 16 or 0."""
    flags = k.b.bitcast(k.load(I32, at, offset), vector(I1, GROUP))
    return k.b.select(flags, k.full(I8, GROUP, 16), k.full(I8, GROUP, 0))


def _q4_0(k: Code, at: Value) -> Parts:
    return Parts([_signed(k, _nibbles(k, at, 2), 8)])


def _q4_1(k: Code, at: Value) -> Parts:
    return Parts([_unsigned(k, _nibbles(k, at, 4))])


def _q5_0(k: Code, at: Value) -> Parts:
    return Parts([_signed(k, k.b.or_(_nibbles(k, at, 6), _fifth_bits(k, at, 2)), 16)])


def _q5_1(k: Code, at: Value) -> Parts:
    return Parts([_unsigned(k, k.b.or_(_nibbles(k, at, 8), _fifth_bits(k, at, 4)))])


def _q8_0(k: Code, at: Value) -> Parts:
    return Parts([_signed(k, _bytes(k, at, 2, GROUP))])


def _scales_and_minima(k: Code, at: Value) -> tuple[Value, Value]:
    """Read the factors of Q4_K and Q5_K; see `quant.kquants.scales_and_minima`."""
    first, second, last = (_bytes(k, at, offset, 4) for offset in (4, 8, 12))
    scales = k.join(_field(k, first, 0, 6), k.b.or_(_low(k, last), _field(k, first, 6, 2, 4)))
    minima = k.join(_field(k, second, 0, 6), k.b.or_(_high(k, last), _field(k, second, 6, 2, 4)))
    return _unsigned(k, scales), _unsigned(k, minima)


def _q4_k(k: Code, at: Value) -> Parts:
    codes = []
    for number in range(4):
        pairs = _bytes(k, at, 16 + 32 * number, 32)
        codes += [_unsigned(k, _low(k, pairs)), _unsigned(k, _high(k, pairs))]
    return Parts(codes, *_scales_and_minima(k, at))


def _q5_k(k: Code, at: Value) -> Parts:
    fifth, codes = _bytes(k, at, 16, 32), []
    for number in range(4):
        pairs = _bytes(k, at, 48 + 32 * number, 32)
        for half, low in enumerate((_low(k, pairs), _high(k, pairs))):
            codes.append(_unsigned(k, k.b.or_(low, _field(k, fifth, 2 * number + half, 1, 4))))
    return Parts(codes, *_scales_and_minima(k, at))


def _q6_k(k: Code, at: Value) -> Parts:
    codes = []
    for half in range(2):
        low = [_bytes(k, at, 64 * half + 32 * part, 32) for part in range(2)]
        high = _bytes(k, at, 128 + 32 * half, 32)
        nibbles = [*(_low(k, part) for part in low), *(_high(k, part) for part in low)]
        for number, nibble in enumerate(nibbles):
            codes.append(_signed(k, k.b.or_(nibble, _field(k, high, 2 * number, 2, 4)), 32))
    return Parts(codes, _signed(k, _bytes(k, at, 192, 16)))


def _q2_k(k: Code, at: Value) -> Parts:
    codes = []
    for half in range(2):
        packed = _bytes(k, at, 16 + 32 * half, 32)
        codes += [_unsigned(k, _field(k, packed, 2 * number, 2)) for number in range(4)]
    factors = _bytes(k, at, 0, 16)
    return Parts(codes, _unsigned(k, _low(k, factors)), _unsigned(k, _high(k, factors)))


def _q3_k(k: Code, at: Value) -> Parts:
    high, codes = _bytes(k, at, 0, 32), []
    for half in range(2):
        packed = _bytes(k, at, 32 + 32 * half, 32)
        for number in range(4):
            third = _field(k, high, 4 * half + number, 1, 2)
            codes.append(_signed(k, k.b.or_(_field(k, packed, 2 * number, 2), third), 4))
    low, top = _bytes(k, at, 96, 8), _bytes(k, at, 104, 4)
    upper = [_field(k, top, bit, 2, 4) for bit in (0, 2, 4, 6)]
    nibbles = k.join(_low(k, low), _high(k, low))
    upper_bits = k.join(k.join(*upper[:2]), k.join(*upper[2:]))
    return Parts(codes, _signed(k, k.b.or_(nibbles, upper_bits), 32))


def _iq2_xxs(k: Code, at: Value) -> Parts:
    """Look eight values up at a time: magnitudes by one byte, signs by seven bits."""
    b, codes, scales = k.b, [], k.full(I16, 8, 0)
    grid, signs = k.constant(_iq2_xxs_grid), k.constant(_even_signs)
    for group in range(8):
        word = k.load(I32, at, 2 + 8 * group + 4)
        magnitudes, masks = k.full(I64, 4, 0), k.full(I64, 4, 0)
        for part in range(4):
            index = b.zext(k.load(I8, at, 2 + 8 * group + part), I64)
            sign = b.zext(b.and_(b.lshr(word, I32(7 * part)), I32(127)), I64)
            lane = I32(part)
            magnitudes = b.insert_element(magnitudes, k.load(I64, k.at(grid, index, 8)), lane)
            masks = b.insert_element(masks, k.load(I64, k.at(signs, sign, 8)), lane)
        values, flips = (b.bitcast(x, vector(I8, GROUP)) for x in (magnitudes, masks))
        codes.append(_signed(k, b.sub(b.xor(values, flips), flips)))
        odd = b.or_(b.shl(b.lshr(word, I32(28)), I32(1)), I32(1))
        scales = b.insert_element(scales, b.trunc(odd, I16), I32(group))
    return Parts(codes, scales)


def _even_signs() -> Words:
    """Return a mask of eight bytes, 0xff for minus, for each code of seven signs."""
    code = np.arange(128, dtype=np.uint8)[:, None]
    bits = np.unpackbits(code, axis=1, bitorder="little")
    bits[:, 7] = bits.sum(1) & 1
    return (bits * np.uint8(255)).view("<u8").ravel()


def _iq2_xxs_grid() -> Words:
    """Return the eight magnitudes of each codebook index, as bytes of a word."""
    return magnitudes("IQ2_XXS").numpy().view("<u8").ravel()


LAYOUTS: Final = {
    "Q4_0": BlockLayout(n_values=32, n_bytes=18, code_bits=3, take_apart=_q4_0),
    "Q4_1": BlockLayout(
        n_values=32, n_bytes=20, code_bits=4, m_at=2, m_unit=-1.0, take_apart=_q4_1
    ),
    "Q5_0": BlockLayout(n_values=32, n_bytes=22, code_bits=4, take_apart=_q5_0),
    "Q5_1": BlockLayout(
        n_values=32, n_bytes=24, code_bits=5, m_at=2, m_unit=-1.0, take_apart=_q5_1
    ),
    "Q8_0": BlockLayout(n_values=32, n_bytes=34, code_bits=7, take_apart=_q8_0),
    "Q2_K": BlockLayout(
        n_values=256, n_bytes=84, code_bits=2, scale_bits=4, d_at=80, m_at=82, take_apart=_q2_k
    ),
    "Q3_K": BlockLayout(
        n_values=256, n_bytes=110, code_bits=2, scale_bits=5, d_at=108, take_apart=_q3_k
    ),
    "Q4_K": BlockLayout(
        n_values=256,
        n_bytes=144,
        code_bits=4,
        scale_bits=6,
        m_at=2,
        wide=(16, 144),
        n_scales=8,
        paired=True,
        take_apart=_q4_k,
    ),
    "Q5_K": BlockLayout(
        n_values=256,
        n_bytes=176,
        code_bits=5,
        scale_bits=6,
        m_at=2,
        wide=(16, 176),
        n_scales=8,
        take_apart=_q5_k,
    ),
    "Q6_K": BlockLayout(
        n_values=256,
        n_bytes=210,
        code_bits=5,
        scale_bits=7,
        d_at=208,
        wide=(0, 192),
        n_scales=16,
        take_apart=_q6_k,
    ),
    "IQ2_XXS": BlockLayout(
        n_values=256, n_bytes=66, code_bits=6, scale_bits=5, d_unit=0.125, take_apart=_iq2_xxs
    ),
}
"""By the formats' names."""
