"""The leading words of a payload, and whether this session can take what they announce.

Owns: the two headers and every check of a single field (docs/spec/deepseek4-model.md 9.1, 9.2).
Refuses to know: what follows a header. Invariant: after `Header.check` the number of tokens is
smaller than the session's context and the model is of the same shape.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from ds4py.errors import SnapshotError
from ds4py.snapshot.layout import CacheSizes, Capacities

_WORD: Final = 4
_SHARED: Final = (
    *("magic", "version", "ctx", "prefill_cap", "raw_cap", "raw_window", "comp_cap", "tokens"),
    *("layers", "head width", "index head width"),
)
_OTHER_MODEL: Final = "load it with the model that saved it"
_DAMAGED: Final = "the payload is damaged: save the session again"


@dataclass(frozen=True, slots=True)
class Form:
    """One kind of payload.

    Args:
        name: Its four leading bytes.
        version: The one version that is known.
        fields: Names of the header's words.
    """

    name: str
    version: int
    fields: tuple[str, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the header."""
        return _WORD * len(self.fields)

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
                f"{_DAMAGED}"
            )
        words = struct.unpack_from(f"<{len(self.fields)}I", raw)
        header = Header(self, dict(zip(self.fields, words, strict=True)))
        header.expect("magic", self.magic, f"this is no {self.name} payload")
        header.expect("version", self.version, "save the session again with this program")
        return header

    def write(self, sizes: CacheSizes, caps: Capacities, n_tokens: int, *rest: int) -> bytes:
        """Return a header; `rest` are the words after the index head width."""
        return struct.pack(
            f"<{len(self.fields)}I",
            *(self.magic, self.version, caps.n_ctx, caps.prefill_cap, caps.raw_cap),
            *(caps.raw_window, caps.comp_cap, n_tokens),
            *(sizes.n_layers, sizes.width, sizes.index_width),
            *rest,
        )


WHOLE: Final = Form("DSV4", 2, (*_SHARED, "vocab", "raw_live"))
"""A session of all layers."""

SHARD: Final = Form("DSVL", 1, (*_SHARED, "first layer", "last layer", "raw_live"))
"""A session's cache of some layers."""


@dataclass(frozen=True, slots=True)
class Header:
    """A header's words by name.

    Args:
        form: The kind of payload.
        words: Unsigned 32-bit values.
    """

    form: Form
    words: dict[str, int]

    @property
    def n_tokens(self) -> int:
        """Evaluated tokens."""
        return self.words["tokens"]

    @property
    def capacities(self) -> Capacities:
        """What the writer had room for."""
        return Capacities(
            n_ctx=self.words["ctx"],
            prefill_cap=self.words["prefill_cap"],
            raw_cap=self.words["raw_cap"],
            raw_window=self.words["raw_window"],
            comp_cap=self.words["comp_cap"],
        )

    def expect(self, field: str, value: int, advice: str) -> None:
        """Raise `SnapshotError` unless a word has a value."""
        if self.words[field] != value:
            self._refuse(field, str(value), advice)

    def within(self, field: str, low: int, high: int, advice: str) -> None:
        """Raise `SnapshotError` unless a word is from `low` to `high`."""
        if not low <= self.words[field] <= high:
            self._refuse(field, f"{low} to {high}", advice)

    def check(self, sizes: CacheSizes, n_ctx: int) -> None:
        """Check every word that both kinds of payload have; `prefill_cap` only informs.

        Args:
            sizes: Of the model that is to continue.
            n_ctx: Tokens that its session can hold.

        Raises:
            SnapshotError: The session can not be continued here.
        """
        own = Capacities.of(n_ctx, sizes.window)
        saved = self.capacities
        self.expect("layers", sizes.n_layers, _OTHER_MODEL)
        self.expect("head width", sizes.width, _OTHER_MODEL)
        self.expect("index head width", sizes.index_width, _OTHER_MODEL)
        longer = f"start with a context of at least {max(saved.n_ctx, self.n_tokens + 1)} tokens"
        self.within("ctx", 1, n_ctx, longer)
        self.within("tokens", 1, n_ctx - 1, longer)
        self.within("tokens", 1, saved.n_ctx, _DAMAGED)
        self.expect("raw_window", own.raw_window, _OTHER_MODEL)
        self.expect("raw_live", min(own.raw_window, self.n_tokens), _DAMAGED)
        self.within("raw_cap", self.words["raw_live"], (1 << 32) - 1, _DAMAGED)
        rows = max(sizes.compressed_rows(layer, self.n_tokens) for layer in range(sizes.n_layers))
        self.within("comp_cap", rows, own.comp_cap, _DAMAGED)

    def _refuse(self, field: str, expected: str, advice: str) -> None:
        at = _WORD * self.form.fields.index(field)
        raise SnapshotError(
            f"{self.form.name} payload: {field} is {self.words[field]}, expected {expected}; "
            f"{advice}",
            offset=at,
        )
