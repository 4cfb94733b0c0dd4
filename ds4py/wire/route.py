"""The hop list and return record inside WORK (wire-protocol.md#route-plan, #route-checks).

Owns: the blob's layout and every sub-check of class W-ROUTE, in the order of the spec. Refuses to
know: whether a hop can be reached. Invariant: decoded entries join without gap or overlap, and
re-encoding them gives the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NoReturn

from ds4py.errors import LocalProtocolError, RemoteProtocolError
from ds4py.wire.frames import pack, printable

_ENTRY: Final = struct.Struct(">5I")
_RETURN: Final = struct.Struct(">3I")
_LOGITS_FLAG: Final = 1
_UPSTREAM: Final = 1
_MAX_HOST: Final = 1024
_KEPT_ROUTES: Final = 16
# A host is raw bytes on the wire and almost always a numeric address. Latin-1 maps every byte to
# one character and back, so no peer can make the codec fail or change the blob.
_HOST_ENCODING: Final = "latin-1"


@dataclass(frozen=True, slots=True)
class HopEntry:
    """One hop.

    Args:
        host: Address as the coordinator saw the worker, 1 to 1024 bytes.
        port: The worker's data port, 1 to 65535.
        layer_start: First layer of the hop.
        layer_end: Last layer, inclusive.
        has_output: The hop returns logits.
    """

    host: str
    port: int
    layer_start: int
    layer_end: int
    has_output: bool = False

    def __str__(self) -> str:
        host = printable(self.host.encode(_HOST_ENCODING), 64)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def encode_route(entries: Sequence[HopEntry]) -> bytes:
    """Return the blob: every hop, then the return record.

    Raises:
        LocalProtocolError: An entry could not be decoded again.
    """
    blob = b"".join(_encode_entry(entry) for entry in entries)
    blob += _RETURN.pack(_UPSTREAM, 0, 0)
    n_layers = entries[-1].layer_end + 1 if entries else 0
    try:
        decode_route(memoryview(blob), len(entries), n_layers)
    except RemoteProtocolError as error:
        raise LocalProtocolError(f"route {entries}: {error.what}", kind=error.kind) from error
    return blob


def _encode_entry(entry: HopEntry) -> bytes:
    try:
        host = entry.host.encode(_HOST_ENCODING)
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"route host {entry.host!r}: not an address") from error
    flags = _LOGITS_FLAG if entry.has_output else 0
    fields = (len(host), entry.port, entry.layer_start, entry.layer_end, flags)
    return pack(_ENTRY, "route entry", *fields) + host


def decode_route(blob: memoryview, route_count: int, n_layers: int) -> tuple[HopEntry, ...]:
    """Check a blob and return its hops.

    Args:
        blob: The route part of a WORK body.
        route_count: Hops that the WORK declares. Needs no bound of its own: the hops' layers rise
            and stay below `n_layers`, and every hop takes at least 21 bytes.
        n_layers: Layers of the model.

    Raises:
        RemoteProtocolError: Kind "W-ROUTE", with the first failing check of
            docs/spec/wire-protocol.md#route-checks.
    """
    return _decode_route(bytes(blob), route_count, n_layers)


@lru_cache(maxsize=_KEPT_ROUTES)  # each token of a session brings the same bytes again
def _decode_route(blob: bytes, route_count: int, n_layers: int) -> tuple[HopEntry, ...]:
    entries: list[HopEntry] = []
    rest = memoryview(blob)
    for _ in range(route_count):
        entry, rest = _decode_entry(rest, n_layers)
        if entries and entry.layer_start != entries[-1].layer_end + 1:
            _refuse("route layer ranges are not contiguous")
        entries.append(entry)
    _check_return(rest)
    return tuple(entries)


def _decode_entry(rest: memoryview, n_layers: int) -> tuple[HopEntry, memoryview]:
    if len(rest) < _ENTRY.size:
        _refuse("truncated route entry")
    host_len, port, layer_start, layer_end, flags = _ENTRY.unpack_from(rest)
    rest = rest[_ENTRY.size :]
    if not 1 <= host_len <= min(_MAX_HOST, len(rest)):
        _refuse("invalid route host length")
    host = bytes(rest[:host_len])
    if 0 in host:
        _refuse("route host contains NUL bytes")
    if not 1 <= port <= 65535:
        _refuse("invalid route port")
    if not layer_start <= layer_end < n_layers:
        _refuse("invalid route layer range")
    if flags & ~_LOGITS_FLAG:
        _refuse("invalid route flags")
    if flags and layer_end + 1 != n_layers:
        _refuse("route logits require final layer")
    name = host.decode(_HOST_ENCODING)
    return HopEntry(name, port, layer_start, layer_end, bool(flags)), rest[host_len:]


def _check_return(rest: memoryview) -> None:
    if len(rest) < _RETURN.size:
        _refuse("route payload missing final destination")
    kind, host_len, port = _RETURN.unpack_from(rest)
    rest = rest[_RETURN.size :]
    if host_len > min(_MAX_HOST, len(rest)):
        _refuse("invalid final destination host length")
    if 0 in rest[:host_len]:
        _refuse("final destination host contains NUL bytes")
    if kind != _UPSTREAM:
        _refuse("unsupported route final destination")
    if host_len or port:
        _refuse("invalid upstream route final destination")
    if len(rest):
        _refuse("route payload has trailing bytes")


def _refuse(text: str) -> NoReturn:
    raise RemoteProtocolError(text, kind="W-ROUTE")
