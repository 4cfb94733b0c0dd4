"""Where intervals are placed, what a stage did with its time, the form of the written trace."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.tracing import perfetto
from ds4py.tracing.events import (
    ChunkRef,
    Phase,
    ResultTiming,
    Shares,
    TracedHop,
    TraceEvent,
    TraceRecorder,
    events_of,
    stage_shares,
)
from ds4py.tracing.perfetto import ChromeEvents, TraceWriter
from ds4py.wire.messages import Telemetry
from tests.support.clusters import wait_until
from tests.support.strategies import telemetries

HOPS = [TracedHop("first", (0, 1)), TracedHop("second", (2, 3)), TracedHop("third", (4, 5))]
SPAN = ChunkRef(session=2**63 + 1, request=7, pos0=512, n_tokens=256)


def record(hop: TracedHop, compute: int, send: int = 0, wait: int = 0) -> Telemetry:
    return Telemetry(
        layer_start=hop.layers[0],
        layer_end=hop.layers[1],
        route_index=0,
        pos0=0,
        n_tokens=1,
        eval_usec=compute,
        downstream_wait_usec=wait,
        forward_send_usec=send,
        input_bytes=0,
        output_bytes=0,
    )


def answer(records: Sequence[Telemetry], wait_usec: int, sent: int = 1000) -> ResultTiming:
    return ResultTiming(chunk=SPAN, hops=HOPS, records=records, sent=sent, wait_usec=wait_usec)


def pieces(intervals: Sequence[TraceEvent], stage: str) -> list[tuple[str, int, int]]:
    return [(i.phase.value, i.start, i.end) for i in intervals if i.stage == stage]


# --- placing --------------------------------------------------------------------------------


def test_each_stage_lies_where_the_stage_before_sends_and_waits() -> None:
    records = [
        record(HOPS[2], 100),
        record(HOPS[1], 50, send=5, wait=130),
        record(HOPS[0], 20, send=3, wait=195),
    ]
    placed = events_of(answer(records, 230), {})
    assert pieces(placed, "first") == [
        ("wire", 1000, 1006),
        ("compute", 1006, 1026),
        ("send", 1026, 1029),
        ("wait", 1029, 1224),
        ("wire", 1224, 1230),
    ]
    assert pieces(placed, "second") == [
        ("wire", 1026, 1034),
        ("compute", 1034, 1084),
        ("send", 1084, 1089),
        ("wait", 1089, 1219),
        ("wire", 1219, 1224),
    ]
    assert pieces(placed, "third") == [
        ("wire", 1084, 1104),
        ("compute", 1104, 1204),
        ("wire", 1204, 1219),
    ]
    assert {i.chunk for i in placed} == {SPAN}


def test_a_stage_that_was_busy_explains_what_is_unaccounted_for() -> None:
    placed = events_of(answer([record(HOPS[0], 100)], 200), {"first": 1090})
    assert pieces(placed, "first") == [
        ("queue", 1000, 1090),
        ("compute", 1090, 1190),
        ("wire", 1190, 1200),
    ]
    early = events_of(answer([record(HOPS[0], 100)], 200), {"first": 1010})
    assert pieces(early, "first")[0] == ("wire", 1000, 1050)


def test_a_stage_that_reports_nothing_is_left_out_and_a_stranger_is_not_believed() -> None:
    stranger = TracedHop("stranger", (9, 9))
    placed = events_of(answer([record(HOPS[1], 100), record(stranger, 5)], 140), {})
    assert {i.stage for i in placed} == {"second"}
    assert sum(i.usec for i in placed) == 140
    assert events_of(answer([], 140), {}) == []


@given(
    st.lists(telemetries | st.builds(record, st.sampled_from(HOPS), *[st.integers(0, 3000)] * 3)),
    st.integers(0, 2**40),
    st.dictionaries(st.sampled_from([hop.name for hop in HOPS]), st.integers(0, 2**41)),
)
def test_whatever_peers_claim_stays_inside_the_request(records, wait_usec, busy) -> None:
    asked = answer(records, wait_usec)
    placed = events_of(asked, busy)
    outer = (asked.sent, asked.sent + wait_usec)
    for hop in HOPS:
        own = [i for i in placed if i.stage == hop.name]
        if not own:
            continue
        assert all(i.usec >= 0 for i in own)
        assert (own[0].start, own[-1].end) == outer  # its sum is exactly what it had
        assert all(before.end == after.start for before, after in pairwise(own))
        (compute,) = [i for i in own if i.phase is Phase.COMPUTE]
        late = compute.start >= busy.get(hop.name, 0)
        assert late or own[-1].phase is not Phase.WIRE  # or its own numbers left no room
        below = [i for i in own if i.phase in {Phase.SEND, Phase.WAIT}]
        outer = (below[0].start, below[-1].end) if below else (compute.end, compute.end)


def simulate(
    transit: int, send: int, chunks: Sequence[Sequence[int]]
) -> tuple[list[ResultTiming], list[Any]]:
    """A prefill over three first-in first-out stages: what is reported, and what really was."""
    free = [0] * len(HOPS)
    answers, truth = [], []
    for n, computes in enumerate(chunks):
        begins, ends, at = [], [], 1000 * n
        sent = at
        for k, compute in enumerate(computes):
            begins.append(max(at + transit, free[k]))
            ends.append(begins[k] + compute)
            free[k] = ends[k]
            at = ends[k] + send
            truth.append((HOPS[k].name, begins[k], ends[k]))
        back = ends[-1] + transit  # when the last stage's answer is read by the one before
        records = [record(HOPS[-1], computes[-1])]
        for k in reversed(range(len(HOPS) - 1)):
            records.append(record(HOPS[k], computes[k], send, back - ends[k] - send))
            back += transit
        answers.append(answer(records, back - sent, sent))
    return answers, truth


@given(
    st.integers(0, 500),
    st.integers(0, 900),
    st.lists(st.lists(st.integers(0, 5000), min_size=3, max_size=3), min_size=1, max_size=12),
)
def test_a_pipeline_whose_ways_there_and_back_are_equal_is_recovered_exactly(transit, send, chunks):
    answers, truth = simulate(transit, send, chunks)
    recorder = TraceRecorder()
    recorder.add(*answers)
    placed = recorder.take()
    assert [
        (i.stage, i.start, i.end) for i in placed if i.phase is Phase.COMPUTE
    ] == truth  # so computations of one stage overlap as little as they really did


# --- shares ---------------------------------------------------------------------------------


intervals = st.builds(
    TraceEvent,
    st.sampled_from(["coordinator", "first"]),
    st.sampled_from(Phase),
    st.integers(0, 60),
    st.integers(0, 20),
    st.just(SPAN),
)


def at(own: Sequence[TraceEvent], moment: int) -> str:
    """What a stage does in one microsecond."""
    phases = {i.phase for i in own if i.start <= moment < i.end}
    if phases & {Phase.COMPUTE, Phase.HEAD}:
        return "compute"
    if phases & {Phase.SEND, Phase.WIRE, Phase.QUEUE}:
        return "wire"
    return "wait" if Phase.WAIT in phases else "idle"


@given(st.lists(intervals, min_size=1))
def test_shares_count_every_moment_once(seen) -> None:
    start, end = min(i.start for i in seen), max(i.end for i in seen)
    shares = stage_shares(seen)
    assert list(shares) == list(dict.fromkeys(i.stage for i in seen)) * (end > start)
    for stage, share in shares.items():
        own = [i for i in seen if i.stage == stage]
        doing = [at(own, moment) for moment in range(start, end)]
        for name in Shares.__slots__:
            expected = doing.count(name) / (end - start)
            assert getattr(share, name) == pytest.approx(expected, abs=1e-9)
        assert share.bubble == pytest.approx(1 - share.compute)


def test_no_intervals_have_no_shares() -> None:
    assert stage_shares([]) == {}


# --- the buffer -----------------------------------------------------------------------------


def test_a_full_recorder_drops_counts_and_goes_on() -> None:
    recorder = TraceRecorder(limit=3)
    seen = [TraceEvent("a", Phase.RUN, n, 1, SPAN) for n in range(6)]
    for interval in seen[:5]:
        recorder.add(interval)
    assert (recorder.take(), recorder.dropped) == (seen[:3], 2)
    recorder.add(*seen[:4])
    recorder.add(seen[5])
    assert (recorder.take(), recorder.dropped) == ([seen[5]], 6)


def test_what_many_threads_add_is_there_once() -> None:
    recorder = TraceRecorder(limit=1000)
    seen = [[TraceEvent(str(t), Phase.RUN, n, 1, SPAN) for n in range(300)] for t in range(4)]

    def add(own: list[TraceEvent]) -> None:
        for interval in own:
            recorder.add(interval)

    threads = [threading.Thread(target=add, args=(own,)) for own in seen]
    for thread in threads:
        thread.start()
    taken = recorder.take()
    for thread in threads:
        thread.join()
    taken += recorder.take()
    assert len(set(taken)) == len(taken)
    assert len(taken) + recorder.dropped == 1200


# --- the form -------------------------------------------------------------------------------


def complete(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def test_a_prefill_chunk_and_a_decode_step_are_told_apart() -> None:
    token = ChunkRef(session=1, request=8, pos0=768, n_tokens=1)
    form = ChromeEvents("coordinator", 5)
    seen = [
        TraceEvent("coordinator", Phase.WAIT, 10, 4, SPAN),
        TraceEvent("first", Phase.COMPUTE, 20, 3, token),
    ]
    chunk, step = complete(list(form.events(seen)))
    assert chunk == {
        "ph": "X",
        "name": "prefill 512-767",
        "cat": "wait,prefill",
        "ts": 10,
        "dur": 4,
        "pid": 5,
        "tid": chunk["tid"],
        "args": {"pos0": 512, "tokens": 256, "session": "8000000000000001", "request": 7},
    }
    assert (step["name"], step["cat"], step["pid"]) == ("decode 768", "compute,decode", 501)


def test_processes_and_tracks_are_named_once() -> None:
    form = ChromeEvents("coordinator", 5)
    seen = [TraceEvent(stage, Phase.COMPUTE, 0, 9, SPAN) for stage in ("first", "second", "first")]
    events = [*form.header(), *form.events(seen), *form.events(seen)]
    names = [(e["name"], e["pid"], e["args"]["name"]) for e in events if "name" in e["args"]]
    assert names == [
        ("process_name", 5, "coordinator"),
        ("process_name", 501, "first"),
        ("thread_name", 501, "compute"),
        ("process_name", 502, "second"),
        ("thread_name", 502, "compute"),
        ("thread_name", 501, "compute 2"),
        ("thread_name", 501, "compute 3"),
        ("thread_name", 502, "compute 2"),
        ("thread_name", 501, "compute 4"),
    ]


@given(st.lists(st.lists(intervals, max_size=20), max_size=3))
def test_events_of_one_track_do_not_overlap(batches) -> None:
    form = ChromeEvents("coordinator", 5)
    events = complete([event for batch in batches for event in form.events(batch)])
    assert len(events) == sum(map(len, batches))
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        track = tracks.setdefault((event["pid"], event["tid"]), [])
        track.append((event["ts"], event["ts"] + event["dur"]))
    for track in tracks.values():
        assert all(before[1] <= after[0] for before, after in pairwise(track))


def test_a_crowd_shares_the_last_track() -> None:
    form = ChromeEvents("coordinator", 5)
    crowd = [TraceEvent("coordinator", Phase.RUN, 0, 9, SPAN)] * 100
    assert len({event["tid"] for event in complete(list(form.events(crowd)))}) == 64


# --- writing --------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto, "FLUSH_SECONDS", 0.01)


def test_the_trace_is_whole_at_any_time_and_closed_at_the_end() -> None:
    recorder, out = TraceRecorder(), io.BytesIO()
    writer = TraceWriter(recorder, out, process="coordinator", pid=5)
    for n in range(3):
        recorder.add(TraceEvent("coordinator", Phase.RUN, n, 1, SPAN))
        wait_until(lambda n=n: len(complete(json.loads(out.getvalue() + b"]"))) > n, "it is out")
    recorder.add(TraceEvent("coordinator", Phase.RUN, 3, 1, SPAN))
    writer.close()
    writer.close()
    events = json.loads(out.getvalue())
    assert [event["ts"] for event in complete(events)] == [0, 1, 2, 3]
    assert events[0] == {
        "ph": "M",
        "name": "process_name",
        "pid": 5,
        "tid": 0,
        "ts": 0,
        "args": {"name": "coordinator"},
    }


def test_what_was_dropped_is_told_in_the_trace(caplog) -> None:
    recorder, out = TraceRecorder(limit=1), io.BytesIO()
    recorder.add(TraceEvent("coordinator", Phase.RUN, 0, 1, SPAN))
    recorder.add(TraceEvent("coordinator", Phase.RUN, 1, 1, SPAN))
    TraceWriter(recorder, out, process="coordinator", pid=5).close()
    told = [e for e in json.loads(out.getvalue()) if e["name"] == "dropped_intervals"]
    assert [(event["ph"], event["args"]) for event in told] == [("M", {"dropped": 1})]
    assert "lacks intervals" in caplog.text


class Short(io.RawIOBase):
    """A stream that takes a few bytes at a time, and at last none."""

    def __init__(self, room: int):
        self.taken = b""
        self._room = room

    def write(self, data: Any) -> int:
        if len(self.taken) >= self._room:
            raise OSError(28, "No space left on device")
        part = bytes(data[:7])
        self.taken += part
        return len(part)


def test_a_stream_that_takes_little_gets_all() -> None:
    out = Short(10**6)
    TraceWriter(TraceRecorder(), out, process="coordinator", pid=5).close()  # type: ignore[arg-type]
    assert json.loads(out.taken)


def test_a_full_disk_ends_the_trace_and_nothing_else(caplog) -> None:
    recorder, out = TraceRecorder(limit=2), Short(20)
    writer = TraceWriter(recorder, out, process="coordinator", pid=5)  # type: ignore[arg-type]
    for _ in range(3):  # what is recorded later is taken and thrown away, not kept
        recorder.add(*[TraceEvent("coordinator", Phase.RUN, 0, 1, SPAN)] * 2)
        wait_until(lambda: not recorder._seen, "the recorder is emptied")
    writer.close()
    assert recorder.dropped == 0
    with caplog.at_level(logging.WARNING):
        assert caplog.text.count("No space left on device") == 1
