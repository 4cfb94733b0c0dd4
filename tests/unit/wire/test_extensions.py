"""The extension hello: bounded, validated, open to fields of later versions."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.errors import LocalProtocolError, RemoteProtocolError
from ds4py.wire.extensions import (
    EXT_HELLO,
    REWIND,
    PeerHello,
    decode_peer_hello,
    encode_peer_hello,
)
from ds4py.wire.frames import hello_limits
from tests.strategies import attempt, joined, peer_hellos, read_frames

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
