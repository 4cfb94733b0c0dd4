"""One connection that a worker serves: spans in, results out.

Owns: the reader of a control or data connection, the bound on what waits for the device, the
connections to next hops. Refuses to know: who dialled, how layers are computed. Invariant: each
WORK gets exactly one RESULT on this connection, and reading stops while `prefetch_depth` spans
wait, so that back-pressure reaches the sender (docs/spec/wire-protocol.md 8.2).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ds4py.cluster.checks import AcceptedWork, WorkerFacts, check_work
from ds4py.cluster.device import DeviceJob, DeviceThread
from ds4py.cluster.forwarder import Dial, Forwarder
from ds4py.cluster.timelines import Claim, Timelines
from ds4py.config import Address, SocketConfig, WorkerTuning
from ds4py.contracts import SessionId, SliceOutput, SliceWork, Want
from ds4py.errors import (
    CancelledError,
    ClusterError,
    Ds4Error,
    PeerClosedError,
    RemoteProtocolError,
    TransportError,
)
from ds4py.transport.connection import Connection
from ds4py.transport.outbox import Outbox
from ds4py.wire.conversation import Conversation
from ds4py.wire.extensions import PeerHello, decode_peer_hello, encode_peer_hello
from ds4py.wire.frames import EXT_HELLO, Frame, FrameType, type_name
from ds4py.wire.messages import (
    ErrorText,
    Result,
    ResultKind,
    SaveRequest,
    SnapshotBegin,
    SnapshotDone,
    SnapshotRecord,
    Telemetry,
    WorkFlags,
    encode,
    error_result,
    forwarded,
)

log = logging.getLogger(__name__)

_NO_SNAPSHOTS: Final = b"this worker does not save or load sessions"
_RESULT_DEPTH: Final = 64
_DRAIN_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.5
_MAX_NEXT_HOPS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What all connections of one worker share.

    Args:
        facts: The slice, for checking spans.
        device: The one device.
        timelines: Sessions; touched on the device thread only, but for `orphan`.
        tuning: Queues.
        sockets: Socket options.
        introduce: Returns the answer to another ds4py's handshake.
        dial: Connects to a next hop.
    """

    facts: WorkerFacts
    device: DeviceThread
    timelines: Timelines
    tuning: WorkerTuning
    sockets: SocketConfig
    introduce: Callable[[], PeerHello]
    dial: Dial


