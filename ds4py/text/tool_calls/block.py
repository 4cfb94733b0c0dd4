"""A block of calls while it arrives: runs a grammar, and knows what became of the block.

Owns: when a block is complete, whole or unreadable, and its text. Refuses to know: grammars, what a
reply holds besides. Invariant: a call that began is ended, whatever happens to the block.
"""

from __future__ import annotations

from ds4py.text.parts import ReplyPart
from ds4py.text.reasoning import n_begun
from ds4py.text.tool_calls.formats import CallFormat
from ds4py.text.tool_calls.scanner import Scanner, UnreadableError
from ds4py.text.tool_calls.writer import CallWriter


class CallBlock:
    """One block, used by one thread at a time.

    Args:
        format_: How the model writes calls.
        opening: The tag that was found, or an empty text if the block begins without one.

    Attributes:
        opening: As given.
        complete: The block is closed; nothing that follows is part of it.
        unreadable: It does not follow the grammar.
    """

    def __init__(self, format_: CallFormat, opening: str) -> None:
        self.complete = False
        self.unreadable = False
        self.opening = opening
        self._closing = dict(format_.tags).get(opening, "")
        self._scanner = Scanner(self._closing)
        self._calls = CallWriter()
        self._steps = format_.grammar(self._scanner, self._calls, opening, self._closing)
        self._raw = [opening]
        self._held = ""

    @property
    def structural(self) -> bool:
        """Whether what comes next is syntax."""
        return not (self._scanner.free or self.complete or self.unreadable)

    @property
    def n_calls(self) -> int:
        """How many calls began."""
        return self._calls.n_calls

    @property
    def whole(self) -> bool:
        """Whether the calls so far are a whole block that nothing needs to follow."""
        return self._scanner.resting and not self.unreadable

    @property
    def text(self) -> str:
        """The whole block, as it was written and completed; empty if there is none."""
        return self.opening + self._scanner.block if self.whole else ""

    @property
    def raw(self) -> str:
        """All text of the block, whatever became of it."""
        return "".join(self._raw)

    def push(self, text: str) -> list[ReplyPart]:
        """Take further text; return what is certain now."""
        if self.complete:
            return []
        self._raw.append(text)
        if self.unreadable:
            self._seek_end(text)
            return []
        self._scanner.feed(text)
        return self._advance()

    def finish(self, *, ended: bool) -> list[ReplyPart]:
        """Return what remains: no more text will come.

        Args:
            ended: By the model, which is taken to have meant the closing tags that are missing.
        """
        parts: list[ReplyPart] = []
        if not (self.complete or self.unreadable or self.whole) and ended:
            self._scanner.ended = True
            parts = self._advance()
        self._calls.end(whole=False)
        return parts + self._calls.drain()

    def _advance(self) -> list[ReplyPart]:
        try:
            next(self._steps)
        except StopIteration:
            self._complete(len(self._scanner.unread))
        except UnreadableError:
            self.unreadable = True
            self._calls.end(whole=False)
            self._seek_end(self._scanner.unread)
        return self._calls.drain()

    def _seek_end(self, text: str) -> None:
        """Look for the end of a block that cannot be read."""
        if self._scanner.is_closed:  # that it is closed already is what was wrong
            self._complete(len(text))
            return
        seen = self._held + text
        _, closing, after = seen.partition(self._closing) if self._closing else (seen, "", "")
        if closing:
            self._complete(len(after))
        self._held = seen[len(seen) - n_begun(seen, self._closing) :]

    def _complete(self, n_after: int) -> None:
        """End the block before the last characters, which do not count."""
        self.complete = True
        self._raw = [self.raw[: len(self.raw) - n_after]]  # they may have come in several pieces
