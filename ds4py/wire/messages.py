"""Messages of the stock protocol as values, to bytes and back.

Owns: the layout of HELLO and ERROR (docs/spec/wire-protocol.md#hello, #error) and the list of
messages. Refuses to know: whether the values make sense for a model (the receiver says that).
Invariant: `decode` of an encoded message equals the message; payloads are views into the frame's
buffer on the way in and pieces of their own on the way out, never copied.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from ds4py.errors import LocalProtocolError, RemoteProtocolError
from ds4py.wire.frames import (
    Buffer,
    Frame,
    FrameType,
    encode_frame,
    pack,
    printable,
    type_name,
    wire_text,
)
from ds4py.wire.snapshot_messages import (
    LoadBegin,
    SaveRequest,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotDone,
    SnapshotRecord,
    encode_chunks,
)
from ds4py.wire.work_messages import (
    Result,
    ResultKind,
    Telemetry,
    Work,
    WorkFlags,
    WorkHeader,
    error_result,
    forwarded,
)

__all__ = [
    "MAX_NAME_BYTES",
    "ErrorText",
    "Hello",
    "LoadBegin",
    "Result",
    "ResultKind",
    "SaveRequest",
    "SnapshotBegin",
    "SnapshotChunk",
    "SnapshotDone",
    "SnapshotRecord",
    "Telemetry",
    "WireMessage",
    "Work",
    "WorkFlags",
    "WorkHeader",
    "decode",
    "encode",
    "encode_chunks",
    "error_result",
    "forwarded",
]

_HELLO: Final = struct.Struct(">10I")
MAX_NAME_BYTES: Final = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A worker introduces itself: first frame on a control connection.

    Args:
        model_id: Identity of the model; see `ds4py.contracts.ModelCard`.
        quant_bits: 2 or 4; informational.
        layer_start: First owned layer.
        layer_end: Last owned layer, inclusive.
        has_output: 1 if the worker owns the output head, else 0 (a peer may send nonsense).
        has_hidden: 1 if the worker can return hidden states, else 0.
        ctx_size: Context in tokens.
        n_layers: Layers of the whole model.
        listen_port: Data port.
        model_name: Raw bytes of the name, at most 127, no NUL.
    """

    model_id: int
    quant_bits: int
    layer_start: int
    layer_end: int
    has_output: int
    has_hidden: int
    ctx_size: int
    n_layers: int
    listen_port: int
    model_name: bytes

    @classmethod
    def decode(cls, body: memoryview) -> Hello:
        """Read a body; kinds "H-LENGTH", "H-NAMELEN", "H-NUL"."""
        if not _HELLO.size <= len(body) <= _HELLO.size + MAX_NAME_BYTES:
            raise RemoteProtocolError(
                f"HELLO body of {len(body)} bytes, expected 40 to 167", kind="H-LENGTH"
            )
        *fields, name_len = _HELLO.unpack_from(body)
        name = bytes(body[_HELLO.size :])
        if name_len != len(name):
            raise RemoteProtocolError(
                f"HELLO model name of {name_len} bytes declared, {len(name)} follow",
                kind="H-NAMELEN",
            )
        if 0 in name:
            raise RemoteProtocolError("HELLO model name contains a zero byte", kind="H-NUL")
        return cls(**dict(zip(cls.__slots__, (*fields, name), strict=True)))

    def encode(self) -> list[Buffer]:
        """Return the frame's pieces."""
        name = self.model_name
        if len(name) > MAX_NAME_BYTES or 0 in name:
            raise LocalProtocolError(
                f"HELLO model name {name!r}: expected at most 127 bytes without NUL",
                kind="H-NAMELEN",
            )
        *fields, _ = (getattr(self, field) for field in self.__slots__)
        head = pack(_HELLO, "HELLO", *fields, len(name))
        return encode_frame(FrameType.HELLO, head + name)


@dataclass(frozen=True, slots=True)
class ErrorText:
    """Last words before a close.

    Args:
        message: Raw bytes of the text; a peer may send anything.
    """

    message: bytes

    @classmethod
    def of(cls, text: str) -> ErrorText:
        """Make an ERROR from a text of ours."""
        return cls(wire_text(text))

    @property
    def text(self) -> str:
        """The text, safe to log."""
        return printable(self.message)

    def encode(self) -> list[Buffer]:
        """Return the frame's pieces."""
        return encode_frame(FrameType.ERROR, self.message)


WireMessage = (
    Hello
    | ErrorText
    | Work
    | Result
    | SaveRequest
    | SnapshotBegin
    | SnapshotChunk
    | SnapshotDone
    | LoadBegin
)


def encode(message: WireMessage) -> list[Buffer]:
    """Return the pieces of one frame for a scatter send.

    Raises:
        LocalProtocolError: A field does not fit, or the message could not be decoded again.
    """
    return message.encode()


def decode(frame: Frame) -> WireMessage:
    """Return the message in a frame; payloads are views into the frame's body.

    A worker reads WORK, SAVE_REQ and LOAD_BEGIN with the two-step functions instead, because its
    refusal must name the request.

    Raises:
        RemoteProtocolError: With the class name of the spec as `kind`; "F-TYPE" if the frame was
            discarded or has no stock type.
    """
    body = frame.body
    match None if frame.discarded else frame.type:
        case FrameType.HELLO:
            return Hello.decode(body)
        case FrameType.ERROR:
            return ErrorText(bytes(body))
        case FrameType.WORK:
            return Work.from_body(WorkHeader.decode(body), body)
        case FrameType.RESULT:
            return Result.decode(body)
        case FrameType.SNAPSHOT_SAVE_REQ:
            return SaveRequest.decode(body)
        case FrameType.SNAPSHOT_BEGIN:
            return SnapshotBegin.from_body(SnapshotRecord.decode(body), body)
        case FrameType.SNAPSHOT_CHUNK:
            return SnapshotChunk.decode(body)
        case FrameType.SNAPSHOT_DONE:
            return SnapshotDone.decode(body)
        case FrameType.SNAPSHOT_LOAD_BEGIN:
            return LoadBegin.from_body(SnapshotRecord.decode(body), body)
        case _:
            raise RemoteProtocolError(
                f"{type_name(frame.type)} is not accepted here", kind="F-TYPE"
            )
