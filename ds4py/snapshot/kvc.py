"""The bytes of a disk cache file, ds4's `KVC` format with a seal of ours at its end.

Owns: the header, the tool map, the seal, and every check of a length or checksum
(docs/spec/server-and-cli.md#kvc). Refuses to know: folders, sessions, what a payload holds.
Invariant: no count in a file is believed before it is compared with the bytes that are there, and
what `read_trailer` and `check_body` accept is what was written.

A file is header, key text, payload, tool map if flag bit 0 is set, seal. The seal stands last, for
three reasons: a ds4 reader that follows the flag finds the tool map directly behind the payload and
has read all it wants before the seal begins; one that does not, stops at the payload; and a fixed
size at a fixed place lets a scan of a folder read whose file it is without reading the rest. It
uses no flag bit and no reserved byte. ds4 drops it when it rewrites a tool map; such a file counts
as one of ds4's own.

There are two checksums, because a tool map is rewritten without touching the payload: one of key
text and payload, and one of everything else. Neither covers hit count and time of last use, which
any reader changes in place.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Any, Final

from ds4py.errors import SnapshotError

HEADER_BYTES: Final = 52
ABI_DS4: Final = 2
"""Payloads are `DSV4` version 2, exchanged with ds4."""

ABI_OWN: Final = 64
"""Payloads of architectures that ds4 does not know; ds4 leaves such files alone."""

OTHER_MODEL: Final = 255
"""Model byte of a model that is none of ds4's; the seal tells them apart."""

MAX_TOOL_IDS: Final = 400_000
MAX_ID_BYTES: Final = 256
MAX_BLOCK_BYTES: Final = 512 << 20
FINGERPRINT_BYTES: Final = 32

_HEADER: Final = struct.Struct("<3sBBBBBIIIB3xQQQI")
_MAGIC: Final = b"KVC"
_VERSION: Final = 1
_USE: Final = (struct.Struct("<I"), 12), (struct.Struct("<Q"), 32)
_MAX_U32: Final = (1 << 32) - 1

_TOOL_MAP: Final = struct.Struct("<3sBI")
_TOOL_MAGIC: Final = b"KTM"
_ENTRY: Final = struct.Struct("<II")

_SEAL: Final = struct.Struct(f"<4sB3xII{FINGERPRINT_BYTES}s{FINGERPRINT_BYTES}s")
_SEAL_MAGIC: Final = b"DS4P"
_CRC: Final = struct.Struct("<I")
SEAL_BYTES: Final = _SEAL.size + _CRC.size

Buffer = bytes | bytearray | memoryview
ToolMap = Mapping[bytes, bytes]
"""Id of a call -> the bytes that the model sampled for its block."""


class Reason(IntEnum):
    """Why a file was written; the last two are a coding agent's, no server's."""

    UNKNOWN = 0
    COLD = 1
    CONTINUED = 2
    EVICT = 3
    SHUTDOWN = 4
    SYSTEM_PREFIX = 5
    SAVED_CHAT = 6


