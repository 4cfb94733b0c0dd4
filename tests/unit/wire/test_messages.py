"""Messages: bytes and values are two spellings of the same thing; nonsense has a class name."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.errors import LocalProtocolError, RemoteProtocolError
from ds4py.wire import snapshot_messages
from ds4py.wire.frames import Frame, encode_header
from ds4py.wire.messages import (
    ErrorText,
    Hello,
    LoadBegin,
    Result,
    ResultKind,
    SaveRequest,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotDone,
    SnapshotRecord,
    Telemetry,
    Work,
    WorkFlags,
    WorkHeader,
    decode,
    encode,
    error_result,
    forwarded,
)
from ds4py.wire.route import HopEntry
from ds4py.wire.snapshot_messages import encode_chunks
from ds4py.wire.work_messages import RelayedResult, ResultHeader
from tests.support.strategies import (
    attempt,
    joined,
    messages,
    read_frames,
    results,
    telemetries,
    works,
)

HELLO = Hello(
    model_id=0,
    quant_bits=2,
    layer_start=2,
    layer_end=3,
    has_output=1,
    has_hidden=1,
    ctx_size=64,
    n_layers=4,
    listen_port=50123,
    model_name=b"toy",
)
WORK = Work(
    model_id=0,
    session_id=0x1122334455667788,
    request_id=1,
    prefix_hash=0x14650FB0739D0383,
    result_hash=0x6FDEDB25BBB27E53,
    pos0=0,
    layer_start=2,
    layer_end=2,
    flags=WorkFlags.INPUT_HC | WorkFlags.RESET_SESSION | WorkFlags.ACK_ONLY,
    input_hc_bits=0,
    route_count=2,
    route_index=0,
    tokens=(1, 2, 3),
    input=memoryview(bytes(24)),
    route_blob=memoryview(b"route"),
)
RECORD = {
    "model_id": 0,
    "session_id": 9,
    "request_id": 2**63,
    "token_hash": 5,
    "layer_start": 2,
    "layer_end": 3,
    "payload_bytes": 7,
}


def body_of(message):
    return joined(encode(message))[12:]


def kind_of(frame_type, body, *, discarded=False):
    with pytest.raises(RemoteProtocolError) as caught:
        decode(Frame(frame_type, memoryview(body), discarded))
    return caught.value.kind


@given(messages)
def test_decoding_an_encoded_message_gives_the_message(message):
    (frame,) = read_frames(joined(encode(message)))
    assert decode(frame) == message


@given(messages)
def test_encoding_a_decoded_frame_gives_the_bytes(message):
    stream = joined(encode(message))
    (frame,) = read_frames(stream)
    assert joined(encode(decode(frame))) == stream


@given(st.integers(0, 11), st.binary(max_size=300))
def test_any_body_gives_a_message_or_a_remote_error_with_a_kind(frame_type, body):
    attempt(lambda: decode(Frame(frame_type, memoryview(body))))


@given(messages, st.data())
def test_a_damaged_message_gives_a_message_or_a_remote_error(message, data):
    """Small changes of legal bodies reach checks that random bytes never reach."""
    frame_type = read_frames(joined(encode(message)))[0].type
    body = bytearray(body_of(message))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(len(body) - 1, 0)))
        body[at : at + 1] = data.draw(st.binary(max_size=2))
    attempt(lambda: decode(Frame(frame_type, memoryview(body))))


@pytest.mark.parametrize(
    ("size", "kind"), [(39, "H-LENGTH"), (168, "H-LENGTH"), (41, "H-NAMELEN"), (40, None)]
)
def test_hello_length_rules(size, kind):
    body = (body_of(HELLO)[:36] + bytes(4) + b"x" * 128)[:size]
    assert kind is None or kind_of(1, body) == kind


def test_hello_name_with_nul_is_refused():
    assert kind_of(1, body_of(HELLO)[:40] + b"t\0y") == "H-NUL"


@pytest.mark.parametrize("name", [b"x" * 128, b"a\0b"])
def test_a_name_that_peers_refuse_is_not_sent(name):
    hello = Hello(**{k: 0 for k in Hello.__slots__ if k != "model_name"}, model_name=name)
    with pytest.raises(LocalProtocolError, match="at most 127 bytes without NUL"):
        encode(hello)


def test_an_error_text_is_safe_to_log_and_whole_in_bytes():
    error = ErrorText(b"no\n\xff")
    assert (error.text, error.message) == ("no��", b"no\n\xff")
    assert ErrorText.of("nope").message == b"nope"


def test_work_shorter_than_its_record_is_truncated():
    assert kind_of(3, body_of(WORK)[:79]) == "W-TRUNC"


@pytest.mark.parametrize(
    ("at", "value"), [(40, 4), (56, 16), (60, 23), (60, 25), (76, 4), (56, 2**32 - 1)]
)
def test_work_sizes_must_add_up(at, value):
    body = bytearray(body_of(WORK))
    body[at : at + 4] = value.to_bytes(4, "big")
    assert kind_of(3, body) == "W-SIZES"


def test_work_keeps_views_into_the_frame_body():
    body = bytearray(body_of(WORK))
    work = decode(Frame(3, memoryview(body)))
    assert isinstance(work, Work)
    body[92] = 7
    body[-5:] = b"ROUTE"
    assert (work.input[0], bytes(work.route_blob)) == (7, b"ROUTE")


def test_the_work_record_is_readable_before_the_rest_is():
    header = WorkHeader.decode(memoryview(body_of(WORK)[:80]))
    assert (header.request_id, header.n_tokens, header.route_bytes) == (1, 3, 5)


def test_unknown_flags_survive_and_leave_no_trace_in_the_enum():
    for flags in (0x10, 0x8000_0001, 2**32 - 1):
        body = bytearray(body_of(WORK))
        body[52:56] = flags.to_bytes(4, "big")
        work = decode(Frame(3, memoryview(body)))
        assert isinstance(work, Work)
        assert work.flags == flags
        assert not work.flags & WorkFlags.RESET_SESSION or flags == 2**32 - 1
    assert max(WorkFlags._value2member_map_) <= 0xF


def test_a_token_that_is_no_u32_is_our_bug():
    with pytest.raises(LocalProtocolError, match="token ids"):
        encode(Work(**{k: getattr(WORK, k) for k in Work.__slots__} | {"tokens": (-1,)}))


def test_payloads_go_out_as_pieces_of_their_own():
    payload = bytearray(24)
    work = forwarded(WORK, HopEntry("h", 1, 3, 3), memoryview(payload), 16)
    head, hidden, route = encode(work)
    payload[0] = 1
    assert len(head) == 12 + 80 + 12
    assert (hidden[0], bytes(route)) == (1, b"route")


def test_a_float_view_counts_in_bytes():
    logits = memoryview(np.ones(4, np.float32))
    head, payload = encode(Result(request_id=1, payload=logits, payload_bits=32))
    assert head[:12] == encode_header(4, 40 + 16)
    assert len(payload) == 16
    floats = memoryview(np.ones(6, np.float32))
    (frame,) = read_frames(joined(encode(forwarded(WORK, HopEntry("h", 1, 3, 3), floats, 32))))
    work = decode(frame)
    assert isinstance(work, Work)
    assert work.input_hc_bytes == 24


@pytest.mark.parametrize(("has_output", "flags"), [(True, 0xF), (False, 0xD)])
def test_forwarding_rewrites_exactly_the_fields_of_the_spec(has_output, flags):
    out = memoryview(bytes(range(24)))
    entry = HopEntry("10.0.0.3", 40002, 3, 3, has_output)
    work = forwarded(WORK, entry, out, 16)
    changed = {k for k in Work.__slots__ if getattr(work, k) != getattr(WORK, k)}
    assert changed - {"flags"} == {
        *("layer_start", "layer_end", "route_index", "input_hc_bits", "input")
    }
    assert (work.layer_start, work.layer_end, work.route_index) == (3, 3, 1)
    assert (work.flags, work.input_hc_bits, work.input) == (flags, 16, out)


def test_a_token_only_work_gains_its_input_flag_when_forwarded():
    first = forwarded(WORK, HopEntry("h", 1, 3, 3), memoryview(b""), 32)
    work = Work(**{k: getattr(first, k) for k in Work.__slots__} | {"flags": 0x4})
    assert forwarded(work, HopEntry("h", 1, 3, 3), memoryview(b"1"), 8).flags == 0x5


@given(works)
def test_bits_zero_means_32(work):
    assert work.bits == (work.input_hc_bits or 32)


@pytest.mark.parametrize("has_output", [True, False])
def test_logits_are_asked_of_the_next_hop_by_its_own_entry_only(has_output):
    asked = WORK.flags | WorkFlags.OUTPUT_LOGITS
    work = Work(**{k: getattr(WORK, k) for k in Work.__slots__} | {"flags": asked})
    onward = forwarded(work, HopEntry("h", 1, 3, 3, has_output), memoryview(b""), 32)
    assert onward.flags == (asked if has_output else WORK.flags)


def test_result_shorter_than_its_record_is_no_result():
    assert kind_of(4, bytes(39)) == "R-FRAME"


@pytest.mark.parametrize(("at", "value"), [(24, 2), (28, 39), (28, 80), (32, 3), (32, 5)])
def test_result_sizes_must_add_up(at, value):
    record = Telemetry(**dict.fromkeys(Telemetry.__slots__, 1))
    body = bytearray(
        body_of(Result(request_id=1, telemetry=(record,), payload=memoryview(b"1234")))
    )
    body[at : at + 4] = value.to_bytes(4, "big")
    assert kind_of(4, body) == "R-META"


def test_a_result_with_more_records_than_a_route_has_hops_is_refused() -> None:
    """Each record becomes an object: the limit on bytes alone would let a peer fill memory."""
    record = Telemetry(**dict.fromkeys(Telemetry.__slots__, 1))
    body = body_of(Result(request_id=1, telemetry=(record,) * 64))
    assert len(Result.decode(memoryview(body)).telemetry) == 64
    assert kind_of(4, body_of(Result(request_id=1, telemetry=(record,) * 65))) == "R-META"


def test_a_relay_appends_its_record_and_touches_nothing_else():
    records = [Telemetry(**dict.fromkeys(Telemetry.__slots__, n)) for n in (1, 2)]
    result = Result(
        request_id=5,
        result_hash=6,
        status=1,
        result_kind=9,
        telemetry=(records[0],),
        payload=memoryview(b"text"),
        payload_bits=3,
    )
    relayed = result.relayed(records[1])
    before, after = body_of(result), body_of(relayed)
    assert after[:24] == before[:24]
    assert int.from_bytes(after[24:28], "big") == 2
    assert int.from_bytes(after[28:32], "big") == 80
    assert after[32:80] == before[32:80]
    assert after[80:120] == records[1].encode()
    assert after[120:] == b"text"


@given(results, telemetries)
def test_a_result_that_is_only_passed_on_has_the_bytes_of_one_that_was_decoded(result, record):
    body = memoryview(body_of(result))
    passed = RelayedResult(ResultHeader.decode(body), body, record)
    assert joined(passed.encode()) == joined(encode(Result.decode(body).relayed(record)))


def test_an_error_result_has_status_one_and_nothing_but_a_text():
    result = error_result(2, "prefix mismatch")
    assert (result.status, result.result_hash, result.result_kind) == (1, 0, ResultKind.ACK)
    assert (result.telemetry, result.payload_bits, result.text) == ((), 0, "prefix mismatch")


@pytest.mark.parametrize("size", [0, 39, 41])
def test_a_save_request_is_exactly_40_bytes(size):
    assert kind_of(5, bytes(size)) == "S-LEN"


def test_a_save_request_names_its_fields_in_order():
    request = SaveRequest(**{name: n for n, name in enumerate(SaveRequest.__slots__)})
    assert body_of(request)[-12:] == bytes([0, 0, 0, 4, 0, 0, 0, 5, 0, 0, 0, 6])


@pytest.mark.parametrize("frame_type", [6, 9])
def test_a_short_snapshot_record_has_its_own_class(frame_type):
    assert kind_of(frame_type, bytes(59)) == "L-SHORT"


@pytest.mark.parametrize(("at", "value"), [(28, 1), (52, 4), (56, 6), (56, 2**32 - 1)])
def test_snapshot_begin_sizes_must_fit(at, value):
    body = bytearray(body_of(SnapshotBegin(**RECORD, status=1, message=b"gone!")))
    body[at : at + 4] = value.to_bytes(4, "big")
    assert kind_of(6, body) == "S-FRAME"


def test_a_tail_after_the_texts_of_begin_and_done_is_ignored():
    begin = SnapshotBegin(**RECORD, status=1, tokens=(1, 2), message=b"gone\n")
    done = SnapshotDone(7, 1, b"gone\n")
    assert decode(Frame(6, memoryview(body_of(begin) + b"tail"))) == begin
    assert decode(Frame(8, memoryview(body_of(done) + b"tail"))) == done
    assert begin.text == done.text == "gone�"
    assert begin.token_count == 2


@pytest.mark.parametrize(("at", "value"), [(28, 1), (52, 4), (56, 1)])
def test_load_begin_sizes_must_fit_exactly(at, value):
    body = bytearray(body_of(LoadBegin(**RECORD, tokens=(1, 2))))
    body[at : at + 4] = value.to_bytes(4, "big")
    assert kind_of(9, body) == "L-HEADER"


def test_a_refused_load_can_still_be_named():
    record = SnapshotRecord.decode(memoryview(body_of(LoadBegin(**RECORD, tokens=(1, 2))) + b"x"))
    assert (record.request_id, record.token_count) == (2**63, 2)


@pytest.mark.parametrize(
    "body", [bytes(11), bytes(8) + b"\0\0\0\5" + b"1234", bytes(8) + b"\0\0\0\3" + b"1234"]
)
def test_chunk_length_must_be_the_rest_of_the_body(body):
    assert kind_of(7, body) == "L-CHUNK"


def test_a_chunk_holds_at_most_8_mib_in_both_directions():
    data = memoryview(bytes((8 << 20) + 1))
    with pytest.raises(LocalProtocolError, match="at most 8388608"):
        encode(SnapshotChunk(1, data))
    assert kind_of(7, bytes(8) + len(data).to_bytes(4, "big") + data) == "L-CHUNK"


@pytest.mark.parametrize("cuts", [(), (3,), (7, 8), (8, 16), (1, 2, 15, 17), (0, 0, 20)])
def test_a_shard_in_pieces_of_any_size_travels_in_full_chunks(cuts, monkeypatch) -> None:
    """Each byte once, in order; all chunks but the last are full, and none is empty."""
    monkeypatch.setattr(snapshot_messages, "MAX_CHUNK_DATA", 8)
    payload = bytes(range(20))
    pieces = [memoryview(payload)[a:b] for a, b in pairwise((0, *cuts, len(payload)))]
    sent = [joined(chunk) for chunk in encode_chunks(9, pieces)]
    chunks = [decode(frame) for data in sent for frame in read_frames(data)]
    assert [bytes(chunk.data) for chunk in chunks] == [payload[:8], payload[8:16], payload[16:]]
    assert {chunk.request_id for chunk in chunks} == {9}
    assert list(encode_chunks(9, [])) == []


@pytest.mark.parametrize("body", [bytes(15), bytes(12) + b"\0\0\0\5" + b"1234"])
def test_done_must_hold_its_text(body):
    assert kind_of(8, body) == "S-FRAME"


@pytest.mark.parametrize("frame_type", [0, 10, 77, 256, 2**32 - 1])
def test_a_type_without_a_stock_message_is_refused(frame_type):
    assert kind_of(frame_type, b"") == "F-TYPE"


def test_a_discarded_frame_is_refused_whatever_its_type():
    assert kind_of(2, b"", discarded=True) == "F-TYPE"
