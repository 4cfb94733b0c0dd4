"""What only ds4py peers say: bounded, validated, and a hello open to fields of later versions."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.errors import LocalProtocolError, RemoteProtocolError
from ds4py.wire.extensions import (
    EXT_HELLO,
    REWIND,
    Alive,
    Cancel,
    Drop,
    Fork,
    HopLost,
    PeerHello,
    decode_notice,
    decode_peer_hello,
    encode_peer_hello,
)
from ds4py.wire.frames import ExtType, Frame, coordinator_limits, hello_limits, worker_limits
from tests.support.strategies import attempt, joined, peer_hellos, read_frames, u64

HELLO = {
    "role": "worker",
    "version": "0.1.0",
    "model_id": 2,
    "model_name": "DeepSeek V4 Tiny",
    "n_layers": 6,
    "quant_bits": 2,
    "ctx_size": 512,
    "layer_start": 2,
    "layer_end": 5,
}


def decoded(value):
    return decode_peer_hello(memoryview(json.dumps(value).encode()))


def refusal(raw):
    with pytest.raises(RemoteProtocolError) as caught:
        decode_peer_hello(memoryview(raw))
    assert caught.value.kind == "X-HELLO"
    return str(caught.value)


@given(peer_hellos)
def test_decoding_an_encoded_hello_gives_the_hello(hello):
    (frame,) = read_frames(joined(encode_peer_hello(hello)), hello_limits())
    assert frame.type == EXT_HELLO == 256
    assert decode_peer_hello(frame.body) == hello


@given(st.binary(max_size=200))
def test_any_bytes_give_a_remote_error(raw):
    assert refusal(raw)


@given(
    st.dictionaries(
        st.sampled_from(sorted(PeerHello.__struct_fields__)),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text()
        | st.lists(st.text(max_size=3), max_size=3),
    )
)
def test_any_json_object_gives_a_hello_or_a_remote_error(changes):
    _, kind = attempt(lambda: decoded(HELLO | changes))
    assert kind in {"", "X-HELLO"}


def test_unknown_fields_are_ignored_and_optional_ones_have_defaults():
    hello = decoded(HELLO | {"colour": {"deep": [1, 2]}, "features": ["rewind", "new-thing"]})
    assert REWIND in hello.features
    assert (hello.has_output, hello.has_hidden, hello.listen_port) == (False, True, None)


def test_a_coordinator_may_own_no_layers():
    hello = decoded(HELLO | {"role": "coordinator", "layer_start": None, "layer_end": None})
    assert hello.layer_start is None


@pytest.mark.parametrize(
    "change",
    [
        {"role": "spy"},
        {"version": "v" * 129},
        {"build": 7},
        {"features": ["x"] * 65},
        {"features": ["Not A Word"]},
        {"features": [""]},
        {"model_id": -1},
        {"model_id": 2**32},
        {"model_id": True},
        {"model_name": "n" * 129},
        {"n_layers": "6"},
        {"ctx_size": 1.5},
        {"layer_start": 2**40},
        {"layer_end": None},
        {"layer_start": None},
        {"layer_start": None, "layer_end": None},
        {"has_output": 1},
        {"listen_port": 0},
        {"listen_port": 65536},
        {"weight_bytes": -1},
        {"weight_bytes": 2**63},
        {"alive_timeout": 0},
        {"alive_timeout": 0.19},
        {"alive_timeout": 86401},
        {"alive_timeout": True},
        {"nonce": "n" * 129},
    ],
)
def test_each_field_is_bounded(change):
    assert refusal(json.dumps(HELLO | change).encode()).startswith("EXT_HELLO")


@pytest.mark.parametrize("name", sorted(HELLO))
def test_each_required_field_is_missed(name):
    assert refusal(json.dumps({k: v for k, v in HELLO.items() if k != name}).encode())


def test_deep_nesting_is_refused_not_a_crash():
    depth = 30_000
    assert refusal(b'{"x":' + b"[" * depth + b"]" * depth + b"}")


def test_more_than_64_kib_are_not_parsed():
    assert "at most 65536" in refusal(b" " * 65537)


@pytest.mark.parametrize("change", [{"version": "v" * 129}, {"layer_end": None}])
def test_a_hello_that_peers_refuse_is_not_sent(change):
    with pytest.raises(LocalProtocolError, match="EXT_HELLO"):
        encode_peer_hello(PeerHello(**HELLO | change))


# --- notices ------------------------------------------------------------------------------------

hosts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=255).filter(
    lambda host: len(host.encode()) <= 255
)
notices = st.one_of(
    st.just(Alive()),
    st.builds(Cancel, u64, u64),
    st.builds(Drop, u64),
    st.builds(HopLost, hosts, st.integers(0, 65535)),
    st.builds(Fork, u64, u64, st.integers(0, 2**32 - 1), u64),
)


@given(notices)
def test_decoding_an_encoded_notice_gives_the_notice(notice):
    """And a worker takes it; a coordinator takes nothing but signs of life."""
    raw = joined(notice.encode())
    (frame,) = read_frames(raw, worker_limits(1, 1))
    assert decode_notice(frame) == notice
    (seen,) = read_frames(raw, coordinator_limits(1, 1, 1))
    assert seen.discarded == (notice != Alive())


@given(st.sampled_from([*ExtType, 1, 262, 2**32 - 1]), st.binary(max_size=300))
def test_any_bytes_give_a_notice_or_a_remote_error(frame_type, raw):
    notice, kind = attempt(lambda: decode_notice(Frame(frame_type, memoryview(raw))))
    assert kind in {"", "X-NOTICE"}
    if notice is not None:
        assert joined(notice.encode()) == joined(
            (b"DS4D", frame_type.to_bytes(4, "big"), len(raw).to_bytes(4, "big"), raw)
        )


@pytest.mark.parametrize(
    ("notice", "too_long"),
    [
        (Alive(), 1),
        (Cancel(1, 2), 17),
        (Drop(1), 9),
        (HopLost("h", 1), 2 + 256),
        (Fork(1, 2, 3, 4), 29),
    ],
)
def test_a_longer_notice_than_any_is_refused_before_it_is_read(notice, too_long):
    header = joined(notice.encode())[:8] + too_long.to_bytes(4, "big")
    with pytest.raises(RemoteProtocolError, match="at most"):
        read_frames(header + bytes(too_long), worker_limits(1, 1))


@pytest.mark.parametrize(
    "notice",
    [
        Cancel(2**64, 0),
        Cancel(0, -1),
        Drop(-1),
        HopLost("h", 65536),
        HopLost("", 1),
        Fork(1, 2, 2**32, 0),
        Fork(1, 2, -1, 0),
    ],
)
def test_a_notice_that_does_not_fit_its_fields_is_not_sent(notice):
    with pytest.raises(LocalProtocolError):
        notice.encode()
    with pytest.raises(LocalProtocolError):
        HopLost("h" * 256, 1).encode()