class Upstream:
    """Serves one connection.

    Args:
        connection: Accepted or dialled; closed at the end.
        stage: What all connections of the process share.
        name: For logs.
        conversation: Where the connection stands; kept by the reader, who leaves out the RESULTs:
            they come from other threads, are matched by request id, and change no state.
    """

    def __init__(self, connection: Connection, stage: Stage, name: str, conversation: Conversation):
        self._connection = connection
        self._stage = stage
        self._name = name
        self._conversation = conversation
        tuning = stage.tuning
        self._room = threading.Semaphore(tuning.prefetch_depth + 1 if tuning.prefetch else 1)
        self._outbox = Outbox(
            connection,
            depth=_RESULT_DEPTH,
            name=f"{name} send",
            timeout=stage.sockets.send_timeout,
        )
        self._forwarders: dict[Address, Forwarder] = {}
        self._dropped = False
        self._changed = threading.Condition()
        self._unfinished = 0

    def run(self) -> str | None:
        """Serve until the connection ends; return the peer's parting ERROR text, if any."""
        parting: str | None = None
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
        with self._changed:
            self._dropped = True
            forwarders = list(self._forwarders.values())
        self.close()
        for forwarder in forwarders:
            forwarder.close()
        self._stage.timelines.orphan(self)
        return parting

    def close(self) -> None:
        """End the connection from any thread, after sending what waits; idempotent."""
        self._outbox.close()
        self._outbox.join(1.0)
        self._connection.close()
        with self._changed:
            self._changed.notify_all()

    def _finish_queued(self) -> None:
        """After an orderly end of stream, queued spans are still evaluated and answered."""
        with self._changed:
            deadline = time.monotonic() + _DRAIN_SECONDS
            while self._unfinished and not self._connection.closed and time.monotonic() < deadline:
                self._changed.wait(_POLL_SECONDS)

    def _handle(self, frame: Frame) -> None:
        self._check_turn(frame)
        match frame.type:
            case FrameType.WORK:
                self._work(frame)
            case FrameType.SNAPSHOT_SAVE_REQ:
                self._refuse_save(frame)
            case FrameType.SNAPSHOT_LOAD_BEGIN:
                self._refuse_load(frame)
            case _:
                assert frame.type == EXT_HELLO  # the table admits nothing else
                self._greet(frame)

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
            self._outbox.put(encode(ErrorText.of("unsupported distributed worker frame")))
            raise fault

    def _greet(self, frame: Frame) -> None:
        """Answer another ds4py's handshake; it decides whether we fit and tells us if not."""
        hello = decode_peer_hello(frame.body)
        log.info(
            "%s: ds4py %s %s, model %r", self._name, hello.version, hello.role, hello.model_name
        )
        self._conversation.sent(EXT_HELLO)
        self._outbox.put(encode_peer_hello(self._stage.introduce()))

    def _refuse_save(self, frame: Frame) -> None:
        """Refuse in the form of spec 2.5: the ids are echoed if they could be read."""
        facts = self._stage.facts
        try:
            asked = SaveRequest.decode(frame.body)
            session_id, request_id = asked.session_id, asked.request_id
        except RemoteProtocolError:
            session_id = request_id = 0
        refusal = SnapshotBegin(
            model_id=facts.model_id,
            session_id=session_id,
            request_id=request_id,
            token_hash=0,
            layer_start=facts.span.start,
            layer_end=facts.span.end,
            payload_bytes=0,
            status=1,
            message=_NO_SNAPSHOTS,
        )
        self._conversation.sent(FrameType.SNAPSHOT_BEGIN, refused=True)
        self._outbox.put(encode(refusal))
        log.warning("%s: refused to save a session (%d bytes)", self._name, len(frame.body))

    def _refuse_load(self, frame: Frame) -> None:
        """Answer and close, since the shard that follows would be read as frames (spec 2.6)."""
        record = SnapshotRecord.decode(frame.body)
        self._conversation.sent(FrameType.SNAPSHOT_DONE)
        self._outbox.put(
            encode(SnapshotDone(request_id=record.request_id, status=1, message=_NO_SNAPSHOTS))
        )
        raise ClusterError("refused to load a session")

    def _work(self, frame: Frame) -> None:
        verdict = check_work(frame.body, self._stage.facts)
        if not isinstance(verdict, AcceptedWork):
            log.warning("%s: refused a span: %s", self._name, verdict.text)
            self._outbox.put(encode(error_result(verdict.request_id, verdict.text)))
            return
        while not self._room.acquire(timeout=_POLL_SECONDS):
            if self._connection.closed:  # then nobody gives room back any more
                return
        with self._changed:
            self._unfinished += 1
        work = verdict.work
        claim = Claim(
            session=SessionId(work.session_id),
            tokens=work.tokens,
            pos0=work.pos0,
            prefix_hash=work.prefix_hash,
            result_hash=work.result_hash,
            reset=bool(work.flags & WorkFlags.RESET_SESSION),
        )
        self._stage.device.submit(
            DeviceJob(
                claim.session,
                lambda: self._admit(verdict, claim),
                lambda result: self._finish(verdict, claim, result),
                is_decode=work.n_tokens == 1,
            )
        )

    def _admit(self, accepted: AcceptedWork, claim: Claim) -> SliceWork:
        """Check the session on the device thread and prepare its caches."""
        if self._dropped:
            raise CancelledError("the connection that asked is gone")
        runner = self._stage.device.runner
        admission = self._stage.timelines.admit(claim, self)
        if admission.evict is not None:
            runner.drop(admission.evict)
        if admission.rewind_to is not None:
            runner.rewind(claim.session, admission.rewind_to)
        return SliceWork(
            session=claim.session,
            tokens=claim.tokens,
            pos0=claim.pos0,
            hidden=accepted.hidden,
            reset=admission.reset,
            want=_wanted(accepted),
            reply_bits=accepted.work.bits,
        )

    def _finish(self, accepted: AcceptedWork, claim: Claim, output: SliceOutput | Ds4Error) -> None:
        """Record what the device did and send it on its way, on the device thread."""
        try:
            if isinstance(output, SliceOutput):
                self._stage.timelines.commit(claim)
                self._deliver(accepted, output)
            else:
                self._stage.timelines.evaluation_failed(claim, output)
                log.warning("%s: span at %d failed: %s", self._name, claim.pos0, output)
                refusal = error_result(accepted.work.request_id, str(output))
                self._outbox.put(encode(refusal), self._answered)
        except TransportError as e:
            log.debug("%s: result not delivered: %s", self._name, e)
            self._answered()
        except Exception:  # a span without its RESULT would be waited for in vain
            log.exception("%s: result not delivered", self._name)
            self._answered()
            self._connection.close()
        if self._dropped:  # it was admitted for us after our sessions were given up
            self._stage.timelines.orphan(self)

    def _answered(self, _: float = 0.0) -> None:
        """Take note that a RESULT of our own was sent."""
        self._room.release()
        self._concluded()

    def _concluded(self) -> None:
        """Take note that a span needs nothing more of this connection."""
        with self._changed:
            self._unfinished -= 1
            self._changed.notify_all()

    def _relay(self, result: Result) -> None:
        """Send the RESULT of a span that was forwarded."""
        try:
            self._outbox.put(encode(result))
        finally:
            self._concluded()

    def _deliver(self, accepted: AcceptedWork, output: SliceOutput) -> None:
        work, telemetry = accepted.work, _telemetry(accepted, output)
        if self._stage.tuning.decode_profile and work.n_tokens == 1:
            log.info("%s: decode at %d: eval %d us", self._name, work.pos0, output.eval_usec)
        if accepted.next_entry is None:
            self._outbox.put(encode(_result(accepted, output, telemetry)), self._answered)
            return
        assert output.hidden is not None
        entry = accepted.next_entry
        onward = forwarded(work, entry, output.hidden.data, work.bits)
        self._forwarder(Address(entry.host, entry.port)).forward(
            onward, telemetry, self._room.release
        )

    def _forwarder(self, address: Address) -> Forwarder:
        with self._changed:
            if self._dropped:  # nobody would close it
                raise PeerClosedError("connection is closed", peer=str(self._connection.peer))
            return self._latest_forwarder(address)

    def _latest_forwarder(self, address: Address) -> Forwarder:
        forwarder = self._forwarders.pop(address, None)
        if forwarder is None:
            forwarder = Forwarder(
                address,
                window=self._stage.tuning.forward_window,
                dial=self._stage.dial,
                reply=self._relay,
            )
            if len(self._forwarders) >= _MAX_NEXT_HOPS:  # a driver may name any host it likes
                oldest = next(iter(self._forwarders))
                self._forwarders.pop(oldest).close()
        self._forwarders[address] = forwarder  # the last one is the latest in use
        return forwarder


