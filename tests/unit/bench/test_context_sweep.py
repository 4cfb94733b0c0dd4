"""Frontiers, rows, and the walk of a session along them; sessions are real ones of a toy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.bench.context_sweep import CSV_HEADER, ContextSweep, Frontier, Row, SweepPlan, greedy
from ds4py.bench.node import is_whole, ready_node
from ds4py.config import Address, CoordinatorConfig, EngineConfig, RouteEntry, SocketConfig
from ds4py.contracts import Session
from ds4py.errors import CancelledError, CapacityError, ConfigError
from ds4py.runtime import Node
from ds4py.tracing.events import TraceRecorder
from tests.support.toys import toy_llama
from tools.run_make_toy_gguf import plan as toy_plan
from tools.run_make_toy_gguf import write as write_toy

PROMPT = [3 + (7 * k * k + k) % 250 for k in range(200)]


def plan(**changes: Any) -> SweepPlan:
    return SweepPlan(
        **{"start": 8, "stop": 24, "step": 8, "factor": 1.0, "gen_tokens": 3, **changes}
    )


# --- the plan -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "frontiers"),
    [
        ({}, [8, 16, 24]),
        ({"stop": 25}, [8, 16, 24, 25]),
        ({"stop": 8}, [8]),
        ({"step": 1000}, [8, 24]),
        ({"factor": 2.0, "stop": 64}, [8, 16, 32, 64]),
        ({"factor": 1.5, "stop": 30}, [8, 12, 18, 27, 30]),
        ({"start": 1, "factor": 1.01, "stop": 4}, [1, 2, 3, 4]),
    ],
)
def test_frontiers_add_or_multiply_and_end_at_the_last(
    changes: dict[str, Any], frontiers: list[int]
) -> None:
    assert plan(**changes).frontiers == frontiers


@given(
    st.integers(1, 50), st.integers(0, 500), st.integers(1, 60), st.sampled_from([1.0, 1.001, 1.7])
)
def test_frontiers_only_ever_grow(start: int, more: int, step: int, factor: float) -> None:
    found = plan(start=start, stop=start + more, step=step, factor=factor).frontiers
    assert found[0] == start
    assert found[-1] == start + more
    assert all(a < b for a, b in itertools.pairwise(found))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"start": 0}, "--ctx-start 0"),
        ({"start": 25}, "--ctx-max 24"),
        ({"step": 0}, "--step-incr 0"),
        ({"factor": 0.99}, "--step-mul 0.99"),
        ({"factor": float("nan")}, "--step-mul nan"),
        ({"factor": float("inf")}, "--step-mul inf"),
        ({"gen_tokens": -1}, "--gen-tokens -1"),
    ],
)
def test_an_impossible_plan_names_its_flag(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        plan(**changes)


def test_a_row_is_the_example_of_the_specification() -> None:
    row = Row(
        ctx_tokens=4096,
        prefill_tokens=2048,
        prefill_tps=351.0749,
        gen_tokens=128,
        gen_tps=13.9151,
        kvcache_bytes=61234176,
    )
    assert row.csv == "4096,2048,351.07,128,13.92,61234176"
    assert CSV_HEADER.split(",") == list(Row.__slots__)


def test_greedy_takes_the_best_that_is_allowed_and_changes_nothing() -> None:
    logits = np.array([1, 9, 5, 7], np.float32)
    assert greedy(logits, ()) == 1
    assert greedy(logits, {1, 3}) == 2
    assert greedy(logits, {0}) == 1
    assert logits.tolist() == [1, 9, 5, 7]


# --- the walk -------------------------------------------------------------------------------------


def opened(model: Path) -> Iterator[tuple[Node, TraceRecorder]]:
    engine = EngineConfig(model=model, precision="f32", n_ctx=128, n_slots=1, threads=1)
    with ready_node(
        engine,
        CoordinatorConfig(n_sessions=1),
        SocketConfig(),
        loaded=lambda _, __: None,
        cancelled=lambda: False,
        missing=lambda _: None,
    ) as ready:
        yield ready


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, TraceRecorder]]:
    yield from opened(toy_llama(tmp_path_factory.mktemp("toy") / "toy.gguf"))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, TraceRecorder]]:
    path = tmp_path_factory.mktemp("toy") / "deepseek4.gguf"
    write_toy(path, toy_plan("tiny", None, 0, {}))
    yield from opened(path)


def walk(
    ready: tuple[Node, TraceRecorder],
    wanted: SweepPlan,
    told: list[tuple[int, int]],
    **changes: Any,
) -> list[Frontier]:
    node, recorder = ready
    settings = {"eos_ids": (), "portable": False, "cancelled": lambda: False, **changes}
    with node.backend.lease(()) as session:
        walker = ContextSweep(session, recorder, progress=lambda *n: told.append(n), **settings)
        return list(walker.measure(PROMPT, wanted))


def logits(frontiers: list[Frontier]) -> np.ndarray:
    return np.stack([frontier.logits for frontier in frontiers])


def test_each_increment_stands_behind_the_prompt_alone(llama: tuple[Node, TraceRecorder]) -> None:
    """What was generated at one frontier leaves no trace at the next."""
    found = walk(llama, plan(), [])
    rows = [frontier.row for frontier in found]
    assert [row.ctx_tokens for row in rows] == [8, 16, 24]
    assert [row.prefill_tokens for row in rows] == [8, 8, 8]
    assert all(row.prefill_tps > 0 and row.gen_tps > 0 for row in rows)
    assert {row.kvcache_bytes for row in rows} == {0}
    alone = walk(llama, plan(gen_tokens=0), [])
    np.testing.assert_allclose(logits(found), logits(alone), atol=2e-4)


def test_a_portable_cache_comes_back_by_its_snapshot(deepseek: tuple[Node, TraceRecorder]) -> None:
    found = walk(deepseek, plan(), [], portable=True)
    sizes = [frontier.row.kvcache_bytes for frontier in found]
    assert sizes == sorted(sizes)
    assert sizes[0] > 1000
    alone = walk(deepseek, plan(gen_tokens=0), [])
    np.testing.assert_allclose(logits(found), logits(alone), atol=1e-5)


def test_a_session_is_back_at_its_frontier_before_the_next_is_timed(
    llama: tuple[Node, TraceRecorder],
) -> None:
    node, recorder = llama
    with node.backend.lease(()) as session:
        walker = ContextSweep(
            session,
            recorder,
            eos_ids=(),
            portable=False,
            progress=lambda *_: None,
            cancelled=lambda: False,
        )
        for frontier in walker.measure(PROMPT, plan()):
            assert list(session.tokens) == PROMPT[: frontier.row.ctx_tokens]


def test_every_stage_accounts_for_its_time(llama: tuple[Node, TraceRecorder]) -> None:
    (frontier,) = walk(llama, plan(start=24), [])
    for shares in (frontier.prefill["coordinator"], frontier.decode["coordinator"]):
        parts = (shares.compute, shares.wire, shares.wait, shares.idle)
        assert sum(parts) == pytest.approx(1.0)
        assert 0 < shares.compute <= 1


def test_nothing_generated_is_no_rate(llama: tuple[Node, TraceRecorder]) -> None:
    (frontier,) = walk(llama, plan(start=24, gen_tokens=0), [])
    assert (frontier.row.gen_tokens, frontier.row.gen_tps) == (0, 0.0)
    assert frontier.decode == {}


def test_progress_reaches_its_total_and_never_falls(llama: tuple[Node, TraceRecorder]) -> None:
    told: list[tuple[int, int]] = []
    walk(llama, plan(), told)
    assert told[-1] == (24 + 3 * 3, 24 + 3 * 3)
    assert told == sorted(told)


def test_an_end_token_is_never_generated(llama: tuple[Node, TraceRecorder]) -> None:
    """With all but one token excluded, that one is generated whatever the logits."""
    node, recorder = llama
    seen: list[int] = []

    class Watched:
        """A session that tells what is evaluated."""

        def __init__(self, inner: Session):
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def eval(self, token: int) -> Any:
            seen.append(token)
            return self._inner.eval(token)

    excluded = set(range(node.backend.card.n_vocab)) - {77}
    with node.backend.lease(()) as session:
        walker = ContextSweep(
            Watched(session),
            recorder,
            eos_ids=excluded,
            portable=False,
            progress=lambda *_: None,
            cancelled=lambda: False,
        )
        list(walker.measure(PROMPT, plan(start=24)))
    assert seen[-3:] == [77, 77, 77]


def test_a_short_prompt_says_what_is_missing(llama: tuple[Node, TraceRecorder]) -> None:
    with pytest.raises(CapacityError, match=r"tokens in the prompt.*300.*200"):
        walk(llama, plan(stop=300), [])


def test_cancelling_ends_the_walk_between_tokens(llama: tuple[Node, TraceRecorder]) -> None:
    answers = iter([False] * 6)
    with pytest.raises(CancelledError):
        walk(llama, plan(gen_tokens=50), [], cancelled=lambda: next(answers, True))


def test_a_coordinator_with_workers_does_not_own_all_layers() -> None:
    entry = RouteEntry(Address("127.0.0.1", 1))
    assert is_whole(CoordinatorConfig())
    assert not is_whole(CoordinatorConfig(route=(entry,)))
    assert not is_whole(CoordinatorConfig(listen=Address("127.0.0.1", 0)))
