"""Sessions leave a runner and enter another, cut anywhere; what does not fit changes nothing."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4py.activations import F32
from ds4py.config import EngineConfig
from ds4py.contracts import ForwardOutput, ForwardRequest, OutputKind, SessionId
from ds4py.engine import LocalRunner, open_runner
from ds4py.engine.cache_io import load_shard, save_shard
from ds4py.errors import CapacityError, ModelError, SnapshotError
from ds4py.layer_range import LayerSpec
from ds4py.snapshot import (
    SessionState,
    Shard,
    join,
    read_dsvl,
    read_whole,
    split,
    write_dsvl,
    write_shard,
    write_whole,
)
from tests.support import golden
from tests.support.toys import toy_llama

A, B, C = SessionId(1), SessionId(2), SessionId(3)
PROMPT = tuple(range(3, 46))
NEXT = (7, 300, 12, 9, 9, 761)
N_VOCAB = 768


def stage(layers: str, model=None, **options) -> LocalRunner:
    config = EngineConfig(
        model=model or golden.path("tiny-a.gguf"),
        **{"device": "cpu", "precision": "f32", "n_ctx": 64, "n_slots": 2, "threads": 1} | options,
    )
    return open_runner(config, LayerSpec.parse(layers))


def opened(layers: str, model=None, **options) -> closing[LocalRunner]:
    return closing(stage(layers, model, **options))


@contextmanager
def route(*cuts: str) -> Iterator[list[LocalRunner]]:
    with ExitStack() as stack:
        runners = [stage(layers) for layers in cuts]
        for runner in runners:
            stack.callback(runner.close)
        yield runners


@pytest.fixture(scope="module")
def middle() -> Iterator[LocalRunner]:
    """Layers of ratio 0, 4 and 128 that take tokens."""
    runner = stage("0:3")
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def saved(middle) -> Shard:
    run(middle, PROMPT, reset=True)
    return save_shard(middle, A)


def run(
    runner: LocalRunner, tokens, session=A, hidden=None, want=OutputKind.HIDDEN, *, reset=False
):
    pos0 = 0 if reset else runner.length(session) or 0
    work = ForwardRequest(
        session=session,
        tokens=tuple(tokens),
        pos0=pos0,
        hidden=hidden,
        output_kind=want,
        reset=reset,
    )
    (answer,) = runner.run([work])
    assert isinstance(answer, ForwardOutput), answer
    return answer


def states(runner: LocalRunner, tokens, session=A, *, reset=False) -> F32:
    return run(runner, tokens, session, reset=reset).hidden.unpack()


def feed(runners: Sequence[LocalRunner], tokens: Sequence[int]) -> F32:
    hidden = None
    for runner in runners[:-1]:
        hidden = run(runner, tokens, hidden=hidden).hidden
    logits = run(runners[-1], tokens, hidden=hidden, want=OutputKind.LOGITS).logits
    assert logits is not None
    return logits


def save(runners: Sequence[LocalRunner], logits: F32) -> SessionState:
    return join([save_shard(runner, A) for runner in runners], PROMPT, logits)


def load(runners: Sequence[LocalRunner], session: SessionState) -> None:
    """Push every part as bytes, as over a connection."""
    for runner in runners:
        raw = b"".join(write_dsvl(split(session, runner.layers)))
        sizes = session.cache.sizes
        shard = read_dsvl(raw, sizes, runner.layers, n_ctx=runner.n_ctx, n_tokens=len(PROMPT))
        load_shard(runner, A, shard)


@pytest.mark.parametrize("cuts", [["0:output"], ["0:0", "1:3", "4:output"]], ids=" ".join)
def test_a_session_continues_in_another_split(cuts):
    with route("0:2", "3:output") as before, route(*cuts) as after:
        session = save(before, feed(before, PROMPT))
        load(after, session)
        for token in NEXT:
            assert np.array_equal(feed(after, [token]), feed(before, [token]))


def test_a_saved_session_is_a_copy(middle, saved):
    run(middle, PROMPT, reset=True)
    shard = save_shard(middle, A)
    run(middle, NEXT)
    for mine, theirs in zip(shard.layers, saved.layers, strict=True):
        assert all(map(np.array_equal, mine, theirs))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 43])
def test_saving_what_was_loaded_gives_the_same_bytes(middle, length):
    run(middle, PROMPT[:length], reset=True)
    shard = save_shard(middle, A)
    load_shard(middle, B, shard)
    assert write_dsvl(save_shard(middle, B)) == write_dsvl(shard)
    middle.drop(B)


def test_loading_replaces_a_session_and_leaves_the_others(middle, saved):
    run(middle, PROMPT, reset=True)
    expected = states(middle, NEXT)
    states(middle, PROMPT[:5], B, reset=True)
    load_shard(middle, A, saved)
    assert (middle.length(A), middle.length(B)) == (len(PROMPT), 5)
    assert np.array_equal(states(middle, NEXT), expected)
    middle.drop(B)


@pytest.mark.parametrize("offset", [0, 1])
def test_a_payload_may_lie_anywhere_in_memory(middle, saved, offset):
    load_shard(middle, A, saved)
    expected = states(middle, NEXT)
    raw = bytes(offset) + b"".join(write_dsvl(saved))
    view = memoryview(raw)[offset:]
    span, n_tokens = middle.layers, len(PROMPT)
    load_shard(middle, A, read_dsvl(view, saved.sizes, span, n_ctx=64, n_tokens=n_tokens))
    assert np.array_equal(states(middle, NEXT), expected)


def test_rows_that_were_never_loaded_can_not_be_rewound_to(middle, saved):
    load_shard(middle, A, saved)
    run(middle, NEXT)
    with pytest.raises(ModelError, match=f"{len(PROMPT)} to {len(PROMPT + NEXT)}"):
        middle.rewind(A, len(PROMPT) - 1)
    middle.rewind(A, len(PROMPT))
    run(middle, PROMPT, reset=True)
    middle.rewind(A, len(PROMPT) - 1)


def test_a_shard_that_does_not_fit_leaves_the_session_alone(middle, saved):
    load_shard(middle, A, saved)
    expected = states(middle, NEXT)
    load_shard(middle, A, saved)
    other = replace(saved, sizes=replace(saved.sizes, n_vocab=N_VOCAB + 1))
    with pytest.raises(SnapshotError, match=r"n_vocab=769.*expected.*n_vocab=768"):
        load_shard(middle, A, other)
    with (
        route("1:4") as (elsewhere,),
        pytest.raises(SnapshotError, match="layers 0-3, expected 1-4"),
    ):
        load_shard(elsewhere, A, saved)
    assert np.array_equal(states(middle, NEXT), expected)


def test_a_session_needs_room_for_one_more_token(middle, saved):
    small = stage("0:3", n_ctx=len(PROMPT))
    with pytest.raises(SnapshotError, match=r"43 tokens, expected at most 42.*at least 44"):
        load_shard(small, A, saved)
    assert small.length(A) is None
    small.close()


def test_sessions_beyond_the_slots_are_refused(middle, saved):
    load_shard(middle, A, saved)
    load_shard(middle, B, saved)
    with pytest.raises(CapacityError):
        load_shard(middle, C, saved)
    middle.drop(B)


def test_only_a_session_with_tokens_can_be_saved(middle):
    with pytest.raises(ModelError, match="session 3: got no tokens"):
        save_shard(middle, C)
    run(middle, (1,), B)
    middle.rewind(B, 0)
    with pytest.raises(ModelError, match="session 2: got no tokens"):
        save_shard(middle, B)
    middle.drop(B)


# --- plain keys and values ------------------------------------------------------------------------

KINDS = ("f32", "bf16", "f16", "q8_0")
CUTS = (("0:output",), ("0:1", "2:output"), ("0:0", "1:2", "3:output"))


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """Heads of 32 values, and matrices that have fused steps."""
    path = tmp_path_factory.mktemp("toy") / "m.gguf"
    return toy_llama(path, n_head=2, n_head_kv=1, quant="Q4_1")


@pytest.fixture(scope="module", params=KINDS)
def llamas(request, toy) -> Iterator[list[list[LocalRunner]]]:
    """One model in every cut, with caches of one type."""
    cuts = [[stage(part, toy, kv_type=request.param) for part in cut] for cut in CUTS]
    yield cuts
    for runner in (runner for cut in cuts for runner in cut):
        runner.close()


def move(before: Sequence[LocalRunner], after: Sequence[LocalRunner], prompt, logits) -> bytes:
    """Save a session and load it into other stages, all of it as bytes."""
    session = join([save_shard(runner, A) for runner in before], prompt, logits)
    payload = b"".join(write_whole(session))
    sizes, n_ctx = session.cache.sizes, after[0].n_ctx
    again = read_whole(payload, sizes, n_ctx=n_ctx)
    for runner in after:
        raw = memoryview(b"".join(write_shard(split(again, runner.layers))))
        runner.load_cache(A, len(prompt), raw)
    return payload


def drop(runners: Sequence[LocalRunner]) -> None:
    for runner in runners:
        runner.drop(A)


@settings(deadline=None, max_examples=12)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    before=st.sampled_from(range(3)),
    after=st.sampled_from(range(3)),
)
def test_a_llama_continues_to_the_bit_in_another_split(llamas, lengths, before, after):
    """Whatever the prompt, its chunks, the cuts, and the type of keys and values."""
    prompt = [int(t) for t in np.random.default_rng(len(lengths)).integers(3, 270, sum(lengths))]
    drop([*llamas[before], *llamas[after]])
    ends = list(accumulate(lengths))
    for start, end in pairwise([0, *ends]):
        logits = feed(llamas[before], prompt[start:end])
    payload = move(llamas[before], llamas[after], prompt, logits)
    if after != before:
        moved = [feed(llamas[after], tokens) for tokens in ((7,), (200, 12), (9,))]
        for mine, tokens in zip(moved, ((7,), (200, 12), (9,)), strict=True):
            assert np.array_equal(mine, feed(llamas[before], tokens))
    else:  # into the very memory that it came from
        assert move(llamas[before], llamas[after], prompt, logits) == payload


def test_bytes_do_not_depend_on_the_cut(llamas):
    payloads = set()
    for cut in llamas:
        drop(cut)
        logits = feed(cut, PROMPT)
        payloads.add(move(cut, cut, PROMPT, logits))
    assert len(payloads) == 1


def test_a_loaded_llama_can_be_cut_back_anywhere(llamas):
    (whole, _, three) = llamas
    drop([*whole, *three])
    move(whole, three, PROMPT, feed(whole, PROMPT))
    for runner in (*whole, *three):
        runner.rewind(A, 5)
    assert np.array_equal(feed(three, (7, 8)), feed(whole, (7, 8)))


def test_a_saved_llama_is_a_copy(llamas):
    (runner,) = llamas[0]
    drop([runner])
    run(runner, range(3, 67))  # all of the context: the rows are the whole tensors
    before = b"".join(runner.save_cache(A))
    pieces = runner.save_cache(A)
    run(runner, range(100, 164), reset=True)
    assert b"".join(pieces) == before
    assert b"".join(runner.save_cache(A)) != before


@pytest.mark.parametrize("kind", KINDS)
def test_other_keys_and_values_than_the_caches_are_refused(toy, kind):
    """Even where both take as many bytes; what was there goes on."""
    payload = memoryview(b"")
    with opened("0:1", toy, kv_type=kind) as runner:
        run(runner, PROMPT)
        payload = memoryview(b"".join(runner.save_cache(A)))
    for other in KINDS:
        if other == kind:
            continue
        with opened("0:1", toy, kv_type=other) as runner:
            run(runner, PROMPT)
            expected = b"".join(runner.save_cache(A))
            words = (
                f"saved cache: {kind} keys and values in layer 0, expected {other}; "
                f"start with --kv-type {kind}"
            )
            for session in (A, B):
                with pytest.raises(SnapshotError, match=words):
                    runner.load_cache(session, len(PROMPT), payload)
            assert b"".join(runner.save_cache(A)) == expected
            assert runner.length(B) is None


def test_a_route_of_stages_with_other_types_is_saved_and_loaded(toy):
    with opened("0:1", toy, kv_type="q8_0") as first, opened("2:output", toy) as last:
        logits = feed((first, last), PROMPT)
        shards = [save_shard(runner, A) for runner in (first, last)]
        session = join(shards, PROMPT, logits)
        names = [layer.kind.name for layer in session.cache.layers]
        assert names == ["q8_0", "q8_0", "f32", "f32"]
        expected = feed((first, last), NEXT[:1])
        drop((first, last))
        move_in = read_whole(b"".join(write_whole(session)), session.cache.sizes, n_ctx=64)
        for runner in (first, last):
            load_shard(runner, A, split(move_in, runner.layers))
        assert np.array_equal(feed((first, last), NEXT[:1]), expected)
        with (
            opened("0:output", toy) as alone,
            pytest.raises(SnapshotError, match="q8_0 keys and values in layer 0, expected f32"),
        ):
            load_shard(alone, A, move_in.cache)


def test_a_llama_needs_room_for_one_more_token_and_no_more(toy):
    with opened("0:1", toy) as runner:
        run(runner, PROMPT)
        payload = memoryview(b"".join(runner.save_cache(A)))
    with opened("0:1", toy, n_ctx=len(PROMPT)) as small:
        with pytest.raises(SnapshotError, match=r"tokens is 43, expected 1 to 42; .* 44 tokens"):
            small.load_cache(A, len(PROMPT), payload)
        assert small.length(A) is None
    with opened("0:1", toy, n_ctx=len(PROMPT) + 1) as fits:
        fits.load_cache(A, len(PROMPT), payload)
        assert b"".join(fits.save_cache(A)) == payload


def test_loading_counts_against_the_budget_of_the_caches(toy):
    """What does not fit is refused, and a new session leaves no trace."""
    with opened("0:1", toy, n_ctx=256, kv_budget=1 << 20) as runner:
        run(runner, PROMPT)
        used = runner.kv_use.used
        payload = memoryview(b"".join(runner.save_cache(A)))
        runner.load_cache(B, len(PROMPT), payload)
        assert runner.kv_use.used == 2 * used
    with opened("0:1", toy, n_ctx=256, kv_budget=used) as runner:
        run(runner, PROMPT)
        with pytest.raises(CapacityError, match="--kv-budget"):
            runner.load_cache(B, len(PROMPT), payload)
        assert (runner.length(B), runner.kv_use.used) == (None, used)


def test_an_architecture_without_a_portable_form_says_so(toy):
    with opened("0:0", toy) as runner:
        run(runner, (1, 2))
        runner._card = replace(runner.card, cache_form=None)
        message = "sessions of llama models have no portable form; evaluate the prompt again"
        with pytest.raises(SnapshotError, match=message):
            runner.save_cache(A)
        with pytest.raises(SnapshotError, match=message):
            runner.load_cache(A, 2, memoryview(b""))
