"""What it takes to get going: time until ready, and memory. The section `start`.

Owns: which programs, files and slices stand for the bars, what a worker's memory is compared with.
Refuses to know: how verdicts are shown. Invariant: slices are read from the disk and not from the
system's file cache, or nothing is judged.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]  # the package has no annotations

from ds4py.gguf.file import GgufFile
from ds4py.gguf.summary import summarize
from ds4py.layer_range import LayerRange, balanced_cuts
from ds4py.text.tokenizer.tokenizer import load_tokenizer
from ds4py.tracing.events import COORDINATOR
from tools.benchmarks import targets
from tools.benchmarks.processes import RouteUnderTest, WorkerSettings, installed, route, worker
from tools.benchmarks.sections import GEMMA3, LLAMA_1B_Q4_K, Bench
from tools.benchmarks.targets import Finding, found, not_run
from tools.benchmarks.timers import TimedJob, timed_job

PROGRAMS: Final = ("ds4py", "ds4py-bench", "ds4py-cli", "ds4py-server")
MEMORY_CONSTANT: Final = 450_000_000
"""Bytes that a worker may take besides weights and cache: interpreter, torch and LLVM take some
330 MB, temporary memory of a chunk and the copies of what is on the wire the rest."""

_N_CTX: Final = 1024
_WORKERS: Final = WorkerSettings(n_ctx=_N_CTX)
_CHUNK: Final = 256
_PIECE: Final = 4 << 20
_KV_VALUE_BYTES: Final = 2


def measure(bench: Bench) -> Iterator[Finding]:
    """Yield the bars of starting."""
    yield _help(bench)
    yield _open(bench)
    why = bench.missing(LLAMA_1B_Q4_K)
    if why:
        yield from (not_run(target, why) for target in (targets.READY, targets.MEMORY))
    else:
        yield _ready(bench)
        yield _memory(bench)


def best(rounds: int, step: Callable[[], object]) -> float:
    """Return the fewest seconds of some calls: others on the machine only ever add to them."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _help(bench: Bench) -> Finding:
    def ask(program: str) -> None:
        command = [str(installed(program)), "--help"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)

    seconds = {}
    for program in PROGRAMS:
        bench.step(f"{program} --help")
        seconds[program] = best(bench.rounds, partial(ask, program))
    detail = ", ".join(f"{program} {value:.3f} s" for program, value in seconds.items())
    return found(targets.HELP, max(seconds.values()), cores=bench.cores, detail=detail)


def _open(bench: Bench) -> Finding:
    if why := bench.missing(GEMMA3):
        return not_run(targets.OPEN, why)
    bench.step(f"opening {GEMMA3}")

    def directory() -> None:
        GgufFile.open(bench.model(GEMMA3)).close()

    def tokenizer() -> None:
        with GgufFile.open(bench.model(GEMMA3)) as file:
            load_tokenizer(file.metadata)

    whole, part = best(bench.rounds, tokenizer), best(bench.rounds, directory)
    detail = f"metadata and directory {part:.2f} s, with the tokenizer {whole:.2f} s"
    return found(targets.OPEN, whole, cores=bench.cores, detail=detail)


# --- ready ----------------------------------------------------------------------------------------


def _ready(bench: Bench) -> Finding:
    """Compare what more layers add to a worker's start with reading their bytes once."""
    model = bench.model(LLAMA_1B_Q4_K)
    with GgufFile.open(model) as file:
        n_layers = summarize(file).n_layers
    one, many = (LayerRange(1, last, has_output=False) for last in (1, n_layers - 2))
    more = tensor_places(model, range(2, n_layers - 1))
    n_bytes = sum(size for _, size in more)

    def start(layers: LayerRange) -> float:
        bench.step(f"starting a worker of layers {layers}")
        forget_cached(model)
        with worker(model, layers, _WORKERS, core=0) as started:
            return started.seconds

    def read() -> float:
        forget_cached(model)
        return best(1, lambda: read_once(model, more))

    turns = [(start(many), start(one), read()) for _ in range(bench.rounds)]
    long, short, reading = (min(column) for column in zip(*turns, strict=True))
    detail = (
        f"{long - short:.2f} s for {n_bytes / 1e6:.0f} MB more, read in {reading:.2f} s; "
        f"a worker of one layer is ready after {short:.2f} s"
    )
    finding = found(targets.READY, (long - short) / reading, cores=bench.cores, detail=detail)
    if hasattr(os, "posix_fadvise"):
        return finding
    return replace(finding, obstacle="this system does not let files be forgotten")


def tensor_places(model: Path, layers: range) -> list[tuple[int, int]]:
    """Return offset and size of every tensor of some layers, in the order of the file."""
    names = tuple(f"blk.{layer}." for layer in layers)
    with GgufFile.open(model) as file:
        tensors = [info for name, info in file.tensors.items() if name.startswith(names)]
    return sorted((info.offset, info.n_bytes) for info in tensors)


def forget_cached(path: Path) -> None:
    """Drop a file from the system's cache, if the system can."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_once(path: Path, places: Sequence[tuple[int, int]]) -> None:
    """Read some stretches of a file into a small buffer."""
    buffer = memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        for offset, size in places:
            file.seek(offset)
            left = size
            while left:
                count = file.readinto(buffer[: min(left, _PIECE)])
                if not count:
                    raise EOFError(f"{path} ends {left} bytes too early")
                left -= count


# --- memory ---------------------------------------------------------------------------------------


def _memory(bench: Bench) -> Finding:
    """Fill the cache of two workers and compare what they hold with what they must hold."""
    model = bench.model(LLAMA_1B_Q4_K)
    with GgufFile.open(model) as file:
        ranges = balanced_cuts([1] * summarize(file).n_layers, 2)
        kv = [kv_bytes(file, layers, _N_CTX) for layers in ranges]
    bench.step("filling the caches of two workers")
    with route(model, ranges, _WORKERS, chunk=_CHUNK) as under_test:
        timed_job(under_test.backend, TimedJob("prefill", _N_CTX))
        packed, held = _weights(under_test), _resident(under_test)
    ratios = [h / (w + k + MEMORY_CONSTANT) for h, w, k in zip(held, packed, kv, strict=True)]
    worst = ratios.index(max(ratios))
    detail = (
        f"layers {ranges[worst]}: {held[worst] / 1e6:.0f} MB held; weights "
        f"{packed[worst] / 1e6:.0f} + KV {kv[worst] / 1e6:.0f} + {MEMORY_CONSTANT / 1e6:.0f} MB"
    )
    return found(targets.MEMORY, ratios[worst], cores=bench.cores, detail=detail)


def _weights(under_test: RouteUnderTest) -> list[int]:
    """Return the packed bytes of every worker, as it tells them."""
    stages = under_test.backend.health().stages
    return [stage.weight_bytes or 0 for stage in stages if stage.name != COORDINATOR]


def _resident(under_test: RouteUnderTest) -> list[int]:
    pids = [started.running.process.pid for started in under_test.workers]
    return [psutil.Process(pid).memory_info().rss for pid in pids]


def kv_bytes(file: GgufFile, layers: LayerRange, n_tokens: int) -> int:
    """Return the bytes of keys and values of a llama's layers, two bytes a value."""
    number = file.metadata.require_int
    d_head = number("llama.embedding_length") // number("llama.attention.head_count")
    row = number("llama.attention.head_count_kv") * d_head
    return 2 * len(layers) * n_tokens * row * _KV_VALUE_BYTES
