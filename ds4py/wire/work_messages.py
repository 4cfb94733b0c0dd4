"""WORK and RESULT: a span goes out, its answer comes back (wire-protocol.md#work, #result).

Owns: their layout, what a hop rewrites when it forwards
(docs/spec/wire-protocol.md#forwarded-fields) and relays (docs/spec/wire-protocol.md#return-path).
Refuses to know: whether the values make sense for a model (`ds4py.worker.work_frames` and kin).
Invariant: as in `ds4py.wire.messages`, which is the door to all messages.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple

from ds4py.errors import LocalProtocolError, RemoteProtocolError
from ds4py.wire.frames import MAX_HOPS, Buffer, FrameType, encode_frame, pack, printable, wire_text
from ds4py.wire.route import HopEntry

_WORK: Final = struct.Struct(">IQQQQ11I")
_RESULT: Final = struct.Struct(">QQ6I")
_TELEMETRY: Final = struct.Struct(">10I")
_EMPTY: Final = memoryview(b"")


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """Return token ids as big-endian u32.

    Raises:
        LocalProtocolError: An id is not a u32.
    """
    try:
        return struct.pack(f">{len(tokens)}I", *tokens)
    except struct.error as error:
        raise LocalProtocolError(f"token ids: expected 0 to 2^32-1 each ({error})") from error


def decode_tokens(raw: memoryview) -> tuple[int, ...]:
    """Return the token ids in `raw`, whose length is a multiple of 4."""
    return struct.unpack(f">{len(raw) // 4}I", raw)


class WorkFlags(IntFlag):
    """What a WORK asks for."""

    INPUT_HC = 0x1
    OUTPUT_LOGITS = 0x2
    RESET_SESSION = 0x4
    ACK_ONLY = 0x8


INPUT_HC: Final = int(WorkFlags.INPUT_HC)
OUTPUT_LOGITS: Final = int(WorkFlags.OUTPUT_LOGITS)
RESET_SESSION: Final = int(WorkFlags.RESET_SESSION)
ACK_ONLY: Final = int(WorkFlags.ACK_ONLY)
"""The same as plain numbers, for what runs once per token: `&` of an enum costs as much as ten."""

KNOWN_FLAGS: Final = 0xF
"""Unknown bits survive decoding so that a check can refuse them, but as a plain number: the enum
would remember every combination that a peer ever sent."""

_KNOWN: Final = tuple(WorkFlags(bits) for bits in range(KNOWN_FLAGS + 1))


class ResultKind(IntEnum):
    """What a RESULT carries."""

    ACK = 0
    HIDDEN_STATE = 1
    LOGITS = 2


class WorkHeader(NamedTuple):
    """The fixed 80 bytes of WORK, unchecked; fields and their order as in wire-protocol.md#work."""

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
        return cls._make(_WORK.unpack_from(body))


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
            flags=_KNOWN[header.flags] if header.flags <= KNOWN_FLAGS else header.flags,
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
        fixed = pack(
            _WORK,
            "WORK",
            self.model_id,
            self.session_id,
            self.request_id,
            self.prefix_hash,
            self.result_hash,
            self.pos0,
            len(self.tokens),
            self.layer_start,
            self.layer_end,
            self.flags,
            4 * len(self.tokens),
            self.input.nbytes,
            self.input_hc_bits,
            self.route_count,
            self.route_index,
            self.route_blob.nbytes,
        )
        return encode_frame(
            FrameType.WORK, fixed + encode_tokens(self.tokens), self.input, self.route_blob
        )


