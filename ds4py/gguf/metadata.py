"""A model's metadata with getters that know what they want.

Owns: turning a key into a value of the asked type, or into one clear error. Refuses to know: what a
key means. Invariant: a getter never converts silently, except for an integer where a float is
asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ds4py.errors import ModelError
from ds4py.gguf.kinds import MetaValue

Default = TypeVar("Default")
Value = TypeVar("Value")


class Metadata(Mapping[str, MetaValue]):
    """Key -> value of one model; plain mapping, plus typed getters.

    Every `get_*` returns its default when the key is absent and raises `ModelError` (key, got,
    expected) when the value has another type; every `require_*` raises when the key is absent too.

    Args:
        values: The parsed values; not copied.
        note: Appended to what a missing key's error says was found, such as "the first shard is
            missing".
    """

    def __init__(self, values: Mapping[str, MetaValue], note: str = ""):
        self._values = values
        self._note = note

    def __getitem__(self, key: str) -> MetaValue:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def get_int(self, key: str, default: Default) -> int | Default:
        """Return an integer, any width."""
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise self._mismatch(key, "an integer")

    def get_float(self, key: str, default: Default) -> float | Default:
        """Return a number as float; integers are accepted."""
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise self._mismatch(key, "a number")

    def get_bool(self, key: str, default: Default) -> bool | Default:
        """Return a boolean."""
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self._mismatch(key, "a boolean")

    def get_str(self, key: str, default: Default) -> str | Default:
        """Return a text (`surrogateescape` where the file is no valid UTF-8)."""
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, str):
            return value
        raise self._mismatch(key, "a text")

    def get_strings(self, key: str, default: Default) -> list[str] | Default:
        """Return an array of texts; the list is shared, do not change it."""
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, list):
            return value
        raise self._mismatch(key, "an array of texts")

    def get_ints(self, key: str, default: Default) -> npt.NDArray[np.int64] | Default:
        """Return an array of integers as `i64[n]`, a copy."""
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.integer):
            return value.astype(np.int64)
        raise self._mismatch(key, "an array of integers")

    def get_floats(self, key: str, default: Default) -> npt.NDArray[np.float32] | Default:
        """Return an array of floats as `f32[n]`, a copy."""
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating):
            return value.astype(np.float32)
        raise self._mismatch(key, "an array of floats")

    def require_int(self, key: str) -> int:
        """Return an integer that must be there."""
        return self._require(self.get_int(key, None), key, "an integer")

    def require_float(self, key: str) -> float:
        """Return a number that must be there; integers are accepted."""
        return self._require(self.get_float(key, None), key, "a number")

    def require_str(self, key: str) -> str:
        """Return a text that must be there."""
        return self._require(self.get_str(key, None), key, "a text")

    def require_strings(self, key: str) -> list[str]:
        """Return an array of texts that must be there; the list is shared."""
        return self._require(self.get_strings(key, None), key, "an array of texts")

    def _require(self, value: Value | None, key: str, expected: str) -> Value:
        if value is None:
            raise ModelError(f"metadata key {key}", got=f"nothing{self._note}", expected=expected)
        return value

    def _mismatch(self, key: str, expected: str) -> ModelError:
        return ModelError(f"metadata key {key}", got=_kind(self._values[key]), expected=expected)


def _kind(value: MetaValue) -> str:
    """Say what a value is, without printing all of it."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.size} {value.dtype.name}"
    if isinstance(value, list):
        return f"an array of {len(value)} texts"
    return f"{value!a:.60}"
