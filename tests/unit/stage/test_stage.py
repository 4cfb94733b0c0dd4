"""A stage: admission by prefix hash, owners that go, copies, saving, whoever gives up waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from ds4py.contracts import ForwardRequest, OutputKind, SessionId
from ds4py.errors import (
    CancelledError,
    CapacityError,
    ClusterError,
    PrefixMismatchError,
    RemoteProtocolError,
)
from ds4py.stage.executor import wait_for
from ds4py.stage.session_table import StageRequest
from ds4py.stage.stage import SessionOwner, Stage
from ds4py.wire.prefix_hash import extend, prefix_hash
from tests.clusters import wait_until
from tests.fake_runner import FakeRunner, reference_logits

A, B, C = SessionId(1), SessionId(2), SessionId(3)
SECONDS = 20.0
PROMPT = [5, 80, 3, 3, 41]


def request(
    before: Sequence[int], tokens: Sequence[int], *, session: SessionId = A, request_id: int = 0
) -> StageRequest:
    """Tokens after others, honest, answered with logits."""
    prefix = prefix_hash(before)
    return StageRequest(
        session=session,
        tokens=tuple(tokens),
        pos0=len(before),
        prefix_hash=prefix,
        result_hash=extend(prefix, tokens),
        reset=not before,
        output_kind=OutputKind.LOGITS,
        request_id=request_id,
    )


@contextmanager
def staged(runner: FakeRunner) -> Iterator[Stage]:
    stage = Stage(runner)
    try:
        yield stage
    finally:
        stage.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    with staged(FakeRunner()) as made:
        yield made


def check(
    stage: Stage, before: Sequence[int], tokens: Sequence[int], *, session: SessionId = A
) -> None:
    output = wait_for(stage.submit(request(before, tokens, session=session)), SECONDS)
    np.testing.assert_array_equal(output.logits, reference_logits([*before, *tokens]))


def test_a_process_may_cut_its_own_timeline_by_the_hash_of_what_stays(stage: Stage) -> None:
    check(stage, [], PROMPT)
    check(stage, PROMPT[:2], [9, 9])
    check(stage, [*PROMPT[:2], 9, 9], [7])


def test_tokens_that_follow_others_are_refused_wherever_they_come_from(stage: Stage) -> None:
    """The layers of the coordinator itself are as strict as a worker's."""
    check(stage, [], PROMPT)
    with pytest.raises(PrefixMismatchError):
        wait_for(stage.submit(request([1, *PROMPT[1:]], [9])), SECONDS)
    check(stage, PROMPT, [9])


def test_what_is_aborted_or_cancelled_before_it_begins_is_left_out() -> None:
    entered, resume = threading.Event(), threading.Event()

    def before(work: ForwardRequest) -> None:
        if work.session == B:
            entered.set()
            assert resume.wait(SECONDS)

    runner = FakeRunner(before=before)
    with staged(runner) as stage:
        busy = stage.submit(request([], [1], session=B))
        assert entered.wait(SECONDS)
        aborted = stage.submit(request([], PROMPT[:2], request_id=7))
        forgotten = stage.submit(request([], PROMPT[:3], request_id=8))
        stage.abort(A, 7)
        with pytest.raises(ClusterError, match=r"no answer within 0\.05 s"):
            wait_for(forgotten, 0.05)
        resume.set()
        wait_for(busy, SECONDS)
        with pytest.raises(CancelledError):
            wait_for(aborted, SECONDS)
        wait_for(stage.submit(request([], PROMPT, request_id=9)), SECONDS)
        assert runner.evaluated == [(0, 1), (0, len(PROMPT))]


def test_a_session_whose_owner_has_left_gives_way_and_may_be_continued_until_then() -> None:
    with staged(FakeRunner(n_slots=2)) as stage:
        leaving = SessionOwner()
        wait_for(stage.submit(request([], PROMPT), leaving), SECONDS)
        check(stage, [], PROMPT, session=B)
        with pytest.raises(CapacityError):
            wait_for(stage.submit(request([], PROMPT, session=C)), SECONDS)
        stage.release(leaving)
        with pytest.raises(CancelledError):
            wait_for(stage.submit(request(PROMPT, [9]), leaving), SECONDS)
        check(stage, [], PROMPT, session=C)
        with pytest.raises(CapacityError):
            wait_for(stage.submit(request(PROMPT, [9])), SECONDS)


def test_an_owner_that_goes_while_its_tokens_are_evaluated_leaves_nothing_owned() -> None:
    entered, resume = threading.Event(), threading.Event()

    def before(_: ForwardRequest) -> None:
        entered.set()
        assert resume.wait(SECONDS)

    with staged(FakeRunner(before=before)) as stage:
        lost = False
        owner = SessionOwner(lambda: lost)
        output = stage.submit(request([], PROMPT), owner)
        assert entered.wait(SECONDS)
        lost = True
        resume.set()
        wait_for(output, SECONDS)
        cached = wait_for(stage.device.ask(lambda _: stage.sessions.get(A)), SECONDS)
        assert cached is not None
        assert not cached.owners


def test_a_copy_begins_a_session_and_other_tokens_are_not_copied(stage: Stage) -> None:
    check(stage, [], PROMPT)
    with pytest.raises(PrefixMismatchError):
        wait_for(stage.copy_prefix(A, B, 3, prefix_hash(PROMPT[1:4])), SECONDS)
    wait_for(stage.copy_prefix(A, B, 3, prefix_hash(PROMPT[:3])), SECONDS)
    check(stage, PROMPT[:3], [9], session=B)
    check(stage, PROMPT, [9])


def test_a_saved_session_goes_on_in_another_one_and_only_if_it_is_the_one_meant(
    stage: Stage,
) -> None:
    check(stage, [], PROMPT)
    with pytest.raises(RemoteProtocolError):
        wait_for(stage.save(A, len(PROMPT), prefix_hash(PROMPT) ^ 1), SECONDS)
    with pytest.raises(RemoteProtocolError):
        wait_for(stage.save(B, len(PROMPT), prefix_hash(PROMPT)), SECONDS)
    pieces = wait_for(stage.save(A, len(PROMPT), prefix_hash(PROMPT)), SECONDS)
    payload = memoryview(b"".join(list(pieces)))
    wait_for(stage.load(B, PROMPT, prefix_hash(PROMPT), payload), SECONDS)
    check(stage, PROMPT, [9], session=B)
    gone = SessionOwner(lambda: True)
    with pytest.raises(CancelledError):
        wait_for(stage.load(C, PROMPT, prefix_hash(PROMPT), payload, gone), SECONDS)


def test_a_session_that_ends_frees_its_caches_behind_what_it_was_asked(stage: Stage) -> None:
    check(stage, [], PROMPT)
    stage.end(A)
    wait_until(lambda: not len(stage.sessions), "it is forgotten")
    with pytest.raises(PrefixMismatchError):
        wait_for(stage.submit(request(PROMPT, [9])), SECONDS)
