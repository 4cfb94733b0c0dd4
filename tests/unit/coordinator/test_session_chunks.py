"""How sessions cut prompts when nobody says how: by what the stages report of earlier ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest

from ds4py.config import CoordinatorConfig, PrefillTuning, RouteEntry
from ds4py.contracts import ForwardOutput
from ds4py.coordinator.chunk_size import GRANULE, StageModel, Stretch, forecast
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.session_pool import SessionPool
from ds4py.errors import ConfigError
from tests.clusters import DEADLINE, SOCKETS, Cluster, span, start_worker
from tests.fake_runner import FakeRunner, card, reference_logits

N_CTX = 4096
LIGHT = StageModel(fixed=0.016, per_token=4e-4, per_pair=4e-8)
HEAVY = StageModel(fixed=0.2, per_token=4e-4, per_pair=4e-8)


class PricedRunner(FakeRunner):
    """A fake slice whose clock runs by a model instead of by the sun."""

    def __init__(self, layers: str, price: StageModel):
        super().__init__(span(layers), n_ctx=N_CTX)
        self.price = price

    def _run(self, work) -> ForwardOutput:
        seconds = self.price.seconds(len(work.tokens), work.pos0)
        return replace(super()._run(work), eval_usec=min(round(seconds * 1e6), 2**32 - 1))


@contextmanager
def priced(prices: Sequence[StageModel], **prefill: object) -> Iterator[tuple]:
    """A route of one or two workers with given costs, and a session."""
    cuts = ["0-5"] if len(prices) == 1 else ["0-2", "3-5"]
    runners = [PricedRunner(cut, price) for cut, price in zip(cuts, prices, strict=True)]
    with ExitStack() as stack:
        workers = [start_worker(runner) for runner in runners]
        for worker in workers:
            stack.callback(worker.close)
        config = CoordinatorConfig(
            route=tuple(RouteEntry(worker.address) for worker in workers),
            prefill=PrefillTuning(**prefill),  # type: ignore[arg-type]
            result_timeout=DEADLINE,
        )
        coordinator = Coordinator(card(), N_CTX, config, SOCKETS)
        stack.callback(coordinator.close)
        coordinator.start()
        backend = SessionPool(coordinator, 1)
        Cluster(coordinator, backend, None).wait_ready()  # type: ignore[arg-type]
        with backend.lease([1]) as session:
            yield session, runners


def prompt(n_tokens: int, seed: int) -> list[int]:
    """A prompt that shares nothing with one of another seed."""
    return [seed, *np.random.default_rng(seed).integers(0, 97, n_tokens - 1).tolist()]


def cuts_of(session, runners, tokens) -> list[int]:
    """Evaluate a prompt and return the lengths of its chunks."""
    before = len(runners[0].evaluated)
    session.sync(tokens)
    cuts = [runner.evaluated[before:] for runner in runners]
    assert all(cut == cuts[0] for cut in cuts)
    return [n for _, n in cuts[0]]


@pytest.mark.parametrize("prices", [[LIGHT, LIGHT], [HEAVY, HEAVY], [LIGHT, HEAVY], [LIGHT]])
@pytest.mark.parametrize("lengths", [[2048] * 6, [700, 1500, 300, 2000, 900, 1800, 2048]])
def test_after_a_few_prompts_chunks_are_as_good_as_the_best(prices, lengths) -> None:
    """Also when all prompts have one length, though the first guess then has one size only."""
    with priced(prices) as (session, runners):
        for seed, n_tokens in enumerate(lengths):
            lengths_of_chunks = cuts_of(session, runners, prompt(n_tokens, seed))
        chosen = max(lengths_of_chunks)
    stretch = Stretch(start=0, n_tokens=2048, cap=N_CTX, window=2 + len(prices))
    possible = {size: forecast(prices, stretch, size) for size in stretch.candidates()}
    assert possible[chosen].seconds <= 1.05 * min(f.seconds for f in possible.values())


def test_before_anything_is_measured_chunks_are_moderate_and_even() -> None:
    with priced([LIGHT, LIGHT]) as (session, runners):
        assert cuts_of(session, runners, prompt(1200, 1)) == [512, 512, 176]
    with priced([LIGHT, LIGHT]) as (session, runners):
        assert cuts_of(session, runners, prompt(500, 1)) == [500]


def test_a_prompt_of_one_granule_is_never_cut() -> None:
    with priced([LIGHT, LIGHT]) as (session, runners):
        for seed in range(5):
            session.sync(prompt(1000, seed))
        assert cuts_of(session, runners, prompt(GRANULE, 9)) == [GRANULE]


@pytest.mark.parametrize("lie", [0, 1, 2**32 - 1])
def test_stages_that_lie_about_their_time_get_chunks_within_the_bounds(lie) -> None:
    with priced([LIGHT, StageModel(fixed=lie / 1e6, per_token=0, per_pair=0)]) as (
        session,
        runners,
    ):
        for seed in range(4):
            cuts = cuts_of(session, runners, prompt(1200, seed))
            assert all(n >= GRANULE for n in cuts[:-1])


def test_reports_of_workers_give_their_costs_back() -> None:
    with priced([LIGHT, HEAVY]) as (session, _):
        for seed, n_tokens in enumerate([3000, 1300, 2500]):
            session.sync(prompt(n_tokens, seed))
        fitted = session._source.telemetry.costs.models([(0, 2), (3, 5)])
    for model, price in zip(fitted, [LIGHT, HEAVY], strict=True):
        for n_tokens, pos0 in [(128, 0), (512, 0), (512, 2500)]:
            expected = price.seconds(n_tokens, pos0)
            assert model.seconds(n_tokens, pos0) == pytest.approx(expected, rel=0.05)


def test_an_unusable_window_matters_only_to_prompts_that_may_be_cut() -> None:
    with priced([LIGHT, LIGHT], window=ConfigError("bad window")) as (session, runners):
        assert cuts_of(session, runners, prompt(GRANULE, 1)) == [GRANULE]
        with pytest.raises(ConfigError, match="bad window"):
            session.sync(prompt(1000, 2))


def test_what_the_user_asks_for_always_holds() -> None:
    with priced([HEAVY, HEAVY], chunk=200) as (session, runners):
        for seed in range(4):
            assert cuts_of(session, runners, prompt(700, seed)) == [200, 200, 200, 100]


def test_no_chunk_exceeds_the_cap_whatever_is_measured() -> None:
    with priced([HEAVY, HEAVY], prefill_cap=300) as (session, runners):
        for seed in range(4):
            assert max(cuts_of(session, runners, prompt(1200, seed))) <= 300


def test_the_part_that_is_not_cached_is_cut_by_its_own_length() -> None:
    with priced([LIGHT, LIGHT]) as (session, runners):
        tokens = prompt(2600, 3)
        session.sync(tokens[:2000])
        cuts = cuts_of(session, runners, tokens)
        assert sum(cuts) == 600
        np.testing.assert_array_equal(session.sync(tokens).logits, reference_logits(tokens))


def test_a_new_choice_is_explained_once_in_the_debug_log(caplog) -> None:
    caplog.set_level(logging.DEBUG, "ds4py.coordinator.chunk_planner")
    with priced([HEAVY, HEAVY]) as (session, runners):
        session.sync(prompt(1024, 0))
        for seed in range(1, 9):
            cuts = cuts_of(session, runners, prompt(1024, seed))
    lines = [r.message for r in caplog.records if r.message.startswith("chunks of a prompt")]
    assert lines[0].endswith("1024 tokens from 0: 2 x 512, as not every stage was measured yet")
    assert f"x {cuts[0]}, predicted " in lines[-1]
    assert "layers 0-2: " in lines[-1]
    assert "layers 3-5: " in lines[-1]
    assert 2 <= len(lines) < 9
