"""Finding the tokens that are spelled out in a text, such as `<|im_end|>`.

Owns: cutting a text at spelled-out tokens. Refuses to know: what the tokens mean and how the rest
is tokenized. Invariant: the pieces, written one after another, are the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping


class Markers:
    """A set of spellings; at each position the longest one counts.

    Thousands of spellings cost no more than a few, since a position is only looked at when it
    starts with a first character of some spelling.

    Args:
        spellings: Spelling to token id; the empty spelling is ignored.
    """

    def __init__(self, spellings: Mapping[str, int]) -> None:
        self._ids = {spelling: id_ for spelling, id_ in spellings.items() if spelling}
        lengths: dict[str, set[int]] = {}
        for spelling in self._ids:
            lengths.setdefault(spelling[0], set()).add(len(spelling))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        self._starts = re.compile(f"[{''.join(map(re.escape, lengths))}]") if lengths else None

    def cut(self, text: str) -> Iterator[str | int]:
        """Yield the pieces of a text: ids of spelled-out tokens, and non-empty text between."""
        begin = position = 0
        while self._starts is not None and (start := self._starts.search(text, position)):
            position = start.start()
            length = self._match_length(text, position)
            if length == 0:
                position += 1
                continue
            if begin < position:
                yield text[begin:position]
            yield self._ids[text[position : position + length]]
            begin = position = position + length
        if begin < len(text):
            yield text[begin:]

    def _match_length(self, text: str, position: int) -> int:
        for length in self._lengths[text[position]]:
            if text[position : position + length] in self._ids:
                return length
        return 0
