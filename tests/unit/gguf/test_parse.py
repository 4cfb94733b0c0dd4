"""The parser: every claim of a file is checked, every refusal says what is wrong."""

import struct
import tracemalloc
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds4py.errors import GgufError
from ds4py.gguf import kinds, parse
from ds4py.gguf.parse import ParsedGguf, parse_gguf, shown
from tests.support.toys import gguf_bytes, tensor


def parsed(raw: bytes) -> ParsedGguf:
    return parse_gguf(memoryview(raw))


@cache
def small() -> bytes:
    """A valid file with every kind of value and tensor."""
    metadata = {
        "general.architecture": "llama",
        "an.int": -5,
        "a.float": 0.5,
        "a.bool": True,
        "texts": ["one", "two", "\udcff"],
        "numbers": np.arange(5, dtype=np.int16),
        "flags": np.array([True, False]),
    }
    tensors = [
        tensor("a", (32, 2), "Q4_1", fill=1),
        tensor("strange", (64,), 250),
        tensor("b", (3, 2, 2), "F16", fill=2),
        tensor("scalar", (), "F32"),
    ]
    return gguf_bytes(metadata, tensors)


def entry(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    head = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def with_directory(*entries: bytes, data: int = 256, keys: bytes = b"", n_keys: int = 0) -> bytes:
    """A file of hand-made directory entries and `data` bytes of weights."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), n_keys) + keys + b"".join(entries)
    return head + bytes(-len(head) % 32) + bytes(data)


def with_key(kind: int, payload: bytes, key: bytes = b"k") -> bytes:
    return with_directory(
        keys=struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + payload, n_keys=1, data=0
    )


def test_a_directory_entry_knows_its_shape_place_and_type():
    info = parsed(small()).tensors[0]
    assert (info.name, info.type_name, info.dims, info.shape) == ("a", "Q4_1", (32, 2), (2, 32))
    assert (info.n_bytes, info.shard, info.is_known) == (40, 0, True)
    assert small()[info.offset : info.offset + 40] == b"\x01" * 40


def test_version_2_reads_the_same():
    old = small()[:4] + struct.pack("<I", 2) + small()[8:]
    assert parsed(old).version == 2
    assert parsed(old).tensors == parsed(small()).tensors


def test_text_that_is_no_utf8_survives_unchanged():
    texts = parsed(small()).metadata["texts"]
    assert texts == ["one", "two", "\udcff"]
    assert texts[2].encode("utf-8", "surrogateescape") == b"\xff"


def test_an_unknown_type_reaches_up_to_the_next_tensor():
    strange, after = parsed(small()).tensors[1:3]
    assert not strange.is_known
    assert strange.type_name == "type 250"
    assert strange.offset + strange.n_bytes == after.offset


def test_an_unknown_type_at_the_end_reaches_up_to_the_end():
    raw = with_directory(entry(b"x", (7,), 250, 0), data=100)
    assert parsed(raw).tensors[0].n_bytes == 100


def test_tensors_may_stand_in_another_order_than_their_bytes():
    raw = with_directory(entry(b"late", (8,), 0, 32), entry(b"early", (8,), 0, 0), data=64)
    late, early = parsed(raw).tensors
    assert late.name == "late"
    assert late.offset - early.offset == 32


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "GGUF version 1 .* convert the model again"),
        (b"GGUF" + struct.pack("<I", 4) + bytes(16), "GGUF version 4 .* update ds4py"),
        (b"GGUF" + struct.pack("<I", 0) + bytes(16), "GGUF version 0"),
        (b"GGUF", "cut off inside the header"),
        (b"GGUF\3\0\0\0\0\0", "cut off inside the header"),
        (b"GGU", "begins with b'GGU'"),
        (b"<html>", "HTML page"),
        (with_key(13, b""), "metadata key k: value type 13"),
        (with_key(7, b"\x02"), "got 2 for a boolean"),
        (with_key(9, struct.pack("<IQ", 7, 2) + b"\0\3"), "neither 0 nor 1"),
        (with_key(9, struct.pack("<IQ", 9, 1) + bytes(16)), "an array inside an array"),
        (with_key(9, struct.pack("<IQ", 0, 1 << 60)), "claims 1152921504606846976 items"),
        (with_key(9, struct.pack("<IQ", 8, 1000)), "metadata key k: the array of 1000 items"),
        (with_key(9, struct.pack("<IQ", 12, 40) + bytes(150)), "the array of 40 items"),
        (with_key(8, struct.pack("<Q", 1 << 40)), "claims 1099511627776 bytes"),
        (with_key(8, struct.pack("<Q", 1000)), "cut off inside metadata key k"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 50), "claims 1125899906842624 metadata keys"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 50, 0), "claims 1125899906842624 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1000), "the list of 1000 metadata keys"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1000, 0), "the list of 1000 tensors"),
        (with_key(4, bytes(4), b"general.alignment"), "got 0, expected a power of two"),
        (with_key(4, b"\x30\0\0\0", b"general.alignment"), "got 48, expected a power of two"),
        (with_key(7, b"\1", b"general.alignment"), "got True, expected a power of two"),
        (with_key(10, struct.pack("<Q", 1 << 40), b"general.alignment"), "got 1099511627776"),
        (with_directory(entry(b"x", (1,) * 5, 0, 0)), "tensor x: got 5 dimensions"),
        (with_directory(entry(b"x", (4, 0), 0, 0)), r"tensor x: got dimensions \[4, 0\]"),
        (with_directory(entry(b"x", (33,), 8, 0)), "rows of 33 values, expected a multiple of 32"),
        (with_directory(entry(b"x", (1 << 40,) * 4, 0, 0)), "is impossible"),
        (with_directory(entry(b"x", (8,), 0, (1 << 64) - 32)), "is impossible"),
        (with_directory(entry(b"x", (8,), 0, 16)), "offset 16 is not a multiple of 32"),
        (
            with_directory(entry(b"x", (16,), 0, 0), entry(b"y", (8,), 0, 32)),
            "tensor x: its 64 bytes run into the next tensor",
        ),
        (
            with_directory(entry(b"x", (1,), 250, 0), entry(b"y", (8,), 0, 0)),
            "tensor x: its 0 bytes run into the next tensor",
        ),
        (
            with_directory(entry(b"x", (8,), 0, 0), entry(b"x", (8,), 0, 32)),
            "tensor x: its name stands in the directory twice",
        ),
        (with_directory(entry(b"x", (1 << 20,), 0, 0)), "cut off: tensor x .* 4194048 bytes"),
        (with_directory(entry(b"x", (8,), 0, 1 << 20)), "cut off: tensor x"),
        (with_directory(entry(b"x", (8,), 250, 1 << 20)), "cut off: tensor x"),
    ],
)
def test_a_false_claim_is_refused_with_its_reason(raw: bytes, words: str):
    with pytest.raises(GgufError, match=words):
        parsed(raw)


def test_a_key_that_stands_there_twice_is_refused():
    key = struct.pack("<Q", 1) + b"k" + struct.pack("<IB", 0, 1)
    with pytest.raises(GgufError, match="metadata key k stands there twice"):
        parsed(with_directory(keys=key * 2, n_keys=2))


def test_a_file_without_tensors_is_a_vocabulary():
    assert parsed(gguf_bytes({"k": 1})).tensors == ()


def test_a_file_without_its_last_byte_names_the_tensor_and_what_is_missing():
    raw = gguf_bytes({}, [tensor("first", (8,)), tensor("last", (8,))])
    with pytest.raises(GgufError, match=r"tensor last is the first .*, 1 bytes are missing"):
        parsed(raw[:-1])


def test_half_a_file_names_the_first_tensor_that_is_cut():
    raw = gguf_bytes({}, [tensor(name, (256,)) for name in "abcd"])
    data = parsed(raw).data_offset
    cut = data + (len(raw) - data) // 2 + 1
    missing = len(raw) - cut
    with pytest.raises(GgufError, match=f"tensor c is the first .* {missing} bytes are missing"):
        parsed(raw[:cut])


def test_missing_padding_at_the_end_does_no_harm():
    raw = gguf_bytes({}, [tensor("x", (1,))])
    assert parsed(raw[:-28]).tensors[0].n_bytes == 4


def test_names_from_a_file_are_shown_short_and_without_control_characters():
    assert shown("blk.0.attn_q.weight") == "blk.0.attn_q.weight"
    assert shown("\x1b[31mred\n") == r"'\x1b[31mred\n'"
    assert len(shown("x" * 10_000)) == 80


def refusal(raw: bytes) -> str:
    """The sentence with which bytes are refused; any error of another kind comes through."""
    try:
        parsed(raw)
    except GgufError as error:
        return str(error)
    return "accepted"


def check_total(raw: bytes) -> None:
    """Parsing gives a value or one printable `GgufError`, and takes little memory."""
    tracemalloc.start()
    try:
        sentence = refusal(raw)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sentence.isprintable()
    assert peak < 200_000 + 64 * len(raw)


@given(st.binary(max_size=400))
def test_any_bytes_give_an_error(raw: bytes):
    check_total(raw)


@given(st.binary(max_size=400), st.integers(0, 9), st.integers(0, 9))
def test_any_bytes_after_a_good_header_give_a_value_or_an_error(tail: bytes, n: int, k: int):
    check_total(b"GGUF" + struct.pack("<IQQ", 3, n, k) + tail)


@settings(max_examples=400)
@given(st.integers(0, len(small()) - 1), st.integers(0, 255))
@example(8, 255)
@example(23, 255)
def test_one_mutated_byte_gives_a_value_or_an_error(position: int, value: int):
    raw = bytearray(small())
    raw[position] = value
    check_total(bytes(raw))


def test_every_byte_of_the_front_may_be_wrong_in_the_worst_way():
    front = parsed(small()).data_offset
    for position in range(front):
        for value in (0x00, 0x7F, 0x80, 0xFF):
            raw = bytearray(small())
            raw[position] = value
            assert refusal(bytes(raw)).isprintable()


def test_every_truncation_is_refused():
    needed = max(info.offset + info.n_bytes for info in parsed(small()).tensors)
    for length in range(needed):
        with pytest.raises(GgufError):
            parsed(small()[:length])


def test_memory_follows_the_bytes_that_are_there_not_the_claim():
    raw = with_key(9, struct.pack("<IQ", kinds.KIND_STRING, parse.MAX_ARRAY_ITEMS) + bytes(4096))
    check_total(raw)
