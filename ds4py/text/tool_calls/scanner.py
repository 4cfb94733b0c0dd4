"""The text of a block of calls while it arrives, as a grammar reads it.

Owns: waiting for text, what was read of it, and what is supplied to a model that stopped early.
Refuses to know: any markup, what is read for. Invariant: text is read once and from left to right,
and a grammar does the same however the text is cut.

A grammar is a generator (`Steps`) that yields whenever it needs more text: a plain recursive
descent that stops in the middle.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Final, Protocol, TypeVar

from ds4py.text.reasoning import n_begun

T = TypeVar("T")
Steps = Generator[None, None, T]

_SPACES: Final = re.compile(r"\s*")
_TAG: Final = re.compile(r'<(?:[^<>"]|"[^"]*")*+>')
_BEGUN_TAG: Final = re.compile(r'<(?:[^<>"]|"[^"]*")*+(?:"[^"]*)?')
_MAX_TAG: Final = 4096
"""Characters of a tag, so that reading one again with each piece stays cheap."""


class UnreadableError(Exception):
    """The text does not follow the grammar."""


class ScannedBody(Protocol):
    """Takes the text between two tags as it comes."""

    @property
    def free(self) -> bool:
        """Whether what comes next is the model's own words, not syntax."""

    def add(self, text: str) -> None:
        """Take further text."""


class Scanner:
    """The text of one block.

    Args:
        closing: What a block ends with; empty if its last call ends it.

    Attributes:
        ended: No more text comes, for the model itself stopped.
        free: While a grammar waits: what comes next is the model's own words, not syntax.
        resting: While a grammar waits: the calls so far are a whole block.
    """

    def __init__(self, closing: str) -> None:
        self.ended = False
        self.free = False
        self.resting = False
        self._closing = closing
        self._text = ""
        self._at = 0
        self._read: list[str] = []
        self._n_whole = 0

    def feed(self, text: str) -> None:
        """Take further text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    @property
    def unread(self) -> str:
        """What no grammar has read yet."""
        return self._text[self._at :]

    @property
    def block(self) -> str:
        """What was read up to the last `rest`, with what was supplied."""
        return "".join(self._read[: self._n_whole])

    @property
    def is_closed(self) -> bool:
        """Whether what was read ends with the block's own end."""
        return bool(self._closing) and "".join(self._read).rstrip().endswith(self._closing)

    def peek(self) -> str:
        """Return the next character, or an empty text."""
        return self._text[self._at : self._at + 1]

    def take(self, n: int) -> str:
        """Read the next characters that are there."""
        text = self._text[self._at : self._at + n]
        self._at += len(text)
        self._read.append(text)
        return text

    def run(self, pattern: re.Pattern[str]) -> str:
        """Read what a pattern that matches any text, if only nothing of it, finds next."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    def rest(self) -> None:
        """Note that the calls so far are a whole block."""
        self.resting = True
        self._n_whole = len(self._read)

    def wait(self, *, free: bool = False) -> Steps[None]:
        """Wait for more text.

        Raises:
            UnreadableError: None will come.
        """
        if self.ended:
            raise UnreadableError
        self.free = free
        yield
        self.free = False

    def spaces(self, *, free: bool = False) -> Steps[str]:
        """Read white space up to another character or the end."""
        found = []
        while True:
            found.append(self.run(_SPACES))
            if self.ended or self.peek():
                return "".join(found)
            yield from self.wait(free=free)

    def begins(self, *texts: str, free: bool = False) -> Steps[bool]:
        """Tell whether the unread text begins with one of some texts; nothing is read."""
        longest = max(map(len, texts))
        while True:
            ahead = self._text[self._at : self._at + longest]
            if ahead.startswith(texts):
                return True
            if self.ended or not any(text.startswith(ahead) for text in texts):
                return False
            yield from self.wait(free=free)

    def another(self, *openings: str) -> Steps[bool]:
        """Tell whether another block follows the calls so far, which `rest` until then."""
        self.rest()
        yield from self.spaces()
        self.resting = not (yield from self.begins(*openings))
        return not self.resting

    def expect(self, text: str) -> Steps[None]:
        """Read a text behind white space; whatever of it is missing at the end is supplied."""
        yield from self.spaces()
        if (yield from self.begins(text)):
            self.take(len(text))
        else:
            self._supply(text)

    def tag(self, closing: str) -> Steps[str]:
        """Read any tag behind white space; if the text ends there, `closing` is supplied."""
        yield from self.spaces()
        while (found := _TAG.match(self._text, self._at)) is None:
            begun = _BEGUN_TAG.fullmatch(self._text, self._at)
            if self.ended:
                self._supply(closing)
                return closing
            if begun is None or len(begun[0]) > _MAX_TAG:
                raise UnreadableError
            yield from self.wait()
        if len(found[0]) > _MAX_TAG:
            raise UnreadableError
        return self.take(len(found[0]))

    def until(self, closing: str, body: ScannedBody) -> Steps[None]:
        """Pass on everything before `closing`, and read that too; at the end it is supplied."""
        while (at := self._text.find(closing, self._at)) < 0:
            n_held = n_begun(self._text[max(self._at, len(self._text) - len(closing)) :], closing)
            body.add(self.take(len(self._text) - self._at - n_held))
            if self.ended:
                self._supply(closing)
                return
            # "</" is in many a text, but one more character tells the tag
            yield from self.wait(free=body.free and n_held <= len("</"))
        body.add(self.take(at - self._at))
        self.take(len(closing))

    def _supply(self, text: str) -> None:
        """Read a text of which the last characters, or all, are missing at the end."""
        begun = self.unread
        # a block that is closed already lacks what should have ended before
        if not self.ended or not text.startswith(begun) or self.is_closed:
            raise UnreadableError
        self.take(len(begun))
        self._read.append(text[len(begun) :])
