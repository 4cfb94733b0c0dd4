"""Which span may continue which session: wire-protocol.md#kv-sessions, #checklist 38 to 43."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.contracts import SessionId
from ds4py.errors import (
    CancelledError,
    CapacityError,
    ClusterError,
    Ds4Error,
    ModelError,
    PrefixMismatchError,
)
from ds4py.stage.session_table import Admission, SessionTable, StageRequest
from ds4py.wire.prefix_hash import INIT, extend, prefix_hash

A, B, C = SessionId(1), SessionId(2), SessionId(3)
US, THEM = "our connection", "their connection"


def claim(before, tokens, *, session=A, reset=False, pos0=None, prefix=None) -> StageRequest:
    """A span of `tokens` after `before`, honest unless told otherwise."""
    prefix = prefix_hash(before) if prefix is None else prefix
    return StageRequest(
        session=session,
        tokens=tuple(tokens),
        pos0=len(before) if pos0 is None else pos0,
        prefix_hash=prefix,
        result_hash=extend(prefix, tokens),
        reset=reset,
    )


def evaluate(lines: SessionTable, span: StageRequest, owner: str = US) -> Admission:
    admission = lines.admit(span, owner)
    lines.commit(span)
    return admission


def tokens_of(lines: SessionTable, session=A) -> list[int] | None:
    cached = lines.get(session)
    return None if cached is None else cached.tokens


def lines(n_slots: int = 2, *, can_rewind: bool = False) -> SessionTable:
    return SessionTable(n_slots, can_rewind=can_rewind)


def test_a_new_session_starts_at_zero_without_a_reset() -> None:
    stage = lines()
    assert evaluate(stage, claim([], [5, 6])) == Admission(reset=True)
    assert tokens_of(stage) == [5, 6]


def test_spans_continue_where_the_last_one_ended() -> None:
    stage = lines()
    evaluate(stage, claim([], [5, 6]))
    assert evaluate(stage, claim([5, 6], [7])) == Admission()
    assert tokens_of(stage) == [5, 6, 7]


@pytest.mark.parametrize("can_rewind", [True, False])
@pytest.mark.parametrize(
    ("before", "pos0"), [([5, 7], None), ([5, 6, 7, 8], None), ([9], None), ([5, 6], 1)]
)
def test_a_mismatch_leaves_the_session_untouched(before, pos0, can_rewind) -> None:
    stage = lines(can_rewind=can_rewind)
    evaluate(stage, claim([], [5, 6, 7]))
    with pytest.raises(PrefixMismatchError):
        stage.admit(claim(before, [1], pos0=pos0), US)
    assert tokens_of(stage) == [5, 6, 7]
    assert evaluate(stage, claim([5, 6, 7], [8])) == Admission()


def test_a_mismatch_of_an_unknown_session_creates_none() -> None:
    stage = lines(n_slots=1)
    for n in range(50):
        with pytest.raises(PrefixMismatchError):
            stage.admit(claim([9], [1], session=SessionId(100 + n)), US)
    assert len(stage) == 0
    evaluate(stage, claim([], [5]))


def test_a_reset_empties_the_session_first() -> None:
    stage = lines()
    evaluate(stage, claim([], [5, 6]))
    assert evaluate(stage, claim([], [7], reset=True)) == Admission(reset=True)
    assert tokens_of(stage) == [7]


def test_a_reset_takes_effect_even_if_the_span_is_refused() -> None:
    stage = lines()
    evaluate(stage, claim([], [5, 6]))
    with pytest.raises(PrefixMismatchError):
        stage.admit(claim([5, 6], [7], reset=True), US)
    assert tokens_of(stage) == []
    assert evaluate(stage, claim([], [8])) == Admission(reset=True)


def test_a_reset_at_another_position_than_zero_is_refused() -> None:
    stage = lines()
    with pytest.raises(ModelError, match="position 3"):
        stage.admit(claim([], [7], reset=True, pos0=3, prefix=INIT), US)


def test_two_sessions_are_independent() -> None:
    stage = lines()
    evaluate(stage, claim([], [5, 6]))
    evaluate(stage, claim([], [5, 7], session=B))
    evaluate(stage, claim([5, 6], [1]))
    evaluate(stage, claim([5, 7], [2], session=B))
    with pytest.raises(PrefixMismatchError):
        stage.admit(claim([5, 6, 1], [3], session=B), US)
    assert (tokens_of(stage, A), tokens_of(stage, B)) == ([5, 6, 1], [5, 7, 2])


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_a_stage_that_can_rewind_continues_at_an_earlier_position(keep: int) -> None:
    stage = lines(can_rewind=True)
    evaluate(stage, claim([], [5, 6, 7]))
    admission = evaluate(stage, claim([5, 6, 7][:keep], [9]))
    assert admission == Admission(reset=keep == 0, rewind_to=keep)
    assert tokens_of(stage) == [*[5, 6, 7][:keep], 9]


def test_a_stage_that_can_not_rewind_refuses_an_earlier_position() -> None:
    stage = lines()
    evaluate(stage, claim([], [5, 6, 7]))
    with pytest.raises(PrefixMismatchError):
        stage.admit(claim([5], [9]), US)


@pytest.mark.parametrize("error", [ClusterError("broken"), Ds4Error("unknown")])
def test_after_a_failure_of_the_device_only_a_fresh_start_is_admitted(error) -> None:
    stage = lines(can_rewind=True)
    evaluate(stage, claim([], [5, 6]))
    span = claim([5, 6], [7])
    stage.admit(span, US)
    stage.evaluation_failed(span, error)
    with pytest.raises(ModelError, match="a reset"):
        stage.admit(span, US)
    with pytest.raises(PrefixMismatchError):  # nor at an earlier position: who knows what is there
        stage.admit(claim([5], [7]), US)
    assert evaluate(stage, claim([], [8], reset=True)) == Admission(reset=True)
    assert evaluate(stage, claim([8], [9])) == Admission()


def test_after_a_failure_of_the_first_span_position_zero_needs_no_reset() -> None:
    """wire-protocol.md#evaluation-checks: a timeline that is not valid admits position 0."""
    stage = lines()
    span = claim([], [5])
    stage.admit(span, US)
    stage.evaluation_failed(span, ClusterError("broken"))
    assert evaluate(stage, span) == Admission(reset=True)
    assert evaluate(stage, claim([5], [6])) == Admission()


