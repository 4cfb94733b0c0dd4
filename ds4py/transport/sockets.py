"""Open, tune and name TCP sockets.

Owns: socket options (docs/spec/wire-protocol.md#socket-options), the connect and retry policy
(docs/spec/wire-protocol.md#connecting), listeners. Refuses to know: frames. Invariant: a socket
that leaves this module is blocking, carries the configured options, and knows a numeric name for
its peer.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Final

from ds4py.config import Address, SocketConfig
from ds4py.errors import ConfigError, ConnectError

log = logging.getLogger(__name__)

Socket = socket.socket
"""For rooms that pass sockets on without touching them."""

BACKLOG: Final = 64
RETRY_PAUSE: Final = 0.025
RETRY_ROUNDS: Final = 200
_RETRYABLE: Final = {
    errno.ECONNREFUSED,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ETIMEDOUT,
    errno.EADDRNOTAVAIL,
}
_POLL_SECONDS: Final = 0.5


def set_options(sock: socket.socket, config: SocketConfig) -> None:
    """Apply wire-protocol.md#socket-options; a system that refuses one is left as it is."""
    size = config.buffer_mb << 20
    options = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        *([(socket.SOL_SOCKET, socket.SO_SNDBUF, size)] if size else []),
        *([(socket.SOL_SOCKET, socket.SO_RCVBUF, size)] if size else []),
    ]
    for level, name, value in options:
        try:
            sock.setsockopt(level, name, value)
        except OSError as e:
            log.debug("socket option %d refused: %s", name, e)
    set_timeout(sock, socket.SO_SNDTIMEO, config.send_timeout)
    set_timeout(sock, socket.SO_RCVTIMEO, config.recv_timeout)


def set_timeout(sock: socket.socket, option: int, seconds: float | None) -> None:
    """Bound one direction of a blocking socket, by 1 us at least; None waits for ever."""
    # in the system's form two zeros mean no bound at all
    whole, part = (0.0, 0.0) if seconds is None else divmod(max(seconds, 1e-6), 1.0)
    try:
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(whole), int(part * 1e6)))
    except OSError as e:
        log.debug("socket timeout refused: %s", e)


def shut_down(sock: socket.socket) -> None:
    """End both directions, so that anyone who waits on the socket wakes; its owner closes it."""
    with contextlib.suppress(OSError):  # the peer was faster
        sock.shutdown(socket.SHUT_RDWR)


def peer_address(sock: socket.socket) -> Address:
    """Return the numeric address of the other side.

    Raises:
        ConnectError: The connection is gone already.
    """
    try:
        return _numeric(sock.getpeername())
    except OSError as e:
        raise ConnectError(f"connection is gone: {e.strerror}") from e


def local_address(sock: socket.socket) -> Address:
    """Return the numeric address of our side."""
    return _numeric(sock.getsockname())


def _numeric(name: tuple[str, int]) -> Address:
    flags = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    host, port = socket.getnameinfo(name, flags)
    return Address(host, int(port))


def connect(
    address: Address,
    config: SocketConfig,
    *,
    rounds: int = RETRY_ROUNDS,
    stopped: Callable[[], bool] = lambda: False,
) -> socket.socket:
    """Connect to an address, retrying while the other side may still be starting.

    See docs/spec/wire-protocol.md#connecting.

    Args:
        address: Host and port to dial.
        config: Socket options.
        rounds: Attempts, 25 ms apart, while the failure is one that may pass.
        stopped: Polled between attempts; True gives up.

    Raises:
        ConnectError: Nobody could be reached; names the address and the last reason.
    """
    if address.is_wildcard:
        raise ConnectError("names every interface and cannot be dialled", peer=str(address))
    reason = "gave up"
    for attempt in range(rounds):
        if attempt:
            time.sleep(RETRY_PAUSE)
        if stopped():
            break
        try:
            return _connect_once(address, config)
        except UnicodeError:  # from the codec of host names, which a route may fill with anything
            reason = "the host is no name and no address"
            break
        except OSError as e:
            # a blocking connect whose send timeout has passed reports "in progress"
            late = e.errno == errno.EINPROGRESS
            reason = "timed out" if late else e.strerror or str(e)
            if config.connect_trace:
                log.info("connect to %s, attempt %d: %s", address, attempt + 1, reason)
            if e.errno not in _RETRYABLE:
                break
    raise ConnectError(f"unable to connect: {reason}", peer=str(address))


