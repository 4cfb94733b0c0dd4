"""Tool calls that DeepSeek V4 writes, read back (docs/spec/deepseek4-model.md 7.8).

Owns: the three styles of the markup, repair of a block that broke off, and where a reply's content
ends. Refuses to know: how past calls are written (`dsml`), tokens, who executes calls. Invariant:
any text gives a reply; arguments of a call are always the JSON text of an object.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from ds4py.text.deepseek4_tokens import Marker
from ds4py.text.dsml import ToolCall
from ds4py.text.raw_json import minified
from ds4py.text.reasoning import THINK_END, n_begun

_STYLES: Final = (Marker.DSML.value, Marker.DSML.value[1:], "")
_BEGINNINGS: Final = tuple(f"<{style}tool_calls>" for style in _STYLES)
_BEGINNING: Final = re.compile(f"<({'|'.join(_STYLES)})tool_calls>")
_KINDS: Final = ("parameter", "invoke", "tool_calls")
_MAX_DEPTH: Final = 32
_ATTRIBUTE: Final = re.compile(r'([\w-]+)="([^"]*)"')
_ENTITY: Final = re.compile("&(amp|lt|gt|quot|apos);")
_CHARACTERS: Final = {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'"}


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A reply taken apart; `content + block` is what stands between reasoning and the end.

    Args:
        content: The answer, without the white space before a block; with a malformed block all of
            it.
        reasoning: What stands before the first closing think tag, or everything if it is missing.
        calls: In the order of the block.
        block: The block as the model wrote it (or as it was repaired), with the white space before
            it; what to repeat in later prompts. Empty without calls.
        malformed: There is a block that can not be read.
    """

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    block: str = ""
    malformed: bool = False


def parse_reply(text: str, *, thinking: bool, repair: bool = True) -> ParsedReply:
    """Take a whole reply apart.

    Args:
        text: All that the model wrote.
        thinking: The prompt opened the reasoning: calls count only behind the last closing tag.
        repair: Close what is open at the end; not for a reply that ran into its token limit, which
            may be half a command.
    """
    reasoning, answer, calls_from = "", text, 0
    if thinking:
        reasoning, tag, answer = text.partition(THINK_END)
        if not tag:
            return ParsedReply("", reasoning)
        calls_from = answer.rfind(THINK_END) + 1
    begin = _BEGINNING.search(answer, calls_from)
    if begin is None:
        return ParsedReply(answer, reasoning)
    style, block = begin[1], answer[begin.start() :]
    if repair:
        block = _repaired(block, style)
    reader = _Reader(block, style)
    try:
        calls = reader.calls()
    except _UnreadableError:
        return ParsedReply(answer, reasoning, malformed=True)
    content = answer[: begin.start()].rstrip()
    space = answer[len(content) : begin.start()]
    return ParsedReply(content, reasoning, calls, space + block[: reader.at])


class CallSplitter:
    """The content of an answer while it arrives, without a block of calls that may follow.

    One answer (without reasoning), used by one thread at a time. White space and the beginning of a
    tag are held back as long as a block may follow.
    """

    def __init__(self) -> None:
        self._held = ""
        self._end: str | None = None
        self._complete = False

    @property
    def complete(self) -> bool:
        """Whether the block is closed: nothing that follows counts, so decoding can stop."""
        return self._complete

    def push(self, text: str) -> str:
        """Take further text; return the content that is certain now."""
        self._held += text
        content = "" if self._end is not None else self._release()
        if self._end is not None:
            self._complete = self._complete or self._end in self._held
            self._held = self._held[1 - len(self._end) :]
        return content

    def finish(self) -> str:
        """Return the content that was held back: no more text will come."""
        held, self._held = self._held, ""
        return held if self._end is None else ""

    def _release(self) -> str:
        begin = _BEGINNING.search(self._held)
        if begin is not None:
            self._end = f"</{begin[1]}tool_calls>"
            content, self._held = self._held[: begin.start()].rstrip(), self._held[begin.end() :]
            return content
        n_tag = max(n_begun(self._held, tag) for tag in _BEGINNINGS)
        content = self._held[: len(self._held) - n_tag].rstrip()
        self._held = self._held[len(content) :]
        return content


class _UnreadableError(Exception):
    """The block does not follow the markup."""


class _Reader:
    """A block from its first tag on; `at` is the offset of what is not read yet."""

    def __init__(self, block: str, style: str) -> None:
        self._block = block
        self._style = style
        self.at = 0

    def calls(self) -> tuple[ToolCall, ...]:
        """Read the whole block; at least one call."""
        calls = []
        self._opened("tool_calls")
        while (attributes := self._opened("invoke")) is not None:
            arguments = self._members(0) or "{}"
            self._close("invoke")
            calls.append(ToolCall(_name(attributes), arguments))
        self._close("tool_calls")
        if not calls:
            raise _UnreadableError
        return tuple(calls)

    def _members(self, depth: int) -> str | None:
        """Read parameters as the JSON text of an object; None if a value is no JSON."""
        if depth > _MAX_DEPTH:
            raise _UnreadableError
        values: list[tuple[str, str | None]] = []
        while (attributes := self._opened("parameter")) is not None:
            values.append((_name(attributes), self._value(attributes.get("string"), depth)))
        members = [f"{_json(name)}:{value}" for name, value in values if value is not None]
        return "{" + ",".join(members) + "}" if len(members) == len(values) else None

    def _value(self, string: str | None, depth: int) -> str | None:
        if string != "true" and self._tag("parameter").match(self._block, self.at):
            value = self._members(depth + 1)
            self._close("parameter")
            return value
        end = self._block.find(f"</{self._style}parameter>", self.at)
        if end < 0:
            raise _UnreadableError
        body, self.at = self._block[self.at : end], end
        self._close("parameter")
        if string == "false":
            return minified(body) if body.strip() else "null"
        return _json(_decoded(body))

    def _opened(self, kind: str) -> dict[str, str] | None:
        """Step over an opening tag and return its attributes; None: something else is next."""
        found = self._tag(kind).match(self._block, self.at)
        if found is None:
            return None
        self.at = found.end()
        return {name: _decoded(value) for name, value in _ATTRIBUTE.findall(found[1])}

    def _close(self, kind: str) -> None:
        found = re.compile(rf"\s*</{self._style}{kind}>").match(self._block, self.at)
        if found is None:
            raise _UnreadableError
        self.at = found.end()

    def _tag(self, kind: str) -> re.Pattern[str]:
        return re.compile(rf'\s*<{self._style}{kind}((?:\s+[\w-]+="[^"]*")*)\s*>')


def _repaired(block: str, style: str) -> str:
    """Close what is open at the end of a block, innermost first; half a closing tag counts not."""
    ends = [f"</{style}{kind}>" for kind in _KINDS]
    block = block[: len(block) - max(n_begun(block, end) for end in ends)]
    for kind, end in zip(_KINDS, ends, strict=True):
        n_open = len(re.findall(rf"<{style}{kind}[\s>]", block))
        block += end * (n_open - block.count(end))
    return block


def _name(attributes: dict[str, str]) -> str:
    if "name" not in attributes:
        raise _UnreadableError
    return attributes["name"]


def _decoded(text: str) -> str:
    return _ENTITY.sub(lambda found: _CHARACTERS[found[1]], text)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
