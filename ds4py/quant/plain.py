"""Types without blocks: floats and integers, one value after the other.

Owns: their torch dtypes. Invariant: a value is converted to float32 once, by rounding to nearest;
F16, BF16 and small integers are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch

NATIVE: Final = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""The torch dtype whose memory layout equals the type's."""


def _decode(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 `[N, size]` -> float32 `[N, 1]`."""
    return blocks.clone(memory_format=torch.contiguous_format).view(dtype).to(torch.float32)


DECODERS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    name: partial(_decode, dtype=dtype) for name, dtype in NATIVE.items()
}
