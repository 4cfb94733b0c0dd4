"""Where the time of spans went: intervals, and how a RESULT's telemetry becomes some.

Owns: the values of a trace, their bounded buffer, where the intervals of remote stages are placed,
the shares of a stage's time. Refuses to know: files and their format, who measures. Invariant: what
is placed for one answer lies inside the time in which the coordinator waited for it, whatever the
peers claim; recording never waits and never fails.

The clocks of machines are not synchronised, and a stage reports durations, not times. An answer is
therefore laid out from the outside in: the first hop had the coordinator's own wait, each next hop
the time in which the hop before it sent and waited. What a hop does not account for is the way
there and back; it is halved, unless the stage was still busy with an earlier span, which then
explains it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Final

from ds4py.wire.messages import Telemetry

COORDINATOR: Final = "coordinator"
_LIMIT: Final = 1 << 16


def now_usec() -> int:
    """Return the monotonic clock of this machine in microseconds."""
    return time.monotonic_ns() // 1000


class Phase(Enum):
    """What a stage does during an interval."""

    RUN = "run"  # a whole prefill or decode step, as the coordinator sees it
    COMPUTE = "compute"
    HEAD = "head"
    SEND = "send"
    WAIT = "wait"  # for the answer of the next stage
    QUEUE = "queue"  # behind other spans
    WIRE = "wire"  # to or from the stage before: sockets, codecs, hand-overs


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """Which span an interval is about.

    Args:
        session: Timeline.
        request: Request id; 0 where a span was not sent.
        pos0: Absolute position of its first token.
        n_tokens: Its length; 1 is a decode step.
    """

    session: int
    request: int
    pos0: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """A piece of time of one stage.

    Args:
        stage: "coordinator" or a worker's name.
        phase: What it did.
        start: Microseconds on the clock of the process that records.
        usec: Length, not negative.
        chunk: What it was about.
    """

    stage: str
    phase: Phase
    start: int
    usec: int
    chunk: ChunkRef

    @property
    def end(self) -> int:
        """Microseconds on the same clock as `start`."""
        return self.start + self.usec


@dataclass(frozen=True, slots=True)
class TracedHop:
    """A remote stage: its name, and its first and last layer."""

    name: str
    layers: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultTiming:
    """One RESULT as the coordinator received it.

    Args:
        chunk: What was asked.
        hops: The route, in layer order.
        records: The telemetry of the RESULT; any peer may claim anything.
        sent: When the span was given to the connection, as `TraceEvent.start`.
        wait_usec: From then until the RESULT was read.
    """

    chunk: ChunkRef
    hops: Sequence[TracedHop]
    records: Sequence[Telemetry]
    sent: int
    wait_usec: int


def events_of(answer: ResultTiming, busy_until: Mapping[str, int]) -> list[TraceEvent]:
    """Lay out what the stages of a route say about one span.

    The intervals of a stage follow each other without gaps, and those of the next stage fill its
    SEND and WAIT. Durations are kept as reported unless they do not fit. A hop without a record is
    left out; the hop behind it has its time.

    Args:
        answer: Of the span.
        busy_until: Where the computations of earlier spans that were placed end, by stage name; a
            later one begins no sooner if its own numbers allow.
    """
    records = {(r.layer_start, r.layer_end): r for r in answer.records}
    start, usec, lead = answer.sent, answer.wait_usec, 0
    placed: list[TraceEvent] = []
    for hop in answer.hops:
        record = records.get(hop.layers)
        if record is None:
            continue
        queued = busy_until.get(hop.name, start) - start
        pieces = _pieces(record, usec, lead=lead, queued=queued)
        for phase, length in pieces:
            if length or phase is Phase.COMPUTE:
                placed.append(TraceEvent(hop.name, phase, start, length, answer.chunk))
            start += length
        _, _, (_, lead), (_, waited), (_, back) = pieces
        start, usec = start - back - waited - lead, lead + waited
    return placed


def _pieces(record: Telemetry, usec: int, *, lead: int, queued: int) -> list[tuple[Phase, int]]:
    """Divide the time that a stage had for a span, in the order in which things happen.

    Args:
        record: What the stage says.
        usec: What it had, its downstream included.
        lead: What of it the stage before took for sending.
        queued: How long it was still busy with other spans; negative if it was idle.
    """
    compute = min(record.eval_usec, usec)
    send = min(record.forward_send_usec, usec - compute)
    wait = min(record.downstream_wait_usec, usec - compute - send)
    rest = usec - compute - send - wait
    travel = (rest + lead) // 2  # the frame, then half of what is left
    there = min(rest, max(queued, travel))
    return [
        (Phase.QUEUE if queued > travel else Phase.WIRE, there),
        (Phase.COMPUTE, compute),
        (Phase.SEND, send),
        (Phase.WAIT, wait),
        (Phase.WIRE, rest - there),
    ]


class TraceRecorder:
    """Keeps what was seen until somebody takes it.

    `add` may be called from any thread, `take` from one.

    Args:
        limit: Most intervals and answers that are kept; more are dropped and counted.
    """

    def __init__(self, limit: int = _LIMIT):
        self._limit = limit
        self._lock = threading.Lock()
        self._seen: deque[TraceEvent | ResultTiming] = deque()
        self._busy_until: dict[str, int] = {}
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """Intervals and answers that found no room, ever."""
        return self._dropped

    def add(self, *seen: TraceEvent | ResultTiming) -> None:
        """Keep what was seen, if there is room."""
        with self._lock:
            if len(self._seen) + len(seen) > self._limit:
                self._dropped += len(seen)
            else:
                self._seen.extend(seen)

    def take(self) -> list[TraceEvent]:
        """Return everything since the last call as intervals, answers laid out with `events_of`."""
        with self._lock:
            seen, self._seen = self._seen, deque()
        return [interval for item in seen for interval in self._intervals(item)]

    def _intervals(self, item: TraceEvent | ResultTiming) -> Iterable[TraceEvent]:
        if isinstance(item, TraceEvent):
            return [item]
        placed = events_of(item, self._busy_until)
        for interval in placed:
            if interval.phase is Phase.COMPUTE:
                busy = self._busy_until.get(interval.stage, 0)
                self._busy_until[interval.stage] = max(busy, interval.end)
        return placed


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What a stage did with the time of a run, as fractions of 1 whose sum is 1.

    Args:
        compute: Evaluating.
        wire: Not evaluating, with a span on its way to or from it, or in a queue.
        wait: None of these, with a span at a later stage.
        idle: Nothing to do with any span.
    """

    compute: float
    wire: float
    wait: float
    idle: float

    @property
    def bubble(self) -> float:
        """The part of the time in which the stage did not evaluate."""
        return 1.0 - self.compute


