"""Frames that only ds4py peers speak: types from 256 up (docs/architecture.md section 5).

Owns: the extension HELLO, its bounds, and the names of features. Refuses to know: what a feature
does, how a plain peer is told from ours. Invariant: every field of a decoded `PeerHello` is
bounded; unknown fields are ignored, so that a later version can add some.

A C coordinator closes on such a frame and a C worker answers ERROR and closes: the dialer then
comes back in plain mode.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from ds4py.errors import LocalProtocolError, RemoteProtocolError
from ds4py.wire.frames import EXT_HELLO, MAX_U32, Buffer, encode_frame

__all__ = [
    "EXT_HELLO",
    "MAX_HELLO_BYTES",
    "REWIND",
    "PeerHello",
    "decode_peer_hello",
    "encode_peer_hello",
]

MAX_HELLO_BYTES: Final = 64 << 10

REWIND: Final = "rewind"
"""Feature: a WORK may continue at any earlier position of its session; the rest is forgotten."""

_U32 = Annotated[int, Meta(ge=0, le=MAX_U32)]
_Port = Annotated[int, Meta(ge=1, le=65535)]
_Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Short = Annotated[str, Meta(max_length=128)]
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
        raise RemoteProtocolError(f"EXT_HELLO can not be read: {error}", kind="X-HELLO") from error
    if (hello.layer_start is None) != (hello.layer_end is None):
        raise RemoteProtocolError("EXT_HELLO names one end of its layers only", kind="X-HELLO")
    if hello.role == "worker" and hello.layer_start is None:
        raise RemoteProtocolError("EXT_HELLO of a worker names no layers", kind="X-HELLO")
    return hello
