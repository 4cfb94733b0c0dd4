"""The NumPy DeepSeek V4 that others are tested against: equal to the C engine's recordings.

The formulas meet the vectors of docs/spec/deepseek4-model.md#vectors. The model meets recorded
states, half by half with recorded inputs. Where its float32 arithmetic equals the engine's, a half
is equal bit for bit, and most are. The rest differ because the engine's exp, log, sin and cos are
not correctly rounded; with those of GNU's C library in place (the slow test) everything is equal.
"""

import ctypes

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tests import golden
from tests.golden_compare import (
    VARIANTS,
    ForcedReference,
    Spread,
    errors,
    forced,
    prompts,
    recordings,
    reference_run,
    relative_rms,
    saved_cache,
)
from tests.unit.models import deepseek4_formulas as formulas
from tests.unit.models.deepseek4_reference import Reference

f32 = np.float32
YARN = formulas.Yarn(factor=16, beta_fast=32, beta_slow=1, n_ctx_original=65536)
PLAIN_ROTARY = formulas.Rotary(10000, 64)
LONG_ROTARY = formulas.Rotary(160000, 64, YARN)


def vector(*values: float, width: int = 0) -> np.ndarray:
    """Values, then zeros up to a width."""
    return np.array([*values, *[0] * (width - len(values))], f32)


# --- deepseek4-model.md#vectors -------------------------------------------------------------------


def test_activations_take_an_integer_per_value_and_a_scale_per_block():
    scale, integers = formulas.quantize_q8_0(np.linspace(-1, 1, 32, dtype=f32))
    assert scale[0, 0] == f32(0.007874016)
    half = [4, 12, 20, 29, 37, 45, 53, 61, 70, 78, 86, 94, 102, 111, 119, 127]
    assert integers[0].tolist() == [-x for x in reversed(half)] + half
    assert_array_equal(np.hstack(formulas.quantize_q8_0(np.zeros(64, f32))), 0)


def test_activations_of_k_quants_take_their_scale_from_the_signed_extreme():
    scale, integers = formulas.quantize_q8_k(vector(-2, 1, 0.5, -0.01, width=256))
    assert scale[0, 0] == f32(0.015748031)
    assert integers[0, :5].tolist() == [-127, 64, 32, -1, 0]
    scale, integers = formulas.quantize_q8_k((np.arange(256, dtype=f32) - 100) / 16)
    assert scale[0, 0] == f32(-0.0762795284)
    assert integers[0, :4].tolist() == [82, 81, 80, 79]
    assert integers[0, -3:].tolist() == [-125, -126, -127]
    assert integers.sum() == -5769
    assert_array_equal(np.hstack(formulas.quantize_q8_k(np.zeros(256, f32))), 0)


def test_hyper_connections_collect_and_spread_the_streams():
    mix = vector(1, -1, 0, 2, 0, 1, -2, 3, width=24)
    base = vector(*[0] * 8, 3, 0, 1, 0, 0, 2, 0, 0, 0, 0, 1, -1, 1, 0, 0, 4)
    pre, post, c = formulas.hc_split(mix, np.ones(3, f32), base, 20)
    assert_allclose(pre, [0.7310596, 0.26894245, 0.500001, 0.88079804], rtol=2e-7)
    assert_allclose(post, [1, 1.4621172, 0.23840584, 1.9051483], rtol=2e-7)
    expected = [
        [0.7393328, 0.05070456, 0.18144059, 0.02856101],
        [0.07263842, 0.73931885, 0.13171835, 0.05636032],
        [0.13172174, 0.18144198, 0.6492774, 0.03759879],
        [0.05630608, 0.02853365, 0.03756272, 0.8774789],
    ]
    assert_allclose(c, expected, rtol=1e-6)
    streams = np.arange(8, dtype=f32).reshape(4, 2)
    assert_allclose(formulas.hc_collect(streams, pre), [7.822677, 10.203478], rtol=2e-7)
    assert_allclose(
        formulas.hc_spread(vector(10, 20), streams, post, c).reshape(-1),
        [11.01, 22.009998, 16.996778, 32.61795, 5.469981, 8.854038, 24.579472, 44.630955],
        rtol=2e-7,
    )


