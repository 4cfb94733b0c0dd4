"""Replies read as their parts, with what must hold for any parts checked on the way."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import strategies as st

from ds4py.text.parts import CallArguments, CallBegun, CallEnded, Content, Reasoning, ReplyPart
from ds4py.text.reply import ReplySplitter
from ds4py.text.tool_calls.formats import CallFormat


@dataclass
class Reading:
    """All that a reply was taken apart into.

    Args:
        calls: Name and arguments of the whole ones.
        broken: The same of a call that broke off.
        is_open: A call began and did not end.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    broken: tuple[str, str] | None = None
    complete: bool = False
    called: bool = False
    malformed: bool = False
    block: str = ""
    raw_block: str = ""
    is_open: bool = False

    def add(self, parts: Iterable[ReplyPart]) -> None:
        """Add parts in order; none may come where it cannot stand."""
        for part in parts:
            match part:
                case Reasoning(text):
                    assert text
                    assert not self.content
                    assert not self.calls
                    self.reasoning += text
                case Content(text):
                    assert text
                    assert not self.calls
                    assert self.broken is None
                    self.content += text
                case CallBegun(index, name):
                    assert self.broken is None
                    assert index == len(self.calls)
                    self.broken, self.is_open = (name, ""), True
                case CallArguments(index, text):
                    assert text
                    assert index == len(self.calls)
                    assert self.is_open
                    assert self.broken is not None
                    self.broken = (self.broken[0], self.broken[1] + text)
                case CallEnded(index, whole):
                    assert index == len(self.calls)
                    assert self.is_open
                    assert self.broken is not None
                    self.is_open = False
                    if whole:
                        assert isinstance(json.loads(self.broken[1]), dict)
                        self.calls.append(self.broken)
                        self.broken = None


def read(
    pieces: Sequence[str],
    calls: CallFormat | None,
    *,
    thinking: bool = False,
    may_think: bool = False,
    ended: bool = True,
) -> Reading:
    """Read a reply that arrives in pieces."""
    reply, reading = ReplySplitter(thinking=thinking, calls=calls, may_think=may_think), Reading()
    for piece in pieces:
        reading.add(reply.push(piece))
    reading.add(reply.finish(ended=ended))
    assert not reading.is_open
    assert not (reply.called and (reply.malformed or reading.broken))
    assert reply.n_calls == len(reading.calls) + (reading.broken is not None)
    reading.complete, reading.called, reading.malformed = (
        reply.complete,
        reply.called,
        reply.malformed,
    )
    reading.block, reading.raw_block = reply.block, reply.raw_block
    return reading


def cut(text: str, at: Iterable[int]) -> list[str]:
    """Cut a text at some places."""
    bounds = [0, *sorted(min(place, len(text)) for place in at), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


CUTS = st.lists(st.integers(0, 400), max_size=8)
