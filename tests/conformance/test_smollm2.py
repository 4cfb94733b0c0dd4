"""SmolLM2-135M against recorded logits and greedy tokens of an independent float32 run.

Tolerances, relative to the range of a prompt's logits (about 35):

- f32: 1e-5. Measured 1.2e-6; both sides round float32 sums in their own order. Greedy tokens are
  compared up to the first step whose recorded margin is below 2e-3, which no step is.
- bf16: 2e-2. Measured 1.4e-2 at most, 0.7e-2 on average: scales, activations and logits have 8
  bits of mantissa. Greedy tokens are compared up to the first margin below 0.5.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from ds4py.config import EngineConfig
from ds4py.contracts import ForwardOutput, ForwardRequest, OutputKind, SessionId
from ds4py.engine import LocalRunner, open_runner
from ds4py.layer_range import LayerSpec
from tests.support.golden import load_json, load_npz
from tests.support.models import smollm2_path

SESSION = SessionId(1)
LOGIT_TOLERANCE = {"f32": 1e-5, "bf16": 2e-2}
MARGIN_TOLERANCE = {"f32": 2e-3, "bf16": 0.5}
PROMPTS = range(8)


def opened(precision: str, layers: str | None = None) -> LocalRunner:
    config = EngineConfig(
        model=smollm2_path(), device="cpu", precision=precision, threads=1, n_slots=1, n_ctx=1024
    )
    return open_runner(config, LayerSpec.parse(layers) if layers else None)


@pytest.fixture(scope="module", params=["f32", "bf16"])
def whole(request):
    runner = opened(request.param)
    yield request.param, runner
    runner.close()


def span(
    stages: Sequence[LocalRunner],
    tokens: Sequence[int],
    pos0: int,
    want: OutputKind = OutputKind.LOGITS,
) -> np.ndarray | None:
    """Run a span through a chain of stages at 32 bits."""
    hidden = None
    for stage in stages:
        work = ForwardRequest(
            session=SESSION,
            tokens=tuple(tokens),
            pos0=pos0,
            hidden=hidden,
            reset=pos0 == 0,
            output_kind=want if stage is stages[-1] else OutputKind.HIDDEN,
        )
        (answer,) = stage.run([work])
        assert isinstance(answer, ForwardOutput), answer
        hidden = answer.hidden
    return answer.logits


def golden(number: int) -> tuple[list[int], list[int], list[float], np.ndarray]:
    entry = load_json("real-models/smollm2-greedy.json")[number]
    logits = load_npz("real-models/smollm2_logits.npz")[f"logits_{number}"]
    return entry["ids"], entry["greedy"], entry["margin"], logits


@pytest.mark.parametrize("number", PROMPTS)
def test_logits_and_greedy_tokens_equal_the_recorded_ones(whole, number):
    precision, runner = whole
    ids, greedy, margins, expected = golden(number)
    logits = span([runner], ids, 0)
    assert np.abs(logits - expected).max() < LOGIT_TOLERANCE[precision] * np.ptp(expected)
    for step, (token, margin) in enumerate(zip(greedy, margins, strict=True)):
        if margin < MARGIN_TOLERANCE[precision]:
            assert precision == "bf16", "every margin is clear in f32"
            break
        assert logits.argmax() == token, f"step {step}"
        logits = span([runner], [token], len(ids) + step)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_way_a_prompt_is_chunked_changes_only_float_noise(whole, chunk):
    precision, runner = whole
    ids = golden(7)[0][:96]
    at_once = span([runner], ids, 0)
    for start in range(0, len(ids), chunk):
        logits = span([runner], ids[start : start + chunk], start)
    assert np.abs(logits - at_once).max() < LOGIT_TOLERANCE[precision] * np.ptp(at_once)


@pytest.mark.parametrize("cuts", [("0:14", "15-29"), ("0:0", "1:28", "29:output")])
def test_any_cut_of_the_layers_gives_the_same_bits(whole, cuts):
    precision, runner = whole
    stages = [opened(precision, cut) for cut in cuts]
    ids, greedy, _, _ = golden(4)
    at = 0
    for tokens in (ids[:5], ids[5:], *[[token] for token in greedy[:8]], ids * 4):
        assert np.array_equal(span(stages, tokens, at), span([runner], tokens, at))
        at += len(tokens)


MEASURE = """
import json, sys, psutil
from pathlib import Path
from ds4py.config import EngineConfig
from ds4py.engine import open_runner
from ds4py.layer_range import LayerSpec

process = psutil.Process()
config = EngineConfig(model=Path(sys.argv[1]), precision="bf16", device="cpu", threads=1, n_slots=4)
before = process.memory_info().rss
runner = open_runner(config, LayerSpec.parse("12:12"))
print(json.dumps([process.memory_info().rss - before, runner.weight_bytes]))
"""


def test_resident_memory_follows_the_slice_and_not_the_file(tmp_path):
    """One layer has 2 MB of 98; what else grows is the first use of torch and of LLVM.

    The first process compiles each kernel that it compares with torch, which takes 20 MB.
    """
    command = [sys.executable, "-c", MEASURE, str(smollm2_path())]
    own = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    for limit in (110e6, 80e6):
        done = subprocess.run(command, capture_output=True, timeout=120, check=True, env=own)
        grown, weights = json.loads(done.stdout)
        assert weights == 2_216_448
        assert grown < limit