@pytest.mark.parametrize("error", [ClusterError("broken"), CancelledError("gone")])
def test_a_failure_behind_the_start_takes_all_with_it_that_was_started_since(error) -> None:
    stage = lines()
    evaluate(stage, claim([], [5]))
    started = []
    for span in (claim([5], [6]), claim([5, 6], [7, 8])):
        stage.admit(span, US)
        started.append((span, stage.commit(span)))
    (failed, cached), (behind, same) = started
    assert cached is same is stage.get(A)
    stage.evaluation_failed(failed, error, cached)
    stage.evaluation_failed(behind, error, cached)
    assert (cached.tokens, cached.hash, cached.valid) == ([5], prefix_hash([5]), False)
    with pytest.raises(ModelError, match="a reset"):
        stage.admit(failed, US)


def test_a_failure_is_no_business_of_a_session_that_began_anew_since() -> None:
    stage = lines()
    span, again = claim([], [5]), claim([], [6, 7], reset=True)
    stage.admit(span, US)
    cached = stage.commit(span)
    assert evaluate(stage, again) == Admission(reset=True)
    stage.evaluation_failed(span, ClusterError("broken"), cached)
    assert tokens_of(stage) == [6, 7]
    assert evaluate(stage, claim([6, 7], [8])) == Admission()


@pytest.mark.parametrize(
    "error",
    [
        CapacityError("slots", needed=2, available=1),
        CancelledError("gone"),
        PrefixMismatchError("other"),
        ModelError("width", got=1, expected=2),
    ],
)
def test_a_refusal_leaves_the_timeline_usable(error) -> None:
    stage = lines()
    evaluate(stage, claim([], [5, 6]))
    span = claim([5, 6], [7])
    stage.admit(span, US)
    stage.evaluation_failed(span, error)
    assert evaluate(stage, span) == Admission()


def test_when_full_a_new_session_is_refused_and_the_others_go_on() -> None:
    stage = lines(n_slots=2)
    evaluate(stage, claim([], [5]))
    evaluate(stage, claim([], [6], session=B))
    with pytest.raises(CapacityError, match=r"raise --sessions.*needed 3, available 2"):
        stage.admit(claim([], [7], session=C), THEM)
    evaluate(stage, claim([5], [1]))
    evaluate(stage, claim([6], [2], session=B))


def test_when_full_the_longest_unused_orphan_goes() -> None:
    stage = lines(n_slots=2)
    evaluate(stage, claim([], [5]), THEM)
    evaluate(stage, claim([], [6], session=B), THEM)
    evaluate(stage, claim([5], [7]), THEM)
    stage.disown(THEM)
    assert evaluate(stage, claim([], [8], session=C)) == Admission(reset=True, evict=B)
    assert tokens_of(stage, B) is None
    assert tokens_of(stage, A) == [5, 7]


def test_an_orphan_lives_on_when_somebody_continues_it() -> None:
    stage = lines(n_slots=1)
    evaluate(stage, claim([], [5]), THEM)
    stage.disown(THEM)
    assert evaluate(stage, claim([5], [6]), US) == Admission()
    with pytest.raises(CapacityError):  # it has an owner again
        stage.admit(claim([], [7], session=B), THEM)


def test_a_connection_orphans_its_own_sessions_only() -> None:
    stage = lines(n_slots=1)
    evaluate(stage, claim([], [5]), US)
    stage.disown(THEM)
    with pytest.raises(CapacityError):
        stage.admit(claim([], [7], session=B), THEM)


