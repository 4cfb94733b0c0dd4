"""Sampling: equal to a plain loop over float32, on any logits and parameters."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ds4py.config import SamplingParams
from ds4py.errors import ModelError
from ds4py.generation.sampling import F32, Sampler, XorShift64Star, greedy

f32 = np.float32


@dataclass
class ScalarSampler:
    """The rules of docs/spec/deepseek4-model.md#sampling-order, one element after the other."""

    params: SamplingParams
    random: XorShift64Star

    def pick(self, logits: F32) -> int:
        finite = [i for i in range(len(logits)) if np.isfinite(logits[i])]
        temperature = f32(self.params.temperature)
        if not temperature > 0 or not finite:
            return self.argmax(logits)
        best = max(finite, key=lambda i: (logits[i], -i))
        p = {i: np.exp((logits[i] - logits[best]) / temperature) for i in finite}
        top_k = min(self.params.top_k, 1024)
        top_p = f32(self.params.top_p if 0 < self.params.top_p <= 1 else 1)
        min_p = f32(max(self.params.min_p, 0))
        if top_k <= 0 and top_p == 1:
            return self.walk([i for i in finite if p[i] >= min_p], p, fallback=best)
        ranked = sorted(finite, key=lambda i: (-logits[i], i))
        candidates = ranked[:top_k] if top_k > 0 else ranked
        total = self.total(candidates if top_k > 0 else finite, p)
        taken: list[int] = []
        kept = f32(0)
        for i in candidates:
            if taken and p[i] / total < p[candidates[0]] / total * min_p:
                break
            taken.append(i)
            kept = kept + p[i]
            if kept / total >= top_p:
                break
        return self.walk(taken, p, fallback=taken[-1])

    def walk(self, ids: list[int], p: dict[int, np.float32], fallback: int) -> int:
        remaining = self.random.uniform() * self.total(ids, p)
        for i in ids:
            remaining = remaining - p[i]
            if remaining <= 0:
                return i
        return fallback

    @staticmethod
    def total(ids: list[int], p: dict[int, np.float32]) -> np.float32:
        total = f32(0)
        for i in ids:
            total = total + p[i]
        return total

    @staticmethod
    def argmax(logits: F32) -> int:
        best = 0
        for i in range(len(logits)):
            if logits[i] > logits[best] or (np.isnan(logits[best]) and not np.isnan(logits[i])):
                best = i
        return best


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([-1.0, 0.0, 0.01, 0.7, 1.0, 3.0, 1e30]),
    top_k=st.sampled_from([-3, 0, 1, 2, 5, 40, 5000]),
    top_p=st.sampled_from([-1.0, 0.0, 1e-9, 0.3, 0.9, 0.999, 1.0, 7.0]),
    min_p=st.sampled_from([-1.0, 0.0, 0.05, 0.5, 1.0, 2.0]),
)
LOGITS = hnp.arrays(
    np.float32,
    st.integers(1, 40),
    elements=st.floats(-20, 20, width=32)
    | st.sampled_from([0.0, 1.0, -np.inf, np.inf, np.nan])
    | st.sampled_from([f32(3.4e38), f32(-3.4e38)]),
)


@given(LOGITS, PARAMS, st.integers(0, 2**64 - 1))
@example(np.full(4, np.nan, f32), SamplingParams(), 7)
@example(np.array([-np.inf, np.nan], f32), SamplingParams(top_k=2), 7)
@example(np.array([1, 1, 1, 1], f32), SamplingParams(top_k=2), 7)
@example(np.array([1, 2], f32), SamplingParams(min_p=2), 7)  # nothing is left: the best one
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_the_vectorised_sampler_equals_the_plain_loop(
    logits: F32, params: SamplingParams, state: int
) -> None:
    sampler = Sampler(params, state=state)
    reference = ScalarSampler(params, XorShift64Star(state))
    for _ in range(3):
        assert sampler.pick(logits) == reference.pick(logits)
        assert sampler.state == reference.random.state


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(min_p=0),
        SamplingParams(top_k=300, min_p=0),
        SamplingParams(top_p=0.95, min_p=0),
        SamplingParams(top_p=0.9999, min_p=0, temperature=4),
        SamplingParams(top_p=0.9),
    ],
)
def test_a_vocabulary_larger_than_the_first_ranking_is_sampled_alike(
    params: SamplingParams,
) -> None:
    logits = np.random.default_rng(1).normal(0, 2, 3000).astype(f32).round(1)  # with ties
    sampler = Sampler(params, state=5)
    reference = ScalarSampler(params, XorShift64Star(5))
    for _ in range(3):
        assert sampler.pick(logits) == reference.pick(logits)


