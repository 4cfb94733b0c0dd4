"""The fused steps against their formulas in float64 and against their references."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import gelu, silu

from ds4py.errors import KernelError
from ds4py.kernels.cpu import attention, fused
from ds4py.kernels.cpu.activations import Quantized
from ds4py.kernels.cpu.attention import AttentionHeads, CachedPosition, HeadWeights
from ds4py.kernels.cpu.fused import FusedNorm
from ds4py.kernels.cpu.jit import F32, LANES, Code, vector
from ds4py.kernels.memory import KernelBuffer
from ds4py.kernels.scores import ScoreRules
from ds4py.layers.attention import attend_one
from ds4py.layers.norm import RmsNorm
from ds4py.layers.rope import Rope, RopeParams
from tests.unit.kernels.packed_matrices import activation_error, buffer

N_CTX = 720
HEADS = (
    AttentionHeads(1, 1, 16, 16),
    AttentionHeads(2, 2, 32, 16),  # half of a head rotated
    AttentionHeads(3, 3, 64, 64),
    AttentionHeads(2, 19, 16, 16),  # more query heads than are mixed at a time
    AttentionHeads(1, 4, 80, 32),
    AttentionHeads(1, 1, 272, 272),  # wider than what is mixed at a time
)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def values_of(rounded: Quantized) -> torch.Tensor:
    """What the integers stand for, float64 `[T, W]`."""
    scales = rounded.scales.double().repeat_interleave(256, 1)[:, : rounded.width]
    return rounded.codes * scales


def assert_rounds(got: Quantized, expected: torch.Tensor) -> None:
    """Within half a step, and what float32 lost before."""
    limit = activation_error(expected) + 2e-6 * expected.double().abs()
    assert ((values_of(got) - expected).abs() <= limit).all()


# --- norm, gate, exponential


@settings(max_examples=25, deadline=None)
@given(
    n_rows=st.integers(1, 3),
    n_groups=st.integers(1, 20),
    size=st.sampled_from([1e-12, 1e-3, 1.0, 1e4]),
    eps=st.sampled_from([1e-6, 1e-5]),
    seed=st.integers(0, 1000),
)
def test_the_norm_is_the_formula(n_rows, n_groups, size, eps, seed):
    x = size * normal(n_rows, 32 * n_groups, seed=seed)
    weight, out = normal(x.shape[1], seed=seed + 1), Quantized(*x.shape)
    FusedNorm(weight, eps)(buffer(x), out)
    exact = x.double()
    mean = exact.square().mean(1, keepdim=True)
    assert_rounds(out, exact / (mean + eps).sqrt() * weight)
    assert_rounds(out, RmsNorm(weight, eps, torch.float32)(x))


def test_the_norm_of_zeros_is_zero():
    out = Quantized(2, 64)
    FusedNorm(torch.ones(64), 1e-5)(buffer(torch.zeros(2, 64)), out)
    assert not values_of(out).any()


@settings(max_examples=25, deadline=None)
@given(
    n_rows=st.integers(1, 3),
    n_groups=st.integers(1, 20),
    size=st.sampled_from([1e-6, 1.0, 30.0, 1e3]),
    seed=st.integers(0, 1000),
)
def test_the_gate_is_the_formula(n_rows, n_groups, size, seed):
    width = 32 * n_groups
    gate_up = size * normal(n_rows, 2 * width, seed=seed)
    out = Quantized(n_rows, width)
    fused.gate(buffer(gate_up), out)
    gate, up = gate_up.double().chunk(2, 1)
    assert_rounds(out, silu(gate) * up)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 17, 63])
def test_what_is_no_number_stays_none(bad, place):
    x, out = normal(2, 64), Quantized(2, 64)
    x[1, place] = bad
    FusedNorm(torch.ones(64), 1e-5)(buffer(x), out)
    assert values_of(out)[1].isnan().any()
    assert_rounds_first(out, RmsNorm(torch.ones(64), 1e-5, torch.float32)(x))
    gated = Quantized(2, 32)
    fused.gate(buffer(x), gated)
    assert not values_of(gated)[1].isfinite().all()
    assert_rounds_first(gated, silu(x[:, :32]) * x[:, 32:])


def assert_rounds_first(got: Quantized, expected: torch.Tensor) -> None:
    error = (values_of(got)[:1] - expected[:1]).abs()
    assert (error <= activation_error(expected[:1]) + 2e-6 * expected[:1].abs()).all()


def exponentials(x: np.ndarray) -> np.ndarray:
    k = Code("exponentials", ("x", "out", "n"))
    with k.loop(0, k.integer("n"), LANES) as i:
        part = k.load(vector(F32, LANES), k.at(k.pointer("x"), i, 4))
        k.store(fused.exponential(k, part), k.at(k.pointer("out"), i, 4))
    source, out = torch.from_numpy(x), torch.empty(x.size)
    k.compiled()(source.data_ptr(), out.data_ptr(), x.size)
    return out.numpy()


def test_the_exponential_is_as_exact_as_it_says():
    ln2 = math.log(2)
    near = [n * ln2 / 2 + d for n in range(-250, 253) for d in (-1e-5, 0.0, 1e-5)]
    x = np.concatenate([np.linspace(-87, 88, 1 << 17), near]).astype(np.float32)
    x = np.resize(x[(x >= -87) & (x <= 88)], 1 << 17)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(exponentials(x) / exact - 1).max() < 2e-7


def test_the_exponential_ends_near_zero_and_near_the_largest_number():
    x = np.array([0.0, -87.1, -1e4, -math.inf, 88.1, 1e4, math.inf, math.nan] * 2, np.float32)
    got = exponentials(x)[:8]
    assert got[0] == 1
    assert (got[1:4] < 2e-38).all()
    assert (got[4:7] > 1e38).all()
    assert np.isfinite(got[:7]).all()
    assert np.isnan(got[7])


# --- attention


def rope_of(heads: AttentionHeads) -> Rope:
    params = RopeParams(n_dims=heads.n_rotated, base=10000.0)
    return Rope(params, N_CTX, torch.device("cpu"))


def cache_of(heads: AttentionHeads, position: int) -> torch.Tensor:
    """Rows from the position on hold what memory held: here the worst."""
    kv = torch.full((2 * heads.n_groups, N_CTX, heads.width), math.nan, dtype=torch.bfloat16)
    kv[:, :position] = normal(2 * heads.n_groups, position, heads.width, seed=position)
    return kv


def token(heads: AttentionHeads, seed: int = 0) -> torch.Tensor:
    """Queries, keys, values of one token, flat."""
    rows = heads.n_groups * (heads.per_group + 2)
    return normal(rows * heads.width, seed=seed)


def attended(
    heads: AttentionHeads, qkv: torch.Tensor, kv: torch.Tensor, position: int
) -> torch.Tensor:
    out = torch.full((1, heads.n_queries), math.nan)
    place = CachedPosition(buffer(kv), None, position, buffer(rope_of(heads).at(position, 1)))
    attention.attend(heads, buffer(qkv.clone().unsqueeze(0)), 0, place, buffer(out))
    return out[0]


def reference(
    heads: AttentionHeads, qkv: torch.Tensor, kv: torch.Tensor, position: int
) -> torch.Tensor:
    """The same by `Rope` and `attend_one`, with a float32 copy of the cache: `[H * D]`."""
    rope, rows = rope_of(heads), qkv.clone().view(1, -1, heads.width)
    n_queries = heads.n_groups * heads.per_group
    rope.rotate_(rows[:, : n_queries + heads.n_groups], rope.at(position, 1))
    kv[:, position] = rows[0, n_queries:]
    q = rows[:, :n_queries].reshape(heads.n_groups, heads.per_group, heads.width)
    return attend_one(q, kv.float(), position + 1)[0]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("position", [0, 1, 14, 15, 16, 17, 100, 700, N_CTX - 1])
def test_attention_equals_its_reference(heads, position):
    qkv, kv = token(heads, position), cache_of(heads, position)
    expected_kv = kv.clone()
    expected = reference(heads, qkv, expected_kv, position)
    got = attended(heads, qkv, kv, position)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)
    # the token's own rows: a product and a sum may be rounded once or twice before bfloat16
    own, own_expected = kv[:, position], expected_kv[:, position]
    torch.testing.assert_close(own, own_expected, rtol=2**-7, atol=0)
    assert (own != own_expected).sum() <= own.numel() / 1000
    unrotated = own[: heads.n_groups, heads.n_rotated :]
    assert torch.equal(unrotated, own_expected[: heads.n_groups, heads.n_rotated :])
    assert torch.equal(own[heads.n_groups :], own_expected[heads.n_groups :])
    # and no other row was touched
    kv[:, position] = expected_kv[:, position] = 0
    torch.testing.assert_close(kv, expected_kv, rtol=0, atol=0, equal_nan=True)


RULED = {
    "normed": AttentionHeads(2, 2, 32, 16, norm_eps=1e-5),
    "scaled": AttentionHeads(2, 2, 32, 16, scale=0.3),
    "window": AttentionHeads(2, 2, 32, 16, window=20),
    "window of one": AttentionHeads(1, 3, 16, 0, window=1),
    "capped": AttentionHeads(2, 2, 32, 16, soft_cap=1.5),
    "sinks": AttentionHeads(2, 3, 32, 16, sinks=True),
    "all": AttentionHeads(
        3, 2, 48, 32, norm_eps=1e-6, scale=0.2, window=33, soft_cap=3.0, sinks=True
    ),
}


@pytest.mark.parametrize("position", [0, 1, 15, 16, 19, 20, 21, 32, 33, 40, 100])
@pytest.mark.parametrize("rule", RULED)
def test_rules_of_an_attention_equal_torchs(rule, position):
    heads, qkv = RULED[rule], token(RULED[rule], position)
    n_heads, width = heads.n_groups * heads.per_group, heads.width
    q_norm, k_norm, sinks = normal(width, seed=7), normal(width, seed=8), normal(n_heads, seed=9)
    kv = cache_of(heads, position).float()
    expected_kv, rows = kv.clone(), qkv.clone().view(1, -1, width)
    if heads.norm_eps is not None:
        for part, weight in ((slice(n_heads), q_norm), (slice(n_heads, -heads.n_groups), k_norm)):
            rows[0, part] = RmsNorm(weight, heads.norm_eps, torch.float32)(rows[0, part])
    rope = rope_of(heads)
    rope.rotate_(rows[:, : n_heads + heads.n_groups], rope.at(position, 1))
    expected_kv[:, position] = rows[0, n_heads:]
    rules = ScoreRules(
        scale=heads.scale, window=heads.window, soft_cap=heads.soft_cap,
        sinks=sinks if heads.sinks else None,
    )  # fmt: skip
    q = rows[:, :n_heads].reshape(heads.n_groups, heads.per_group, width)
    expected = attend_one(q, expected_kv, position + 1, rules)
    out = torch.full((1, heads.n_queries), math.nan)
    place = CachedPosition(buffer(kv), None, position, buffer(rope.at(position, 1)))
    weights = HeadWeights(buffer(q_norm), buffer(k_norm), buffer(sinks))
    attention.attend(heads, buffer(qkv.clone().unsqueeze(0)), 0, place, buffer(out), weights)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=3e-6)
    torch.testing.assert_close(kv, expected_kv, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (HeadWeights(), "norm of queries: got nothing"),
        (HeadWeights(q_norm=buffer(torch.ones(48))), "norm of keys: got nothing"),
        (HeadWeights(buffer(torch.ones(32)), buffer(torch.ones(48))), "norm of queries: got"),
        (HeadWeights(buffer(torch.ones(48)), buffer(torch.ones(48))), "sinks: got nothing"),
    ],
)
def test_missing_weights_of_heads_are_refused_before_memory_is_written(given, message):
    heads, out = RULED["all"], torch.zeros(1, RULED["all"].n_queries)
    kv = cache_of(heads, 5)
    place = CachedPosition(buffer(kv), None, 5, buffer(rope_of(heads).at(5, 1)))
    with pytest.raises(KernelError, match=message):
        attention.attend(heads, buffer(token(heads).unsqueeze(0)), 0, place, buffer(out), given)
    assert not out.any()
    assert kv[:, 5].isnan().all()


@settings(max_examples=25, deadline=None)
@given(
    n_groups=st.integers(1, 20),
    size=st.sampled_from([1e-6, 1.0, 30.0, 1e3]),
    seed=st.integers(0, 1000),
)
def test_the_gate_of_gelu_is_the_formula(n_groups, size, seed):
    gate_up, out = size * normal(2, 64 * n_groups, seed=seed), Quantized(2, 32 * n_groups)
    fused.gate(buffer(gate_up), out, "gelu")
    gate, up = gate_up.double().chunk(2, 1)
    assert_rounds(out, gelu(gate, approximate="tanh") * up)


@settings(max_examples=25, deadline=None)
@given(position=st.integers(0, 700), seed=st.integers(0, 1000))
def test_attention_at_any_position_equals_its_reference(position, seed):
    heads = HEADS[1]
    qkv, kv = token(heads, seed), cache_of(heads, position)
    expected = reference(heads, qkv, kv.clone(), position)
    torch.testing.assert_close(attended(heads, qkv, kv, position), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("size", [0.0, 30.0, 3e3])
def test_scores_of_any_size_have_a_softmax(size):
    """Differences far beyond the range of the exponential; all equal."""
    heads = HEADS[1]
    qkv, kv = token(heads), cache_of(heads, 40)
    qkv[: 4 * 32] *= size
    expected = reference(heads, qkv, kv.clone(), 40)
    torch.testing.assert_close(attended(heads, qkv, kv, 40), expected, rtol=1e-4, atol=1e-5)


def test_threads_change_no_bit_of_attention():
    heads, outs = HEADS[2], []
    for n_threads in (1, 2):
        torch.set_num_threads(n_threads)
        try:
            outs.append(attended(heads, token(heads), cache_of(heads, 50), 50))
        finally:
            torch.set_num_threads(1)
    assert torch.equal(*outs)


@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_a_number_that_is_none_reaches_only_the_heads_that_see_it(place):
    heads = HEADS[1]  # two groups of two heads, 32 wide
    qkv, kv = token(heads), cache_of(heads, 20)
    good = attended(heads, qkv, kv.clone(), 20)
    if place == "query":
        qkv[3] = math.nan
    else:
        kv[0 if place == "key" else heads.n_groups, 7, 3] = math.nan
    got = attended(heads, qkv, kv, 20).view(2, 2, 32)
    hit = {"query": got[0, :1], "key": got[0], "value": got[0, :, 3]}[place]
    assert hit.isnan().all()
    assert torch.equal(got[1], good.view(2, 2, 32)[1])


def test_a_position_behind_the_cache_is_refused_before_memory_is_written():
    heads = HEADS[0]
    rotation = buffer(torch.ones(8, dtype=torch.complex64))
    position = CachedPosition(buffer(cache_of(heads, 0)), None, N_CTX, rotation)
    with pytest.raises(KernelError, match="position in a cache: got 720, expected 0 to 719"):
        attention.attend(
            heads, buffer(token(heads).unsqueeze(0)), 0, position, KernelBuffer.empty((1, 16))
        )


@pytest.mark.parametrize(
    ("width", "n_rotated", "fits"),
    [(64, 64, True), (80, 32, True), (24, 16, False), (32, 8, False)],
)
def test_heads_of_whole_vectors_fit(width, n_rotated, fits):
    assert AttentionHeads(1, 1, width, n_rotated).fits is fits
