"""Kernels of the decode step against the formulas: on a GPU, or through Triton's interpreter."""

# ruff: noqa: E402 - the interpreter is chosen before triton is imported

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
pytest.importorskip("triton", reason="triton is not installed here")

from ds4py.errors import KernelError, ModelError
from ds4py.kernels.cache import CacheTensor, Segment
from ds4py.kernels.cuda import decode_attention
from ds4py.kernels.cuda.chunk_attention import attend_chunk
from ds4py.kernels.cuda.decode_attention import attend_sessions, splits
from ds4py.kernels.cuda.decode_step import DecodeStep, step_numbers
from ds4py.kernels.cuda.element_types import kind_of
from ds4py.kernels.cuda.rope_store import HeadNorms, rotate_and_store
from ds4py.kernels.cuda.sinkhorn import balanced
from ds4py.kernels.scores import ScoreRules
from ds4py.layers import attention
from ds4py.layers.norm import RmsNorm
from ds4py.layers.rope import Rope, RopeParams
from ds4py.models.deepseek4.hyper import Sinkhorn

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
ROUNDING = {F32: 1e-5, BF16: 8e-3, F16: 3e-3}

pytestmark = [pytest.mark.cuda] if HAS_GPU else []


@pytest.fixture(autouse=True)
def _on_the_device():
    with DEVICE:
        yield


def caches(lengths, form: CacheTensor) -> list[torch.Tensor]:
    """Rows after the valid ones hold what memory held: here the worst."""
    made = []
    for length in lengths:
        kv = torch.full(form.shape, math.nan, dtype=form.dtype)
        kv[:, :length] = torch.randn(form.shape[0], length, form.shape[2])
        made.append(kv)
    return made


def step_of(sessions, positions) -> DecodeStep:
    segments = [Segment([kv], at, 1) for kv, at in zip(sessions, positions, strict=True)]
    return DecodeStep(torch.tensor(step_numbers([7] * len(segments), segments)), None)


def attend(q, sessions, positions, form):
    step = step_of(sessions, positions)
    return attend_sessions(q, step.addresses[0], step.positions, form)


def expected(q: torch.Tensor, kv: torch.Tensor, n_keys: int) -> torch.Tensor:
    """One token `[G, H / G, D]`, in float64."""
    n_groups, rows = q.shape[0], kv[:, :n_keys].double()
    scores = q.double() @ rows[:n_groups].transpose(1, 2) / math.sqrt(q.shape[2])
    return (scores.softmax(2) @ rows[n_groups:]).flatten()


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(("n_groups", "per_group", "D"), [(2, 3, 16), (1, 1, 64), (3, 20, 24)])
def test_each_session_attends_to_its_own_rows(dtype, n_groups, per_group, D):
    form = CacheTensor((2 * n_groups, 300, D), dtype)
    positions = [0, 63, 64, 257, 299]
    sessions = caches([at + 1 for at in positions], form)
    q = torch.randn(len(positions), n_groups, per_group, D)
    got = attend(q, sessions, positions, form)
    assert got.dtype is dtype
    assert got.shape == (len(positions), n_groups * per_group * D)
    for row, one, kv, at in zip(got, q, sessions, positions, strict=True):
        error = (row.double() - expected(one, kv, at + 1)).abs().max()
        assert error < ROUNDING[dtype]


RULES = {
    "scale": {"scale": 0.4},
    "window": {"window": 70},
    "window of one": {"window": 1},
    "cap": {"soft_cap": 1.5},
    "sinks": {"sinks": True},
    "all": {"scale": 0.3, "window": 100, "soft_cap": 2.0, "sinks": True},
}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rule", RULES)
def test_rules_of_scores_equal_torchs(dtype, rule):
    """Windows that begin inside a block of keys, and that leave some programs without keys."""
    given = RULES[rule] | ({"sinks": torch.randn(6)} if RULES[rule].get("sinks") else {})
    rules, form = ScoreRules(**given), CacheTensor((4, 300, 24), dtype)
    positions = [0, 69, 70, 164, 299]
    sessions = caches([at + 1 for at in positions], form)
    q = torch.randn(len(positions), 2, 3, 24)
    step = step_of(sessions, positions)
    got = attend_sessions(q, step.addresses[0], step.positions, form, rules)
    for row, one, kv, at in zip(got, q, sessions, positions, strict=True):
        want = attention.attend_one(one, kv.float(), at + 1, rules)[0]
        # bfloat16 rounds large values by more
        error = (row.float() - want).abs() / want.abs().clamp(min=1)
        assert error.max() < ROUNDING[dtype]


