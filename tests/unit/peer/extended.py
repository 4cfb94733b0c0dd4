"""Peers that speak the extensions, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ds4py.config import Address
from ds4py.errors import TransportError
from ds4py.layer_range import LayerRange
from ds4py.transport.connection import Connection
from ds4py.transport.connector import Connector
from ds4py.wire.extensions import (
    CANCEL,
    DROP,
    HOP_LOST,
    PeerHello,
    decode_peer_hello,
    encode_peer_hello,
)
from ds4py.wire.frames import EXT_HELLO, worker_limits
from tests.fake_runner import WIDTH, card
from tests.peers import N_CTX
from tests.sockets import SOCKETS, Background


def peer_hello(role: str, **changes: object) -> PeerHello:
    """An acceptable introduction to a peer of the fake model."""
    identity = card()
    fields: dict[str, object] = {
        "role": role,
        "version": "1",
        "model_id": identity.model_id,
        "model_name": identity.name,
        "n_layers": identity.n_layers,
        "quant_bits": identity.quant_bits,
        "ctx_size": N_CTX,
    }
    return PeerHello(**(fields | changes))  # type: ignore[arg-type]


def worker_hello(layers: LayerRange, **changes: object) -> PeerHello:
    fields: dict[str, object] = {
        "features": (CANCEL, DROP, HOP_LOST),
        "layer_start": layers.start,
        "layer_end": layers.end,
        "has_output": layers.has_output,
        "listen_port": 7009,
    }
    role = str(changes.pop("role", "worker"))
    return peer_hello(role, **(fields | changes))


def exchange(connection: Connection, ours: PeerHello) -> PeerHello:
    """Introduce ourselves and expect to be let in."""
    connection.send(encode_peer_hello(ours))
    frame = Background(connection.receive).result()
    assert frame is not None
    assert frame.type == EXT_HELLO
    return decode_peer_hello(frame.body)


def greet(connection: Connection, **changes: object) -> PeerHello:
    """Introduce ourselves to a worker as its coordinator."""
    return exchange(connection, peer_hello("coordinator", **changes))


@contextmanager
def calling(address: Address) -> Iterator[Connection]:
    """A connection to a coordinator, nothing said yet."""
    connection = Connector(SOCKETS).connect(address, worker_limits(N_CTX, WIDTH))
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def extended_worker(
    address: Address, layers: LayerRange, **changes: object
) -> Iterator[Connection]:
    """Register as a ds4py worker does that dials its coordinator."""
    with calling(address) as connection:
        exchange(connection, worker_hello(layers, **changes))
        yield connection


def read_to_close(connection: Connection) -> bool:
    """Read until the peer closes, however it does that."""
    try:
        while connection.receive() is not None:
            pass
    except TransportError:
        pass
    return True
