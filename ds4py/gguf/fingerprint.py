"""A short name for the contents of a model file, without reading a weight.

Owns: what goes into it: every metadata key but those of the layout on disk, and name, type and
dimensions of every tensor. Refuses to know: who compares. Invariant: a file and its split form have
the same fingerprint, in whatever order their keys and tensors stand.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np

from ds4py.gguf.file import GgufFile
from ds4py.gguf.kinds import MetaValue

_DIGITS: Final = 32
_LAYOUT: Final = ("split.", "general.alignment")


def fingerprint(file: GgufFile) -> str:
    """Return 32 hexadecimal digits; empty while shards of the model are missing.

    Equal fingerprints do not prove equal weights: a fine-tuned model may keep all its metadata.
    """
    if file.missing_shards:
        return ""
    digest = hashlib.sha256()
    for key in sorted(file.metadata):
        if not key.startswith(_LAYOUT):
            for part in (_raw(key), *_pieces(file.metadata[key])):
                digest.update(b"%d:" % len(part))
                digest.update(part)
    for name in sorted(file.tensors):
        info = file.tensors[name]
        digest.update(_raw(f"{name}\0{info.type_id}\0{info.dims}\n"))
    return digest.hexdigest()[:_DIGITS]


def _pieces(value: MetaValue) -> tuple[bytes, bytes]:
    """Return the kind of a value and its contents."""
    if isinstance(value, np.ndarray):
        return value.dtype.str.encode(), value.tobytes()
    if isinstance(value, list):
        return b"texts", _raw("".join(f"{len(text)}:{text}" for text in value))
    return type(value).__name__.encode(), _raw(repr(value))


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
