"""A worker's connection to the next hop: spans down, results back up.

Owns: one downstream connection per (upstream, next host, next port), its window of unanswered
requests and the relay thread (docs/spec/wire-protocol.md#worker-links, #return-path). Refuses to
know: layers, tokens, sessions. Invariant: every span given to `forward` gets exactly one RESULT
upstream, a lost next hop never takes the upstream connection with it, and anyone who calls
`forward` never waits.

These connections speak the plain protocol, also between ds4py peers: the coordinator, which knows
every stage, tells of losses and cancelled requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ds4py.config import Address
from ds4py.errors import Ds4Error, PeerClosedError, RemoteProtocolError, TransportError
from ds4py.stage.scheduler import MAX_BATCH
from ds4py.transport.connection import Connection
from ds4py.transport.cores import run_on
from ds4py.transport.outbox import Outbox
from ds4py.transport.stream import Buffer
from ds4py.wire.frames import Frame, FrameType, type_name
from ds4py.wire.messages import Result, Telemetry, Work, encode, error_result
from ds4py.wire.work_messages import RelayedResult, ResultHeader

log = logging.getLogger(__name__)

Outcome = Result | RelayedResult
DeliverOutcome = Callable[[Outcome], None]
DialHop = Callable[[Address, Callable[[], bool]], Connection]
_SEND_SECONDS: Final = 60.0
_MAX_NEXT_HOPS: Final = 16


@dataclass(slots=True, eq=False)
class _SentChunk:
    """One span on its way: `departed` is called once, when it holds no memory here any more."""

    request_id: int
    frame: Sequence[Buffer]
    telemetry: Telemetry
    departed: Callable[[], None] | None
    sent_at: float = 0.0
    send_usec: int = 0

    @property
    def is_token(self) -> bool:
        return self.telemetry.n_tokens == 1

    def depart(self) -> None:
        departed, self.departed = self.departed, None
        self.frame = ()
        if departed is not None:
            departed()


class _Downstream:
    """One live connection to the next hop with its sender and its relay thread."""

    def __init__(self, connection: Connection, owner: Forwarder):
        self.connection = connection
        self._owner = owner
        name = f"forward {connection.peer}"
        # as deep as the windows: putting a span never waits
        depth = owner.window + MAX_BATCH
        self.outbox = Outbox(connection, depth=depth, name=f"{name} send", timeout=_SEND_SECONDS)
        self._thread = threading.Thread(target=self._relay, name=f"{name} relay", daemon=True)
        self._thread.start()

    def _relay(self) -> None:
        reason = "closed the connection"
        run_on(self.connection.cores)
        try:
            while (frame := self.connection.receive()) is not None:
                self._owner.relay(frame)
        except Ds4Error as e:
            reason = str(e)
        except Exception as e:  # one hop's bug must not take the others along
            log.exception("relay from %s failed", self.connection.peer)
            reason = f"internal error: {e}"
        self._owner.lost(self, reason)

    def close(self) -> None:
        """End the connection; what waits to be sent stays unsent."""
        self.connection.close()
        self.outbox.close(flush=False)


class Forwarder:
    """Forwards spans to one next hop for one upstream connection.

    Args:
        address: The next hop's data port, as the route names it.
        window: Most unanswered requests, except for single tokens.
        dial: Makes the connection; may take seconds, so it runs on a thread of its own.
        reply: Sends a RESULT upstream; raises `TransportError` if upstream is gone.
    """

    def __init__(self, address: Address, *, window: int, dial: DialHop, reply: DeliverOutcome):
        self.address = address
        self.window = window
        self._dial = dial
        self._reply = reply
        self._lock = threading.RLock()
        self._waiting: deque[_SentChunk] = deque()  # for the connection, or for the window to open
        self._pending: dict[int, _SentChunk] = {}  # given to the connection that stands
        self._downstream: _Downstream | None = None
        self._dialling = False
        self._closed = False

    def forward(self, work: Work, telemetry: Telemetry, departed: Callable[[], None]) -> None:
        """Send a span to the next hop; its RESULT goes upstream whenever it comes.

        Args:
            work: Already rewritten for the next hop.
            telemetry: This hop's own record, without the two times that only the relay knows.
            departed: Called once, from any thread, when the span was sent or given up; until then
                the caller should take no more spans.
        """
        span = _SentChunk(work.request_id, encode(work), telemetry, departed)
        with self._lock:
            problem = self._problem(work.request_id)
            if problem is None:
                self._waiting.append(span)
                self._advance()
                return
        self._fail([span], problem)

    def _problem(self, request_id: int) -> str | None:
        """Return why a span cannot be taken; the lock is held."""
        if self._closed:
            return f"next hop {self.address}: given up"
        waits = any(span.request_id == request_id for span in self._waiting)
        if waits or request_id in self._pending:
            return f"request id {request_id} is already in flight"
        return None

    def _advance(self) -> None:
        """Send what waits, as far as the window allows; the lock is held."""
        if self._closed or not self._waiting:
            return
        if self._downstream is None:
            if not self._dialling:
                self._dialling = True
                name = f"forward {self.address} dial"
                threading.Thread(target=self._connect, name=name, daemon=True).start()
            return
        while self._waiting and self._has_room(self._waiting[0]):
            span = self._waiting.popleft()
            self._pending[span.request_id] = span
            self._send(self._downstream, span)

    def _has_room(self, span: _SentChunk) -> bool:
        """Whether the window is open; single tokens have one of their own, for a whole batch."""
        is_token = span.is_token
        n_alike = sum(other.is_token == is_token for other in self._pending.values())
        return n_alike < (MAX_BATCH if is_token else self.window)

    def _connect(self) -> None:
        """Dial on a thread of its own, then send what waited."""
        try:
            connection = self._dial(self.address, lambda: self._closed)
        except Ds4Error as e:
            self._unreachable(str(e))
            return
        except Exception as e:  # or all that waits would wait for ever
            log.exception("dialling %s failed", self.address)
            self._unreachable(f"internal error: {e}")
            return
        with self._lock:
            self._dialling = False
            if self._closed:
                connection.close()
                return
            self._downstream = _Downstream(connection, self)
            self._advance()

    def _unreachable(self, reason: str) -> None:
        with self._lock:
            self._dialling = False
            given_up, self._waiting = self._waiting, deque()
        self._fail(given_up, reason)

    def _send(self, downstream: _Downstream, span: _SentChunk) -> None:
        def sent(seconds: float) -> None:
            with self._lock:
                span.send_usec = int(seconds * 1e6)
                span.sent_at = time.monotonic()
                span.depart()

        span.sent_at = time.monotonic()  # the answer may come before `sent` is called
        try:
            downstream.outbox.put(span.frame, sent)
        except Ds4Error as e:
            log.debug("forward to %s: %s", self.address, e)
            downstream.connection.close()  # its relay thread answers what is pending

    def relay(self, frame: Frame) -> None:
        """Send a next hop's RESULT upstream with our record appended.

        See docs/spec/wire-protocol.md#return-path.

        Raises:
            RemoteProtocolError: It is no RESULT, or answers nothing that was forwarded.
        """
        now = time.monotonic()
        if frame.type != FrameType.RESULT or frame.discarded:
            raise RemoteProtocolError(f"{type_name(frame.type)}: expected RESULT", kind="D-FRAME")
        header = ResultHeader.decode(frame.body)
        with self._lock:
            span = self._pending.pop(header.request_id, None)
            self._advance()
            if span is not None:
                span.depart()
        if span is None:
            raise RemoteProtocolError(
                f"result for request {header.request_id}, which was not forwarded", kind="D-REQUEST"
            )
        usec = max(0, int((now - span.sent_at) * 1e6))
        try:
            record = span.telemetry.timed(wait_usec=usec, send_usec=span.send_usec)
            self._reply(RelayedResult(header, frame.body, record))
        except TransportError as e:  # not this hop's fault: upstream closes us in a moment
            log.debug("result of %s not relayed: %s", self.address, e)

    def lost(self, downstream: _Downstream, reason: str) -> None:
        """Forget a dead connection: what it had is answered with an error, the rest dials again."""
        given_up: list[_SentChunk] = []
        with self._lock:
            current = self._downstream is downstream
            if current:  # before it is closed: anyone who sees it closed finds it forgotten
                self._downstream = None
                given_up, self._pending = list(self._pending.values()), {}
                self._advance()
        downstream.close()
        if not current:
            return
        if not self._closed:
            log.warning("next hop %s: %s", self.address, reason)
        self._fail(given_up, f"next hop {self.address}: {reason}")

    def _fail(self, spans: Iterable[_SentChunk], text: str) -> None:
        for span in spans:
            with self._lock:
                span.depart()
            try:
                self._reply(error_result(span.request_id, text))
            except TransportError as e:
                log.debug("error of %s not relayed: %s", self.address, e)

    def close(self) -> None:
        """Close the connection to the next hop; what is unanswered gets an error; idempotent."""
        with self._lock:
            self._closed = True
            downstream = self._downstream
            given_up, self._waiting = self._waiting, deque()
        if downstream is not None:
            downstream.connection.close()  # its relay thread answers what is pending
        self._fail(given_up, f"next hop {self.address}: given up")


class Forwarders:
    """The next hops of one upstream connection.

    Args:
        window: Most unanswered requests of each.
        dial: Makes a connection.
        reply: Sends a RESULT upstream.
    """

    def __init__(self, *, window: int, dial: DialHop, reply: DeliverOutcome):
        self._window = window
        self._dial = dial
        self._reply = reply
        self._lock = threading.Lock()
        self._by_address: dict[tuple[str, int], Forwarder] = {}  # the latest in use stands last
        self._closed = False

    def to(self, host: str, port: int) -> Forwarder:
        """Return the forwarder to a next hop; the longest unused one makes room for a new one.

        Raises:
            PeerClosedError: Upstream is gone.
        """
        key, displaced = (host, port), None
        with self._lock:
            if self._closed:  # nobody would close it
                raise PeerClosedError("the connection that asked is closed", peer=f"{host}:{port}")
            forwarder = self._by_address.pop(key, None)
            if forwarder is None:
                forwarder = Forwarder(
                    Address(host, port), window=self._window, dial=self._dial, reply=self._reply
                )
                if len(self._by_address) >= _MAX_NEXT_HOPS:  # a driver may name any host it likes
                    displaced = self._by_address.pop(next(iter(self._by_address)))
            self._by_address[key] = forwarder
        if displaced is not None:
            displaced.close()
        return forwarder

    def forget(self, address: Address) -> None:
        """Close the connection to a next hop that is lost; what waits there gets an error."""
        with self._lock:
            forwarder = self._by_address.pop((address.host, address.port), None)
        if forwarder is not None:
            log.warning("next hop %s is lost, says the coordinator", address)
            forwarder.close()

    def close(self) -> None:
        """Close all of them; idempotent."""
        with self._lock:
            self._closed = True
            forwarders = list(self._by_address.values())
        for forwarder in forwarders:
            forwarder.close()
