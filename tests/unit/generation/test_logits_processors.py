"""Steering: bias, penalties, grammar, greedy and forced tokens around a sampler."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.config import SamplingParams
from ds4py.errors import RequestError
from ds4py.generation.grammar import GrammarKind, GrammarSource
from ds4py.generation.logits_processors import (
    MAX_BIASED,
    LogitBias,
    SamplingController,
    SamplingControls,
)
from ds4py.generation.logprobs import top_logprobs
from ds4py.generation.sampling import F32, Sampler
from tests.unit.generation.toys import EOS, N_VOCAB, Toy, noise

TOY = Toy()
SOURCE = GrammarSource(TOY)
GREEDY = SamplingParams(temperature=0)
RANDOM = SamplingParams(seed=7, temperature=1.5)


def steered(params: SamplingParams = GREEDY, **controls: object) -> SamplingController:
    return SamplingController(Sampler(params), SamplingControls(**controls))  # type: ignore[arg-type]


def row(*logits: float) -> F32:
    values = np.array(logits, np.float32)
    values.flags.writeable = False
    return values


def chosen(sampler: SamplingController, logits: F32, n_tokens: int) -> list[int]:
    return [sampler.choose(logits).id for _ in range(n_tokens)]


@pytest.mark.parametrize(
    "controls",
    [
        SamplingControls(),
        SamplingControls(logit_bias=LogitBias(), greedy_now=lambda: False, forced=lambda: ()),
    ],
)
@given(seed=st.integers(0, 2**32), top_k=st.sampled_from([0, 5]))
def test_without_controls_it_is_the_sampler(
    controls: SamplingControls, seed: int, top_k: int
) -> None:
    params = SamplingParams(seed=7, temperature=1.5, top_k=top_k)
    plain, inner = Sampler(params), Sampler(params)
    sampler = SamplingController(inner, controls)
    rng = np.random.default_rng(seed)
    for _ in range(4):
        logits = noise(rng)
        logits[3] = np.nan
        assert sampler.choose(logits) == plain.choose(logits)
        assert inner.state == plain.state


def test_a_bias_moves_single_tokens() -> None:
    logits = row(0, 3, 2, 1)
    assert chosen(steered(logit_bias=LogitBias(bias={1: -100, 9: 100})), logits, 1) == [2]
    assert chosen(steered(logit_bias=LogitBias(bias={0: 100, 3: 1.5})), logits, 1) == [0]


@given(st.floats(-2, 2), st.floats(-2, 2), st.integers(0, 2**32))
def test_penalties_are_those_of_the_openai_api(
    presence: float, frequency: float, seed: int
) -> None:
    logit_bias = LogitBias(bias={2: 0.5}, presence_penalty=presence, frequency_penalty=frequency)
    sampler = steered(logit_bias=logit_bias)
    rng = np.random.default_rng(seed)
    seen: Counter[int] = Counter()
    for _ in range(12):
        logits = noise(rng, 5)
        expected = [
            logit + 0.5 * (id_ == 2) - frequency * seen[id_] - presence * (seen[id_] > 0)
            for id_, logit in enumerate(logits.tolist())
        ]
        token = sampler.choose(logits).id
        assert expected[token] == pytest.approx(max(expected), abs=1e-4)
        seen[token] += 1


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"bias": {1: 101}}, "logit_bias"),
        ({"bias": {1: float("nan")}}, "logit_bias"),
        ({"bias": {-1: 1}}, "logit_bias"),
        ({"bias": dict.fromkeys(range(MAX_BIASED + 1), 1.0)}, "logit_bias"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError, match=f"^{param}: got .*, expected") as caught:
        LogitBias(**values)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_a_greedy_step_takes_the_best_token_and_no_random_number() -> None:
    inner = Sampler(RANDOM)
    now = True
    sampler = SamplingController(
        inner, SamplingControls(greedy_now=lambda: now, logit_bias=LogitBias(bias={0: 5}))
    )
    assert chosen(sampler, row(0, 4, 1), 3) == [0, 0, 0]
    assert inner.state == Sampler(RANDOM).state
    now = False
    sampler.choose(row(0, 4, 1))
    assert inner.state != Sampler(RANDOM).state


def test_a_greedy_step_is_greedy_among_what_the_grammar_allows() -> None:
    sampler = constrained('{"enum": [1, 2]}', RANDOM, greedy_now=lambda: True)
    logits = np.zeros(N_VOCAB, np.float32)
    logits[[ord("x"), ord("2")]] = 5, 1
    assert sampler.choose(logits).id == ord("2")


def test_forced_tokens_come_in_order_before_anything_else_is_asked() -> None:
    orders = iter([(), (4, 2), (3,), ()])
    inner = Sampler(RANDOM)
    sampler = SamplingController(
        inner, SamplingControls(forced=lambda: next(orders), logit_bias=LogitBias())
    )
    logits = row(9, 0, 0, 0, 0)
    assert sampler.choose(logits).id == 0
    state = inner.state
    assert chosen(sampler, logits, 3) == [4, 2, 3]
    assert inner.state == state
    sampler.choose(logits)
    assert inner.state != state


def test_log_probabilities_are_of_the_model_itself() -> None:
    constraint = SOURCE.compile(GrammarKind.CHOICE, '["b"]')
    constraint.start()
    sampler = steered(constraint=constraint, logit_bias=LogitBias(bias={97: 50}), n_logprobs=2)
    logits = np.zeros(N_VOCAB, np.float32)
    logits[97] = 5
    choice = sampler.choose(logits)
    assert choice.id == 98
    assert choice.logprobs == top_logprobs(logits, 98, 2)
    assert choice.logprobs.ranked[0][0] == 97
    assert steered().choose(logits).logprobs is None
    forced = steered(forced=lambda: (7,), n_logprobs=0).choose(logits)
    assert forced.logprobs == top_logprobs(logits, 7, 0)


def constrained(text: str, params: SamplingParams, **controls: object) -> SamplingController:
    constraint = SOURCE.compile(GrammarKind.JSON_SCHEMA, text)
    constraint.start()
    return steered(params, constraint=constraint, **controls)


SCHEMA = json.dumps({"type": "array", "items": {"enum": ["aé", "b"]}, "minItems": 2, "maxItems": 3})


@given(st.integers(1, 2**32), st.integers(0, 2**32))
def test_a_seed_repeats_a_constrained_text(seed: int, model: int) -> None:
    def write() -> list[int]:
        sampler = constrained(SCHEMA, SamplingParams(seed=seed, min_p=0))
        rng = np.random.default_rng(model)
        tokens: list[int] = []
        while True:
            choice = sampler.choose(noise(rng))
            tokens.append(choice.id)
            if choice.final:
                return tokens

    tokens = write()
    assert tokens == write()
    value = json.loads(TOY.text(tokens))
    assert 2 <= len(value) <= 3
    assert set(value) <= {"aé", "b"}


def test_a_token_that_must_end_the_text_is_final() -> None:
    sampler = constrained('{"const": 12}', GREEDY)
    choices = [sampler.choose(np.zeros(N_VOCAB, np.float32)) for _ in range(2)]
    assert TOY.text([choice.id for choice in choices]) == b"12"
    assert [choice.final for choice in choices] == [False, True]


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("params", [GREEDY, RANDOM])
def test_logits_that_leave_no_allowed_token_are_an_error(
    value: float, params: SamplingParams
) -> None:
    sampler = constrained('{"type": "string"}', params)
    logits = np.full(N_VOCAB, value, np.float32)
    logits[ord("x")] = 1
    with pytest.raises(RequestError, match="no token of the model can continue"):
        sampler.choose(logits)


def test_a_forced_token_that_the_grammar_forbids_is_an_error() -> None:
    sampler = constrained('{"type": "string"}', GREEDY, forced=lambda: (ord("x"),))
    with pytest.raises(RequestError, match="no token of the model can continue"):
        sampler.choose(np.zeros(N_VOCAB, np.float32))


def test_a_banned_token_is_still_taken_where_the_grammar_leaves_no_other() -> None:
    sampler = constrained(
        '{"const": 1}', GREEDY, logit_bias=LogitBias(bias={ord("1"): -100, EOS: 100})
    )
    assert sampler.choose(np.zeros(N_VOCAB, np.float32)).id == ord("1")
