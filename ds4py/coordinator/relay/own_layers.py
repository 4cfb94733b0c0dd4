"""The coordinator's own layers within one run.

Owns: what of a run they were given, and which chunk is ahead. Refuses to know: links, answers of
hops. Invariant: one chunk at most is ahead of what has left; it is evaluated before any other.

Where own layers can be given a chunk while they evaluate the one before it, they are: then its
hidden states leave the device while the next chunk is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from ds4py.contracts import ForwardOutput, OutputKind, SessionId
from ds4py.coordinator.chunked_prefill import Chunk
from ds4py.stage.executor import wait_for
from ds4py.stage.session_table import StageRequest
from ds4py.stage.stage import Stage
from ds4py.tracing.events import now_usec


class OwnOutput(NamedTuple):
    """What own layers made of a chunk, and when they were given it (microseconds)."""

    output: ForwardOutput
    began: int


class OwnLayers:
    """Evaluates the chunks of one run, in order.

    Args:
        stage: The layers.
        session: Its timeline.
        chunks: Of the run.
        bits: Packing of hidden states for the next stage.
        is_last: There is no next stage: logits are made here.
        overlap: Whether chunks may run ahead, as far as the run is concerned.
        timeout: Seconds to wait for one chunk.
    """

    def __init__(
        self,
        stage: Stage,
        session: SessionId,
        chunks: Sequence[Chunk],
        *,
        bits: int,
        is_last: bool,
        overlap: bool,
        timeout: float,
    ):
        self._stage = stage
        self._session = session
        self._chunks = chunks
        self._bits = bits
        self._is_last = is_last
        self._overlap = overlap and stage.runner.overlaps
        self._timeout = timeout
        self._ahead: tuple[int, Future[ForwardOutput]] | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether they have a chunk that no other stage has."""
        return self._ahead is not None

    def evaluate(self, index: int) -> OwnOutput:
        """Evaluate one chunk, and begin with the next one if that may run ahead."""
        began, output = self._ahead or self._begin(index)
        more = self._overlap and index + 1 < len(self._chunks)
        self._ahead = self._begin(index + 1) if more else None
        return OwnOutput(wait_for(output, self._timeout), began)

    def stop_running_ahead(self) -> None:
        """Begin with no further chunk early: nobody may want it."""
        self._overlap = False

    def abandon(self) -> None:
        """Leave out what is ahead, unless it has begun."""
        if self._ahead is not None:
            self._ahead[1].cancel()

    def _begin(self, index: int) -> tuple[int, Future[ForwardOutput]]:
        chunk = self._chunks[index]
        request = StageRequest(
            session=self._session,
            tokens=chunk.tokens,
            pos0=chunk.pos0,
            prefix_hash=chunk.prefix_hash,
            result_hash=chunk.result_hash,
            reset=chunk.pos0 == 0,
            output_kind=self._kind(chunk),
            reply_bits=self._bits,
            n_logits=max(1, chunk.n_logits),
        )
        return now_usec(), self._stage.submit(request)

    def _kind(self, chunk: Chunk) -> OutputKind:
        if not self._is_last:
            return OutputKind.HIDDEN
        return OutputKind.LOGITS if chunk.n_logits else OutputKind.NOTHING
