"""Hidden states between device tensors and packed bytes.

Owns: the vectorised 32-, 16- and 8-bit codec of docs/spec/wire-protocol.md section 9, on whatever
device the tensor is. Refuses to know: who asked. Invariant: bit by bit equal to the reference codec
in `ds4py.hidden`.

Narrowing happens on the device, so that only packed bytes cross to the host, and back.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from ds4py.hidden import HiddenBatch, unpack

_F16_NAN: Final = 0x7E00
_F16_SIGN: Final = -0x8000  # 0x8000 as int16
_MIN_NORMAL8: Final = 2.0**-6
_MAX_FINITE8: Final = 240.0
_CODE_MAX8: Final = 0x77


def download(hidden: torch.Tensor, bits: int) -> HiddenBatch:
    """Pack float32 `[T, W]` at 32, 16 or 8 bits into host memory.

    The batch's bytes are its own, unless `bits` is 32 and the tensor is on the CPU: then they are
    the tensor's.
    """
    rows, width = hidden.shape
    packed = _PACK[bits](hidden).contiguous().view(-1).view(torch.uint8).cpu()
    return HiddenBatch(rows, width, bits, packed.numpy().data)


def upload(batch: HiddenBatch, device: torch.device) -> torch.Tensor:
    """Return float32 `[T, W]` on the device, in memory of its own."""
    dtype = {32: np.float32, 16: np.float16, 8: np.uint8}[batch.bits]
    # copied first: the batch's bytes are lent, and may be read-only
    packed = torch.from_numpy(np.frombuffer(batch.data, dtype).copy()).to(device)
    return _UNPACK[batch.bits](packed).view(batch.rows, batch.width)


def pack16(values: torch.Tensor) -> torch.Tensor:
    """Round float32 to binary16, ties to even; NaN becomes 0x7e00 with the sign kept."""
    half = values.to(torch.float16)
    sign = (values.view(torch.int32) >> 16).to(torch.int16).bitwise_and_(_F16_SIGN)
    nan = sign.bitwise_or_(_F16_NAN).view(torch.float16)
    return nan.where(values.isnan(), half)


def pack8(values: torch.Tensor) -> torch.Tensor:
    """Round float32 to the 8-bit code, ties away from zero, saturating at 240; uint8."""
    raw = values.view(torch.int32)
    sign = (raw >> 24).bitwise_and_(0x80)
    magnitude = values.abs()
    # a carry out of the three fraction bits goes into the exponent, as it should
    eighths = ((raw & 0x7FFFFF) + (1 << 19)) >> 20
    normal = ((((raw >> 23) & 0xFF) - 120) << 3) + eighths
    # binary32 arithmetic on purpose: 0x3a7fffff must become code 1
    tiny = (magnitude * 512 + 0.5).floor_().nan_to_num_(0.0, 7.0).clamp_(max=7).to(torch.int32)
    code = tiny.where(magnitude < _MIN_NORMAL8, normal)
    saturated = (magnitude >= _MAX_FINITE8) | values.isnan()
    return (sign | code.masked_fill_(saturated, _CODE_MAX8)).to(torch.uint8)


def unpack16(codes: torch.Tensor) -> torch.Tensor:
    """Widen binary16 to float32; NaN keeps its payload."""
    exact = codes.to(torch.float32)
    # widening may quiet a signalling NaN; the format keeps its bits
    raw = codes.view(torch.int16).to(torch.int32)
    nan = ((raw & 0x8000) << 16) | 0x7F800000 | ((raw & 0x3FF) << 13)
    return nan.view(torch.float32).where(codes.isnan(), exact)


def unpack8(codes: torch.Tensor) -> torch.Tensor:
    """Look the 8-bit codes up; float32."""
    table = torch.from_numpy(unpack(bytes(range(256)), 8).copy()).to(codes.device)
    return table.index_select(0, codes.to(torch.int32))


def _same(values: torch.Tensor) -> torch.Tensor:
    return values


_PACK: Final = {32: _same, 16: pack16, 8: pack8}
_UNPACK: Final = {32: _same, 16: unpack16, 8: unpack8}
