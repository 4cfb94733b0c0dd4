"""Read golden data, and nothing that differs from what the manifest lists.

Owns: `tests/golden/` and its `MANIFEST.json`. Invariant: a file that is missing, unlisted or
changed fails the test that asks for it; nothing is skipped, and no test writes into that folder.

Most recordings lie in `.tar.xz` archives. They are unpacked once into `build/golden`, in a folder
that carries the archive's hash. `fuzz/` holds inputs of our own that once failed; they are no
recordings and not listed.
"""

import functools
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).parents[1] / "golden"
UNPACKED = Path(__file__).parents[2] / "build" / "golden"


@functools.cache
def manifest() -> dict[str, dict[str, Any]]:
    """Return the listed files: name -> sha256, bytes, producer, meaning."""
    files: dict[str, dict[str, Any]] = json.loads((ROOT / "MANIFEST.json").read_text())["files"]
    return files


@functools.cache
def path(name: str) -> Path:
    """Return the file's path after checking its size and hash, once per process.

    Args:
        name: Name relative to `tests/golden/`, with forward slashes.
    """
    entry = manifest().get(name)
    assert entry is not None, f"{name} is not listed in tests/golden/MANIFEST.json"
    file = (unpacked(entry["archive"]) if "archive" in entry else ROOT) / name
    assert file.is_file(), f"{file} is missing: restore it from the repository"
    content = file.read_bytes()
    got = (len(content), hashlib.sha256(content).hexdigest())
    assert got == (entry["bytes"], entry["sha256"]), f"{file} differs from the manifest: {got}"
    return file


@functools.cache
def unpacked(archive: str) -> Path:
    """Return the folder that holds an archive's files; several processes may ask at once."""
    source = path(archive)
    target = UNPACKED / manifest()[archive]["sha256"][:16]
    if target.is_dir():
        return target
    UNPACKED.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=UNPACKED))
    with tarfile.open(source) as files:
        files.extractall(fresh, filter="data")
    try:
        os.rename(fresh, target)
    except OSError:  # another process was first
        shutil.rmtree(fresh)
    return target


def load_bytes(name: str) -> bytes:
    """Return a file's bytes."""
    return path(name).read_bytes()


def load_json(name: str) -> Any:
    """Return a JSON file's value."""
    return json.loads(path(name).read_text(encoding="utf-8"))


def load_npz(name: str) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an `.npz` file (never pickled objects)."""
    with np.load(path(name), allow_pickle=False) as archive:
        return dict(archive)
