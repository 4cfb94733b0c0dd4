"""One connection of the coordinator to a hop: spans out, results back by request id.

Owns: the pending requests of a connection and the loop that reads its answers. Refuses to know:
routes, prompts, what a result means for a session. Invariant: every posted request gets exactly one
answer in its reply box: a `Result`, or the `TransportError` that ended the connection.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ds4py.coordinator.relay.workers.registry import LinkId
from ds4py.errors import Ds4Error, PeerClosedError, RemoteProtocolError, TransportError
from ds4py.peer.liveness import Heartbeat
from ds4py.stage.mailbox import Mailbox
from ds4py.transport.connection import Connection
from ds4py.transport.cores import run_on
from ds4py.transport.outbox import Outbox
from ds4py.wire.extensions import Notice
from ds4py.wire.frames import ExtType, Frame, FrameType, type_name
from ds4py.wire.messages import ErrorText, Result, Work, encode

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HopReply:
    """Answer to one request.

    Args:
        request_id: As posted.
        result: What the hop said, or why nothing more will be heard from it.
        wait_usec: From sending to reading, microseconds.
    """

    request_id: int
    result: Result | TransportError
    wait_usec: int = 0


ReplyBox = Mailbox[HopReply]


@dataclass(slots=True)
class _Pending:
    box: ReplyBox
    n_tokens: int
    sent_at: float


def expect_result(frame: Frame, *, kind: str) -> Result:
    """Return the RESULT in a frame.

    Raises:
        RemoteProtocolError: It is something else (`kind`), or malformed.
    """
    if frame.type != FrameType.RESULT or frame.discarded:
        raise RemoteProtocolError(f"{type_name(frame.type)}: expected RESULT", kind=kind)
    return Result.decode(frame.body)


class Link:
    """Sends spans to a hop and sorts its answers.

    Args:
        link_id: Names this link in the registry.
        connection: Past its handshake; closed by `close` or when the peer is lost.
        send_depth: Spans that may wait to be sent.
        timeout: Seconds that `post` waits for room.
        alive_timeout: Seconds of silence that end the connection; None for a plain peer, which
            hears and says nothing but the stock protocol.
        on_closed: Called once with the cause when the connection has ended.
    """

    def __init__(
        self,
        link_id: LinkId,
        connection: Connection,
        *,
        send_depth: int,
        timeout: float,
        alive_timeout: float | None = None,
        on_closed: Callable[[LinkId, TransportError], None],
    ):
        self.link_id = link_id
        self.connection = connection
        self._on_closed = on_closed
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._cause: TransportError | None = None  # why nothing is posted any more
        self._ended = False
        name = f"link {connection.peer}"
        self._outbox = Outbox(connection, depth=send_depth, name=f"{name} send", timeout=timeout)
        self._heartbeat = (
            None
            if alive_timeout is None
            else Heartbeat(connection, self._outbox, alive_timeout, self._end)
        )

    @property
    def lost(self) -> bool:
        """Whether nothing can be posted any more; true before anybody who waits is told."""
        return self._cause is not None

    @property
    def carries_chunks(self) -> bool:
        """Whether spans of several tokens are unanswered, behind which a single one would wait."""
        with self._lock:
            return any(pending.n_tokens > 1 for pending in self._pending.values())

    def post(self, work: Work, box: ReplyBox) -> None:
        """Send one span; its answer arrives in `box`.

        Raises:
            TransportError: The connection is closed or took nothing for too long.
        """
        pieces = encode(work)
        with self._lock:
            if self._cause is not None:
                raise PeerClosedError(self._cause.what, peer=self._cause.peer)
            self._pending[work.request_id] = _Pending(box, work.n_tokens, time.monotonic())
        try:
            self._outbox.put(pieces)
        except TransportError as e:
            with self._lock:
                answered = self._pending.pop(work.request_id, None) is None
            self.close(e.what)  # a peer that takes nothing for so long is lost
            if not answered:  # otherwise the box was told already
                raise

    def tell(self, notice: Notice) -> None:
        """Send a notice before the spans that wait, if the connection stands; never waits."""
        try:
            if not self._outbox.offer(notice.encode()):
                log.debug("%s is not told %s", self.connection.peer, notice)
        except TransportError as e:  # the connection's reader is told
            log.debug("%s is not told %s: %s", self.connection.peer, notice, e)

    def run(self) -> None:
        """Read on the calling thread until the connection ends."""
        run_on(self.connection.cores)
        cause: TransportError = PeerClosedError("closed", peer=str(self.connection.peer))
        try:
            while (frame := self.connection.receive()) is not None:
                self._handle(frame)
        except TransportError as e:
            cause = e
        except Ds4Error as e:
            cause = PeerClosedError(f"protocol error: {e}", peer=str(self.connection.peer))
        except Exception as e:  # one link's bug must not take the others along
            log.exception("link %s failed", self.connection.peer)
            cause = PeerClosedError(f"internal error: {e}", peer=str(self.connection.peer))
        self._end(cause)

    def _handle(self, frame: Frame) -> None:
        if self._cause is not None:
            return  # retired: nobody waits for what this peer says
        if frame.type == ExtType.ALIVE and self._heartbeat is not None:
            return
        if frame.type == FrameType.ERROR and not frame.discarded:
            words = ErrorText(bytes(frame.body)).text
            raise PeerClosedError(f"peer said: {words}", peer=str(self.connection.peer))
        result = expect_result(frame, kind="R-FRAME")
        with self._lock:
            pending = self._pending.pop(result.request_id, None)
        if pending is None:
            words = f": {result.text}" if result.status else ""
            raise RemoteProtocolError(
                f"result for request {result.request_id}, which nobody asked for{words}",
                kind="R-REQUEST",
            )
        wait_usec = int((time.monotonic() - pending.sent_at) * 1e6)
        pending.box.put(HopReply(result.request_id, result, wait_usec))

    def _stop(self, cause: TransportError) -> None:
        """Post no more, and tell all who wait."""
        with self._lock:
            if self._cause is not None:
                return
            self._cause = cause
            pending, self._pending = self._pending, {}
        for request_id, waiting in pending.items():
            waiting.box.put(HopReply(request_id, cause))

    def _end(self, cause: TransportError) -> None:
        self._stop(cause)
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self.connection.close()  # first: it wakes a sender that holds the outbox
        self._outbox.close(flush=False)
        with self._lock:
            if self._ended:
                return
            self._ended = True
        # the first cause: closing wakes the reader, which may be here before us
        self._on_closed(self.link_id, self._cause or cause)

    def expire_after(self, seconds: float, late: Callable[[], None]) -> None:
        """Call a function, on another thread, unless all that waits now is answered soon."""
        with self._lock:
            waiting = set(self._pending)

        def look() -> None:
            with self._lock:
                is_late = not waiting.isdisjoint(self._pending)
            if is_late:
                late()

        if waiting:
            timer = threading.Timer(seconds, look)
            timer.name, timer.daemon = f"link {self.connection.peer} hurry", True
            timer.start()

    def retire(self, reason: str) -> None:
        """Post no more and tell all who wait, but leave the peer connected.

        For a worker that another one displaced: closed, it would come back and displace that one.
        """
        self._stop(PeerClosedError(reason, peer=str(self.connection.peer)))

    def close(self, reason: str = "we are closing") -> None:
        """End the connection; pending requests are told; idempotent."""
        self._end(PeerClosedError(reason, peer=str(self.connection.peer)))
