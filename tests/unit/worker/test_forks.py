"""A worker copies the head of a session for another one, or does nothing: driven by hand."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.contracts import ForwardRequest, SessionId
from ds4py.wire.extensions import Fork
from ds4py.wire.prefix_hash import prefix_hash
from ds4py.worker.worker import Worker
from tests.clusters import DEADLINE, span, start_worker, wait_until
from tests.fake_runner import FakeRunner, reference_logits
from tests.peers import Driver, driver, entry
from tests.unit.peer.extended import greet

PROMPT = [5, 80, 3, 3, 41, 9, 77, 12]
WHOLE = entry(span("0-5"))
SOURCE, TARGET, THIRD = 7, 8, 9


@contextmanager
def serving(runner: FakeRunner | None = None, **fields: object) -> Iterator[tuple]:
    """A worker, its runner, and a ds4py coordinator that drives it by hand."""
    runner = runner or FakeRunner(span("0-5"), **fields)  # type: ignore[arg-type]
    worker = start_worker(runner)
    try:
        with driver(worker.address, WHOLE) as d:
            greet(d.connection)
            yield worker, runner, d
    finally:
        worker.close()


def tell(d: Driver, head: Sequence[int], *, source: int = SOURCE, target: int = TARGET) -> None:
    d.connection.send(Fork(source, target, len(head), prefix_hash(head)).encode())


def held(worker: Worker, session: int) -> list[int] | None:
    cached = worker.stage.sessions.get(SessionId(session))
    return None if cached is None else cached.tokens


@given(n_tokens=st.integers(1, len(PROMPT)), before=st.lists(st.integers(0, 96), max_size=9))
def test_the_copy_goes_on_like_the_original_whatever_was_there(copying, n_tokens, before) -> None:
    worker, runner, d = copying
    head = PROMPT[:n_tokens]
    d.check([], PROMPT, session=SOURCE)
    if before:
        d.check([], before, session=TARGET)
    tell(d, head)
    result = d.check(head, [50, 51], session=TARGET)
    logits = np.frombuffer(result.payload, "<f4")
    np.testing.assert_array_equal(logits, reference_logits([*head, 50, 51]))
    assert held(worker, SOURCE) == PROMPT
    assert runner.evaluated[-1] == (n_tokens, 2)
    d.check(PROMPT, [3], session=SOURCE)


@pytest.fixture(scope="module")
def copying() -> Iterator[tuple]:
    with serving() as served:
        yield served


@pytest.mark.parametrize(
    "notice",
    [
        Fork(SOURCE, TARGET, 4, prefix_hash(PROMPT[:5])),  # other tokens
        Fork(SOURCE, TARGET, 9, prefix_hash([*PROMPT, 1])),  # more than there are
        Fork(SOURCE, TARGET, 2**32 - 1, prefix_hash(PROMPT)),
        Fork(THIRD, TARGET, 4, prefix_hash(PROMPT[:4])),  # unknown
    ],
)
def test_what_a_stage_does_not_hold_is_not_copied_and_changes_nothing(notice) -> None:
    with serving() as (worker, runner, d):
        d.check([], PROMPT, session=SOURCE)
        d.check([], [1, 2], session=TARGET)
        d.connection.send(notice.encode())
        assert "prefix hash" in d.refused(PROMPT[:4], [50], session=TARGET)
        assert (held(worker, SOURCE), held(worker, TARGET)) == (PROMPT, [1, 2])
        assert runner.forked == []
        d.check([1, 2], [3], session=TARGET)


def test_a_copy_waits_for_spans_of_its_session_that_were_sent_before() -> None:
    entered, resume = threading.Event(), threading.Event()

    def before(work: ForwardRequest) -> None:
        if work.session == TARGET:
            entered.set()
            assert resume.wait(DEADLINE)

    with serving(before=before) as (_, _, d):
        d.check([], PROMPT, session=SOURCE)
        d.ask([], [1], session=TARGET)
        assert entered.wait(DEADLINE)
        d.ask([1], [2], session=TARGET)
        tell(d, PROMPT[:4])
        d.ask(PROMPT[:4], [50], session=TARGET)
        resume.set()
        assert [d.answer().status for _ in range(3)] == [0, 0, 0]


def test_a_device_that_failed_in_the_middle_of_the_original_makes_it_useless() -> None:
    def before(work: ForwardRequest) -> None:
        if 13 in work.tokens:
            raise RuntimeError("out of memory")

    with serving(before=before) as (_, runner, d):
        d.check([], PROMPT, session=SOURCE)
        assert "out of memory" in d.refused(PROMPT, [13], session=SOURCE)
        tell(d, PROMPT[:4])
        assert "prefix hash" in d.refused(PROMPT[:4], [50], session=TARGET)
        assert runner.forked == []


@pytest.mark.parametrize("limit", [{"n_slots": 2}, {"kv_budget": 2 * len(PROMPT)}])
def test_orphans_give_way_but_never_the_original(limit) -> None:
    with serving(**limit) as (worker, runner, d):
        with driver(worker.address, WHOLE) as gone:
            gone.check([], PROMPT, session=THIRD)
            gone.check([], PROMPT, session=SOURCE)
        wait_until(lambda: not worker.stage.sessions.get(SOURCE).owners, "they are orphans")
        tell(d, PROMPT)
        d.check(PROMPT[:7], [50], session=TARGET)
        assert runner.forked == [len(PROMPT)]
        assert held(worker, THIRD) is None
        assert set(runner._rows) == {SOURCE, TARGET}
        tell(d, PROMPT, target=THIRD)  # the original is an orphan, but the only one
        assert "prefix hash" in d.refused(PROMPT, [1], session=THIRD)
        assert runner.forked == [len(PROMPT)]
        assert (held(worker, SOURCE), held(worker, TARGET)) == (PROMPT, [*PROMPT[:7], 50])


def test_without_room_for_a_copy_the_original_goes_on() -> None:
    with serving(n_slots=1) as (worker, runner, d):
        d.check([], PROMPT, session=SOURCE)
        tell(d, PROMPT)
        assert "KV cache: session slots" in d.refused(PROMPT, [50], session=TARGET)
        d.check(PROMPT, [3], session=SOURCE)
        assert runner.forked == []
        assert len(worker.stage.sessions) == 1


def test_a_copy_belongs_to_the_connection_that_asked_for_it() -> None:
    with serving(n_slots=2) as (worker, _, d):
        d.check([], PROMPT, session=SOURCE)
        with driver(worker.address, WHOLE) as other:
            greet(other.connection)
            tell(other, PROMPT[:4])
            wait_until(lambda: held(worker, TARGET) == PROMPT[:4], "it is copied")
            assert "session slots" in d.refused([], [1], session=THIRD)
        wait_until(lambda: not worker.stage.sessions.get(TARGET).owners, "nobody owns it")
        d.check([], [1], session=THIRD)
        assert held(worker, TARGET) is None


def test_a_copy_for_a_connection_that_has_ended_meanwhile_belongs_to_nobody() -> None:
    entered, resume = threading.Event(), threading.Event()

    def before(work: ForwardRequest) -> None:
        if work.session == THIRD:
            entered.set()
            assert resume.wait(DEADLINE)

    with serving(before=before) as (worker, runner, d):
        d.check([], PROMPT, session=SOURCE)
        d.ask([], [1], session=THIRD)
        assert entered.wait(DEADLINE)
        device = worker.stage.device
        with driver(worker.address, WHOLE) as other:
            greet(other.connection)
            tell(other, PROMPT[:4])
            wait_until(lambda: len(device._queue) == 1, "the notice waits for the device")
        wait_until(lambda: len(worker._upstreams) == 1, "the connection has ended")
        resume.set()
        assert d.answer().status == 0
        wait_until(lambda: held(worker, TARGET) == PROMPT[:4], "it is copied")
        d.check(PROMPT, [3], session=SOURCE)  # behind the copy on the device
        assert worker.stage.sessions.get(SessionId(TARGET)).owners == set()
        assert runner.forked == [4]
