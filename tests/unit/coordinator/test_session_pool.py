"""Who gets which session, and in which order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ds4py.coordinator.session_pool import SessionPool, choose_session
from ds4py.errors import CancelledError
from tests.clusters import cluster, wait_until
from tests.sockets import Background


class Line:
    """As much of a session as the choice looks at."""

    def __init__(self, *tokens: int):
        self.tokens = tokens


@pytest.mark.parametrize(
    ("free", "wanted", "chosen"),
    [
        ([(1, 2), (1, 2, 3), (9,)], [1, 2, 3, 4], 1),  # the longest common prefix
        ([(1, 2, 9), (1, 2)], [1, 2, 3], 0),  # equals: the longest unused one
        ([(7, 8), (), (5,)], [1], 1),  # nothing in common: an empty one before a conversation
        ([(7, 8), (5,)], [1], 0),  # none is empty: the longest unused one
        ([(), (1,)], [1, 2], 1),
    ],
)
def test_the_session_that_saves_most_is_chosen(free, wanted, chosen) -> None:
    lines = [Line(*tokens) for tokens in free]
    assert choose_session(lines, wanted) is lines[chosen]


A, B = list(range(400)), list(range(1000, 1400))


@pytest.mark.parametrize(
    ("free", "wanted", "chosen"),
    [
        ([A[:300], []], [*A[:300], 7], 0),  # goes on
        ([A[:300], []], [*A[:240], 7], 0),  # without the end of the last reply
        ([A[:300], []], [*A[:230], 7], 1),  # another one that begins alike, and there is room
        ([A[:300], B], [*A[:240], 7, 8], 0),
        ([B, A[:300]], [*A[:240], 7, 8], 1),  # nobody else has to go for it
        ([B, A[:300]], [*A[:230], 7, 8], 0),  # it would lose more than a quarter
        ([A[:300], B], [*A[:230], 7, 8], 0),  # but it is the longest unused one itself
        ([A[:300], B], [5, 7], 0),
        ([A[:300], [], B], [5, 7], 1),
        ([A[:100], A[:300], A[:200]], [*A[:300], 7], 1),
    ],
)
def test_a_conversation_that_begins_alike_is_kept_if_its_head_can_be_copied(
    free, wanted, chosen
) -> None:
    lines = [Line(*tokens) for tokens in free]
    assert choose_session(lines, wanted, can_fork=True) is lines[chosen]


@contextmanager
def backend(n_sessions: int) -> Iterator[SessionPool]:
    with cluster([], local="0-5", n_sessions=n_sessions) as c:
        yield c.backend


def test_session_ids_are_few_distinct_and_not_zero() -> None:
    with backend(3) as pool:
        ids = set()
        for n in range(20):
            with pool.lease([n]) as session:
                session.sync([n])
                ids.add(session.session_id)
        assert len(ids) == 3
        assert 0 not in ids


def test_a_session_is_lent_to_one_at_a_time_and_comes_back_after_an_error() -> None:
    with backend(1) as pool:
        with pytest.raises(ZeroDivisionError), pool.lease([1]) as session:
            1 / 0  # noqa: B018
        with pool.lease([1]) as again:
            assert again is session
            assert not pool._free


def test_waiting_requests_are_served_in_the_order_of_their_arrival() -> None:
    with backend(1) as pool:
        served: list[int] = []

        def ask(n: int) -> None:
            with pool.lease([n]):
                served.append(n)

        with pool.lease([0]):
            asking = []
            for n in range(6):
                asking.append(Background(lambda n=n: ask(n)))
                wait_until(lambda n=n: len(pool._waiting) == n + 1, "the request waits")  # type: ignore[misc]
        for request in asking:
            request.result()
        assert served == list(range(6))


def test_a_cancelled_request_leaves_the_queue_and_the_next_one_is_served() -> None:
    with backend(1) as pool:
        gone, served = threading.Event(), threading.Event()

        def ask_and_leave() -> None:
            with pool.lease([1], cancelled=gone.is_set):
                pytest.fail("it was cancelled")

        def ask() -> None:
            with pool.lease([2]):
                served.set()

        with pool.lease([0]):
            first = Background(ask_and_leave)
            wait_until(lambda: len(pool._waiting) == 1, "the first waits")
            second = Background(ask)
            wait_until(lambda: len(pool._waiting) == 2, "the second waits")
            gone.set()
            with pytest.raises(CancelledError):
                first.result()
            assert not served.is_set()
        second.result()
        assert served.is_set()


def test_who_waits_is_told_his_place_whenever_it_changes() -> None:
    with backend(1) as pool:
        places: dict[int, list[int]] = {n: [] for n in range(4)}
        leaving = threading.Event()

        def ask(n: int) -> None:
            cancelled = leaving.is_set if n == 1 else None
            with pool.lease([n], cancelled=cancelled, waiting=places[n].append):
                pass

        asking = []
        with pool.lease([0], waiting=lambda place: pytest.fail("it did not wait")):
            for n in range(4):
                asking.append(Background(lambda n=n: ask(n)))
                wait_until(lambda n=n: places[n] == [n + 1], "it was told")  # type: ignore[misc]
            assert pool.n_waiting == 4
            leaving.set()
            with pytest.raises(CancelledError):
                asking[1].result()
            wait_until(lambda: [places[2], places[3]] == [[3, 2], [4, 3]], "they moved up")
        for n in (0, 2, 3):
            asking[n].result()
        assert places[0] == [1]
        assert places[2] in ([3, 2], [3, 2, 1])  # unless its turn had come meanwhile
        assert pool.n_waiting == 0


def test_room_is_made_by_those_who_are_idle_the_longest_unused_first() -> None:
    with backend(4) as pool:
        sessions = []
        for n in range(4):
            with pool.lease([n]) as session:
                session.sync([n] * (n + 2))  # 2, 3, 4 and 5 tokens
                sessions.append(session)
        assert pool._free == deque(sessions)
        lengths = lambda: [len(s.tokens) for s in sessions]  # noqa: E731
        held = lambda: len(pool._source.local.runner._rows)  # noqa: E731
        with pool.lease([0, 0, 0]) as busy:
            assert busy is sessions[0]
            assert pool.make_room(4)
            assert lengths() == [2, 0, 0, 5]
            wait_until(lambda: held() == 2, "their memory is free")
            assert pool.make_room(1)
            assert lengths() == [2, 0, 0, 0]
            assert not pool.make_room(1)
            assert list(busy.tokens) == [0, 0]
        assert pool.make_room(100)
        assert not pool.make_room(1)
        wait_until(lambda: held() == 0, "nobody holds anything")


def test_a_session_that_lost_its_timeline_is_closed_too() -> None:
    """Its stages may hold any of it."""
    with backend(2) as pool:
        with pool.lease([1]) as session:
            session.sync([1, 2, 3])
            session.rewind(0)
        assert session.takes_memory
        assert pool.make_room(1)
        assert not session.takes_memory
