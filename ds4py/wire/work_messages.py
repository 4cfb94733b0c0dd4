"""WORK and RESULT: a span goes out, its answer comes back (spec 2.3, 2.4).

Owns: their layout, what a hop rewrites when it forwards (5.4) and relays (5.6). Refuses to know:
whether the values make sense for a model (`ds4py.cluster.checks`). Invariant: as in
`ds4py.wire.messages`, which is the door to all messages.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum, IntFlag
from typing import Final

from ds4py.errors import RemoteProtocolError
from ds4py.wire.frames import MAX_HOPS, Buffer, FrameType, encode_frame, pack, printable, wire_text
from ds4py.wire.route import RouteEntry
from ds4py.wire.snapshot_messages import decode_tokens, encode_tokens

_WORK: Final = struct.Struct(">IQQQQ11I")
_RESULT: Final = struct.Struct(">QQ6I")
_TELEMETRY: Final = struct.Struct(">10I")
_EMPTY: Final = memoryview(b"")


class WorkFlags(IntFlag):
    """What a WORK asks for."""

    INPUT_HC = 0x1
    OUTPUT_LOGITS = 0x2
    RESET_SESSION = 0x4
    ACK_ONLY = 0x8


KNOWN_FLAGS: Final = 0xF
"""Unknown bits survive decoding so that a check can refuse them, but as a plain number: the enum
would remember every combination that a peer ever sent."""


class ResultKind(IntEnum):
    """What a RESULT carries."""

    ACK = 0
    HIDDEN_STATE = 1
    LOGITS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkHeader:
    """The fixed 80 bytes of WORK, unchecked; fields as in spec 2.3."""

    model_id: int
    session_id: int
    request_id: int
    prefix_hash: int
    result_hash: int
    pos0: int
    n_tokens: int
    layer_start: int
    layer_end: int
    flags: int
    token_bytes: int
    input_hc_bytes: int
    input_hc_bits: int
    route_count: int
    route_index: int
    route_bytes: int

    @classmethod
    def decode(cls, body: memoryview) -> WorkHeader:
        """Read the fixed record; kind "W-TRUNC"."""
        if len(body) < _WORK.size:
            raise RemoteProtocolError("truncated distributed WORK frame", kind="W-TRUNC")
        return cls(**dict(zip(cls.__slots__, _WORK.unpack_from(body), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One span for one hop.

    Args:
        model_id: Must be the receiver's.
        session_id: Token timeline.
        request_id: Echoed in the RESULT.
        prefix_hash: Hash of all tokens before `pos0`.
        result_hash: Hash of all tokens up to and including this span.
        pos0: Absolute position of the first token.
        layer_start: First layer of the addressed hop.
        layer_end: Its last layer, inclusive.
        flags: What is asked for, `WorkFlags` and perhaps unknown bits.
        input_hc_bits: 32, 16 or 8; 0 means 32.
        route_count: Hops in the blob.
        route_index: The addressed hop.
        tokens: Token ids of the span.
        input: Packed hidden state, maybe empty; a view, not owned.
        route_blob: The route, forwarded unchanged; a view, not owned.
    """

    model_id: int
    session_id: int
    request_id: int
    prefix_hash: int
    result_hash: int
    pos0: int
    layer_start: int
    layer_end: int
    flags: int
    input_hc_bits: int
    route_count: int
    route_index: int
    tokens: tuple[int, ...]
    input: memoryview
    route_blob: memoryview

    @classmethod
    def from_body(cls, header: WorkHeader, body: memoryview) -> Work:
        """Read the variable parts behind a decoded header; kind "W-SIZES"."""
        sizes = header.token_bytes + header.input_hc_bytes + header.route_bytes
        if header.token_bytes != 4 * header.n_tokens or sizes != len(body) - _WORK.size:
            raise RemoteProtocolError("invalid distributed WORK payload sizes", kind="W-SIZES")
        tokens_end = _WORK.size + header.token_bytes
        input_end = tokens_end + header.input_hc_bytes
        return cls(
            model_id=header.model_id,
            session_id=header.session_id,
            request_id=header.request_id,
            prefix_hash=header.prefix_hash,
            result_hash=header.result_hash,
            pos0=header.pos0,
            layer_start=header.layer_start,
            layer_end=header.layer_end,
            flags=WorkFlags(header.flags) if header.flags <= KNOWN_FLAGS else header.flags,
            input_hc_bits=header.input_hc_bits,
            route_count=header.route_count,
            route_index=header.route_index,
            tokens=decode_tokens(body[_WORK.size : tokens_end]),
            input=body[tokens_end:input_end],
            route_blob=body[input_end:],
        )

    @property
    def n_tokens(self) -> int:
        """Tokens of the span."""
        return len(self.tokens)

    @property
    def token_bytes(self) -> int:
        """Bytes of the token part."""
        return 4 * len(self.tokens)

    @property
    def input_hc_bytes(self) -> int:
        """Bytes of the packed hidden state."""
        return self.input.nbytes

    @property
    def route_bytes(self) -> int:
        """Bytes of the route blob."""
        return self.route_blob.nbytes

    @property
    def bits(self) -> int:
        """Activation width, 0 read as 32."""
        return self.input_hc_bits or 32

    def encode(self) -> list[Buffer]:
        """Return the frame's pieces: header and tokens, hidden state, route."""
        fields = (getattr(self, name) for name in WorkHeader.__slots__)
        fixed = pack(_WORK, "WORK", *fields)
        return encode_frame(
            FrameType.WORK, fixed + encode_tokens(self.tokens), self.input, self.route_blob
        )


