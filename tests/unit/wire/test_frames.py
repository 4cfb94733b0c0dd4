"""Framing: any cut of the bytes, any nonsense, no allocation over the limit."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.errors import LocalProtocolError, RemoteProtocolError
from ds4py.wire.frames import (
    EXT_HELLO,
    FrameReader,
    FrameType,
    coordinator_limits,
    encode_frame,
    encode_header,
    hello_limits,
    pack,
    plain_limits,
    printable,
    type_name,
    wire_text,
    worker_limits,
)
from tests.strategies import attempt, cuts, feed, joined, read_frames, u32

LIMITS = {FrameType.ERROR: 100, FrameType.WORK: 5000}
frames = st.lists(
    st.tuples(st.sampled_from([2, 3, 77, 2**32 - 1]), st.binary(max_size=100)), max_size=6
)


class Allocator:
    """Remembers what was asked for."""

    def __init__(self):
        self.sizes = []

    def __call__(self, size):
        self.sizes.append(size)
        return bytearray(size + 3)  # a pool may lend more than was asked for


def wire(*sent):
    return b"".join(joined(encode_frame(kind, body)) for kind, body in sent)


@given(frames, cuts)
def test_any_chunking_gives_the_same_frames(sent, sizes):
    got = [(f.type, bytes(f.body)) for f in feed(FrameReader(LIMITS), wire(*sent), sizes)]
    assert got == [(kind, body if kind in LIMITS else b"") for kind, body in sent]


@given(frames.filter(bool), st.data())
def test_a_strict_prefix_gives_none_of_the_unfinished_frame(sent, data):
    stream = wire(*sent)
    last = len(wire(sent[-1]))
    cut = data.draw(st.integers(len(stream) - last, len(stream) - 1))
    reader = FrameReader(LIMITS)
    assert len(list(feed(reader, stream[:cut]))) == len(sent) - 1
    assert reader.mid_frame == (cut > len(stream) - last)


@given(st.binary(max_size=200), cuts)
def test_any_bytes_give_frames_or_a_remote_error(noise, sizes):
    allocate = Allocator()
    _, kind = attempt(lambda: list(feed(FrameReader(LIMITS, allocate), noise, sizes)))
    assert kind in {"", "F-MAGIC", "F-SIZE"}
    assert all(size <= 5000 for size in allocate.sizes)


@given(st.integers(0, 5) | u32, st.integers(0, 6000) | u32)
def test_any_header_allocates_within_its_limit_or_not_at_all(kind, size):
    allocate = Allocator()
    header = encode_header(kind, size)
    _, fault = attempt(lambda: list(feed(FrameReader(LIMITS, allocate), header)))
    limit = LIMITS.get(kind)
    assert fault == ("F-SIZE" if limit is not None and size > limit else "")
    assert allocate.sizes == ([size] if limit is not None and 0 < size <= limit else [])


def test_one_byte_over_the_limit_is_refused_before_allocation():
    allocate = Allocator()
    with pytest.raises(
        RemoteProtocolError, match="WORK body of 5001 bytes, at most 5000"
    ) as caught:
        list(feed(FrameReader(LIMITS, allocate), encode_header(3, 5001)))
    assert caught.value.kind == "F-SIZE"
    assert allocate.sizes == []


def test_a_body_at_the_limit_is_accepted():
    (frame,) = read_frames(wire((3, bytes(5000))), LIMITS)
    assert len(frame.body) == 5000


def test_wrong_magic_is_reported_after_four_bytes():
    reader = FrameReader(LIMITS)
    assert list(feed(reader, b"DS4")) == []
    with pytest.raises(RemoteProtocolError, match="b'DS4E', expected b'DS4D'; check") as caught:
        list(feed(reader, b"E"))
    assert caught.value.kind == "F-MAGIC"


@pytest.mark.parametrize(
    ("start", "guess"),
    [(b"GET / HTTP/1.1\r\n", "HTTP on a DS4D"), (b"\x16\x03\x01\x02\x00\x01", "TLS on a DS4D")],
)
def test_the_text_says_when_another_protocol_knocks(start, guess):
    with pytest.raises(RemoteProtocolError, match=guess):
        list(feed(FrameReader(LIMITS), start))


def test_an_unknown_type_is_discarded_through_a_small_buffer_and_reported():
    allocate = Allocator()
    reader = FrameReader(LIMITS, allocate)
    assert list(feed(reader, encode_header(99, 10_000))) == []
    lent = []
    for part in range(0, 10_000, 2500):
        assert reader.mid_frame
        lent.append(len(reader.writable()))
        frames = list(feed(reader, bytes(min(2500, 10_000 - part))))
    assert [(f.type, f.discarded, len(f.body)) for f in frames] == [(99, True, 0)]
    assert max(lent) == 4096
    assert allocate.sizes == []
    (after,) = feed(reader, wire((2, b"next")))
    assert bytes(after.body) == b"next"


def test_an_empty_body_completes_with_the_header():
    frames = read_frames(wire((2, b""), (99, b"")), LIMITS)
    assert [(f.type, f.discarded) for f in frames] == [(2, False), (99, True)]


def test_reading_fills_the_lent_body_in_place():
    buffers = []

    def allocate(size):
        buffers.append(bytearray(size))
        return buffers[-1]

    (frame,) = feed(FrameReader(LIMITS, allocate), wire((2, b"abc")))
    buffers[0][0:1] = b"X"
    assert bytes(frame.body) == b"Xbc"


def test_another_reader_may_continue_between_frames():
    stream = wire((2, b"first"), (2, b"second"))
    first = FrameReader(LIMITS)
    (frame,) = feed(first, stream[:17])
    assert not first.mid_frame
    (frame,) = feed(FrameReader(LIMITS), stream[17:])
    assert bytes(frame.body) == b"second"


@pytest.mark.parametrize("n", [-1, 13])
def test_reporting_more_than_was_lent_is_our_bug(n):
    with pytest.raises(LocalProtocolError, match="12 were lent"):
        FrameReader(LIMITS).filled(n)


def test_nothing_received_changes_nothing():
    reader = FrameReader(LIMITS)
    assert reader.filled(0) is None
    assert not reader.mid_frame


def test_a_started_body_is_mid_frame_even_without_its_first_byte():
    reader = FrameReader(LIMITS)
    list(feed(reader, encode_header(2, 5)))
    assert reader.mid_frame


def test_a_header_is_twelve_big_endian_bytes():
    assert encode_header(3, 157).hex(" ") == "44 53 34 44 00 00 00 03 00 00 00 9d"


def test_a_body_that_no_frame_can_hold_is_our_bug():
    with pytest.raises(LocalProtocolError, match="a frame holds at most"):
        encode_header(3, 2**32)


def test_a_frame_goes_out_in_pieces_without_a_copy():
    payload = memoryview(bytearray(8)).cast("f")
    head, view = encode_frame(2, b"head", payload, b"")
    assert head == encode_header(2, 12) + b"head"
    payload[0] = 1.0
    assert bytes(view[:4]) == b"\0\0\x80\x3f"


def test_a_field_that_does_not_fit_is_our_bug():
    with pytest.raises(LocalProtocolError, match="HELLO: a field does not fit"):
        pack(struct.Struct(">10I"), "HELLO", *[0] * 9, 2**32)


def test_types_have_names_for_people():
    assert [type_name(n) for n in (1, EXT_HELLO, 77)] == ["HELLO", "EXT_HELLO", "frame type 77"]
    assert [type_name(n) for n in (261, 262)] == ["EXT_FORK", "frame type 262"]


def test_a_peer_text_becomes_one_short_harmless_line():
    assert printable(b"ok\n\x1b[31m\xff") == "ok��[31m�"
    assert printable(b"a" * 600) == "a" * 511


def test_our_texts_are_bounded():
    assert wire_text("é\udc80") == b"\xc3\xa9?"
    assert len(wire_text("a" * 9999)) == 4096


def test_an_unknown_peer_may_only_introduce_itself():
    assert hello_limits() == {FrameType.HELLO: 167, EXT_HELLO: 65536}


def test_a_worker_accepts_exactly_the_largest_legal_work_with_slack():
    assert worker_limits(512, 1024)[FrameType.WORK] == 80 + 4 * 512 + 512 * 1024 * 4 + 65536
    assert worker_limits(1 << 20, 1 << 16)[FrameType.WORK] == 2**32 - 1


def test_a_result_may_be_as_large_as_its_largest_payload():
    hidden = coordinator_limits(768, 1024, 64)[FrameType.RESULT]
    logits = coordinator_limits(129_280, 64, 1)[FrameType.RESULT]
    assert hidden == 40 + 40 * 64 + 64 * 1024 * 4
    assert logits == 40 + 40 * 64 + 129_280 * 4
    assert coordinator_limits(8, 1 << 16, 1 << 20)[FrameType.RESULT] == 2**32 - 1


def test_nobody_accepts_hello_where_results_are_read():
    assert FrameType.HELLO not in coordinator_limits(8, 8, 8)
    assert FrameType.HELLO not in worker_limits(8, 8)


def test_plain_limits_know_nothing_but_the_nine_types():
    plain = plain_limits(worker_limits(512, 1024))
    assert set(plain) == {2, 3, 5, 7, 9}
    assert plain[FrameType.WORK] == worker_limits(512, 1024)[FrameType.WORK]
