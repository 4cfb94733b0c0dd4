"""What a reply consists of, piece by piece.

Owns: the values that a reply's text is taken apart into. Refuses to know: markup, tokens, how parts
are sent. Invariant: the fragments of a whole call's arguments add up to the JSON text of an
object.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Some of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Some of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool begins; `index` is its place among the calls of the reply."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Some of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """Nothing more of this call follows; calls never overlap.

    Args:
        index: Of the call.
        whole: Its arguments are complete. Otherwise the reply broke off inside, or cannot be read
            further: what there is of the arguments is no JSON, and nobody may execute the call.
    """

    index: int
    whole: bool = True


ReplyPart = Reasoning | Content | CallBegun | CallArguments | CallEnded