_SHARED: Final = (
    (Phase.COMPUTE, Phase.HEAD),
    (Phase.SEND, Phase.WIRE, Phase.QUEUE),
    (Phase.WAIT,),
)
"""Who has a moment in which a stage does several things: the first that is among them."""


def stage_shares(intervals: Sequence[TraceEvent]) -> dict[str, Shares]:
    """Return how each stage spent its time, in order of appearance.

    Args:
        intervals: Of one run: all that `TraceRecorder.take` returned for it. The run lasts from the
            first beginning to the last end of any of them.
    """
    if not intervals:
        return {}
    total = max(i.end for i in intervals) - min(i.start for i in intervals)
    by_stage: dict[str, list[TraceEvent]] = {}
    for interval in intervals:
        by_stage.setdefault(interval.stage, []).append(interval)
    return {stage: _shares(own, total) for stage, own in by_stage.items()} if total else {}


def _shares(intervals: list[TraceEvent], total: int) -> Shares:
    covered = [0]
    for n in range(1, len(_SHARED) + 1):
        phases = {phase for group in _SHARED[:n] for phase in group}
        covered.append(_union(i for i in intervals if i.phase in phases))
    compute, wire, wait = ((after - before) / total for before, after in pairwise(covered))
    return Shares(compute=compute, wire=wire, wait=wait, idle=1.0 - covered[-1] / total)


def _union(intervals: Iterator[TraceEvent]) -> int:
    """Return the microseconds that are in at least one interval."""
    covered, reached = 0, 0
    for interval in sorted(intervals, key=lambda i: i.start):
        start = max(interval.start, reached)
        if interval.end > start:
            covered += interval.end - start
            reached = interval.end
    return covered


def total_usec(seen: Sequence[TraceEvent], *phases: Phase) -> int:
    """Return the length of all intervals of some phases."""
    return sum(interval.usec for interval in seen if interval.phase in phases)
