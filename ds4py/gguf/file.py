"""A model on disk: one GGUF file, or the shards of a split one, mapped read-only.

Owns: opening, mapping, which shard holds what, the bytes of a tensor. Refuses to know: what a
tensor is for, how it is decoded. Invariant: opening touches the front of each present shard only,
and every tensor of the directory lies wholly inside its file, or opening fails.

A file that is cut short while it is mapped is the one thing that cannot be caught: the operating
system then ends the process on access (SIGBUS).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final

from ds4py.errors import GgufError, UnsupportedQuantError
from ds4py.gguf import foreign, kinds
from ds4py.gguf.metadata import Metadata
from ds4py.gguf.parse import ParsedGguf, TensorInfo, parse_gguf, shown

MAX_SHARDS: Final = 1024
_SHARD_NAME: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Shard:
    path: Path
    map: mmap.mmap
    view: memoryview
    parsed: ParsedGguf


class GgufFile:
    """A model that is open for reading; a context manager.

    Make it with `GgufFile.open`. Reading is safe from several threads; `close` is not, while
    another thread reads.

    Attributes:
        path: The file that was given.
        n_shards: Files of the whole model, present or not.
        missing_shards: Names of the shards that are not there, in order.
        metadata: From the first shard; from the given one while the first is missing.
        tensors: Every tensor of the present shards, by name, in file order.
    """

    def __init__(self, path: Path, shards: Mapping[int, _Shard], missing: tuple[str, ...]):
        self.path = path
        self.n_shards = len(shards) + len(missing)
        self.missing_shards = missing
        self._shards = shards
        self._closed = False
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            _directory(shards, complete=not missing)
        )
        first = shards.get(0) or next(s for s in shards.values() if s.path == path)
        note = "" if 0 in shards else f" (the first shard, {missing[0]}, is missing)"
        self.metadata = Metadata(first.parsed.metadata, note)
        self.version = first.parsed.version

    @classmethod
    def open(cls, path: Path | str) -> GgufFile:
        """Map a file, or all shards that lie beside the given one.

        Raises:
            GgufError: Cannot be read, is no GGUF file, is damaged or cut off, or the shards do
                not belong together; the sentence names the file and what to do.
        """
        path = Path(path)
        given = _open_shard(path)
        opened = [given]
        try:
            number, names = _shard_names(given)
            shards = {number: given}
            for other, name in enumerate(names):
                sibling = path.with_name(name)
                if other != number and os.path.exists(sibling):
                    opened.append(_open_shard(sibling))
                    _check_number(opened[-1], other, len(names))
                    shards[other] = opened[-1]
            missing = tuple(name for k, name in enumerate(names) if k not in shards)
            return cls(path, dict(sorted(shards.items())), missing)
        except BaseException:
            _close(opened)
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap; idempotent. Views from `raw` stay valid: the map goes with the last of them."""
        if not self._closed:
            self._closed = True
            _close(self._shards.values())

    @property
    def n_bytes(self) -> int:
        """Size of all present shards."""
        return sum(len(shard.map) for shard in self._shards.values())

    def info(self, name: str) -> TensorInfo:
        """Return a tensor's directory entry.

        Raises:
            GgufError: It is not there; names every missing shard, in which it may lie.
        """
        self.require([name], can_decode=lambda _: True)
        return self.tensors[name]

    def raw(self, name: str) -> memoryview:
        """Return a tensor's packed bytes: `u8[n_bytes]`, read-only, not copied from the map.

        Raises:
            GgufError: It is not there, or the file is closed.
            UnsupportedQuantError: Its type is unknown.
        """
        self.require([name])
        if self._closed:
            raise GgufError(f"tensor {shown(name)} was asked for after closing", path=self.path)
        info = self.tensors[name]
        return self._shards[info.shard].view[info.offset : info.offset + info.n_bytes]

    def require(
        self, names: Iterable[str], *, can_decode: Callable[[int], bool] = kinds.is_known
    ) -> None:
        """Check all tensors of a slice before any of them is loaded.

        Args:
            names: The tensors; types of others do not matter, nor do the shards of others.
            can_decode: Tells whether a tensor type id is usable.

        Raises:
            GgufError: Some are not there; names them all, and all missing shards.
            UnsupportedQuantError: Some have a type that cannot be decoded; names them all.
        """
        names = list(names)
        absent = [name for name in names if name not in self.tensors]
        found = [self.tensors[name] for name in names if name in self.tensors]
        undecodable = [info for info in found if not can_decode(info.type_id)]
        problems = [self._describe_absent(absent)] if absent else []
        if undecodable:
            problems.append(_describe_undecodable(undecodable))
        if problems:
            error = GgufError if absent else UnsupportedQuantError
            raise error("; ".join(problems), path=self.path)

    def release(self, name: str) -> None:
        """Give a tensor's pages back, so that resident memory follows what is still needed.

        The bytes stay readable; a later access reads them from the file again. Does nothing where
        the system has no such call.
        """
        info = self.info(name)
        if not self._closed:
            _release(self._shards[info.shard].map, info.offset, info.offset + info.n_bytes)

    def _describe_absent(self, names: list[str]) -> str:
        tensors = ", ".join(map(shown, names))
        if not self.missing_shards:
            return f"the file has no tensor {tensors}; it is damaged or of another architecture"
        return (
            f"needs the missing shards {', '.join(self.missing_shards)}; download them into the "
            f"same folder (not in the other shards: {tensors})"
        )