class Flag(IntFlag):
    """What is special about a file."""

    NONE = 0
    TOOL_MAP = 1
    RESPONSES_VISIBLE = 2
    THINKING_VISIBLE = 4
    TITLE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KvcHeader:
    """The first 52 bytes.

    Args:
        n_tokens: Tokens of the payload.
        ctx: Tokens that the writer's sessions could hold.
        payload_bytes: Bytes of the payload.
        key_bytes: Bytes of the key text.
        created: Unix seconds.
        last_used: Unix seconds.
        hits: How often it was loaded.
        reason: Usually a `Reason`; any byte is kept.
        flags: Bits of `Flag`; unknown ones are kept.
        quant_bits: Of the routed experts, 2 or 4.
        model_id: 0 Flash, 1 Pro, `OTHER_MODEL`.
        abi: Kind of payload.
    """

    n_tokens: int
    ctx: int
    payload_bytes: int
    key_bytes: int
    created: int
    last_used: int
    hits: int = 0
    reason: int = Reason.UNKNOWN
    flags: int = Flag.NONE
    quant_bits: int = 4
    model_id: int = 0
    abi: int = ABI_DS4

    @property
    def payload_at(self) -> int:
        """Offset of the payload."""
        return HEADER_BYTES + self.key_bytes

    @property
    def trailer_at(self) -> int:
        """Offset of the first byte behind the payload."""
        return self.payload_at + self.payload_bytes

    @property
    def has_tool_map(self) -> bool:
        """Whether a tool map follows the payload."""
        return bool(self.flags & Flag.TOOL_MAP)

    def encode(self) -> bytes:
        """Return the 52 bytes.

        Raises:
            SnapshotError: A value does not fit its field.
        """
        try:
            return _HEADER.pack(
                *(_MAGIC, _VERSION, self.quant_bits, self.reason, self.flags, self.model_id),
                *(self.n_tokens, self.hits, self.ctx, self.abi, self.created, self.last_used),
                *(self.payload_bytes, self.key_bytes),
            )
        except struct.error as e:
            raise SnapshotError(f"cache file header {self}: does not fit its fields: {e}") from e

    @classmethod
    def decode(cls, raw: Buffer) -> KvcHeader:
        """Read the first 52 bytes of a file.

        Raises:
            SnapshotError: This is no KVC file of the version that we know.
        """
        if len(raw) < HEADER_BYTES:
            raise SnapshotError(f"cache file of {len(raw)} bytes, expected at least {HEADER_BYTES}")
        magic, version, quant, reason, flags, model, *rest = _HEADER.unpack_from(raw)
        if (magic, version) != (_MAGIC, _VERSION):
            raise SnapshotError(
                f"begins with {magic!r} version {version}, expected {_MAGIC!r} version {_VERSION}"
            )
        n_tokens, hits, ctx, abi, created, last_used, payload_bytes, key_bytes = rest
        return cls(
            n_tokens=n_tokens,
            ctx=ctx,
            payload_bytes=payload_bytes,
            key_bytes=key_bytes,
            created=created,
            last_used=last_used,
            hits=hits,
            reason=reason,
            flags=flags,
            quant_bits=quant,
            model_id=model,
            abi=abi,
        )


