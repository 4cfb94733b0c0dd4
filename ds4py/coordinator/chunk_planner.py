"""Plan the chunks of one evaluation: how large, and how many at once.

Owns: whose word counts, the user's or the forecast's, and the single token that needs none. Refuses
to know: timelines, what a stage does with a chunk. Invariant: planning a single token takes a time
that does not depend on the context.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from ds4py.config import PrefillTuning
from ds4py.coordinator.chunk_size import GRANULE, Stretch, choose
from ds4py.coordinator.chunked_prefill import (
    Chunk,
    cut_chunks,
    given_chunk,
    prefill_cap,
    window_size,
)
from ds4py.coordinator.pipeline import Pipeline
from ds4py.wire.prefix_hash import extend

log = logging.getLogger(__name__)


class ChunkPlan(NamedTuple):
    """What is to be evaluated.

    Args:
        chunks: In order.
        window: Most of them under way; 1 if they do not overlap.
    """

    chunks: list[Chunk]
    window: int


class ChunkPlanner:
    """Plans the evaluations of one session.

    Args:
        tuning: What the user says.
        n_ctx: Tokens that a session can hold.
    """

    def __init__(self, tuning: PrefillTuning, n_ctx: int):
        self._tuning = tuning
        self._n_ctx = n_ctx
        self._latest = 0  # the chunk that was chosen last: news is logged

    def plan(
        self, pipeline: Pipeline, held: Sequence[int], held_hash: int, todo: Sequence[int]
    ) -> ChunkPlan:
        """Plan what follows a timeline.

        Args:
            pipeline: What will evaluate it.
            held: Tokens that are cached.
            held_hash: Prefix hash of them.
            todo: At least one token.
        """
        if len(todo) == 1:
            return ChunkPlan([_token(len(held), held_hash, todo)], 1)
        chunk = given_chunk(self._tuning, self._n_ctx)
        if chunk is None:
            chunk = self._choose(pipeline, len(held), len(todo))
        chunks = cut_chunks([*held, *todo], len(held), held_hash, chunk=chunk)
        return ChunkPlan(chunks, self._window(pipeline, len(chunks)))

    def _window(self, pipeline: Pipeline, n_chunks: int) -> int:
        """Return how many chunks overlap: there must be several, and somewhere to send them."""
        overlap = self._tuning.pipeline and n_chunks > 1 and pipeline.n_remote > 0
        return window_size(self._tuning, pipeline.n_remote, n_chunks) if overlap else 1

    def _choose(self, pipeline: Pipeline, start: int, n_tokens: int) -> int:
        """Return the tokens per chunk for `n_tokens` from `start` on, and log a new choice."""
        cap = prefill_cap(self._tuning, self._n_ctx)
        if n_tokens <= GRANULE:
            return cap
        window = self._window(pipeline, n_tokens)
        stretch = Stretch(start=start, n_tokens=n_tokens, cap=cap, window=window)
        costs = pipeline.costs()
        choice = choose(None if costs is None else list(costs.values()), stretch)
        if choice.chunk != self._latest:
            self._latest = choice.chunk
            log.debug("chunks of a prompt: %s", choice.explain(stretch, dict(costs or {})))
        return choice.chunk


def _token(pos0: int, prefix_hash: int, token: Sequence[int]) -> Chunk:
    return Chunk(
        tokens=tuple(token),
        pos0=pos0,
        prefix_hash=prefix_hash,
        result_hash=extend(prefix_hash, token),
        n_logits=1,
    )
