"""Payloads of plain keys and values: what was written is read, nothing broken gets through."""

import contextlib
import itertools
import struct
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.errors import SnapshotError
from ds4py.layer_range import LayerRange
from ds4py.snapshot import (
    KV_KINDS,
    KvKind,
    PlainLayer,
    PlainShard,
    PlainSizes,
    SessionState,
    join,
    read_shard,
    read_whole,
    shard_sizes,
    split,
    write_shard,
    write_whole,
)

SIZES = PlainSizes(model_id=0x80001234, n_layers=5, n_heads=2, width=12, n_vocab=11)
CTX = 64
SPAN = LayerRange(1, 2)
MIXED = ("f32", "bf16", "q8_0", "f16", "q8_0")
FIELDS = (
    *("magic", "version", "model id", "layers", "KV heads", "head width", "vocab", "tokens"),
    *("first layer", "last layer"),
)
HEAD = 4 * len(FIELDS)
ALL_ONES = (1 << 32) - 1


def layer(kind: KvKind, n_tokens: int, random: np.random.Generator) -> PlainLayer:
    """Any bits at all: they have no meaning here."""
    arrays = [
        np.frombuffer(random.bytes(dtype.itemsize * int(np.prod(shape))), dtype).reshape(shape)
        for dtype, shape in SIZES.arrays(kind, n_tokens)
    ]
    return PlainLayer(kind, arrays)


def whole(
    n_tokens: int = 9, seed: int = 0, kinds: Sequence[str] = MIXED
) -> SessionState[PlainShard]:
    random = np.random.default_rng(seed)
    return SessionState(
        tokens=random.integers(0, SIZES.n_vocab, n_tokens).astype(np.uint32),
        logits=random.standard_normal(SIZES.n_vocab, np.float32),
        cache=PlainShard(
            sizes=SIZES,
            layer_range=LayerRange(0, SIZES.n_layers - 1),
            n_tokens=n_tokens,
            layers=[layer(KV_KINDS[kind], n_tokens, random) for kind in kinds],
        ),
    )


def dpkv(session: SessionState[PlainShard]) -> bytes:
    return b"".join(write_whole(session))


def dpkl(shard: PlainShard) -> bytes:
    return b"".join(write_shard(shard))


RAW, RAW_SHARD = dpkv(whole()), dpkl(split(whole(), SPAN))


def read(raw: bytes, **options) -> SessionState[PlainShard]:
    return read_whole(raw, **{"sizes": SIZES, "n_ctx": CTX} | options)


def read_part(raw: bytes, **options) -> PlainShard:
    defaults = {"sizes": SIZES, "layers": SPAN, "n_ctx": CTX, "n_tokens": 9}
    return read_shard(raw, **defaults | options)


READERS = {"DPKV": (read, RAW), "DPKL": (read_part, RAW_SHARD)}
both = pytest.mark.parametrize(("reader", "raw"), READERS.values(), ids=READERS)
kinds = st.lists(st.sampled_from(sorted(KV_KINDS)), min_size=5, max_size=5)


def changed(raw: bytes, at: int, value: int) -> bytes:
    return raw[:at] + value.to_bytes(4, "little") + raw[at + 4 :]


def cut(session: SessionState[PlainShard], starts: Sequence[int]) -> list[PlainShard]:
    pairs = itertools.pairwise([*starts, SIZES.n_layers])
    return [split(session, LayerRange(start, end - 1)) for start, end in pairs]


@given(n_tokens=st.integers(1, CTX - 1), seed=st.integers(0, 9), kinds=kinds)
def test_what_was_written_is_read(n_tokens, seed, kinds):
    written = whole(n_tokens, seed, kinds)
    got = read(dpkv(written))
    assert np.array_equal(got.tokens, written.tokens)
    assert np.array_equal(got.logits, written.logits)
    for mine, theirs in zip(got.cache.layers, written.cache.layers, strict=True):
        assert mine.kind == theirs.kind
        assert [a.tobytes() for a in mine.arrays] == [a.tobytes() for a in theirs.arrays]
    assert dpkv(got) == dpkv(written)


