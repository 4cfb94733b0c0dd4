"""An architecture's metadata keys, with ranges.

Owns: reading one key into a size, a factor or one value per layer. Refuses to know: what a key
means. Invariant: a value that does not fit is refused with the key, what was found and what was
expected.
"""

from __future__ import annotations

from typing import Final, NoReturn

import numpy as np

from ds4py.errors import ModelError
from ds4py.gguf.metadata import Metadata
from ds4py.models.base import positive

_LARGEST: Final = 1e30


class MetadataKeys:
    """The keys below one prefix.

    Every method raises `ModelError` for a key that is missing (and has no default), of another
    type, or out of range.

    Args:
        metadata: All keys of the file.
        prefix: What stands before the dot.
    """

    def __init__(self, metadata: Metadata, prefix: str):
        self._metadata = metadata
        self._prefix = prefix

    def name(self, key: str) -> str:
        """Return the whole name of a key."""
        return f"{self._prefix}.{key}"

    def size(self, key: str, limit: int = 1 << 24, default: int | None = None) -> int:
        """Return an integer from 1 to `limit`."""
        if default is not None and self.name(key) not in self._metadata:
            return default
        return positive(self._metadata, self.name(key), limit)

    def count(self, key: str, limit: int, default: int | None = None) -> int:
        """Return an integer from 0 to `limit`."""
        value = self._metadata.get_int(self.name(key), default)
        if value is None:
            value = self.integer(key)
        if not 0 <= value <= limit:
            self.refuse(key, value, f"0 to {limit}")
        return value

    def divisor(self, key: str, of: int, what: str) -> int:
        """Return an integer that divides `of`."""
        value = self.size(key, of)
        if of % value:
            self.refuse(key, value, f"a divisor of {of} {what}")
        return value

    def above_zero(self, key: str, default: float | None = None) -> float:
        """Return a number above zero, rounded to float32."""
        value = self._metadata.get_float(self.name(key), default)
        if value is None:
            value = self._metadata.require_float(self.name(key))
        if not 0 < value < _LARGEST:
            self.refuse(key, value, "a positive number")
        return float(np.float32(value))

    def not_negative(self, key: str, default: float) -> float:
        """Return a number of at least zero, rounded to float32; zero switches something off."""
        value = self._metadata.get_float(self.name(key), default)
        if not 0 <= value < _LARGEST:
            self.refuse(key, value, "a number of at least 0")
        return float(np.float32(value))

    def floats(self, key: str, n_layers: int) -> tuple[float, ...]:
        """Return a number above zero for every layer; further ones are ignored."""
        values = self._metadata.get_floats(self.name(key), None)
        if values is None:
            self.refuse(key, "nothing", "an array of floats")
        self._check_length(key, len(values), n_layers)
        kept = values[:n_layers]
        bad = np.flatnonzero(~(np.isfinite(kept) & (kept > 0)))
        if bad.size:
            self.refuse(key, f"{kept[bad[0]]} for layer {bad[0]}", "a positive number")
        return tuple(kept.tolist())

    def integers(self, key: str, n_layers: int) -> tuple[int, ...]:
        """Return an integer for every layer; further ones are ignored."""
        values = self._metadata.get_ints(self.name(key), None)
        if values is None:
            self.refuse(key, "nothing", "an array of integers")
        self._check_length(key, len(values), n_layers)
        return tuple(values[:n_layers].tolist())

    def boolean(self, key: str) -> bool | None:
        """Return a boolean, None if the key is missing."""
        return self._metadata.get_bool(self.name(key), None)

    def integer(self, key: str) -> int:
        """Return an integer of any size."""
        return self._metadata.require_int(self.name(key))

    def refuse(self, key: str, got: object, expected: str) -> NoReturn:
        """Raise the error of a value that does not fit."""
        raise ModelError(f"metadata key {self.name(key)}", got=got, expected=expected)

    def _check_length(self, key: str, length: int, n_layers: int) -> None:
        if length < n_layers:
            self.refuse(key, f"{length} entries", f"one for each of {n_layers} layers")
