"""Sessions leave a runner and enter another, cut anywhere; what does not fit changes nothing."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest

from ds4py.config import EngineConfig
from ds4py.contracts import SessionId, SliceOutput, SliceWork, Want
from ds4py.engine import LocalRunner, open_runner
from ds4py.engine.cache_io import load_shard, save_shard
from ds4py.errors import CapacityError, ModelError, SnapshotError
from ds4py.hidden import F32
from ds4py.snapshot import Shard, Whole, join, read_dsvl, split, write_dsvl
from ds4py.spans import LayerSpec
from tests import golden
from tests.toys import toy_llama

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


def run(runner: LocalRunner, tokens, session=A, hidden=None, want=Want.HIDDEN, *, reset=False):
    pos0 = 0 if reset else runner.length(session) or 0
    work = SliceWork(
        session=session, tokens=tuple(tokens), pos0=pos0, hidden=hidden, want=want, reset=reset
    )
    (answer,) = runner.run([work])
    assert isinstance(answer, SliceOutput), answer
    return answer


def states(runner: LocalRunner, tokens, session=A, *, reset=False) -> F32:
    return run(runner, tokens, session, reset=reset).hidden.unpack()


def feed(runners: Sequence[LocalRunner], tokens: Sequence[int]) -> F32:
    hidden = None
    for runner in runners[:-1]:
        hidden = run(runner, tokens, hidden=hidden).hidden
    logits = run(runners[-1], tokens, hidden=hidden, want=Want.LOGITS).logits
    assert logits is not None
    return logits


def save(runners: Sequence[LocalRunner], logits: F32) -> Whole:
    return join([save_shard(runner, A) for runner in runners], PROMPT, logits)


def load(runners: Sequence[LocalRunner], session: Whole) -> None:
    """Push every part as bytes, as over a connection."""
    for runner in runners:
        raw = b"".join(write_dsvl(split(session, runner.span)))
        sizes = session.cache.sizes
        shard = read_dsvl(raw, sizes, runner.span, n_ctx=runner.n_ctx, n_tokens=len(PROMPT))
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
    span, n_tokens = middle.span, len(PROMPT)
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


def test_an_architecture_without_a_portable_form_says_so(tmp_path, saved):
    runner = stage("0:0", toy_llama(tmp_path / "m.gguf", n_ctx=64))
    run(runner, (1, 2))
    message = "sessions of llama models have no portable form, expected deepseek4"
    with pytest.raises(SnapshotError, match=message):
        save_shard(runner, A)
    with pytest.raises(SnapshotError, match=message):
        load_shard(runner, A, saved)
    runner.close()
