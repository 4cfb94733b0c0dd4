"""Payloads: what was written is read, any cut joins again, and nothing broken gets through."""

import itertools
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.errors import SnapshotError
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

SIZES = CacheSizes(ratios=(0, 4, 16, 4, 0, 16), width=3, index_width=2, window=5, n_vocab=11)
CTX = 64
SPAN = LayerRange(1, 2)
LAST = SIZES.n_layers - 1
DSV4 = (
    *("magic", "version", "ctx", "prefill_cap", "raw_cap", "raw_window", "comp_cap", "tokens"),
    *("layers", "head width", "index head width", "vocab", "raw_live"),
)
ALL_ONES = (1 << 32) - 1
DSVL = (*DSV4[:-2], "first layer", "last layer", "raw_live")


def whole(n_tokens: int = 19, seed: int = 0, n_ctx: int = CTX) -> SessionState:
    random = np.random.default_rng(seed)
    return SessionState(
        tokens=random.integers(0, SIZES.n_vocab, n_tokens).astype(np.uint32),
        logits=random.standard_normal(SIZES.n_vocab, np.float32),
        cache=Shard(
            sizes=SIZES,
            layer_range=LayerRange(0, LAST),
            capacities=Capacities.of(n_ctx, SIZES.window),
            n_tokens=n_tokens,
            layers=[
                [random.standard_normal(shape, np.float32) for shape in SIZES.shapes(n, n_tokens)]
                for n in range(SIZES.n_layers)
            ],
        ),
    )


def dsv4(session: SessionState) -> bytes:
    return b"".join(write_dsv4(session))


def dsvl(shard: Shard) -> bytes:
    return b"".join(write_dsvl(shard))


RAW, RAW_SHARD = dsv4(whole()), dsvl(split(whole(), SPAN))


def read(raw: bytes, **options) -> SessionState:
    return read_dsv4(raw, **{"sizes": SIZES, "n_ctx": CTX} | options)


def read_shard(raw: bytes, **options) -> Shard:
    defaults = {"sizes": SIZES, "layers": SPAN, "n_ctx": CTX, "n_tokens": 19}
    return read_dsvl(raw, **defaults | options)


READERS = {"DSV4": (read, RAW), "DSVL": (read_shard, RAW_SHARD)}
both = pytest.mark.parametrize(("reader", "raw"), READERS.values(), ids=READERS)


def changed(raw: bytes, word: int, value: int) -> bytes:
    return raw[: 4 * word] + value.to_bytes(4, "little") + raw[4 * word + 4 :]


def cut(session: SessionState, starts: list[int]) -> list[Shard]:
    return [
        split(session, LayerRange(start, end - 1))
        for start, end in itertools.pairwise([*starts, SIZES.n_layers])
    ]


lengths = st.integers(1, CTX - 1)
cuts = st.sets(st.integers(1, LAST)).map(lambda inner: [0, *sorted(inner)])


@given(n_tokens=lengths, seed=st.integers(0, 9))
def test_what_was_written_is_read(n_tokens, seed):
    written = whole(n_tokens, seed)
    got = read(dsv4(written))
    assert np.array_equal(got.tokens, written.tokens)
    assert np.array_equal(got.logits, written.logits)
    for mine, theirs in zip(got.cache.layers, written.cache.layers, strict=True):
        assert all(map(np.array_equal, mine, theirs))
    assert dsv4(got) == dsv4(written)


@given(n_tokens=lengths, starts=cuts)
def test_any_cut_travels_and_joins_to_the_same_bytes(n_tokens, starts):
    session = whole(n_tokens)
    shards = [
        read_shard(dsvl(shard), layers=shard.layer_range, n_tokens=n_tokens)
        for shard in cut(session, starts)
    ]
    again = join(shards, session.tokens.tolist(), session.logits)
    assert dsv4(again) == dsv4(session)


def test_a_shard_cut_from_what_was_joined_is_the_same_shard():
    session = join(cut(whole(), [0, 2, 3]), whole().tokens, whole().logits)
    assert dsvl(split(session, SPAN)) == RAW_SHARD


def test_reading_and_writing_copy_nothing():
    raw = np.frombuffer(RAW, np.uint8)
    got = read(RAW)
    tensors = [tensor for layer in got.cache.layers for tensor in layer]
    parts = [part for part in (got.tokens, got.logits, *tensors) if part.size]
    assert all(np.shares_memory(part, raw) for part in parts)
    pieces = [np.frombuffer(piece, np.uint8) for piece in write_dsv4(got)]
    assert sum(np.shares_memory(piece, raw) for piece in pieces) == len(parts)


