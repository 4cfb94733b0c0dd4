"""Tell DS4D from HTTP by the first bytes of a connection.

Owns: the peek. Refuses to know: either protocol beyond its first word. Invariant: no byte is
consumed, so anyone who gets the socket reads the stream from its start.
"""

from __future__ import annotations

import select
import socket
import time
from enum import Enum
from typing import Final

from ds4py.transport.sockets import set_timeout

_MAGIC: Final = b"DS4D"
_PAUSE: Final = 0.005


class Spoken(Enum):
    """What the other side speaks."""

    DS4D = "ds4d"
    OTHER = "other"
    NOTHING = "nothing"


def first_words(sock: socket.socket, *, timeout: float) -> Spoken:
    """Wait for the first bytes and classify them.

    Args:
        sock: Freshly accepted; its receive timeout is changed and must be set again.
        timeout: Seconds to wait for enough bytes.
    """
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        set_timeout(sock, socket.SO_RCVTIMEO, max(left, 0.001))
        ended = _has_ended(sock)  # asked first: what is seen after that is all there will be
        try:
            seen = sock.recv(len(_MAGIC), socket.MSG_PEEK)
        except OSError:
            return Spoken.NOTHING
        if not seen:
            return Spoken.NOTHING
        if seen == _MAGIC:
            return Spoken.DS4D
        if not _MAGIC.startswith(seen):
            return Spoken.OTHER
        if ended:
            return Spoken.NOTHING
        time.sleep(_PAUSE)  # a prefix of the magic: peeking returns at once, so wait for the rest
    return Spoken.NOTHING


def _has_ended(sock: socket.socket) -> bool:
    """Tell whether the other side has closed, where the system can tell that before it is read."""
    ended = getattr(select, "POLLRDHUP", 0)
    if not ended:
        return False
    poll = select.poll()
    poll.register(sock, ended)
    return bool(poll.poll(0))
