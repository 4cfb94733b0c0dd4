"""Torch's element types in Triton's words.

Owns: the types that caches have. Refuses to know: kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch
import triton.language as tl  # type: ignore[import-untyped]

from ds4py.errors import ModelError

_KINDS: Final[Mapping[torch.dtype, tl.dtype]] = MappingProxyType(
    {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
)


def kind_of(dtype: torch.dtype) -> tl.dtype:
    """Return Triton's name of a cache's element type.

    Raises:
        ModelError: Caches have no such type.
    """
    found = _KINDS.get(dtype)
    if found is None:
        known = ", ".join(str(one) for one in _KINDS)
        raise ModelError("cache", got=f"elements of {dtype}", expected=known)
    return found
