"""Replies of `/v1/completions` (server-and-cli.md#usage, #chat-completions, #completions).

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
    Done,
    LogProb,
    Started,
    TextPiece,
    Written,
)
from ds4py.server.requests.request import GenerationRequest


def completion_response(
    request: GenerationRequest, *, number: int, created: int, model: str
) -> CompletionReply:
    """See `NewResponse`."""
    return CompletionReply(
        id=f"cmpl-{number}",
        created=created,
        model=model,
        include_usage=request.include_usage,
    )


class CompletionReply(OpenAiReply):
    """Shapes of `/v1/completions`."""

    __slots__ = ()

    def whole(self, answer: Answer, done: Done) -> Json:
        """See `ResponseShape.whole`."""
        choice: Json = {"text": answer.text, "index": 0, "finish_reason": done.finish}
        choice |= token_ids_of(answer.tokens) | _legacy_logprobs(answer.logprobs)
        return self._object("text_completion", [choice]) | costs_of(done) | cause(done)

    def started(self, event: Started) -> Iterator[bytes]:
        """See `ResponseShape.started`: there is no such chunk."""
        del event
        yield from ()

    def written(self, event: Written) -> Iterator[bytes]:
        """See `ResponseShape.written`; there are no calls."""
        if isinstance(event, TextPiece):
            yield self._chunk(event)

    def closing(self, done: Done) -> Iterator[bytes]:
        """See `ResponseShape.closing`."""
        yield self._chunk(NOTHING, finish=done.finish, more=cause(done))
        if self.include_usage:
            yield data(self._object("text_completion", []) | costs_of(done))
        yield DONE

    def _chunk(
        self, piece: TextPiece, *, finish: str | None = None, more: Json | None = None
    ) -> bytes:
        choice: Json = {"text": piece.text, "index": 0, "finish_reason": finish}
        choice |= token_ids_of(piece.tokens) | _legacy_logprobs(piece.logprobs)
        return data(self._object("text_completion", [choice]) | (more or {}))


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
