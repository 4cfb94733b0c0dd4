"""Coordinators of any model, and fleets of workers that are answered by hand."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from ds4py.config import CoordinatorConfig
from ds4py.contracts import ModelCard, Session
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.relay.workers.listener import coordinator_port
from ds4py.coordinator.session_pool import SessionPool
from ds4py.transport.sockets import Listener
from tests.by_hand import PROMPT
from tests.clusters import ANY_PORT, DEADLINE, SOCKETS, Cluster, cluster
from tests.conformance.statements.peer import (
    HASTY,
    INIT,
    N_CTX,
    RESET,
    RESULT,
    RETURN,
    Asked,
    Hop,
    Peer,
    enlisted,
    result,
)
from tests.fake_runner import FakeRunner
from tests.sockets import Background


@contextmanager
def coordinator_of(
    model: ModelCard, config: CoordinatorConfig = HASTY, local: FakeRunner | None = None
) -> Iterator[Cluster]:
    """Run a coordinator of any model, without workers."""
    coordinator = Coordinator(model, N_CTX, config, SOCKETS, local=local)
    port = coordinator_port(Listener(ANY_PORT, SOCKETS), coordinator)
    port.start()
    try:
        yield Cluster(coordinator, SessionPool(coordinator, 1), port)
    finally:
        port.close()
        coordinator.close()


class Member(NamedTuple):
    """A worker that registers: its layers, head, and whether it returns hidden states."""

    start: int
    end: int
    output: int = 0
    has_hidden: int = 1
    host: str = "127.0.0.1"


class Fleet:
    """A coordinator and the hand-driven workers that registered with it, in this order."""

    def __init__(self, c: Cluster, peers: Sequence[Peer], session: Session):
        self.cluster = c
        self.peers = peers
        self.session = session

    def who_is_asked(self) -> Peer:
        """Wait until exactly one of the workers hears something."""
        (heard,) = select.select([peer.sock for peer in self.peers], [], [], DEADLINE)[0]
        return next(peer for peer in self.peers if peer.sock is heard)

    def sync(self) -> tuple[Asked, list[int]]:
        """Evaluate the prompt; return its WORK and the places of the workers on its route."""
        running = Background(lambda: self.session.sync(PROMPT))
        peer = self.who_is_asked()
        asked = peer.asked()
        peer.send(RESULT, result(asked))
        running.result()
        route = places(asked)
        assert peer is self.peers[route[0]]
        return asked, route


@contextmanager
def fleet(*members: Member, local: str | None = None, head: bool = False) -> Iterator[Fleet]:
    with ExitStack() as stack:
        c = stack.enter_context(cluster([], config=HASTY, local=local, head=head))
        peers = [
            stack.enter_context(
                enlisted(
                    c,
                    source=member.host,
                    layer_start=member.start,
                    layer_end=member.end,
                    has_output=member.output,
                    has_hidden=member.has_hidden,
                    listen_port=7000 + place,
                )
            )
            for place, member in enumerate(members)
        ]
        yield Fleet(c, peers, stack.enter_context(c.backend.lease(PROMPT)))


def hops(asked: Asked) -> list[Hop]:
    """Read a route blob (docs/spec/wire-protocol.md#route-plan)."""
    found, at = [], 0
    for _ in range(asked.route_count):
        size, port, start, end, output = struct.unpack_from(">5I", asked.blob, at)
        at += 20 + size
        found.append(Hop(start, end, output, asked.blob[at - size : at], port))
    assert asked.blob[at:] == RETURN
    return found


def places(asked: Asked) -> list[int]:
    """Return which members of a fleet a route goes through."""
    return [hop.port - 7000 for hop in hops(asked)]


def is_replay(asked: Asked, of: Asked, n_tokens: int) -> bool:
    """Whether a span holds the whole transcript, from zero, after another one of its session."""
    assert asked.session_id == of.session_id
    assert asked.request_id > of.request_id
    assert (asked.pos0, asked.prefix_hash, asked.n_tokens) == (0, INIT, n_tokens)
    return bool(asked.flags & RESET)


def abort(peer: Peer) -> None:
    """Leave with a reset."""
    peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.sock.close()
