"""Caches of every type: what torch writes and reads, and that kernels do the same."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4py.kernels.cache import block_size
from ds4py.kernels.cpu import attention
from ds4py.kernels.cpu.attention import AttentionHeads
from ds4py.kernels.cpu.cache_rows import PARAMS, cache_rows, from_halves, to_halves
from ds4py.kernels.cpu.jit import F32, I16, LANES, Code, vector
from ds4py.layers.attention import attend_many, attend_one
from ds4py.layers.compare import position_in
from ds4py.layers.kv_cache import KvForm, KvRows
from tests.unit.kernels.packed_matrices import buffer, for_processor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}
WIDTHS = (16, 64, 80)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(params=["this processor", "generic"])
def processor(request, monkeypatch):
    """Kernels for the real processor, then for the least that its family has."""
    if request.param == "generic":
        for_processor(monkeypatch, "generic")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_outliers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Rows of all sizes, and in some channels values that are far larger, as keys have."""
    sizes = np.random.default_rng(seed).integers(-3, 1, (*shape[:-1], 1))
    x = normal(*shape, seed=seed) * torch.from_numpy(10.0**sizes).float()
    x[..., shape[-1] // 2] *= 50
    x[..., -1] *= 1000
    return x


def empty(shape: tuple[int, int, int], dtype: torch.dtype) -> KvRows:
    """Memory holds whatever it held: here the worst, where a type has it."""
    tensors = [torch.empty(p.shape, dtype=p.dtype) for p in KvForm(shape, dtype).tensors()]
    for tensor in tensors:
        tensor.fill_(math.nan if tensor.dtype.is_floating_point else -77)
    return KvRows(*tensors)


def written(x: torch.Tensor, dtype: torch.dtype) -> KvRows:
    rows = empty(tuple(x.shape), dtype)
    rows.write(0, x)
    return rows


def half_steps(x: torch.Tensor) -> torch.Tensor:
    """Half a 127th of the largest of every block, for each value."""
    blocks = x.double().unflatten(2, (-1, block_size(x.shape[2])))
    return (blocks.abs().amax(3, keepdim=True) / 254).expand_as(blocks).flatten(2)


# --- torch


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("make", [normal, with_outliers])
def test_floats_are_only_rounded(dtype, make):
    x = make(4, 30, 64)
    got = written(x, dtype).read(30, torch.float32)
    assert ((got - x).abs() <= ROUNDING[dtype] * x.abs() + 1e-7).all()


@pytest.mark.parametrize("width", [2, 20, *WIDTHS])
@pytest.mark.parametrize("make", [normal, with_outliers])
def test_codes_are_off_by_half_a_step_of_their_block(width, make):
    x = make(4, 30, width)
    got = written(x, torch.int8).read(30, torch.float32).double()
    assert ((got - x).abs() <= half_steps(x) * (1 + 1e-4)).all()


def test_blocks_are_as_wide_as_they_can_be():
    assert [block_size(width) for width in (2, 16, 20, 64, 80, 96, 128)] == [
        *(2, 16, 4, 32, 16, 32, 32)
    ]


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    spans=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
def test_a_row_depends_on_nothing_else_and_touches_nothing_else(dtype, spans, seed):
    """Rows that come in parts are those that come at once; behind them nothing changes."""
    n = sum(spans)
    x, parts = with_outliers(4, n, 32, seed=seed), empty((4, n + 3, 32), dtype)
    tensors = [part for part in (parts.values, parts.scales) if part is not None]
    behind, at = [part[:, n:].clone() for part in tensors], 0
    for length in spans:
        parts.write(at, x[:, at : at + length])
        at += length
    expected = written(x, dtype).read(n, torch.float32)
    assert torch.equal(parts.read(n, torch.float32), expected)
    for part, rest in zip(tensors, behind, strict=True):
        torch.testing.assert_close(part[:, n:], rest, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_and_the_smallest_values_are_finite(dtype):
    x = torch.zeros(2, 3, 32)
    x[0, 1] = 1e-38
    x[1, 2, 3] = -1e-31
    got = written(x, dtype).read(3, torch.float32)
    assert (got.abs() <= 2e-31).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_none(dtype, bad):
    x = normal(2, 3, 64)
    x[1, 2, 40] = bad
    got = written(x, dtype).read(3, torch.float32)
    assert not got[1, 2, 40].isfinite()
    assert got[0].isfinite().all()
    assert got[1, :2].isfinite().all()


def test_the_products_own_type_is_read_without_a_copy():
    rows = written(normal(2, 9, 16), torch.bfloat16)
    assert rows.read(5, torch.bfloat16).data_ptr() == rows.values.data_ptr()


def test_a_layout_names_the_axis_of_the_tokens():
    for dtype in DTYPES:
        for part in KvForm((6, 100, 64), dtype).tensors():
            assert part.token_axis is not None
            assert part.shape[part.token_axis] == 100
    assert KvForm((6, 100, 64), torch.int8).n_tensors == 2


# --- kernels


def convert(write, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Run `write(code, vector)` over a whole array, into `out`."""
    kind = {torch.int16: I16, torch.float32: F32}[source.dtype]
    k = Code("convert", ("source", "out", "n"))
    with k.loop(0, k.integer("n"), LANES) as i:
        part = k.load(vector(kind, LANES), k.at(k.pointer("source"), i, source.itemsize))
        k.store(write(k, part), k.at(k.pointer("out"), i, out.itemsize))
    k.compiled()(source.data_ptr(), out.data_ptr(), source.numel())
    return out


@pytest.mark.usefixtures("processor")
def test_every_binary16_is_read_as_torch_reads_it():
    halves = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    got, expected = (
        convert(from_halves, halves, torch.empty(1 << 16)),
        halves.view(torch.float16).float(),
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit()[expected == 0], expected.signbit()[expected == 0])


@pytest.mark.usefixtures("processor")
def test_floats_become_the_binary16_that_torch_chooses():
    """All that are a binary16, halfway between two, or next to halfway; and any bits at all."""
    halves = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.float16)
    exact = halves[halves.isfinite()].double()
    between = (exact.sort().values[:-1] + exact.sort().values[1:]) / 2
    edges = torch.cat([exact, between, torch.tensor([65519.99, 65520.0, 1e9, math.inf])]).float()
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 17, dtype=np.uint32)
    x = torch.cat(
        [
            *(torch.nextafter(edges, torch.tensor(side)) for side in (-math.inf, math.inf)),
            edges,
            -edges,
            torch.from_numpy(bits.view(np.float32)),
        ]
    )
    x = x[: x.numel() // LANES * LANES]
    got = convert(to_halves, x, torch.empty(x.numel(), dtype=torch.int16)).view(torch.float16)
    expected = x.half()
    assert torch.equal(got.isnan(), expected.isnan())
    is_number = ~expected.isnan()
    assert torch.equal(got.view(torch.int16)[is_number], expected.view(torch.int16)[is_number])


def kernel_copy(rows: KvRows, x: torch.Tensor, position: int, out: torch.Tensor) -> None:
    """Write a row of every plane from `x` and read it back, by a kernel."""
    planes, room, width = rows.values.shape
    k = Code("copy", (*PARAMS, "x", "out", "position", "planes"))
    code = cache_rows(k, width, rows.values.dtype)
    with k.loop(0, k.integer("planes")) as plane:
        row = code.row(code.plane(plane), k.integer("position"))
        source, target = (k.at(k.pointer(name), plane, 4 * width) for name in ("x", "out"))
        places = range(0, 4 * width, 4 * LANES)
        code.write(row, [k.load(vector(F32, LANES), source, at) for at in places])
        for at, part in zip(places, code.read(row), strict=True):
            k.store(part, target, at)
    scales = 0 if rows.scales is None else rows.scales.data_ptr()
    addresses = rows.values.data_ptr(), scales, room, x.data_ptr(), out.data_ptr()
    k.compiled()(*addresses, position, planes)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_kernel_writes_and_reads_the_bits_that_torch_does(dtype, width):
    x = with_outliers(6, 9, width)
    x[0, 4] = 0
    x[1, 4] = 1e-31
    rows, expected = empty((6, 9, width), dtype), empty((6, 9, width), dtype)
    expected.write(4, x[:, 4:5])
    out = torch.empty(6, width)
    kernel_copy(rows, x[:, 4].contiguous(), 4, out)
    for one, two in ((rows.values, expected.values), (rows.scales, expected.scales)):
        if one is not None:
            torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out, expected.read(5, torch.float32)[:, 4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_kernel_keeps_what_is_no_number(dtype, bad):
    x = normal(4, 64)
    x[1, 40] = bad
    out = torch.empty(4, 64)
    kernel_copy(empty((4, 9, 64), dtype), x, 4, out)
    assert not out[1, 40].isfinite()
    assert out[[0, 2, 3]].isfinite().all()


HEADS = (AttentionHeads(3, 3, 64, 64), AttentionHeads(2, 5, 80, 32), AttentionHeads(1, 1, 16, 16))
N_CTX = 96


def token(heads: AttentionHeads, seed: int) -> torch.Tensor:
    """Queries, keys and values of one token, flat."""
    return normal(heads.n_groups * (heads.per_group + 2) * heads.width, seed=seed)


def fused_attention(
    heads: AttentionHeads, qkv: torch.Tensor, rows: KvRows, position: int
) -> torch.Tensor:
    """By the kernel, with rotations by no angle."""
    out = torch.full((1, heads.n_queries), math.nan)
    rotation = torch.ones(heads.n_rotated // 2, dtype=torch.complex64)
    place = position_in(rows, position, buffer(rotation))
    attention.attend(heads, buffer(qkv.clone().unsqueeze(0)), 0, place, buffer(out))
    return out[0]


def plain_attention(
    heads: AttentionHeads, qkv: torch.Tensor, rows: KvRows, position: int
) -> torch.Tensor:
    n_queries = heads.n_groups * heads.per_group
    parts = qkv.view(-1, heads.width)
    rows.write(position, parts[n_queries:].unsqueeze(1))
    q = parts[:n_queries].view(heads.n_groups, heads.per_group, heads.width)
    return attend_one(q, rows.read(position + 1, torch.float32), position + 1)[0]


def history(heads: AttentionHeads, n: int, dtype: torch.dtype, make=with_outliers) -> KvRows:
    rows = empty((2 * heads.n_groups, N_CTX, heads.width), dtype)
    rows.write(0, make(2 * heads.n_groups, n, heads.width, seed=n))
    return rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("position", [1, 15, 16, 77, N_CTX - 1])
def test_fused_attention_over_any_type_equals_the_plain_one(dtype, heads, position):
    qkv = token(heads, position)
    rows = [history(heads, position, dtype) for _ in range(2)]
    got = fused_attention(heads, qkv, rows[0], position)
    expected = plain_attention(heads, qkv, rows[1], position)
    scale = expected.abs().max()
    torch.testing.assert_close(got / scale, expected / scale, rtol=1e-4, atol=1e-5)
    assert torch.equal(rows[0].values[:, position], rows[1].values[:, position])


def attention_error_bound(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Return how far attention over codes may be off, float64 `[G, P, D]`.

    A key is off by half a step, so a score by that times the query's sum of sizes; a weight then by
    a factor exp(2 e) of the largest such e. A value is off by half its step.
    """
    G, D = q.shape[0], q.shape[2]
    keys, values = kv.double().split(G)
    off_keys, off_values = half_steps(kv).split(G)
    q = q.double() / math.sqrt(D)
    off = (q.abs() @ off_keys.transpose(1, 2)).amax(2, keepdim=True)
    weights = (q @ keys.transpose(1, 2)).softmax(2)
    from_keys = (2 * off).expm1() * (weights @ values.abs())
    return from_keys + (2 * off).exp() * (weights @ off_values) + 1e-5


@pytest.mark.parametrize("make", [normal, with_outliers])
@pytest.mark.parametrize("size", [0.1, 1.0])
def test_attention_over_codes_is_as_exact_as_codes_allow(make, size):
    kv = make(6, 90, 64, seed=3)
    q = size * normal(3, 3, 64, seed=4) / kv[:3].abs().amax()
    keys, values = kv.double().split(3)
    weights = (q.double() @ keys.transpose(1, 2) / 8).softmax(2)
    coded = attend_one(q, written(kv, torch.int8).read(90, torch.float32), 90)
    error = (coded.view(3, 3, 64) - weights @ values).abs()
    limit = attention_error_bound(q, kv)
    assert (error <= limit).all()
    assert (error > limit / 1000).any()  # it is a bound, not a wall far away


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_queries_over_any_type_equal_single_ones(dtype):
    heads, n, T = HEADS[0], 40, 9
    rows = history(heads, n, dtype, normal)
    q = normal(T, 3, 3, 64, seed=5)
    seen = rows.read(n, torch.float32)
    many = attend_many(q, seen, n - T)
    for t in range(T):
        single = attend_one(q[t], seen, n - T + t + 1)
        torch.testing.assert_close(many[t : t + 1], single, rtol=1e-4, atol=1e-5)
