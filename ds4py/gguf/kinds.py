"""Tensor types and metadata value types: ids, names, block sizes, NumPy dtypes.

Owns: the tables, taken from the constants of the `gguf` package. Refuses to know: how a block is
decoded (quant/). Invariant: an id that is not in the tables is never guessed at; asking for its
size raises.

Importing this module imports `gguf` (about a tenth of a second), so commands import it in their
bodies, never at module level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)

from ds4py.errors import UnsupportedQuantError

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = int(GGUF_DEFAULT_ALIGNMENT)
ALIGNMENT_KEY: Final = "general.alignment"
MAX_DIMS: Final = 4

KIND_BOOL: Final = int(GGUFValueType.BOOL)
KIND_STRING: Final = int(GGUFValueType.STRING)
KIND_ARRAY: Final = int(GGUFValueType.ARRAY)

NUMERIC_KINDS: Final[dict[int, np.dtype[np.generic]]] = {
    int(kind): np.dtype(code)
    for kind, code in {
        GGUFValueType.UINT8: "<u1",
        GGUFValueType.INT8: "<i1",
        GGUFValueType.UINT16: "<u2",
        GGUFValueType.INT16: "<i2",
        GGUFValueType.UINT32: "<u4",
        GGUFValueType.INT32: "<i4",
        GGUFValueType.FLOAT32: "<f4",
        GGUFValueType.UINT64: "<u8",
        GGUFValueType.INT64: "<i8",
        GGUFValueType.FLOAT64: "<f8",
    }.items()
}
"""Metadata value type -> dtype on disk; booleans, strings and arrays are not in it."""

MetaValue = int | float | bool | str | list[str] | npt.NDArray[np.generic]
"""A metadata value: scalars as Python values, string arrays as lists, other arrays as NumPy."""

_SIZES: Final = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
_NAMES: Final = {int(kind): str(kind.name) for kind in GGMLQuantizationType if kind in _SIZES}
_IDS: Final = {name: kind for kind, name in _NAMES.items()}


def is_known(type_id: int) -> bool:
    """Tell whether the block size of a tensor type is known."""
    return type_id in _SIZES


def known_types() -> tuple[int, ...]:
    """Return every tensor type id whose block size is known, in ascending order."""
    return tuple(sorted(_SIZES))


def type_name(type_id: int) -> str:
    """Return the usual name of a tensor type, such as "Q4_1"; "type 99" if it has none."""
    return _NAMES.get(type_id, f"type {type_id}")


def type_id(name: str) -> int:
    """Return the id of a tensor type by its name.

    Raises:
        UnsupportedQuantError: No tensor type has this name.
    """
    if name not in _IDS:
        raise UnsupportedQuantError(f"tensor type {name!r}: unknown; expected one of {list(_IDS)}")
    return _IDS[name]


def block_values(type_id: int) -> int:
    """Return the number of weights in one block; raises as `tensor_bytes`."""
    return _sizes(type_id)[0]


def block_bytes(type_id: int) -> int:
    """Return the number of bytes of one block; raises as `tensor_bytes`."""
    return _sizes(type_id)[1]


def tensor_bytes(type_id: int, dims: Sequence[int]) -> int:
    """Return the packed size of a tensor in bytes.

    Args:
        type_id: Tensor type.
        dims: Dimensions in GGUF order, fastest first; the first is a multiple of the block.

    Raises:
        UnsupportedQuantError: The type is unknown, so its size is too.
    """
    values, size = _sizes(type_id)
    return math.prod(dims) // values * size


def _sizes(type_id: int) -> tuple[int, int]:
    sizes = _SIZES.get(type_id)
    if sizes is None:
        raise UnsupportedQuantError(
            f"tensor type {type_id}: unknown, so its size is too; "
            "convert the model to a type that ds4py knows, or update the gguf package"
        )
    return sizes
