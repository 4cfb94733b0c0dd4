"""Frames that only ds4py peers speak: types from 256 up (docs/design/protocol-extensions.md).

Owns: the extension HELLO, the notices that may follow it, their bounds, the names of features.
Refuses to know: what a feature does, how a plain peer is told from ours. Invariant: every field of
a decoded value is bounded; unknown fields of a hello are ignored, so that a later version can add
some. A notice is sent only to a peer whose hello names its feature.

A C coordinator closes on such a frame and a C worker answers ERROR and closes: anyone who dialled
then comes back in plain mode.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from ds4py.errors import LocalProtocolError, RemoteProtocolError
from ds4py.wire.frames import (
    EXT_HELLO,
    MAX_HOST_BYTES,
    MAX_U32,
    Buffer,
    ExtType,
    Frame,
    encode_frame,
    pack,
    type_name,
)

MAX_HELLO_BYTES: Final = 64 << 10
MIN_ALIVE_TIMEOUT: Final = 0.2
MAX_ALIVE_TIMEOUT: Final = 86400.0

REWIND: Final = "rewind"
"""Feature: a WORK may continue at any earlier position of its session; the rest is forgotten."""

CANCEL: Final = "cancel"
DROP: Final = "drop"
HOP_LOST: Final = "hop-lost"
FORK: Final = "fork"
"""Features: the worker understands the notice of that name."""

CACHE_FULL: Final = "cache-full"
"""Feature: the coordinator knows the status `ResultStatus.CACHE_FULL` of a RESULT."""

_CANCEL: Final = struct.Struct(">QQ")
_DROP: Final = struct.Struct(">Q")
_PORT: Final = struct.Struct(">H")
_FORK: Final = struct.Struct(">QQIQ")

_U32 = Annotated[int, Meta(ge=0, le=MAX_U32)]
_Port = Annotated[int, Meta(ge=1, le=65535)]
_Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Short = Annotated[str, Meta(max_length=128)]
_Seconds = Annotated[float, Meta(ge=MIN_ALIVE_TIMEOUT, le=MAX_ALIVE_TIMEOUT)]
_Word = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-z0-9][a-z0-9._-]*$")]
_Features = Annotated[tuple[_Word, ...], Meta(max_length=64)]


class PeerHello(msgspec.Struct, frozen=True, kw_only=True):
    """What a ds4py process says about itself, once in each direction, the dialer first.

    Args:
        role: "coordinator" or "worker".
        version: Version of ds4py.
        build: Build or commit, may be empty.
        features: Names of optional behaviour that this peer supports.
        model_id: Identity of the model.
        model_name: Its name on the wire.
        n_layers: Layers of the whole model.
        quant_bits: 2 or 4; informational.
        ctx_size: Context in tokens.
        layer_start: First owned layer; None if the process owns none.
        layer_end: Last owned layer, inclusive.
        has_output: Whether the process owns the output head.
        has_hidden: Whether it can return hidden states.
        listen_port: Its data port, if it has one.
        weight_bytes: Bytes of packed weights in its memory.
        alive_timeout: Seconds of silence after which it gives us up; None never does, and sends no
            `Alive` either. The smaller of both sides' values holds for both.
        fingerprint: Of the model file, may be empty.
        nonce: For authentication, may be empty.
    """

    role: Literal["coordinator", "worker"]
    version: _Short
    build: _Short = ""
    features: _Features = ()
    model_id: _U32
    model_name: _Short
    n_layers: _U32
    quant_bits: _U32
    ctx_size: _U32
    layer_start: _U32 | None = None
    layer_end: _U32 | None = None
    has_output: bool = False
    has_hidden: bool = True
    listen_port: _Port | None = None
    weight_bytes: _Bytes | None = None
    alive_timeout: _Seconds | None = None
    fingerprint: _Short = ""
    nonce: _Short = ""


def encode_peer_hello(hello: PeerHello) -> list[Buffer]:
    """Return the frame's pieces.

    Raises:
        LocalProtocolError: The peer would refuse a field.
    """
    body = msgspec.json.encode(hello)
    try:
        decode_peer_hello(memoryview(body))
    except RemoteProtocolError as error:
        raise LocalProtocolError(error.what, kind=error.kind) from error
    return encode_frame(EXT_HELLO, body)


def decode_peer_hello(body: memoryview) -> PeerHello:
    """Read the body of an EXT_HELLO frame.

    Raises:
        RemoteProtocolError: Kind "X-HELLO": too large, not JSON, or a field is missing, of the
            wrong type or out of its bounds.
    """
    if len(body) > MAX_HELLO_BYTES:
        raise RemoteProtocolError(
            f"EXT_HELLO of {len(body)} bytes, at most {MAX_HELLO_BYTES} are accepted",
            kind="X-HELLO",
        )
    try:
        hello = msgspec.json.decode(body, type=PeerHello)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RemoteProtocolError(f"EXT_HELLO cannot be read: {error}", kind="X-HELLO") from error
    if (hello.layer_start is None) != (hello.layer_end is None):
        raise RemoteProtocolError("EXT_HELLO names one end of its layers only", kind="X-HELLO")
    if hello.role == "worker" and hello.layer_start is None:
        raise RemoteProtocolError("EXT_HELLO of a worker names no layers", kind="X-HELLO")
    return hello


@dataclass(frozen=True, slots=True)
class Alive:
    """Sent from time to time, so that silence means death; asks for no answer.

    An answer to a question would not do: a worker that holds back its driver reads nothing, and
    that may take as long as its longest evaluation.
    """

    def encode(self) -> list[Buffer]:
        """Return the frame's pieces."""
        return encode_frame(ExtType.ALIVE, b"")


