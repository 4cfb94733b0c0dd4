# mypy: ignore-errors
# ruff: noqa: RET505
"""What the bits of a block mean, in Triton.

Owns: codes, scale and offset of one plane of some parts (`layouts.py`), one function per format.
Refuses to know: rows, columns, products. Invariant: `scale * code + offset`, rounded once, is the
decoder's float32 value bit by bit: all products before the last sum are exact.

The functions are written for any leading axes: `block` points to the first byte of each part's
block `[..., C, 1]`, `part` is its number there, `lane` counts `[..., 1, L]`; parts that are not
`inside` are zero. They return float32 codes `[..., C, L]`, scale and offset `[..., C, 1]`.

Bodies are Triton's language and not Python: mypy has no say here, and branches of which one is
compiled need their `else`.
"""

import triton
import triton.language as tl


@triton.jit
def plane_of(block, part, lane, inside, table, FORMAT: tl.constexpr, PLANE: tl.constexpr):
    """Return codes, scale and offset of one plane; `table` is IQ2_XXS's codebook."""
    if FORMAT == "Q8_0":
        return _q8_0(block, lane, inside)
    elif FORMAT == "Q4_0":
        return _q4_0(block, lane, inside, PLANE)
    elif FORMAT == "Q4_1":
        return _q4_1(block, lane, inside, PLANE)
    elif FORMAT == "Q2_K":
        return _q2_k(block, part, lane, inside, PLANE)
    elif FORMAT == "Q3_K":
        return _q3_k(block, part, lane, inside, PLANE)
    elif FORMAT == "Q4_K":
        return _q4_k(block, part, lane, inside, PLANE)
    elif FORMAT == "Q5_K":
        return _q5_k(block, part, lane, inside, PLANE)
    elif FORMAT == "Q6_K":
        return _q6_k(block, part, lane, inside, PLANE)
    else:
        tl.static_assert(FORMAT == "IQ2_XXS")
        return _iq2_xxs(block, part, lane, inside, table)


@triton.jit
def _byte(pointer, inside):
    return tl.load(pointer, mask=inside, other=0).to(tl.int32)


@triton.jit
def _word16(pointer, inside):
    return tl.load(pointer.to(tl.pointer_type(tl.uint16)), mask=inside, other=0).to(tl.int32)


