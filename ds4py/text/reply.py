"""A reply's text taken apart while it arrives: reasoning, content, calls of tools.

Owns: the order of the three, and when a block of calls counts. Refuses to know: tokens, stop
strings, how the parts are sent, the markup itself (`toolcalls`). Invariant: however the text is
cut, each part adds up to the same; what is read as calls is in no other part.
"""

from __future__ import annotations

from ds4py.text.dsml import ToolCall
from ds4py.text.reasoning import Delta, ReasoningSplitter
from ds4py.text.toolcalls import CallSplitter, parse_reply


class ReplySplitter:
    """One reply, used by one thread at a time.

    Args:
        thinking: The prompt opened the reasoning; otherwise there is none.
        calls: The answer may end with a block of calls; otherwise it is content whatever it spells.
    """

    def __init__(self, *, thinking: bool, calls: bool) -> None:
        self._reasoning = ReasoningSplitter(thinking=thinking)
        self._calls = CallSplitter() if calls else None
        self._answer = ""
        self._n_shown = 0

    @property
    def thinking(self) -> bool:
        """Whether the reasoning has not ended yet."""
        return self._reasoning.thinking

    @property
    def complete(self) -> bool:
        """Whether a block of calls is closed: nothing that follows counts, so decoding can stop."""
        return self._calls is not None and self._calls.complete

    def push(self, text: str) -> Delta:
        """Take further text; return what is certain now. What follows the calls is dropped."""
        reasoning, answer = self._reasoning.push(text)
        if self._calls is None:
            return Delta(reasoning, answer)
        content = ""
        for character in answer:  # one by one: the answer ends with the last of its block
            if self._calls.complete:
                break
            self._answer += character
            content += self._calls.push(character)
        self._n_shown += len(content)
        return Delta(reasoning, content)

    def finish(self, *, ended: bool) -> tuple[Delta, tuple[ToolCall, ...]]:
        """Return what was held back, and the calls: no more text will come.

        A block that can not be read becomes content. One that was cut off is dropped, for it may be
        half a command; but if the model itself ended there, what is open is closed.

        Args:
            ended: By the model; not by a token limit or a stop string.
        """
        reasoning = self._reasoning.finish().reasoning
        if self._calls is None:
            return Delta(reasoning, ""), ()
        if not (ended or self.complete):
            return Delta(reasoning, self._calls.finish()), ()
        reply = parse_reply(self._answer, thinking=False, repair=not self.complete)
        return Delta(reasoning, reply.content[self._n_shown :]), reply.calls