def test_empty_slots_of_minus_infinity_are_read_as_finite_ones():
    session = whole()
    for tensors in session.cache.layers:
        for scores in (tensors[place] for place in (3, 6) if place < len(tensors)):
            scores[0] = -np.inf
    layers = read(dsv4(session)).cache.layers
    for layer, place in ((1, 3), (1, 6), (2, 3), (3, 3), (3, 6), (5, 3)):
        assert (layers[layer][place][0] == np.float32(-1e30)).all()
        assert np.array_equal(layers[layer][place][1:], session.cache.layers[layer][place][1:])


def test_tensors_in_any_memory_order_are_written_by_rows():
    session = whole()
    layers = [[np.asfortranarray(tensor) for tensor in layer] for layer in session.cache.layers]
    assert dsv4(replace(session, cache=replace(session.cache, layers=layers))) == RAW


def test_a_payload_fits_into_a_longer_context_but_not_into_a_shorter_one():
    assert dsv4(read(RAW, n_ctx=10 * CTX)) == RAW
    with pytest.raises(SnapshotError, match=r"ctx is 64, expected 1 to 63; start with .* 64 "):
        read(RAW, n_ctx=CTX - 1)


def test_a_full_session_needs_room_for_one_more_token():
    raw = dsv4(whole(CTX))
    with pytest.raises(SnapshotError, match=r"tokens is 64, expected 1 to 63; start with .* 65 "):
        read(raw)
    assert dsv4(read(raw, n_ctx=CTX + 1)) == raw


@pytest.mark.parametrize("field", ["prefill_cap", "raw_cap"])
def test_what_describes_the_writers_memory_may_be_larger_and_survives(field):
    raw = changed(RAW, DSV4.index(field), 8192)
    assert dsv4(read(raw)) == raw


BAD = {
    "magic": (0, ALL_ONES),
    "version": (0, 3, ALL_ONES),
    "ctx": (0, CTX + 1, ALL_ONES),
    "raw_cap": (0, 4),
    "raw_window": (0, 4, 6, ALL_ONES),
    "comp_cap": (0, 3, CTX // 4 + 3, ALL_ONES),
    "tokens": (0, CTX, 1 << 31, ALL_ONES),
    "layers": (0, 5, 7, ALL_ONES),
    "head width": (0, 4, ALL_ONES),
    "index head width": (0, 3, ALL_ONES),
    "vocab": (0, 12, ALL_ONES),
    "first layer": (0, 2, ALL_ONES),
    "last layer": (0, 3, ALL_ONES),
    "raw_live": (0, 4, 6, ALL_ONES),
}


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        (name, field, value)
        for name, fields in (("DSV4", DSV4), ("DSVL", DSVL))
        for field in fields
        for value in BAD.get(field, ())
    ],
)
def test_every_field_of_a_header_is_checked(name, field, value):
    reader, raw = READERS[name]
    word = (DSV4 if name == "DSV4" else DSVL).index(field)
    with pytest.raises(
        SnapshotError, match=f"{name} payload: {field} is {value}, expected"
    ) as caught:
        reader(changed(raw, word, value))
    assert caught.value.offset == 4 * word


@both
def test_fields_that_contradict_each_other_are_refused(reader, raw):
    with pytest.raises(SnapshotError, match="raw_live is 5, expected 3"):
        reader(changed(raw, 7, 3))
    with pytest.raises(SnapshotError, match="tokens is 19, expected 1 to 18"):
        reader(changed(raw, 2, 18))


@both
def test_every_row_count_is_checked(reader, raw):
    n_layers = SIZES.n_layers if reader is read else len(SPAN)
    first = 13 + 19 + SIZES.n_vocab if reader is read else 14
    for place, value in itertools.product(range(2 * n_layers), (0, 1, 3, 5, ALL_ONES)):
        broken = changed(raw, first + place, value)
        if broken == raw:
            continue
        layer = place % n_layers + (0 if reader is read else SPAN.start)
        kind = "compressed" if place < n_layers else "index"
        with pytest.raises(SnapshotError, match=f"{kind} rows of layer {layer}: got {value}"):
            reader(broken)


@both
def test_a_payload_of_any_other_length_is_refused(reader, raw):
    for length in range(len(raw)):
        with pytest.raises(SnapshotError, match=f"{length} bytes, expected"):
            reader(raw[:length])
    for extra in (1, 4, 1000):
        with pytest.raises(SnapshotError, match=f"{len(raw) + extra} bytes, expected {len(raw)};"):
            reader(raw + bytes(extra))


