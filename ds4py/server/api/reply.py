"""What every API's reply can do, and what they share.

See docs/spec/server-and-cli.md#usage, #chat-completions, #completions.

Owns: the protocol `ResponseShape`, server-sent events as bytes, rates, the members that chat and
completions have in common. Refuses to know: sockets, order and timing of sending. Invariant: a
reply is used by one task; its frames depend on nothing but the events that it was told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from ds4py.server.errors import Problem, describe
from ds4py.server.requests.events import Answer, Done, Started, Tally, TextPiece, Written
from ds4py.server.requests.request import GenerationRequest

Json = dict[str, object]

NOTHING: Final = TextPiece("")
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


class NewResponse(Protocol):
    """Begins the response to a request; each API has one."""

    def __call__(
        self, request: GenerationRequest, *, number: int, created: int, model: str
    ) -> ResponseShape:
        """Return the shapes of one reply.

        Args:
            request: What was asked.
            number: Of the request in this server.
            created: Unix time, seconds.
            model: Name to echo.
        """


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiReply:
    """What the shapes of chat and completions share.

    Args:
        id: Name of the reply.
        created: Unix time, seconds.
        model: Name to echo.
        include_usage: End a stream with a chunk that tells the usage.
    """

    id: str
    created: int
    model: str
    include_usage: bool = False

    def keepalive(self, doing: str) -> bytes:
        """See `ResponseShape.keepalive`."""
        return comment(doing)

    def failure(self, problem: Problem) -> bytes:
        """See `ResponseShape.failure`."""
        return named("error", {"error": problem.body(in_stream=True)})

    def _object(self, kind: str, choices: list[Json]) -> Json:
        named_by = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return named_by | {"choices": choices}


def openai_usage(tally: Tally) -> Json:
    """Return the `usage` object of chat and completions."""
    usage: Json = {
        "prompt_tokens": tally.n_prompt,
        "completion_tokens": tally.n_completion,
        "total_tokens": tally.n_prompt + tally.n_completion,
        "prompt_tokens_details": {
            "cached_tokens": tally.n_cached,
            "cache_write_tokens": tally.n_prompt - tally.n_cached,
        },
    }
    if tally.n_reasoning:
        usage["completion_tokens_details"] = {"reasoning_tokens": tally.n_reasoning}
    return usage


def token_ids_of(tokens: Sequence[int]) -> Json:
    """Return the token ids, an addition of ds4py for clients that ask for them."""
    return {"token_ids": list(tokens)} if tokens else {}


def costs_of(done: Done) -> Json:
    """Return the members that tell what a reply took."""
    return {"usage": openai_usage(done.tally), "timings": timings_of(done.tally)}
