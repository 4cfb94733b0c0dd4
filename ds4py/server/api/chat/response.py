"""Replies of `/v1/chat/completions` (server-and-cli.md#usage, #chat-completions, #completions).

Owns: the JSON of whole replies and of chunks. Refuses to know: sockets, where the numbers came
from. Invariant: as in `api.reply`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds4py.server.api.reply import (
    DONE,
    NOTHING,
    Json,
    OpenAiReply,
    cause,
    costs_of,
    data,
    token_ids_of,
)
from ds4py.server.requests.events import (
    Answer,
    Call,
    CallClosed,
    CallFragment,
    CallOpened,
    Done,
    LogProb,
    Ranked,
    Started,
    TextPiece,
    Written,
)
from ds4py.server.requests.request import GenerationRequest


def chat_response(
    request: GenerationRequest, *, number: int, created: int, model: str
) -> ChatReply:
    """See `NewResponse`."""
    return ChatReply(
        id=f"chatcmpl-{number}",
        created=created,
        model=model,
        include_usage=request.include_usage,
    )


class ChatReply(OpenAiReply):
    """Shapes of `/v1/chat/completions`."""

    __slots__ = ()

    def whole(self, answer: Answer, done: Done) -> Json:
        """See `ResponseShape.whole`."""
        message: Json = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [_call(call) for call in answer.calls]
        choice = {"index": 0, "message": message, "finish_reason": done.finish}
        choice |= token_ids_of(answer.tokens) | _logprobs(answer.logprobs)
        return self._object("chat.completion", [choice]) | costs_of(done) | cause(done)

    def started(self, event: Started) -> Iterator[bytes]:
        """See `ResponseShape.started`."""
        del event
        yield self._chunk({"role": "assistant"})

    def written(self, event: Written) -> Iterator[bytes]:
        """See `ResponseShape.written`."""
        match event:
            case TextPiece(reasoning=""):
                yield self._chunk({"content": event.text}, piece=event)
            case TextPiece():
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
        """See `ResponseShape.closing`."""
        yield self._chunk({}, finish=done.finish, more=cause(done))
        if self.include_usage:
            yield data(self._object("chat.completion.chunk", []) | costs_of(done))
        yield DONE

    def _chunk(
        self,
        delta: Json,
        *,
        finish: str | None = None,
        piece: TextPiece = NOTHING,
        more: Json | None = None,
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        choice |= token_ids_of(piece.tokens) | _logprobs(piece.logprobs)
        return data(self._object("chat.completion.chunk", [choice]) | (more or {}))


def _call(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


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
