"""Targets that read saved sessions: payloads of both forms, and files of the disk cache.

Owns: what each of them is given and what must hold. Refuses to know: budgets, sockets. Invariant:
`feed` depends on its bytes alone, so a saved input fails again.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Final

from ds4py.errors import SnapshotError
from ds4py.layer_range import LayerRange
from ds4py.snapshot import (
    PlainShard,
    join,
    read_dsv4,
    read_dsvl,
    read_shard,
    read_whole,
    shard_sizes,
    split,
    write_dsv4,
    write_dsvl,
    write_shard,
    write_whole,
)
from ds4py.snapshot.disk_cache import DiskCache, DiskCacheOptions
from ds4py.snapshot.kvc import (
    ABI_DS4,
    ABI_OWN,
    HEADER_BYTES,
    SEAL_BYTES,
    KvcHeader,
    read_trailer,
    write_trailer,
)
from ds4py.snapshot.kvc_policy import file_name
from interop.fuzz import corpus
from interop.fuzz.damage import change_word, damage_bytes
from interop.fuzz.target import Target


def _damaged(rng: Random, payload: bytes, n_words: int) -> bytes:
    """Damage a payload that begins with some 32-bit words."""
    data = bytearray(payload)
    chance = rng.random()
    if chance < 0.8:
        words = n_words if chance < 0.5 else len(data) // 4
        change_word(rng, data, 4 * rng.randrange(words), 4, little_endian=True)
    return bytes(data) if chance < 0.7 else damage_bytes(rng, bytes(data))


def _refusal(error: SnapshotError) -> str:
    return "size" if "bytes, expected" in error.what else " ".join(error.what.split()[2:4])


class Snapshots(Target):
    """Payloads as ds4 writes them."""

    name = "snapshots"
    _PART: Final = LayerRange(1, 1)

    def _make(self, rng: Random) -> bytes:
        payload = rng.choice((corpus.payload_whole, corpus.payload_part))
        return _damaged(rng, payload(), 14)

    def _feed(self, data: bytes) -> Sequence[str]:
        sizes, n_ctx = corpus.SIZES, corpus.SIZES_CTX
        is_part = data[3:4] == b"L"
        try:
            if is_part:
                part = read_dsvl(data, sizes, self._PART, n_ctx=n_ctx, n_tokens=13)
                again = b"".join(write_dsvl(part))
            else:
                again = b"".join(write_dsv4(read_dsv4(data, sizes, n_ctx=n_ctx)))
        except SnapshotError as e:
            return [_refusal(e)]
        assert len(again) == len(data), "another size after writing it"
        if b"\0\0\x80\xff" not in data:  # minus infinity is replaced
            assert again == data, "not the same after writing it"
        return ["read"]


class Plain(Target):
    """Payloads of keys and values; what was read can be cut, joined and written."""

    name = "plain"
    _CTX: Final = 40

    def _make(self, rng: Random) -> bytes:
        payload = rng.choice((corpus.plain_whole, corpus.plain_part))
        return _damaged(rng, payload(), 10 + corpus.PLAIN.n_layers)

    def _feed(self, data: bytes) -> Sequence[str]:
        try:
            return self._read_part(data) if data[3:4] == b"L" else self._read_whole(data)
        except SnapshotError as e:
            return [_refusal(e)]

    def _read_whole(self, data: bytes) -> Sequence[str]:
        whole = read_whole(data, corpus.PLAIN, n_ctx=self._CTX)
        cuts = (LayerRange(0, 1), corpus.PLAIN_PART)
        again = join([split(whole, cut) for cut in cuts], whole.tokens, whole.logits)
        assert b"".join(write_whole(again)) == data, "not the same when cut, joined and written"
        return ["whole"]

    def _read_part(self, data: bytes) -> Sequence[str]:
        part = read_shard(data, corpus.PLAIN, corpus.PLAIN_PART, n_ctx=self._CTX, n_tokens=5)
        assert isinstance(part, PlainShard)
        assert b"".join(write_shard(part)) == data, "not the same after writing it"
        if len({layer.kind for layer in part.layers}) == 1:  # as one stage has them
            announced = shard_sizes(corpus.PLAIN, corpus.PLAIN_PART, 5)
            assert len(data) in announced, f"{len(data)} bytes, announced {announced}"
        return ["part"]


class CacheFiles(Target):
    """A folder of the disk cache with one file in it: found, loaded, or set aside.

    Half of the damaged files get checksums that fit, as somebody's who means harm would have.
    """

    name = "kvc"
    bytes_allowed = 128 << 10
    _BYTES: Final = (3, 4, 5, 6, 7, 20)
    _NUMBERS: Final = ((8, 4), (12, 4), (16, 4), (24, 8), (32, 8), (40, 8), (48, 4))
    _PROMPT: Final = corpus.KEY + b" at night"
    _OPTIONS: Final = DiskCacheOptions(
        min_tokens=8, space_bytes=1 << 16, boundary_align_tokens=1, boundary_trim_tokens=0
    )

    def _open(self) -> None:
        self._home = TemporaryDirectory(prefix="ds4py-fuzz-")

    def _close(self) -> None:
        self._home.cleanup()

    def _make(self, rng: Random) -> bytes:
        data = bytearray(rng.choice(corpus.cache_files()))
        chance = rng.random()
        if chance < 0.2:
            data[rng.choice(self._BYTES)] = rng.choice((0, 1, 2, 3, 64, 255, rng.randrange(256)))
        elif chance < 0.5:
            change_word(rng, data, *rng.choice(self._NUMBERS), little_endian=True)
        elif chance < 0.8:
            behind = HEADER_BYTES + len(corpus.KEY) + 100
            if (at := behind + rng.randrange(SEAL_BYTES)) + 4 <= len(data):
                change_word(rng, data, at, 4, little_endian=True)
        damaged = damage_bytes(rng, bytes(data)) if chance > 0.7 else bytes(data)
        return _resealed(damaged) if rng.random() < 0.5 else damaged

    def _feed(self, data: bytes) -> Sequence[str]:
        folder, name = Path(self._home.name), file_name(corpus.KEY)
        for old in os.listdir(folder):
            (folder / old).unlink()
        (folder / name).write_bytes(data)
        owner = corpus.OWNERS[ABI_DS4 if data[20:21] == bytes([ABI_DS4]) else ABI_OWN]
        cache = DiskCache(folder, self._OPTIONS, owner, now=lambda: 1.78e9)
        cache.tool_blocks([b"call_1", b"call_2"])
        loaded = None if (hit := cache.find(self._PROMPT)) is None else cache.load(hit)
        if loaded is not None:
            at, end = loaded.header.payload_at, loaded.header.trailer_at
            assert loaded.payload == data[at:end], "another payload than stands in the file"
            assert not _is_sealed(data) or data == _resealed(data), "a checksum that differs"
        there = (folder / name).exists()
        outcome = "left alone" if there else "set aside"
        return ["loaded" if loaded else outcome, _reading(data)]


def _reading(data: bytes) -> str:
    """Read header and trailer, and write them again; say how that ended."""
    try:
        header = KvcHeader.decode(data)
        raw, behind = data[:HEADER_BYTES], data[header.trailer_at :]
        trailer = read_trailer(raw, behind)
    except SnapshotError as e:
        return " ".join(word for word in e.what.split()[:4] if word.isalpha())
    assert header.encode() == raw[:21] + bytes(3) + raw[24:], "another header after writing it"
    again = write_trailer(raw, trailer.tool_map, trailer.seal)
    twins = header.has_tool_map and int.from_bytes(behind[4:8], "little") > len(trailer.tool_map)
    assert twins or again == behind, "another trailer after writing it"
    return "read"


def _is_sealed(data: bytes) -> bool:
    enough = len(data) >= HEADER_BYTES + SEAL_BYTES
    return enough and data[-SEAL_BYTES:].startswith(b"DS4P\x01")


def _resealed(data: bytes) -> bytes:
    """Return a file whose checksums fit, if it is long enough to have any.

    Written from the text of docs/spec/server-and-cli.md#kvc.
    """
    if not _is_sealed(data):
        return data
    body_end = HEADER_BYTES + int.from_bytes(data[48:52], "little")
    body_end += int.from_bytes(data[40:48], "little")
    tools, seal = data[body_end:-SEAL_BYTES], data[-SEAL_BYTES:-4]
    body = zlib.crc32(data[HEADER_BYTES:body_end])
    seal = seal[:12] + body.to_bytes(4, "little") + seal[16:]
    unused = data[:12] + bytes(4) + data[16:32] + bytes(8) + data[40:HEADER_BYTES]
    crc = zlib.crc32(unused + tools + seal)
    return data[:-SEAL_BYTES] + seal + crc.to_bytes(4, "little")


SAVED: Final[Sequence[type[Target]]] = (Snapshots, Plain, CacheFiles)