def _describe_undecodable(infos: list[TensorInfo]) -> str:
    tensors = ", ".join(f"{shown(info.name)} ({info.type_name})" for info in infos)
    return (
        f"tensors of a type that cannot be decoded: {tensors}; "
        "convert the model to another quantization, or choose other layers"
    )


def _open_shard(path: Path) -> _Shard:
    mapped = _map(path)
    view = memoryview(mapped)
    try:
        parsed = parse_gguf(view)
    except GgufError as error:
        raise GgufError(error.what, path=path, offset=error.offset) from None
    # All values were copied out; a vocabulary's pages need not stay in memory.
    _release(mapped, 0, min(parsed.data_offset, len(mapped)))
    return _Shard(path, mapped, view, parsed)


def _map(path: Path) -> mmap.mmap:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise GgufError("it is a folder, expected a .gguf file; name a file in it", path=path)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe could wait for ever
            raise GgufError("it is not a regular file, expected a .gguf file", path=path)
        with path.open("rb") as stream:
            if os.fstat(stream.fileno()).st_size == 0:  # cannot be mapped
                raise GgufError(foreign.describe(b""), path=path)
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise GgufError("there is no such file; check the path", path=path) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise GgufError(f"cannot be read: {reason}; check the file", path=path) from error
    except ValueError as error:  # a NUL or a lone surrogate inside the path
        raise GgufError(f"cannot be a path: {error}", path=ascii(str(path))) from error


def _release(mapped: mmap.mmap, start: int, end: int) -> None:
    if hasattr(mmap, "MADV_DONTNEED") and start < end:
        # Outward to whole pages: a neighbour's page that goes too comes back on its next access.
        page = start - start % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, page, end - page)


def _close(shards: Iterable[_Shard]) -> None:
    for shard in shards:
        shard.view.release()
        with contextlib.suppress(BufferError):  # views are out; the last one unmaps
            shard.map.close()


def _shard_names(given: _Shard) -> tuple[int, list[str]]:
    """Return the number of the given file, 0-based, and the file names of all shards."""
    count = Metadata(given.parsed.metadata).get_int("split.count", 1)
    if count <= 1:
        return 0, [given.path.name]
    match = _SHARD_NAME.fullmatch(given.path.name)
    if match is None or int(match[3]) != count or count > MAX_SHARDS:
        raise GgufError(
            f"it is one of {count} shards (expected at most {MAX_SHARDS}), but its name does not "
            f"end in -NNNNN-of-{count:05d}.gguf; give all shards their original names back",
            path=given.path,
        )
    number = int(match[2]) - 1
    _check_number(given, number, count)
    return number, [f"{match[1]}-{k + 1:05d}-of-{count:05d}.gguf" for k in range(count)]


def _check_number(shard: _Shard, number: int, count: int) -> None:
    keys = Metadata(shard.parsed.metadata)
    found, found_count = keys.get_int("split.no", -1), keys.get_int("split.count", 1)
    if (found, found_count) != (number, count):
        raise GgufError(
            f"inside it is shard {found + 1} of {found_count}, by its name {number + 1} of {count};"
            " it was renamed, or shards of different models are mixed",
            path=shard.path,
        )


def _directory(shards: Mapping[int, _Shard], *, complete: bool) -> dict[str, TensorInfo]:
    """Merge the directories and check them against the number of tensors that shards claim."""
    tensors: dict[str, TensorInfo] = {}
    for number, shard in shards.items():
        for info in shard.parsed.tensors:
            if info.name in tensors:
                other = shards[tensors[info.name].shard].path.name
                raise GgufError(f"tensor {shown(info.name)} is in {other} too", path=shard.path)
            tensors[info.name] = info if number == 0 else replace(info, shard=number)
    for shard in shards.values():
        claimed = Metadata(shard.parsed.metadata).get_int("split.tensors.count", None)
        if claimed is not None and (
            len(tensors) > claimed or (complete and len(tensors) != claimed)
        ):
            raise GgufError(
                f"the shards hold {len(tensors)} tensors, expected {claimed}; "
                "shards of different models are mixed",
                path=shard.path,
            )
    return tensors
