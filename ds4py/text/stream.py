"""Text that arrives in pieces of bytes: whole characters only, and nothing of a stop string.

Owns: incremental UTF-8 and the search for stop strings. Refuses to know: tokens, models, how the
text is sent. Invariant: however the same bytes are cut, the pieces of text add up to the same; no
piece contains half a character or any part of a stop string that ended the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """One reply's text, used by one thread at a time.

    Args:
        stop: Strings that end the text; empty ones are ignored. The one that begins first wins,
            and of those the first listed. It and everything after it are left out.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(filter(None, stop))
        self._held_back = max(map(len, self._stop), default=1) - 1
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""
        self._matched: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; nothing follows."""
        return self._matched is not None

    @property
    def matched(self) -> str | None:
        """The stop string that was found."""
        return self._matched

    def push(self, piece: bytes) -> str:
        """Take further bytes; return the text that is certain now.

        Bytes that are not UTF-8 become U+FFFD. As long as a stop string could begin in the last
        characters, those are held back.
        """
        return self._advance(self._decoder.decode(piece))

    def finish(self) -> str:
        """Return what was held back: no more bytes will come."""
        return self._advance(self._decoder.decode(b"", final=True), final=True)

    def _advance(self, text: str, *, final: bool = False) -> str:
        if self.stopped:
            return ""
        self._pending += text
        found = self._first_match()
        if found is not None and (final or not self._undecided_before(found)):
            start, index = found
            self._matched = self._stop[index]
            return self._release(start, drop_rest=True)
        return self._release(len(self._pending) - (0 if final else self._held_back))

    def _first_match(self) -> tuple[int, int] | None:
        """Find the best complete stop string as (where it begins, its place in the list)."""
        found = ((self._pending.find(stop), index) for index, stop in enumerate(self._stop))
        return min((match for match in found if match[0] >= 0), default=None)

    def _undecided_before(self, found: tuple[int, int]) -> bool:
        """Tell whether the end of the text may yet grow into a stop string that beats `found`."""
        length = len(self._pending)
        return any(
            (start, index) < found and stop.startswith(self._pending[start:])
            for index, stop in enumerate(self._stop)
            for start in range(max(0, length - len(stop) + 1), min(found[0] + 1, length))
        )

    def _release(self, n_characters: int, *, drop_rest: bool = False) -> str:
        n_characters = max(0, n_characters)
        text = self._pending[:n_characters]
        self._pending = "" if drop_rest else self._pending[n_characters:]
        return text