def test_a_token_outside_the_vocabulary_is_refused():
    with pytest.raises(SnapshotError, match=r"token id 11, expected 0 to 10"):
        read(changed(RAW, 13 + 4, SIZES.n_vocab))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_vocab": 12}, "vocab is 11, expected 12"),
        ({"width": 4}, "head width is 3, expected 4"),
        ({"index_width": 4}, "index head width is 2, expected 4"),
        ({"window": 6}, "raw_window is 5, expected 6"),
        ({"ratios": SIZES.ratios[1:]}, "layers is 6, expected 5"),
        ({"ratios": (4, *SIZES.ratios[1:])}, r"\d+ bytes, expected"),
    ],
)
def test_a_session_of_another_model_is_refused(change, message):
    with pytest.raises(SnapshotError, match=message):
        read(RAW, sizes=replace(SIZES, **change))


def test_a_shard_of_other_layers_or_another_session_is_refused():
    with pytest.raises(SnapshotError, match="first layer is 1, expected 0"):
        read_shard(RAW_SHARD, layers=LayerRange(0, 1))
    with pytest.raises(SnapshotError, match="tokens is 19, expected 20; it belongs to another"):
        read_shard(RAW_SHARD, n_tokens=20)
    with pytest.raises(SnapshotError, match="no DSVL payload"):
        read_shard(RAW)


@both
def test_huge_numbers_take_no_memory(reader, raw):
    limits = {"n_ctx": ALL_ONES}
    if reader is read_shard:
        limits["n_tokens"] = (1 << 32) - 2
    raw = changed(changed(raw, 2, ALL_ONES), 6, (1 << 30) + 1)
    raw = changed(raw, 7, (1 << 32) - 2)
    tracemalloc.start()
    with pytest.raises(SnapshotError, match="bytes, expected"):
        reader(raw, **limits)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def survives(reader, raw: bytes) -> None:
    """Whatever the bytes: a value or a SnapshotError, and no more memory than the bytes."""
    tracemalloc.start()
    try:
        reader(raw)
    except SnapshotError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 100_000 + len(raw)


@given(junk=st.binary(max_size=300))
def test_any_bytes(junk):
    for reader, _ in READERS.values():
        survives(reader, junk)


@both
@given(data=st.data())
def test_any_damaged_bytes(reader, raw, data):
    broken = bytearray(raw)
    position = st.integers(0, 200) | st.integers(0, len(raw) - 1)
    for at in data.draw(st.lists(position, min_size=1, max_size=8)):
        broken[at] ^= data.draw(st.integers(1, 255))
    survives(reader, bytes(broken[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))]))


def joined(*shards: Shard) -> SessionState:
    return join(shards, whole().tokens, whole().logits)


def part(start: int, end: int, **options) -> Shard:
    return split(whole(**options), LayerRange(start, end))


FOREIGN = replace(part(3, 5), sizes=replace(SIZES, n_vocab=12))


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([part(1, 5)], "shard of layers 1-5: first layer 1, expected 0"),
        ([part(0, 1), part(3, 5)], "shard of layers 3-5: first layer 3, expected 2"),
        ([part(0, 2), part(2, 5)], "shard of layers 2-5: first layer 2, expected 3"),
        ([part(3, 5), part(0, 2)], "shard of layers 3-5: first layer 3, expected 0"),
        ([part(0, 2)], "layers 3, expected 6"),
        ([part(0, 2), part(3, 5, n_tokens=20)], "shard of layers 3-5: tokens 20, expected 19"),
        (
            [part(0, 2), FOREIGN],
            r"shard of layers 3-5: model .*n_vocab=12.*, expected .*n_vocab=11",
        ),
        ([part(0, 2), part(3, 5, n_ctx=65)], "shard of layers 3-5: ctx 65, expected 64"),
    ],
)
def test_shards_that_make_up_no_session_are_not_joined(shards, message):
    with pytest.raises(SnapshotError, match=message):
        joined(*shards)


def test_shards_of_engines_with_other_rings_are_joined():
    ring = replace(Capacities.of(CTX, SIZES.window), raw_cap=48, prefill_cap=7)
    other = replace(part(3, 5), capacities=ring)
    assert dsv4(joined(part(0, 2), other)) == RAW


def test_a_value_holds_what_its_tokens_call_for():
    session = whole()
    cache = session.cache
    with pytest.raises(SnapshotError, match="tensors of 5 layers, expected 6"):
        replace(cache, layers=cache.layers[1:])
    with pytest.raises(SnapshotError, match=r"saved layer 0: .* expected \[\(5, 3\)\] after 19"):
        replace(cache, layers=cache.layers[::-1])
    with pytest.raises(SnapshotError, match=r"token ids \(18,\), expected \(19,\)"):
        replace(session, tokens=session.tokens[1:])
    with pytest.raises(SnapshotError, match=r"logits \(10,\), expected \(11,\)"):
        replace(session, logits=session.logits[1:])