@given(
    n_tokens=st.integers(1, CTX - 1),
    kinds=kinds,
    starts=st.sets(st.integers(1, 4)).map(lambda inner: [0, *sorted(inner)]),
)
def test_any_cut_travels_and_joins_to_the_same_bytes(n_tokens, kinds, starts):
    session = whole(n_tokens, kinds=kinds)
    shards = [
        read_part(dpkl(shard), layers=shard.layer_range, n_tokens=n_tokens)
        for shard in cut(session, starts)
    ]
    assert dpkv(join(shards, session.tokens.tolist(), session.logits)) == dpkv(session)


def test_every_byte_stands_where_the_description_says():
    session = whole(2)
    rows = [array.tobytes() for part in session.cache.layers for array in part.arrays]
    head = struct.pack("<10I", 0x564B5044, 1, 0x80001234, 5, 2, 12, 11, 2, 0, 4)
    types = struct.pack("<5I", 1, 3, 4, 2, 4)
    told = [session.tokens.tobytes(), session.logits.tobytes(), types, *rows]
    assert dpkv(session) == head + b"".join(told)
    # of a layer: 2 x 2 heads x 2 tokens x 12 values, and of 8-bit codes a scale for each 4
    per_row = {"f32": 48, "f16": 24, "bf16": 24, "q8_0": 12 + 4 * 3}
    assert len(dpkv(session)) == 40 + 4 * 2 + 4 * 11 + 4 * 5 + 8 * sum(per_row[k] for k in MIXED)
    shard = struct.pack("<10I", 0x4C4B5044, 1, 0x80001234, 5, 2, 12, 11, 2, 1, 2)
    assert dpkl(split(session, SPAN)) == shard + types[4:12] + b"".join(rows[1:4])


@given(n_tokens=st.integers(1, CTX - 1), kind=st.sampled_from(sorted(KV_KINDS)))
def test_the_size_of_a_stages_shard_is_known_but_for_its_type(n_tokens, kind):
    shard = split(whole(n_tokens, kinds=[kind] * 5), SPAN)
    sizes = shard_sizes(SIZES, SPAN, n_tokens)
    assert len(dpkl(shard)) in sizes
    assert sizes == sorted(sizes)
    assert len(sizes) <= 3  # both 16-bit types need the same


def test_reading_and_writing_copy_nothing():
    raw = np.frombuffer(RAW, np.uint8)
    got = read(RAW)
    parts = [got.tokens, got.logits, *(a for part in got.cache.layers for a in part.arrays)]
    assert all(np.shares_memory(part, raw) for part in parts)
    pieces = [np.frombuffer(piece, np.uint8) for piece in write_whole(got)]
    assert sum(np.shares_memory(piece, raw) for piece in pieces) == len(parts)


def test_arrays_in_any_memory_order_are_written_by_rows():
    session = whole()
    layers = [
        replace(part, arrays=[np.asfortranarray(array) for array in part.arrays])
        for part in session.cache.layers
    ]
    assert dpkv(replace(session, cache=replace(session.cache, layers=layers))) == RAW


def test_a_session_needs_room_for_one_more_token_and_nothing_else():
    raw = dpkv(whole(CTX))
    with pytest.raises(SnapshotError, match=r"tokens is 64, expected 1 to 63; start with .* 65 "):
        read(raw)
    for n_ctx in (CTX + 1, 10 * CTX):
        assert dpkv(read(raw, n_ctx=n_ctx)) == raw


BAD = {
    "magic": (0, ALL_ONES),
    "version": (0, 2, ALL_ONES),
    "model id": (0, 0x80001235, ALL_ONES),
    "layers": (0, 4, 6, ALL_ONES),
    "KV heads": (0, 1, 3, ALL_ONES),
    "head width": (0, 11, 13, ALL_ONES),
    "vocab": (0, 10, 12, ALL_ONES),
    "tokens": (0, CTX, ALL_ONES),
    "first layer": (2, 5, ALL_ONES),
    "last layer": (0, 3, 5, ALL_ONES),
}


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [(name, field, value) for name in READERS for field in FIELDS for value in BAD[field]],
)
def test_every_field_of_a_header_is_checked(name, field, value):
    reader, raw = READERS[name]
    at = 4 * FIELDS.index(field)
    with pytest.raises(
        SnapshotError, match=f"{name} payload: {field} is {value}, expected"
    ) as caught:
        reader(changed(raw, at, value))
    assert caught.value.offset == at


