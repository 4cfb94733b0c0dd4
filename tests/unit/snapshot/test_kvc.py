"""KVC files as bytes: ds4's layout to the byte, and nothing damaged gets through."""

import tracemalloc
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.errors import SnapshotError
from ds4py.snapshot.kvc import (
    ABI_DS4,
    ABI_OWN,
    HEADER_BYTES,
    MAX_BLOCK_BYTES,
    SEAL_BYTES,
    Flag,
    KvcHeader,
    Reason,
    Seal,
    check_body,
    crc_of,
    read_seal,
    read_trailer,
    use_patches,
    write_trailer,
)

# docs/spec/server-and-cli.md#kvc, byte by byte
BY_HAND = bytes.fromhex(
    "4b5643 01 02 03 05 01"  # KVC, version 1, 2 bits, evict, tool map + thinking key, Pro
    "00080000 07000000 00800000"  # 2048 tokens, 7 hits, context 32768
    "02 000000"  # payload ABI 2, reserved
    "0068e76900000000 0168e76900000000"  # created, last used
    "0000000001000000"  # 4 GiB of payload
    "05000000"  # bytes of text
)
HEADER = KvcHeader(
    n_tokens=2048,
    ctx=32768,
    payload_bytes=1 << 32,
    key_bytes=5,
    created=0x69E76800,
    last_used=0x69E76801,
    hits=7,
    reason=Reason.EVICT,
    flags=Flag.TOOL_MAP | Flag.THINKING_VISIBLE,
    quant_bits=2,
    model_id=1,
    abi=ABI_DS4,
)
TOOLS = {b"call_1": b"<call>\xff\x00</call>", "tööl".encode(): b""}
TOOLS_BY_HAND = (
    b"KTM\x01\x02\x00\x00\x00"
    + (b"\x06\x00\x00\x00\x0f\x00\x00\x00" + b"call_1" + b"<call>\xff\x00</call>")
    + (b"\x06\x00\x00\x00\x00\x00\x00\x00" + "tööl".encode())
)
SEAL = Seal(model_id=0x8ABCDEF0, model="0123456789abcdef" * 2, tokenizer="bpe", body_crc=77)

u8, u32, u64 = (st.integers(0, (1 << bits) - 1) for bits in (8, 32, 64))
headers = st.builds(
    KvcHeader,
    **dict.fromkeys(("n_tokens", "ctx", "key_bytes", "hits"), u32),
    **dict.fromkeys(("payload_bytes", "created", "last_used"), u64),
    **dict.fromkeys(("reason", "flags", "quant_bits", "model_id", "abi"), u8),
)
tool_maps = st.dictionaries(st.binary(min_size=1, max_size=256), st.binary(max_size=40), max_size=5)
names = st.text("0123456789abcdef", max_size=32)
seals = st.builds(Seal, model_id=u32, model=names, tokenizer=names, body_crc=u32)


def tools(header: KvcHeader, *, on: bool) -> KvcHeader:
    return replace(header, flags=header.flags & 0xFE | on)


def test_the_header_is_ds4s_to_the_byte():
    assert HEADER.encode() == BY_HAND
    assert KvcHeader.decode(BY_HAND) == HEADER
    assert len(BY_HAND) == HEADER_BYTES == 52
    assert (HEADER.payload_at, HEADER.trailer_at) == (57, 57 + (1 << 32))


@given(headers)
def test_a_header_comes_back(header):
    assert KvcHeader.decode(header.encode() + b"text") == header


@pytest.mark.parametrize("field", ["n_tokens", "key_bytes", "reason", "payload_bytes"])
def test_a_header_that_does_not_fit_is_refused(field):
    with pytest.raises(SnapshotError, match="does not fit its fields"):
        replace(HEADER, **{field: 1 << 64}).encode()


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (BY_HAND[:51], "51 bytes, expected at least 52"),
        (b"", "0 bytes"),
        (b"KVD" + BY_HAND[3:], r"b'KVD' version 1, expected b'KVC' version 1"),
        (b"KVC\x02" + BY_HAND[4:], "version 2, expected"),
    ],
)
def test_what_is_no_header(raw, why):
    with pytest.raises(SnapshotError, match=why):
        KvcHeader.decode(raw)


def test_a_ds4_reader_finds_the_tool_map_directly_behind_the_payload():
    assert write_trailer(BY_HAND, TOOLS, None) == TOOLS_BY_HAND
    assert write_trailer(BY_HAND, TOOLS, SEAL)[: len(TOOLS_BY_HAND)] == TOOLS_BY_HAND
    without = tools(HEADER, on=False).encode()
    assert write_trailer(without, TOOLS, None) == b""
    assert len(write_trailer(without, TOOLS, SEAL)) == SEAL_BYTES


def test_the_seal_to_the_byte():
    body = b"DS4P\x01\0\0\0" + b"\xf0\xde\xbc\x8a" + b"\x4d\0\0\0"
    body += b"0123456789abcdef" * 2 + b"bpe".ljust(32, b"\0")
    unused = BY_HAND[:12] + bytes(4) + BY_HAND[16:32] + bytes(8) + BY_HAND[40:]
    crc = zlib.crc32(unused + TOOLS_BY_HAND + body).to_bytes(4, "little")
    assert write_trailer(BY_HAND, TOOLS, SEAL)[len(TOOLS_BY_HAND) :] == body + crc


@given(headers, tool_maps, st.none() | seals)
def test_a_trailer_comes_back(header, tool_map, seal):
    header = tools(header, on=bool(tool_map))
    if seal is None:
        header = replace(header, abi=ABI_DS4)
    raw = header.encode()
    trailer = read_trailer(raw, write_trailer(raw, tool_map, seal))
    assert (trailer.tool_map, trailer.seal) == (tool_map, seal)


