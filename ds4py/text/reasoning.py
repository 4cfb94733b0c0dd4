"""A reply's reasoning and its answer, told apart while the text arrives.

Owns: the search for the think tags. Refuses to know: tokens, tool markup, how the text is
sent. Invariant: however the text is cut, the pieces add up to the same two texts; no piece contains
any part of the tags around the reasoning.
"""

from __future__ import annotations

from typing import Final, NamedTuple

THINK: Final = "<think>"
THINK_END: Final = "</think>"


class Delta(NamedTuple):
    """What a reply grows by.

    Args:
        reasoning: Before the tag.
        content: Behind it.
    """

    reasoning: str
    content: str


class ReasoningSplitter:
    """One reply, used by one thread at a time.

    The first closing tag divides it; any further one is text of the answer.

    Args:
        thinking: The prompt opened the reasoning.
        may_open: The model may open it itself, with a tag before any other text; that tag and the
            white space before it are in neither part. Otherwise everything is the answer.
    """

    def __init__(self, *, thinking: bool, may_open: bool = False) -> None:
        self._thinking = thinking
        self._may_open = may_open and not thinking
        self._held = ""

    @property
    def thinking(self) -> bool:
        """Whether the reasoning has begun and not ended yet."""
        return self._thinking

    def push(self, text: str) -> Delta:
        """Take further text; return what is certain now."""
        if self._may_open:
            text = self._opened(text)
        if not self._thinking:
            return Delta("", text)
        reasoning, tag, content = (self._held + text).partition(THINK_END)
        if tag:
            self._thinking, self._held = False, ""
            return Delta(reasoning, content)
        n_certain = len(reasoning) - n_begun(reasoning, THINK_END)
        self._held = reasoning[n_certain:]
        return Delta(reasoning[:n_certain], "")

    def finish(self) -> Delta:
        """Return what was held back: no more text will come."""
        held, self._held = self._held, ""
        return Delta(held, "") if self._thinking else Delta("", held)

    def _opened(self, text: str) -> str:
        """Return the text behind an opening tag, or all of it if it is certain that there is none.

        As long as it is not, nothing is certain.
        """
        text = self._held + text
        begun = text.lstrip()
        self._held = ""
        if begun.startswith(THINK):
            self._thinking, self._may_open = True, False
            return begun[len(THINK) :]
        if THINK.startswith(begun):
            self._held = text
            return ""
        self._may_open = False
        return text


def n_begun(text: str, tag: str) -> int:
    """Return how many characters at the end of a text, less than the tag, may begin the tag."""
    longest = min(len(tag) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
