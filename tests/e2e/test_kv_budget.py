"""A stage whose cache budget is used up: who has to go, who learns what, who is not disturbed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4py.config import CoordinatorConfig, EngineConfig, PrefillTuning, RouteEntry
from ds4py.contracts import ForwardOutput, ForwardRequest, OutputKind, Session, SessionId
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.session import ClusterSession
from ds4py.coordinator.session_pool import SessionPool
from ds4py.engine import LocalRunner, open_runner
from ds4py.engine.open import read_model
from ds4py.errors import CapacityError
from ds4py.layer_range import LayerSpec
from ds4py.worker.worker import Worker
from tests.clusters import DEADLINE, SOCKETS, cluster, start_worker, wait_until
from tests.fake_runner import reference_logits
from tests.toys import toy_llama

PAGE = 1 * 4 * 256 * 16 * 4
"""Bytes of 256 tokens in one layer: planes, tokens, width, float32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_llama(tmp_path_factory.mktemp("toy") / "m.gguf", n_layers=2, n_ctx=1024)


def engine(model: Path, n_pages: int | None = None) -> EngineConfig:
    budget = None if n_pages is None else n_pages * PAGE
    return EngineConfig(model=model, precision="f32", threads=1, n_slots=4, kv_budget=budget)


@pytest.fixture
def route(model: Path) -> Iterator[tuple[Coordinator, list[Worker]]]:
    """Two workers with a layer each; the second has cache for three pages."""
    with ExitStack() as stack:
        runners = [
            open_runner(engine(model), LayerSpec.parse("0:0")),
            open_runner(engine(model, 3), LayerSpec.parse("1:output")),
        ]
        workers = [start_worker(runner) for runner in runners]
        for worker in workers:
            stack.callback(worker.close)
        card, n_ctx = read_model(engine(model))
        config = CoordinatorConfig(
            route=tuple(RouteEntry(worker.address) for worker in workers),
            result_timeout=DEADLINE,
            prefill=PrefillTuning(chunk=128),
        )
        coordinator = Coordinator(card, n_ctx, config, SOCKETS)
        stack.callback(coordinator.close)
        coordinator.start()
        wait_until(lambda: coordinator.health().ready, "the route is complete")
        yield coordinator, workers


def session(coordinator: Coordinator, number: int) -> ClusterSession:
    return ClusterSession(SessionId(number), coordinator, coordinator.config)


def text(n_tokens: int) -> list[int]:
    return [3 + 7 * k % 270 for k in range(n_tokens)]


def alone(runner: LocalRunner, tokens: list[int]) -> np.ndarray:
    work = ForwardRequest(
        session=SessionId(9),
        tokens=tuple(tokens),
        pos0=0,
        hidden=None,
        reset=True,
        output_kind=OutputKind.LOGITS,
    )
    (answer,) = runner.run([work])
    assert isinstance(answer, ForwardOutput)
    assert answer.logits is not None
    return answer.logits


def test_a_full_worker_refuses_with_its_numbers_and_serves_the_others(
    route: tuple[Coordinator, list[Worker]], model: Path
) -> None:
    coordinator, workers = route
    reference = open_runner(engine(model))
    first, second = session(coordinator, 1), session(coordinator, 2)
    first.sync(text(400))
    with pytest.raises(CapacityError) as caught:
        second.sync(text(300))
    assert (caught.value.needed, caught.value.available) == (PAGE, 0)
    message = str(caught.value)
    assert "2 sessions hold 0.2 MiB of the budget of 0.2 MiB" in message
    assert "--kv-budget" in message
    assert f"needed {PAGE}, available 0" in message
    # the other session neither lost a row nor waits
    tokens = text(400)
    for token in (5, 80, 7):
        tokens.append(token)
        np.testing.assert_allclose(first.eval(token), alone(reference, tokens), atol=1e-4)
    # what the refused one has is enough for a shorter prompt
    short = second.sync(text(100)).logits
    np.testing.assert_allclose(short, alone(reference, text(100)), atol=1e-4)
    # and when somebody leaves there is room again
    first.close()
    use = lambda: workers[1].stage.device.runner.kv_use  # noqa: E731
    wait_until(lambda: len(use().tokens) == 1, "the ended session has given its pages back")
    assert use().used == PAGE
    long = second.sync(text(700)).logits
    np.testing.assert_allclose(long, alone(reference, text(700)), atol=1e-4)
    assert use().used == 3 * PAGE <= use().budget


# --- idle sessions give way ----------------------------------------------------------------------


@pytest.fixture
def own_layers(model: Path) -> Iterator[Coordinator]:
    """A process with all layers and cache for three pages of each."""
    runner = open_runner(engine(model, 6))
    config = CoordinatorConfig(prefill=PrefillTuning(chunk=128))
    coordinator = Coordinator(runner.card, runner.n_ctx, config, SOCKETS, local=runner)
    yield coordinator
    coordinator.close()


@pytest.fixture(params=["two workers", "own layers"])
def backend(request: pytest.FixtureRequest) -> SessionPool:
    """Three sessions over stages that hold three pages together."""
    if request.param == "own layers":
        return SessionPool(request.getfixturevalue("own_layers"), 3)
    coordinator, _ = request.getfixturevalue("route")
    return SessionPool(coordinator, 3)


