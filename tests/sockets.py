"""Connected pairs over loopback and threads that hand their outcome back."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

from ds4py.config import SocketConfig
from ds4py.transport.connection import Connection
from ds4py.transport.sockets import set_options
from ds4py.transport.stream import PlainStream

T = TypeVar("T")
DEADLINE = 20.0
SOCKETS = SocketConfig(buffer_mb=0, send_timeout=10)


@contextmanager
def tcp_pair(*, buffer_bytes: int = 0) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of one TCP connection on loopback; small buffers on request."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        if buffer_bytes:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        ours = socket.socket()
        if buffer_bytes:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        ours.connect(server.getsockname())
        theirs, _ = server.accept()
    theirs.settimeout(DEADLINE)
    with ours, theirs:
        yield ours, theirs


def frames_over(
    sock: socket.socket, limits: Mapping[int, int], config: SocketConfig = SOCKETS
) -> Connection:
    """A connection on a socket of the test's own, tuned already."""
    return Connection(PlainStream(sock, config), limits, cores=config.cores)


@contextmanager
def connected(
    limits: dict[int, int], config: SocketConfig = SOCKETS, *, buffer_bytes: int = 0
) -> Iterator[tuple[Connection, socket.socket]]:
    """Our end as a `Connection`, the other end raw."""
    with tcp_pair(buffer_bytes=buffer_bytes) as (ours, theirs):
        set_options(ours, config)
        connection = frames_over(ours, limits, config)
        try:
            yield connection, theirs
        finally:
            connection.close()


class Background(Generic[T]):
    """Runs a function on a thread; `result` waits for its value or raises its error."""

    def __init__(self, function: Callable[[], T]):
        self._function = function
        self._value: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as e:  # noqa: BLE001 - handed to the test
            self._error = e

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> T:
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive(), "the call never returned"
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


def read_exactly(sock: socket.socket, n: int) -> bytes:
    """Read `n` bytes, or fewer at the end of the stream."""
    got = bytearray()
    while len(got) < n and (part := sock.recv(n - len(got))):
        got += part
    return bytes(got)


def read_to_end(sock: socket.socket) -> bytes:
    """Read until the peer closes; a reset ends the stream as well."""
    got = bytearray()
    try:
        while part := sock.recv(1 << 16):
            got += part
    except ConnectionResetError:
        pass
    return bytes(got)
