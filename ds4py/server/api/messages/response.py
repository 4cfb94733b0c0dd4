"""Replies of `/v1/messages` (docs/spec/server-and-cli.md#usage, #messages).

Owns: the JSON of whole replies and of events, the order and numbers of blocks. Refuses to know:
sockets, where the numbers came from. Invariant: blocks never overlap, their numbers go up by one,
and each that was begun is ended, whatever happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from ds4py.server.api.reply import Json, named, timings_of
from ds4py.server.errors import Problem, describe
from ds4py.server.requests.events import (
    Answer,
    Call,
    CallClosed,
    CallFragment,
    CallOpened,
    Done,
    Started,
    Tally,
    TextPiece,
    Written,
)
from ds4py.server.requests.request import GenerationRequest

_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

Block = Literal["thinking", "text", "tool_use"]


def messages_response(
    request: GenerationRequest, *, number: int, created: int, model: str
) -> MessagesReply:
    """See `NewResponse`; such replies do not tell their time."""
    del request, created
    return MessagesReply(id=f"msg_{number:024d}", model=model)


class MessagesReply:
    """Shapes of one reply.

    Args:
        id: Name of the reply, also the signature of its reasoning.
        model: Name to echo.
    """

    def __init__(self, *, id: str, model: str) -> None:  # noqa: A002 - the API's word
        self._id = id
        self._model = model
        self._n_blocks = 0
        self._open: Block | None = None
        self._says_something = False

    @property
    def id(self) -> str:
        """See `ResponseShape.id`."""
        return self._id

    def whole(self, answer: Answer, done: Done) -> Json:
        """See `ResponseShape.whole`; one that broke off is an error of the whole request."""
        if done.error is not None:
            raise done.error
        content: list[Json] = []
        if answer.reasoning:
            content.append(
                {"type": "thinking", "thinking": answer.reasoning, "signature": self._id}
            )
        if answer.text or not answer.calls:
            content.append({"type": "text", "text": answer.text})
        content += [_tool_use(call) for call in answer.calls]
        message = self._message(content, done.tally) | _ending(done)
        return message | {"timings": timings_of(done.tally)}

    def started(self, event: Started) -> Iterator[bytes]:
        """See `ResponseShape.started`."""
        tally = Tally(n_prompt=event.n_prompt, n_cached=event.n_cached)
        message = self._message([], tally) | {"stop_reason": None, "stop_sequence": None}
        yield _event("message_start", {"message": message})

    def written(self, event: Written) -> Iterator[bytes]:
        """See `ResponseShape.written`."""
        match event:
            case TextPiece(text="", reasoning=""):
                pass
            case TextPiece(reasoning=""):
                yield from self._within("text", {"text": ""})
                yield self._delta({"type": "text_delta", "text": event.text})
            case TextPiece():
                yield from self._within("thinking", {"thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": event.reasoning})
            case CallOpened():
                yield from self._end_block()
                yield self._begin("tool_use", {"id": event.id, "name": event.name, "input": {}})
            case CallFragment():
                yield self._delta({"type": "input_json_delta", "partial_json": event.text})
            case CallClosed():
                yield from self._end_block()

    def closing(self, done: Done) -> Iterator[bytes]:
        """See `ResponseShape.closing`."""
        yield from self._end_block()
        if done.error is not None:
            yield self.failure(describe(done.error))
            return
        if not self._says_something:
            yield self._begin("text", {"text": ""})
            yield from self._end_block()
        usage = {"output_tokens": done.tally.n_completion}
        yield _event("message_delta", {"delta": _ending(done), "usage": usage})
        yield _event("message_stop", {})

    def keepalive(self, doing: str) -> bytes:
        """See `ResponseShape.keepalive`; comments do not calm the watchdogs of clients."""
        del doing
        return _event("ping", {})

    def failure(self, problem: Problem) -> bytes:
        """See `ResponseShape.failure`."""
        return named("error", problem.anthropic())

    def _message(self, content: list[Json], tally: Tally) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "usage": usage_of(tally),
        }

    def _within(self, block: Block, empty: Json) -> Iterator[bytes]:
        """Begin a block unless it is the open one."""
        if self._open != block:
            yield from self._end_block()
            yield self._begin(block, empty)

    def _begin(self, block: Block, empty: Json) -> bytes:
        self._open = block
        self._says_something = self._says_something or block != "thinking"
        content = {"type": block} | empty
        return _event("content_block_start", {"index": self._n_blocks, "content_block": content})

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", {"index": self._n_blocks, "delta": delta})

    def _end_block(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._id})
        yield _event("content_block_stop", {"index": self._n_blocks})
        self._open = None
        self._n_blocks += 1


def usage_of(tally: Tally) -> Json:
    """Return the `usage` object: the three kinds of prompt tokens add up to all of them."""
    return {
        "input_tokens": 0,  # every token of the prompt is read from a cache or written to one
        "output_tokens": tally.n_completion,
        "cache_read_input_tokens": tally.n_cached,
        "cache_creation_input_tokens": tally.n_prompt - tally.n_cached,
    }


def _event(name: str, content: Json) -> bytes:
    return named(name, {"type": name} | content)


def _ending(done: Done) -> Json:
    reason = "stop_sequence" if done.stop is not None else _REASONS[done.finish]
    return {"stop_reason": reason, "stop_sequence": done.stop}


def _tool_use(call: Call) -> Json:
    return {
        "type": "tool_use",
        "id": call.id,
        "name": call.name,
        "input": msgspec.Raw(call.arguments.encode()),
    }