def forwarded(work: Work, next_entry: HopEntry, hidden: memoryview, bits: int) -> Work:
    """Return the WORK for the next hop (docs/spec/wire-protocol.md#forwarded-fields).

    Args:
        work: The WORK that this hop was given.
        next_entry: The next hop.
        hidden: This hop's output, packed at `bits` per value.
        bits: 32, 16 or 8.
    """
    flags = int(work.flags) & ~OUTPUT_LOGITS | INPUT_HC
    return Work(
        model_id=work.model_id,
        session_id=work.session_id,
        request_id=work.request_id,
        prefix_hash=work.prefix_hash,
        result_hash=work.result_hash,
        pos0=work.pos0,
        layer_start=next_entry.layer_start,
        layer_end=next_entry.layer_end,
        flags=flags | OUTPUT_LOGITS if next_entry.has_output else flags,
        input_hc_bits=bits,
        route_count=work.route_count,
        route_index=work.route_index + 1,
        tokens=work.tokens,
        input=hidden,
        route_blob=work.route_blob,
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
        return cls.of_fields(_TELEMETRY.unpack(record))

    @classmethod
    def of_fields(cls, fields: tuple[int, ...]) -> Telemetry:
        """Take the ten numbers in their order on the wire."""
        start, end, index, pos0, n_tokens, evaluated, wait, send, n_input, n_output = fields
        return cls(
            layer_start=start,
            layer_end=end,
            route_index=index,
            pos0=pos0,
            n_tokens=n_tokens,
            eval_usec=evaluated,
            downstream_wait_usec=wait,
            forward_send_usec=send,
            input_bytes=n_input,
            output_bytes=n_output,
        )

    def encode(self) -> bytes:
        """Return 40 bytes."""
        return pack(
            _TELEMETRY,
            "telemetry",
            self.layer_start,
            self.layer_end,
            self.route_index,
            self.pos0,
            self.n_tokens,
            self.eval_usec,
            self.downstream_wait_usec,
            self.forward_send_usec,
            self.input_bytes,
            self.output_bytes,
        )

    def timed(self, *, wait_usec: int, send_usec: int) -> Telemetry:
        """Return the record with the two times that a hop knows only when the answer comes."""
        return Telemetry(
            layer_start=self.layer_start,
            layer_end=self.layer_end,
            route_index=self.route_index,
            pos0=self.pos0,
            n_tokens=self.n_tokens,
            eval_usec=self.eval_usec,
            downstream_wait_usec=wait_usec,
            forward_send_usec=send_usec,
            input_bytes=self.input_bytes,
            output_bytes=self.output_bytes,
        )


class ResultHeader(NamedTuple):
    """The fixed 40 bytes of RESULT; fields and their order as in wire-protocol.md#result."""

    request_id: int
    result_hash: int
    status: int
    result_kind: int
    telemetry_count: int
    telemetry_bytes: int
    payload_bytes: int
    payload_bits: int

    @classmethod
    def decode(cls, body: memoryview) -> ResultHeader:
        """Read the fixed record and hold its sizes against the body; kinds "R-FRAME", "R-META"."""
        if len(body) < _RESULT.size:
            raise RemoteProtocolError(
                f"RESULT body of {len(body)} bytes, expected at least 40", kind="R-FRAME"
            )
        header = cls._make(_RESULT.unpack_from(body))
        count, n_bytes, n_payload = header.telemetry_count, header.telemetry_bytes, len(body) - 40
        if n_bytes != 40 * count or n_bytes + header.payload_bytes != n_payload:
            raise RemoteProtocolError(
                f"RESULT sizes do not fit: {count} records, {n_bytes} telemetry bytes and "
                f"{header.payload_bytes} payload bytes in a body of {len(body)}",
                kind="R-META",
            )
        if count > MAX_HOPS:  # each record becomes an object: bytes alone are no bound
            raise RemoteProtocolError(
                f"RESULT with {count} telemetry records, at most {MAX_HOPS} are accepted",
                kind="R-META",
            )
        return header

    @property
    def payload_at(self) -> int:
        """Where the payload begins in the body."""
        return _RESULT.size + self.telemetry_bytes


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
        header = ResultHeader.decode(body)
        records = _TELEMETRY.iter_unpack(body[_RESULT.size : header.payload_at])
        return cls(
            request_id=header.request_id,
            result_hash=header.result_hash,
            status=header.status,
            result_kind=header.result_kind,
            telemetry=tuple(map(Telemetry.of_fields, records)),
            payload=body[header.payload_at :],
            payload_bits=header.payload_bits,
        )

    @property
    def text(self) -> str:
        """The payload as a text, safe to log; meant for errors."""
        return printable(self.payload)

    def relayed(self, telemetry: Telemetry) -> Result:
        """Return the RESULT that goes upstream: one more record, all else untouched.

        See docs/spec/wire-protocol.md#return-path.
        """
        return Result(
            request_id=self.request_id,
            result_hash=self.result_hash,
            status=self.status,
            result_kind=self.result_kind,
            telemetry=(*self.telemetry, telemetry),
            payload=self.payload,
            payload_bits=self.payload_bits,
        )

    def encode(self) -> list[Buffer]:
        """Return the frame's pieces: header and telemetry, payload."""
        records = b"".join([record.encode() for record in self.telemetry])
        fixed = pack(
            _RESULT,
            "RESULT",
            self.request_id,
            self.result_hash,
            self.status,
            self.result_kind,
            len(self.telemetry),
            len(records),
            self.payload.nbytes,
            self.payload_bits,
        )
        return encode_frame(FrameType.RESULT, fixed + records, self.payload)


class RelayedResult(NamedTuple):
    """A RESULT on its way upstream, of which a hop reads the header only.

    See docs/spec/wire-protocol.md#return-path.

    Encodes to what `Result.decode(body).relayed(record)` does.

    Args:
        header: Of the next hop's RESULT.
        body: All of it; a view, not owned.
        record: The hop's own.
    """

    header: ResultHeader
    body: memoryview
    record: Telemetry

    def encode(self) -> list[Buffer]:
        """Return the frame's pieces: header and telemetry, payload."""
        header = self.header
        fixed = pack(
            _RESULT,
            "RESULT",
            header.request_id,
            header.result_hash,
            header.status,
            header.result_kind,
            header.telemetry_count + 1,
            header.telemetry_bytes + _TELEMETRY.size,
            header.payload_bytes,
            header.payload_bits,
        )
        records = self.body[_RESULT.size : header.payload_at]
        payload = self.body[header.payload_at :]
        return encode_frame(FrameType.RESULT, fixed + records + self.record.encode(), payload)


class ResultStatus(IntEnum):
    """What became of a WORK; every other value is an error as well."""

    OK = 0
    FAILED = 1
    CACHE_FULL = 0x64733401
    """A failure that goes away when sessions end; said to those only whose hello has `CACHE_FULL`
    (`ds4py.wire.extensions`). A relay changes nothing of it, a plain peer included; the number
    is none that a plain peer would choose for an error of its own."""


def error_result(request_id: int, text: str, status: ResultStatus = ResultStatus.FAILED) -> Result:
    """Return the RESULT of a refused or failed WORK."""
    return Result(request_id=request_id, status=status, payload=memoryview(wire_text(text)))
