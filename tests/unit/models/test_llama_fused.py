"""A llama's fused steps against float32, and sessions that share a batch against each alone."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from ds4py.config import EngineConfig
from ds4py.contracts import ForwardRequest, OutputKind, SessionId
from ds4py.engine import LocalRunner, open_runner
from ds4py.engine.runner import _ForwardJob
from ds4py.gguf.file import GgufFile
from ds4py.kernels.cache import Segment
from ds4py.kernels.cpu.linear import FEW_ROWS
from ds4py.layers.cpu_steps import CpuLayers
from tests.support.toys import packed, toy_llama
from tests.unit.kernels.packed_matrices import matrix
from tests.unit.models.llama_reference import rewritten
from tools.gguf_writer import TensorSource

PROMPTS = ((5, 80, 7, 7, 200, 31, 100), (9,), tuple(range(40, 73)))
NEXT = ((12, 8, 99), (14, 250, 3), (77, 6, 5))
"""Tokens that follow each prompt."""


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def runner_of(path: Path, precision: str = "bf16", n_slots: int = 3) -> LocalRunner:
    config = EngineConfig(model=path, precision=precision, device="cpu", threads=1, n_slots=n_slots)
    return open_runner(config)


def span(session: int, tokens: Sequence[int], pos0: int) -> ForwardRequest:
    return ForwardRequest(
        session=SessionId(session),
        tokens=tuple(tokens),
        pos0=pos0,
        hidden=None,
        output_kind=OutputKind.LOGITS,
    )


def last_row(logits: np.ndarray) -> np.ndarray:
    return logits.reshape(-1, logits.shape[-1])[-1]


def evaluate(runner: LocalRunner, *works: ForwardRequest) -> list[np.ndarray]:
    return [last_row(output.logits) for output in runner.run(list(works))]


def decoded(runner: LocalRunner, session: int, prompt, after) -> list[np.ndarray]:
    """Logits of a prompt, and of the tokens behind it one by one."""
    results = evaluate(runner, span(session, prompt, 0))
    for number, token in enumerate(after):
        results += evaluate(runner, span(session, (token,), len(prompt) + number))
    return results


def decoded_together(runner: LocalRunner) -> list[list[np.ndarray]]:
    """The same of all prompts, their single tokens in common batches."""
    results = [evaluate(runner, span(i, prompt, 0)) for i, prompt in enumerate(PROMPTS)]
    for number in range(3):
        step = [
            span(i, (after[number],), len(prompt) + number)
            for i, (prompt, after) in enumerate(zip(PROMPTS, NEXT, strict=True))
        ]
        for one, logits in zip(results, evaluate(runner, *step), strict=True):
            one.append(logits)
    return results


@pytest.fixture
def fused_steps(monkeypatch) -> list[int]:
    """How many rows each fused step had."""
    steps: list[int] = []
    run = CpuLayers.run

    def counted(self, hidden, segments):
        steps.append(hidden.shape[0])
        run(self, hidden, segments)

    monkeypatch.setattr(CpuLayers, "run", counted)
    return steps


def distance(got: np.ndarray, expected: np.ndarray) -> float:
    return np.abs(got - expected).max() / np.ptp(expected)


ALL_BIASES = {
    "attn_q": 64, "attn_k": 32, "attn_v": 32, "attn_output": 64,
    "ffn_gate": 128, "ffn_up": 128, "ffn_down": 64,
}  # fmt: skip


def with_biases(path: Path, *names: str) -> Path:
    rng = np.random.default_rng(3)
    return rewritten(
        path,
        add=[
            packed(f"blk.{layer}.{name}.bias", rng.normal(0, 1, ALL_BIASES[name]))
            for name in names
            for layer in (0, 1)
        ],
    )


VARIANTS = {
    "tied": lambda path: path,
    "own head": lambda path: toy_llama(path, n_layers=2, quant="Q8_0", tied=False),
    "one group": lambda path: toy_llama(path, n_layers=2, quant="Q5_1", n_head_kv=1),
    "no groups": lambda path: toy_llama(path, n_layers=2, quant="Q5_0", n_head_kv=4),
    "biases": lambda path: with_biases(path, *ALL_BIASES),
    "some biases": lambda path: with_biases(path, "attn_k", "ffn_up"),
    "mixed formats": lambda path: rewritten(
        path,
        add=[
            packed("blk.0.attn_v.weight", np.random.default_rng(4).normal(0, 0.1, (32, 64)), "Q8_0")
        ],
    ),
    "half rotated": lambda path: rewritten(
        toy_llama(path, n_layers=2, quant="Q4_1", n_head=2, n_head_kv=1),
        keys={"llama.rope.dimension_count": 16},
    ),
    "stretched": lambda path: rewritten(
        path,
        keys={
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 64,
        },
    ),
}


@pytest.fixture
def toy(tmp_path) -> Path:
    return toy_llama(tmp_path / "m.gguf", n_layers=2, quant="Q4_1")


@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_steps_are_close_to_float32(toy, variant, fused_steps):
    """Only fixed point and a cache in bfloat16 lie between; random weights amplify."""
    path, (first, *others) = VARIANTS[variant](toy), (*PROMPTS[0], *NEXT[0])
    exact = decoded(runner_of(path, "f32"), 0, (first,), others)
    assert fused_steps == []
    fast = decoded(runner_of(path), 0, (first,), others)
    assert fused_steps == [1] * 10
    assert all(distance(one, two) < 0.012 for one, two in zip(fast, exact, strict=True))


@pytest.mark.parametrize("variant", ["tied", "own head", "biases", "mixed formats"])
def test_sessions_in_one_batch_equal_each_alone_bit_by_bit(toy, variant, fused_steps):
    path = VARIANTS[variant](toy)
    together = decoded_together(runner_of(path))
    assert fused_steps == [1, 3, 3, 3]  # the prompt of one token among them
    alone = runner_of(path)
    for i, results in enumerate(together):
        expected = decoded(alone, i, PROMPTS[i], NEXT[i])
        for got, one in zip(results, expected, strict=True):
            assert np.array_equal(got, one)


def with_scales(path: Path, form: str) -> Path:
    """A llama whose matrices are blocks with scales of their own; `gguf` cannot make these."""
    toy = toy_llama(path, n_layers=2, n_embd=256, n_ff=256, quant="Q8_0")
    with GgufFile.open(toy) as file:
        shapes = {name: info.shape for name, info in file.tensors.items() if len(info.shape) == 2}
    blocks = []
    for number, (name, shape) in enumerate(shapes.items()):
        weights = matrix(form, shape, number, factors=[1e-4, -1e-4])
        dims = tuple(reversed(shape))
        blocks.append(
            TensorSource(name, weights.format.type_id, dims, weights.raw.numpy().tobytes())
        )
    return rewritten(toy, add=blocks)


@pytest.mark.parametrize("form", ["Q4_K", "Q6_K"])
def test_blocks_with_scales_round_otherwise_only_for_a_session_alone(tmp_path, form, fused_steps):
    path = with_scales(tmp_path / "m.gguf", form)
    together, alone = decoded_together(runner_of(path)), runner_of(path)
    exact = decoded_together(runner_of(path, "f32"))
    assert fused_steps == [1, 3, 3, 3]
    for i, results in enumerate(together):
        one_by_one = decoded(alone, i, PROMPTS[i], NEXT[i])
        for got, one, right in zip(results, one_by_one, exact[i], strict=True):
            assert distance(got, right) < 0.012
            assert distance(one, right) < 0.012


@pytest.mark.parametrize("form", ["Q4_K", "Q6_K"])
def test_blocks_with_scales_do_not_see_who_else_is_in_the_batch(tmp_path, form, fused_steps):
    runner = runner_of(with_scales(tmp_path / "m.gguf", form), n_slots=8)
    three = evaluate(runner, *(span(i, (token,), 0) for i, token in enumerate((5, 80, 9))))
    two = evaluate(runner, *(span(3 + i, (token,), 0) for i, token in enumerate((9, 5))))
    assert fused_steps == [3, 2]
    assert np.array_equal(three[2], two[0])
    assert np.array_equal(three[0], two[1])


def test_f32_sessions_in_one_batch_equal_each_alone(toy):
    together, alone = decoded_together(runner_of(toy, "f32")), runner_of(toy, "f32")
    for i, results in enumerate(together):
        for got, one in zip(results, decoded(alone, i, PROMPTS[i], NEXT[i]), strict=True):
            assert distance(got, one) < 1e-5
            assert got.argmax() == one.argmax()


def test_more_sessions_than_rows_are_multiplied_at_once(toy, fused_steps):
    """Layers take any number of rows; the head decodes its weights for so many."""
    n, tokens = FEW_ROWS + 3, [3 * i + 1 for i in range(FEW_ROWS + 3)]
    runner = runner_of(toy, n_slots=n)
    for i in range(n):
        evaluate(runner, span(i, PROMPTS[2][: i + 1], 0))
    fused_steps.clear()
    together = evaluate(runner, *(span(i, (tokens[i],), i + 1) for i in range(n)))
    assert fused_steps == [n]
    for i in range(n):
        alone = evaluate(runner_of(toy), span(0, (*PROMPTS[2][: i + 1], tokens[i]), 0))
        assert distance(together[i], alone[0]) < 0.02


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_prompts_and_single_tokens_alternate_in_one_timeline(toy, precision):
    """Rows that either way cached are what the other way reads."""
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, 279, 60)]
    runner, at, cut = runner_of(toy, precision), 0, []
    for length in (20, 1, 1, 5, 1, 17, 1, 1, 1, 12):
        cut = evaluate(runner, span(1, tokens[at : at + length], at))
        at += length
    whole = evaluate(runner, span(2, tokens, 0))
    assert at == len(tokens)
    assert distance(cut[0], whole[0]) < (2e-5 if precision == "f32" else 0.02)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_prompt_and_single_tokens_can_be_one_batch(toy, precision):
    """The slice takes any segments; projections run over all rows, attention over each."""
    apart, mixed = runner_of(toy, precision), runner_of(toy, precision)
    for runner in (apart, mixed):
        evaluate(runner, span(0, PROMPTS[0], 0))
        evaluate(runner, span(1, PROMPTS[2], 0))
    works = [span(0, (12,), 7), span(2, (1, 2, 3, 4, 5), 0), span(1, (77, 6), 33)]
    expected = [evaluate(apart, work)[0] for work in works]
    jobs = [mixed_job(mixed, work) for work in works]
    with torch.inference_mode():
        hidden = mixed._forward(jobs)
        logits = mixed._open_model().logits(hidden[[0, 5, 7]])
    for got, one in zip(logits, expected, strict=True):
        assert distance(got.numpy(), one) < (1e-5 if precision == "f32" else 0.02)


def mixed_job(runner: LocalRunner, work: ForwardRequest):
    end = work.pos0 + len(work.tokens)
    return _ForwardJob(0, work, runner._caches.begin(work.session, end, reset=work.reset))


@pytest.mark.parametrize("change", ["narrow rotation", "one matrix of F16"])
def test_layers_without_a_fused_step_take_the_plain_one(toy, change, fused_steps):
    if change == "narrow rotation":
        path = rewritten(toy, keys={"llama.rope.dimension_count": 8})
    else:
        values = np.random.default_rng(4).normal(0, 0.1, (64, 128))
        path = rewritten(toy, add=[packed("blk.1.ffn_down.weight", values, "F16")])
    fast = decoded(runner_of(path), 0, PROMPTS[0], NEXT[0])
    exact = decoded(runner_of(path, "f32"), 0, PROMPTS[0], NEXT[0])
    assert fused_steps == []
    assert all(distance(one, two) < 0.02 for one, two in zip(fast, exact, strict=True))


def test_a_fused_step_updates_the_hidden_states_that_it_was_given(toy):
    """As the plain one does."""
    runner = runner_of(toy)
    model, job = runner._open_model(), mixed_job(runner, span(0, (12,), 0))
    segment = Segment(runner._caches.pool.cache(job.cache.slot), 0, 1)
    hidden = model.embed(torch.tensor([12]))
    before = hidden.clone()
    assert model.forward(hidden, torch.tensor([12]), [segment]) is hidden
    assert not torch.equal(hidden, before)
