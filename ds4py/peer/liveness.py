"""Say "I am here" on a connection, and notice when the other side no longer does.

Owns: the rhythm of both, and the thread that keeps it. Refuses to know: what is said besides, what
a loss means. Invariant: a peer that is silent is given up within the agreed time; one that sends
anything, a part of a large frame too, or that we do not listen to ourselves just now, never is.

Both sides count ticks instead of reading a clock, so that a process which was stopped itself does
not blame its peers when it goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from ds4py.errors import TransportError, TransportTimeoutError
from ds4py.transport.connection import Connection
from ds4py.transport.outbox import Outbox
from ds4py.wire.extensions import Alive

log = logging.getLogger(__name__)

_SILENT_TICKS: Final = 4
_TICKS: Final = _SILENT_TICKS + 1  # in the agreed time: the first one sees the last bytes


def agreed_timeout(ours: float | None, theirs: float | None) -> float | None:
    """Return the seconds of silence that end a connection; None if one side does not take part."""
    return None if ours is None or theirs is None else min(ours, theirs)


class Heartbeat:
    """Keeps one connection alive, or ends it; starts at once.

    Args:
        connection: What is listened to.
        outbox: What it says goes here, but only when nothing else is on its way.
        timeout: Seconds of silence after which the peer counts as lost.
        lost: Called once, on a thread of its own, when that happens.
    """

    def __init__(
        self,
        connection: Connection,
        outbox: Outbox,
        timeout: float,
        lost: Callable[[TransportTimeoutError], None],
    ):
        self._connection = connection
        self._outbox = outbox
        self._timeout = timeout
        self._lost = lost
        self._stopped = threading.Event()
        self._heard = -1
        self._silent_ticks = 0
        name = f"heartbeat {connection.peer}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def stop(self) -> None:
        """End; idempotent, from any thread."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._timeout / _TICKS) and not self._connection.closed:
            if self._is_silent():
                peer = str(self._connection.peer)
                self._lost(TransportTimeoutError(f"silent for {self._timeout:g} s", peer=peer))
                return
            if self._outbox.idle:  # what is on its way says the same
                self._say_alive()

    def _say_alive(self) -> None:
        try:
            self._outbox.offer(Alive().encode())
        except TransportError as e:  # the connection's reader is told, and stops us
            log.debug("heartbeat: %s", e)

    def _is_silent(self) -> bool:
        heard = self._connection.n_received
        if heard != self._heard or not self._connection.receiving:
            self._heard, self._silent_ticks = heard, 0
        else:
            self._silent_ticks += 1
        return self._silent_ticks >= _SILENT_TICKS
