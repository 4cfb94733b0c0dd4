"""Hidden states between device tensors and packed bytes.

Owns: the vectorised 32-, 16- and 8-bit codec of docs/spec/wire-protocol.md#packing, on whatever
device the tensor is. Refuses to know: who asked. Invariant: bit by bit equal to the reference codec
in `ds4py.activations`.

Narrowing happens on the device, so that only packed bytes cross to the host, and back. On a CPU,
comparisons and selections take ten times as long as arithmetic, so there are none where values are
finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from ds4py.activations import HiddenBatch

_F16_NAN: Final = 0x7E00
_F16_SIGN: Final = -0x8000  # 0x8000 as int16

# The 8-bit code is the upper half of a binary16 number 2^8 times as small: both have their least
# normal exponent there, so that subnormals need no case of their own.
_SCALE8: Final = 2.0**-8
_SHIFT8: Final = 7  # from the code to its place in the binary16 number
_HALF8: Final = 1 << (_SHIFT8 - 1)
_NORMAL8: Final = 8  # the least code of a normal number
_MAX8: Final = 0x77
_LARGEST8: Final = 240.0
_SIGN8: Final = 0x80
_KEPT8: Final = -1 << 19  # what decides the code: sign, exponent and four fraction bits of float32
_NO_SIGN_COPY8: Final = ~0x4000  # a code widened as a signed number has its sign here too
# Half of the last bit just below 2^-10 (scaled): 0x3a7fffff rounds up, as binary32 arithmetic makes
# it (docs/spec/wire-protocol.md#8-bit), and no larger number changes. Smaller ones may: their code
# is 0 in any case.
_NUDGE8: Final = torch.tensor(_SCALE8 * 2.0**-35, dtype=torch.float32)

_CPU_PIECE: Final = 1 << 16
"""Values converted at a time on a CPU: temporaries stay in its cache."""

_DEVICE_PIECE: Final = 1 << 24
"""Values converted at a time elsewhere: temporaries take little memory."""

_Step = Callable[[torch.Tensor, torch.Tensor], object]
"""Converts its first argument into its second one, contiguous and of the same shape."""


def download(hidden: torch.Tensor, bits: int) -> HiddenBatch:
    """Pack float32 `[T, W]` at 32, 16 or 8 bits into host memory.

    The batch's bytes are its own, unless `bits` is 32 and the tensor is on the CPU: then they are
    the tensor's.
    """
    rows, width = hidden.shape
    packed = pack(hidden, bits).view(-1).view(torch.uint8).cpu()
    return HiddenBatch(rows, width, bits, packed.numpy().data)


def upload(batch: HiddenBatch, device: torch.device) -> torch.Tensor:
    """Return float32 `[T, W]` on the device, in memory of its own."""
    dtype = {32: np.float32, 16: np.float16, 8: np.uint8}[batch.bits]
    codes = np.frombuffer(batch.data, dtype).reshape(batch.rows, batch.width)
    stays = batch.bits == 32 and device.type == "cpu"
    if stays or not codes.flags.writeable:  # torch takes no read-only memory
        codes = codes.copy()
    return unpack(torch.from_numpy(codes).to(device), batch.bits)


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Narrow float32 `[T, W]` where it is.

    Args:
        values: Any strides.
        bits: 32, 16 or 8.

    Returns:
        float32, float16 or uint8 `[T, W]`, contiguous; at 32 bits maybe `values` itself.
    """
    if bits == 32:
        return values.contiguous()
    step, dtype = (_pack16, torch.float16) if bits == 16 else (_pack8, torch.uint8)
    return _convert(step, values, dtype)


def unpack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Widen what `pack` returned, contiguous, to float32 `[T, W]`; at 32 bits it is `codes`."""
    if bits == 32:
        return codes
    return _convert(_unpack16 if bits == 16 else _unpack8, codes, torch.float32)


def _convert(step: _Step, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `[T, W]` of another type, made piece by piece."""
    target = torch.empty_like(source, dtype=dtype, memory_format=torch.contiguous_format)
    rows, width = source.shape
    n_values = _CPU_PIECE if source.device.type == "cpu" else _DEVICE_PIECE
    n_rows = max(1, n_values // max(1, width))
    for start in range(0, rows, n_rows):
        piece = slice(start, start + n_rows)
        step(source[piece], target[piece])
    return target


def _pack16(values: torch.Tensor, half: torch.Tensor) -> None:
    """Round to binary16, ties to even; NaN becomes 0x7e00 with the sign kept."""
    half.copy_(values)
    if _is_free_of_nan(values):
        return
    sign = (values.view(torch.int32) >> 16).to(torch.int16).bitwise_and_(_F16_SIGN)
    nan = sign.bitwise_or_(_F16_NAN).view(torch.float16)
    torch.where(values.isnan(), nan, half, out=half)


def _unpack16(codes: torch.Tensor, values: torch.Tensor) -> None:
    """Widen binary16; NaN keeps its payload, which converting may change."""
    values.copy_(codes)
    if _is_free_of_nan(values):
        return
    raw = codes.view(torch.int16).to(torch.int32)
    nan = ((raw & 0x8000) << 16) | 0x7F800000 | ((raw & 0x3FF) << 13)
    torch.where(codes.isnan(), nan.view(torch.float32), values, out=values)


def _is_free_of_nan(values: torch.Tensor) -> bool:
    """Whether there is surely no NaN; a GPU is not asked, because that means waiting for it."""
    return values.device.type == "cpu" and not math.isnan(values.sum().item())


def _pack8(values: torch.Tensor, codes: torch.Tensor) -> None:
    """Round to the 8-bit code, ties away from zero, saturating at 240."""
    scaled = torch.add(_NUDGE8, values.abs(), alpha=_SCALE8)
    # without the bits that decide nothing, becoming binary16 is no second rounding
    scaled.view(torch.int32).bitwise_and_(_KEPT8)
    half = scaled.to(torch.float16).view(torch.int16).clamp_max_(_MAX8 << _SHIFT8)
    # what is less than the least normal number does not round up to it; no other gets that high
    limit = half.sub((_NORMAL8 << _SHIFT8) - _NORMAL8).clamp_min_(_NORMAL8 - 1)
    half.add_(_HALF8).bitwise_right_shift_(_SHIFT8)
    torch.minimum(half, limit, out=half)
    minus = (values.view(torch.int32) >> 31).to(torch.int16)  # -1 or 0
    codes.copy_(half.sub_(minus, alpha=_SIGN8))


def _unpack8(codes: torch.Tensor, values: torch.Tensor) -> None:
    """Widen the 8-bit code; a full exponent means 240."""
    half = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(_SHIFT8)
    half.bitwise_and_(_NO_SIGN_COPY8)
    values.copy_(half.view(torch.float16)).mul_(1 / _SCALE8).clamp_(-_LARGEST8, _LARGEST8)
