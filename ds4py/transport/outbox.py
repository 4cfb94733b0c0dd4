"""A bounded queue of frames in front of one connection, with the thread that sends them.

Owns: the order of outgoing frames and the wait for room. Refuses to know: what is sent. Invariant:
frames leave in the order in which `put` returned, those of `offer` before all that wait; a small
frame leaves on the caller's own thread when nothing is waiting, since a thread switch costs more
than the send.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from ds4py.errors import PeerClosedError, TransportError, TransportTimeoutError
from ds4py.transport.connection import Connection
from ds4py.transport.cores import run_on
from ds4py.transport.stream import Buffer

log = logging.getLogger(__name__)

_SPARE: Final = 64  # frames of `offer` that may wait beyond the depth
_INLINE_BYTES: Final = 768 << 10  # single tokens, and logits: copied faster than a thread wakes

Sent = Callable[[float], None]
"""Called with the seconds that the send took, on the thread that sent."""


class Outbox:
    """Sends frames of one connection in order.

    Args:
        connection: Where to; closed when a send fails, so that its reader wakes.
        depth: Frames that may wait.
        name: Thread name.
        timeout: Seconds that `put` waits for room.
    """

    def __init__(self, connection: Connection, *, depth: int, name: str, timeout: float):
        self._connection = connection
        self._depth = depth
        self._timeout = timeout
        self._waiting: deque[tuple[Sequence[Buffer], Sent | None]] = deque()
        self._torn = False  # a part of the first frame that waits is out already
        self._busy = False
        self._closed = False
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether nothing is being sent and nothing waits."""
        return not self._waiting and not self._busy

    def put(self, pieces: Sequence[Buffer], sent: Sent | None = None) -> None:
        """Queue one frame, or send at once what the stream takes without waiting.

        Raises:
            PeerClosedError: The connection is closed.
            TransportTimeoutError: No room for longer than the timeout.
        """
        small = sum(map(len, pieces)) <= _INLINE_BYTES
        with self._lock:
            if small and not (self._waiting or self._busy or self._closed):
                self._send_or_queue(pieces, sent)
                return
            deadline = time.monotonic() + self._timeout
            while len(self._waiting) >= self._depth and not self._closed:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise TransportTimeoutError(
                        "took no data for too long", peer=str(self._connection.peer)
                    )
            if self._closed:
                raise PeerClosedError("connection is closed", peer=str(self._connection.peer))
            self._waiting.append((pieces, sent))
            self._changed.notify_all()

    def offer(self, pieces: Sequence[Buffer]) -> bool:
        """Send one small frame before all that wait, without ever waiting for room.

        Returns:
            False if the frame was left out: the outbox is closed, or too many wait already.

        Raises:
            TransportError: The connection did not survive the attempt.
        """
        with self._lock:
            if self._closed or len(self._waiting) >= self._depth + _SPARE:
                return False
            if self.idle:
                self._send_or_queue(pieces, None)
            else:
                self._waiting.insert(int(self._torn), (pieces, None))
                self._changed.notify_all()
            return True

    def _send_or_queue(self, pieces: Sequence[Buffer], sent: Sent | None) -> None:
        """Send what the stream takes at once; the thread waits for the rest, not the caller."""
        start = time.monotonic()
        rest = self._connection.send_now(pieces)
        if rest:
            self._torn = True
            self._waiting.append((rest, sent))
            self._changed.notify_all()
        elif sent is not None:
            sent(time.monotonic() - start)

    def _send(self, pieces: Sequence[Buffer], sent: Sent | None) -> None:
        start = time.monotonic()
        self._connection.send(pieces)
        if sent is not None:
            sent(time.monotonic() - start)

    def _run(self) -> None:
        run_on(self._connection.cores)
        while self._send_next():
            pass

    def _send_next(self) -> bool:
        """Wait for a frame and send it, keeping nothing of it afterwards; False at the end."""
        with self._lock:
            while not self._waiting:
                if self._closed:
                    return False
                self._changed.wait()
            pieces, sent = self._waiting.popleft()
            self._torn, self._busy = False, True
        try:
            self._send(pieces, sent)
        except TransportError as e:
            log.debug("%s: %s", threading.current_thread().name, e)
            self.close(flush=False)
        except Exception:  # without its sender, a connection would only seem to work
            log.exception("%s failed", threading.current_thread().name)
            self.close(flush=False)
            self._connection.close()
        finally:
            with self._lock:
                self._busy = False
                self._changed.notify_all()
        return True

    def close(self, *, flush: bool = True) -> None:
        """Refuse new frames; with `flush`, frames that wait are still sent."""
        with self._lock:
            self._closed = True
            if not flush:
                self._waiting.clear()
            self._changed.notify_all()

    def join(self, timeout: float) -> None:
        """Wait until the sending thread has ended."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
