"""The coordinator's one port: workers and HTTP clients come through the same door.

Owns: the listener, and telling the two apart by their first bytes. Refuses to know: what either of
them says. Invariant: a caller that says nothing costs one thread for a bounded time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from ds4py.config import Address, SocketConfig
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.errors import Ds4Error
from ds4py.transport.connection import Connection
from ds4py.transport.sockets import Listener, Socket, set_options, shut_down
from ds4py.transport.switch import Spoken, first_words
from ds4py.wire.frames import hello_limits

log = logging.getLogger(__name__)

_FIRST_WORD_SECONDS: Final = 10.0
_MAX_SILENT: Final = 256
_JOIN_SECONDS: Final = 5.0


class ProtocolDemux:
    """Accepts workers, and HTTP clients if somebody takes them.

    Args:
        listener: Where they come from; owned from now on.
        coordinator: Gets the workers.
        sockets: Socket options.
        on_http: Takes over a connection that does not speak DS4D, unread; None turns it away.
    """

    def __init__(
        self,
        listener: Listener,
        coordinator: Coordinator,
        sockets: SocketConfig,
        on_http: Callable[[Socket], None] | None,
    ):
        self._listener = listener
        self._coordinator = coordinator
        self._sockets = sockets
        self._on_http = on_http
        self._silent: set[Socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="accept", daemon=True)

    @property
    def address(self) -> Address:
        """The bound address."""
        return self._listener.address

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def close(self) -> None:
        """Stop accepting, and turn away callers that have said nothing yet; the others go on."""
        self._closed = True
        self._listener.close()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)
        with self._lock:
            for sock in self._silent:
                shut_down(sock)

    def _accept(self) -> None:
        while (sock := self._listener.accept()) is not None:
            with self._lock:
                welcome = len(self._silent) < _MAX_SILENT
                if welcome:
                    self._silent.add(sock)
            if not welcome:
                log.warning("too many connections that say nothing; one is turned away")
                sock.close()
                continue
            threading.Thread(target=self._sort, args=(sock,), name="caller", daemon=True).start()

    def _sort(self, sock: Socket) -> None:
        try:
            self._hand_over(sock, self._listen_to(sock))
        except Ds4Error as e:
            log.debug("caller on %s is gone: %s", self.address, e)
            sock.close()
        except Exception:  # one caller's bug must not leave its socket open
            log.exception("a caller on %s could not be served", self.address)
            sock.close()

    def _listen_to(self, sock: Socket) -> Spoken:
        try:
            return first_words(sock, timeout=_FIRST_WORD_SECONDS)
        finally:
            with self._lock:
                self._silent.discard(sock)

    def _hand_over(self, sock: Socket, spoken: Spoken) -> None:
        if spoken is Spoken.DS4D and not self._closed:
            set_options(sock, self._sockets)  # the peek has changed the receive timeout
            self._coordinator.welcome(Connection(sock, self._sockets, hello_limits()))
        elif spoken is Spoken.OTHER and self._on_http is not None:
            self._on_http(sock)
        else:
            if spoken is Spoken.OTHER:
                log.warning("a caller on %s speaks no DS4D; HTTP is elsewhere", self.address)
            sock.close()
