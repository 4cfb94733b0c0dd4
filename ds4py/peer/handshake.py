"""Ask whether the other side is a ds4py too, and remember when it is not.

Owns: the dialling side of the extension handshake (docs/design/protocol-extensions.md). Refuses to
know: who dials whom, what follows. Invariant: a peer that was found to be plain is asked again
after a while, since it may have been replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from ds4py.errors import ClusterError, PeerClosedError
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
        RemoteProtocolError: The answer cannot be read.
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
