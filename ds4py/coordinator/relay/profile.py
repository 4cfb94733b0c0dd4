"""Takes the times of a run's chunks for the trace and for the decode profile.

Owns: which of their moments matter to the coordinator, and the line of a decode step. Refuses to
know: how chunks travel, the format of traces. Invariant: exists only where somebody asked for it,
so that the others pay nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ds4py.contracts import SessionId
from ds4py.coordinator.chunked_prefill import Chunk
from ds4py.coordinator.relay.workers.registry import WorkerRecord
from ds4py.tracing.events import (
    COORDINATOR,
    ChunkRef,
    Phase,
    ResultTiming,
    TracedHop,
    TraceEvent,
    TraceRecorder,
    events_of,
    now_usec,
    total_usec,
)
from ds4py.wire.messages import Result

log = logging.getLogger(__name__)


class RunProfile:
    """Times of one prefill or decode step, as the coordinator sees it; used by one thread.

    Args:
        recorder: Where they go; None keeps no trace.
        session: The timeline.
        hops: The route's remote stages.
        chunks: Of the run.
        log_decode: Write a line; the run is one decode step.
    """

    def __init__(
        self,
        recorder: TraceRecorder | None,
        session: SessionId,
        hops: Sequence[TracedHop],
        chunks: Sequence[Chunk],
        *,
        log_decode: bool,
    ):
        self._recorder = recorder
        self._session = session
        self._hops = hops
        self._sent: dict[int, int] = {}
        self._began = now_usec()
        whole = sum(len(chunk.tokens) for chunk in chunks)
        self._whole = ChunkRef(session, 0, chunks[0].pos0, whole)
        self._seen: list[TraceEvent] | None = [] if log_decode else None

    def _ref(self, chunk: Chunk, request: int = 0) -> ChunkRef:
        return ChunkRef(self._session, request, chunk.pos0, len(chunk.tokens))

    def _own(self, phase: Phase, start: int, end: int, chunk: ChunkRef) -> None:
        self._add(TraceEvent(COORDINATOR, phase, start, max(0, end - start), chunk))

    def _add(self, *seen: TraceEvent | ResultTiming) -> None:
        if self._recorder is not None:
            self._recorder.add(*seen)
        if self._seen is not None:
            for item in seen:
                self._seen += [item] if isinstance(item, TraceEvent) else events_of(item, {})

    def local(self, chunk: Chunk, began: int, eval_usec: int) -> None:
        """Take note that our own layers have just evaluated a span that was given to them."""
        now = now_usec()
        start = max(began, now - eval_usec)
        self._own(Phase.QUEUE, began, start, self._ref(chunk))
        self._own(Phase.COMPUTE, start, now, self._ref(chunk))

    def posted(self, chunk: Chunk, request: int, began: int) -> None:
        """Take note that a span was just given to the connection, an attempt begun at `began`."""
        self._sent[request] = began
        self._own(Phase.SEND, began, now_usec(), self._ref(chunk, request))

    def answered(self, chunk: Chunk, request: int, wait_usec: int, result: Result) -> None:
        """Take note of the answer to a span."""
        sent = self._sent.pop(request)
        ref = self._ref(chunk, request)
        answer = ResultTiming(
            chunk=ref, hops=self._hops, records=result.telemetry, sent=sent, wait_usec=wait_usec
        )
        self._own(Phase.WAIT, sent, sent + wait_usec, ref)
        self._add(answer)

    def head(self, chunk: Chunk, began: int) -> None:
        """Take note that our own output head was just applied."""
        self._own(Phase.HEAD, began, now_usec(), self._ref(chunk))

    def finished(self) -> None:
        """Take note that the run has its logits."""
        now = now_usec()
        self._own(Phase.RUN, self._began, now, self._whole)
        if self._seen is not None:
            log.info("%s", decode_line(self._whole.pos0, self._hops, self._seen))


def profile_run(
    recorder: TraceRecorder | None,
    session: SessionId,
    workers: Sequence[WorkerRecord],
    chunks: Sequence[Chunk],
    *,
    log_decode: bool,
) -> RunProfile | None:
    """Return what takes the times of a run, or None if nobody wants them."""
    logs = log_decode and len(chunks) == 1 and len(chunks[0].tokens) == 1
    if recorder is None and not logs:
        return None
    hops = [TracedHop(worker.name, (worker.layers.start, worker.layers.end)) for worker in workers]
    return RunProfile(recorder, session, hops, chunks, log_decode=logs)


def decode_line(pos0: int, hops: Sequence[TracedHop], seen: Sequence[TraceEvent]) -> str:
    """Return what became of the time of one token.

    Args:
        pos0: Position of the token.
        hops: The remote stages.
        seen: Every interval of it.
    """

    def usec(stage: str, *phases: Phase) -> str:
        return f"{total_usec([i for i in seen if i.stage == stage], *phases):>6}"

    own = (
        f"decode at {pos0:>6}: {usec(COORDINATOR, Phase.RUN)} us ="
        f" own layers {usec(COORDINATOR, Phase.COMPUTE)}"
        f" + remote {usec(COORDINATOR, Phase.WAIT)} (send {usec(COORDINATOR, Phase.SEND)})"
        f" + head {usec(COORDINATOR, Phase.HEAD)} + rest"
    )
    stages = [
        f"layers {hop.layers[0]}-{hop.layers[1]}:"
        f" eval {usec(hop.name, Phase.COMPUTE)} wire {usec(hop.name, Phase.WIRE)}"
        f" send {usec(hop.name, Phase.SEND)} wait {usec(hop.name, Phase.WAIT)}"
        for hop in hops
    ]
    return " | ".join([own, *stages])
