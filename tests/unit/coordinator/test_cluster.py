"""Coordinator, sessions and workers together over loopback, with slices of integer arithmetic."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ds4py.config import CoordinatorConfig
from ds4py.errors import CancelledError, CapacityError, RouteIncompleteError
from tests.clusters import DEADLINE, cluster, start_worker, wait_until
from tests.fake_runner import FakeRunner, reference_logits

PROMPT = [5, 80, 3, 3, 41, 9, 77, 12, 1, 0, 96, 33, 60, 2, 8, 19, 25]
CUTS = [
    (None, ["0-5"]),
    (None, ["0-2", "3-5"]),
    (None, ["0-0", "1-4", "5-5"]),
    ("0-0", ["1-5"]),
    ("0-2", ["3-3", "4-5"]),
    ("0:5", []),
]


def check(session, tokens) -> None:
    """Sync and compare with one process, then decode a few tokens likewise."""
    result = session.sync(tokens)
    np.testing.assert_array_equal(result.logits, reference_logits(tokens))
    line = list(tokens)
    for token in (7, 0, 96):
        line.append(token)
        np.testing.assert_array_equal(session.eval(token), reference_logits(line))
    assert list(session.tokens) == line


@pytest.mark.parametrize("dial_in", [False, True])
@pytest.mark.parametrize(("local", "cuts"), CUTS[:5])
def test_any_cut_gives_the_logits_of_one_process(local, cuts, dial_in) -> None:
    with cluster(cuts, local=local, dial_in=dial_in, chunk=4) as c:
        c.wait_ready()
        with c.backend.lease(PROMPT) as session:
            check(session, PROMPT)


def test_a_process_with_all_layers_is_a_route_without_hops() -> None:
    with cluster([], local="0-5", chunk=4) as c, c.backend.lease(PROMPT) as session:
        check(session, PROMPT)


@pytest.mark.parametrize("bits", [32, 16])
@pytest.mark.parametrize(
    "prefill",
    [
        {"chunk": 1},
        {"chunk": 7},
        {"chunk": 17},
        {"chunk": 3, "window": 1},
        {"chunk": 2, "window": 64, "send_depth": 8},
        {"chunk": 4, "pipeline": False},
        {"chunk": 4, "ack_only": False},
        {},
    ],
)
def test_any_chunking_gives_the_logits_of_one_process(prefill, bits) -> None:
    config = CoordinatorConfig(activation_bits=bits, result_timeout=DEADLINE)
    with cluster(["0-1", "2-3", "4-5"], config=config, **prefill) as c:
        c.wait_ready()
        with c.backend.lease(PROMPT) as session:
            check(session, PROMPT)


def test_a_headless_last_worker_leaves_the_head_to_the_coordinator() -> None:
    with cluster(["1-2", "3:5"], local="0:0", head=True, chunk=4) as c:
        c.wait_ready()
        with c.backend.lease(PROMPT) as session:
            check(session, PROMPT)


def test_without_a_head_anywhere_the_route_says_so() -> None:
    with cluster(["0-2", "3:5"]) as c:
        wait_until(lambda: len(c.coordinator.health().stages) == 3, "both workers joined")
        health = c.coordinator.health()
        assert not health.ready
        assert "output head" in health.missing


@pytest.mark.parametrize("can_rewind", [True, False])
@pytest.mark.parametrize(
    ("first", "second", "cached_if_rewind", "cached_if_not"),
    [
        (PROMPT[:9], PROMPT, 9, 9),  # goes on
        (PROMPT, PROMPT, 17, 17),  # the same again
        (PROMPT, PROMPT[:9], 8, 0),  # shorter
        (PROMPT, [*PROMPT[:9], 50, 51], 9, 0),  # another ending
        (PROMPT, [50, 51, 52], 0, 0),  # another conversation
    ],
)
def test_sync_reuses_the_common_prefix(
    first, second, cached_if_rewind, cached_if_not, can_rewind
) -> None:
    with cluster(["0-2", "3-5"], can_rewind=can_rewind, chunk=4) as c:
        c.wait_ready()
        with c.backend.lease(first) as session:
            session.sync(first)
            result = session.sync(second)
            np.testing.assert_array_equal(result.logits, reference_logits(second))
            assert result.n_cached == (cached_if_rewind if can_rewind else cached_if_not)
            check(session, second)


@pytest.mark.parametrize("can_rewind", [True, False])
def test_rewind_then_eval_continues_from_the_cut(can_rewind) -> None:
    with cluster(["0-2", "3-5"], local=None, can_rewind=can_rewind, chunk=4) as c:
        c.wait_ready()
        with c.backend.lease(PROMPT) as session:
            session.sync(PROMPT)
            session.rewind(6)
            np.testing.assert_array_equal(session.eval(50), reference_logits([*PROMPT[:6], 50]))


def test_a_full_context_is_served_and_one_token_more_is_refused_untouched() -> None:
    with cluster(["0-5"], n_ctx=20) as c:
        c.wait_ready()
        with c.backend.lease(PROMPT) as session:
            check(session, PROMPT)
            with pytest.raises(CapacityError, match="needed 21, available 20"):
                session.eval(1)
            with pytest.raises(CapacityError):
                session.sync([1] * 21)
            with pytest.raises(CapacityError):
                session.sync([])
            assert len(session.tokens) == 20


def test_sessions_do_not_mix() -> None:
    with cluster(["0-2", "3-5"], chunk=2) as c:
        c.wait_ready()
        lines = [PROMPT, PROMPT[::-1]]
        errors: list[BaseException] = []

        def drive(tokens) -> None:
            try:
                with c.backend.lease(tokens) as session:
                    check(session, tokens)
            except BaseException as e:  # noqa: BLE001 - reported by the test
                errors.append(e)

        threads = [threading.Thread(target=drive, args=(line,)) for line in lines for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
        assert not errors


def test_cancelling_a_prefill_keeps_what_is_done_and_the_next_sync_goes_on_from_there() -> None:
    with cluster(["0-2", "3-5"], chunk=2) as c:
        c.wait_ready()
        seen: list[int] = []
        with c.backend.lease(PROMPT) as session:
            with pytest.raises(CancelledError):
                session.sync(
                    PROMPT,
                    progress=lambda done, total: seen.append(done),
                    cancelled=lambda: bool(seen),
                )
            kept = len(session.tokens)
            assert 2 <= kept < len(PROMPT)
            result = session.sync(PROMPT)
            assert result.n_cached == kept
            np.testing.assert_array_equal(result.logits, reference_logits(PROMPT))


def test_progress_rises_to_the_whole_prompt_in_order() -> None:
    with cluster(["0-2", "3-5"], chunk=5) as c:
        c.wait_ready()
        seen: list[tuple[int, int]] = []
        with c.backend.lease(PROMPT) as session:
            session.sync(PROMPT, progress=lambda done, total: seen.append((done, total)))
        assert [done for done, _ in seen] == [5, 10, 15, 17]
        assert {total for _, total in seen} == {17}


def test_an_incomplete_route_fails_at_once_and_names_the_layers() -> None:
    with cluster(["0-2"]) as c:
        wait_until(lambda: len(c.coordinator.health().stages) == 2, "the worker joined")
        missing = "layers 3-5 and the output head"
        with (
            c.backend.lease(PROMPT) as session,
            pytest.raises(RouteIncompleteError, match=missing),
        ):
            session.sync(PROMPT)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_lost_worker_is_waited_for_and_the_request_goes_on_exactly(lost, phase) -> None:
    """The replacement comes up on the same port with empty caches."""
    with cluster(["0-2", "3-5"], chunk=2) as c:
        c.wait_ready()

        def replace_worker() -> None:
            old = c.workers[lost]
            address, facts = old.address, old._context.facts
            old.close()
            c.workers[lost] = start_worker(FakeRunner(facts.layers), listen=address)

        killed = threading.Event()

        def kill_once(done: int, total: int) -> None:
            if done >= 4 and not killed.is_set():
                killed.set()
                threading.Thread(target=replace_worker).start()

        with c.backend.lease(PROMPT) as session:
            if phase == "prefill":
                result = session.sync(PROMPT, progress=kill_once)
                np.testing.assert_array_equal(result.logits, reference_logits(PROMPT))
                if not killed.is_set():
                    pytest.fail("the worker was never killed")
            else:
                session.sync(PROMPT)
                replace_worker()
            check(session, [*PROMPT, 4, 4])


def test_a_worker_that_does_not_come_back_fails_the_call_with_the_missing_layers() -> None:
    config = CoordinatorConfig(rejoin_timeout=0.3, result_timeout=DEADLINE)
    with cluster(["0-2", "3-5"], config=config) as c:
        c.wait_ready()
        with c.backend.lease(PROMPT) as session:
            session.sync(PROMPT)
            c.workers[1].close()
            with pytest.raises(RouteIncompleteError, match="layers 3-5"):
                session.eval(1)
            c.workers[1] = start_worker(
                FakeRunner(c.workers[1]._context.facts.layers), listen=c.workers[1].address
            )
            c.wait_ready()
            check(session, PROMPT)
