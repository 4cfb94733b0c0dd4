"""gemma-3-270m Q4_K_M against recorded logits and greedy tokens of an independent float32 run.

The model has what SmolLM2 lacks: windows of 512 tokens on five of six layers, which the last prompt
leaves behind, two bases of rotation, norms on both sides of a half and on heads, GELU, pairs of
halves, and matrices of four types in one layer. Tolerances are those of `test_smollm2.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from ds4py.config import EngineConfig
from ds4py.contracts import ForwardOutput, ForwardRequest, OutputKind, SessionId
from ds4py.engine import LocalRunner, open_runner
from ds4py.layer_range import LayerSpec
from tests.support.golden import load_json, load_npz
from tests.support.models import gemma3_path

SESSION = SessionId(1)
LOGIT_TOLERANCE = {"f32": 1e-5, "bf16": 2e-2}
MARGIN_TOLERANCE = {"f32": 2e-3, "bf16": 0.5}
LONG = 7
"""The prompt that is longer than the window."""


@cache
def opened(precision: str, layers: str | None = None) -> LocalRunner:
    config = EngineConfig(
        model=gemma3_path(), device="cpu", precision=precision, threads=1, n_slots=1, n_ctx=1024
    )
    return open_runner(config, LayerSpec.parse(layers) if layers else None)


@pytest.fixture(autouse=True, scope="module")
def closed_again():
    yield
    for precision in ("f32", "bf16"):
        opened(precision).close()
    opened.cache_clear()


def span(stages: Sequence[LocalRunner], tokens: Sequence[int], pos0: int) -> np.ndarray:
    """Run a span through a chain of stages at 32 bits."""
    hidden, logits = None, None
    for stage in stages:
        work = ForwardRequest(
            session=SESSION,
            tokens=tuple(tokens),
            pos0=pos0,
            hidden=hidden,
            reset=pos0 == 0,
            output_kind=OutputKind.LOGITS if stage is stages[-1] else OutputKind.HIDDEN,
        )
        (answer,) = stage.run([work])
        assert isinstance(answer, ForwardOutput), answer
        hidden, logits = answer.hidden, answer.logits
    assert logits is not None
    return logits


def golden(number: int) -> tuple[list[int], list[int], list[float], np.ndarray]:
    entry = load_json("real-models/gemma3-greedy.json")[number]
    logits = load_npz("real-models/gemma3_logits_64.npz")[f"logits_{number}"]
    return entry["ids"], entry["greedy"], entry["margin"], logits


def distance(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.ptp(expected))


RUNS = [("f32", 1), ("f32", LONG), *(("bf16", number) for number in range(8))]


@pytest.mark.parametrize(("precision", "number"), RUNS)
def test_logits_and_greedy_tokens_equal_the_recorded_ones(precision, number):
    runner = opened(precision)
    ids, greedy, margins, expected = golden(number)
    logits = span([runner], ids, 0)
    assert distance(logits[::64], expected) < LOGIT_TOLERANCE[precision]
    for step, (token, margin) in enumerate(zip(greedy, margins, strict=True)):
        if margin < MARGIN_TOLERANCE[precision]:
            break
        assert logits.argmax() == token, f"step {step}"
        logits = span([runner], [token], len(ids) + step)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_prompt_beyond_the_window_may_be_chunked_in_any_way(precision):
    runner, ids = opened(precision), golden(LONG)[0]
    at_once = span([runner], ids, 0)
    for start, end in ((0, 300), (300, 301), (301, 700), (700, 701), (701, len(ids))):
        logits = span([runner], ids[start:end], start)
    assert distance(logits, at_once) < LOGIT_TOLERANCE[precision]


def test_any_cut_of_the_layers_gives_the_same_bits():
    whole, stages = opened("bf16"), [opened("bf16", cut) for cut in ("0:4", "5:5", "6:output")]
    ids, greedy, _, _ = golden(4)
    at = 0
    for tokens in (ids[:5], ids[5:], *[[token] for token in greedy[:4]]):
        assert np.array_equal(span(stages, tokens, at), span([whole], tokens, at))
        at += len(tokens)
