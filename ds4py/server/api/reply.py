"""What every dialect's reply can do, and what they share.

Owns: the protocol `ResponseShape`, server-sent events as bytes, rates. Refuses to know: sockets,
order and timing of sending. Invariant: a reply is used by one task; its frames depend on nothing
but the events that it was told.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

import msgspec

from ds4py.server.errors import Problem, describe
from ds4py.server.requests.events import Answer, Done, Started, Tally, Written

Json = dict[str, object]

DONE: Final = b"data: [DONE]\n\n"
_LINE_ENDS: Final = tuple(
    (character.encode(), f"\\u{ord(character):04x}".encode())
    for character in ("\u0085", "\u2028", "\u2029")
)


class ResponseShape(Protocol):
    """The shapes of one reply; `http.sse` decides when each is sent."""

    @property
    def id(self) -> str:
        """The reply's name, also in the log."""

    def whole(self, answer: Answer, done: Done) -> Json:
        """Return the reply of a request that does not stream."""

    def started(self, event: Started) -> Iterable[bytes]:
        """Return the frames that tell that the prompt is evaluated."""

    def written(self, event: Written) -> Iterable[bytes]:
        """Return the frames for some of the reply."""

    def closing(self, done: Done) -> Iterable[bytes]:
        """Return the frames that end the stream."""

    def keepalive(self, doing: str) -> bytes:
        """Return what keeps a silent stream alive; `doing` is a word for people who watch it."""

    def failure(self, problem: Problem) -> bytes:
        """Return the only frame of a reply that failed before it started."""


def data(content: object) -> bytes:
    """Return a server-sent event without a name.

    Some clients cut lines wherever Unicode has a line end, and JSON leaves those three as they are.
    """
    text = msgspec.json.encode(content)
    for raw, escaped in _LINE_ENDS:
        text = text.replace(raw, escaped)
    return b"data: " + text + b"\n\n"


def named(name: str, content: object) -> bytes:
    """Return a server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + data(content)


def comment(text: str) -> bytes:
    """Return a line of a stream that clients skip."""
    return b": " + text.encode() + b"\n\n"


def rate(n_tokens: int, seconds: float) -> float:
    """Return tokens per second, 0 where nothing was measured."""
    return round(n_tokens / seconds, 3) if n_tokens and seconds > 0 else 0.0


def timings_of(tally: Tally) -> Json:
    """Return the `timings` object, an addition of ds4py that other clients ignore.

    Cached prompt tokens do not count as evaluated; rates are 0 where nothing was measured.
    """
    evaluated = tally.n_prompt - tally.n_cached
    return {
        "prompt_n": evaluated,
        "prompt_ms": round(tally.prefill_seconds * 1e3, 3),
        "prompt_per_second": rate(evaluated, tally.prefill_seconds),
        "predicted_n": tally.n_completion,
        "predicted_ms": round(tally.decode_seconds * 1e3, 3),
        "predicted_per_second": rate(tally.n_completion, tally.decode_seconds),
    }


def cause(done: Done) -> Json:
    """Say why a generation broke off, beside `finish_reason: "error"`; SDKs raise it."""
    return {} if done.error is None else {"error": describe(done.error).body(in_stream=True)}
