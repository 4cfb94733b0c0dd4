"""Shapes of replies in the OpenAI dialect (docs/spec/server-and-cli.md 1.10 to 1.12).

Owns: the JSON of whole replies and of stream chunks. Refuses to know: sockets, order and timing of
sending, where the numbers came from. Invariant: pure functions of a reply's identity and events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from ds4py.server.errors import describe
from ds4py.server.work import Call, Done, Piece, Tally

Json = dict[str, object]
_NOTHING: Final = Piece("")


class Reply(Protocol):
    """The shapes of one reply; `deliver` decides when each is sent."""

    @property
    def id(self) -> str:
        """The reply's name, also in the log."""

    def whole(self, answer: Piece, done: Done) -> Json:
        """Return the reply of a request that does not stream."""

    def opening(self) -> Json | None:
        """Return the chunk that tells that the prompt is evaluated, if the dialect has one."""

    def piece(self, piece: Piece) -> Json:
        """Return the chunk for some of the reply."""

    def closing(self, done: Done) -> Json:
        """Return the chunk with the finish reason."""

    def usage(self, done: Done) -> Json:
        """Return the chunk with the usage."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Shapes of `/v1/chat/completions`.

    Args:
        id: `chatcmpl-<n>`.
        created: Unix time, seconds.
        model: Name to echo.
    """

    id: str
    created: int
    model: str

    def whole(self, answer: Piece, done: Done) -> Json:
        """See `Reply.whole`."""
        message: Json = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [_call(call) for call in answer.calls]
        choice = {"index": 0, "message": message, "finish_reason": done.finish} | _ids(answer)
        return self._object("chat.completion", [choice]) | _costs(done) | _failure(done)

    def opening(self) -> Json | None:
        """See `Reply.opening`."""
        return self._chunk({"role": "assistant"})

    def piece(self, piece: Piece) -> Json:
        """See `Reply.piece`."""
        delta: Json = {"content": piece.text}
        if piece.reasoning:
            delta = {"reasoning_content": piece.reasoning}
        elif piece.calls:
            delta = {"tool_calls": [{"index": call.index} | _call(call) for call in piece.calls]}
        return self._chunk(delta, piece=piece)

    def closing(self, done: Done) -> Json:
        """See `Reply.closing`."""
        return self._chunk({}, done.finish) | _failure(done)

    def usage(self, done: Done) -> Json:
        """See `Reply.usage`."""
        return self._object("chat.completion.chunk", []) | _costs(done)

    def _chunk(self, delta: Json, finish: str | None = None, piece: Piece = _NOTHING) -> Json:
        choice = {"index": 0, "delta": delta, "finish_reason": finish} | _ids(piece)
        return self._object("chat.completion.chunk", [choice])

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return _object(self.id, kind, self.created, self.model, choices)


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """Shapes of `/v1/completions`.

    Args:
        id: `cmpl-<n>`.
        created: Unix time, seconds.
        model: Name to echo.
    """

    id: str
    created: int
    model: str

    def whole(self, answer: Piece, done: Done) -> Json:
        """See `Reply.whole`."""
        return self._chunk(answer, done.finish) | _costs(done) | _failure(done)

    def opening(self) -> Json | None:
        """See `Reply.opening`."""
        return None

    def piece(self, piece: Piece) -> Json:
        """See `Reply.piece`."""
        return self._chunk(piece)

    def closing(self, done: Done) -> Json:
        """See `Reply.closing`."""
        return self._chunk(_NOTHING, done.finish) | _failure(done)

    def usage(self, done: Done) -> Json:
        """See `Reply.usage`."""
        return self._object([]) | _costs(done)

    def _chunk(self, piece: Piece, finish: str | None = None) -> Json:
        choice = {"text": piece.text, "index": 0, "finish_reason": finish} | _ids(piece)
        return self._object([choice])

    def _object(self, choices: list[Json]) -> Json:
        return _object(self.id, "text_completion", self.created, self.model, choices)


def usage_of(tally: Tally) -> Json:
    """Return the `usage` object (section 1.10)."""
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


def rate(n_tokens: int, seconds: float) -> float:
    """Return tokens per second, 0 where nothing was measured."""
    return round(n_tokens / seconds, 3) if n_tokens and seconds > 0 else 0.0


def _object(name: str, kind: str, created: int, model: str, choices: list[Json]) -> Json:
    return {"id": name, "object": kind, "created": created, "model": model, "choices": choices}


def _call(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _ids(piece: Piece) -> Json:
    """Return the token ids, an addition of ds4py for clients that ask for them."""
    return {"token_ids": list(piece.tokens)} if piece.tokens else {}


def _costs(done: Done) -> Json:
    return {"usage": usage_of(done.tally), "timings": timings_of(done.tally)}


def _failure(done: Done) -> Json:
    """Say why a generation broke off, beside `finish_reason: "error"`; SDKs raise it."""
    return {} if done.error is None else {"error": describe(done.error).body()}