def _connect_once(address: Address, config: SocketConfig) -> socket.socket:
    """Try every resolved candidate in order; raise the last error."""
    last: OSError = OSError(errno.EADDRNOTAVAIL, "the name resolves to no address")
    for family, kind, proto, _, target in socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM
    ):
        sock = socket.socket(family, kind, proto)
        try:
            set_options(sock, config)
            _bind_source(sock, family, config)
            sock.connect(target)
        except OSError as e:
            sock.close()
            last = e
        else:
            return sock
    raise last


def _bind_source(sock: socket.socket, family: int, config: SocketConfig) -> None:
    """Choose the interface and source address of an outgoing connection."""
    if config.bind_interface:
        # Linux can only bind a device by name; ds4 refuses this variable there, we do better.
        name = config.bind_interface.encode() + b"\0"
        sock.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_BINDTODEVICE", 25), name)
    if config.bind_host:
        found = socket.getaddrinfo(config.bind_host, 0, family, socket.SOCK_STREAM)
        sock.bind(found[0][4])


class Listener:
    """A listening socket whose `accept` can be ended from another thread.

    Args:
        address: Where to listen; port 0 lets the system choose, an empty host takes all addresses.
        config: Options of accepted sockets.

    Attributes:
        config: As given.

    Raises:
        ConfigError: The address cannot be used; says why and what to do.
    """

    def __init__(self, address: Address, config: SocketConfig):
        self.config = config
        self._sock = listen(address)
        self._sock.setblocking(False)  # a caller may be gone again when we accept
        set_options(self._sock, config)
        self.address = local_address(self._sock)
        self._closed = False
        self._poll = select.poll()  # unlike select, takes any descriptor number
        self._poll.register(self._sock, select.POLLIN)

    def accept(self) -> socket.socket | None:
        """Wait for the next connection; None once the listener is closed."""
        said = ""
        while not self._closed:
            try:
                if not self._poll.poll(_POLL_SECONDS * 1000):
                    continue
                sock, _ = self._sock.accept()
            except BlockingIOError:
                continue
            except OSError as e:
                if not self._closed:
                    if str(e) != said:  # out of descriptors: once is enough, it may last
                        log.warning("accept on %s failed, trying on: %s", self.address, e)
                    said = str(e)
                    time.sleep(RETRY_PAUSE)
                continue
            sock.setblocking(True)
            set_options(sock, self.config)
            return sock
        return None

    def close(self) -> None:
        """Stop listening; idempotent."""
        self._closed = True
        shut_down(self._sock)  # wakes the poll; not every system can
        self._sock.close()


def listen(address: Address) -> socket.socket:
    """Bind and listen on the first resolved address that works.

    Raises:
        ConfigError: None works; says why and what to do.
    """
    host = None if address.host in {"", "*"} else address.host
    last: OSError | None = None
    try:
        candidates = socket.getaddrinfo(
            host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as e:
        reason = getattr(e, "strerror", None) or "the host is no name and no address"
        raise ConfigError(f"listen address {address}: {reason}; use another host") from e
    for family, kind, proto, _, target in candidates:
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(target)
            sock.listen(BACKLOG)
        except OSError as e:
            sock.close()
            last = e
        else:
            return sock
    reason = "no such address" if last is None else last.strerror
    raise ConfigError(
        f"listen address {address}: {reason}; choose another port, or stop the program that uses it"
    ) from last
