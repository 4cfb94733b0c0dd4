"""DeepSeek V4 against the recordings of ds4's C engine, and against the NumPy reference.

The engine rounds activations, cache rows and index vectors, so that the last bit of a float32 sum
now and then moves a value by a whole rounding step, and an expert or an index row near its
threshold is chosen differently. Hence two kinds of tolerance:

- Half by half, with recorded inputs: the median of the relative RMS stays at float32 noise (a wrong
  formula shows there), 99 % within a rounding step or two. Measured: 1e-7, 8e-4, 9e-4 at most.
- End to end: as near as the engine's disturbed runs are to each other, and a quarter more, because
  ours is one run more. Measured: 1.01 times `noise_rms` at most; the engine's other build has 1.00.

End to end proves little: the noise hides small errors. Without rounding of activations, with
bfloat16, even with the mixing matrices of the streams transposed, logits of this model stay about
as near (1.06, 1.10, and inside the limit for many prompts). It catches what halves cannot show:
parts in the wrong order, the embedding, the head, and gross errors.

`./tools/compare_golden` prints the figures.
"""

import numpy as np
import pytest
import torch

from tests.support import golden
from tests.support.golden_compare import (
    N_GREEDY,
    VARIANTS,
    Errors,
    Prompt,
    Spread,
    TinyModel,
    errors,
    forced,
    prompts,
    recordings,
    reference_run,
    saved_cache,
)
from tests.unit.models.deepseek4_reference import Reference

MEDIAN, P99, LARGEST = 1e-6, 5e-3, 1e-2
WITHIN_NOISE = 1.25
NEAR_TIE = 3.0
"""Times the usual noise of a logit: two logits that are nearer to each other may change places."""

CHUNKS = (1, 3, 7, 16, 64, None)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def models():
    return {variant: TinyModel(variant) for variant in VARIANTS}


@pytest.fixture(scope="module")
def long_run():
    """The reference's own run over 130 tokens: 32 rows of ratio 4, one of 128, a full window."""
    reference = Reference(golden.path("tiny-b.gguf"))
    return reference_run(reference, prompts("b")["len130"].tokens)


def assert_near(found: list[Errors], outliers: int = 0) -> None:
    """Check both halves: the median of every layer, and the ends of the distribution."""
    for parts in ([e.attention for e in found], [e.feed_forward for e in found]):
        by_layer = np.concatenate(parts, axis=1)
        assert np.median(by_layer, axis=1).max() < MEDIAN
        assert Spread.of(parts).p99 < P99
        assert (by_layer > LARGEST).sum() <= outliers


def assert_within_noise(logits: np.ndarray, expected: np.ndarray, prompt: Prompt) -> None:
    error = np.sqrt(np.square(logits - expected).mean())
    assert error < WITHIN_NOISE * prompt.noise_rms, prompt.name


@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_every_half_of_every_layer_is_the_engines(models, variant, chunk):
    found = [
        errors(forced(models[variant].session(chunk), recording), recording)
        for recording in recordings(variant).values()
    ]
    assert_near(found)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_half_is_the_references_at_every_position_and_in_chunks_of_any_size(
    models, long_run, chunk
):
    """Two outliers are allowed: an index row near its threshold changes what a token attends to.

    Here there are none; the longest prompt has one, whose scores differ by a step of FP4.
    """
    found = errors(forced(models["b"].session(chunk), long_run), long_run)
    assert_near([found], outliers=2)


def test_without_rounding_of_activations_every_half_is_the_references(variant):
    reference = Reference(golden.path(f"tiny-{variant}.gguf"), act_quant=False)
    run = reference_run(reference, prompts(variant)["len40"].tokens)
    model = TinyModel(variant, act_quant="none")
    assert_near([errors(forced(model.session(), run), run)])


def test_logits_after_a_prompt_are_within_the_engines_own_spread(models, variant):
    for prompt in prompts(variant).values():
        logits = models[variant].session().feed(prompt.tokens)
        assert_within_noise(logits, prompt.logits, prompt)


def n_certain(prompt: Prompt) -> int:
    """Return how many greedy tokens must be equal.

    All of `stable_steps`, on which the engine's disturbed runs agree, but not from the first near
    tie on: after one other token everything may differ.
    """
    near = np.flatnonzero(prompt.gaps < NEAR_TIE * prompt.usual_noise_rms)
    return min(prompt.stable_steps, *near.tolist(), N_GREEDY)


def test_greedy_tokens_are_the_engines_until_the_first_near_tie(models, variant):
    """All prompts continue in one batch, so sessions of many lengths do not disturb each other."""
    model, recorded = models[variant], list(prompts(variant).values())
    sessions = [model.session() for _ in recorded]
    logits = np.stack([s.feed(p.tokens) for s, p in zip(sessions, recorded, strict=True)])
    chosen = model.greedy(sessions, logits, N_GREEDY)
    for prompt, tokens in zip(recorded, chosen.tolist(), strict=True):
        certain = n_certain(prompt)
        assert tokens[:certain] == prompt.greedy[:certain], prompt.name
    assert sum(map(n_certain, recorded)) > 0.5 * N_GREEDY * len(recorded), "most steps are certain"


@pytest.mark.parametrize("chunk", CHUNKS[:-1])
def test_logits_do_not_depend_on_how_a_prompt_is_chunked(models, chunk):
    """The engine's do not at all; ours may as far as sums in another order move roundings."""
    prompt = prompts("a")["len128"]
    logits = models["a"].session(chunk).feed(prompt.tokens)
    assert_within_noise(logits, models["a"].session().feed(prompt.tokens), prompt)
    assert logits.argmax() == prompt.greedy[0]


def test_caches_are_the_ones_that_the_engine_saved(models):
    session = models["a"].session()
    forced(session, recordings("a")["len40"])
    exported = models["a"].slice.export_cache(session.cache, 40)
    got = np.concatenate([part.numpy().reshape(-1) for part in exported])
    saved = saved_cache("session_a_len40.dsv4")
    assert got.shape == saved.shape
    assert np.isclose(got, saved, rtol=1e-5, atol=1e-5).mean() > 0.999


@pytest.mark.parametrize("name", ["len40", "len130"])
def test_a_session_that_the_engine_saved_goes_on_as_the_engine_did(models, name):
    model, prompt = models["a"], prompts("a")[name]
    session = model.session()
    length = session.length = len(prompt.tokens)
    shapes = [part.shape for part in model.slice.export_cache(session.cache, length)]
    values = torch.tensor(saved_cache(f"session_a_{name}.dsv4"))
    parts = values.split([shape.numel() for shape in shapes])
    saved = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    model.slice.import_cache(session.cache, length, saved)
    expected = golden.load_npz("logits_a.npz")[f"{name}_decode"]
    for token, logits in zip(prompt.greedy[:4], expected, strict=False):
        assert_within_noise(session.feed([token]), logits, prompt)
