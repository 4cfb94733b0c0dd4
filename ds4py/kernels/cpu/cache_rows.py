"""Rows of a cache inside kernels, of any type that `layers.kv_cache` knows.

Owns: addresses of rows, code that reads 16 values and code that writes them. Refuses to know: what
keys and values are. Invariant: a row that a kernel wrote reads as the one that `KvRows.write` would
have written from the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch

from ds4py.kernels.cache import LARGEST_CODE, SMALLEST_CODED, block_size
from ds4py.kernels.cpu.jit import F32, I8, I16, I32, LANES, Code, Value, float_bits, vector

PARAMS: Final = ("cache", "scales", "room")
"""Parameters of a kernel that uses a cache: addresses of values and scales, rows of a plane."""


class CacheRows(Protocol):
    """Code for the rows of one cache, `width` values each."""

    def plane(self, number: Value) -> Value:
        """Return where the rows of a head begin."""

    def row(self, plane: Value, position: Value) -> Value:
        """Return where a row of a plane is."""

    def read(self, row: Value) -> list[Value]:
        """Read a row: float32 `[16]` each."""

    def write(self, row: Value, parts: Sequence[Value]) -> None:
        """Write a row from float32 `[16]` each."""


def cache_rows(k: Code, width: int, dtype: torch.dtype) -> CacheRows:
    """Return the code for a type of cache; `k` has the parameters `PARAMS`."""
    return _Codes(k, width) if dtype is torch.int8 else _Floats(k, width, dtype)


class _Floats:
    """Rows of float32, bfloat16 or binary16."""

    def __init__(self, k: Code, width: int, dtype: torch.dtype):
        self._k, self._width, self._dtype = k, width, dtype
        self._kind = vector(F32 if dtype is torch.float32 else I16, LANES)

    def plane(self, number: Value) -> Value:
        first = self._k.b.mul(number, self._k.integer("room"))
        return self.row(self._k.pointer("cache"), first)

    def row(self, plane: Value, position: Value) -> Value:
        return self._k.at(plane, position, self._dtype.itemsize * self._width)

    def read(self, row: Value) -> list[Value]:
        k, size = self._k, self._dtype.itemsize
        return [
            self._widened(k.load(self._kind, row, size * at)) for at in range(0, self._width, LANES)
        ]

    def write(self, row: Value, parts: Sequence[Value]) -> None:
        for number, part in enumerate(parts):
            self._k.store(self._narrowed(part), row, self._dtype.itemsize * LANES * number)

    def _widened(self, part: Value) -> Value:
        if self._dtype is torch.float32:
            return part
        return self._k.from_bfloat(part) if self._is_bfloat else from_halves(self._k, part)

    def _narrowed(self, part: Value) -> Value:
        if self._dtype is torch.float32:
            return part
        return self._k.to_bfloat(part) if self._is_bfloat else to_halves(self._k, part)

    @property
    def _is_bfloat(self) -> bool:
        return self._dtype is torch.bfloat16


class _Codes:
    """Rows of 8-bit codes, and beside them rows of scales."""

    def __init__(self, k: Code, width: int):
        self._k, self._width = k, width
        self._block = block_size(width)

    def plane(self, number: Value) -> tuple[Value, Value]:
        k, first = self._k, self._k.b.mul(number, self._k.integer("room"))
        return self.row((k.pointer("cache"), k.pointer("scales")), first)

    def row(self, plane: tuple[Value, Value], position: Value) -> tuple[Value, Value]:
        codes, scales = plane
        n_scales = self._width // self._block
        return self._k.at(codes, position, self._width), self._k.at(scales, position, 4 * n_scales)

    def read(self, row: tuple[Value, Value]) -> list[Value]:
        k, (codes, scales) = self._k, row
        parts = []
        for at in range(0, self._width, LANES):
            whole = k.b.sext(k.load(vector(I8, LANES), codes, at), vector(I32, LANES))
            scale = k.load(F32, scales, 4 * (at // self._block))
            parts.append(k.b.fmul(k.floats(whole), k.splat(scale)))
        return parts

    def write(self, row: tuple[Value, Value], parts: Sequence[Value]) -> None:
        per_block = self._block // LANES
        for start in range(0, len(parts), per_block):
            self._write_block(row, start, parts[start : start + per_block])

    def _write_block(self, row: tuple[Value, Value], start: int, parts: Sequence[Value]) -> None:
        k, b, (codes, scales) = self._k, self._k.b, row
        sizes = [k.magnitudes(part) for part in parts]
        largest = sizes[0]
        for size in sizes[1:]:
            largest = k.call("smax", largest, size)
        most = b.bitcast(k.reduce("smax", largest), F32)
        is_zero = b.fcmp_ordered("<", most, F32(SMALLEST_CODED))
        inverse = k.splat(b.select(is_zero, F32(0), b.fdiv(F32(LARGEST_CODE), most)))
        place = 4 * (start * LANES // self._block)
        k.store(b.fmul(most, F32(1 / LARGEST_CODE)), scales, place)
        for number, part in enumerate(parts, start):
            whole = b.fptosi(k.call("rint", b.fmul(part, inverse)), vector(I32, LANES))
            k.store(b.trunc(whole, vector(I8, LANES)), codes, LANES * number)


# --- binary16; by integers, as LLVM calls a library where an instruction is missing


def from_halves(k: Code, value: Value) -> Value:
    """Convert int16 `[n]` that are binary16 to float32."""
    b, n = k.b, value.type.count
    wide = b.shl(b.sext(value, vector(I32, n)), k.full(I32, n, 13))
    moved = b.and_(wide, k.full(I32, n, 0x8FFFE000))  # sign, exponent and digits at their places
    finite = b.fmul(b.bitcast(moved, vector(F32, n)), k.splat(2.0**112, n))
    other = b.bitcast(b.or_(moved, k.full(I32, n, 0x7F800000)), vector(F32, n))
    is_finite = b.fcmp_ordered("<", k.call("fabs", finite), k.splat(2.0**16, n))
    return b.select(is_finite, finite, other)


def to_halves(k: Code, value: Value) -> Value:
    """Round float32 `[n]` to the nearest binary16, as int16; ties go to the even one."""
    b, n = k.b, value.type.count
    ints, size = vector(I32, n), k.magnitudes(value)
    # an exponent counts from another place, then digits are dropped, rounding up into it if need be
    odd = b.and_(b.lshr(size, k.full(I32, n, 13)), k.full(I32, n, 1))
    up = b.add(odd, k.full(I32, n, 0xFFF - (112 << 23)))
    half = b.lshr(b.add(size, up), k.full(I32, n, 13))
    # next to 0.5, float32 has just the digits of the smallest binary16
    near = b.fadd(b.bitcast(size, value.type), k.splat(0.5, n))
    small = b.sub(b.bitcast(near, ints), k.full(I32, n, float_bits(0.5)))
    half = b.select(b.icmp_signed("<", size, k.full(I32, n, float_bits(2.0**-14))), small, half)
    infinite = b.icmp_signed(">=", size, k.full(I32, n, float_bits(2.0**16)))
    half = b.select(infinite, k.full(I32, n, 0x7C00), half)
    half = b.select(b.fcmp_unordered("uno", value, value), k.full(I32, n, 0x7E00), half)
    sign = b.and_(b.lshr(b.bitcast(value, ints), k.full(I32, n, 16)), k.full(I32, n, 0x8000))
    return b.trunc(b.or_(half, sign), vector(I16, n))
