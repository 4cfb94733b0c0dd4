"""Whose turn it is on a device: order inside a session, no starving, fair shares, full batches."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.stage.scheduler import (
    MAX_WAIT_SECONDS,
    ScheduledBatch,
    Scheduler,
    WorkKind,
    stages_alike,
)

CALL, SINGLE, CHUNK = WorkKind.CONTROL, WorkKind.DECODE, WorkKind.PREFILL


@dataclass(frozen=True)
class Item:
    session: int
    kind: WorkKind
    number: int


ARRIVAL = st.tuples(st.integers(0, 4), st.sampled_from(WorkKind))
FREE = st.none()
EVENTS = st.lists(st.one_of(ARRIVAL, ARRIVAL, ARRIVAL, FREE), max_size=60)
"""Something arrives, or the device becomes free."""


class Play:
    """Lets items arrive and turns run; remembers both."""

    def __init__(self, max_batch: int = 32):
        self.scheduler: Scheduler[Item] = Scheduler(max_batch=max_batch)
        self.waiting: list[Item] = []
        self.done: list[ScheduledBatch[Item]] = []
        self._n = 0

    def arrive(self, session: int, kind: WorkKind) -> None:
        item = Item(session, kind, self._n)
        self._n += 1
        self.waiting.append(item)
        self.scheduler.add(session, kind, item)

    def run(self) -> ScheduledBatch[Item] | None:
        scheduled = self.scheduler.next()
        if scheduled is not None:
            self.done.append(scheduled)
            for item in [*scheduled.calls, *scheduled.batch]:
                self.waiting.remove(item)
        assert len(self.scheduler) == len(self.waiting)
        return scheduled

    def heads(self, kind: WorkKind) -> list[Item]:
        """The first item of each session, where it is of a kind."""
        first: dict[int, Item] = {}
        for item in self.waiting:
            first.setdefault(item.session, item)
        return [item for item in first.values() if item.kind is kind]

    def finish(self) -> None:
        while self.run() is not None:
            pass


def play(events: list[tuple[int, WorkKind] | None], max_batch: int = 32) -> Play:
    p = Play(max_batch)
    for event in events:
        if event is None:
            p.run()
        else:
            p.arrive(*event)
    return p


def chunk_of(scheduled: ScheduledBatch[Item]) -> Item | None:
    return next((item for item in scheduled.batch if item.kind is CHUNK), None)


@given(EVENTS)
def test_each_item_runs_once_and_those_of_a_session_in_their_order(events) -> None:
    p = play(events)
    n = p._n
    p.finish()
    ran = [item for scheduled in p.done for item in [*scheduled.calls, *scheduled.batch]]
    assert sorted(item.number for item in ran) == list(range(n))
    by_session = defaultdict(list)
    for item in ran:
        by_session[item.session].append(item.number)
    assert all(numbers == sorted(numbers) for numbers in by_session.values())


@given(EVENTS, st.integers(1, 4))
def test_a_turn_is_one_chunk_or_all_tokens_that_fit_of_different_sessions(events, most) -> None:
    p = play(events, most)
    while True:
        tokens, calls = p.heads(SINGLE), p.heads(CALL)
        scheduled = p.run()
        if scheduled is None:
            break
        assert scheduled.calls or scheduled.batch
        assert set(calls) <= set(scheduled.calls)  # never overtaken: it may free what others need
        assert all(item.kind is CALL for item in scheduled.calls)
        if chunk_of(scheduled) is not None:
            assert len(scheduled.batch) == 1
            continue
        assert all(item.kind is SINGLE for item in scheduled.batch)
        assert len({item.session for item in scheduled.batch}) == len(scheduled.batch) <= most
        if len(tokens) < most:
            assert set(tokens) <= set(scheduled.batch)
        numbers = [item.number for item in scheduled.batch]  # who came first goes first
        assert numbers == sorted(numbers)


def test_a_batch_has_as_many_tokens_as_are_allowed_in_the_order_of_their_arrival() -> None:
    p = Play(max_batch=2)
    for session, kind in ((0, CALL), (1, SINGLE), (0, SINGLE), (2, SINGLE)):
        p.arrive(session, kind)
    p.finish()
    assert [[item.session for item in turn.batch] for turn in p.done] == [[1, 0], [2]]


def test_calls_behind_calls_run_in_the_same_turn() -> None:
    p = Play()
    for kind in (CALL, CALL, SINGLE):
        p.arrive(0, kind)
    turn = p.run()
    assert turn is not None
    assert ([item.number for item in turn.calls], len(turn.batch)) == ([0, 1], 1)


@given(EVENTS)
def test_what_may_run_waits_for_one_turn_of_the_other_kind_at_most(events) -> None:
    """Also while others keep arriving: no session's prompt stops tokens, nor do tokens stop it."""
    p = Play()
    for event in [*events, None, None]:
        if event is not None:
            p.arrive(*event)
            continue
        due = p.heads(SINGLE) + p.heads(CALL)
        chunks = p.heads(CHUNK)
        before = len(p.done)
        p.run()
        p.run()
        two = p.done[before:]
        ran = [item for scheduled in two for item in [*scheduled.calls, *scheduled.batch]]
        assert set(due) <= set(ran)
        if chunks:
            assert any(chunk_of(scheduled) is not None for scheduled in two)


