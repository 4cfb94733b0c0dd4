"""A session of a route becomes one payload, and a payload becomes a session again.

Owns: pulling every stage's shard, joining them, cutting a payload and pushing the shards
(docs/spec/wire-protocol.md#snapshots). Refuses to know: timelines, replay, files. Invariant: each
remote operation has a connection of its own, to the hop's data port, and ends in bounded time;
nothing that happens on it touches the route.

What we ask of a route of DeepSeek V4: every stage has the same context
(docs/spec/wire-protocol.md#quirks Q23). Shards that differ in `prefill_cap`, `raw_cap` or
`comp_cap`, which a C coordinator refuses, are joined: none of these says anything about the
tensors, and the payload names those of the first stage.

Shards of other models have a form of ours (docs/spec/kv-payload.md) and travel in the same frames:
no C peer serves such a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from ds4py.activations import F32
from ds4py.contracts import SessionId
from ds4py.coordinator.pipeline import Transcript
from ds4py.coordinator.relay.context import RelayContext
from ds4py.coordinator.relay.route import Route
from ds4py.coordinator.relay.workers.registry import WorkerRecord
from ds4py.errors import ClusterError, RemoteProtocolError, RemoteWorkError, SnapshotError
from ds4py.layer_range import LayerRange
from ds4py.peer.shard_transfer import Arrival, next_frame, time_limit, transfer_seconds
from ds4py.snapshot import (
    SavedShard,
    SavedSizes,
    SessionState,
    join,
    read_shard,
    saved_sizes,
    shard_sizes,
    split,
    write_shard,
    write_whole,
)
from ds4py.stage.executor import wait_for
from ds4py.stage.stage import Stage
from ds4py.transport.connection import Connection
from ds4py.wire.frames import FrameType, coordinator_limits
from ds4py.wire.messages import (
    LoadBegin,
    SaveRequest,
    SnapshotBegin,
    SnapshotDone,
    SnapshotRecord,
    encode,
    encode_chunks,
)

_CONNECT_ROUNDS: Final = 8


class KvTransfer:
    """Saves and loads sessions of one route.

    Args:
        route: The stages.
        context: What all routes share; a stage may take `result_timeout` until it has copied a
            cache, behind the chunks of other sessions.
    """

    def __init__(self, route: Route, context: RelayContext):
        self._route = route
        self._context = context
        self._card = context.card

    @property
    def _device_seconds(self) -> float:
        return self._context.config.result_timeout

    def save(self, session: SessionId, transcript: Transcript, logits: F32) -> list[memoryview]:
        """Return the pieces of a whole session's payload; see `Pipeline.save`.

        Raises:
            SnapshotError: A shard is damaged or the shards do not fit together; names the stage.
            RemoteWorkError: A hop refused.
            ClusterError: A hop broke the protocol.
            TransportError: A hop was lost or too slow.
        """
        local = self._route.local
        shards = [] if local is None else [self._copy(local, session, transcript)]
        shards += [
            self._read(self._pull(hop, session, transcript), hop.layers, transcript, hop.name)
            for hop in self._route.hops
        ]
        return write_whole(join(shards, transcript.tokens, logits))

    def load(
        self, session: SessionId, transcript: Transcript, state: SessionState[SavedShard]
    ) -> None:
        """Give every stage its part; see `Pipeline.load`."""
        local = self._route.local
        if local is not None:
            payload = memoryview(b"".join(write_shard(split(state, local.layers))))
            taken = local.load(session, transcript.tokens, transcript.token_hash, payload)
            wait_for(taken, self._device_seconds)
        for hop in self._route.hops:
            self._push(hop, session, transcript, split(state, hop.layers))

    def _sizes(self) -> SavedSizes:
        return saved_sizes(self._card)

    def _copy(self, local: Stage, session: SessionId, transcript: Transcript) -> SavedShard:
        """Ask our own layers for their shard."""
        copy = local.save(session, len(transcript.tokens), transcript.token_hash)
        pieces = wait_for(copy, self._device_seconds)
        payload = memoryview(b"".join(pieces))
        return self._read(payload, local.layers, transcript, "own layers")

    def _read(
        self, payload: memoryview, layers: LayerRange, transcript: Transcript, stage: str
    ) -> SavedShard:
        """Read a shard, whatever stage it is from, as if from a stranger."""
        n_tokens = len(transcript.tokens)
        try:
            return read_shard(
                payload, self._sizes(), layers, n_ctx=self._context.n_ctx, n_tokens=n_tokens
            )
        except SnapshotError as e:
            raise SnapshotError(f"{stage}: {e}") from e

    def _pull(self, hop: WorkerRecord, session: SessionId, transcript: Transcript) -> memoryview:
        """Ask a hop for its shard."""
        request = SaveRequest(
            model_id=self._card.model_id,
            session_id=session,
            request_id=self._context.next_transfer_id(),
            token_hash=transcript.token_hash,
            token_count=len(transcript.tokens),
            layer_start=hop.layers.start,
            layer_end=hop.layers.end,
        )
        sizes = shard_sizes(self._sizes(), hop.layers, request.token_count)
        with self._talk(hop, sizes[-1]) as connection:
            connection.send(encode(request))
            body = next_frame(connection, FrameType.SNAPSHOT_BEGIN).body
            begin = SnapshotBegin.from_body(SnapshotRecord.decode(body), body)
            if begin.status:
                raise RemoteWorkError(begin.text, hop=hop.name)
            _check_begin(begin, request, sizes)
            arrival = Arrival(request.request_id, begin.payload_bytes)
            arrival.take_memory()
            arrival.receive(connection)
            _await_done(connection, request.request_id, hop)
        return arrival.payload

    def _push(
        self, hop: WorkerRecord, session: SessionId, transcript: Transcript, part: SavedShard
    ) -> None:
        """Send a hop its shard.

        A hop that refuses before it has all of it closes; then its reason may be lost, as in ds4.
        """
        payload = write_shard(part)
        begin = LoadBegin(
            model_id=self._card.model_id,
            session_id=session,
            request_id=self._context.next_transfer_id(),
            token_hash=transcript.token_hash,
            layer_start=hop.layers.start,
            layer_end=hop.layers.end,
            payload_bytes=sum(map(len, payload)),
            tokens=transcript.tokens,
        )
        with self._talk(hop, begin.payload_bytes) as connection:
            connection.send(encode(begin))
            for chunk in encode_chunks(begin.request_id, payload):
                connection.send(chunk)
            _await_done(connection, begin.request_id, hop)

    @contextmanager
    def _talk(self, hop: WorkerRecord, n_bytes: int) -> Iterator[Connection]:
        """Connect to a hop for one operation that moves so many bytes; its loss ends that too."""
        n_ctx = self._context.n_ctx
        limits = coordinator_limits(self._card.n_vocab, self._card.hidden_width, n_ctx)
        limits[FrameType.SNAPSHOT_BEGIN] += 4 * n_ctx  # a stranger may send the tokens along
        connection = self._context.connector.connect(hop.address, limits, rounds=_CONNECT_ROUNDS)
        try:
            seconds = self._device_seconds + transfer_seconds(n_bytes)
            with self._route.watching((hop,), connection.close), time_limit(connection, seconds):
                yield connection
        except RemoteProtocolError as e:
            raise ClusterError(f"{hop.name} broke the protocol of saved sessions: {e}") from e
        finally:
            connection.close()


def _check_begin(begin: SnapshotBegin, request: SaveRequest, sizes: Sequence[int]) -> None:
    """Compare a successful BEGIN with what was asked (wire-protocol.md#snapshot-begin)."""
    echo = ("model_id", "session_id", "request_id", "token_hash", "layer_start", "layer_end")
    for field in echo:
        got, expected = getattr(begin, field), getattr(request, field)
        if got != expected:
            raise RemoteProtocolError(f"BEGIN with {field} {got}, expected {expected}")
    if begin.token_count not in (0, request.token_count):
        raise RemoteProtocolError(
            f"BEGIN with {begin.token_count} tokens, expected 0 or {request.token_count}"
        )
    if begin.payload_bytes not in sizes:
        raise RemoteProtocolError(
            f"BEGIN announces a shard of {begin.payload_bytes} bytes, expected "
            f"{' or '.join(map(str, sizes))} after {request.token_count} tokens"
        )


def _await_done(connection: Connection, request_id: int, hop: WorkerRecord) -> None:
    done = SnapshotDone.decode(next_frame(connection, FrameType.SNAPSHOT_DONE).body)
    if done.request_id != request_id:
        raise RemoteProtocolError(f"DONE of request {done.request_id}, expected {request_id}")
    if done.status:
        raise RemoteWorkError(done.text, hop=hop.name)
