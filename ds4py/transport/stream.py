"""Bytes in both directions between two processes: what a connection stands on.

Owns: the contract `Stream`, and its one form today, a bare TCP socket: scatter sends, deadlines,
how a blocked thread is woken. Refuses to know: frames, locks, who dialled whom. Invariant: nothing
above this module touches a socket, so that another form (encrypted, or over other cables) needs a
new class here and no new caller.

The errors of a stream are the operating system's, so that one place (`Connection`) puts them into
words, whatever the form. A wait that ran out is `BlockingIOError`, as it is for a socket with a
timeout in the kernel, and not `TimeoutError`: that is what the kernel says of a path that is dead.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from typing import Final, Protocol

from ds4py.config import Address, SocketConfig
from ds4py.errors import ConnectError
from ds4py.transport.sockets import Socket, local_address, peer_address, set_timeout, shut_down

Buffer = bytes | bytearray | memoryview
"""One piece of what is sent: single bytes, contiguous."""

_IOV_MAX: Final = 512
_SHORTEST: Final = 0.001
"""Seconds of a wait whose deadline has passed: to the kernel 0 means no timeout at all."""


class Stream(Protocol):
    """Two directions of bytes.

    At most one thread receives and at most one sends at any time, both at once; `shutdown` may be
    called from any thread, `close` when no thread is inside another method. `Connection` sees to
    all of that.
    """

    @property
    def peer(self) -> Address:
        """Numeric address of the other side."""

    @property
    def local(self) -> Address:
        """Numeric address of our side."""

    def recv_into(self, buffer: memoryview, deadline: float | None = None) -> int:
        """Wait for bytes and put some into a buffer.

        Args:
            buffer: Writable, not empty; never filled with more than has come.
            deadline: Of `time.monotonic`, for the first byte; None takes the configured receive
                timeout from now on, which by default waits for ever.

        Returns:
            How many bytes came; 0 at the end of the stream, or after `shutdown`.

        Raises:
            BlockingIOError: Nothing came in time; the stream can still be used.
            OSError: The stream is lost.
        """

    def send_pieces(self, pieces: Sequence[Buffer]) -> None:
        """Send all of some buffers in order, waiting as often as the other side makes progress.

        Raises:
            BlockingIOError: The other side took nothing for longer than the send timeout; some
                bytes may have left, so that only `shutdown` and `close` make sense now.
            OSError: The stream is lost.
        """

    def try_send(self, pieces: Sequence[Buffer]) -> Sequence[Buffer]:
        """Send what leaves without waiting.

        Returns:
            What `send_pieces` must be given before anything else is sent; nothing if all has left.
            A form that holds bytes back itself (a record that is encrypted already) answers with
            an empty piece when only those are left.

        Raises:
            OSError: The stream is lost.
        """

    def shutdown(self) -> None:
        """End both directions, so that threads inside the other methods return; idempotent."""

    def close(self) -> None:
        """Give the descriptor back; idempotent."""


def after(pieces: Sequence[Buffer], n_bytes: int) -> Sequence[Buffer]:
    """Return what follows the first `n_bytes` of some pieces; no piece if that is nothing."""
    for index, piece in enumerate(pieces):
        if n_bytes < len(piece):
            return [memoryview(piece)[n_bytes:], *pieces[index + 1 :]]
        n_bytes -= len(piece)
    return ()


class PlainStream:
    """A stream over a TCP socket, as it is.

    Timeouts are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO): the socket blocks, so one system call
    moves bytes, where Python's own timeouts would poll before each.

    Args:
        sock: Connected and tuned by `sockets.set_options`; owned by this object from now on.
        config: What it was tuned with.

    Attributes:
        sock: As given, for somebody who takes the caller over: the stream is forgotten then.
        peer: See `Stream`.
        local: See `Stream`.

    Raises:
        ConnectError: The connection is gone already; the socket is closed.
    """

    def __init__(self, sock: Socket, config: SocketConfig):
        self.sock = sock
        self._recv_timeout = config.recv_timeout
        self._timed = False  # the socket has a deadline's timeout, not the configured one
        try:
            self.peer: Address = peer_address(sock)
        except ConnectError:
            sock.close()
            raise
        self.local: Address = local_address(sock)

    def recv_into(self, buffer: memoryview, deadline: float | None = None) -> int:
        """See `Stream`."""
        if deadline is not None or self._timed:
            self._wait_until(deadline)
        return self.sock.recv_into(buffer)

    def peek(self, n_bytes: int, deadline: float) -> bytes:
        """Wait for bytes and leave them unread; as `recv_into`, but fewer may be seen than came.

        For telling protocols apart before anybody owns the stream, so `Stream` has no such method.
        """
        self._wait_until(deadline)
        return self.sock.recv(n_bytes, socket.MSG_PEEK)

    def _wait_until(self, deadline: float | None) -> None:
        """Let the next read end at a deadline; without one, by the configured timeout again."""
        seconds = self._recv_timeout
        if deadline is not None:
            seconds = max(deadline - time.monotonic(), _SHORTEST)
        self._timed = deadline is not None
        set_timeout(self.sock, socket.SO_RCVTIMEO, seconds)

    @property
    def ended(self) -> bool:
        """Whether the other side sends no more, where the system can tell before all is read."""
        ended = getattr(select, "POLLRDHUP", 0)
        if not ended:
            return False
        poll = select.poll()
        poll.register(self.sock, ended)
        return bool(poll.poll(0))

    def send_pieces(self, pieces: Sequence[Buffer]) -> None:
        """See `Stream`."""
        while pieces:
            pieces = after(pieces, self.sock.sendmsg(pieces[:_IOV_MAX]))

    def try_send(self, pieces: Sequence[Buffer]) -> Sequence[Buffer]:
        """See `Stream`."""
        try:
            while pieces:
                sent = self.sock.sendmsg(pieces[:_IOV_MAX], [], socket.MSG_DONTWAIT)
                pieces = after(pieces, sent)
        except BlockingIOError:
            pass
        return pieces

    def shutdown(self) -> None:
        """See `Stream`."""
        shut_down(self.sock)

    def close(self) -> None:
        """See `Stream`."""
        self.sock.close()
