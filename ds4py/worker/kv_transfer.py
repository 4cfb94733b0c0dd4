"""A worker hands out its shard of a session, or takes one.

Owns: the checks of docs/spec/wire-protocol.md#save-request, #snapshot-begin that need no session,
what a peer is answered and whether its connection goes on. Refuses to know: what stands in a shard,
other connections. Invariant: a stream that ends in the middle changes nothing; a shard that was
taken whole either replaces the session or ends it.

All of it runs on the reader of the connection, which therefore reads no spans meanwhile; only
copying from and to the caches runs on the device thread, behind the spans that came before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Final

from ds4py.contracts import SessionId
from ds4py.errors import (
    CapacityError,
    Ds4Error,
    PeerClosedError,
    RemoteProtocolError,
    SnapshotError,
    TransportError,
)
from ds4py.peer.shard_transfer import (
    GRACE_SECONDS,
    Arrival,
    time_limit,
    transfer_seconds,
)
from ds4py.snapshot import saved_sizes, shard_sizes
from ds4py.stage.executor import wait_for
from ds4py.stage.stage import SessionOwner
from ds4py.transport.connection import Connection
from ds4py.transport.outbox import Outbox
from ds4py.wire.conversation import ProtocolState
from ds4py.wire.frames import Frame, FrameType, wire_text
from ds4py.wire.messages import (
    LoadBegin,
    SaveRequest,
    SnapshotBegin,
    SnapshotDone,
    SnapshotRecord,
    encode,
    encode_chunks,
)
from ds4py.wire.prefix_hash import prefix_hash
from ds4py.worker.context import MAX_TRANSFERS, WorkerContext
from ds4py.worker.work_frames import Faults, WorkerFacts

log = logging.getLogger(__name__)


_DEVICE_SECONDS: Final = 600.0
_POLL_SECONDS: Final = 0.5


class ShardService:
    """Answers the snapshot requests of one connection.

    Args:
        connection: Read here while a shard arrives.
        outbox: Its only way out.
        conversation: Where the connection stands; the request is noted already.
        context: What all connections of the worker share.
        owner: Of the sessions that are loaded.
        name: For logs.
    """

    def __init__(
        self,
        connection: Connection,
        outbox: Outbox,
        conversation: ProtocolState,
        *,
        context: WorkerContext,
        owner: SessionOwner,
        name: str,
    ):
        self._connection = connection
        self._outbox = outbox
        self._conversation = conversation
        self._context = context
        self._stage = context.stage
        self._owner = owner
        self._name = name

    def save(self, frame: Frame) -> None:
        """Answer SAVE_REQ with the shard, or with a refusal after which the connection goes on.

        Raises:
            TransportError: The peer is gone or takes the shard too slowly.
        """
        request: SaveRequest | None = None
        try:
            request = SaveRequest.decode(frame.body)
            _raise_first(_save_faults(request, self._context.facts))
            with self._permit():
                self._send_shard(request, self._copy(request))
        except TransportError:
            raise
        except Ds4Error as e:
            log.warning("%s: refused to save a session: %s", self._name, e)
            self._conversation.sent(FrameType.SNAPSHOT_BEGIN, refused=True)
            self._outbox.put(encode(self._begin(request, refusal=wire_text(str(e)))))

    def load(self, frame: Frame) -> None:
        """Take the shard that follows LOAD_BEGIN and answer DONE.

        Raises:
            Ds4Error: The connection cannot go on: the stream ended, or a refusal left a part of
                the shard unread, which would be taken for frames.
        """
        record = SnapshotRecord.decode(frame.body)
        arrival = Arrival(record.request_id, record.payload_bytes)
        refusal: Ds4Error | None = None
        try:
            begin = LoadBegin.from_body(record, frame.body)
            _raise_first(_load_faults(begin, self._context.facts))
            with self._permit():
                self._receive(begin, arrival)
                self._replace(begin, arrival.payload)
        except TransportError:
            raise
        except Ds4Error as e:
            refusal = e
        words = b"" if refusal is None else wire_text(str(refusal))
        self._conversation.sent(FrameType.SNAPSHOT_DONE)
        self._outbox.put(encode(SnapshotDone(record.request_id, int(bool(refusal)), words)))
        if refusal is not None and arrival.missing:
            raise refusal
        if refusal is not None:
            log.warning("%s: refused to load a session: %s", self._name, refusal)

    # --- saving ------------------------------------------------------------------------------

    def _copy(self, request: SaveRequest) -> list[memoryview]:
        """Copy the shard on the device thread."""
        session, n_tokens = SessionId(request.session_id), request.token_count
        copy = self._stage.save(session, n_tokens, request.token_hash)
        return wait_for(copy, _DEVICE_SECONDS)

    def _send_shard(self, request: SaveRequest, payload: list[memoryview]) -> None:
        """Send BEGIN, CHUNKs and DONE as one item of the outbox: no RESULT can come between."""
        n_bytes = sum(map(len, payload))
        chunks = chain.from_iterable(encode_chunks(request.request_id, payload))
        begin, done = self._begin(request, n_bytes=n_bytes), SnapshotDone(request.request_id)
        for frame_type in (FrameType.SNAPSHOT_BEGIN, FrameType.SNAPSHOT_DONE):
            self._conversation.sent(frame_type)
        sent = threading.Event()
        with time_limit(self._connection, transfer_seconds(n_bytes)):
            self._outbox.put([*encode(begin), *chunks, *encode(done)], lambda _: sent.set())
            self._wait(sent.wait)

    def _begin(
        self, request: SaveRequest | None, *, n_bytes: int = 0, refusal: bytes = b""
    ) -> SnapshotBegin:
        facts = self._context.facts
        return SnapshotBegin(
            model_id=facts.model_id,
            session_id=0 if request is None else request.session_id,
            request_id=0 if request is None else request.request_id,
            token_hash=0 if request is None or refusal else request.token_hash,
            layer_start=facts.layers.start,
            layer_end=facts.layers.end,
            payload_bytes=n_bytes,
            status=int(bool(refusal)),
            message=refusal,
        )

    # --- loading -----------------------------------------------------------------------------

    def _receive(self, begin: LoadBegin, arrival: Arrival) -> None:
        """Read the shard; one that is too short is read as well, so that the connection goes on."""
        layers, card = self._context.facts.layers, self._stage.card
        expected = shard_sizes(saved_sizes(card), layers, begin.token_count)
        if arrival.n_bytes in expected:
            arrival.take_memory()
        if arrival.n_bytes <= expected[-1]:
            with time_limit(self._connection, transfer_seconds(arrival.n_bytes)):
                arrival.receive(self._connection)
        if arrival.n_bytes not in expected:
            raise SnapshotError(
                f"shard of layers {layers} after {begin.token_count} tokens: "
                f"{arrival.n_bytes} bytes, expected {' or '.join(map(str, expected))}"
            )

    def _replace(self, begin: LoadBegin, payload: memoryview) -> None:
        """Put the shard in the session's place on the device thread."""
        session = SessionId(begin.session_id)
        taken = self._stage.load(session, begin.tokens, begin.token_hash, payload, self._owner)
        wait_for(taken, _DEVICE_SECONDS)

    # --- waiting -----------------------------------------------------------------------------

    @contextmanager
    def _permit(self) -> Iterator[None]:
        """Wait until few enough shards are in memory."""
        permits = self._context.transfers
        deadline = time.monotonic() + GRACE_SECONDS
        if not self._wait(lambda seconds: permits.acquire(timeout=seconds), deadline):
            raise CapacityError(
                "sessions that this stage saves or loads at once",
                needed=MAX_TRANSFERS + 1,
                available=MAX_TRANSFERS,
            )
        try:
            yield
        finally:
            permits.release()

    def _wait(self, step: Callable[[float], bool], deadline: float = float("inf")) -> bool:
        """Repeat a bounded wait until it succeeds; False if it did not before the deadline."""
        while not step(_POLL_SECONDS):
            if self._connection.closed:
                raise PeerClosedError("connection is closed", peer=str(self._connection.peer))
            if time.monotonic() >= deadline:
                return False
        return True