@triton.jit
def _half(pointer, inside):
    pointer = pointer.to(tl.pointer_type(tl.float16))
    return tl.load(pointer, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _number(code, ZERO: tl.constexpr):
    """Return `code - ZERO` as float32, for codes below 2^23.

    The code becomes the mantissa of a number that counts in ones; the hardware adds several times
    as fast as it converts integers.
    """
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


# A field of a byte is masked but not shifted down: its code counts in units of the field's lowest
# bit, and the scale, of which there are fewer, is divided by that power of two.


@triton.jit
def _q8_0(block, lane, inside):
    codes = _byte(block + 2 + lane, inside) ^ 0x80
    scale = _half(block, inside)
    return _number(codes, 128), scale, tl.zeros_like(scale)


@triton.jit
def _q4_0(block, lane, inside, PLANE: tl.constexpr):
    UNIT: tl.constexpr = 16**PLANE
    codes = _byte(block + 2 + lane, inside) & (15 * UNIT)
    scale = _half(block, inside) * (1 / UNIT)
    return _number(codes, 8 * UNIT), scale, tl.zeros_like(scale)


@triton.jit
def _q4_1(block, lane, inside, PLANE: tl.constexpr):
    UNIT: tl.constexpr = 16**PLANE
    codes = _byte(block + 4 + lane, inside) & (15 * UNIT)
    return _number(codes, 0), _half(block, inside) * (1 / UNIT), _half(block + 2, inside)


@triton.jit
def _q2_k(block, part, lane, inside, PLANE: tl.constexpr):
    UNIT: tl.constexpr = 4**PLANE
    codes = _byte(block + 16 + part * 16 + lane, inside) & (3 * UNIT)
    pair = _byte(block + _group16(part, PLANE), inside)
    scale = _number(pair & 15, 0) * (1 / UNIT) * _half(block + 80, inside)
    minimum = _number(pair >> 4, 0) * _half(block + 82, inside)
    return _number(codes, 0), scale, -minimum


@triton.jit
def _q3_k(block, part, lane, inside, PLANE: tl.constexpr):
    low = (_byte(block + 32 + part * 16 + lane, inside) >> 2 * PLANE) & 3
    high = _byte(block + part % 2 * 16 + lane, inside) >> (part // 2 * 4 + PLANE)
    group = _group16(part, PLANE)
    nibble = (_byte(block + 96 + group % 8, inside) >> group // 8 * 4) & 15
    upper = (_byte(block + 104 + group % 4, inside) >> group // 4 * 2) & 3
    scale = _number(nibble | (upper << 4), 32) * _half(block + 108, inside)
    return _number(low | ((high & 1) << 2), 4), scale, tl.zeros_like(scale)


@triton.jit
def _q4_k(block, part, lane, inside, PLANE: tl.constexpr):
    UNIT: tl.constexpr = 16**PLANE
    codes = _byte(block + 16 + part * 32 + lane, inside) & (15 * UNIT)
    scale, offset = _six_bits(block, 2 * part + PLANE, inside)
    return _number(codes, 0), scale * (1 / UNIT), offset


@triton.jit
def _q5_k(block, part, lane, inside, PLANE: tl.constexpr):
    group = 2 * part + PLANE
    fifth = (_byte(block + 16 + lane, inside) >> group) & 1
    codes = (_byte(block + 48 + part * 32 + lane, inside) >> 4 * PLANE) & 15
    scale, offset = _six_bits(block, group, inside)
    return _number(codes | (fifth << 4), 0), scale, offset


@triton.jit
def _six_bits(block, group, inside):
    """Return scale and negative minimum of a group of 32 in Q4_K and Q5_K."""
    position = block + 4 + group % 4
    first, second = _byte(position, inside), _byte(position + 4, inside)
    last = _byte(position + 8, inside)
    lower = group < 4
    scale = tl.where(lower, first & 63, (last & 15) | (first >> 6 << 4))
    minimum = tl.where(lower, second & 63, (last >> 4) | (second >> 6 << 4))
    scale = _number(scale, 0) * _half(block, inside)
    return scale, -_number(minimum, 0) * _half(block + 2, inside)


@triton.jit
def _q6_k(block, part, lane, inside, PLANE: tl.constexpr):
    UNIT: tl.constexpr = 16 ** (PLANE // 2)
    half, side = part // 2, part % 2 * 16
    low = _byte(block + half * 64 + PLANE % 2 * 32 + side + lane, inside) & (15 * UNIT)
    high = _byte(block + 128 + half * 32 + side + lane, inside) << (4 - 2 * (PLANE % 2))
    codes = low | (high & (0x30 * UNIT))
    group = _byte(block + 192 + _group16(part, PLANE), inside) ^ 0x80
    scale = _number(group, 128) * (1 / UNIT) * _half(block + 208, inside)
    return _number(codes, 32 * UNIT), scale, tl.zeros_like(scale)


@triton.jit
def _group16(part, PLANE: tl.constexpr):
    """Number the groups of 16 values by which Q2_K, Q3_K and Q6_K are scaled."""
    return part // 2 * 8 + 2 * PLANE + part % 2


@triton.jit
def _iq2_xxs(block, part, lane, inside, table):
    pair = block + 2 + part // 4 * 8
    index = _byte(pair + part % 4, inside)
    word = _word16(pair + 4, inside) | (_word16(pair + 6, inside) << 16)
    signs = (word >> part % 4 * 7) & 127
    odd = signs ^ (signs >> 4)
    odd = odd ^ (odd >> 2)
    signs |= ((odd ^ (odd >> 1)) & 1) << 7
    magnitudes = _number(_byte(table + index * 8 + lane, inside), 0)
    codes = tl.where((signs >> lane) & 1 != 0, -magnitudes, magnitudes)
    scale = _number(((word >> 27) & 30) | 1, 0) * 0.125 * _half(block, inside)
    return codes, scale, tl.zeros_like(scale)
