"""A llama whose keys and values have any type: how close to float32, and the same by every way."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ds4py.config import EngineConfig
from ds4py.contracts import ForwardRequest, OutputKind, SessionId
from ds4py.engine import LocalRunner, open_runner
from ds4py.layers.cpu_steps import CpuLayers
from tests.support.toys import packed, toy_llama
from tests.unit.models.llama_reference import rewritten

TYPES = ("f32", "bf16", "f16", "q8_0")
# By how much of their range a cache moves the logits of any of 60 steps: measured 0, 1.7e-2,
# 1.4e-3, 4.3e-2, as random weights amplify; and what products in bf16 and fixed point move besides.
ROUNDING = {"f32": 2e-5, "bf16": 2.5e-2, "f16": 2.5e-3, "q8_0": 6e-2}
PRODUCTS = 3e-2
TOKENS = tuple(int(t) for t in np.random.default_rng(5).integers(3, 279, 60))


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("toy") / "m.gguf"
    return toy_llama(path, n_layers=2, n_head=2, n_head_kv=1, quant="Q4_1")


@pytest.fixture(scope="module")
def without_fused_steps(tmp_path_factory, toy) -> Path:
    """The same model, except for one matrix that has no fused product."""
    copy = tmp_path_factory.mktemp("toy") / "m.gguf"
    copy.write_bytes(toy.read_bytes())
    values = np.random.default_rng(4).normal(0, 0.06, (64, 128))
    return rewritten(copy, add=[packed("blk.1.ffn_down.weight", values, "F16")])


def opened(path: Path, precision: str, kv_type: str = "auto") -> LocalRunner:
    return open_runner(
        EngineConfig(
            model=path, precision=precision, device="cpu", threads=1, n_slots=3, kv_type=kv_type
        )
    )


def span(session: int, tokens: Sequence[int], pos0: int) -> ForwardRequest:
    return ForwardRequest(
        session=SessionId(session),
        tokens=tuple(tokens),
        pos0=pos0,
        hidden=None,
        output_kind=OutputKind.LOGITS,
    )


def logits(runner: LocalRunner, lengths: Sequence[int], session: int = 1) -> list[np.ndarray]:
    """Evaluate the tokens in spans of some lengths."""
    results, at = [], 0
    for length in lengths:
        (output,) = runner.run([span(session, TOKENS[at : at + length], at)])
        results.append(output.logits)
        at += length
    return results


def distance(got: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    pairs = zip(got, expected, strict=True)
    return max(np.abs(one - two).max() / np.ptp(two) for one, two in pairs)


WAYS = {
    "one prompt": (60,),
    "token by token": (1,) * 60,
    "prompt, tokens, prompt": (20, 1, 1, 1, 7, 1, 1, 20),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kv_type", TYPES)
def test_in_float32_only_the_cache_rounds(toy, kv_type, way):
    exact = logits(opened(toy, "f32"), WAYS[way])
    got = logits(opened(toy, "f32", kv_type), WAYS[way])
    assert distance(got, exact) < ROUNDING[kv_type]
    assert distance(got, exact) > ROUNDING[kv_type] / 20 or kv_type == "f32"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kv_type", TYPES)
@pytest.mark.parametrize("model", ["toy", "without_fused_steps"])
def test_in_bf16_every_type_is_close_to_float32(request, model, kv_type, way):
    path = request.getfixturevalue(model)
    exact = logits(opened(path, "f32"), WAYS[way])
    got = logits(opened(path, "bf16", kv_type), WAYS[way])
    assert distance(got, exact) < PRODUCTS + ROUNDING[kv_type]


@pytest.mark.parametrize("kv_type", TYPES)
def test_fused_steps_read_what_prompts_wrote_and_the_other_way_round(toy, kv_type, monkeypatch):
    steps = []
    run = CpuLayers.run

    def counted(self, hidden, segments):
        steps.append(hidden.shape[0])
        run(self, hidden, segments)

    monkeypatch.setattr(CpuLayers, "run", counted)
    mixed = logits(opened(toy, "bf16", kv_type), (20, *[1] * 20, 20))
    assert steps == [1] * 20
    whole = logits(opened(toy, "bf16", kv_type), (60,))
    assert distance(mixed[-1:], whole) < PRODUCTS + ROUNDING[kv_type]


@pytest.mark.parametrize("kv_type", TYPES)
def test_sessions_in_one_batch_equal_each_alone_bit_by_bit(toy, kv_type):
    together, alone = opened(toy, "bf16", kv_type), opened(toy, "bf16", kv_type)
    for session, length in ((1, 20), (2, 5), (3, 33)):
        together.run([span(session, TOKENS[:length], 0)])
        alone.run([span(session, TOKENS[:length], 0)])
    works = [span(1, TOKENS[20:21], 20), span(2, TOKENS[5:6], 5), span(3, TOKENS[33:34], 33)]
    for work, output in zip(works, together.run(works), strict=True):
        (one,) = alone.run([work])
        assert np.array_equal(output.logits, one.logits)


@pytest.mark.parametrize(("precision", "kv_type"), [("f32", "f32"), ("bf16", "bf16")])
def test_auto_is_the_type_of_the_precision(toy, precision, kv_type):
    for way in WAYS.values():
        own = logits(opened(toy, precision), way)
        named = logits(opened(toy, precision, kv_type), way)
        assert all(np.array_equal(one, two) for one, two in zip(own, named, strict=True))


def test_a_smaller_type_takes_less_of_the_budget(toy):
    used = {}
    for kv_type in TYPES:
        runner = opened(toy, "bf16", kv_type)
        logits(runner, (60,))
        used[kv_type] = runner.kv_use.used
    assert used["f32"] == 2 * used["bf16"] == 2 * used["f16"]
    assert used["q8_0"] == (1 + 4 / 32) / 2 * used["bf16"]


def test_a_cut_timeline_of_codes_continues_as_if_the_rest_had_never_been(toy):
    runner = opened(toy, "bf16", "q8_0")
    logits(runner, (20, 30))
    runner.rewind(SessionId(1), 20)
    (again,) = runner.run([span(1, TOKENS[20:21], 20)])
    assert np.array_equal(again.logits, logits(runner, (20, 1), session=2)[1])
