"""One connection that a worker serves: spans in, results out.

Owns: the reader of a control or data connection, the bound on what waits for the device, the
connections to next hops. Refuses to know: who dialled, how layers are computed. Invariant: each
WORK gets exactly one RESULT on this connection, and reading stops while `prefetch_depth` spans
wait, so that back-pressure reaches the sender (docs/spec/wire-protocol.md#serving). Single tokens
hold little memory and are to meet in one batch: of these, a whole batch may wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from ds4py.config import Address
from ds4py.contracts import ForwardOutput, SessionId
from ds4py.errors import CancelledError, Ds4Error, RemoteProtocolError, TransportError
from ds4py.peer.liveness import Heartbeat, agreed_timeout
from ds4py.stage.mailbox import Credits
from ds4py.stage.scheduler import MAX_BATCH
from ds4py.stage.stage import SessionOwner
from ds4py.transport.connection import Connection
from ds4py.transport.cores import run_on
from ds4py.transport.outbox import Outbox
from ds4py.wire.conversation import ProtocolState
from ds4py.wire.extensions import (
    Alive,
    Cancel,
    Drop,
    Fork,
    HopLost,
    PeerHello,
    decode_notice,
    decode_peer_hello,
    encode_peer_hello,
)
from ds4py.wire.frames import ExtType, Frame, FrameType, type_name
from ds4py.wire.messages import (
    ErrorText,
    Result,
    error_result,
    forwarded,
)
from ds4py.wire.work_messages import RelayedResult
from ds4py.worker.context import WorkerContext
from ds4py.worker.forwarder import Forwarder, Forwarders, Outcome
from ds4py.worker.kv_transfer import ShardService
from ds4py.worker.profile import profile_stage
from ds4py.worker.work_frames import (
    AcceptedWork,
    check_work,
    final_result,
    stage_request,
    telemetry_of,
)

log = logging.getLogger(__name__)

_RESULT_DEPTH: Final = 64
_DRAIN_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.5
_DIAL_SECONDS: Final = 0.2


class DataConnection:
    """Serves one connection.

    Args:
        connection: Accepted or dialled; closed at the end.
        context: What all connections of the process share.
        name: For logs.
        conversation: Where the connection stands; kept by the reader, who leaves out the RESULTs:
            they come from other threads, are matched by request id, and change no state.
        peer: What another ds4py has said about itself already, if it has.
    """

    def __init__(
        self,
        connection: Connection,
        context: WorkerContext,
        name: str,
        conversation: ProtocolState,
        peer: PeerHello | None = None,
    ):
        self._connection = connection
        self._context = context
        self._stage = context.stage
        self._owner = SessionOwner(lambda: connection.closed)
        self._name = name
        self._conversation = conversation
        tuning = context.tuning
        self._room = Credits(tuning.prefetch_depth + 1 if tuning.prefetch else 1)
        self._token_room = Credits(MAX_BATCH) if tuning.prefetch else self._room
        self._outbox = Outbox(
            connection,
            depth=_RESULT_DEPTH,
            name=f"{name} send",
            timeout=context.sockets.send_timeout,
        )
        self._profile = profile_stage(
            context.trace, context.facts.layers, name, log_decode=tuning.decode_profile
        )
        self._patience = float("inf")
        self._forwarders = Forwarders(
            window=tuning.forward_window, dial=self._dial, reply=self._relay
        )
        self._shards = ShardService(
            connection,
            self._outbox,
            conversation,
            context=context,
            owner=self._owner,
            name=name,
        )
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._unfinished = 0
        self._draining = False
        self._heartbeat: Heartbeat | None = None
        if peer is not None:
            self._meet(peer)

    def run(self) -> str | None:
        """Serve until the connection ends; return the peer's parting ERROR text, if any."""
        parting: str | None = None
        run_on(self._connection.cores)
        try:
            while (frame := self._connection.receive()) is not None:
                if frame.type == FrameType.ERROR and not frame.discarded:
                    parting = ErrorText(bytes(frame.body)).text
                    break
                self._handle(frame)
            else:
                self._finish_queued()
        except TransportError as e:
            log.info("%s: %s", self._name, e)
        except Ds4Error as e:
            log.warning("%s: %s", self._name, e)
        except Exception:  # one connection's bug must not take the others along
            log.exception("%s failed", self._name)
        self._owner.leave()  # first: what waits for the device is not begun any more
        self.close()
        self._forwarders.close()
        self._stage.release(self._owner)
        return parting

    def close(self) -> None:
        """End the connection from any thread, after sending what waits; idempotent."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._outbox.close()
        self._outbox.join(1.0)
        self._connection.close()
        with self._changed:
            self._changed.notify_all()

    def forget_hop(self, address: Address) -> None:
        """Close the connection to a next hop that is lost."""
        self._forwarders.forget(address)

    def _finish_queued(self) -> None:
        """After an orderly end of stream, queued spans are still evaluated and answered."""
        with self._changed:
            self._draining = True
            deadline = time.monotonic() + _DRAIN_SECONDS
            while self._unfinished and not self._connection.closed and time.monotonic() < deadline:
                self._changed.wait(_POLL_SECONDS)

    def _handle(self, frame: Frame) -> None:
        self._check_turn(frame)
        match frame.type:
            case FrameType.WORK:
                self._work(frame)
            case FrameType.SNAPSHOT_SAVE_REQ:
                self._shards.save(frame)
            case FrameType.SNAPSHOT_LOAD_BEGIN:
                self._shards.load(frame)
            case ExtType.HELLO:
                self._greet(frame)
            case _:  # the table admits nothing else
                self._heed(frame)

    def _check_turn(self, frame: Frame) -> None:
        """Answer an ERROR to a frame that is not accepted, or not now."""
        fault = None
        if frame.discarded:
            fault = RemoteProtocolError(f"the peer sent {type_name(frame.type)}", kind="F-TYPE")
        else:
            try:
                self._conversation.received(frame.type)
            except RemoteProtocolError as e:
                fault = e
        if fault is not None:
            self._outbox.put(ErrorText.of("unsupported distributed worker frame").encode())
            raise fault

    def _greet(self, frame: Frame) -> None:
        """Answer another ds4py's handshake; it decides whether we fit and tells us if not."""
        hello = decode_peer_hello(frame.body)
        self._conversation.sent(ExtType.HELLO)
        self._outbox.put(encode_peer_hello(self._context.hello))
        self._meet(hello)

    def _meet(self, peer: PeerHello) -> None:
        """Take note of who the peer is, and watch it if it wants that."""
        self._patience = _DIAL_SECONDS
        self._context.known_peers.meet(f"{peer.role} {self._connection.peer.host}", peer)
        timeout = agreed_timeout(self._context.hello.alive_timeout, peer.alive_timeout)
        if timeout is not None:
            self._heartbeat = Heartbeat(self._connection, self._outbox, timeout, self._silent)

    def _silent(self, loss: TransportError) -> None:
        log.warning("%s: given up: %s", self._name, loss.what)
        self._connection.close()

    def _heed(self, frame: Frame) -> None:
        """Do what a notice says."""
        match decode_notice(frame):
            case Alive():
                pass  # its arrival was all
            case Cancel(session_id, last_request):
                self._stage.abort(SessionId(session_id), last_request)
            case Drop(session_id):
                self._stage.end(SessionId(session_id))
            case HopLost(host, port):
                self._context.hop_lost(Address(host, port))
            case Fork() as fork:
                self._fork(fork)

    def _fork(self, fork: Fork) -> None:
        """Copy the prefix of a session once what waits of the other one for the device is done."""
        source, target = SessionId(fork.session_from), SessionId(fork.session_to)
        self._stage.copy_prefix(
            source, target, fork.n_tokens, fork.prefix_hash, self._owner
        ).add_done_callback(self._copied)

    def _copied(self, copy: Future[None]) -> None:
        error = copy.exception()
        if error is not None:  # the span that continues it is refused as well
            log.debug("%s: the head of a session is not copied: %s", self._name, error)

    def _work(self, frame: Frame) -> None:
        verdict = check_work(frame.body, self._context.facts)
        if not isinstance(verdict, AcceptedWork):
            log.warning("%s: refused a span: %s", self._name, verdict.text)
            self._outbox.put(error_result(verdict.request_id, verdict.text).encode())
            return
        if self._profile is not None:
            self._profile.arrived(verdict.work)
        forwarder = self._forwarder(verdict)
        room = self._room_for(verdict)
        while not room.acquire(timeout=_POLL_SECONDS):
            if self._connection.closed:  # then nobody gives room back any more
                return
        with self._lock:
            self._unfinished += 1
        self._stage.submit(stage_request(verdict), self._owner).add_done_callback(
            lambda output: self._finish(verdict, forwarder, output)
        )

    def _forwarder(self, accepted: AcceptedWork) -> Forwarder | None:
        """Choose the way to the next hop; None on the last one.

        When a span arrives and not when it is evaluated: should the next hop be lost between, the
        span is not to dial it again.
        """
        entry = accepted.next_entry
        return None if entry is None else self._forwarders.to(entry.host, entry.port)

    def _dial(self, address: Address, stopped: Callable[[], bool]) -> Connection:
        """Connect to a next hop.

        Another ds4py names stages that it is connected to itself. If we cannot reach one, it is
        lost; then the coordinator finds another, or waits better than we can.
        """
        end = time.monotonic() + self._patience
        return self._context.dial(address, lambda: stopped() or time.monotonic() >= end)

    def _finish(
        self, accepted: AcceptedWork, forwarder: Forwarder | None, done: Future[ForwardOutput]
    ) -> None:
        """Send what the stage made of a span on its way, on the device thread."""
        error = done.exception()
        request_id = accepted.work.request_id
        try:
            if self._profile is not None:
                computed = None if error is not None else done.result()
                self._profile.evaluated(request_id, computed, forwarded=forwarder is not None)
            if error is None:
                self._deliver(accepted, forwarder, done.result())
            else:
                level = logging.DEBUG if isinstance(error, CancelledError) else logging.WARNING
                pos0 = accepted.work.pos0
                log.log(level, "%s: span at %d failed: %s", self._name, pos0, error)
                refusal = error_result(request_id, str(error))
                self._outbox.put(refusal.encode(), lambda _: self._answered(accepted))
        except TransportError as e:
            log.debug("%s: result not delivered: %s", self._name, e)
            self._answered(accepted)
        except Exception:  # a span without its RESULT would be waited for in vain
            log.exception("%s: result not delivered", self._name)
            self._answered(accepted)
            self._connection.close()

    def _room_for(self, accepted: AcceptedWork) -> Credits:
        return self._token_room if len(accepted.work.tokens) == 1 else self._room

    def _answered(self, accepted: AcceptedWork) -> None:
        """Take note that a RESULT of our own was sent."""
        self._room_for(accepted).release()
        self._concluded()

    def _concluded(self) -> None:
        """Take note that a span needs nothing more of this connection."""
        with self._lock:
            self._unfinished -= 1
            if self._draining:
                self._changed.notify_all()

    def _relay(self, result: Outcome) -> None:
        """Send the RESULT of a span that was forwarded."""
        if self._profile is not None:
            self._profile.relayed(result if isinstance(result, Result) else _own_part(result))
        try:
            self._outbox.put(result.encode())
        finally:
            self._concluded()

    def _deliver(
        self, accepted: AcceptedWork, forwarder: Forwarder | None, output: ForwardOutput
    ) -> None:
        work, telemetry = accepted.work, telemetry_of(accepted, output)
        if forwarder is None:
            result = final_result(accepted, output, telemetry)
            self._outbox.put(result.encode(), lambda _: self._answered(accepted))
            return
        assert output.hidden is not None
        assert accepted.next_entry is not None
        onward = forwarded(work, accepted.next_entry, output.hidden.data, work.bits)
        forwarder.forward(onward, telemetry, self._room_for(accepted).release)


def _own_part(relayed: RelayedResult) -> Result:
    """Return what the profile looks at."""
    return Result(request_id=relayed.header.request_id, telemetry=(relayed.record,))