@dataclass(frozen=True, slots=True)
class Cancel:
    """Spans of a session that have not begun need not be evaluated; each still gets its RESULT.

    Args:
        session_id: Token timeline.
        last_request: Spans with request ids up to this one are meant, whenever they arrive.
    """

    session_id: int
    last_request: int

    def encode(self) -> list[Buffer]:
        """Return the frame's pieces."""
        return encode_frame(
            ExtType.CANCEL, pack(_CANCEL, "EXT_CANCEL", self.session_id, self.last_request)
        )


@dataclass(frozen=True, slots=True)
class Drop:
    """A session has ended for good; its caches may go.

    Args:
        session_id: Token timeline.
    """

    session_id: int

    def encode(self) -> list[Buffer]:
        """Return the frame's pieces."""
        return encode_frame(ExtType.DROP, pack(_DROP, "EXT_DROP", self.session_id))


@dataclass(frozen=True, slots=True)
class HopLost:
    """The coordinator has lost a stage: what waits for an answer of it has failed.

    Args:
        host: As the route names it, at most 255 bytes of UTF-8.
        port: Its data port.
    """

    host: str
    port: int

    def encode(self) -> list[Buffer]:
        """Return the frame's pieces."""
        host = self.host.encode()
        if not 1 <= len(host) <= MAX_HOST_BYTES:
            raise LocalProtocolError(
                f"EXT_HOP_LOST with a host of {len(host)} bytes, expected 1 to {MAX_HOST_BYTES}",
                kind="X-NOTICE",
            )
        return encode_frame(ExtType.HOP_LOST, pack(_PORT, "EXT_HOP_LOST", self.port) + host)


@dataclass(frozen=True, slots=True)
class Fork:
    """A session is to begin with a copy of another one's first tokens, instead of what it holds.

    A stage that does not hold them does nothing, and then refuses the span that continues them.

    Args:
        session_from: Token timeline that is copied.
        session_to: Token timeline that the copy replaces; may be new.
        n_tokens: Tokens that are copied.
        prefix_hash: Of these tokens.
    """

    session_from: int
    session_to: int
    n_tokens: int
    prefix_hash: int

    def encode(self) -> list[Buffer]:
        """Return the frame's pieces."""
        fields = (self.session_from, self.session_to, self.n_tokens, self.prefix_hash)
        return encode_frame(ExtType.FORK, pack(_FORK, "EXT_FORK", *fields))


Notice = Alive | Cancel | Drop | HopLost | Fork


def decode_notice(frame: Frame) -> Notice:
    """Read any frame of ours but the hello.

    Raises:
        RemoteProtocolError: Kind "X-NOTICE": no notice, or a body of another size.
    """
    body = frame.body
    match frame.type:
        case ExtType.ALIVE if not body:
            return Alive()
        case ExtType.CANCEL if len(body) == _CANCEL.size:
            return Cancel(*_CANCEL.unpack(body))
        case ExtType.DROP if len(body) == _DROP.size:
            return Drop(*_DROP.unpack(body))
        case ExtType.HOP_LOST if _PORT.size < len(body) <= _PORT.size + MAX_HOST_BYTES:
            return _decode_hop_lost(body)
        case ExtType.FORK if len(body) == _FORK.size:
            return Fork(*_FORK.unpack(body))
    raise RemoteProtocolError(
        f"{type_name(frame.type)} of {len(body)} bytes is no notice", kind="X-NOTICE"
    )


def _decode_hop_lost(body: memoryview) -> HopLost:
    (port,) = _PORT.unpack_from(body)
    try:
        return HopLost(bytes(body[_PORT.size :]).decode(), port)
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(
            f"EXT_HOP_LOST with an unreadable host: {error}", kind="X-NOTICE"
        ) from error
