"""The folder of the disk cache: scanning, locking, writing, setting aside.

Owns: which files are the cache's, how one is read and written. Refuses to know: what to keep, what
may be loaded, tokens. Invariant: a name that ends in `.kv` is a whole file from the moment it
exists, whichever process dies.

Several threads and several processes share a folder. What they must agree on, who gets the room
that is left, is decided under a lock of the folder, which is held while files are looked at and
removed, never while a payload is written. Readers take no lock: files change by renaming only, but
for the two fields of the header that no checksum covers.

A file in the making is locked by its writer. The lock ends with the process, even if its number is
in use again, so whatever temporary file can be locked is nobody's.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

import numpy as np

from ds4py.errors import ConfigError, SnapshotError
from ds4py.snapshot.kvc import (
    ABI_DS4,
    ABI_OWN,
    HEADER_BYTES,
    SEAL_BYTES,
    Buffer,
    Flag,
    KvcHeader,
    Reason,
    check_body,
    read_seal,
    read_trailer,
    use_patches,
)
from ds4py.snapshot.kvc_policy import Entry

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[0-9a-f]{40}\.kv")
_ASIDE: Final = re.compile(r"[0-9a-f]{40}\.kv\.damaged-\d+")
_TEMPORARY: Final = re.compile(r"\.[0-9a-f]{40}\.kv\.\d+-\w+\.part")
_LOCK: Final = ".kv.lock"
_BLOCK: Final = 8 << 20
_LOCK_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.005


@dataclass(slots=True)
class Folder:
    """What a scan found.

    Args:
        entries: Readable files by name.
        aside: Damaged files that were set aside: name -> bytes, oldest first.
        other_bytes: Of files that are left alone, and of files in the making.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    aside: dict[str, int] = field(default_factory=dict)
    other_bytes: int = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of all files that are the cache's."""
        readable = sum(entry.n_bytes for entry in self.entries.values())
        return readable + sum(self.aside.values()) + self.other_bytes


def make_folder(path: Path) -> None:
    """Make a folder that only its owner can enter; one that exists stays as it is.

    Raises:
        ConfigError: It cannot be made or used.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.listdir(path)
    except OSError as e:
        raise ConfigError(f"disk cache {path}: {e.strerror or e}; name a folder we may use") from e


def scan(path: Path, known: Mapping[str, Entry]) -> Folder:
    """Look at every file of the folder that is the cache's.

    Args:
        path: The folder.
        known: Entries of the last scan; files that did not change are not read again.

    Raises:
        OSError: The folder cannot be read.
    """
    folder, aside = Folder(), []
    with os.scandir(path) as found:
        for file in found:
            ours = any(form.fullmatch(file.name) for form in (_NAME, _ASIDE, _TEMPORARY))
            with contextlib.suppress(FileNotFoundError):  # somebody was faster
                if not ours or not stat.S_ISREG((st := file.stat(follow_symlinks=False)).st_mode):
                    continue
                if _ASIDE.fullmatch(file.name):
                    aside.append((st.st_mtime_ns, file.name, st.st_size))
                elif entry := _entry(path / file.name, st, known.get(file.name)):
                    folder.entries[file.name] = entry
                else:
                    folder.other_bytes += st.st_size
    folder.aside = {name: n_bytes for _, name, n_bytes in sorted(aside)}
    return folder


def _entry(path: Path, st: os.stat_result, known: Entry | None) -> Entry | None:
    """Return a file's entry; None for what is left alone."""
    if not _NAME.fullmatch(path.name):
        return None
    signature = st.st_ino, st.st_size, st.st_mtime_ns
    if known is not None and (known.inode, known.n_bytes, known.mtime_ns) == signature:
        return known
    try:
        with path.open("rb") as file:
            header = KvcHeader.decode(file.read(HEADER_BYTES))
            file.seek(max(0, st.st_size - SEAL_BYTES))
            seal = read_seal(file.read(SEAL_BYTES))
    except (OSError, SnapshotError):
        return None
    return Entry(path.name, *signature, header, seal) if _is_cache_file(header) else None


def _is_cache_file(header: KvcHeader) -> bool:
    """Whether a server wrote a file; chats that somebody saved on purpose are left alone."""
    plain = header.flags < Flag.TITLE
    return plain and header.abi in {ABI_DS4, ABI_OWN} and header.reason <= Reason.SHUTDOWN


