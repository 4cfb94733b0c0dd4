"""Saved sessions equal those of the C engine: every byte, every cut, and what follows from them."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.activations import F32
from ds4py.config import EngineConfig
from ds4py.contracts import ForwardOutput, ForwardRequest, OutputKind, SessionId
from ds4py.engine import LocalRunner, open_runner
from ds4py.engine.cache_io import load_shard, save_shard
from ds4py.layer_range import LayerRange
from ds4py.snapshot import (
    CacheSizes,
    Capacities,
    SessionState,
    Shard,
    join,
    read_dsv4,
    read_dsvl,
    split,
    write_dsv4,
    write_dsvl,
)
from ds4py.snapshot.layout import EMPTY_SCORE, SCORES
from tests.support import golden

SIZES = CacheSizes(
    ratios=(0, 0, 4, 128, 4, 128), width=160, index_width=128, window=16, n_vocab=768
)
CTX = 512
AFTER_DECODE = "wire/snapshot.saved.dsv4"
PREFILLED = ["len40", "len130"]
FILES = [*(f"session_a_{name}.dsv4" for name in PREFILLED), AFTER_DECODE]
A = SessionId(1)
EMPTY = np.float32(EMPTY_SCORE)
INDEX_ROWS = 4


def session(name: str) -> SessionState:
    return read_dsv4(golden.load_bytes(name), SIZES, n_ctx=CTX)


def dsv4(whole: SessionState) -> bytes:
    return b"".join(write_dsv4(whole))


def dsvl(shard: Shard) -> bytes:
    return b"".join(write_dsvl(shard))


@pytest.mark.parametrize("name", FILES)
def test_what_was_read_is_written_byte_for_byte(name):
    whole = session(name)
    assert dsv4(whole) == golden.load_bytes(name)
    assert whole.cache.capacities == Capacities.of(CTX, SIZES.window, raw_cap=SIZES.window)


def test_a_shard_cut_from_the_session_is_the_recorded_one():
    layers = LayerRange(2, 3)
    recorded = golden.load_bytes("shard_a_len40_layers2-3.dsvl")
    assert dsvl(split(session("session_a_len40.dsv4"), layers)) == recorded
    assert dsvl(read_dsvl(recorded, SIZES, layers, n_ctx=CTX, n_tokens=40)) == recorded


@pytest.mark.parametrize("name", FILES)
@given(inner=st.sets(st.integers(1, 5)))
def test_any_cut_joins_to_the_recorded_bytes(name, inner):
    whole = session(name)
    shards = []
    for start, end in itertools.pairwise([0, *sorted(inner), SIZES.n_layers]):
        layers = LayerRange(start, end - 1)
        raw = dsvl(split(whole, layers))
        shards.append(read_dsvl(raw, SIZES, layers, n_ctx=CTX, n_tokens=whole.cache.n_tokens))
    assert dsv4(join(shards, whole.tokens, whole.logits)) == golden.load_bytes(name)


def recorded_shards() -> Iterator[tuple[str, LayerRange, bytes]]:
    """Every shard that went over a connection when the session was saved and loaded."""
    for connection in golden.load_json("wire/snapshot.json")["connections"]:
        for way in ("c2s", "s2c"):
            frames = connection[way]["frames"]
            raw = golden.load_bytes(f"wire/{connection[way]['file']}")
            begin = next((f for f in frames if "token_hash" in f and "payload_bytes" in f), None)
            chunks = [frame for frame in frames if frame["name"] == "SNAPSHOT_CHUNK"]
            if begin and chunks:
                data = b"".join(
                    raw[f["payload_offset"] : f["payload_offset"] + f["chunk_bytes"]]
                    for f in chunks
                )
                yield way, LayerRange(begin["layer_start"], begin["layer_end"]), data


def test_shards_on_the_wire_are_the_cuts_of_the_saved_session():
    whole = session(AFTER_DECODE)
    seen = []
    for way, layers, raw in recorded_shards():
        assert dsvl(split(whole, layers)) == raw
        seen.append((way, layers.start, layers.end))
    assert sorted(seen) == [("c2s", 2, 3), ("c2s", 4, 5), ("s2c", 2, 3), ("s2c", 4, 5)]


# --- with the model -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner() -> Iterator[LocalRunner]:
    config = EngineConfig(
        model=golden.path("tiny-a.gguf"),
        device="cpu",
        precision="f32",
        n_ctx=CTX,
        threads=1,
        raw_cap=SIZES.window,  # the recorded processes computed on the CPU
    )
    opened = open_runner(config)
    yield opened
    opened.close()


def feed(runner: LocalRunner, tokens: list[int], *, reset: bool = False) -> F32:
    pos0 = 0 if reset else runner.length(A)
    work = ForwardRequest(
        session=A,
        tokens=tuple(tokens),
        pos0=pos0,
        hidden=None,
        output_kind=OutputKind.LOGITS,
        reset=reset,
    )
    (answer,) = runner.run([work])
    assert isinstance(answer, ForwardOutput), answer
    return answer.logits


def relative_rms(got: F32, expected: F32) -> float:
    """RMS of the difference as a part of the RMS of what was expected."""
    error = np.sqrt(np.square(got.astype(np.float64) - expected).mean())
    return float(error / np.sqrt(np.square(expected.astype(np.float64)).mean()))


@pytest.mark.parametrize("prompt", PREFILLED)
def test_an_evaluated_prompt_is_saved_as_the_c_engine_saves_it(runner, prompt):
    """Rounded values now and then step to a neighbour: of FP8 in rows, of FP4 in index rows."""
    expected = session(f"session_a_{prompt}.dsv4").cache
    feed(runner, golden.load_npz("logits_a.npz")[f"{prompt}_prompt"].tolist(), reset=True)
    got = save_shard(runner, A)
    assert (got.sizes, got.capacities) == (SIZES, expected.capacities)
    for layer in range(SIZES.n_layers):
        pairs = zip(got.layers[layer], expected.layers[layer], strict=True)
        for place, (mine, theirs) in enumerate(pairs):
            full = theirs != EMPTY
            assert np.array_equal(mine != EMPTY, full), "the same slots are empty"
            near = 0.2 if place == INDEX_ROWS else 0.1
            assert not theirs.size or relative_rms(mine[full], theirs[full]) < near, (layer, place)


@pytest.mark.parametrize("prompt", PREFILLED)
def test_a_loaded_session_is_saved_byte_for_byte(runner, prompt):
    whole = session(f"session_a_{prompt}.dsv4")
    load_shard(runner, A, whole.cache)
    again = join([save_shard(runner, A)], whole.tokens, whole.logits)
    assert dsv4(again) == golden.load_bytes(f"session_a_{prompt}.dsv4")


def test_slots_that_decoding_leaves_stale_are_saved_empty(runner):
    """After single tokens the C engine keeps slots that nothing reads; all others are equal."""
    cache = session(AFTER_DECODE).cache
    load_shard(runner, A, cache)
    for layer, got in enumerate(save_shard(runner, A).layers):
        expected = [tensor.copy() for tensor in cache.layers[layer]]
        for scores in (place for place in SCORES if place < len(got)):
            stale = (got[scores] == EMPTY).all(axis=1)
            expected[scores][stale], expected[scores - 1][stale] = EMPTY, 0
        assert all(map(np.array_equal, got, expected))


@pytest.mark.parametrize("prompt", PREFILLED)
def test_a_loaded_session_goes_on_as_the_c_engine_did(runner, prompt):
    recorded = golden.load_npz("logits_a.npz")
    load_shard(runner, A, session(f"session_a_{prompt}.dsv4").cache)
    steps = zip(recorded[f"{prompt}_greedy"].tolist(), recorded[f"{prompt}_decode"], strict=True)
    errors = []
    for token, expected in steps:
        got = feed(runner, [token])
        second, best = np.sort(expected)[-2:]
        assert got.argmax() == expected.argmax() or best - second < 0.1
        errors.append(relative_rms(got, expected))
    assert errors[0] < 0.02
    assert np.median(errors) < 0.03


def test_the_session_saved_by_three_stages_goes_on_as_they_did(runner):
    results = golden.load_json("wire/snapshot.json")["results"]
    whole = session(AFTER_DECODE)
    assert whole.tokens.tolist() == results["prompt"] + results["before_save"]
    load_shard(runner, A, whole.cache)
    logits, chosen = whole.logits, []
    for _ in results["after_load"]:
        chosen.append(int(logits.argmax()))
        logits = feed(runner, chosen[-1:])
    assert chosen == results["after_load"]