def test_sinks_of_another_size_are_refused():
    form = CacheTensor((4, 64, 16), F32)
    step = step_of(caches([9], form), [8])
    q, rules = torch.randn(1, 2, 2, 16), ScoreRules(sinks=torch.zeros(3))
    with pytest.raises(KernelError, match="sinks"):
        attend_sessions(q, step.addresses[0], step.positions, form, rules)


@pytest.mark.parametrize("D", [16, 24])
def test_heads_are_normed_before_they_turn(D):
    n_heads, n_groups = 3, 1
    form = CacheTensor((2 * n_groups, 40, D), F32)
    rope = Rope(RopeParams(n_dims=8, base=100.0), 40, DEVICE)
    norms = HeadNorms(torch.randn(D), torch.randn(D), 1e-2)
    sessions = caches([0, 0], form)
    qkv = torch.randn(2, (n_heads + 2 * n_groups) * D)
    turned, step = qkv.clone(), step_of(sessions, [5, 39])
    table = rope.at(0, 40)
    rotate_and_store(turned, table, step.addresses[0], step.positions, form, norms)
    for row, old, kv, at in zip(turned, qkv, sessions, [5, 39], strict=True):
        heads = old.clone().view(1, -1, D)
        heads[0, :n_heads] = RmsNorm(norms.q, norms.eps, F32)(heads[0, :n_heads])
        heads[0, n_heads:-1] = RmsNorm(norms.k, norms.eps, F32)(heads[0, n_heads:-1])
        rope.rotate_(heads[:, : n_heads + n_groups], rope.at(at, 1))
        assert torch.allclose(row.view(-1, D)[:n_heads], heads[0, :n_heads], atol=1e-5)
        assert torch.allclose(kv[:, at], heads[0, n_heads:], atol=1e-5)
    short = HeadNorms(torch.ones(D - 8), torch.ones(D), 1e-2)
    with pytest.raises(KernelError, match="norm of heads"):
        rotate_and_store(turned, table, step.addresses[0], step.positions, form, short)


def test_a_sessions_bits_do_not_depend_on_the_others(monkeypatch):
    monkeypatch.setattr(decode_attention, "PROGRAMS_OF_ONE_SESSION", 8)
    form = CacheTensor((4, 300, 16), F32)
    positions = [299, 5, 130]
    sessions = caches([at + 1 for at in positions], form)
    q = torch.randn(3, 2, 2, 16)
    together = attend(q, sessions, positions, form)
    for number in range(3):
        own = slice(number, number + 1)
        assert torch.equal(attend(q[own], sessions[own], positions[own], form), together[own])


def test_large_scores_neither_overflow_nor_vanish():
    form = CacheTensor((2, 256, 16), F32)
    (kv,) = caches([256], form)
    kv[0] *= 300
    kv[0, :, 0] -= 20000  # nearly all rows get no weight at all
    q = torch.randn(1, 1, 2, 16) * 10
    got = attend(q, [kv], [255], form)
    assert torch.allclose(got[0].double(), expected(q[0], kv, 256), atol=1e-3)


def test_queries_may_be_part_of_wider_rows():
    form = CacheTensor((4, 64, 16), F32)
    sessions = caches([9, 9], form)
    wide = torch.randn(2, 8 * 16)
    q = wide[:, : 4 * 16].view(2, 2, 2, 16)
    whole = q.clone()
    assert torch.equal(attend(q, sessions, [8, 8], form), attend(whole, sessions, [8, 8], form))