@pytest.mark.parametrize(
    ("rotary", "expected"),
    [
        (PLAIN_ROTARY, [-0.8390715, -0.5440211, -0.9376327, 0.3476276]),
        (LONG_ROTARY, [-0.8390715, -0.5440211, -0.5591622, 0.8290583]),
    ],
)
def test_rotation_turns_adjacent_pairs_of_the_tail(rotary, expected):
    head = np.concatenate([np.ones(448, f32), vector(1, 0, 0, 1, width=64)])
    turned = rotary.rotate(head, 10)
    assert_array_equal(turned[:448], 1)
    assert_allclose(turned[448:452], expected, rtol=2e-7)
    assert_allclose(rotary.rotate(turned, 10, sign=-1), head, atol=1e-7)


def test_angles_follow_the_recurrence_and_the_ramp():
    assert_allclose(np.cos(PLAIN_ROTARY.angles(1000)[20]), -0.9997861, rtol=1e-6)
    assert_allclose(np.sin(LONG_ROTARY.angles(1000)[20]), 0.29263183, rtol=1e-6)
    assert_array_equal(
        formulas.cos(PLAIN_ROTARY.angles(12345)[:4]),
        vector(0.111435786, -0.675455451, 0.685314715, -0.97485584),
    )
    assert_array_equal(
        formulas.sin(LONG_ROTARY.angles(12345)[:4]),
        vector(-0.993771613, 0.506316423, 0.489634007, -0.644808412),
    )
    ramp = YARN.ramp(160000, 64)
    assert_allclose(
        ramp[14:27], [1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0, 0], atol=1e-6
    )


def test_rows_are_rounded_to_fp8_but_for_the_rotated_tail():
    row = vector(0.1, -0.2, 0.3, 1, -3.7, 0.013, 5.5, -0.0009, width=64)
    tail = vector(0.1, 1 / 3)
    rounded = formulas.round_kv(np.concatenate([row, tail]), 2)
    expected = [0.1015625, -0.203125, 0.3125, 1, -3.75, 0.0126953125, 5.5, -9.15527344e-4]
    assert_array_equal(rounded[:8], vector(*expected))
    assert_array_equal(rounded[-2:], tail)
    assert_allclose(formulas.half(tail), [0.09997559, 0.33325195], rtol=1e-7)
    tiny = formulas.round_kv(vector(1e-6, 2e-6, -3e-6, 5e-5, width=64), 0)
    assert_array_equal(tiny[:4], vector(9.5367432e-7, 1.9073486e-6, -3.0994415e-6, 4.9591064e-5))
    assert_array_equal(formulas.half(tiny), tiny)
    exact = vector(448, 2**-9, width=64)  # a scale of one, although it is a power of two itself
    assert_array_equal(formulas.round_kv(exact, 0), exact)


def test_ties_of_small_formats_go_to_the_even_code():
    values = [0.5, 0.53125, 0.5625, 0.59375, 2**-10, 1.5 * 2**-9, 2.5 * 2**-9, 447, 448, 448]
    expected = [0.5, 0.5, 0.5625, 0.625, 0, 2**-8, 2**-8, 448, 448, 448]
    assert_array_equal(formulas.nearest(vector(*values), formulas.E4M3), expected)
    values = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.01, 7, -2.5]
    expected = [0, 1, 1, 2, 2, 4, 4, 6, 6, -2]
    assert_array_equal(formulas.nearest(vector(*values), formulas.E2M1), expected)


def test_index_vectors_are_spread_and_rounded_to_fp4():
    rounded = formulas.round_index(vector(1, 2, width=128))
    assert_array_equal(rounded, np.tile(vector(0.25, -0.09375), 64))
    rounded = formulas.round_index(vector(1, 0.5, -0.25, width=128))
    assert_array_equal(rounded, np.tile(vector(0.125, 0.015625, 0.125, 0.0625), 32))
    rounded = formulas.round_index(np.arange(128, dtype=f32) % 7 - 3)
    assert rounded[:10].tolist() == [-0.5, 0, 0.5, -0.5, -1, -0.5, -2, 0.5, 0, 0.5]
    assert (rounded.sum(), np.square(rounded).sum()) == (-31, 507)


@pytest.mark.parametrize(
    ("ratio", "n_tokens", "rows"),
    [
        (4, 8, [[1.25, 1.3232422], [1.4130859, 0.11920166]]),
        (128, 256, [[1.0419922, 1.9121094], [0.98583984, 2.0292969]]),
    ],
)
def test_windows_are_pooled_per_channel(ratio, n_tokens, rows):
    pool = formulas.Pool(ratio)
    channels = np.arange(4 if ratio == 4 else 2)
    pooled = []
    for token in range(n_tokens):
        x = (((5 * token + 3 * channels) % 11 - 5) / 2).astype(f32)
        ape = (((3 * (token % ratio) + 5 * channels) % 7 - 3) / 4).astype(f32)
        row = pool.feed(x, f32(0.5) * x + ape)
        if row is not None:
            pooled.append(formulas.half(formulas.rms_norm(row, vector(1, 2))))
    assert_array_equal(pooled, np.array(rows, f32))


