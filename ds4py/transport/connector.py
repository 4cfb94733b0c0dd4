"""Every connection that this process opens.

Owns: the way from an address to a connection that is ready for frames. Refuses to know: what is
said on it, when to try again after all attempts failed. Invariant: nobody else dials, so what a
connection needs (options, cores, security) is decided in one place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ds4py.config import Address, SocketConfig
from ds4py.transport.connection import Connection
from ds4py.transport.security import HANDSHAKE_SECONDS, PLAIN, Security
from ds4py.transport.sockets import RETRY_ROUNDS, connect
from ds4py.transport.stream import PlainStream


class Connector:
    """Opens connections; may be used by any number of threads.

    Args:
        config: Socket options, source address, cores of the threads that serve a connection.
        security: What comes before the first frame.
    """

    def __init__(self, config: SocketConfig, security: Security = PLAIN):
        self._config = config
        self.security = security

    def connect(
        self,
        address: Address,
        limits: Mapping[int, int],
        *,
        rounds: int = RETRY_ROUNDS,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Connection:
        """Connect to an address, retrying while the other side may still be starting.

        See docs/spec/wire-protocol.md#connecting.

        Args:
            address: Host and port to dial.
            limits: Accepted frame types with their largest bodies in bytes.
            rounds: Attempts, 25 ms apart, while the failure is one that may pass.
            stopped: Polled between attempts; True gives up.

        Raises:
            ConnectError: Nobody could be reached; names the address and the last reason.
            TransportError: Somebody was reached, but not whom `security` demands.
        """
        sock = connect(address, self._config, rounds=rounds, stopped=stopped)
        stream = PlainStream(sock, self._config)
        try:
            secured = self.security.dial(stream, time.monotonic() + HANDSHAKE_SECONDS)
        except BaseException:
            stream.close()
            raise
        return Connection(secured, limits, cores=self._config.cores)
