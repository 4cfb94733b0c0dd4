"""Tell protocols apart by the first bytes of a caller.

Owns: the look. Refuses to know: any protocol beyond its first word. Invariant: no byte is consumed,
so anyone who gets the stream, or its socket, reads from its start.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final

from ds4py.transport.stream import PlainStream

WORD_BYTES: Final = 4
_PAUSE: Final = 0.005


def first_word(stream: PlainStream, words: Collection[bytes], *, deadline: float) -> bytes | None:
    """Wait for the first word of a caller.

    Args:
        stream: Freshly accepted.
        words: What is known, of four bytes each.
        deadline: Of `time.monotonic`.

    Returns:
        The word, if it is one of `words`; nothing (b"") if the caller begins otherwise; None if it
        said too little in time, or hung up.
    """
    while time.monotonic() < deadline:
        ended = stream.ended  # asked first: what is seen after that is all there will be
        try:
            seen = stream.peek(WORD_BYTES, deadline)
        except OSError:
            return None
        if not seen:
            return None
        if seen in words:
            return seen
        if not any(word.startswith(seen) for word in words):
            return b""
        if ended:
            return None
        time.sleep(_PAUSE)  # a part of a word: peeking returns at once, so wait for the rest
    return None
