"""Takes the times of spans for the trace and for the decode profile.

Owns: which moments of a span matter, on the coordinator (`RunProfile`) and on a worker
(`StageProfile`), and the line of a decode step. Refuses to know: how spans travel, the format of
traces. Invariant: exists only where somebody asked for it, so that the others pay nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ds4py.cluster.prefill import Span
from ds4py.cluster.registry import WorkerRecord
from ds4py.cluster.trace import (
    COORDINATOR,
    Answer,
    Hop,
    Interval,
    Phase,
    Recorder,
    SpanRef,
    now_usec,
    place,
)
from ds4py.contracts import SessionId, SliceOutput
from ds4py.errors import Ds4Error
from ds4py.spans import LayerSpan
from ds4py.wire.messages import Result, Telemetry, Work

log = logging.getLogger(__name__)


class RunProfile:
    """Times of one prefill or decode step, as the coordinator sees it; used by one thread.

    Args:
        recorder: Where they go; None keeps no trace.
        session: The timeline.
        hops: The route's remote stages.
        spans: Of the run.
        log_decode: Write a line; the run is one decode step.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        session: SessionId,
        hops: Sequence[Hop],
        spans: Sequence[Span],
        *,
        log_decode: bool,
    ):
        self._recorder = recorder
        self._session = session
        self._hops = hops
        self._sent: dict[int, int] = {}
        self._began = now_usec()
        whole = sum(len(span.tokens) for span in spans)
        self._whole = SpanRef(session, 0, spans[0].pos0, whole)
        self._seen: list[Interval] | None = [] if log_decode else None

    def _ref(self, span: Span, request: int = 0) -> SpanRef:
        return SpanRef(self._session, request, span.pos0, len(span.tokens))

    def _own(self, phase: Phase, start: int, end: int, span: SpanRef) -> None:
        self._add(Interval(COORDINATOR, phase, start, max(0, end - start), span))

    def _add(self, *seen: Interval | Answer) -> None:
        if self._recorder is not None:
            self._recorder.add(*seen)
        if self._seen is not None:
            for item in seen:
                self._seen += [item] if isinstance(item, Interval) else place(item, {})

    def local(self, span: Span, began: int, eval_usec: int) -> None:
        """Take note that our own layers have just evaluated a span that was given to them."""
        now = now_usec()
        start = max(began, now - eval_usec)
        self._own(Phase.QUEUE, began, start, self._ref(span))
        self._own(Phase.COMPUTE, start, now, self._ref(span))

    def posted(self, span: Span, request: int, began: int) -> None:
        """Take note that a span was just given to the connection, an attempt begun at `began`."""
        self._sent[request] = began
        self._own(Phase.SEND, began, now_usec(), self._ref(span, request))

    def answered(self, span: Span, request: int, wait_usec: int, result: Result) -> None:
        """Take note of the answer to a span."""
        sent = self._sent.pop(request)
        ref = self._ref(span, request)
        answer = Answer(
            span=ref, hops=self._hops, records=result.telemetry, sent=sent, wait_usec=wait_usec
        )
        self._own(Phase.WAIT, sent, sent + wait_usec, ref)
        self._add(answer)

    def head(self, span: Span, began: int) -> None:
        """Take note that our own output head was just applied."""
        self._own(Phase.HEAD, began, now_usec(), self._ref(span))

    def finished(self) -> None:
        """Take note that the run has its logits."""
        now = now_usec()
        self._own(Phase.RUN, self._began, now, self._whole)
        if self._seen is not None:
            log.info("%s", decode_line(self._whole.pos0, self._hops, self._seen))


def profile_run(
    recorder: Recorder | None,
    session: SessionId,
    workers: Sequence[WorkerRecord],
    spans: Sequence[Span],
    *,
    log_decode: bool,
) -> RunProfile | None:
    """Return what takes the times of a run, or None if nobody wants them."""
    logs = log_decode and len(spans) == 1 and len(spans[0].tokens) == 1
    if recorder is None and not logs:
        return None
    hops = [Hop(worker.name, (worker.span.start, worker.span.end)) for worker in workers]
    return RunProfile(recorder, session, hops, spans, log_decode=logs)


def profile_stage(
    recorder: Recorder | None, layers: LayerSpan, connection: str, *, log_decode: bool
) -> StageProfile | None:
    """Return what takes the times of a connection's spans, or None if nobody wants them."""
    if recorder is None and not log_decode:
        return None
    return StageProfile(recorder, worker_name(layers), connection, log_decode=log_decode)


def worker_name(layers: LayerSpan) -> str:
    """Return how a worker names itself in a trace."""
    return f"worker (layers {layers})"


