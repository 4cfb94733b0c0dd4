"""Every kernel of the CPU beside torch, and the verdicts that later processes read.

Owns: the list of what is compared, the file of verdicts. Refuses to know: how a kernel is compared,
terminals. Invariant: a verdict is only read back on the processor, with the versions and the
kernels' sources that it was given for; a file that cannot be read or written only costs time.
"""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch

from ds4py import __version__
from ds4py.config import cache_folder
from ds4py.kernels.cpu import compare, jit
from ds4py.kernels.cpu.attention import CACHE_TYPES, AttentionHeads
from ds4py.kernels.cpu.blocks import LAYOUTS
from ds4py.kernels.cpu.trust import TRUST, Check
from ds4py.layers import compare as steps
from ds4py.layers.block_spec import ACTIVATIONS

log = logging.getLogger(__name__)

_FILE: Final = "kernels.json"
_MOST_BYTES: Final = 1 << 20
_MOST_PROCESSORS: Final = 8
_HEADS: Final = (
    AttentionHeads(2, 4, 64, 64),
    AttentionHeads(3, 1, 80, 32),
    AttentionHeads(2, 2, 64, 64, norm_eps=1e-6, scale=0.2, window=21, soft_cap=5.0, sinks=True),
)
"""Of the attention that the self-test compares; a model's own are compared when it is loaded."""


@dataclass(frozen=True, slots=True)
class ComparedKernel:
    """One kernel's result.

    Args:
        name: Of the kernel.
        error: Largest relative RMS of the difference to torch.
        limit: What rounding explains.
        is_right: Whether it is used.
        seconds: What comparing it took, and compiling before.
    """

    name: str
    error: float
    limit: float
    is_right: bool
    seconds: float


def compare_all() -> Iterator[ComparedKernel]:
    """Compare every kernel now, whatever is remembered, and remember the verdicts."""
    memory = VerdictFile.of_this_machine()
    for name, check in _checks():
        started = time.perf_counter()
        found = check()
        memory.put(name, is_right=found.is_right)
        yield ComparedKernel(
            name, found.error, found.limit, found.is_right, time.perf_counter() - started
        )


def remember_verdicts() -> None:
    """Let this process read and write the verdicts of this machine."""
    if TRUST.memory is None:
        TRUST.memory = VerdictFile.of_this_machine()


def processor() -> str:
    """Return the processor that kernels are compiled for, as LLVM calls it."""
    return jit.processor_name()


def _checks() -> Iterator[tuple[str, Check]]:
    for form in LAYOUTS:
        yield compare.kernel_name(form), partial(compare.compare_products, form)
    yield steps.NORM, steps.compare_norm
    for activation in ACTIVATIONS:
        yield steps.gate_name(activation), partial(steps.compare_gate, activation)
    yield steps.SINKHORN, steps.compare_sinkhorn
    for heads in _HEADS:
        for dtype in CACHE_TYPES:
            name = steps.attention_name(heads, dtype)
            yield name, partial(steps.compare_attention, heads, dtype)


class VerdictFile:
    """Verdicts in a file that all processes of a user share.

    Args:
        path: The file; its folder is made when something is written.
        key: Processor, versions and sources that the verdicts are for.
    """

    def __init__(self, path: Path, key: str):
        self._path, self._key = path, key
        self._known = self._read().get(key, {})

    @classmethod
    def of_this_machine(cls) -> VerdictFile:
        """Return the file of this user, for this processor and this code."""
        return cls(cache_folder() / _FILE, _this_machine())

    def get(self, kernel: str) -> bool | None:
        """Return a verdict, None if there is none."""
        return self._known.get(kernel)

    def put(self, kernel: str, *, is_right: bool) -> None:
        """Remember a verdict; a file that cannot be written is left as it is."""
        self._known[kernel] = is_right
        whole = self._read()  # another process may have written meanwhile
        own = whole.pop(self._key, {}) | self._known
        latest = dict(list(whole.items())[-(_MOST_PROCESSORS - 1) :]) | {self._key: own}
        fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(latest, indent=1), encoding="utf-8")
            fresh.replace(self._path)
        except OSError as e:
            log.debug("verdicts about kernels are not kept: %s", e)

    def _read(self) -> dict[str, dict[str, bool]]:
        """Return what the file holds; nothing if it is none of ours."""
        try:
            if self._path.stat().st_size > _MOST_BYTES:
                return {}
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {
            key: {name: known for name, known in own.items() if isinstance(known, bool)}
            for key, own in found.items()
            if isinstance(own, dict)
        }


def _this_machine() -> str:
    """Return what a verdict depends on: processor, compiler, reference, and the kernels' code."""
    root, checksum = Path(__file__).parents[1], 0
    for folder in ("quant", "kernels", "layers"):
        for path in sorted((root / folder).rglob("*.py")):
            checksum = zlib.crc32(path.read_bytes(), checksum)
    return (
        f"{processor()}, {jit.compiler()}, ds4py {__version__} {checksum:08x}, "
        f"torch {torch.__version__}"
    )
