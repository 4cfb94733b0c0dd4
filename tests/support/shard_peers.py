"""Hand-driven saving and loading: what a coordinator says to a worker's data port."""

from __future__ import annotations

from collections.abc import Sequence

from ds4py.errors import PeerClosedError
from ds4py.layer_range import LayerRange
from ds4py.transport.connection import Connection
from ds4py.wire.messages import (
    LoadBegin,
    SaveRequest,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotDone,
    WireMessage,
    decode,
    encode,
)
from ds4py.wire.prefix_hash import prefix_hash
from tests.support.clusters import span
from tests.support.fake_runner import card
from tests.support.sockets import Background

ALL = span("0-5")
ID = 1 << 63


def save_request(tokens: Sequence[int], layers: LayerRange = ALL, **changes: int) -> SaveRequest:
    fields = {
        "model_id": card().model_id,
        "session_id": 1,
        "request_id": ID,
        "token_hash": prefix_hash(tokens),
        "token_count": len(tokens),
        "layer_start": layers.start,
        "layer_end": layers.end,
    }
    return SaveRequest(**(fields | changes))


def load_begin(
    tokens: Sequence[int], payload: bytes, layers: LayerRange = ALL, /, **changes: object
) -> LoadBegin:
    fields: dict[str, object] = {
        "model_id": card().model_id,
        "session_id": 1,
        "request_id": ID,
        "token_hash": prefix_hash(tokens),
        "layer_start": layers.start,
        "layer_end": layers.end,
        "payload_bytes": len(payload),
        "tokens": tuple(tokens),
    }
    return LoadBegin(**(fields | changes))  # type: ignore[arg-type]


def chunk(data: bytes, request_id: int = ID) -> SnapshotChunk:
    return SnapshotChunk(request_id, memoryview(data))


def reply(connection: Connection) -> WireMessage | None:
    """The next message, None at the end."""
    frame = Background(connection.receive).result()
    return None if frame is None else decode(frame)


def ended(connection: Connection) -> bool:
    try:
        return reply(connection) is None
    except PeerClosedError:
        return True


def pull(connection: Connection, request: SaveRequest) -> tuple[SnapshotBegin, list[bytes]]:
    """Save; return BEGIN and what stood in each chunk."""
    connection.send(encode(request))
    begin = reply(connection)
    assert isinstance(begin, SnapshotBegin)
    assert not begin.status, begin.text
    parts: list[bytes] = []
    while not isinstance(message := reply(connection), SnapshotDone):
        assert isinstance(message, SnapshotChunk)
        assert message.request_id == request.request_id
        parts.append(bytes(message.data))
    assert message == SnapshotDone(request.request_id)
    return begin, parts


def push(connection: Connection, begin: LoadBegin, *parts: bytes) -> SnapshotDone:
    """Load; return DONE."""
    connection.send(encode(begin))
    for part in parts:
        connection.send(encode(chunk(part, begin.request_id)))
    done = reply(connection)
    assert isinstance(done, SnapshotDone)
    assert done.request_id == begin.request_id
    return done


def cut(payload: bytes, size: int) -> list[bytes]:
    return [payload[at : at + size] for at in range(0, len(payload), size)]
