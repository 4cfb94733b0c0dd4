"""Routes: every sub-check of docs/spec/wire-protocol.md#route-checks, in its order."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.errors import LocalProtocolError, RemoteProtocolError
from ds4py.wire.route import HopEntry, decode_route, encode_route
from tests.strategies import attempt, routes

TWO_HOPS = bytes.fromhex(
    "00000008 00009c41 00000002 00000002 00000000 31302e302e302e32"
    "00000008 00009c42 00000003 00000003 00000001 31302e302e302e33"
    "00000001 00000000 00000000"
)
END = struct.pack(">3I", 1, 0, 0)


def entry(host=b"host", port=1, start=2, end=2, flags=0, host_len=None):
    length = len(host) if host_len is None else host_len
    return struct.pack(">5I", length, port, start, end, flags) + host


def refusal(blob, count=1, n_layers=6):
    with pytest.raises(RemoteProtocolError) as caught:
        decode_route(memoryview(blob), count, n_layers)
    assert caught.value.kind == "W-ROUTE"
    return caught.value.what


def test_the_two_hop_example_of_the_spec():
    hops = (HopEntry("10.0.0.2", 40001, 2, 2), HopEntry("10.0.0.3", 40002, 3, 3, True))
    assert encode_route(hops) == TWO_HOPS
    assert decode_route(memoryview(TWO_HOPS), 2, 4) == hops


@given(routes())
def test_decoding_an_encoded_route_gives_the_route(route):
    entries, n_layers = route
    assert decode_route(memoryview(encode_route(entries)), len(entries), n_layers) == entries


def test_a_route_that_was_seen_before_is_still_checked_against_what_it_is_used_for():
    """Routes are kept by their bytes, and each receive buffer is overwritten or freed in time."""
    blob = bytearray(TWO_HOPS)
    hops = decode_route(memoryview(blob), 2, 4)
    assert refusal(TWO_HOPS, count=1, n_layers=4)
    assert refusal(TWO_HOPS, count=2, n_layers=5)
    blob[-1] = 1
    assert refusal(blob, count=2, n_layers=4)
    assert decode_route(memoryview(TWO_HOPS), 2, 4) == hops


@given(st.binary(max_size=120), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_any_blob_gives_a_route_or_a_remote_error(blob, count, n_layers):
    _, kind = attempt(lambda: decode_route(memoryview(blob), count, n_layers))
    assert kind in {"", "W-ROUTE"}


@given(routes(), st.data())
def test_a_damaged_route_gives_a_route_that_encodes_again_or_a_remote_error(route, data):
    entries, n_layers = route
    blob = bytearray(encode_route(entries))
    at = data.draw(st.integers(0, len(blob) - 1))
    blob[at : at + 1] = data.draw(st.binary(max_size=2))
    got, kind = attempt(lambda: decode_route(memoryview(blob), len(entries), n_layers))
    assert kind in {"", "W-ROUTE"}
    assert got is None or encode_route(got) == blob


@pytest.mark.parametrize(
    ("blob", "text"),
    [
        (entry()[:19], "truncated route entry"),
        (entry(b"") + END, "invalid route host length"),
        (entry(b"x" * 1025) + END, "invalid route host length"),
        (entry(host_len=5), "invalid route host length"),
        (entry(b"ho\0t") + END, "route host contains NUL bytes"),
        (entry(port=0) + END, "invalid route port"),
        (entry(port=65536) + END, "invalid route port"),
        (entry(start=3, end=2) + END, "invalid route layer range"),
        (entry(start=6, end=6) + END, "invalid route layer range"),
        (entry(start=5, end=6) + END, "invalid route layer range"),
        (entry(flags=2) + END, "invalid route flags"),
        (entry(flags=3, end=5) + END, "invalid route flags"),
        (entry(flags=1, end=4) + END, "route logits require final layer"),
        (entry(), "route payload missing final destination"),
        (entry() + END[:11], "route payload missing final destination"),
        (entry() + struct.pack(">3I", 1, 1, 0), "invalid final destination host length"),
        (entry() + struct.pack(">3I", 1, 1025, 0) + b"h" * 1025, "invalid final destination host"),
        (entry() + struct.pack(">3I", 1, 2, 0) + b"h\0", "final destination host contains NUL"),
        (entry() + struct.pack(">3I", 2, 1, 0) + b"h", "unsupported route final destination"),
        (entry() + struct.pack(">3I", 1, 1, 0) + b"h", "invalid upstream route final destination"),
        (entry() + struct.pack(">3I", 1, 0, 1), "invalid upstream route final destination"),
        (entry() + END + b"x", "route payload has trailing bytes"),
    ],
)
def test_each_fault_has_its_text(blob, text):
    assert refusal(blob).startswith(text)


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        ({"host": b"\0", "port": 0, "start": 9, "flags": 2}, "route host contains NUL bytes"),
        ({"port": 0, "start": 9, "flags": 2}, "invalid route port"),
        ({"start": 9, "flags": 2}, "invalid route layer range"),
    ],
)
def test_the_first_of_several_faults_is_named(faults, text):
    assert refusal(entry(**faults) + b"junk") == text


@pytest.mark.parametrize("start", [2, 4])
def test_hops_must_join_exactly(start):
    blob = entry() + entry(start=start, end=5) + END
    assert refusal(blob, 2) == "route layer ranges are not contiguous"


def test_a_count_of_four_billion_ends_with_the_bytes():
    assert refusal(TWO_HOPS, 2**32 - 1, 4) == "truncated route entry"


def test_the_first_hop_may_start_anywhere_and_a_host_may_be_1024_bytes():
    (hop,) = decode_route(memoryview(entry(b"h" * 1024, start=4, end=5) + END), 1, 6)
    assert (len(hop.host), hop.layer_start) == (1024, 4)


def test_no_hops_make_a_legal_empty_blob():
    assert decode_route(memoryview(encode_route([])), 0, 6) == ()


@pytest.mark.parametrize(
    "entries",
    [
        [HopEntry("", 1, 0, 1)],
        [HopEntry("a\0", 1, 0, 1)],
        [HopEntry("h", 0, 0, 1)],
        [HopEntry("h", 1, 0, 1), HopEntry("h", 1, 3, 3)],
        [HopEntry("h", 1, 0, 1, True), HopEntry("h", 1, 2, 3)],
        [HopEntry("h", 2**32, 0, 1)],
        [HopEntry("host\N{SNOWMAN}", 1, 0, 1)],
    ],
)
def test_a_route_that_peers_refuse_is_not_sent(entries):
    with pytest.raises(LocalProtocolError):
        encode_route(entries)


def test_entries_print_as_addresses_without_control_characters():
    assert str(HopEntry("10.0.0.2", 7, 0, 0)) == "10.0.0.2:7"
    assert str(HopEntry("fe80::1%en0", 7, 0, 0)) == "[fe80::1%en0]:7"
    assert "\n" not in str(HopEntry("a\nb", 7, 0, 0))
