"""What can happen in a replay, seen from the side that plays the recording.

Owns: the steps as values. Refuses to know: their order, sockets. Invariant: "we" are all recorded
parties together; the other side is the one live party.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds4py.wire.messages import WireMessage
from interop.replay.recording import Call, Conversation


@dataclass(frozen=True, slots=True)
class Open:
    """A connection is made, by the live party or to it."""

    talk: Conversation


@dataclass(frozen=True, slots=True)
class Say:
    """We send a recorded frame."""

    talk: Conversation
    message: WireMessage


@dataclass(frozen=True, slots=True)
class Hear:
    """The live party sends what should be this frame."""

    talk: Conversation
    message: WireMessage


@dataclass(frozen=True, slots=True)
class HangUp:
    """We close."""

    talk: Conversation


@dataclass(frozen=True, slots=True)
class HungUp:
    """The live party closes."""

    talk: Conversation


@dataclass(frozen=True, slots=True)
class Stop:
    """The live party ends."""


@dataclass(frozen=True, slots=True)
class Start:
    """The live party starts again, with nothing in its memory."""


@dataclass(frozen=True, slots=True)
class Ask:
    """The live coordinator's user calls."""

    call: Call


@dataclass(frozen=True, slots=True)
class Answer:
    """The call returns."""

    call: Call


Step = Open | Say | Hear | HangUp | HungUp | Stop | Start | Ask | Answer
