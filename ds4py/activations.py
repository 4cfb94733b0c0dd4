"""The activation that travels between stages, and its 32-, 16- and 8-bit packing.

Owns: `HiddenBatch` (packed rows and what they mean) and the NumPy reference codec of
docs/spec/wire-protocol.md#packing. Refuses to know: who sends it, which device computed it.
Invariant: `len(data) == rows * width * bits / 8`, little-endian, row-major, no header.

The device has its own vectorised codec (`ds4py.engine.activation_codec`); a property test holds it
equal to this one bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ds4py.errors import ModelError

WIDTHS: Final = (32, 16, 8)
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HiddenBatch:
    """Packed hidden states of consecutive tokens.

    Args:
        rows: Number of tokens `T`.
        width: Values per token (`n_hc * n_embd` for DeepSeek V4, `n_embd` for others).
        bits: 32, 16 or 8.
        data: The packed bytes. The batch does not own them: its maker promises that
            they stay unchanged while it lives.
    """

    rows: int
    width: int
    bits: int
    data: memoryview

    def __post_init__(self) -> None:
        expected = self.rows * self.width * self.bits // 8
        if self.bits not in WIDTHS or self.data.nbytes != expected:
            raise ModelError(
                "hidden state",
                got=f"{self.data.nbytes} bytes at {self.bits} bits",
                expected=f"{expected} bytes for {self.rows} x {self.width} at 32, 16 or 8 bits",
            )

    @classmethod
    def pack(cls, values: F32, bits: int) -> HiddenBatch:
        """Pack `f32[T, width]` into `bits` per value (reference codec)."""
        rows, width = values.shape
        return cls(rows, width, bits, memoryview(pack(values, bits)).cast("B"))

    def head(self, rows: int) -> HiddenBatch:
        """Return the first rows; shares the bytes."""
        n_bytes = rows * self.width * self.bits // 8
        return HiddenBatch(rows, self.width, self.bits, self.data.cast("B")[:n_bytes])

    def unpack(self) -> F32:
        """Return the values as `f32[T, width]` (reference codec)."""
        return unpack(self.data, self.bits).reshape(self.rows, self.width)


def pack(values: F32, bits: int) -> bytes:
    """Pack float32 values at 32, 16 or 8 bits (wire-protocol.md#32-bit, #to-binary16, #8-bit)."""
    flat = np.ascontiguousarray(values, dtype="<f4").reshape(-1)
    if bits == 32:
        return flat.tobytes()
    return (_pack16(flat) if bits == 16 else _pack8(flat)).tobytes()


def unpack(data: memoryview | bytes, bits: int) -> F32:
    """Unpack packed values into flat float32 (wire-protocol.md#32-bit, #from-binary16, #8-bit)."""
    if bits == 32:
        return np.frombuffer(data, "<f4")
    if bits == 16:
        return np.frombuffer(data, "<f2").astype(np.float32)
    return _TABLE8[np.frombuffer(data, np.uint8)]


def _pack16(values: F32) -> npt.NDArray[np.uint16]:
    """Round to binary16, ties to even; NaN becomes 0x7e00 with the sign kept."""
    with np.errstate(over="ignore", invalid="ignore"):
        half = values.astype("<f2").view("<u2")
    sign = (values.view("<u4") >> 16).astype("<u2") & 0x8000
    return np.where(np.isnan(values), sign | 0x7E00, half).astype("<u2")


def _pack8(values: F32) -> npt.NDArray[np.uint8]:
    """Round to the 4-bit-exponent code, ties away from zero, saturating at 240 (not OCP E4M3)."""
    raw = values.view(np.uint32)
    sign = ((raw >> 31) << 7).astype(np.uint8)
    magnitude = np.abs(values)
    exponent = ((raw >> 23) & 0xFF).astype(np.int64) - 127
    eighths = ((raw & 0x7FFFFF).astype(np.int64) + (1 << 19)) >> 20  # 8 carries into the exponent
    with np.errstate(over="ignore", invalid="ignore"):
        # binary32 arithmetic on purpose: 0x3a7fffff must become code 1
        # (docs/spec/wire-protocol.md#8-bit)
        tiny = np.floor(magnitude * np.float32(512) + np.float32(0.5))
        small = np.minimum(np.nan_to_num(tiny, nan=0.0, posinf=7.0), 7).astype(np.int64)
    code = np.where(magnitude < np.float32(2.0**-6), small, ((exponent + 7) << 3) + eighths)
    saturated = ~np.isfinite(values) | (magnitude >= 240)
    return sign | np.where(saturated, 0x77, code).astype(np.uint8)


def _value8(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, fraction = (code >> 3) & 15, code & 7
    if exponent == 15:
        return sign * 240.0
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * float((1 + fraction / 8) * 2.0 ** (exponent - 7))


_TABLE8: Final[F32] = np.array([_value8(code) for code in range(256)], np.float32)
