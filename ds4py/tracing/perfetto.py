"""Writes a trace as Chrome trace events, for Perfetto and chrome://tracing.

Owns: the form of events, which track an interval stands on, the thread that writes. Refuses to
know: what is measured, where the stream leads. Invariant: after each write the stream holds whole
events and lacks only the closing bracket, which the format allows; a stream that fails ends the
writing and nothing else.

Each stage is a process, each of its phases a track. Events of one track must not overlap, so a
phase gets as many tracks as it has intervals at the same time.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, Final

from ds4py.tracing.events import Phase, TraceEvent, TraceRecorder

log = logging.getLogger(__name__)

FLUSH_SECONDS: Final = 0.5
_MAX_LANES: Final = 64
_JOIN_SECONDS: Final = 5.0
_PHASES: Final = tuple(Phase)

ChromeEvent = dict[str, Any]


class ChromeEvents:
    """Turns intervals into events; used by one thread.

    Args:
        process: Name of the process that records.
        pid: Its process id. The stages that it only hears of get ids of their own, made of this
            one, so that traces of several processes can be joined.
    """

    def __init__(self, process: str, pid: int):
        self._pids: dict[str, int] = {process: pid}
        self._own = pid
        self._lanes: dict[tuple[int, Phase], list[int]] = {}
        self._process = process

    def header(self) -> list[ChromeEvent]:
        """Return the events that a trace begins with."""
        return list(self._introduce(self._process))

    def events(self, intervals: Iterable[TraceEvent]) -> Iterator[ChromeEvent]:
        """Yield an event for each interval, after what names its tracks."""
        for interval in sorted(intervals, key=lambda i: i.start):
            if interval.stage not in self._pids:
                self._pids[interval.stage] = self._own * 100 + len(self._pids)
                yield from self._introduce(interval.stage)
            pid = self._pids[interval.stage]
            lanes = self._lanes.setdefault((pid, interval.phase), [])
            lane = _free_lane(lanes, interval.start)
            tid = _PHASES.index(interval.phase) * _MAX_LANES + lane + 1
            if lane == len(lanes):
                lanes.append(0)
                name = interval.phase.value if lane == 0 else f"{interval.phase.value} {lane + 1}"
                yield _metadata("thread_name", pid, tid, name=name)
                yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
            lanes[lane] = max(lanes[lane], interval.end)
            yield _complete(interval, pid, tid)

    def dropped(self, total: int) -> ChromeEvent:
        """Return the event that says how much is missing."""
        return _metadata("dropped_intervals", self._own, 0, dropped=total)

    def _introduce(self, stage: str) -> Iterator[ChromeEvent]:
        pid = self._pids[stage]
        yield _metadata("process_name", pid, 0, name=stage)
        yield _metadata("process_sort_index", pid, 0, sort_index=list(self._pids).index(stage))


def _free_lane(lanes: list[int], start: int) -> int:
    """Return the first lane that nothing occupies at `start`; the last one takes what is left."""
    for lane, end in enumerate(lanes):
        if end <= start:
            return lane
    return min(len(lanes), _MAX_LANES - 1)


def _metadata(what: str, pid: int, tid: int, **args: object) -> ChromeEvent:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _complete(interval: TraceEvent, pid: int, tid: int) -> ChromeEvent:
    chunk = interval.chunk
    step = "decode" if chunk.n_tokens == 1 else "prefill"
    last = "" if chunk.n_tokens == 1 else f"-{chunk.pos0 + chunk.n_tokens - 1}"
    return {
        "ph": "X",
        "name": f"{step} {chunk.pos0}{last}",
        "cat": f"{interval.phase.value},{step}",
        "ts": interval.start,
        "dur": interval.usec,
        "pid": pid,
        "tid": tid,
        "args": {
            "pos0": chunk.pos0,
            "tokens": chunk.n_tokens,
            "session": f"{chunk.session:016x}",
            "request": chunk.request,
        },
    }


class TraceWriter:
    """Empties a recorder into a stream on a thread of its own.

    Args:
        recorder: Nobody else takes from it.
        out: Not closed here. Unbuffered, so that what was written survives the process.
        process: As in `ChromeEvents`.
        pid: As in `ChromeEvents`.
    """

    def __init__(self, recorder: TraceRecorder, out: BinaryIO, *, process: str, pid: int):
        self._recorder = recorder
        self._out = out
        self._events = ChromeEvents(process, pid)
        self._broken = False
        self._reported = 0
        self._closing = threading.Event()
        self._write(b"[\n" + b",\n".join(map(_line, self._events.header())))
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is left and the end of the trace; idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        try:
            while not self._closing.wait(FLUSH_SECONDS):
                self._flush()
            self._flush()
            self._write(b"\n]\n")
        except Exception:  # a trace is never worth the process
            log.exception("the trace ends here")

    def _flush(self) -> None:
        events = list(self._events.events(self._recorder.take()))
        dropped = self._recorder.dropped
        if dropped != self._reported:
            if not self._reported:
                log.warning("the trace lacks intervals that came too fast to be written")
            self._reported = dropped
            events.append(self._events.dropped(dropped))
        self._write(b"".join(b",\n" + _line(event) for event in events))

    def _write(self, text: bytes) -> None:
        rest = memoryview(text)
        try:
            while rest and not self._broken:
                rest = rest[self._out.write(rest) :]
        except OSError as e:
            self._broken = True
            log.warning("the trace ends here: %s", e.strerror)


def _line(event: ChromeEvent) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode()