@both
def test_every_flipped_bit_of_a_header_is_noticed(reader, raw):
    for bit in range(8 * HEAD):
        broken = bytearray(raw)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SnapshotError):
            reader(bytes(broken))


@both
def test_another_type_of_a_layer_is_another_size_or_another_type(reader, raw):
    first = HEAD if reader is read_part else HEAD + 4 * (9 + SIZES.n_vocab)
    layers = SPAN if reader is read_part else LayerRange(0, 4)
    for place, layer_ in enumerate(layers.indices):
        for code in (0, 5, 255, ALL_ONES):
            with pytest.raises(SnapshotError, match=f"type of layer {layer_}: got {code}, expec"):
                reader(changed(raw, first + 4 * place, code))
    with pytest.raises(SnapshotError, match=r"\d+ bytes, expected \d+;"):
        reader(changed(raw, first, 4 if reader is read else 1))


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
        read(changed(RAW, HEAD + 4, SIZES.n_vocab))


def test_a_shard_of_other_layers_or_another_session_is_refused():
    with pytest.raises(SnapshotError, match="first layer is 1, expected 0; ask for layers 0-1"):
        read_part(RAW_SHARD, layers=LayerRange(0, 1))
    with pytest.raises(SnapshotError, match="tokens is 9, expected 10; it belongs to another"):
        read_part(RAW_SHARD, n_tokens=10)
    with pytest.raises(SnapshotError, match="no DPKL payload"):
        read_part(RAW)
    with pytest.raises(SnapshotError, match="no DPKV payload"):
        read(RAW_SHARD)


@both
def test_huge_numbers_take_no_memory(reader, raw):
    limits = {"n_ctx": ALL_ONES}
    if reader is read_part:
        limits["n_tokens"] = ALL_ONES - 1
    tracemalloc.start()
    with pytest.raises(SnapshotError, match="bytes, expected"):
        reader(changed(raw, 4 * FIELDS.index("tokens"), ALL_ONES - 1), **limits)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


@both
@given(data=st.data())
def test_any_damaged_bytes_give_a_value_or_an_error(reader, raw, data):
    broken = bytearray(raw)
    position = st.integers(0, 200) | st.integers(0, len(raw) - 1)
    for at in data.draw(st.lists(position, min_size=1, max_size=8)):
        broken[at] ^= data.draw(st.integers(1, 255))
    length = data.draw(st.integers(0, len(raw)) | st.just(len(raw)))
    with contextlib.suppress(SnapshotError):
        reader(bytes(broken[:length]))


def part(start: int, end: int, **options) -> PlainShard:
    return split(whole(**options), LayerRange(start, end))


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([part(1, 4)], "shard of layers 1-4: first layer 1, expected 0"),
        ([part(0, 1), part(3, 4)], "shard of layers 3-4: first layer 3, expected 2"),
        ([part(0, 2)], "layers 3, expected 5"),
        ([part(0, 2), part(3, 4, n_tokens=10)], "shard of layers 3-4: tokens 10, expected 9"),
        (
            [part(0, 2), replace(part(3, 4), sizes=replace(SIZES, n_vocab=12))],
            r"shard of layers 3-4: model .*n_vocab=12.*, expected .*n_vocab=11",
        ),
    ],
)
def test_shards_that_make_up_no_session_are_not_joined(shards, message):
    with pytest.raises(SnapshotError, match=message):
        join(shards, whole().tokens, whole().logits)


def test_a_value_holds_what_its_tokens_call_for():
    cache = whole().cache
    with pytest.raises(SnapshotError, match="rows of 4 layers, expected 5"):
        replace(cache, layers=cache.layers[1:])
    with pytest.raises(SnapshotError, match=r"saved layer 0: f32 rows .* after 10 tokens"):
        replace(cache, n_tokens=10)
    bare = replace(cache.layers[2], arrays=cache.layers[2].arrays[:1])
    with pytest.raises(SnapshotError, match="saved layer 2: q8_0 rows"):
        replace(cache, layers=[*cache.layers[:2], bare, *cache.layers[3:]])
    other = PlainLayer(KV_KINDS["bf16"], cache.layers[0].arrays)
    with pytest.raises(SnapshotError, match="saved layer 0: bf16 rows"):
        replace(cache, layers=[other, *cache.layers[1:]])
