"""Takes the times of the chunks that a worker serves, for the trace and for the decode profile.

Owns: which of their moments matter. Refuses to know: how chunks travel, the format of traces.
Invariant: exists only where somebody asked for it, so that the others pay nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final

from ds4py.contracts import ForwardOutput
from ds4py.layer_range import LayerRange
from ds4py.tracing.events import (
    ChunkRef,
    Phase,
    TraceEvent,
    TraceRecorder,
    now_usec,
    total_usec,
)
from ds4py.wire.messages import Result, Telemetry, Work

log = logging.getLogger(__name__)


def profile_stage(
    recorder: TraceRecorder | None, layers: LayerRange, connection: str, *, log_decode: bool
) -> StageProfile | None:
    """Return what takes the times of a connection's spans, or None if nobody wants them."""
    if recorder is None and not log_decode:
        return None
    return StageProfile(recorder, worker_name(layers), connection, log_decode=log_decode)


def worker_name(layers: LayerRange) -> str:
    """Return how a worker names itself in a trace."""
    return f"worker (layers {layers})"


_TOLD: Final = (
    ("queue", Phase.QUEUE),
    ("eval", Phase.COMPUTE),
    ("send", Phase.SEND),
    ("wait", Phase.WAIT),
)
"""What a worker says of a decode step."""


@dataclass(slots=True)
class _ChunkTimes:
    """One span on its way through a worker, in microseconds of our own clock."""

    chunk: ChunkRef
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

    Each span is told of by `arrived`, `evaluated` and, if it was forwarded, `relayed`,
    in this order.

    Args:
        recorder: Where they go; None keeps no trace.
        stage: Name of the worker in the trace.
        connection: Name of the connection in the log.
        log_decode: Write a line for each decode step.
    """

    def __init__(
        self, recorder: TraceRecorder | None, stage: str, connection: str, *, log_decode: bool
    ):
        self._recorder = recorder
        self._stage = stage
        self._connection = connection
        self._log_decode = log_decode
        self._open: dict[int, _ChunkTimes] = {}

    def arrived(self, work: Work) -> None:
        """Take note that a span was just read and accepted."""
        self._open[work.request_id] = _ChunkTimes(
            ChunkRef(work.session_id, work.request_id, work.pos0, work.n_tokens)
        )

    def evaluated(self, request: int, output: ForwardOutput | None, *, forwarded: bool) -> None:
        """Take note that the device is just done with a span, or will not evaluate it (None)."""
        times = self._open.get(request)
        if times is None:
            return
        if output is None or not forwarded:
            del self._open[request]
        if output is not None:
            times.computed = now_usec()
            times.started = max(times.arrived, times.computed - output.eval_usec)
            if not forwarded:
                self._conclude(times, None)

    def relayed(self, result: Result) -> None:
        """Take note that the answer to a forwarded span has just come, our own record last."""
        times = self._open.pop(result.request_id, None)
        if times is not None:
            self._conclude(times, result.telemetry[-1] if result.telemetry else None)

    def _conclude(self, times: _ChunkTimes, record: Telemetry | None) -> None:
        seen = [TraceEvent(self._stage, *p, times.chunk) for p in times.pieces(now_usec(), record)]
        if self._recorder is not None:
            self._recorder.add(*seen)
        if self._log_decode and times.chunk.n_tokens == 1:
            told = [f"{name} {total_usec(seen, phase):>6}" for name, phase in _TOLD]
            pos0 = times.chunk.pos0
            log.info("%s: decode at %6d: %s us", self._connection, pos0, " ".join(told))
