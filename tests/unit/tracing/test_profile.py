"""What the decode profile says, and what a worker makes of its own times."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.config import WorkerTuning
from ds4py.contracts import ForwardOutput, SessionId
from ds4py.coordinator.relay.profile import profile_run
from ds4py.layer_range import LayerRange
from ds4py.tracing.events import ChunkRef, Phase, TraceRecorder
from ds4py.wire.messages import Result, Telemetry
from ds4py.worker.profile import StageProfile, _ChunkTimes, profile_stage
from tests.by_hand import PROMPT, QUICK
from tests.clusters import cluster, span, start_worker
from tests.fake_runner import FakeRunner
from tests.peers import driver, entry, make_work
from tests.strategies import telemetries

TOKEN = ChunkRef(session=1, request=2, pos0=3, n_tokens=1)
OUTPUT = ForwardOutput(eval_usec=5)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "decode at" in r.getMessage()]


def test_each_token_has_one_line_with_every_stage(caplog) -> None:
    """The last chunk of the prompt has one token too, but is no step of a decode."""
    caplog.set_level(logging.INFO)
    config = replace(QUICK, decode_profile=True)
    with (
        cluster(["1-2", "3-5"], local="0:0", config=config, chunk=2) as c,
        c.backend.lease(PROMPT) as session,
    ):
        c.wait_ready()
        session.sync(PROMPT)
        for token in (7, 8):
            session.eval(token)
    number = r" *\d+"
    stage = f"eval{number} wire{number} send{number} wait{number}"
    form = (
        f"decode at{number}:{number} us = own layers{number} \\+ remote{number}"
        f" \\(send{number}\\) \\+ head{number} \\+ rest"
        f" \\| layers 1-2: {stage} \\| layers 3-5: {stage}"
    )
    told = lines(caplog)
    assert [re.fullmatch(form, line) is not None for line in told] == [True, True]
    assert [int(line.split()[2].rstrip(":")) for line in told] == [len(PROMPT), len(PROMPT) + 1]
    assert len({line.index("own layers") for line in told}) == 1


def test_a_worker_says_what_became_of_a_token(caplog) -> None:
    caplog.set_level(logging.INFO)
    worker = start_worker(FakeRunner(span("0-5")), tuning=WorkerTuning(decode_profile=True))
    try:
        with driver(worker.address, entry(span("0-5"))) as d:
            d.check([], PROMPT)
            d.check(PROMPT, [7])
    finally:
        worker.close()
    (line,) = lines(caplog)
    assert re.search(
        rf"decode at +{len(PROMPT)}: queue +\d+ eval +\d+ send +\d+ wait +\d+ us", line
    )


def test_nothing_is_measured_that_nobody_wants() -> None:
    layers = LayerRange(0, 1)
    assert profile_run(None, SessionId(1), [], [], log_decode=True) is None
    assert profile_stage(None, layers, "c", log_decode=False) is None


@given(*[st.integers(0, 2**40)] * 4, st.none() | telemetries)
def test_the_pieces_of_a_passage_fill_it_whatever_the_times(a, b, c, d, record) -> None:
    arrived, started, computed, now = sorted((a, b, c, d))
    times = _ChunkTimes(TOKEN, arrived, started, computed)
    pieces = times.pieces(now, record)
    end = computed if record is None else now
    assert sum(usec for _, _, usec in pieces) == end - arrived
    assert all(usec >= 0 for _, _, usec in pieces)
    assert all(b[1] == a[1] + a[2] for a, b in pairwise(pieces))
    assert [p for p in pieces if p[0] is Phase.COMPUTE] == [
        (Phase.COMPUTE, started, computed - started)
    ]


def test_a_forwarded_span_is_told_of_with_the_times_of_the_forwarding() -> None:
    assert _ChunkTimes(TOKEN, 100, 110, 150).pieces(500, forwarding(30, 300)) == [
        (Phase.QUEUE, 100, 10),
        (Phase.COMPUTE, 110, 40),
        (Phase.QUEUE, 150, 20),
        (Phase.SEND, 170, 30),
        (Phase.WAIT, 200, 300),
    ]


def forwarding(send: int, wait: int) -> Telemetry:
    values = dict.fromkeys(Telemetry.__slots__, 0)
    return Telemetry(**{**values, "forward_send_usec": send, "downstream_wait_usec": wait})


@pytest.fixture
def recorder() -> TraceRecorder:
    return TraceRecorder()


@pytest.fixture
def stage(recorder: TraceRecorder) -> StageProfile:
    return StageProfile(recorder, "worker", "data", log_decode=False)


def test_a_span_is_told_of_once_when_it_is_done(stage, recorder) -> None:
    for request, forwarded in ((1, False), (2, True)):
        work = make_work([entry(span("0-5"))], [], PROMPT, request_id=request)
        stage.arrived(work)
        stage.evaluated(request, OUTPUT, forwarded=forwarded)
        assert bool(recorder.take()) is not forwarded
    answer = Result(request_id=2, telemetry=(forwarding(0, 0), forwarding(0, 10**9)))
    stage.relayed(answer)
    seen = recorder.take()
    assert [i.phase for i in seen if i.usec][-1] is Phase.WAIT
    assert {i.chunk for i in seen} == {ChunkRef(work.session_id, 2, 0, len(PROMPT))}
    stage.relayed(answer)
    assert recorder.take() == []


def test_a_span_that_fails_or_comes_twice_disturbs_nothing(stage, recorder) -> None:
    work = make_work([entry(span("0-5"))], [], PROMPT, request_id=1)
    stage.arrived(work)
    stage.evaluated(1, None, forwarded=True)
    stage.arrived(work)
    stage.arrived(work)
    for _ in range(2):
        stage.evaluated(1, OUTPUT, forwarded=False)
    assert [i.phase for i in recorder.take()].count(Phase.COMPUTE) == 1
    assert not stage._open