@pytest.mark.parametrize(
    ("n_groups", "capacity", "expected"),
    [(8, 1 << 17, 32), (1, 1 << 17, 256), (8, 300, 4), (8, 10, 1), (300, 1 << 17, 1)],
)
def test_keys_are_split_to_fill_the_device_and_no_further(n_groups, capacity, expected):
    assert splits(n_groups, capacity) == expected


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("n_dims", [16, 10])
def test_queries_turn_and_keys_and_values_go_to_their_sessions(dtype, n_dims):
    n_heads, n_groups, D = 4, 2, 16
    form = CacheTensor((2 * n_groups, 40, D), dtype)
    rope = Rope(RopeParams(n_dims=n_dims, base=100.0), 40, DEVICE)
    positions = [0, 39, 17]
    sessions = caches([0, 0, 0], form)
    qkv = torch.randn(3, (n_heads + 2 * n_groups) * D)
    turned = qkv.clone()
    step = step_of(sessions, positions)
    rotate_and_store(turned, rope.at(0, 40), step.addresses[0], step.positions, form)
    for row, old, kv, at in zip(turned, qkv, sessions, positions, strict=True):
        heads = old.clone().view(1, -1, D)
        rope.rotate_(heads[:, : n_heads + n_groups], rope.at(at, 1))
        assert torch.allclose(row.view(-1, D)[:n_heads], heads[0, :n_heads], atol=1e-6)
        assert torch.equal(row[n_heads * D :], old[n_heads * D :])
        assert torch.allclose(kv[:, at].float(), heads[0, n_heads:], atol=ROUNDING[dtype] * 4)
        kv[:, at] = math.nan
        assert kv.isnan().all(), "no other row was written"


@pytest.mark.parametrize("n_tokens", [1, 33])
def test_matrices_are_balanced_as_by_single_operations(n_tokens):
    scores = torch.randn(n_tokens, 24)[:, 8:] * 4
    for iterations in (1, 20):
        want = Sinkhorn(4, iterations, 1e-6, DEVICE)(scores)
        got = balanced(scores, 4, iterations, 1e-6)
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("pos0", "T"), [(0, 1), (0, 5), (7, 2), (30, 19)])
def test_a_chunk_attends_as_with_a_mask(dtype, pos0, T):
    form = CacheTensor((4, 64, 16), dtype)
    (kv,) = caches([pos0 + T], form)
    q = torch.randn(T, 2, 3, 16)
    got, want = attend_chunk(q, kv, pos0), attention.attend_many(q, kv, pos0)
    assert got.shape == want.shape
    assert got.is_contiguous()
    assert torch.allclose(got.double(), want.double(), atol=2 * ROUNDING[dtype])


def test_a_type_that_caches_do_not_have_is_refused():
    with pytest.raises(ModelError, match=r"cache: got elements of torch\.int8"):
        kind_of(torch.int8)


def test_a_step_names_tokens_positions_and_every_cache_tensor():
    parts = [[torch.zeros(2), torch.zeros(3)] for _ in range(2)]
    segments = [Segment(parts[0], 5, 1), Segment(parts[1], 9, 1)]
    step = DecodeStep(torch.tensor(step_numbers([40, 41], segments)), None)
    assert step.tokens.tolist() == [40, 41]
    assert step.positions.tolist() == [5, 9]
    by_session = [[part.data_ptr() for part in own] for own in parts]
    assert step.addresses.T.tolist() == by_session


COMPILE = """
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ds4py.kernels.cuda import decode_attention, rope_store, sinkhorn

def build(kernel, types, **constants):
    names = kernel.arg_names
    signature = dict(zip(names, types.split())) | dict.fromkeys(constants, "constexpr")
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=values)
    options = {"enable_fp_fusion": True}
    assert compile(source, GPUTarget("cuda", 80, 32), options).asm["cubin"]

for kind, precision, window, cap in ((tl.bfloat16, "tf32", 0, 0.0), (tl.float32, "ieee", 9, 5.0)):
    build(
        decode_attention._attend_split, "*fp32 *i64 *i64 *fp32 *fp32 i32 i32 fp32", N_SPLITS=8,
        PER_GROUP=3, ROWS=16, D=24, WIDE=32, KEYS=32, KIND=kind, PRECISION=precision,
        WINDOW=window, CAP=cap,
    )
for sinks in (False, True):
    build(
        decode_attention._join_splits, "*fp32 *fp32 *fp32 *bf16", N_SPLITS=8, D=24, WIDE=32,
        SINKS=sinks,
    )
    build(
        rope_store._rotate_and_store, "*fp32 *fp32 *i64 *i64 *fp32 *fp32 fp32 i32 i32 i32",
        PAIRS=12, ROTATED=8, WIDE=16, NORMED=sinks, KIND=tl.bfloat16,
    )
build(sinkhorn._balance, "*fp32 *fp32 i32 i32 fp32", ITERATIONS=20, SIZE=4, TOKENS=32)
"""


def test_every_kernel_compiles_for_a_gpu_that_is_not_here(tmp_path):
    """The interpreter takes more than the compiler does; this needs no GPU either."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[4])}
    subprocess.run([sys.executable, "-W", "error", "-c", COMPILE], env=environment, check=True)
