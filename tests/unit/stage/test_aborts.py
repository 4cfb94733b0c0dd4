"""Marks of requests that nobody waits for any more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ds4py.contracts import SessionId
from ds4py.stage.stage import _MAX_MARKS, AbortedRequests

ids = st.integers(0, 5)


@given(st.lists(st.tuples(ids, ids), max_size=10), ids, ids)
def test_a_mark_covers_all_requests_up_to_it_in_its_own_session(marks, session, request) -> None:
    aborted = AbortedRequests()
    for marked, last in marks:
        aborted.mark(SessionId(marked), last)
    expected = any(marked == session and request <= last for marked, last in marks)
    assert aborted.covers(SessionId(session), request) == expected


def test_the_oldest_marks_make_room() -> None:
    aborted = AbortedRequests()
    aborted.mark(SessionId(1), 5)
    aborted.mark(SessionId(2), 5)
    aborted.mark(SessionId(1), 7)
    for n in range(_MAX_MARKS - 1):
        aborted.mark(SessionId(100 + n), 1)
    assert aborted.covers(SessionId(1), 7)
    assert not aborted.covers(SessionId(2), 1)