def test_readers_count_in_place_and_the_seal_still_holds():
    raw = bytearray(BY_HAND)
    for at, patch in use_patches(8, 1_800_000_000):
        raw[at : at + len(patch)] = patch
    assert KvcHeader.decode(raw) == replace(HEADER, hits=8, last_used=1_800_000_000)
    assert read_trailer(raw, write_trailer(BY_HAND, TOOLS, SEAL)).tool_map == TOOLS
    assert use_patches(1 << 32, 0)[0] == (12, b"\xff\xff\xff\xff")


@given(st.data())
def test_no_flipped_bit_and_no_cut_of_a_sealed_trailer_gets_through(data):
    raw, trailer = bytearray(BY_HAND), bytearray(write_trailer(BY_HAND, TOOLS, SEAL))
    if data.draw(st.booleans()):
        bit = data.draw(st.integers(0, 8 * len(trailer) - 1))
        trailer[bit // 8] ^= 1 << bit % 8
    else:
        end = data.draw(st.integers(0, len(trailer) - 1).filter(lambda n: n != len(TOOLS_BY_HAND)))
        del trailer[end:]
    with pytest.raises(SnapshotError):
        read_trailer(raw, trailer)


@given(st.integers(0, 8 * HEADER_BYTES - 1))
def test_no_flipped_bit_of_the_header_gets_through_but_of_use(bit):
    raw = bytearray(BY_HAND)
    raw[bit // 8] ^= 1 << bit % 8
    trailer = write_trailer(BY_HAND, TOOLS, SEAL)
    if bit // 8 in {*range(12, 16), *range(32, 40)}:
        assert read_trailer(raw, trailer).tool_map == TOOLS
    else:
        with pytest.raises(SnapshotError):
            read_trailer(raw, trailer)


@given(st.binary(max_size=200), st.booleans())
def test_whatever_stands_behind_the_payload_is_read_or_refused(trailer, magic):
    trailer = TOOLS_BY_HAND[:8] + trailer if magic else trailer
    try:
        found = read_trailer(BY_HAND, trailer)
    except SnapshotError:
        return
    assert write_trailer(BY_HAND, found.tool_map, found.seal) == trailer


@pytest.mark.parametrize(
    ("trailer", "why"),
    [
        (TOOLS_BY_HAND + b"x", "1 bytes behind the tool map"),
        (TOOLS_BY_HAND[:-1], "bytes left 5"),
        (b"KTM\x01" + b"\x81\x1a\x06\x00", "entries 400001, expected 0 to 400000"),
        (b"KTM\x01\x01\0\0\0" + bytes(8), "bytes of an id 0"),
        (b"KTM\x01\x01\0\0\0" + b"\x01\x01\0\0" + bytes(4), "bytes of an id 257"),
        (b"KTM\x01\x01\0\0\0" + b"\x01\0\0\0" + b"\x01\0\0\x20", f"block {MAX_BLOCK_BYTES + 1}"),
        (b"KTM\x01\x01\0\0\0" + b"\x01\0\0\0" + b"\0\0\0\x20" + b"i", "bytes left 0"),
        (b"KTM\x02\0\0\0\0", "b'KTM' version 2"),
        (b"", "bytes left 0"),
    ],
)
def test_what_is_no_tool_map(trailer, why):
    tracemalloc.start()
    with pytest.raises(SnapshotError, match=why):
        read_trailer(BY_HAND, trailer)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_bytes_that_nothing_accounts_for_are_refused():
    with pytest.raises(SnapshotError, match="3 bytes behind the payload, expected none"):
        read_trailer(tools(HEADER, on=False).encode(), b"abc")


def test_payloads_of_our_own_kind_need_a_seal():
    raw = replace(tools(HEADER, on=False), abi=ABI_OWN).encode()
    assert read_trailer(raw, write_trailer(raw, {}, SEAL)).seal == SEAL
    with pytest.raises(SnapshotError, match="payload ABI 64 without a seal"):
        read_trailer(raw, b"")


def test_what_no_reader_would_believe_is_not_written():
    for bad in ({b"": b"x"}, {b"i" * 257: b"x"}, {i.to_bytes(4): b"" for i in range(400_001)}):
        with pytest.raises(SnapshotError, match="tool map: "):
            write_trailer(BY_HAND, bad, SEAL)


def test_fingerprints_have_their_room():
    for model in ("f" * 33, "é"):
        with pytest.raises(SnapshotError, match="at most 32 ASCII"):
            replace(SEAL, model=model)


def test_a_seal_is_found_at_the_end_only():
    trailer = write_trailer(BY_HAND, TOOLS, SEAL)
    assert read_seal(trailer) == SEAL
    assert read_seal(trailer[-SEAL_BYTES:]) == SEAL
    assert read_seal(trailer[-SEAL_BYTES + 1 :]) is None
    assert read_seal(trailer + b"\0") is None


@given(st.binary(min_size=1, max_size=50), st.binary(min_size=1, max_size=50), st.data())
def test_a_flipped_bit_of_text_or_payload_is_noticed(key, payload, data):
    seal = replace(SEAL, body_crc=crc_of([key, payload[:3], memoryview(payload)[3:]]))
    check_body(seal, key, payload)
    damaged = bytearray(key + payload)
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(SnapshotError, match="checksum of text and payload"):
        check_body(seal, damaged[: len(key)], damaged[len(key) :])