@pytest.fixture(scope="module")
def reference(model: Path) -> LocalRunner:
    return open_runner(engine(model))


def other(n_tokens: int, first: int) -> list[int]:
    """A prompt that has nothing in common with those of another first token."""
    return [first, *text(n_tokens - 1)]


def leave(backend: SessionPool, tokens: Sequence[int]) -> None:
    """Have a conversation that may go on later."""
    with backend.lease(tokens) as session:
        session.sync(tokens)


def check(session: Session, tokens: list[int], reference: LocalRunner) -> int:
    result = session.sync(tokens)
    np.testing.assert_allclose(result.logits, alone(reference, tokens), atol=1e-4)
    return result.n_cached


def test_the_longest_unused_conversation_makes_room_for_a_prompt(backend, reference) -> None:
    old, newer, prompt = other(400, 5), other(100, 6), other(400, 7)
    leave(backend, old)
    leave(backend, newer)
    with backend.lease(prompt) as session:
        assert check(session, prompt, reference) == 0
    with backend.lease([*newer, 9]) as session:
        assert check(session, [*newer, 9], reference) == len(newer)
    with backend.lease(old) as session:
        assert check(session, old, reference) == 0


def test_a_decode_step_that_needs_a_page_replays_nothing(backend, reference, caplog) -> None:
    leave(backend, other(300, 5))
    tokens = other(255, 6)
    with backend.lease(tokens) as session, caplog.at_level(logging.INFO):
        check(session, tokens, reference)
        for token in (9, 10, 11):
            tokens.append(token)
            logits = session.eval(token)
            np.testing.assert_allclose(logits, alone(reference, tokens), atol=1e-4)
        assert "idle sessions make room for 1 tokens: True" in caplog.text
        assert "replaying" not in caplog.text


def test_who_is_busy_is_not_asked_to_go(backend, reference) -> None:
    busy, prompt = other(500, 5), other(300, 6)
    with backend.lease(busy) as session:
        session.sync(busy)
        leave(backend, other(100, 7))
        with backend.lease(prompt) as second:
            with pytest.raises(CapacityError) as caught:
                second.sync(prompt)
            assert caught.value.needed > caught.value.available == 0
            assert check(second, prompt[:200], reference) == 200 - 1
        np.testing.assert_allclose(session.eval(9), alone(reference, [*busy, 9]), atol=1e-4)
    with backend.lease(prompt) as second:  # and later there is room
        check(second, prompt, reference)


def test_a_prompt_that_no_stage_could_ever_hold_is_refused_with_numbers(backend, reference) -> None:
    leave(backend, other(100, 5))
    with backend.lease(other(900, 6)) as session:
        with pytest.raises(CapacityError, match=r"KV cache: 1 sessions hold.*--kv-budget"):
            session.sync(other(900, 6))
        check(session, other(700, 7), reference)


PROMPTS = st.lists(st.lists(st.integers(0, 96), min_size=1, max_size=24), min_size=1, max_size=12)


@pytest.mark.parametrize(("cuts", "local"), [([], "0-5"), (["0-2", "3-5"], None), (["2-5"], "0-1")])
@pytest.mark.parametrize("can_rewind", [True, False])
def test_one_request_at_a_time_always_finds_room(cuts, local, can_rewind) -> None:
    """More sessions than slots, and memory for little more than one prompt."""
    with cluster(cuts, local=local, n_sessions=6, can_rewind=can_rewind, chunk=4) as c:
        c.wait_ready()
        own = [] if c.coordinator.local is None else [c.coordinator.local.runner]
        for runner in (*own, *c.runners):
            runner.kv_budget = 28  # type: ignore[attr-defined]

        @settings(max_examples=15, deadline=None)
        @given(prompts=PROMPTS)
        def ask(prompts: list[list[int]]) -> None:
            for prompt in prompts:
                with c.backend.lease(prompt) as session:
                    logits = session.sync(prompt).logits
                    np.testing.assert_array_equal(logits, reference_logits(prompt))
                    logits = session.eval(7)
                    np.testing.assert_array_equal(logits, reference_logits([*prompt, 7]))

        ask()


# --- so do sessions whose coordinator is gone -----------------------------------------------------


def test_sessions_of_a_lost_connection_give_way_without_being_asked(
    route: tuple[Coordinator, list[Worker]], reference: LocalRunner
) -> None:
    coordinator, workers = route
    first, second = session(coordinator, 1), session(coordinator, 2)
    first.sync(other(400, 5))
    for link in list(coordinator.workers.links.values()):
        link.connection.close()
    session_table = workers[1].stage.sessions
    wait_until(lambda: not any(t.owners for t in session_table._sessions.values()), "an orphan")
    wait_until(lambda: coordinator.health().ready, "the route is complete again")
    check(second, other(700, 6), reference)
    use = workers[1].stage.device.runner.kv_use  # type: ignore[attr-defined]
    assert use.tokens == (700,)
