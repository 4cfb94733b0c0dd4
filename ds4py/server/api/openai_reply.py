"""What chat and completions share (server-and-cli.md#usage, #chat-completions, #completions).

Owns: the members that both have. Refuses to know: sockets, where the numbers came from. Invariant:
as in `reply`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ds4py.server.api.reply import Json, comment, named, timings_of
from ds4py.server.errors import Problem
from ds4py.server.requests.events import (
    Done,
    Tally,
    TextPiece,
)

NOTHING: Final = TextPiece("")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiReply:
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
        """See `ResponseShape.keepalive`."""
        return comment(doing)

    def failure(self, problem: Problem) -> bytes:
        """See `ResponseShape.failure`."""
        return named("error", {"error": problem.body(in_stream=True)})

    def _object(self, kind: str, choices: list[Json]) -> Json:
        named_by = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return named_by | {"choices": choices}


def usage_of(tally: Tally) -> Json:
    """Return the `usage` object (docs/spec/server-and-cli.md#usage)."""
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
    return {"usage": usage_of(done.tally), "timings": timings_of(done.tally)}