def test_a_sink_takes_weight_and_gives_nothing():
    rows = np.array([[1, 0], [0, 1], [1, 1]], f32)
    out = formulas.attend(vector(2, -1)[None], rows, vector(0.5))
    assert_allclose(out, [[0.74142825, 0.30437479]], rtol=2e-7)


def test_experts_are_chosen_with_bias_and_weighed_without():
    probs = formulas.router_probs(vector(2, -1, 0.5, 3, -30, 25, 0, 1))
    expected = [1.4583992, 0.55969787, 0.98695338, 1.7460204, 3.0590232e-7, 5, 0.83255464]
    assert_allclose(probs, [*expected, 1.1459763], rtol=2e-7)
    chosen = formulas.largest(probs + vector(0, 1.2, 0, -0.5, 0, -4, 0.5, 0), 3)
    assert chosen.tolist() == [1, 0, 6]
    weights = formulas.expert_weights(probs[chosen], 1.5)
    assert_allclose(weights, [0.2945105, 0.76740307, 0.4380865], rtol=2e-7)
    assert formulas.largest(vector(1, 3, 3, 2, 3), 3).tolist() == [1, 2, 4]


def test_swiglu_limits_the_gate_from_above_and_up_from_both_sides():
    result = formulas.swiglu(vector(1, 12, -12, -3), vector(2, -11, 11, 0.5), 10)
    assert_allclose(result, [1.4621172, -99.995461, -7.3730084e-4, -0.071138814], rtol=3e-7)


# --- the model ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def models():
    return {name: Reference(golden.path(f"tiny-{name}.gguf")) for name in VARIANTS}


def test_every_half_of_every_layer_is_the_recorded_one(models, variant):
    found = [
        errors(forced(ForcedReference(models[variant]), recording), recording)
        for recording in recordings(variant).values()
    ]
    for parts in ([e.attention for e in found], [e.feed_forward for e in found]):
        spread = Spread.of(parts)
        assert spread.median == 0, "most are equal bit for bit"
        assert spread.p99 < 5e-3
        assert spread.largest < 1e-2


def test_the_rounding_of_activations_matters(variant):
    model = Reference(golden.path(f"tiny-{variant}.gguf"), act_quant=False)
    recording = recordings(variant)["len5"]
    found = errors(forced(ForcedReference(model), recording), recording)
    assert Spread.of([found.attention]).median > 1e-4
    assert Spread.of([found.feed_forward]).median > 1e-3


def test_the_logits_of_a_free_run_are_as_near_as_the_engine_is_to_itself(models, variant):
    model, prompt = models[variant], prompts(variant)["len17"]
    model.reset()
    logits = [model.step(token) for token in prompt.tokens][-1]
    assert np.sqrt(np.square(logits - prompt.logits).mean()) < 1.25 * prompt.noise_rms
    assert logits.argmax() == prompt.greedy[0]


def test_a_half_at_another_position_than_the_next_is_refused(models):
    model = models["a"]
    model.reset()
    with pytest.raises(AssertionError, match="layer 2 has seen 0 tokens"):
        model.attention_half(2, model.embed(0), 1)


INTEGERS = {"counts", "index_allowed", "experts"}
FROM_CACHES = {
    *("comp_row", "index_row", "index_scores"),
    *("heads", "attn_low", "attn_out", "after_attn_hc"),
}


def traced(model: Reference, trace: dict, inputs: np.ndarray | None, n_tokens: int):
    """Run a prompt; yield position index, layer and intermediates where the engine's are recorded.

    Recorded positions take recorded inputs. The others take `inputs` [L, T, W], or the model's own.
    """
    positions = trace["positions"].tolist()
    model.reset()
    for position, token in enumerate(trace["prompt"][:n_tokens].tolist()):
        row = positions.index(position) if position in positions else None
        streams = model.embed(token)
        for layer in range(model.n_layers):
            if row is not None:
                streams = trace["in_hc"][row, layer].reshape(streams.shape)
            elif inputs is not None:
                streams = inputs[layer, position].reshape(streams.shape)
            first = model.attention_half(layer, streams, position)
            streams = first["after_attn_hc"]
            if row is not None:
                streams = trace["after_attn_hc"][row, layer].reshape(streams.shape)
            second = model.feed_forward_half(layer, streams, token)
            streams = second["out_hc"]
            if row is not None:
                yield row, layer, first | second


