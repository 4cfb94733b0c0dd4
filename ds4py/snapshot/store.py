"""Saved sessions as files, each with its checksum beside it.

Owns: replacing a file as a whole, the checksum, what happens to a damaged file. Refuses to know:
what a payload holds. Invariant: whatever happens and whenever, a path names a complete payload that
its checksum covers, or none; nothing is ever deleted.

The format has no room for a checksum, so it stands in a second file in the form of `sha256sum`. The
two can not be replaced in one step: while the payload changes, the second file lists the checksums
of the old and of the new payload, and either is good.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from ds4py.errors import SnapshotError

log = logging.getLogger(__name__)

MAX_BYTES: Final = 64 << 30
"""Largest payload that is read unless told otherwise; one of a million tokens has 20 GB."""

_SUFFIX: Final = ".sha256"
_BLOCK: Final = 8 << 20
_MAX_LISTED: Final = 4096
_DIGEST_CHARS: Final = 64


def write_session(path: Path, payload: Sequence[memoryview]) -> None:
    """Write a payload, or replace the one that is there; readable by its owner only.

    Args:
        path: Its folder must exist and have room for both payloads.
        payload: Bytes in pieces.

    Raises:
        SnapshotError: It could not be written; what was there is unchanged.
    """
    digest = hashlib.sha256()
    for piece in payload:
        digest.update(piece)
    sidecar, new = _sidecar(path), digest.hexdigest()
    try:
        _replace(sidecar, [_listing(path, [new, *_known(path)])])
        _replace(path, payload)
        _replace(sidecar, [_listing(path, [new])])
    except OSError as e:
        raise SnapshotError(f"can not be written: {e.strerror}", path=path) from e


def read_session(path: Path, *, max_bytes: int = MAX_BYTES) -> memoryview:
    """Read a payload and compare it with its checksum.

    A payload without a checksum, such as one of the C engine, is taken as it is. A damaged one is
    renamed, so that nobody stumbles over it again and its owner can still look at it.

    Args:
        path: The file.
        max_bytes: Largest size that is accepted.

    Raises:
        SnapshotError: The file is missing, unreadable, too large or damaged.
    """
    try:
        payload = _read_whole(path, max_bytes)
        listed = _listed(_sidecar(path))
    except OSError as e:
        raise SnapshotError(f"can not be read: {e.strerror}", path=path) from e
    if not listed:
        log.warning("%s: has no checksum beside it; damage may go unnoticed", path)
    elif (found := hashlib.sha256(payload).hexdigest()) not in listed:
        aside = _set_aside(path)
        raise SnapshotError(
            f"checksum is {found}, expected {' or '.join(listed)}; the file is damaged and was "
            f"set aside as {aside.name}: save the session again",
            path=path,
        )
    return payload


def _read_whole(path: Path, max_bytes: int) -> memoryview:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for ever
        raise SnapshotError("is no regular file, expected a saved session", path=path)
    if found.st_size > max_bytes:
        raise SnapshotError(
            f"{found.st_size} bytes, expected at most {max_bytes}: this is no session of the model",
            path=path,
        )
    payload = np.empty(found.st_size, np.uint8).data
    with path.open("rb") as file:
        return payload[: file.readinto(payload)]


def _replace(path: Path, pieces: Sequence[bytes | memoryview]) -> None:
    """Put a new file in a path's place, so that it has the old content or the new after a crash."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".session-", delete=False) as file:
        try:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + _SUFFIX)


def _listing(path: Path, digests: Sequence[str]) -> bytes:
    return "".join(f"{digest}  {path.name}\n" for digest in digests).encode()


def _listed(sidecar: Path) -> list[str]:
    """Return the checksums beside a payload; empty if there is no such file."""
    try:
        with sidecar.open("rb") as file:
            text = file.read(_MAX_LISTED)
    except FileNotFoundError:
        return []
    lines = text.decode("ascii", "replace").splitlines()
    return [line[:_DIGEST_CHARS] for line in lines if line]


def _known(path: Path) -> list[str]:
    """Return the checksums that stand for what is there; of a file without, its own."""
    listed = _listed(_sidecar(path))
    if listed or not path.exists():
        return listed
    with path.open("rb") as file:
        return [hashlib.file_digest(file, "sha256").hexdigest()]


def _set_aside(path: Path) -> Path:
    """Rename a damaged payload and its checksum to names that are free."""
    n = 1
    while (aside := path.with_name(f"{path.name}.damaged-{n}")).exists():
        n += 1
    try:
        path.rename(aside)
        _sidecar(path).rename(_sidecar(aside))
    except OSError as e:
        log.warning("%s: is damaged and could not be set aside: %s", path, e.strerror)
        return path
    log.warning("%s: is damaged and was set aside as %s", path, aside.name)
    return aside
