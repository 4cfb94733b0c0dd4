"""The account of cache memory: what sessions hold, what is refused, what the system gets back."""

import ctypes
import math
import mmap
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4py.config import EngineConfig
from ds4py.contracts import ForwardOutput, ForwardRequest, OutputKind, SessionId
from ds4py.engine import LocalRunner, host_memory, open_runner
from ds4py.engine.kv_pool import PAGE_TOKENS, KvPool, KvUse, default_budget
from ds4py.errors import CacheFullError, CapacityError, ConfigError, Ds4Error
from ds4py.kernels.cache import CacheTensor
from tests.support.toys import toy_llama
from tools.toy_deepseek4 import toy_deepseek4

CPU, GPU_LIKE = torch.device("cpu"), torch.device("meta")  # of "meta" nothing can be given back
N_CTX, N_SLOTS = 1100, 3  # a context that is no whole number of pages
LAYOUT = [
    CacheTensor((2, N_CTX, 8), torch.float32, 1),  # a row for each token, twice
    CacheTensor((N_CTX // 4 + 1, 16), torch.float16, 0),  # one for every fourth
    CacheTensor((5, 7), torch.float32),  # no rows of tokens
]
FIXED, PER_TOKEN, PER_FOUR = 5 * 7 * 4, 2 * 8 * 4, 16 * 2
PAGE = PAGE_TOKENS * PER_TOKEN + math.ceil(PAGE_TOKENS * 276 / N_CTX) * PER_FOUR


def cost(n_tokens: int) -> int:
    """What a session holds, by the layout above."""
    if n_tokens == 0:
        return 0
    covered = min(-(-n_tokens // 256) * 256, N_CTX)
    return FIXED + covered * PER_TOKEN + math.ceil(covered * 276 / N_CTX) * PER_FOUR


def test_the_expected_costs_are_those_of_the_layout():
    assert cost(N_CTX) == sum(t.dtype.itemsize * math.prod(t.shape) for t in LAYOUT)
    assert cost(1) == cost(256) == FIXED + PAGE
    assert cost(257) - cost(256) == pytest.approx(PAGE, abs=PER_FOUR)


# --- the account


def mark(pool: KvPool, slot: int, start: int, end: int) -> None:
    """Write what belongs to the tokens from `start` to `end`."""
    rows, fourths, _ = pool.cache(slot)
    if start < end:
        tokens = torch.arange(start, end)
        rows[:, start:end] = (slot * 10000.0 + tokens).view(-1, 1)
        fourths[tokens // 4] = ((slot * 512.0 + tokens // 4) % 2048).half().view(-1, 1)


def assert_marked(pool: KvPool, slot: int, end: int) -> None:
    rows, fourths, fixed = pool.cache(slot)
    assert (rows[:, :end, 0] == slot * 10000 + torch.arange(end)).all()
    assert (fourths[: end // 4, 5] == (slot * 512 + torch.arange(end // 4)) % 2048).all()
    assert not end or (fixed == slot).all()


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "resize", "resize", "end"]),
        st.integers(0, N_SLOTS - 1),
        st.one_of(st.integers(0, N_CTX), st.sampled_from([0, 1, 255, 256, 257, 512, N_CTX])),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS, budget=st.integers(cost(1), N_SLOTS * cost(N_CTX)))
def test_used_is_what_the_sessions_hold_and_never_above_the_budget(actions, budget):
    pool = KvPool(LAYOUT, N_SLOTS, CPU, n_ctx=N_CTX, budget=budget)
    held: dict[int, int] = {}
    for action, number, n_tokens in actions:
        play(pool, held, action, number, n_tokens)
        use = pool.use
        assert use.used == sum(map(cost, held.values())) <= use.budget == budget
        assert sorted(use.tokens) == sorted(held.values())
        assert pool.n_free == N_SLOTS - len(held)
        for slot, n_held in held.items():
            assert_marked(pool, slot, n_held)


def play(pool: KvPool, held: dict[int, int], action: str, number: int, n_tokens: int) -> None:
    """Do one thing, to some session if it is about one; `held` follows."""
    owned = sorted(held)[number % len(held)] if held else None
    left = pool.use.budget - pool.use.used
    if action == "begin" and len(held) == N_SLOTS:
        assert refusal_of(pool.acquire, n_tokens) == (N_SLOTS + 1, N_SLOTS)
    elif action == "begin" and cost(n_tokens) > left:
        assert refusal_of(pool.acquire, n_tokens) == (cost(n_tokens), left)
    elif action == "begin":
        slot = pool.acquire(n_tokens)
        assert slot not in held
        extend(pool, held, slot, n_tokens)
    elif owned is None:
        return
    elif action == "end":
        pool.release(owned)
        del held[owned]
    elif (more := cost(n_tokens) - cost(held[owned])) > left:
        assert refusal_of(pool.resize, owned, n_tokens) == (more, left)
    else:
        pool.resize(owned, n_tokens)
        extend(pool, held, owned, n_tokens)


def extend(pool: KvPool, held: dict[int, int], slot: int, n_tokens: int) -> None:
    if n_tokens and not held.get(slot):
        pool.cache(slot)[2].fill_(slot)
    mark(pool, slot, held.get(slot, 0), n_tokens)
    held[slot] = n_tokens


def refusal_of(call: Callable[..., object], *args: int) -> tuple[int, int]:
    with pytest.raises(CapacityError) as caught:
        call(*args)
    return caught.value.needed, caught.value.available


@given(st.one_of(st.integers(1, N_CTX), st.sampled_from([255, 256, 257, N_CTX])))
def test_a_copy_is_as_long_as_the_tokens_and_no_longer(n_tokens):
    pool = KvPool(LAYOUT, N_SLOTS, CPU, n_ctx=N_CTX)
    source, target = pool.acquire(N_CTX), pool.acquire(n_tokens)
    mark(pool, source, 0, N_CTX)
    for tensor in pool.cache(target):
        tensor.fill_(-1)
    pool.cache(source)[2].fill_(7)
    pool.copy(source, target, n_tokens)
    (rows, fourths, fixed), (old_rows, old_fourths, _) = pool.cache(target), pool.cache(source)
    assert torch.equal(rows[:, :n_tokens], old_rows[:, :n_tokens])
    assert (rows[:, n_tokens:] == -1).all()
    n_fourths = -(-n_tokens // 4)
    assert torch.equal(fourths[:n_fourths], old_fourths[:n_fourths])
    assert (fourths[n_fourths + 1 :] == -1).all()  # they are said to fill evenly, not exactly
    assert (fixed == 7).all()
    assert pool.use.tokens == (N_CTX, n_tokens)


def test_a_refusal_says_who_holds_what_and_what_to_do():
    pool = KvPool(LAYOUT, N_SLOTS, CPU, n_ctx=N_CTX, budget=2 * cost(300))
    pool.acquire(300)
    slot = pool.acquire(200)
    with pytest.raises(CapacityError) as caught:
        pool.resize(slot, 600)
    assert (caught.value.needed, caught.value.available) == (
        cost(600) - cost(200),
        2 * cost(300) - cost(300) - cost(200),
    )
    text = str(caught.value)
    assert "2 sessions hold" in text
    assert "a session of 200 tokens would have 600" in text
    assert "--kv-budget" in text
    assert f"needed {caught.value.needed}, available {caught.value.available}" in text


def test_a_budget_in_which_nothing_could_begin_is_refused_at_the_start():
    with pytest.raises(CapacityError, match="the first 256 tokens of a session take") as caught:
        KvPool(LAYOUT, N_SLOTS, CPU, n_ctx=N_CTX, budget=cost(1) - 1)
    assert (caught.value.needed, caught.value.available) == (cost(1), cost(1) - 1)
    assert KvPool(LAYOUT, N_SLOTS, CPU, n_ctx=N_CTX, budget=cost(1)).acquire(256) is not None


def test_where_all_memory_is_taken_at_the_start_the_budget_must_hold_it():
    whole = N_SLOTS * cost(N_CTX)
    with pytest.raises(CapacityError, match=f"3 sessions of {N_CTX} tokens") as caught:
        KvPool(LAYOUT, N_SLOTS, GPU_LIKE, n_ctx=N_CTX, budget=whole - 1)
    assert (caught.value.needed, caught.value.available) == (whole, whole - 1)
    pool = KvPool(LAYOUT, N_SLOTS, GPU_LIKE, n_ctx=N_CTX, budget=whole)
    slot = pool.acquire(N_CTX)
    assert pool.use.used == cost(N_CTX)
    pool.resize(slot, 3)
    assert pool.use == KvUse(budget=whole, used=cost(3), tokens=(3,))


def test_the_default_budget_is_what_is_needed_but_half_of_the_free_memory_on_the_cpu():
    free = psutil.virtual_memory().available
    assert default_budget(1 << 20, CPU) == 1 << 20
    assert default_budget(1 << 60, CPU) == pytest.approx(free / 2, rel=0.5)
    assert default_budget(1 << 60, GPU_LIKE) == 1 << 60  # the device itself says no


# --- the system's memory

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the system takes nothing back")


@linux_only
def test_only_whole_pages_inside_the_range_are_lost():
    page = mmap.PAGESIZE
    memory = np.full(6 * page, 7, np.uint8)
    first = -memory.ctypes.data % page
    host_memory.give_back(memory.ctypes.data + first + 10, 2 * page)  # one whole page is inside
    lost = np.flatnonzero(memory == 0)
    assert (lost == np.arange(first + page, first + 2 * page)).all()
    host_memory.give_back(memory.ctypes.data + first + 10, page)
    assert (memory == 0).sum() == page


@linux_only
@pytest.mark.parametrize("kept", [0, 2048])
def test_the_memory_of_a_cut_session_goes_back_to_the_system(kept):
    n_ctx, planes = 8192, 16
    ctypes.CDLL(None).malloc_trim(0)  # or the pool gets memory that others have written to
    pool = KvPool([CacheTensor((planes, n_ctx, 128), torch.float32, 1)], 1, CPU, n_ctx=n_ctx)
    slot = pool.acquire(n_ctx)
    (rows,) = pool.cache(slot)
    before = resident()
    rows.fill_(1)
    written = resident()
    assert written - before > 56 << 20  # of 64 MiB
    pool.resize(slot, kept)
    gone = (n_ctx - kept) / n_ctx
    assert written - resident() > 0.85 * gone * (64 << 20)
    assert (rows[:, :kept] == 1).all()


def resident() -> int:
    return psutil.Process().memory_info().rss


# --- sessions of a runner

A, B, C = SessionId(1), SessionId(2), SessionId(3)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return toy_llama(tmp_path_factory.mktemp("toy") / "m.gguf", n_layers=2, n_ctx=1024)


PER_PAGE = 2 * 4 * 256 * 16 * 4
"""Bytes of a page of that model in float32: layers, planes, tokens, width."""


def stage(model: Path, n_pages: int, **options) -> LocalRunner:
    budget = n_pages * PER_PAGE
    config = EngineConfig(
        model=model, precision="f32", threads=1, n_slots=3, kv_budget=budget, **options
    )
    return open_runner(config)


def text(n_tokens: int) -> tuple[int, ...]:
    return tuple(3 + 7 * k % 270 for k in range(n_tokens))


def work(
    session: SessionId, n_tokens: int, pos0: int = 0, *, reset: bool = False
) -> ForwardRequest:
    return ForwardRequest(
        session=session,
        tokens=text(pos0 + n_tokens)[pos0:],
        pos0=pos0,
        hidden=None,
        reset=reset,
        output_kind=OutputKind.LOGITS,
    )


def one(runner: LocalRunner, item: ForwardRequest) -> ForwardOutput | Ds4Error:
    (answer,) = runner.run([item])
    return answer


def n_pages(runner: LocalRunner) -> float:
    return runner.kv_use.used / PER_PAGE


def test_a_span_beyond_the_budget_is_refused_and_disturbs_nothing(model):
    runner, roomy = stage(model, 3), stage(model, 12)
    assert isinstance(one(runner, work(A, 300)), ForwardOutput)
    assert isinstance(one(runner, work(B, 250)), ForwardOutput)
    assert runner.kv_use == KvUse(budget=3 * PER_PAGE, used=3 * PER_PAGE, tokens=(300, 250))
    refused, served = runner.run([work(B, 10, 250), work(A, 10, 300)])
    assert isinstance(refused, CapacityError)
    assert (refused.needed, refused.available) == (PER_PAGE, 0)
    assert isinstance(served, ForwardOutput)
    assert (runner.length(A), runner.length(B)) == (310, 250)
    # what was there is there, and the page that B has is used to its end
    one(roomy, work(B, 250))
    for position in range(250, 256):
        got, expected = (one(r, work(B, 1, position)) for r in (runner, roomy))
        assert np.array_equal(got.logits, expected.logits)
    assert isinstance(one(runner, work(B, 1, 256)), CapacityError)


def test_a_new_session_that_is_refused_takes_no_slot(model):
    runner = stage(model, 2)
    one(runner, work(A, 300))
    for session in (B, C, B, C):
        assert isinstance(one(runner, work(session, 1)), CapacityError)
        assert runner.length(session) is None
    runner.drop(A)
    assert [type(answer) for answer in runner.run([work(s, 1) for s in (A, B, C)])] == [
        ForwardOutput,
        ForwardOutput,
        CacheFullError,
    ]


def test_dropping_rewinding_and_resetting_give_pages_back(model):
    runner = stage(model, 4)
    one(runner, work(A, 900))
    assert n_pages(runner) == 4
    runner.rewind(A, 513)
    assert n_pages(runner) == 3
    runner.rewind(A, 512)
    assert n_pages(runner) == 2
    again = one(runner, work(A, 200, 512))
    whole = one(stage(model, 4), work(A, 712))
    assert np.allclose(again.logits, whole.logits, atol=1e-4)
    one(runner, work(A, 5, reset=True))
    assert n_pages(runner) == 1
    runner.drop(A)
    runner.drop(A)
    assert n_pages(runner) == 0
    assert runner.kv_use.tokens == ()


def test_a_fork_costs_what_it_holds_and_is_refused_without_room(model):
    runner = stage(model, 3)
    one(runner, work(A, 300))
    one(runner, work(B, 100))
    with pytest.raises(CapacityError) as caught:
        runner.fork(A, B, 257)
    assert (caught.value.needed, caught.value.available) == (PER_PAGE, 0)
    assert (runner.length(A), runner.length(B)) == (300, 100)
    runner.fork(A, B, 256)
    assert runner.kv_use.tokens == (300, 256)
    runner.rewind(A, 200)
    runner.fork(B, A, 100)
    assert runner.kv_use.tokens == (100, 256)
    assert n_pages(runner) == 2


def test_memory_that_is_taken_ahead_is_there_for_the_span(model):
    runner = stage(model, 3)
    runner.reserve(A, 600)
    assert n_pages(runner) == 3
    assert isinstance(one(runner, work(B, 1)), CapacityError)
    with pytest.raises(CapacityError):
        runner.reserve(B, 1)
    assert isinstance(one(runner, work(A, 600)), ForwardOutput)
    runner.reserve(A, 5)  # for a reset: what is there stays until that
    assert runner.kv_use.tokens == (600,)


def test_a_reset_that_is_refused_leaves_the_session_as_it_was(model):
    runner = stage(model, 3)
    one(runner, work(A, 300))
    one(runner, work(B, 100))
    assert isinstance(one(runner, work(B, 600, reset=True)), CapacityError)
    assert runner.length(B) == 100
    assert isinstance(one(runner, work(B, 1, 100)), ForwardOutput)


def test_a_budget_below_one_context_is_told_at_the_start(model, caplog):
    stage(model, 4)
    assert not caplog.records
    stage(model, 3)
    assert "less than one session of 1024 tokens can take" in caplog.text


def test_a_saved_session_that_the_budget_has_no_room_for_is_refused(tmp_path):
    """Rows of this model lie in rings, so a session counts as a whole from its first token."""
    path = toy_deepseek4(tmp_path / "m.gguf", **DEEPSEEK)
    saver = open_runner(EngineConfig(model=path, threads=1, n_slots=2, n_ctx=64))
    one(saver, work(A, 9))
    saved = memoryview(b"".join(saver.save_cache(A)))
    slot = saver.kv_use.used
    config = EngineConfig(model=path, threads=1, n_slots=2, n_ctx=64, kv_budget=slot)
    runner = open_runner(config)
    runner.load_cache(A, 9, saved)
    assert runner.kv_use == KvUse(budget=slot, used=slot, tokens=(9,))
    with pytest.raises(CapacityError):
        runner.load_cache(B, 9, saved)
    assert (runner.length(A), runner.length(B)) == (9, None)
    runner.load_cache(A, 9, saved)  # in its own place


DEEPSEEK = {"n_layers": 3, "n_expert": 2, "n_used": 1, "n_vocab": 300}


@pytest.mark.parametrize("kv_type", ["f32", "bf16", "f16", "q8_0"])
def test_a_model_whose_caches_have_types_of_their_own_takes_no_other(tmp_path, kv_type):
    path = toy_deepseek4(tmp_path / "m.gguf", **DEEPSEEK)
    with pytest.raises(ConfigError, match=f"--kv-type {kv_type}.*deepseek4.*types of their own"):
        open_runner(EngineConfig(model=path, threads=1, n_ctx=64, kv_type=kv_type))
