"""The table of tensor types: GGML type id -> name, block size, decoder.

Owns: `QuantFormat` and the list of what ds4py can decode. Refuses to know: tensors, files, the bit
layout of any block (one file per block family owns that). Invariant: every entry's sizes are those
of the GGUF standard, and every decoder maps uint8 `[N, block_bytes]` to float32
`[N, block_values]` on the same device without waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from ds4py.errors import UnsupportedQuantError
from ds4py.gguf import kinds
from ds4py.quant import fp4, iquants, kquants, legacy, plain, ternary

Decoder = Callable[[torch.Tensor], torch.Tensor]
"""uint8 `[N, block_bytes]` -> float32 `[N, block_values]`, same device, input not changed."""


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """One tensor type of GGUF.

    Args:
        name: GGML's name, such as "Q4_1".
        type_id: GGML's tensor type id.
        block_values: Values per block.
        block_bytes: Bytes per block.
        decode: uint8 `[N, block_bytes]` to float32 `[N, block_values]`.
    """

    name: str
    type_id: int
    block_values: int
    block_bytes: int
    decode: Decoder


def _table() -> Mapping[int, QuantFormat]:
    families = (plain, legacy, kquants, ternary, fp4, iquants)
    decoders = {name: decode for family in families for name, decode in family.DECODERS.items()}
    return MappingProxyType(
        {
            type_id: QuantFormat(
                name, type_id, kinds.block_values(type_id), kinds.block_bytes(type_id), decode
            )
            for type_id in kinds.known_types()
            if (decode := decoders.get(name := kinds.type_name(type_id)))
        }
    )


FORMATS: Final = _table()
"""Every tensor type that can be decoded, by type id."""


def format_of(type_id: int, *, tensor: str) -> QuantFormat:
    """Return the format of a tensor type.

    Args:
        type_id: GGML tensor type id, as read from a file.
        tensor: Name of the tensor that has it, for the error.

    Raises:
        UnsupportedQuantError: ds4py has no decoder for this type.
    """
    if found := FORMATS.get(type_id):
        return found
    supported = ", ".join(known.name for known in FORMATS.values())
    raise UnsupportedQuantError(
        f"tensor {tensor!r}: got type {type_id} ({kinds.type_name(type_id)}), "
        f"expected one that can be decoded: {supported}; requantize the model to one of these"
    )
