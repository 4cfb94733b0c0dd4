"""Ask whether the other side is a ds4py too, and remember when it is not.

Owns: the dialling side of the extension handshake, and what a coordinator makes of a worker's half
of it (docs/architecture.md section 5). Refuses to know: who dials whom, what follows. Invariant: a
peer that was found to be plain is asked again after a while, since it may have been replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from ds4py.cluster.acquaintances import Acquaintances
from ds4py.cluster.checks import CoordinatorFacts, check_hello
from ds4py.cluster.heartbeat import agreed_timeout
from ds4py.cluster.registry import LinkId, WorkerRecord
from ds4py.config import Address
from ds4py.errors import ClusterError, PeerClosedError
from ds4py.spans import LayerSpan
from ds4py.transport.connection import Connection
from ds4py.wire.extensions import PeerHello, decode_peer_hello, encode_peer_hello
from ds4py.wire.frames import EXT_HELLO, FrameType, type_name
from ds4py.wire.messages import ErrorText

HANDSHAKE_SECONDS: Final = 10.0
PLAIN_SECONDS: Final = 60.0


def ask(connection: Connection, ours: PeerHello) -> PeerHello | ErrorText | None:
    """Introduce ourselves and wait for the answer.

    Returns:
        The other half of the handshake, an ERROR, or None if the peer closed the connection: it
        speaks the plain protocol only, or has just died.

    Raises:
        TransportTimeoutError: No answer came in time.
        ClusterError: Another answer came.
        RemoteProtocolError: The answer can not be read.
    """
    connection.send(encode_peer_hello(ours))
    try:
        frame = connection.receive(timeout=HANDSHAKE_SECONDS)
    except PeerClosedError:
        return None
    if frame is None:
        return None
    if frame.type == FrameType.ERROR:
        return ErrorText(bytes(frame.body))
    if frame.type != EXT_HELLO:
        raise ClusterError(f"answered the handshake with {type_name(frame.type)}")
    return decode_peer_hello(frame.body)


class PlainMemory:
    """Whether one peer is known to speak the plain protocol only.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._until = clock()

    @property
    def is_plain(self) -> bool:
        """Whether to start in plain mode."""
        return self._clock() < self._until

    def remember(self) -> None:
        """The peer has just shown that it knows no extensions."""
        self._until = self._clock() + PLAIN_SECONDS


class Host(Protocol):
    """What both ways to a worker need of the coordinator."""

    acquaintances: Acquaintances

    def introduce(self) -> PeerHello:
        """Return our half of the handshake."""

    def facts(self) -> CoordinatorFacts:
        """Return what a worker's half is compared with."""

    def new_link_id(self) -> LinkId:
        """Return a name for a new link."""


def refusal_of(hello: PeerHello, facts: CoordinatorFacts) -> str | None:
    """Return why a ds4py can not serve as a worker, in words for both logs."""
    if hello.role != "worker":
        return "is no worker"
    refusal = check_hello(hello, facts)
    return None if refusal is None else refusal.text


def span_of(hello: PeerHello) -> LayerSpan:
    """Return the layers of a worker that was not refused."""
    assert hello.layer_start is not None
    assert hello.layer_end is not None
    return LayerSpan(hello.layer_start, hello.layer_end, hello.has_output)


def register(host: Host, hello: PeerHello, address: Address, *, dialled: bool) -> WorkerRecord:
    """Make the acquaintance of a worker that was not refused, and describe it.

    Args:
        host: The coordinator.
        hello: What the worker says.
        address: Where other stages reach it.
        dialled: We connected to it, not it to us.
    """
    record = WorkerRecord(
        link=host.new_link_id(),
        address=address,
        span=span_of(hello),
        n_ctx=hello.ctx_size,
        has_hidden=hello.has_hidden,
        dialled=dialled,
        features=frozenset(hello.features),
        weight_bytes=hello.weight_bytes,
        alive_timeout=agreed_timeout(host.introduce().alive_timeout, hello.alive_timeout),
    )
    host.acquaintances.meet(record.name, hello)
    return record
