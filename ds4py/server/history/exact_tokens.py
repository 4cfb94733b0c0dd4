"""What conversations look like when they come back, beside what the model really said.

Owns: pairs of a visible transcript (as a prompt would show it) and the exact tokens behind it, and
the prompts that go on from the latter (docs/spec/server-and-cli.md#matching-order). Refuses to
know: sessions, chat formats, text. Invariant: a prompt is only ever replaced by one that begins
with exact tokens and ends with the prompt's own; nothing is tokenized again.

Prompts differ from what was said for two reasons: formats leave old reasoning out, and a model may
spell a word by other tokens than a tokenizer would. Both break the prefix that a session holds.
Since an answer ends with a control token, the comparison is one of tokens: the transcript as the
format writes it, up to that token, is compared with the beginning of the prompt.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

Tokens = tuple[int, ...]
View = Callable[[], Sequence[int] | None]
"""Writes a visible transcript; None if the format's end of an answer is not found in it."""

_MAX_KEPT: Final = 256
_MAX_TOKENS: Final = 4_000_000
_MAX_BYTES: Final = 256 << 20


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens are equal."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))


class _Spoken:
    """One conversation: what was said, and what can be seen of it, written when first needed."""

    def __init__(self, tokens: Tokens, views: Sequence[View], n_bytes: int, n_opening: int) -> None:
        self.tokens = tokens
        self.n_bytes = n_bytes
        self.n_opening = n_opening
        self._views = list(views)
        self._written: list[Tokens] = []
        self._lock = threading.Lock()

    def opens(self, tokens: Tokens) -> bool:
        """Tell whether some tokens begin as whatever goes on with the conversation does."""
        n = self.n_opening
        if n == 0:
            return True
        return (
            len(tokens) >= n
            and tokens[n - 1] == self.tokens[n - 1]
            and (tokens[:n] == self.tokens[:n])
        )

    def written(self) -> Sequence[Tokens]:
        """Return the visible transcripts."""
        # a lock of its own: writing tokenizes a conversation, which may take seconds, and other
        # conversations need not wait for it
        with self._lock:
            while self._views:
                seen = self._views.pop(0)()
                if seen is not None and tuple(seen) not in self._written:
                    self._written.append(tuple(seen))
            return tuple(self._written)


class ExactTokens:
    """The conversations of a server; safe to use from several threads.

    Args:
        max_tokens: Most tokens of all of them together.
        max_bytes: Most memory of what their views hold; a conversation with more is not kept.
    """

    def __init__(self, max_tokens: int = _MAX_TOKENS, max_bytes: int = _MAX_BYTES) -> None:
        self._max_tokens = max_tokens
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._spoken: OrderedDict[Tokens, _Spoken] = OrderedDict()
        self._n_tokens = 0
        self._n_bytes = 0

    def keep(
        self, tokens: Tokens, views: Sequence[View], n_bytes: int = 0, n_opening: int = 0
    ) -> None:
        """Remember a conversation.

        Args:
            tokens: Prompt and reply, as they were evaluated and sampled.
            views: What prompts may show of it, most likely first; called later, on any thread, at
                most once.
            n_bytes: Memory that the views hold.
            n_opening: Tokens with which every prompt that goes on begins, so that others need no
                look at the views; 0 takes those of a conversation that began in the same way.
        """
        with self._lock:
            self._drop(tokens)
            if n_opening == 0:
                known = (one.n_opening for one in self._spoken.values() if one.opens(tokens))
                n_opening = max(known, default=0)
            self._spoken[tokens] = _Spoken(tokens, views, n_bytes, n_opening)
            self._n_tokens += len(tokens)
            self._n_bytes += n_bytes
            while self._spoken and self._is_full():
                self._drop(next(iter(self._spoken)))

    def paths(self, prompt: Sequence[int]) -> Iterator[Tokens]:
        """Yield prompts that mean the same as one, but begin with what was really said."""
        wanted = tuple(prompt)
        with self._lock:
            spoken = list(self._spoken.values())
        for one in reversed(spoken):  # without the lock of all; the latest conversation first
            for seen in one.written() if one.opens(wanted) else ():
                n_seen = len(seen)
                if n_seen < len(wanted) and wanted[:n_seen] == seen and seen != one.tokens:
                    yield one.tokens + wanted[n_seen:]

    def visible(self, tokens: Sequence[int]) -> tuple[Tokens, Tokens] | None:
        """Return the conversation that some tokens are (or lack the last tokens of), and its view.

        Returns:
            All its tokens, and the first of its transcripts; None if there is none.
        """
        held = tuple(tokens)
        with self._lock:
            spoken = list(self._spoken.values())
        for one in reversed(spoken):
            if len(one.tokens) - len(held) in (0, 1) and one.tokens[: len(held)] == held:
                views = one.written()
                return (one.tokens, views[0]) if views else None
        return None

    def _is_full(self) -> bool:
        too_large = self._n_tokens > self._max_tokens or self._n_bytes > self._max_bytes
        return too_large or len(self._spoken) > _MAX_KEPT

    def _drop(self, tokens: Tokens) -> None:
        dropped = self._spoken.pop(tokens, None)
        if dropped is not None:
            self._n_tokens -= len(tokens)
            self._n_bytes -= dropped.n_bytes