class Drawn:
    """A random number of the test's choice."""

    def __init__(self, number: float) -> None:
        self.number = f32(number)

    def uniform(self) -> np.float32:
        return self.number


def test_sums_are_rounded_after_each_element_as_in_a_plain_loop() -> None:
    logits = np.full(5000, -17.4, f32)  # each weight is lost beside 1 in float32
    logits[0] = 0
    sampler = Sampler(SamplingParams(min_p=0))
    sampler._random = Drawn(1 - 2**-24)  # type: ignore[assignment]
    assert sampler.pick(logits) == 0


@pytest.mark.parametrize(("number", "token"), [(0.0, 0), (0.5, 0), (0.75, 1)])
def test_a_share_that_is_used_up_exactly_ends_the_walk(number: float, token: int) -> None:
    sampler = Sampler(SamplingParams())
    sampler._random = Drawn(number)  # type: ignore[assignment]
    assert sampler.pick(np.zeros(2, f32)) == token


def test_greedy_takes_the_first_of_equal_ones_and_never_nan() -> None:
    assert greedy(np.array([np.nan, 1, 2, 2, np.nan], f32)) == 2
    assert greedy(np.array([np.nan, -np.inf], f32)) == 0
    assert greedy(np.array([0, np.inf], f32)) == 1


def test_the_worked_examples_of_the_specification() -> None:
    logits = np.arange(1, 9, dtype=f32)
    first = Sampler(SamplingParams(seed=42))
    assert [first.pick(logits) for _ in range(12)] == [7, 7, 7, 7, 7, 7, 6, 7, 6, 7, 7, 7]
    second = Sampler(SamplingParams(seed=42, top_p=0.9))
    assert [second.pick(logits) for _ in range(12)] == [7, 6, 6, 5, 6, 6, 7, 7, 7, 6, 7, 7]


@pytest.mark.parametrize(
    ("seed", "numbers", "state"),
    [
        (0, [0.0527908206, 0.3311202526, 0.6573173404, 0.4899603724], 12912965123806966029),
        (42, [0.3390852213, 0.7822558284, 0.7901369929, 0.9440426231], 4637185482584944939),
    ],
)
def test_the_random_numbers_are_those_of_the_specification(
    seed: int, numbers: list[float], state: int
) -> None:
    random = XorShift64Star(seed)
    assert [float(random.uniform()) for _ in numbers] == pytest.approx(numbers, abs=1e-10)
    assert random.state == state


def test_a_greedy_token_uses_no_random_number() -> None:
    sampler = Sampler(SamplingParams(temperature=0, seed=9))
    sampler.pick(np.array([0, 1], f32))
    assert sampler.state == 9


def test_a_positive_seed_repeats_and_none_does_not() -> None:
    assert Sampler(SamplingParams(seed=5)).state == Sampler(SamplingParams(seed=5)).state == 5
    states = {Sampler(SamplingParams(seed=seed)).state for seed in (0, 0, -1, -1)}
    assert len(states) == 4


def test_the_logits_are_left_as_they_are() -> None:
    logits = np.array([1, np.nan, 3], f32)
    logits.flags.writeable = False
    for params in (SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.5)):
        Sampler(params, state=1).pick(logits)


@pytest.mark.parametrize("shape", [(0,), (2, 3), ()])
def test_logits_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="logits: got shape"):
        Sampler(SamplingParams()).pick(np.zeros(shape, f32))