def decode_line(pos0: int, hops: Sequence[Hop], seen: Sequence[Interval]) -> str:
    """Return what became of the time of one token.

    Args:
        pos0: Position of the token.
        hops: The remote stages.
        seen: Every interval of it.
    """

    def usec(stage: str, *phases: Phase) -> str:
        return f"{_sum([i for i in seen if i.stage == stage], *phases):>6}"

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


_TOLD: Final = (
    ("queue", Phase.QUEUE),
    ("eval", Phase.COMPUTE),
    ("send", Phase.SEND),
    ("wait", Phase.WAIT),
)
"""What a worker says of a decode step."""


@dataclass(slots=True)
class _Passage:
    """One span on its way through a worker, in microseconds of our own clock."""

    span: SpanRef
    arrived: int = field(default_factory=now_usec)
    started: int = 0
    computed: int = 0

    def pieces(self, now: int, record: Telemetry | None) -> list[tuple[Phase, int, int]]:
        """Return (phase, start, length) of everything until now, without gaps.

        Args:
            now: When the answer left us, or came from the next hop.
            record: Our own, with the times of the forwarding; None if nothing was forwarded.
        """
        if record is None:
            ends = [(Phase.QUEUE, self.started), (Phase.COMPUTE, self.computed)]
        else:
            back = max(self.computed, now - record.downstream_wait_usec)
            out = max(self.computed, back - record.forward_send_usec)
            ends = [
                (Phase.QUEUE, self.started),
                (Phase.COMPUTE, self.computed),
                (Phase.QUEUE, out),  # behind what else goes to the next hop
                (Phase.SEND, back),
                (Phase.WAIT, now),
            ]
        starts = [self.arrived, *(end for _, end in ends)]
        return [
            (phase, start, end - start)
            for start, (phase, end) in zip(starts, ends, strict=False)
            if end > start or phase is Phase.COMPUTE
        ]


class StageProfile:
    """Times of the spans of one connection that a worker serves; used from any thread.

    Each span is told of by `arrived`, `started`, `evaluated` and, if it was forwarded, `relayed`,
    in this order.

    Args:
        recorder: Where they go; None keeps no trace.
        stage: Name of the worker in the trace.
        connection: Name of the connection in the log.
        log_decode: Write a line for each decode step.
    """

    def __init__(self, recorder: Recorder | None, stage: str, connection: str, *, log_decode: bool):
        self._recorder = recorder
        self._stage = stage
        self._connection = connection
        self._log_decode = log_decode
        self._open: dict[int, _Passage] = {}

    def arrived(self, work: Work) -> None:
        """Take note that a span was just read and accepted."""
        self._open[work.request_id] = _Passage(
            SpanRef(work.session_id, work.request_id, work.pos0, work.n_tokens)
        )

    def started(self, request: int) -> None:
        """Take note that the device has just begun with a span."""
        passage = self._open.get(request)
        if passage is not None:  # a peer may use the same id twice
            passage.started = now_usec()

    def evaluated(self, request: int, output: SliceOutput | Ds4Error, *, forwarded: bool) -> None:
        """Take note that the device is just done with a span, or will not evaluate it."""
        passage = self._open.get(request)
        if passage is None:
            return
        if isinstance(output, Ds4Error) or not forwarded:
            del self._open[request]
        if isinstance(output, SliceOutput):
            # what was started ahead was computed only when the span before it was done
            passage.started = max(passage.started, now_usec() - output.eval_usec)
            passage.computed = min(now_usec(), passage.started + output.eval_usec)
            if not forwarded:
                self._conclude(passage, None)

    def relayed(self, result: Result) -> None:
        """Take note that the answer to a forwarded span has just come, our own record last."""
        passage = self._open.pop(result.request_id, None)
        if passage is not None:
            self._conclude(passage, result.telemetry[-1] if result.telemetry else None)

    def _conclude(self, passage: _Passage, record: Telemetry | None) -> None:
        seen = [Interval(self._stage, *p, passage.span) for p in passage.pieces(now_usec(), record)]
        if self._recorder is not None:
            self._recorder.add(*seen)
        if self._log_decode and passage.span.n_tokens == 1:
            told = [f"{name} {_sum(seen, phase):>6}" for name, phase in _TOLD]
            pos0 = passage.span.pos0
            log.info("%s: decode at %6d: %s us", self._connection, pos0, " ".join(told))


def _sum(seen: Sequence[Interval], *phases: Phase) -> int:
    return sum(interval.usec for interval in seen if interval.phase in phases)
