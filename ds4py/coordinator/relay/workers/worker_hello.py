"""What a coordinator makes of a worker's half of the extension handshake.

Owns: whether it is refused, and the record of a worker that is not
(docs/design/protocol-extensions.md). Refuses to know: who dials whom, what follows. Invariant: no
record is made of a worker that was refused.
"""

from __future__ import annotations

from typing import Protocol

from ds4py.config import Address
from ds4py.coordinator.relay.workers.registry import LinkId, WorkerRecord
from ds4py.layer_range import LayerRange
from ds4py.peer.known_peers import PeerIdentityLog
from ds4py.peer.liveness import agreed_timeout
from ds4py.peer.validation import CoordinatorFacts, check_hello
from ds4py.wire.extensions import PeerHello


class RegistrarHost(Protocol):
    """What both ways to a worker need of the coordinator."""

    known_peers: PeerIdentityLog

    def introduce(self) -> PeerHello:
        """Return our half of the handshake."""

    def facts(self) -> CoordinatorFacts:
        """Return what a worker's half is compared with."""

    def new_link_id(self) -> LinkId:
        """Return a name for a new link."""


def refusal_of(hello: PeerHello, facts: CoordinatorFacts) -> str | None:
    """Return why a ds4py cannot serve as a worker, in words for both logs."""
    if hello.role != "worker":
        return "is no worker"
    refusal = check_hello(hello, facts)
    return None if refusal is None else refusal.text


def layers_of(hello: PeerHello) -> LayerRange:
    """Return the layers of a worker that was not refused."""
    assert hello.layer_start is not None
    assert hello.layer_end is not None
    return LayerRange(hello.layer_start, hello.layer_end, hello.has_output)


def register(
    host: RegistrarHost, hello: PeerHello, address: Address, *, dialled: bool
) -> WorkerRecord:
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
        layers=layers_of(hello),
        n_ctx=hello.ctx_size,
        has_hidden=hello.has_hidden,
        dialled=dialled,
        features=frozenset(hello.features),
        weight_bytes=hello.weight_bytes,
        alive_timeout=agreed_timeout(host.introduce().alive_timeout, hello.alive_timeout),
    )
    host.known_peers.meet(record.name, hello)
    return record
