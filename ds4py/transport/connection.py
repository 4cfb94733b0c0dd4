"""One DS4D connection: frames in, buffers out.

Owns: a stream, its frame reader, its send lock, the words for its errors. Refuses to know: what
the frames mean, what the stream is made of. Invariant: one thread receives; any thread may send;
`close` wakes both and may be called from anywhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from ds4py.config import Address
from ds4py.errors import PeerClosedError, TransportTimeoutError
from ds4py.transport.stream import Buffer, Stream
from ds4py.wire.frames import Frame, FrameReader

T = TypeVar("T")


def _allocate(n_bytes: int) -> memoryview:
    """Take memory without clearing it: zeroing a large body halves the receive rate."""
    return np.empty(n_bytes, np.uint8).data


class Connection:
    """A stream that speaks frames; made by `Connector` and `Acceptor` only.

    Args:
        stream: Owned by this object from now on.
        limits: Accepted frame types with their largest bodies.
        cores: What threads that do nothing but serve this connection may use; none means all.

    Attributes:
        stream: What the frames travel on.
        peer: Numeric address of the other side.
        local: Numeric address of our side.
        cores: As given.
        receiving: Whether a thread waits for bytes now.
        n_received: Grows whenever bytes come, also in the middle of a frame.
    """

    def __init__(self, stream: Stream, limits: Mapping[int, int], *, cores: tuple[int, ...] = ()):
        self.stream = stream
        self.peer: Address = stream.peer
        self.local: Address = stream.local
        self.cores = cores
        self._send_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._closed = False
        self._sending = False  # like `receiving`: a thread uses the descriptor
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
        self.receiving = True
        try:
            if self._closed:
                return None
            return self._receive(None if timeout is None else time.monotonic() + timeout)
        finally:
            self.receiving = False
            if self._closed:
                self._release()

    def _receive(self, deadline: float | None) -> Frame | None:
        reader, recv_into = self._reader, self.stream.recv_into
        while True:
            try:
                count = recv_into(reader.writable(), deadline)
            except BlockingIOError as e:
                raise TransportTimeoutError("sent nothing for too long", peer=str(self.peer)) from e
            except OSError as e:
                if self._closed:
                    return None
                raise PeerClosedError(f"connection lost: {e.strerror}", peer=str(self.peer)) from e
            if count == 0:
                if reader.mid_frame and not self._closed:
                    raise PeerClosedError("closed in the middle of a frame", peer=str(self.peer))
                return None
            self.n_received += 1
            frame = reader.filled(count)
            if frame is not None:
                return frame
            if deadline is not None and time.monotonic() >= deadline:
                raise TransportTimeoutError("sent too little in time", peer=str(self.peer))

    def send(self, pieces: Sequence[Buffer]) -> None:
        """Send one frame's buffers in order with as few system calls as possible.

        Args:
            pieces: Buffers of single bytes, such as `encode_frame` gives; unchanged until it
                returns.

        Raises:
            PeerClosedError: The peer is gone. TransportTimeoutError: it took nothing for too long.
                Either way the connection is closed, since a partial frame may be out.
        """
        self._send(self.stream.send_pieces, pieces)

    def send_now(self, pieces: Sequence[Buffer]) -> Sequence[Buffer]:
        """Send what the stream takes at once and return the rest, which must leave next.

        For the one caller that owns the order of the frames (see `Outbox`); raises as `send`.
        """
        return self._send(self.stream.try_send, pieces)

    def _send(self, way: Callable[[Sequence[Buffer]], T], pieces: Sequence[Buffer]) -> T:
        with self._send_lock:
            self._sending = True
            try:
                if self._closed:
                    raise PeerClosedError("connection is closed", peer=str(self.peer))
                return way(pieces)
            except BlockingIOError as e:
                self.close()
                raise TransportTimeoutError("took no data for too long", peer=str(self.peer)) from e
            except OSError as e:
                self.close()
                raise PeerClosedError(f"connection lost: {e.strerror}", peer=str(self.peer)) from e
            finally:
                self._sending = False
                if self._closed:
                    self._release()

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
            self.stream.shutdown()
        self._release()

    def _release(self) -> None:
        """Give the descriptor back, unless a thread still uses it, which will do so itself.

        Closed under a thread that is about to read, its number could already belong to another
        connection, and that thread would steal its bytes. Threads raise their flag before they look
        whether the connection is closed, and this looks at the flags after it was closed: so at
        least one of both notices the other, without a lock around every frame.
        """
        with self._close_lock:
            if not (self.receiving or self._sending):
                self.stream.close()