def assert_equals_trace(name: str, got: np.ndarray | None, expected: np.ndarray, limit: float):
    """Recorded values after the last one that exists are NaN, or -1 for integers."""
    got = np.zeros(0) if got is None else np.ravel(got)
    expected, rest = np.split(expected, [got.size])
    assert np.isnan(rest).all() if rest.dtype.kind == "f" else (rest == -1).all(), name
    if name in INTEGERS:
        assert_array_equal(got, expected, name)
    elif got.size:
        assert relative_rms(got, expected) < limit, name


@pytest.mark.parametrize(
    ("variant", "prompt", "n_tokens", "cache_limit"),
    [
        (
            "a",
            "len40",
            40,
            1e-2,
        ),  # recorded inputs at every position: only a rounding step can show
        ("b", "len40", 40, 0.1),  # the caches are of the reference's own run, and as far away as
        ("a", "len300", 129, 0.1),  # two runs of the engine are; 127 completes a window of 128
    ],
)
def test_every_intermediate_value_is_the_recorded_one(
    models, variant, prompt, n_tokens, cache_limit
):
    trace = golden.load_npz(f"trace_{variant}_{prompt}.npz")
    recording = recordings(variant).get(prompt)
    names = {name for name, values in trace.items() if values.ndim >= 3}
    inputs = None if recording is None else recording.before
    for row, layer, got in traced(models[variant], trace, inputs, n_tokens):
        for name in names:
            limit = cache_limit if name in FROM_CACHES else 1e-6
            assert_equals_trace(name, got.get(name), trace[name][row, layer], limit)
        assert set(got) <= names


def test_the_head_is_the_recorded_one(models, variant):
    trace = golden.load_npz(f"trace_{variant}_len40.npz")
    for row, streams in enumerate(trace["out_hc"][:, -1]):
        got = models[variant].head(streams.reshape(4, -1))
        for name, values in got.items():
            assert_equals_trace(name, values, trace[name][row], 1e-6)


def test_caches_are_the_ones_that_the_engine_saved(models):
    model = models["a"]
    forced(ForcedReference(model), recordings("a")["len40"])
    saved = saved_cache("session_a_len40.dsv4")

    def check(got: list[np.ndarray], n_saved: int) -> None:
        """Compare the leading rows of the next saved array, which has `n_saved`."""
        nonlocal saved
        rows, width = np.stack(got), got[0].size
        expected, saved = np.split(saved, [n_saved * width])
        assert_allclose(rows, expected.reshape(n_saved, width)[: len(rows)], rtol=1e-3, atol=1e-6)

    for cache in model.caches:
        check(cache.raw[-model.window :], model.window)
        for pool in filter(None, (cache.compressed, cache.index)):
            if pool.rows:
                check(pool.rows, len(pool.rows))
            n_slots, n_pending = (8, 4) if pool.ratio == 4 else (128, 40)
            check(pool.kv[-n_pending:], n_slots)
            check(pool.scores[-n_pending:], n_slots)
    assert saved.size == 0


def gnu_function(name: str):
    """A float32 function of the C library that the recordings were made with."""
    function = getattr(ctypes.CDLL("libm.so.6"), name)
    function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float]

    def of_array(x):
        x = np.asarray(x, f32)
        return np.fromiter(map(function, x.ravel().tolist()), f32, x.size).reshape(x.shape)

    return of_array


@pytest.mark.slow
def test_with_the_c_library_of_the_recordings_every_bit_is_equal(models, variant, monkeypatch):
    """Seen with GNU's C library 2.36 on x86-64; other versions may round elsewhere."""
    for name in ("exp", "log1p", "sin", "cos"):
        monkeypatch.setattr(formulas, name, gnu_function(f"{name}f"))
    model = models[variant]
    for name, recording in recordings(variant).items():
        run = reference_run(model, recording.tokens)
        assert_array_equal(run.between, recording.between, name)
        assert_array_equal(run.after, recording.after, name)
    for name, prompt in prompts(variant).items():
        model.reset()
        logits = [model.step(token) for token in prompt.tokens][-1]
        assert_array_equal(logits, prompt.logits, name)
