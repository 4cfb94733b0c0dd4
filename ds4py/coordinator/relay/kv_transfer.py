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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from ds4py.activations import F32
from ds4py.config import SocketConfig
from ds4py.contracts import ModelCard, SessionId
from ds4py.coordinator.relay.registry import WorkerRecord
from ds4py.coordinator.relay.route import Route
from ds4py.errors import ClusterError, RemoteProtocolError, RemoteWorkError, SnapshotError
from ds4py.layer_range import LayerRange
from ds4py.peer.shard_transfer import Arrival, next_frame, saved_sizes, time_limit, transfer_seconds
from ds4py.snapshot import (
    SavedShard,
    SavedSizes,
    SessionState,
    join,
    read_shard,
    read_whole,
    shard_sizes,
    split,
    write_shard,
    write_whole,
)
from ds4py.stage.executor import DeviceThread
from ds4py.transport.connection import Connection
from ds4py.transport.sockets import connect
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

FIRST_REQUEST: Final = 1 << 63
"""Request ids of snapshots count from here, so that they never disturb those of spans.

See docs/spec/wire-protocol.md#ids.
"""

_CONNECT_ROUNDS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """What a session's stages have evaluated.

    Args:
        tokens: Ids, oldest first.
        token_hash: Prefix hash of all of them.
    """

    tokens: tuple[int, ...]
    token_hash: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """Saves and loads one session.

    Args:
        session: Its id on every stage.
        card: The model.
        n_ctx: Tokens that a session can hold.
        sockets: Socket options.
        device_seconds: How long a stage may take until it has copied a cache, behind the spans of
            other sessions.
        next_request_id: Counts from `FIRST_REQUEST`.
    """

    session: SessionId
    card: ModelCard
    n_ctx: int
    sockets: SocketConfig
    device_seconds: float
    next_request_id: Callable[[], int]

    def save(self, route: Route, transcript: Transcript, logits: F32) -> list[memoryview]:
        """Return the pieces of a whole session's payload.

        Args:
            route: Whose stages hold the session.
            transcript: What they must hold.
            logits: After the last token, float32 `[V]`; not copied.

        Raises:
            SnapshotError: A shard is damaged or the shards do not fit together; names the stage.
            RemoteWorkError: A hop refused.
            ClusterError: A hop broke the protocol.
            TransportError: A hop was lost or too slow.
        """
        shards = [] if route.local is None else [self._copy(route.local, transcript)]
        shards += [
            self._read(self._pull(route, hop, transcript), hop.layers, transcript, hop.name)
            for hop in route.hops
        ]
        return write_whole(join(shards, transcript.tokens, logits))

    def read(self, payload: bytes | memoryview) -> SessionState[SavedShard]:
        """Check a payload against the model and the context; the result holds views into it.

        Raises:
            SnapshotError: It cannot be continued here.
        """
        return read_whole(payload, self._sizes(), n_ctx=self.n_ctx)

    def load(self, route: Route, transcript: Transcript, whole: SessionState[SavedShard]) -> None:
        """Give every stage its part; after an error some stages may have it and others not.

        Args:
            route: Whose stages are to hold the session.
            transcript: The payload's tokens.
            whole: The payload.

        Raises:
            RemoteWorkError: A hop refused.
            Ds4Error: As in `save`.
        """
        if route.local is not None:
            part = split(whole, route.local.runner.layers)
            payload, n_tokens = memoryview(b"".join(write_shard(part))), len(transcript.tokens)
            route.local.call(
                lambda runner: runner.load_cache(self.session, n_tokens, payload),
                timeout=self.device_seconds,
                session=self.session,
            )
        for hop in route.hops:
            self._push(route, hop, transcript, split(whole, hop.layers))

    def _sizes(self) -> SavedSizes:
        return saved_sizes(self.card)

    def _copy(self, local: DeviceThread, transcript: Transcript) -> SavedShard:
        """Ask our own slice for its shard."""
        pieces = local.call(
            lambda runner: runner.save_cache(self.session),
            timeout=self.device_seconds,
            session=self.session,
        )
        payload = memoryview(b"".join(pieces))
        return self._read(payload, local.runner.layers, transcript, "own layers")

    def _read(
        self, payload: memoryview, layers: LayerRange, transcript: Transcript, stage: str
    ) -> SavedShard:
        """Read a shard, whatever stage it is from, as if from a stranger."""
        n_tokens = len(transcript.tokens)
        try:
            return read_shard(payload, self._sizes(), layers, n_ctx=self.n_ctx, n_tokens=n_tokens)
        except SnapshotError as e:
            raise SnapshotError(f"{stage}: {e}") from e

    def _pull(self, route: Route, hop: WorkerRecord, transcript: Transcript) -> memoryview:
        """Ask a hop for its shard."""
        request = SaveRequest(
            model_id=self.card.model_id,
            session_id=self.session,
            request_id=self.next_request_id(),
            token_hash=transcript.token_hash,
            token_count=len(transcript.tokens),
            layer_start=hop.layers.start,
            layer_end=hop.layers.end,
        )
        sizes = shard_sizes(self._sizes(), hop.layers, request.token_count)
        with self._talk(route, hop, sizes[-1]) as connection:
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
        self, route: Route, hop: WorkerRecord, transcript: Transcript, part: SavedShard
    ) -> None:
        """Send a hop its shard.

        A hop that refuses before it has all of it closes; then its reason may be lost, as in ds4.
        """
        payload = write_shard(part)
        begin = LoadBegin(
            model_id=self.card.model_id,
            session_id=self.session,
            request_id=self.next_request_id(),
            token_hash=transcript.token_hash,
            layer_start=hop.layers.start,
            layer_end=hop.layers.end,
            payload_bytes=sum(map(len, payload)),
            tokens=transcript.tokens,
        )
        with self._talk(route, hop, begin.payload_bytes) as connection:
            connection.send(encode(begin))
            for chunk in encode_chunks(begin.request_id, payload):
                connection.send(chunk)
            _await_done(connection, begin.request_id, hop)

    @contextmanager
    def _talk(self, route: Route, hop: WorkerRecord, n_bytes: int) -> Iterator[Connection]:
        """Connect to a hop for one operation that moves so many bytes; its loss ends that too."""
        limits = coordinator_limits(self.card.n_vocab, self.card.hidden_width, self.n_ctx)
        limits[FrameType.SNAPSHOT_BEGIN] += 4 * self.n_ctx  # a stranger may send the tokens along
        sock = connect(hop.address, self.sockets, rounds=_CONNECT_ROUNDS)
        connection = Connection(sock, self.sockets, limits)
        try:
            seconds = self.device_seconds + transfer_seconds(n_bytes)
            with route.watching((hop,), connection.close), time_limit(connection, seconds):
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
