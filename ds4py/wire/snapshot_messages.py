"""Five messages that move a shard of a session's cache (wire-protocol.md#save-request and on).

Owns: their layout, and the token list that they share with WORK. Refuses to know: what stands in a
shard (`ds4py.snapshot`). Invariant: as in `ds4py.wire.messages`, which is the door to all of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ds4py.errors import LocalProtocolError, RemoteProtocolError
from ds4py.wire.frames import MAX_CHUNK_DATA, Buffer, FrameType, encode_frame, pack, printable
from ds4py.wire.work_messages import decode_tokens, encode_tokens

_SAVE: Final = struct.Struct(">IQQQ3I")
_RECORD: Final = struct.Struct(">IQQQ3IQ3I")
_CHUNK: Final = struct.Struct(">QI")
_DONE: Final = struct.Struct(">QII")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Ask a worker for its shard of a session; fields as in wire-protocol.md#save-request."""

    model_id: int
    session_id: int
    request_id: int
    token_hash: int
    token_count: int
    layer_start: int
    layer_end: int

    @classmethod
    def decode(cls, body: memoryview) -> SaveRequest:
        """Read a body; kind "S-LEN"."""
        if len(body) != _SAVE.size:
            raise RemoteProtocolError("invalid distributed snapshot save request", kind="S-LEN")
        return cls(**dict(zip(cls.__slots__, _SAVE.unpack(body), strict=True)))

    def encode(self) -> list[Buffer]:
        """Return the frame's pieces."""
        fields = (getattr(self, name) for name in self.__slots__)
        return encode_frame(FrameType.SNAPSHOT_SAVE_REQ, pack(_SAVE, "SAVE_REQ", *fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRecord:
    """The fixed 60 bytes that BEGIN and LOAD_BEGIN share; see wire-protocol.md#snapshot-begin."""

    model_id: int
    session_id: int
    request_id: int
    token_hash: int
    token_count: int
    layer_start: int
    layer_end: int
    payload_bytes: int
    status: int
    token_bytes: int
    message_bytes: int

    @classmethod
    def decode(cls, body: memoryview) -> SnapshotRecord:
        """Read the fixed record; kind "L-SHORT"."""
        if len(body) < _RECORD.size:
            raise RemoteProtocolError(
                f"snapshot record of {len(body)} bytes, expected at least 60", kind="L-SHORT"
            )
        return cls(**dict(zip(cls.__slots__, _RECORD.unpack_from(body), strict=True)))

    def encode(self) -> bytes:
        """Return 60 bytes."""
        fields = (getattr(self, name) for name in self.__slots__)
        return pack(_RECORD, "snapshot record", *fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotBegin:
    """A worker's answer to SAVE_REQ; CHUNKs and DONE follow only if `status` is 0.

    Args:
        model_id: The worker's.
        session_id: Echo.
        request_id: Echo.
        token_hash: Echo; 0 in an error.
        layer_start: The worker's.
        layer_end: The worker's.
        payload_bytes: Shard bytes in the following CHUNKs.
        status: 0 is success.
        token_count: 0, or the requested count.
        tokens: Normally empty.
        message: Raw bytes of an error text.
    """

    model_id: int
    session_id: int
    request_id: int
    token_hash: int
    layer_start: int
    layer_end: int
    payload_bytes: int
    status: int = 0
    tokens: tuple[int, ...] = ()
    message: bytes = b""

    @classmethod
    def from_body(cls, record: SnapshotRecord, body: memoryview) -> SnapshotBegin:
        """Read the variable parts, ignoring a tail; kind "S-FRAME"."""
        message_at = _RECORD.size + record.token_bytes
        end = message_at + record.message_bytes
        if record.token_bytes != 4 * record.token_count or end > len(body):
            raise RemoteProtocolError(
                f"SNAPSHOT_BEGIN sizes do not fit: {record.token_count} tokens, "
                f"{record.token_bytes} token bytes and {record.message_bytes} message bytes in a "
                f"body of {len(body)}",
                kind="S-FRAME",
            )
        return cls(
            model_id=record.model_id,
            session_id=record.session_id,
            request_id=record.request_id,
            token_hash=record.token_hash,
            layer_start=record.layer_start,
            layer_end=record.layer_end,
            payload_bytes=record.payload_bytes,
            status=record.status,
            tokens=decode_tokens(body[_RECORD.size : message_at]),
            message=bytes(body[message_at:end]),
        )

    @property
    def token_count(self) -> int:
        """Tokens that the worker sent along."""
        return len(self.tokens)

    @property
    def text(self) -> str:
        """The error text, safe to log."""
        return printable(self.message)

    def encode(self) -> list[Buffer]:
        """Return the frame's pieces."""
        record = SnapshotRecord(
            model_id=self.model_id,
            session_id=self.session_id,
            request_id=self.request_id,
            token_hash=self.token_hash,
            token_count=self.token_count,
            layer_start=self.layer_start,
            layer_end=self.layer_end,
            payload_bytes=self.payload_bytes,
            status=self.status,
            token_bytes=4 * self.token_count,
            message_bytes=len(self.message),
        )
        head = record.encode() + encode_tokens(self.tokens)
        return encode_frame(FrameType.SNAPSHOT_BEGIN, head + self.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBegin:
    """Push a shard to a worker; CHUNKs follow, then the worker answers DONE.

    Args:
        model_id: Must be the worker's.
        session_id: Target timeline.
        request_id: Echoed in CHUNK and DONE.
        token_hash: Hash of `tokens`.
        layer_start: Must be the worker's.
        layer_end: Must be the worker's.
        payload_bytes: Shard bytes in the following CHUNKs.
        status: 0; nobody looks at it.
        tokens: The tokens that the shard represents.
    """

    model_id: int
    session_id: int
    request_id: int
    token_hash: int
    layer_start: int
    layer_end: int
    payload_bytes: int
    status: int = 0
    tokens: tuple[int, ...]

    @classmethod
    def from_body(cls, record: SnapshotRecord, body: memoryview) -> LoadBegin:
        """Read the tokens; kind "L-HEADER"."""
        fits = record.token_bytes == 4 * record.token_count == len(body) - _RECORD.size
        if record.message_bytes or not fits:
            raise RemoteProtocolError("invalid distributed snapshot load header", kind="L-HEADER")
        return cls(
            model_id=record.model_id,
            session_id=record.session_id,
            request_id=record.request_id,
            token_hash=record.token_hash,
            layer_start=record.layer_start,
            layer_end=record.layer_end,
            payload_bytes=record.payload_bytes,
            status=record.status,
            tokens=decode_tokens(body[_RECORD.size :]),
        )

    @property
    def token_count(self) -> int:
        """Tokens of the session."""
        return len(self.tokens)

    def encode(self) -> list[Buffer]:
        """Return the frame's pieces."""
        record = SnapshotRecord(
            model_id=self.model_id,
            session_id=self.session_id,
            request_id=self.request_id,
            token_hash=self.token_hash,
            token_count=self.token_count,
            layer_start=self.layer_start,
            layer_end=self.layer_end,
            payload_bytes=self.payload_bytes,
            status=self.status,
            token_bytes=4 * self.token_count,
            message_bytes=0,
        )
        return encode_frame(
            FrameType.SNAPSHOT_LOAD_BEGIN, record.encode() + encode_tokens(self.tokens)
        )


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """A piece of a shard.

    Args:
        request_id: The running transfer.
        data: At most 8 MiB; a view, not owned.
    """

    request_id: int
    data: memoryview

    @classmethod
    def decode(cls, body: memoryview) -> SnapshotChunk:
        """Read a body; kind "L-CHUNK"."""
        if len(body) >= _CHUNK.size:
            request_id, chunk_bytes = _CHUNK.unpack_from(body)
            if chunk_bytes == len(body) - _CHUNK.size <= MAX_CHUNK_DATA:
                return cls(request_id, body[_CHUNK.size :])
        raise RemoteProtocolError("invalid distributed snapshot chunk", kind="L-CHUNK")

    def encode(self) -> list[Buffer]:
        """Return the frame's pieces."""
        if self.data.nbytes > MAX_CHUNK_DATA:
            raise LocalProtocolError(
                f"SNAPSHOT_CHUNK of {self.data.nbytes} bytes, at most {MAX_CHUNK_DATA} are legal",
                kind="L-CHUNK",
            )
        return _encode_chunk(self.request_id, [self.data])


def encode_chunks(request_id: int, payload: Sequence[memoryview]) -> Iterator[list[Buffer]]:
    """Return the pieces of each CHUNK of a payload: 8 MiB of data, the last one less.

    Args:
        request_id: The transfer.
        payload: Bytes in pieces of any size; not copied.
    """
    held: list[Buffer] = []
    room = MAX_CHUNK_DATA
    for piece in payload:
        rest = piece
        while len(rest) >= room:
            yield _encode_chunk(request_id, [*held, rest[:room]])
            rest, held, room = rest[room:], [], MAX_CHUNK_DATA
        held.append(rest)
        room -= len(rest)
    if room < MAX_CHUNK_DATA:
        yield _encode_chunk(request_id, held)


def _encode_chunk(request_id: int, data: Sequence[Buffer]) -> list[Buffer]:
    n_bytes = sum(len(piece) for piece in data)
    head = pack(_CHUNK, "SNAPSHOT_CHUNK", request_id, n_bytes)
    return encode_frame(FrameType.SNAPSHOT_CHUNK, head, *data)


@dataclass(frozen=True, slots=True)
class SnapshotDone:
    """The worker's end of a transfer, in either direction.

    Args:
        request_id: The transfer.
        status: 0 is success.
        message: Raw bytes of an error text.
    """

    request_id: int
    status: int = 0
    message: bytes = b""

    @classmethod
    def decode(cls, body: memoryview) -> SnapshotDone:
        """Read a body, ignoring a tail; kind "S-FRAME"."""
        if len(body) >= _DONE.size:
            request_id, status, message_bytes = _DONE.unpack_from(body)
            if message_bytes <= len(body) - _DONE.size:
                return cls(request_id, status, bytes(body[_DONE.size : _DONE.size + message_bytes]))
        raise RemoteProtocolError(
            f"SNAPSHOT_DONE body of {len(body)} bytes does not hold its text", kind="S-FRAME"
        )

    @property
    def text(self) -> str:
        """The error text, safe to log."""
        return printable(self.message)

    def encode(self) -> list[Buffer]:
        """Return the frame's pieces."""
        head = pack(_DONE, "SNAPSHOT_DONE", self.request_id, self.status, len(self.message))
        return encode_frame(FrameType.SNAPSHOT_DONE, head + self.message)