def _raise_first(faults: Faults) -> None:
    for kind, text in faults:
        raise RemoteProtocolError(text, kind=kind)


def _save_faults(request: SaveRequest, facts: WorkerFacts) -> Faults:
    """Row 2 of the table in docs/spec/wire-protocol.md#save-request."""
    asked = (request.model_id, request.layer_start, request.layer_end)
    if asked != (facts.model_id, facts.layers.start, facts.layers.end):
        yield "S-STATE", "snapshot save request does not match worker state"
    if request.token_count > facts.n_ctx:
        yield "S-STATE", "snapshot save request does not match worker state"


def _load_faults(begin: LoadBegin, facts: WorkerFacts) -> Faults:
    """Rows 3 to 5 of the table in docs/spec/wire-protocol.md#snapshot-begin.

    The whole list of tokens is in our hands, so a bad one leaves nothing unread
    (docs/spec/wire-protocol.md#quirks Q21).
    """
    if any(token >= facts.n_vocab for token in begin.tokens):
        yield "L-VOCAB", "snapshot token id is outside the model vocabulary"
    if prefix_hash(begin.tokens) != begin.token_hash:
        yield "L-HASH", "snapshot load token hash mismatch"
    sent = (begin.model_id, begin.layer_start, begin.layer_end)
    fits = sent == (facts.model_id, facts.layers.start, facts.layers.end)
    if not fits or begin.token_count > facts.n_ctx:
        yield "L-STATE", "snapshot load request does not match worker state"
