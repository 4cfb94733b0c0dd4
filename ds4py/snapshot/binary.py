"""The bones of every payload: words in front, arrays behind them, all little-endian.

Owns: reading and checking named words, taking arrays off a body. Refuses to know: which words and
arrays a kind of payload has, models. Invariant: reading copies nothing.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ds4py.errors import SnapshotError

Buffer = bytes | bytearray | memoryview
Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U32 = npt.NDArray[np.uint32]

F32_LE: Final = np.dtype("<f4")
U32_LE: Final = np.dtype("<u4")
WORD: Final = 4
"""Bytes of a word."""

OTHER_MODEL: Final = "load it with the model that saved it"
DAMAGED: Final = "the payload is damaged: save the session again"


@dataclass(frozen=True, slots=True)
class HeaderForm:
    """One kind of payload.

    Args:
        name: Its four leading bytes.
        version: The one version that is known.
        fields: Names of the header's words; the first two are "magic" and "version".
    """

    name: str
    version: int
    fields: tuple[str, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the header."""
        return WORD * len(self.fields)

    @property
    def magic(self) -> int:
        """The first word."""
        return int.from_bytes(self.name.encode(), "little")

    def read(self, raw: memoryview) -> Header:
        """Return the header in front of a payload.

        Raises:
            SnapshotError: The bytes are too few or of another kind or version.
        """
        if len(raw) < self.n_bytes:
            raise SnapshotError(
                f"{self.name} payload: {len(raw)} bytes, expected a header of {self.n_bytes}; "
                f"{DAMAGED}"
            )
        words = struct.unpack_from(f"<{len(self.fields)}I", raw)
        header = Header(self, dict(zip(self.fields, words, strict=True)))
        header.expect("magic", self.magic, f"this is no {self.name} payload")
        header.expect("version", self.version, "save the session again with this program")
        return header

    def write(self, *words: int) -> bytes:
        """Return a header; `words` are those behind the version."""
        return struct.pack(f"<{len(self.fields)}I", self.magic, self.version, *words)


@dataclass(frozen=True, slots=True)
class Header:
    """A header's words by name.

    Args:
        form: The kind of payload.
        words: Unsigned 32-bit values.
    """

    form: HeaderForm
    words: dict[str, int]

    def expect(self, field: str, value: int, advice: str) -> None:
        """Raise `SnapshotError` unless a word has a value."""
        if self.words[field] != value:
            self._refuse(field, str(value), advice)

    def within(self, field: str, low: int, high: int, advice: str) -> None:
        """Raise `SnapshotError` unless a word is from `low` to `high`."""
        if not low <= self.words[field] <= high:
            self._refuse(field, f"{low} to {high}", advice)

    def _refuse(self, field: str, expected: str, advice: str) -> None:
        raise SnapshotError(
            f"{self.form.name} payload: {field} is {self.words[field]}, expected {expected}; "
            f"{advice}",
            offset=WORD * self.form.fields.index(field),
        )


class PayloadBody:
    """What follows a header, taken from front to back.

    Args:
        raw: The payload.
        form: Its kind.

    Attributes:
        at: Where the next values are, in bytes from the front of the payload.
    """

    def __init__(self, raw: memoryview, form: HeaderForm):
        self._raw = raw
        self._form = form
        self.at = form.n_bytes

    def expect(self, n_bytes: int, *, more: bool = False) -> None:
        """Raise `SnapshotError` unless so many bytes are left; with `more`, so many or more."""
        got, expected = len(self._raw), self.at + n_bytes
        if got < expected or (got > expected and not more):
            raise SnapshotError(
                f"{self._form.name} payload: {got} bytes, expected {expected}"
                f"{' or more' if more else ''}; "
                "it was cut short or something follows it: save the session again"
            )

    def take(self, dtype: np.dtype[Any], *shape: int) -> Array:
        """Return a view of the next values, which `expect` has made sure of."""
        array = np.frombuffer(self._raw, dtype, math.prod(shape), self.at).reshape(shape)
        self.at += array.nbytes
        return array


def as_bytes(array: Array, dtype: np.dtype[Any]) -> memoryview:
    """Return an array's memory, in row-major order."""
    return np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data
