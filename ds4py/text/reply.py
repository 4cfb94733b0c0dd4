"""A reply's text taken apart while it arrives: reasoning, content, tool calls.

Owns: the order of the three, and when a block of calls counts. Refuses to know: tokens, stop
strings, how the parts are sent, the markup itself (`tool_calls.formats`). Invariant: however the
text is cut, the parts add up to the same; what is read as calls is in no other part.
"""

from __future__ import annotations

from collections.abc import Iterable

from ds4py.text.parts import CallArguments, Content, Reasoning, ReplyPart
from ds4py.text.reasoning import ReasoningSplitter, n_begun
from ds4py.text.tool_calls.block import CallBlock
from ds4py.text.tool_calls.formats import CallFormat


class ReplySplitter:
    """One reply, used by one thread at a time.

    Args:
        thinking: The prompt opened the reasoning.
        calls: How the model writes calls; None: the answer is content whatever it spells.
        may_think: The model may open the reasoning itself; see `ChatFormat.may_think`.
    """

    def __init__(
        self, *, thinking: bool, calls: CallFormat | None, may_think: bool = False
    ) -> None:
        self._reasoning = ReasoningSplitter(thinking=thinking, may_open=may_think)
        self._format = calls
        self._bare = calls is not None and calls.bare
        self._held = ""
        self._space = ""
        self._block: CallBlock | None = None
        self._ended = False

    @property
    def thinking(self) -> bool:
        """Whether the reasoning has not ended yet."""
        return self._reasoning.thinking

    @property
    def complete(self) -> bool:
        """Whether a block of calls is closed: nothing that follows counts, so decoding can stop."""
        return self._block is not None and self._block.complete

    @property
    def structural(self) -> bool:
        """Whether the next token is syntax of calls, where there is nothing to choose."""
        return self._block is not None and self._block.structural

    @property
    def n_calls(self) -> int:
        """How many calls began, whatever became of them."""
        return 0 if self._block is None else self._block.n_calls

    @property
    def called(self) -> bool:
        """Whether the reply, if it ends here, calls tools: there are calls, and all are whole."""
        return self._block is not None and self._block.whole

    @property
    def malformed(self) -> bool:
        """Whether there is a block, closed or ended by the model, that cannot be read."""
        block = self._block
        return block is not None and block.unreadable and (block.complete or self._ended)

    @property
    def block(self) -> str:
        """The calls as the model wrote them, with the white space before; empty unless `called`.

        It is what later prompts repeat. Closing tags that the model left out are in it.
        """
        return self._space + self._block.text if self._block and self._block.whole else ""

    @property
    def raw_block(self) -> str:
        """All text behind the content, in no part if the block is `malformed`."""
        return self._space + self._block.raw if self._block else ""

    def push(self, text: str) -> list[ReplyPart]:
        """Take further text; return what is certain now. What follows the calls is dropped."""
        reasoning, answer = self._reasoning.push(text)
        return _joined([Reasoning(reasoning), *self._answer(answer)])

    def finish(self, *, ended: bool) -> list[ReplyPart]:
        """Return what was held back: no more text will come.

        Calls that broke off are ended, but not as whole: they may be half a command. If the model
        itself ended there, closing tags that are missing are supplied first.

        Args:
            ended: By the model; not by a token limit or a stop string.
        """
        self._ended = ended
        reasoning, answer = self._reasoning.finish()
        parts = [Reasoning(reasoning), *self._answer(answer)]
        if self._block is not None:
            parts += self._block.finish(ended=ended)
            if not (self._block.opening or self._block.n_calls):
                self._held, self._block = self._space + self._block.raw, None
        return _joined([*parts, Content(self._held)])

    def _answer(self, text: str) -> list[ReplyPart]:
        if self._format is None:
            return [Content(text)]
        if self._block is not None:
            return self._further(self._block, text)
        self._held += text
        if self._bare:
            begun = self._held.lstrip()
            if not begun:
                return []
            self._bare = False
            if begun.startswith("{"):
                return self._begin(len(self._held) - len(begun), "")
        tags = ((self._held.find(tag), tag) for tag, _ in self._format.tags)
        found = min((found_at for found_at in tags if found_at[0] >= 0), default=None)
        if found is not None:
            return self._begin(*found)
        n_tag = max(n_begun(self._held, tag) for tag, _ in self._format.tags)
        content = self._held[: len(self._held) - n_tag].rstrip()
        self._held = self._held[len(content) :]
        return [Content(content)]

    def _begin(self, at: int, opening: str) -> list[ReplyPart]:
        """Begin a block at a place of the text that is held back."""
        assert self._format is not None
        content = self._held[:at].rstrip()
        self._space, rest = self._held[len(content) : at], self._held[at + len(opening) :]
        self._held = ""
        self._block = CallBlock(self._format, opening)
        return [Content(content), *self._further(self._block, rest)]

    def _further(self, block: CallBlock, text: str) -> list[ReplyPart]:
        parts = block.push(text)
        if not block.unreadable or block.opening or block.n_calls:
            return parts
        # it began like a call, but without a tag: an answer in JSON
        self._block = None
        return self._answer(self._space + block.raw)


def _joined(parts: Iterable[ReplyPart]) -> list[ReplyPart]:
    """Return parts without empty ones, neighbours of one kind put together."""
    joined: list[ReplyPart] = []
    for part in parts:
        last = joined[-1] if joined else None
        match part, last:
            case (Reasoning() | Content() | CallArguments()) as part, _ if not part.text:
                continue
            case Reasoning(text), Reasoning(before):
                joined[-1] = Reasoning(before + text)
            case Content(text), Content(before):
                joined[-1] = Content(before + text)
            case CallArguments(index, text), CallArguments(same, before) if index == same:
                joined[-1] = CallArguments(index, before + text)
            case _:
                joined.append(part)
    return joined
