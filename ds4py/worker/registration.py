"""A worker's way to the coordinator that it dials.

Owns: connecting, the extension handshake and its plain fallback, the HELLO
(docs/design/protocol-extensions.md, docs/spec/wire-protocol.md#life-cycle). Refuses to know: when
to try again, what is served.
Invariant: a coordinator that knows no extensions sees one connection that it closes, and then
exactly the stock protocol; with `plain` not even that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ds4py.config import Address
from ds4py.errors import ClusterError
from ds4py.peer.handshake import PlainMemory, ask
from ds4py.transport.connection import Connection
from ds4py.transport.connector import Connector
from ds4py.transport.sockets import RETRY_ROUNDS
from ds4py.wire.conversation import ProtocolState, Role
from ds4py.wire.extensions import PeerHello
from ds4py.wire.frames import EXT_HELLO, FrameType
from ds4py.wire.messages import ErrorText, Hello, encode

log = logging.getLogger(__name__)

_ONCE: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """How a worker introduces itself.

    Args:
        plain: In the stock protocol.
        extended: To another ds4py; None never speaks anything but the stock protocol.
        limits: Frames that a coordinator may send.
    """

    plain: Hello
    extended: PeerHello | None
    limits: dict[int, int]


@dataclass(frozen=True, slots=True)
class CoordinatorConnection:
    """A connection that the coordinator may use now.

    Args:
        connection: Owned by the receiver.
        conversation: Where it stands.
        peer: What the coordinator says about itself; None if it is a plain one.
    """

    connection: Connection
    conversation: ProtocolState
    peer: PeerHello | None


class CoordinatorClient:
    """Dials one coordinator.

    Args:
        address: Where.
        identity: Who we are.
        connector: Opens the connections.
        stopped: Polled between attempts; True gives up.
    """

    def __init__(
        self,
        address: Address,
        identity: WorkerIdentity,
        connector: Connector,
        stopped: Callable[[], bool],
    ):
        self._address = address
        self._identity = identity
        self._connector = connector
        self._stopped = stopped
        self._memory = PlainMemory()

    def dial(self) -> CoordinatorConnection | ErrorText:
        """Connect and introduce ourselves; the ERROR of a ds4py that does not want us.

        Raises:
            Ds4Error: The coordinator was not reached, or answered something else.
        """
        ours = self._identity.extended
        if ours is None or self._memory.is_plain:
            return self._dial_plain(RETRY_ROUNDS)
        connection = self._connect(RETRY_ROUNDS)
        try:
            answer = ask(connection, ours)
            if isinstance(answer, PeerHello):
                return _extended(connection, answer)
        except BaseException:
            connection.close()
            raise
        connection.close()
        return self._fall_back() if answer is None else answer

    def _fall_back(self) -> CoordinatorConnection:
        """Introduce ourselves in plain to a coordinator that closed without a word.

        One that has just died is not there a moment later: that does not make it a plain one.
        """
        enlisted = self._dial_plain(_ONCE)
        self._memory.remember()
        log.info("coordinator %s speaks the plain protocol", self._address)
        return enlisted

    def _dial_plain(self, rounds: int) -> CoordinatorConnection:
        connection = self._connect(rounds)
        conversation = ProtocolState(Role.WORKER_CONTROL)
        conversation.sent(FrameType.HELLO)
        connection.send(encode(self._identity.plain))
        return CoordinatorConnection(connection, conversation, None)

    def _connect(self, rounds: int) -> Connection:
        return self._connector.connect(
            self._address, self._identity.limits, rounds=rounds, stopped=self._stopped
        )


def _extended(connection: Connection, peer: PeerHello) -> CoordinatorConnection:
    if peer.role != "coordinator":
        raise ClusterError(f"is a {peer.role}, expected a coordinator")
    conversation = ProtocolState(Role.WORKER_CONTROL)
    conversation.sent(EXT_HELLO)
    conversation.received(EXT_HELLO)
    return CoordinatorConnection(connection, conversation, peer)
