"""One DS4D connection: frames in, buffers out.

Owns: a socket, its frame reader, its send lock. Refuses to know: what the frames mean. Invariant:
one thread receives; any thread may send; `close` wakes both and may be called from anywhere.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from ds4py.config import Address, SocketConfig
from ds4py.errors import PeerClosedError, TransportError, TransportTimeoutError
from ds4py.transport.sockets import local_address, peer_address, set_timeout, shut_down
from ds4py.wire.frames import Frame, FrameReader

Buffer = bytes | bytearray | memoryview
_IOV_MAX = 512


def _allocate(n_bytes: int) -> memoryview:
    """Take memory without clearing it: zeroing a large body halves the receive rate."""
    return np.empty(n_bytes, np.uint8).data


class Connection:
    """A connected socket that speaks frames.

    Args:
        sock: Connected and tuned; owned by this object from now on.
        config: Socket options, for the receive timeout outside handshakes.
        limits: Accepted frame types with their largest bodies.

    Attributes:
        peer: Numeric address of the other side.
        local: Numeric address of our side.
        receiving: Whether a thread waits for bytes now.
        n_received: Grows whenever bytes come, also in the middle of a frame.
    """

    def __init__(self, sock: socket.socket, config: SocketConfig, limits: Mapping[int, int]):
        self._sock = sock
        self._config = config
        self._send_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._closed = False
        self._users = 0  # calls that are using the descriptor; the last one out closes it
        try:
            self.peer: Address = peer_address(sock)
        except TransportError:
            sock.close()
            raise
        self.local: Address = local_address(sock)
        self.receiving = False
        self.n_received = 0
        self._reader = FrameReader(limits, _allocate)

    def expect(self, limits: Mapping[int, int]) -> None:
        """Change the accepted frame types; only between frames, on the receiving thread."""
        assert not self._reader.mid_frame
        self._reader = FrameReader(limits, _allocate)

    def receive(self, *, timeout: float | None = None) -> Frame | None:
        """Wait for the next frame; None at the end of the stream.

        Args:
            timeout: Seconds for the whole frame, so that a byte now and then does not help; None
                takes the configured receive timeout, which by default waits for ever.

        Raises:
            RemoteProtocolError: The bytes are no frame, or one beyond its limit.
            TransportTimeoutError: The frame did not come in time.
            PeerClosedError: The connection was reset, or ended inside a frame.
        """
        if not self._enter():
            return None
        self.receiving = True
        try:
            if timeout is None:
                return self._receive(None)
            try:
                return self._receive(time.monotonic() + timeout)
            finally:
                set_timeout(self._sock, socket.SO_RCVTIMEO, self._config.recv_timeout)
        finally:
            self.receiving = False
            self._leave()

    def _receive(self, deadline: float | None) -> Frame | None:
        while True:
            if deadline is not None:
                left = max(deadline - time.monotonic(), 0.001)  # 0 would mean no timeout at all
                set_timeout(self._sock, socket.SO_RCVTIMEO, left)
            try:
                count = self._sock.recv_into(self._reader.writable())
            except BlockingIOError as e:
                raise TransportTimeoutError("sent nothing for too long", peer=str(self.peer)) from e
            except OSError as e:
                if self._closed:
                    return None
                raise PeerClosedError(f"connection lost: {e.strerror}", peer=str(self.peer)) from e
            if count == 0:
                if self._reader.mid_frame and not self._closed:
                    raise PeerClosedError("closed in the middle of a frame", peer=str(self.peer))
                return None
            self.n_received += 1
            frame = self._reader.filled(count)
            if frame is not None:
                return frame
            if deadline is not None and time.monotonic() >= deadline:
                raise TransportTimeoutError("sent too little in time", peer=str(self.peer))

    def send(self, pieces: Sequence[Buffer]) -> None:
        """Send one frame's buffers in order with as few system calls as possible.

        Raises:
            PeerClosedError: The peer is gone. TransportTimeoutError: it took nothing for too long.
                Either way the connection is closed, since a partial frame may be out.
        """
        self._send(pieces, 0)

    def send_now(self, pieces: Sequence[Buffer]) -> Sequence[Buffer]:
        """Send what the socket takes at once and return the rest, which must leave next.

        For the one caller that owns the order of the frames (see `Outbox`); raises as `send`.
        """
        return self._send(pieces, socket.MSG_DONTWAIT)

    def _send(self, pieces: Sequence[Buffer], flags: int) -> list[memoryview]:
        with self._send_lock:
            if not self._enter():
                raise PeerClosedError("connection is closed", peer=str(self.peer))
            try:
                return self._send_all([memoryview(p).cast("B") for p in pieces if len(p)], flags)
            except TransportError:
                self.close()
                raise
            finally:
                self._leave()

    def _send_all(self, views: list[memoryview], flags: int) -> list[memoryview]:
        while views:
            try:
                sent = self._sock.sendmsg(views[:_IOV_MAX], [], flags)
            except BlockingIOError as e:
                if flags & socket.MSG_DONTWAIT:
                    return views
                raise TransportTimeoutError("took no data for too long", peer=str(self.peer)) from e
            except OSError as e:
                raise PeerClosedError(f"connection lost: {e.strerror}", peer=str(self.peer)) from e
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if sent:
                views[0] = views[0][sent:]
        return views

    @property
    def closed(self) -> bool:
        """Whether our side has closed the connection."""
        return self._closed

    def close(self) -> None:
        """Shut both directions down, so that blocked threads wake; idempotent."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            shut_down(self._sock)
            if not self._users:
                self._sock.close()

    def _enter(self) -> bool:
        """Keep the descriptor open; False if it is closed.

        Closed under a thread that is about to read, its number could already belong to another
        connection, and that thread would steal its bytes.
        """
        with self._close_lock:
            self._users += not self._closed
            return not self._closed

    def _leave(self) -> None:
        with self._close_lock:
            self._users -= 1
            if self._closed and not self._users:
                self._sock.close()
