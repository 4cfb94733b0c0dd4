"""The 12-byte header and the reader that lends buffers.

Owns: magic, frame types, size limits, and the cutting of a byte stream into frames
(docs/spec/wire-protocol.md#framing). Refuses to know: what stands in a body, where bytes come from.
Invariant: the reader never takes a byte beyond the current frame, and never allocates for a body
that its limits do not allow.

Sans-IO, turned around for 256 MiB payloads: not "here are bytes", but "where shall I put the next
bytes". A socket can then `recv_into` the final place, and nothing is copied in Python.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Final, NamedTuple

from ds4py.errors import LocalProtocolError, RemoteProtocolError

MAGIC: Final = b"DS4D"
HEADER_BYTES: Final = 12
MAX_U32: Final = 2**32 - 1

MAX_HOST_BYTES: Final = 255
"""Of a host in a frame of ours; a name of the Internet has at most 253."""

MAX_CHUNK_DATA: Final = 8 << 20
"""Shard bytes in one SNAPSHOT_CHUNK (docs/spec/wire-protocol.md#snapshot-chunk)."""

MAX_HOPS: Final = 64
"""Telemetry records that one RESULT may carry here; the protocol itself has no limit."""

_TEXT_BYTES: Final = 64 << 10
_MAX_OWN_TEXT: Final = 4096
_SCRATCH_BYTES: Final = 4096
_EMPTY: Final = memoryview(b"")
_HEADER: Final = struct.Struct(">4sII")
_HTTP_STARTS: Final = (
    *(b"GET ", b"POST", b"PUT ", b"HEAD", b"OPTI", b"DELE", b"PATC", b"CONN", b"TRAC"),
    *(b"HTTP", b"PRI "),
)

Buffer = bytes | memoryview
"""One piece of a frame on its way out."""

Allocator = Callable[[int], bytearray | memoryview]
"""Returns at least that many writable bytes; may be uninitialised or pinned memory."""


class FrameType(IntEnum):
    """The nine types of the stock protocol (docs/spec/wire-protocol.md#frame-header)."""

    HELLO = 1
    ERROR = 2
    WORK = 3
    RESULT = 4
    SNAPSHOT_SAVE_REQ = 5
    SNAPSHOT_BEGIN = 6
    SNAPSHOT_CHUNK = 7
    SNAPSHOT_DONE = 8
    SNAPSHOT_LOAD_BEGIN = 9


class ExtType(IntEnum):
    """Types from 256 up are spoken between ds4py peers only (`ds4py.wire.extensions`)."""

    HELLO = 256
    ALIVE = 257
    CANCEL = 258
    DROP = 259
    HOP_LOST = 260
    FORK = 261


EXT_HELLO: Final = ExtType.HELLO


class Frame(NamedTuple):
    """One received frame.

    Args:
        type: Frame type; any 32-bit number, because peers lie.
        body: The body. The frame owns the buffer, messages decoded from it are views into it.
        discarded: The type was not accepted; the body was read and thrown away.
    """

    type: int
    body: memoryview
    discarded: bool = False


class FrameReader:
    """Cuts one direction of one connection into frames.

    The loop of its user: fill some of `writable()`, say how much with `filled(n)`, perhaps get a
    frame. As no byte beyond the current frame is ever taken, another reader (with other limits)
    may continue whenever `mid_frame` is false. After an error the reader is of no further use.

    Args:
        limits: Accepted types, each with its largest legal body in bytes.
        allocate: Source of body buffers; called once per accepted, non-empty body.
    """

    __slots__ = (
        "_allocate",
        "_body",
        "_header",
        "_left",
        "_lent",
        "_limits",
        "_scratch",
        "_type",
    )

    def __init__(self, limits: Mapping[int, int], allocate: Allocator = bytearray):
        self._limits = limits
        self._allocate = allocate
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._scratch: memoryview | None = None  # made for the first unwanted body
        self._type = 0
        self._body: memoryview | None = None  # None while in the header or in an unwanted body
        self._left = 0  # bytes of an unwanted body that are still to come
        self._lent = self._header  # where the next bytes belong, up to the end of this part

    @property
    def mid_frame(self) -> bool:
        """Whether the stream would end inside a frame if it ended now."""
        return self._lent is not self._header

    def writable(self) -> memoryview:
        """Return where the next received bytes belong; never empty."""
        return self._lent

    def filled(self, n: int) -> Frame | None:
        """Take note that the first `n` bytes of `writable()` were filled.

        Returns:
            The frame that these bytes completed, if any.

        Raises:
            RemoteProtocolError: Kind "F-MAGIC" or "F-SIZE"; the connection cannot go on.
            LocalProtocolError: More bytes are reported than were lent.
        """
        lent = self._lent
        if not 0 <= n <= len(lent):
            raise LocalProtocolError(f"{n} bytes reported, {len(lent)} were lent")
        if self._left:
            return self._thrown_away(n)
        if n < len(lent):
            if n:
                self._lent = lent[n:]
                self._check_magic()
            return None
        return self._header_filled() if self._body is None else self._finish(self._body)

    def _thrown_away(self, n: int) -> Frame | None:
        assert self._scratch is not None
        self._left -= n
        self._lent = self._scratch[: self._left]
        return None if self._left else self._finish(_EMPTY, discarded=True)

    def _check_magic(self) -> None:
        """Look at the start of a header of which at least four bytes are there."""
        if self._body is None and len(self._lent) <= HEADER_BYTES - len(MAGIC):
            start = bytes(self._header[:4])
            if start != MAGIC:
                raise RemoteProtocolError(_foreign_start(start), kind="F-MAGIC")

    def _header_filled(self) -> Frame | None:
        magic, self._type, size = _HEADER.unpack(self._header)
        if magic != MAGIC:
            raise RemoteProtocolError(_foreign_start(magic), kind="F-MAGIC")
        limit = self._limits.get(self._type)
        if size == 0:
            return self._finish(_EMPTY, discarded=limit is None)
        if limit is None:
            self._left = size
            if self._scratch is None:
                self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
            self._lent = self._scratch[:size]
            return None
        if size > limit:
            raise RemoteProtocolError(
                f"{type_name(self._type)} body of {size} bytes, at most {limit} are accepted here",
                kind="F-SIZE",
            )
        self._lent = self._body = memoryview(self._allocate(size))[:size]
        assert len(self._body) == size
        return None

    def _finish(self, body: memoryview, *, discarded: bool = False) -> Frame:
        self._body, self._lent = None, self._header
        return Frame(self._type, body, discarded)


def encode_header(frame_type: int, n: int) -> bytes:
    """Return the 12 bytes before a body of `n` bytes.

    Raises:
        LocalProtocolError: The body does not fit into a frame.
    """
    if n > MAX_U32:
        raise LocalProtocolError(
            f"{type_name(frame_type)} body of {n} bytes, a frame holds at most {MAX_U32}",
            kind="F-SIZE",
        )
    return _HEADER.pack(MAGIC, frame_type, n)


def encode_frame(frame_type: int, head: bytes, *rest: Buffer) -> list[Buffer]:
    """Return the pieces of one frame for a scatter send.

    Args:
        frame_type: Frame type.
        head: First part of the body; copied behind the header, so it should be small.
        rest: Further parts, C-contiguous; not copied, empty ones left out.
    """
    pieces: list[Buffer] = [b""]
    size = len(head)
    for piece in rest:
        if len(piece):
            pieces.append(memoryview(piece).cast("B"))
            size += len(pieces[-1])
    pieces[0] = encode_header(frame_type, size) + head
    return pieces


def pack(record: struct.Struct, what: str, *values: int) -> bytes:
    """Pack the fields of a fixed record.

    Raises:
        LocalProtocolError: A value does not fit its field.
    """
    try:
        return record.pack(*values)
    except struct.error as error:
        raise LocalProtocolError(f"{what}: a field does not fit: {values} ({error})") from error


def type_name(frame_type: int) -> str:
    """Name a frame type for people."""
    if frame_type in _NAMES:
        return _NAMES[frame_type]
    return f"frame type {frame_type}"


_NAMES: Final = {
    **{int(known): known.name for known in FrameType},
    **{int(known): f"EXT_{known.name}" for known in ExtType},
}


def printable(raw: Buffer, limit: int = 511) -> str:
    """Return a peer's text as one harmless line: at most `limit` bytes, no control characters."""
    text = bytes(raw[:limit]).decode("utf-8", errors="replace")
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def wire_text(text: str) -> bytes:
    """Return a text of ours as bytes for the wire, at most 4096."""
    return text.encode("utf-8", errors="replace")[:_MAX_OWN_TEXT]


def hello_limits() -> dict[int, int]:
    """Limits of a connection whose peer has not introduced itself yet."""
    return {FrameType.HELLO: 40 + 127, EXT_HELLO: _TEXT_BYTES}


def worker_limits(n_ctx: int, hidden_width: int) -> dict[int, int]:
    """Limits of a worker that serves a connection (docs/spec/wire-protocol.md#frame-header).

    Args:
        n_ctx: The worker's context in tokens.
        hidden_width: Values per token between layers.
    """
    slack = 65_536  # the route, and requests that deserve a polite refusal
    return {
        FrameType.ERROR: _TEXT_BYTES,
        FrameType.WORK: min(80 + 4 * n_ctx + n_ctx * hidden_width * 4 + slack, MAX_U32),
        FrameType.SNAPSHOT_SAVE_REQ: _SCRATCH_BYTES,
        FrameType.SNAPSHOT_LOAD_BEGIN: 60 + 4 * n_ctx + slack,
        FrameType.SNAPSHOT_CHUNK: 12 + MAX_CHUNK_DATA,
        EXT_HELLO: _TEXT_BYTES,
        ExtType.ALIVE: 0,
        ExtType.CANCEL: 16,
        ExtType.DROP: 8,
        ExtType.HOP_LOST: 2 + MAX_HOST_BYTES,
        ExtType.FORK: 28,
    }


def plain_limits(limits: Mapping[int, int]) -> dict[int, int]:
    """Return the limits of a process that knows nothing but the stock protocol."""
    return {kind: size for kind, size in limits.items() if kind < EXT_HELLO}


def coordinator_limits(n_vocab: int, hidden_width: int, max_span: int) -> dict[int, int]:
    """Limits of a reader of results: a coordinator, or a worker's relay.

    Args:
        n_vocab: Vocabulary size.
        hidden_width: Values per token between layers.
        max_span: Most tokens of one WORK, usually the prefill cap.
    """
    payload = max(4 * n_vocab, 4 * max_span * hidden_width, _TEXT_BYTES)
    return {
        FrameType.ERROR: _TEXT_BYTES,
        FrameType.RESULT: min(40 + 40 * MAX_HOPS + payload, MAX_U32),
        FrameType.SNAPSHOT_BEGIN: 60 + _TEXT_BYTES,
        FrameType.SNAPSHOT_CHUNK: 12 + MAX_CHUNK_DATA,
        FrameType.SNAPSHOT_DONE: 16 + _TEXT_BYTES,
        EXT_HELLO: _TEXT_BYTES,
        ExtType.ALIVE: 0,
    }


def _foreign_start(start: bytes) -> str:
    looks_like = ""
    if start in _HTTP_STARTS:
        looks_like = ": HTTP on a DS4D connection"
    elif start[:2] == b"\x16\x03":
        looks_like = ": TLS on a DS4D connection"
    return f"frame starts with {start!r}, expected {MAGIC!r}{looks_like}; check the port"