def use_patches(hits: int, last_used: int) -> list[tuple[int, bytes]]:
    """Return (offset, bytes) of the two fields that a reader changes in place."""
    values = min(hits, _MAX_U32), last_used
    return [(at, form.pack(value)) for (form, at), value in zip(_USE, values, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """Whose file it is, and the checksum of its body.

    Args:
        model_id: As on the wire, 32 bits.
        model: The model's fingerprint, at most 32 bytes of ASCII; empty if unknown.
        tokenizer: The tokenizer's, alike.
        body_crc: CRC-32 of key text and payload.

    Raises:
        SnapshotError: A fingerprint is too long.
    """

    model_id: int
    model: str
    tokenizer: str
    body_crc: int

    def __post_init__(self) -> None:
        for text in (self.model, self.tokenizer):
            if not text.isascii() or len(text) > FINGERPRINT_BYTES:
                raise SnapshotError(
                    f"fingerprint {text!r}: expected at most {FINGERPRINT_BYTES} ASCII characters"
                )


@dataclass(frozen=True, slots=True)
class Trailer:
    """What follows the payload.

    Args:
        tool_map: Empty if there is none.
        seal: None in a file of ds4's.
    """

    tool_map: dict[bytes, bytes] = field(default_factory=dict)
    seal: Seal | None = None


def crc_of(pieces: Iterable[Buffer]) -> int:
    """Return the CRC-32 of some pieces in a row."""
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return crc


def write_trailer(header: Buffer, tool_map: ToolMap, seal: Seal | None) -> bytes:
    """Return what follows the payload.

    Args:
        header: The 52 bytes in front; its flag bit 0 says whether the tool map is written.
        tool_map: Blocks by id.
        seal: None writes none.

    Raises:
        SnapshotError: The tool map is larger than a reader would believe.
    """
    written = _write_tool_map(tool_map) if KvcHeader.decode(header).has_tool_map else b""
    return written if seal is None else written + _write_seal(header, written, seal)


def read_seal(tail: Buffer) -> Seal | None:
    """Return the seal that a file ends with, unchecked, or None.

    Args:
        tail: The file's last bytes, `SEAL_BYTES` or more.
    """
    if len(tail) < SEAL_BYTES:
        return None
    at = len(tail) - SEAL_BYTES
    magic, version, model_id, body_crc, model, tokenizer = _SEAL.unpack_from(tail, at)
    texts = [bytes(text).rstrip(b"\0") for text in (model, tokenizer)]
    if (magic, version) != (_SEAL_MAGIC, _VERSION) or not all(map(bytes.isascii, texts)):
        return None
    first, second = (text.decode("ascii") for text in texts)
    return Seal(model_id=model_id, model=first, tokenizer=second, body_crc=body_crc)


def read_trailer(header: Buffer, trailer: Buffer) -> Trailer:
    """Read everything behind the payload.

    Args:
        header: The first 52 bytes.
        trailer: All bytes behind the payload.

    Raises:
        SnapshotError: It is damaged, or there are bytes that nothing accounts for.
    """
    view = memoryview(trailer)
    fields = KvcHeader.decode(header)
    seal = read_seal(view)
    tools = view if seal is None else view[:-SEAL_BYTES]
    if seal is not None and bytes(view[-SEAL_BYTES:]) != _write_seal(header, tools, seal):
        raise SnapshotError("header, tool map or seal: the checksum differs")
    if not fields.has_tool_map and len(tools):
        raise SnapshotError(f"{len(tools)} bytes behind the payload, expected none")
    if seal is None and fields.abi != ABI_DS4:
        raise SnapshotError(f"payload ABI {fields.abi} without a seal, expected one at the end")
    return Trailer(_read_tool_map(tools) if fields.has_tool_map else {}, seal)


def check_body(seal: Seal, key: Buffer, payload: Buffer) -> None:
    """Compare key text and payload with their checksum.

    Raises:
        SnapshotError: They differ.
    """
    crc = crc_of([key, payload])
    if crc != seal.body_crc:
        raise SnapshotError(f"checksum of text and payload {crc:08x}, expected {seal.body_crc:08x}")


def _write_seal(header: Buffer, tools: Buffer, seal: Seal) -> bytes:
    body = _SEAL.pack(
        *(_SEAL_MAGIC, _VERSION, seal.model_id, seal.body_crc),
        *(seal.model.encode("ascii"), seal.tokenizer.encode("ascii")),
    )
    return body + _CRC.pack(crc_of([_without_use(header), tools, body]))


def _without_use(header: Buffer) -> bytes:
    """Return a header with zeros where readers count."""
    raw = bytearray(header[:HEADER_BYTES])
    for at, zeros in use_patches(0, 0):
        raw[at : at + len(zeros)] = zeros
    return bytes(raw)


def _write_tool_map(tool_map: ToolMap) -> bytes:
    _expect("entries", len(tool_map), 0, MAX_TOOL_IDS)
    pieces = [_TOOL_MAP.pack(_TOOL_MAGIC, _VERSION, len(tool_map))]
    for id_, block in tool_map.items():
        _expect("bytes of an id", len(id_), 1, MAX_ID_BYTES)
        _expect("bytes of a block", len(block), 0, MAX_BLOCK_BYTES)
        pieces += [_ENTRY.pack(len(id_), len(block)), id_, block]
    return b"".join(pieces)


def _read_tool_map(raw: memoryview) -> dict[bytes, bytes]:
    rest = _Rest(raw)
    magic, version, count = rest.unpack(_TOOL_MAP)
    if (magic, version) != (_TOOL_MAGIC, _VERSION):
        raise SnapshotError(f"tool map begins with {magic!r} version {version}, expected KTM 1")
    _expect("entries", count, 0, MAX_TOOL_IDS)
    tool_map = {}
    for _ in range(count):
        id_bytes, block_bytes = rest.unpack(_ENTRY)
        _expect("bytes of an id", id_bytes, 1, MAX_ID_BYTES)
        _expect("bytes of a block", block_bytes, 0, MAX_BLOCK_BYTES)
        id_ = rest.take(id_bytes)
        tool_map[id_] = rest.take(block_bytes)
    if rest.n_left:
        raise SnapshotError(f"{rest.n_left} bytes behind the tool map, expected none")
    return tool_map


class _Rest:
    """Bytes that are taken from front to back, never more than there are."""

    def __init__(self, raw: memoryview):
        self._raw = raw
        self._at = 0

    @property
    def n_left(self) -> int:
        return len(self._raw) - self._at

    def take(self, n_bytes: int) -> bytes:
        _expect("bytes left", self.n_left, n_bytes, len(self._raw))
        self._at += n_bytes
        return bytes(self._raw[self._at - n_bytes : self._at])

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.take(form.size))


def _expect(what: str, got: int, low: int, high: int) -> None:
    if not low <= got <= high:
        raise SnapshotError(f"tool map: {what} {got}, expected {low} to {high}")
