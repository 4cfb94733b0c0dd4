"""Replies of chat and completions (docs/spec/server-and-cli.md 1.10 to 1.12).

Owns: the JSON of whole replies and of chunks. Refuses to know: sockets, where the numbers came
from. Invariant: as in `reply`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ds4py.server.answer import (
    Answer,
    Call,
    CallClosed,
    CallFragment,
    CallOpened,
    Done,
    LogProb,
    Piece,
    Ranked,
    Started,
    Tally,
    Written,
)
from ds4py.server.errors import Problem
from ds4py.server.replies.reply import DONE, Json, cause, comment, data, named, timings_of

_NOTHING: Final = Piece("")


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenAi:
    """What both shapes share.

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
        """See `Reply.keepalive`."""
        return comment(doing)

    def failure(self, problem: Problem) -> bytes:
        """See `Reply.failure`."""
        return named("error", {"error": problem.body(in_stream=True)})

    def _object(self, kind: str, choices: list[Json]) -> Json:
        named_by = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return named_by | {"choices": choices}


class ChatReply(_OpenAi):
    """Shapes of `/v1/chat/completions`."""

    __slots__ = ()

    def whole(self, answer: Answer, done: Done) -> Json:
        """See `Reply.whole`."""
        message: Json = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [_call(call) for call in answer.calls]
        choice = {"index": 0, "message": message, "finish_reason": done.finish}
        choice |= _ids(answer.tokens) | _logprobs(answer.logprobs)
        return self._object("chat.completion", [choice]) | _costs(done) | cause(done)

    def started(self, event: Started) -> Iterator[bytes]:
        """See `Reply.started`."""
        del event
        yield self._chunk({"role": "assistant"})

    def written(self, event: Written) -> Iterator[bytes]:
        """See `Reply.written`."""
        match event:
            case Piece(reasoning=""):
                yield self._chunk({"content": event.text}, piece=event)
            case Piece():
                yield self._chunk({"reasoning_content": event.reasoning}, piece=event)
            case CallOpened():
                opened = Call(event.index, event.id, event.name, "")
                yield self._chunk({"tool_calls": [{"index": event.index} | _call(opened)]})
            case CallFragment():
                fragment = {"index": event.index, "function": {"arguments": event.text}}
                yield self._chunk({"tool_calls": [fragment]})
            case CallClosed():
                pass

    def closing(self, done: Done) -> Iterator[bytes]:
        """See `Reply.closing`."""
        yield self._chunk({}, finish=done.finish, more=cause(done))
        if self.include_usage:
            yield data(self._object("chat.completion.chunk", []) | _costs(done))
        yield DONE

    def _chunk(
        self,
        delta: Json,
        *,
        finish: str | None = None,
        piece: Piece = _NOTHING,
        more: Json | None = None,
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        choice |= _ids(piece.tokens) | _logprobs(piece.logprobs)
        return data(self._object("chat.completion.chunk", [choice]) | (more or {}))


class CompletionReply(_OpenAi):
    """Shapes of `/v1/completions`."""

    __slots__ = ()

    def whole(self, answer: Answer, done: Done) -> Json:
        """See `Reply.whole`."""
        choice: Json = {"text": answer.text, "index": 0, "finish_reason": done.finish}
        choice |= _ids(answer.tokens) | _legacy_logprobs(answer.logprobs)
        return self._object("text_completion", [choice]) | _costs(done) | cause(done)

    def started(self, event: Started) -> Iterator[bytes]:
        """See `Reply.started`: there is no such chunk."""
        del event
        yield from ()

    def written(self, event: Written) -> Iterator[bytes]:
        """See `Reply.written`; there are no calls."""
        if isinstance(event, Piece):
            yield self._chunk(event)

    def closing(self, done: Done) -> Iterator[bytes]:
        """See `Reply.closing`."""
        yield self._chunk(_NOTHING, finish=done.finish, more=cause(done))
        if self.include_usage:
            yield data(self._object("text_completion", []) | _costs(done))
        yield DONE

    def _chunk(self, piece: Piece, *, finish: str | None = None, more: Json | None = None) -> bytes:
        choice: Json = {"text": piece.text, "index": 0, "finish_reason": finish}
        choice |= _ids(piece.tokens) | _legacy_logprobs(piece.logprobs)
        return data(self._object("text_completion", [choice]) | (more or {}))


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


def _call(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _ids(tokens: Sequence[int]) -> Json:
    """Return the token ids, an addition of ds4py for clients that ask for them."""
    return {"token_ids": list(tokens)} if tokens else {}


def _costs(done: Done) -> Json:
    return {"usage": usage_of(done.tally), "timings": timings_of(done.tally)}


def _logprobs(tokens: Sequence[LogProb]) -> Json:
    if not tokens:
        return {}
    content = [
        _ranked(token.chosen) | {"top_logprobs": [_ranked(one) for one in token.top]}
        for token in tokens
    ]
    return {"logprobs": {"content": content, "refusal": None}}


def _ranked(token: Ranked) -> Json:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}


def _legacy_logprobs(tokens: Sequence[LogProb]) -> Json:
    if not tokens:
        return {}
    return {
        "logprobs": {
            "tokens": [token.chosen.text for token in tokens],
            "token_logprobs": [token.chosen.logprob for token in tokens],
            "top_logprobs": [{one.text: one.logprob for one in token.top} for token in tokens],
            "text_offset": None,
        }
    }
