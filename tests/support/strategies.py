"""Hypothesis strategies for ground-floor and wire values, and a loop that reads frames."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import numpy as np
from hypothesis import strategies as st

from ds4py.errors import RemoteProtocolError
from ds4py.layer_range import LayerRange
from ds4py.wire.extensions import PeerHello
from ds4py.wire.frames import Buffer, Frame, FrameReader
from ds4py.wire.messages import (
    ErrorText,
    Hello,
    LoadBegin,
    Result,
    SaveRequest,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotDone,
    Telemetry,
    WireMessage,
    Work,
)
from ds4py.wire.route import HopEntry

T = TypeVar("T")
ANY_LIMIT = dict.fromkeys([*range(1, 10), 256], 1 << 20)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
token_lists = st.lists(u32, max_size=20).map(tuple)
texts = st.binary(max_size=60)
views = texts.map(memoryview)
records = {"model_id": u32, "session_id": u64, "request_id": u64, "layer_start": u32}
records |= {"layer_end": u32}

hellos = st.builds(
    Hello,
    **{name: u32 for name in Hello.__slots__ if name != "model_name"},
    model_name=st.binary(max_size=127).map(lambda raw: raw.replace(b"\0", b"x")),
)
error_texts = st.builds(ErrorText, texts)
telemetries = st.builds(Telemetry, **dict.fromkeys(Telemetry.__slots__, u32))
works = st.builds(
    Work,
    **records,
    prefix_hash=u64,
    result_hash=u64,
    pos0=u32,
    flags=u32,
    input_hc_bits=u32,
    route_count=u32,
    route_index=u32,
    tokens=token_lists,
    input=views,
    route_blob=views,
)
results = st.builds(
    Result,
    request_id=u64,
    result_hash=u64,
    status=u32,
    result_kind=u32,
    telemetry=st.lists(telemetries, max_size=3).map(tuple),
    payload=views,
    payload_bits=u32,
)
save_requests = st.builds(SaveRequest, **records, token_hash=u64, token_count=u32)
_begins = {**records, "token_hash": u64, "payload_bytes": u64, "status": u32, "tokens": token_lists}
snapshot_begins = st.builds(SnapshotBegin, **_begins, message=texts)
load_begins = st.builds(LoadBegin, **_begins)
chunks = st.builds(SnapshotChunk, u64, views)
dones = st.builds(SnapshotDone, u64, u32, texts)
messages: st.SearchStrategy[WireMessage] = st.one_of(
    hellos,
    error_texts,
    works,
    results,
    save_requests,
    snapshot_begins,
    load_begins,
    chunks,
    dones,
)

_short = st.text(max_size=128)
peer_hellos = st.builds(
    PeerHello,
    role=st.sampled_from(["coordinator", "worker"]),
    version=_short,
    build=_short,
    features=st.lists(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True), max_size=64).map(
        tuple
    ),
    model_id=u32,
    model_name=_short,
    n_layers=u32,
    quant_bits=u32,
    ctx_size=u32,
    layer_start=u32,
    layer_end=u32,
    has_output=st.booleans(),
    has_hidden=st.booleans(),
    listen_port=st.none() | st.integers(1, 65535),
    weight_bytes=st.none() | st.integers(0, 2**63 - 1),
    fingerprint=_short,
    nonce=_short,
)

hosts = st.text(st.characters(min_codepoint=1, max_codepoint=255), min_size=1, max_size=40)


@st.composite
def routes(draw: st.DrawFn) -> tuple[tuple[HopEntry, ...], int]:
    """A legal route and the number of layers of its model."""
    start = draw(st.integers(0, 5))
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    n_layers = start + sum(lengths) + draw(st.integers(0, 2))
    entries = []
    for length in lengths:
        end = start + length - 1
        has_output = end + 1 == n_layers and draw(st.booleans())
        port = draw(st.integers(1, 65535))
        entries.append(HopEntry(draw(hosts), port, start, end, has_output))
        start = end + 1
    return tuple(entries), n_layers


@st.composite
def spans(draw: st.DrawFn) -> LayerRange:
    """A span of a model of at most 200 layers."""
    start, end = sorted(draw(st.tuples(st.integers(0, 199), st.integers(0, 199))))
    return LayerRange(start, end, draw(st.booleans()))


float32s = st.lists(st.floats(width=32), min_size=1, max_size=40).map(
    lambda values: np.array(values, np.float32)
)
"""Any binary32 values, NaN and infinities among them."""

cuts = st.lists(st.integers(1, 50), min_size=1, max_size=20)
"""Sizes of the pieces in which bytes arrive, used round and round."""


def joined(pieces: Iterable[Buffer]) -> bytes:
    """One frame as it stands on the wire."""
    return b"".join(bytes(piece) for piece in pieces)


def feed(reader: FrameReader, data: bytes, sizes: Iterable[int] = (1 << 30,)) -> Iterator[Frame]:
    """Give bytes to a reader in pieces of the given sizes (round and round), yield its frames."""
    pattern, at, turn = list(sizes), 0, 0
    while at < len(data):
        place = reader.writable()
        n = min(len(place), pattern[turn % len(pattern)], len(data) - at)
        place[:n] = data[at : at + n]
        at, turn = at + n, turn + 1
        frame = reader.filled(n)
        if frame is not None:
            yield frame


def attempt(action: Callable[[], T]) -> tuple[T | None, str]:
    """The value and "", or None and the kind of the peer's fault; other errors pass through."""
    try:
        return action(), ""
    except RemoteProtocolError as error:
        assert error.kind, "no class name"  # noqa: PT017 - both outcomes are legal here
        return None, error.kind


def read_frames(data: bytes, limits: Mapping[int, int] = ANY_LIMIT) -> list[Frame]:
    """Cut bytes into frames."""
    return list(feed(FrameReader(limits), data))