def forwarded(work: Work, next_entry: RouteEntry, hidden: memoryview, bits: int) -> Work:
    """Return the WORK for the next hop (spec 5.4).

    Args:
        work: The WORK that this hop was given.
        next_entry: The next hop.
        hidden: This hop's output, packed at `bits` per value.
        bits: 32, 16 or 8.
    """
    flags = work.flags | WorkFlags.INPUT_HC | WorkFlags.OUTPUT_LOGITS
    if not next_entry.has_output:
        flags ^= WorkFlags.OUTPUT_LOGITS
    return replace(
        work,
        layer_start=next_entry.layer_start,
        layer_end=next_entry.layer_end,
        route_index=work.route_index + 1,
        flags=flags,
        input_hc_bits=bits,
        input=hidden,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """One hop's record inside a RESULT: what it did, and how long it took (microseconds)."""

    layer_start: int
    layer_end: int
    route_index: int
    pos0: int
    n_tokens: int
    eval_usec: int
    downstream_wait_usec: int = 0
    forward_send_usec: int = 0
    input_bytes: int
    output_bytes: int

    @classmethod
    def decode(cls, record: memoryview) -> Telemetry:
        """Read 40 bytes."""
        return cls(**dict(zip(cls.__slots__, _TELEMETRY.unpack(record), strict=True)))

    def encode(self) -> bytes:
        """Return 40 bytes."""
        return pack(_TELEMETRY, "telemetry", *(getattr(self, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The answer to one WORK.

    Args:
        request_id: Of the WORK; 0 if the worker could not read it.
        result_hash: Of the WORK; 0 in an error.
        status: 0 is success; otherwise the payload is a text.
        result_kind: A `ResultKind`; other numbers survive decoding.
        telemetry: One record a hop, the final hop first.
        payload: Packed hidden state, logits, text or nothing; a view, not owned.
        payload_bits: Width of a hidden state (0 means 32), 32 for logits, else 0.
    """

    request_id: int
    result_hash: int = 0
    status: int = 0
    result_kind: int = ResultKind.ACK
    telemetry: tuple[Telemetry, ...] = ()
    payload: memoryview = _EMPTY
    payload_bits: int = 0

    @classmethod
    def decode(cls, body: memoryview) -> Result:
        """Read a body; kinds "R-FRAME", "R-META"."""
        if len(body) < _RESULT.size:
            raise RemoteProtocolError(
                f"RESULT body of {len(body)} bytes, expected at least 40", kind="R-FRAME"
            )
        request_id, result_hash, status, kind, *sizes, bits = _RESULT.unpack_from(body)
        count, telemetry_bytes, payload_bytes = sizes
        if telemetry_bytes != 40 * count or telemetry_bytes + payload_bytes != len(body) - 40:
            raise RemoteProtocolError(
                f"RESULT sizes do not fit: {count} records, {telemetry_bytes} telemetry bytes and "
                f"{payload_bytes} payload bytes in a body of {len(body)}",
                kind="R-META",
            )
        if count > MAX_HOPS:  # each record becomes an object: bytes alone are no bound
            raise RemoteProtocolError(
                f"RESULT with {count} telemetry records, at most {MAX_HOPS} are accepted",
                kind="R-META",
            )
        payload_at = 40 + telemetry_bytes
        starts = range(40, payload_at, 40)
        return cls(
            request_id=request_id,
            result_hash=result_hash,
            status=status,
            result_kind=kind,
            telemetry=tuple(Telemetry.decode(body[at : at + 40]) for at in starts),
            payload=body[payload_at:],
            payload_bits=bits,
        )

    @property
    def text(self) -> str:
        """The payload as a text, safe to log; meant for errors."""
        return printable(self.payload)

    def relayed(self, telemetry: Telemetry) -> Result:
        """Return the RESULT that goes upstream: one more record, all else untouched (spec 5.6)."""
        return replace(self, telemetry=(*self.telemetry, telemetry))

    def encode(self) -> list[Buffer]:
        """Return the frame's pieces: header and telemetry, payload."""
        records = b"".join(record.encode() for record in self.telemetry)
        sizes = (len(self.telemetry), len(records), self.payload.nbytes, self.payload_bits)
        kind = (self.status, self.result_kind)
        fixed = pack(_RESULT, "RESULT", self.request_id, self.result_hash, *kind, *sizes)
        return encode_frame(FrameType.RESULT, fixed + records, self.payload)


def error_result(request_id: int, text: str) -> Result:
    """Return the RESULT of a refused or failed WORK."""
    return Result(request_id=request_id, status=1, payload=memoryview(wire_text(text)))