@given(st.lists(st.integers(1, 5), min_size=2, max_size=6))
def test_chunks_of_sessions_take_turns(n_chunks) -> None:
    p = Play()
    for session, n in enumerate(n_chunks):
        for _ in range(n):
            p.arrive(session, CHUNK)
    p.finish()
    order = [scheduled.batch[0].session for scheduled in p.done]
    rounds = [[s for s, n in enumerate(n_chunks) if n > k] for k in range(max(n_chunks))]
    assert order == [session for one in rounds for session in one]


def test_tokens_that_never_end_do_not_stop_a_chunk() -> None:
    p = Play()
    p.arrive(9, CHUNK)
    for _ in range(3):
        for session in range(3):
            p.arrive(session, SINGLE)
        p.run()
    assert [chunk_of(scheduled) is not None for scheduled in p.done] == [False, True, False]


def test_a_newcomers_chunk_waits_for_one_of_each_other() -> None:
    p = Play()
    for session in (0, 1):
        for _ in range(9):
            p.arrive(session, CHUNK)
    for _ in range(3):
        p.run()
    p.arrive(2, CHUNK)
    before = len(p.done)
    p.finish()
    order = [scheduled.batch[0].session for scheduled in p.done[before:]]
    assert order.index(2) <= 2


def test_a_token_behind_its_own_chunk_waits_for_it() -> None:
    """The last token of a prompt may be alone in its span."""
    p = Play()
    p.arrive(1, CHUNK)
    p.arrive(1, SINGLE)
    p.arrive(2, SINGLE)
    p.finish()
    assert [[item.number for item in scheduled.batch] for scheduled in p.done] == [[2], [0], [1]]


def test_a_chunk_whose_turn_it_is_does_not_overtake_a_call() -> None:
    """The end of a session frees the slot that another one's first chunk needs."""
    p = Play()
    p.arrive(1, SINGLE)
    p.run()
    p.arrive(2, CALL)
    p.arrive(3, CHUNK)
    scheduled = p.run()
    assert scheduled is not None
    assert [item.number for item in [*scheduled.calls, *scheduled.batch]] == [1, 2]


def test_calls_run_before_the_tokens_of_their_turn() -> None:
    p = Play()
    p.arrive(1, SINGLE)
    p.arrive(2, CALL)
    p.arrive(2, SINGLE)
    p.arrive(1, CALL)
    scheduled = p.run()
    assert scheduled is not None
    assert [item.number for item in scheduled.calls] == [1]
    assert [item.number for item in scheduled.batch] == [0, 2]
    scheduled = p.run()
    assert scheduled is not None
    assert [item.number for item in scheduled.calls] == [3]


@given(EVENTS)
def test_draining_takes_all_in_the_order_of_arrival(events) -> None:
    p = play(events)
    assert [item.number for item in p.scheduler.drain()] == [item.number for item in p.waiting]
    assert len(p.scheduler) == 0
    assert p.scheduler.next() is None


# --- the target of a batch


@pytest.mark.parametrize(
    ("n_sessions", "n_stages", "wanted"),
    [(1, 1, 1), (1, 3, 1), (2, 2, 1), (3, 2, 2), (8, 2, 4), (8, 1, 8), (8, 3, 3), (0, 2, 0)],
)
def test_each_stage_hopes_for_its_share_of_the_sessions(n_sessions, n_stages, wanted) -> None:
    scheduler: Scheduler[int] = Scheduler(n_stages)
    for _ in range(3):
        scheduler.decoded(range(n_sessions), 0.1, 0.0)
    assert scheduler.target_batch == wanted


def test_sessions_that_have_ended_are_soon_not_hoped_for() -> None:
    scheduler: Scheduler[int] = Scheduler()
    scheduler.decoded(range(8), 0.1, 0.0)
    for _ in range(32):
        scheduler.decoded([3], 0.1, 0.0)
    assert scheduler.target_batch == 1


@given(st.floats(0, 10))
def test_the_wait_is_short_beside_a_batch(seconds) -> None:
    scheduler: Scheduler[int] = Scheduler(2)
    assert scheduler.max_wait == 0  # nothing is known
    scheduler.decoded([1], seconds, 0.0)
    assert scheduler.max_wait <= min(MAX_WAIT_SECONDS, seconds / 4)


@pytest.mark.parametrize(
    ("n_layers", "n_own", "n_stages"), [(30, 30, 1), (30, 15, 2), (43, 14, 3), (6, 5, 1), (2, 9, 1)]
)
def test_the_own_layers_tell_how_many_stages_there_are(n_layers, n_own, n_stages) -> None:
    assert stages_alike(n_layers, n_own) == n_stages


def test_tokens_wait_for_their_target_unless_something_else_could_run() -> None:
    scheduler: Scheduler[int] = Scheduler()
    scheduler.decoded(range(3), 0.1, now=5.0)
    scheduler.add(0, WorkKind.DECODE, 0)
    assert scheduler.wants_more
    scheduler.add(9, WorkKind.PREFILL, 1)
    assert not scheduler.wants_more
    scheduler.next()
    scheduler.next()
    for session in range(3):
        scheduler.add(session, WorkKind.DECODE, session)
    assert not scheduler.wants_more


def test_others_are_expected_for_a_second_after_they_decoded() -> None:
    scheduler: Scheduler[int] = Scheduler()
    assert not scheduler.expects_decodes_beside(1, 0.0)
    scheduler.decoded({1}, 0.1, now=5.0)
    assert not scheduler.expects_decodes_beside(1, 5.5)
    assert scheduler.expects_decodes_beside(2, 5.5)
    assert not scheduler.expects_decodes_beside(2, 6.5)