def misfit(entry: Entry) -> str:
    """Return what is wrong with a file's length; empty if it can be right."""
    header = entry.header
    behind = entry.n_bytes - header.trailer_at - (SEAL_BYTES if entry.seal else 0)
    if behind < 0:
        return f"{entry.n_bytes} bytes, expected at least {entry.n_bytes - behind}"
    if entry.seal is None and header.abi != ABI_DS4:
        return "no seal at its end"
    return "" if header.key_bytes and header.n_tokens else "no text or no tokens"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, against other threads and other processes.

    Raises:
        TimeoutError: Somebody else holds it, for longer than looking at files takes.
        OSError: The folder cannot be written.
        ConfigError: This system has no file locks.
    """
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{_LOCK} is held by another process")
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        import fcntl  # noqa: PLC0415 - not there on every system
    except ImportError as e:
        raise ConfigError("disk cache: this system has no file locks; go without") from e
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files whose writers are gone; hold the folder's lock.

    Raises:
        OSError: The folder cannot be read.
    """
    for name in filter(_TEMPORARY.fullmatch, os.listdir(folder)):
        with contextlib.suppress(OSError), (folder / name).open("r+b") as file:
            if _try_lock(file.fileno()):
                (folder / name).unlink()
                log.info("%s: removed, its writer is gone", folder / name)


class PartFile:
    """A file in the making: complete and under its name after `write`, else gone.

    Args:
        path: The name that it will have. Hold the folder's lock: from here on the room is taken.
        n_bytes: Size that it will have.

    Raises:
        OSError: There is no room for it.
    """

    def __init__(self, path: Path, n_bytes: int):
        self._path = path
        descriptor, name = tempfile.mkstemp(".part", f".{path.name}.{os.getpid()}-", path.parent)
        self._temporary = Path(name)
        self._file = os.fdopen(descriptor, "wb")
        try:
            _try_lock(descriptor)
            os.ftruncate(descriptor, n_bytes)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, pieces: Iterable[Buffer]) -> None:
        """Write everything, make it last, and put it in the place of what has the name.

        Raises:
            OSError: The disk is full or broken; what had the name is unchanged.
        """
        for piece in pieces:
            self._file.write(piece)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._temporary.replace(self._path)
        descriptor = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Remove what was not finished; idempotent."""
        self._temporary.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # bytes that were not flushed for lack of room
            self._file.close()


def read_body(path: Path, entry: Entry, key: bytes) -> tuple[memoryview, dict[bytes, bytes]]:
    """Return a file's payload and tool map after every check.

    Args:
        path: The file.
        entry: What the last scan saw of it; its lengths fit.
        key: The key text that it must have.

    Raises:
        FileNotFoundError: It is another file by now, or none.
        OSError: It cannot be read.
        SnapshotError: It is damaged.
    """
    with path.open("rb") as file:
        raw = _same_header(file, entry)
        if file.read(len(key)) != key:
            raise SnapshotError("its key text is not what its name stands for")
        payload = np.empty(entry.header.payload_bytes, np.uint8).data
        file.readinto(payload)
        trailer = read_trailer(raw, file.read(entry.n_bytes - entry.header.trailer_at))
    if trailer.seal != entry.seal:  # whole, but somebody else's, in a number that was free again
        raise FileNotFoundError(errno.ENOENT, "was replaced")
    if trailer.seal is not None:
        check_body(trailer.seal, key, payload)
    return payload, trailer.tool_map


def read_tool_map(path: Path, entry: Entry) -> dict[bytes, bytes]:
    """Return a file's tool map without reading its payload; raises as `read_body`."""
    with path.open("rb") as file:
        raw = _same_header(file, entry)
        file.seek(entry.header.trailer_at)
        trailer = file.read(entry.n_bytes - entry.header.trailer_at)
    return read_trailer(raw, trailer).tool_map


def _same_header(file: BinaryIO, entry: Entry) -> bytes:
    """Return the header of a file that is still the one that was scanned."""
    st = os.fstat(file.fileno())
    if (st.st_ino, st.st_size) != (entry.inode, entry.n_bytes):
        raise FileNotFoundError(errno.ENOENT, "was replaced")
    raw = file.read(HEADER_BYTES)
    now, seen = KvcHeader.decode(raw), entry.header
    if (now.key_bytes, now.payload_bytes) != (seen.key_bytes, seen.payload_bytes):
        raise SnapshotError("its header changed in place")
    return raw


def copied(path: Path, start: int, end: int) -> Iterator[bytes]:
    """Read a part of a file block by block.

    Raises:
        OSError: It cannot be read, or ends early.
    """
    with path.open("rb") as file:
        file.seek(start)
        while start < end:
            block = file.read(min(_BLOCK, end - start))
            if not block:
                raise OSError(errno.EIO, f"{path} ends early")
            start += len(block)
            yield block


def count_use(path: Path, hits: int, now: float) -> None:
    """Write hit count and time of last use in place; a file that we can only read stays as is."""
    with contextlib.suppress(OSError), path.open("r+b") as file:
        for at, patch in use_patches(hits, int(now)):
            file.seek(at)
            file.write(patch)


def set_aside(path: Path) -> Path:
    """Rename a damaged file to a name that is free.

    Raises:
        OSError: It is gone, or the folder cannot be changed.
    """
    n = 1
    while (aside := path.with_name(f"{path.name}.damaged-{n}")).exists():
        n += 1
    return path.rename(aside)
