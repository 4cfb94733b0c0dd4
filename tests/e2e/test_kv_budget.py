"""A worker whose cache budget is used up: who learns what, and that nobody else is disturbed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from ds4py.cluster.coordinator import Coordinator
from ds4py.cluster.session import ClusterSession
from ds4py.cluster.worker import Worker
from ds4py.config import CoordinatorConfig, EngineConfig, PrefillTuning, RouteEntry
from ds4py.contracts import SessionId, SliceOutput, SliceWork, Want
from ds4py.engine import LocalRunner, open_runner
from ds4py.engine.open import read_model
from ds4py.errors import Ds4Error
from ds4py.spans import LayerSpec
from tests.clusters import DEADLINE, SOCKETS, start_worker, wait_until
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
    work = SliceWork(
        session=SessionId(9),
        tokens=tuple(tokens),
        pos0=0,
        hidden=None,
        reset=True,
        want=Want.LOGITS,
    )
    (answer,) = runner.run([work])
    assert isinstance(answer, SliceOutput)
    assert answer.logits is not None
    return answer.logits


def test_a_full_worker_refuses_with_its_numbers_and_serves_the_others(
    route: tuple[Coordinator, list[Worker]], model: Path
) -> None:
    coordinator, workers = route
    reference = open_runner(engine(model))
    first, second = session(coordinator, 1), session(coordinator, 2)
    first.sync(text(400))
    with pytest.raises(Ds4Error) as caught:
        second.sync(text(300))
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
    use = lambda: workers[1]._stage.device.runner.kv_use  # noqa: E731
    wait_until(lambda: len(use().tokens) == 1, "the ended session has given its pages back")
    assert use().used == PAGE
    long = second.sync(text(700)).logits
    np.testing.assert_allclose(long, alone(reference, text(700)), atol=1e-4)
    assert use().used == 3 * PAGE <= use().budget