def test_a_session_that_was_carried_by_two_connections_is_an_orphan_without_both() -> None:
    """A coordinator sends its prompts over one connection and its tokens over another."""
    stage = lines(n_slots=1)
    evaluate(stage, claim([], [5]), US)
    evaluate(stage, claim([5], [6]), THEM)
    for gone in (THEM, US):
        with pytest.raises(CapacityError):
            stage.admit(claim([], [7], session=B), "a third one")
        stage.disown(gone)
    assert evaluate(stage, claim([], [7], session=B)).evict == A


def test_a_session_that_begins_anew_still_belongs_to_all_that_carried_it() -> None:
    stage = lines(n_slots=1)
    evaluate(stage, claim([], [5]), US)
    evaluate(stage, claim([], [6], reset=True), THEM)
    stage.disown(THEM)
    with pytest.raises(CapacityError):
        stage.admit(claim([], [7], session=B), "a third one")


def test_no_session_is_given_up_for_a_span_that_is_refused() -> None:
    stage = lines(n_slots=1)
    evaluate(stage, claim([], [5]), THEM)
    stage.disown(THEM)
    with pytest.raises(PrefixMismatchError):
        stage.admit(claim([9], [7], session=B), US)
    assert evaluate(stage, claim([5], [6]), US) == Admission()


def test_a_session_that_has_ended_makes_room() -> None:
    stage = lines(n_slots=1)
    evaluate(stage, claim([], [5]))
    stage.forget(B)
    stage.forget(A)
    assert evaluate(stage, claim([], [6], session=B)) == Admission(reset=True)


def test_a_head_is_given_out_if_all_of_it_was_evaluated() -> None:
    stage = lines()
    evaluate(stage, claim([], [5, 6, 7]))
    span = claim([5, 6, 7], [8])
    stage.admit(span, US)  # not evaluated yet
    assert stage.prefix(A, 2, prefix_hash([5, 6])) == [5, 6]
    assert stage.prefix(A, 3, prefix_hash([5, 6, 7])) == [5, 6, 7]
    for session, head in ((A, [5, 7]), (A, [5, 6, 7, 8]), (B, [5]), (B, [])):
        with pytest.raises(PrefixMismatchError):
            stage.prefix(session, len(head), prefix_hash(head))
    stage.evaluation_failed(span, ClusterError("broken"))
    with pytest.raises(PrefixMismatchError):
        stage.prefix(A, 2, prefix_hash([5, 6]))


def test_the_longest_unused_orphan_is_given_up_first_but_none_that_is_spared() -> None:
    stage = lines(n_slots=3)
    for number, session in enumerate((B, A, C)):
        evaluate(stage, claim([], [number], session=session), US if session is C else THEM)
    assert stage.evict([]) is None
    stage.disown(THEM)
    assert stage.evict([B]) == A
    assert stage.evict([B]) is None
    assert stage.evict([A]) == B
    assert stage.evict([]) is None
    assert (len(stage), tokens_of(stage, C)) == (1, [2])


def test_room_is_not_made_at_the_cost_of_who_is_spared() -> None:
    stage = lines(n_slots=1)
    evaluate(stage, claim([], [5]), THEM)
    stage.disown(THEM)
    with pytest.raises(CapacityError, match=r"^KV cache: "):
        stage.reserve_slot(B, [A])
    assert stage.reserve_slot(B) == [A]


@pytest.mark.parametrize("change", ["forgotten", "replaced"])
def test_what_was_evaluated_for_a_session_that_is_another_now_does_not_count(change) -> None:
    stage = lines()
    evaluate(stage, claim([], [5]))
    span = claim([5], [6])
    stage.admit(span, US)
    stage.reserve_slot(A)
    if change == "replaced":
        stage.insert(A, [7, 8], prefix_hash([7, 8]), US)
    stage.commit(span)
    assert tokens_of(stage) == (None if change == "forgotten" else [7, 8])


@given(
    st.booleans(),
    st.lists(
        st.tuples(
            st.integers(0, 6), st.lists(st.integers(0, 3), min_size=1, max_size=3), st.booleans()
        ),
        max_size=12,
    ),
)
def test_admitted_spans_always_leave_the_tokens_that_their_hash_stands_for(
    can_rewind, steps
) -> None:
    """Whatever a driver says about its timeline, the stage and the hash agree after each span."""
    stage = lines(can_rewind=can_rewind)
    truth: list[int] = []
    for keep, tokens, reset in steps:
        before = [] if reset else truth[:keep]
        span = claim(before, tokens, reset=reset)
        try:
            admission = stage.admit(span, US)
        except Ds4Error:
            assert not can_rewind
            assert not reset
            assert before != truth
            continue
        stage.commit(span)
        truth = [*before, *tokens]
        cached = stage.get(A)
        assert cached is not None
        assert (cached.tokens, cached.hash) == (truth, prefix_hash(truth))
        assert admission.reset == (span.pos0 == 0)