def _wanted(accepted: AcceptedWork) -> Want:
    """Return what this hop has to produce (spec 8.6)."""
    if not accepted.is_final:
        return Want.HIDDEN
    if accepted.ack_only:
        return Want.NOTHING
    return Want.LOGITS if accepted.wants_logits else Want.HIDDEN


def _payload(output: SliceOutput) -> tuple[ResultKind, memoryview, int]:
    if output.logits is not None:
        return ResultKind.LOGITS, output.logits.astype("<f4", copy=False).data.cast("B"), 32
    if output.hidden is not None:
        return ResultKind.HIDDEN_STATE, output.hidden.data, output.hidden.bits
    return ResultKind.ACK, memoryview(b""), 0


def _result(accepted: AcceptedWork, output: SliceOutput, telemetry: Telemetry) -> Result:
    kind, payload, bits = _payload(output)
    return Result(
        request_id=accepted.work.request_id,
        result_hash=accepted.work.result_hash,
        result_kind=kind,
        telemetry=(telemetry,),
        payload=payload,
        payload_bits=bits,
    )


def _telemetry(accepted: AcceptedWork, output: SliceOutput) -> Telemetry:
    work = accepted.work
    return Telemetry(
        layer_start=work.layer_start,
        layer_end=work.layer_end,
        route_index=work.route_index,
        pos0=work.pos0,
        n_tokens=work.n_tokens,
        eval_usec=min(output.eval_usec, 2**32 - 1),
        input_bytes=work.token_bytes + work.input_hc_bytes,
        output_bytes=_payload(output)[1].nbytes,
    )
