"""SmolLM2-135M with cached keys and values of every type against a recorded float32 run.

Limits, relative to the range of a prompt's logits (about 35), with what was measured:

| products | f32 cache | bf16 | f16 | q8_0 |
|---|---|---|---|---|
| f32 | 1e-5 (1.1e-6) | 6e-3 (3.0e-3) | 7e-4 (3.4e-4) | 2.4e-2 (1.2e-2) |
| bf16 | 2e-2 (0.7e-2) | 2e-2 (0.7e-2) | 2e-2 (1.2e-2) | 3e-2 (1.6e-2) |

Greedy tokens, each behind the recorded ones before it, must be those recorded wherever the margin
is clear: of 256 tokens, q8_0 chooses 3 others, at margins of 0.19 at most.
"""

import numpy as np
import pytest

from ds4py.config import EngineConfig
from ds4py.contracts import ForwardOutput, ForwardRequest, OutputKind, SessionId
from ds4py.engine import LocalRunner, open_runner
from tests.support.golden import load_json, load_npz
from tests.support.models import smollm2_path

LIMIT = {
    "f32": {"f32": 1e-5, "bf16": 6e-3, "f16": 7e-4, "q8_0": 2.4e-2},
    "bf16": {"f32": 2e-2, "bf16": 2e-2, "f16": 2e-2, "q8_0": 3e-2},
}
CLEAR = 0.5
"""Difference of the two largest logits that a cache does not turn round."""


def evaluate(runner: LocalRunner, tokens: list[int], pos0: int) -> np.ndarray:
    work = ForwardRequest(
        session=SessionId(1),
        tokens=tuple(tokens),
        pos0=pos0,
        hidden=None,
        reset=pos0 == 0,
        output_kind=OutputKind.LOGITS,
    )
    (answer,) = runner.run([work])
    assert isinstance(answer, ForwardOutput), answer
    assert answer.logits is not None
    return answer.logits


def opened(precision: str, kv_type: str) -> LocalRunner:
    return open_runner(
        EngineConfig(
            model=smollm2_path(),
            device="cpu",
            precision=precision,
            threads=1,
            n_slots=1,
            n_ctx=1024,
            kv_type=kv_type,
        )
    )


def error(logits: np.ndarray, number: int) -> float:
    expected = load_npz("real-models/smollm2_logits.npz")[f"logits_{number}"]
    return float(np.abs(logits - expected).max() / np.ptp(expected))


@pytest.mark.parametrize("kv_type", ["f32", "bf16", "f16", "q8_0"])
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_logits_are_close_to_the_recorded_ones(precision, kv_type, record_property):
    runner = opened(precision, kv_type)
    prompts = [entry["ids"] for entry in load_json("real-models/smollm2-greedy.json")[:4]]
    worst = max(error(evaluate(runner, ids, 0), number) for number, ids in enumerate(prompts))
    record_property("logit error", worst)
    assert worst < LIMIT[precision][kv_type]


def test_clear_greedy_tokens_over_codes_are_the_recorded_ones():
    runner, others = opened("bf16", "q8_0"), 0
    for entry in load_json("real-models/smollm2-greedy.json"):
        logits = evaluate(runner, entry["ids"], 0)
        for at, (token, margin) in enumerate(zip(entry["greedy"], entry["margin"], strict=True)):
            assert logits.argmax() == token or margin < CLEAR
            others += logits.argmax() != token
            logits = evaluate(runner, [token], len(entry["ids"]) + at)
    assert others <= 6
