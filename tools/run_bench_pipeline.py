"""The benchmark behind ./tools/bench_pipeline.

All subjects are started first and idle while another is measured; each round measures every subject
once, so that a slow minute of the machine hits all of them. Figures are medians over the rounds,
ratios are medians of the ratios inside each round. The last line is one JSON object.

Ratios are to one process that takes its prompt whole, as it does by default; pipeline efficiency is
against one process that takes the same chunks, so that it tells of the pipeline alone.

Each process computes with one thread and is pinned to one core (worker i on core i modulo the
number of cores). Prompts are random tokens; a new one each time, so nothing is cached.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ds4py.cluster.coordinator import Coordinator
from ds4py.cluster.pool import ClusterBackend
from ds4py.config import (
    Address,
    CoordinatorConfig,
    EngineConfig,
    PrefillTuning,
    RouteEntry,
    SocketConfig,
)
from ds4py.engine.open import open_runner, read_model

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PREFILLS = (512, 2048)
DECODE_TOKENS = 64
DECODE_CONTEXT = 128
READY_SECONDS = 120.0


@dataclass
class Subject:
    """Something that can be timed: `run("prefill", n)` and `run("decode", n)` give seconds."""

    name: str
    stages: int
    run: Callable[[str, int], float]
    rates: dict[str, list[float]] = field(default_factory=dict)


def random_tokens(n: int, n_vocab: int) -> list[int]:
    return [random.randrange(10, n_vocab) for _ in range(n)]


def timed(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


# --- children: one process, one core, commands on stdin, seconds on stdout ------------------------


def serve_commands(prefill: Callable[[int], float], decode: Callable[[int], float]) -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        what, n = line.split()
        print(prefill(int(n)) if what == "prefill" else decode(int(n)), flush=True)


def ds4py_child(model: Path, chunk: int) -> None:
    """Time a process that owns every layer, driven like any other route."""
    runner = open_runner(EngineConfig(model=model, n_slots=1, threads=1))
    config = CoordinatorConfig(prefill=PrefillTuning(chunk=chunk))
    coordinator = Coordinator(runner.card, runner.n_ctx, config, SocketConfig(), local=runner)
    serve_commands(*session_timers(ClusterBackend(coordinator, 1)))
    coordinator.close()


def session_timers(
    backend: ClusterBackend,
) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """Return how to time a prefill and a decode on a backend."""
    n_vocab = backend.card.n_vocab

    def prefill(n: int) -> float:
        tokens = random_tokens(n, n_vocab)
        with backend.lease(tokens) as session:
            session.rewind(0)
            return timed(lambda: session.sync(tokens))

    def decode(n: int) -> float:
        tokens = random_tokens(DECODE_CONTEXT, n_vocab)
        with backend.lease(tokens) as session:
            session.sync(tokens)
            return timed(lambda: [session.eval(token) for token in random_tokens(n, n_vocab)])

    return prefill, decode


def llama_child(model: Path) -> None:
    """Time llama.cpp through its Python package."""
    from llama_cpp import Llama

    llama = Llama(
        str(model), n_ctx=4096, n_batch=512, n_threads=1, n_threads_batch=1, verbose=False
    )

    def prefill(n: int) -> float:
        tokens = random_tokens(n, llama.n_vocab())
        llama.reset()
        return timed(lambda: llama.eval(tokens))

    def decode(n: int) -> float:
        llama.reset()
        llama.eval(random_tokens(DECODE_CONTEXT, llama.n_vocab()))
        return timed(lambda: [llama.eval([t]) for t in random_tokens(n, llama.n_vocab())])

    serve_commands(prefill, decode)


# --- subjects -------------------------------------------------------------------------------------


def pin(pid: int, core: int) -> None:
    if hasattr(psutil.Process, "cpu_affinity"):
        cores = psutil.Process().cpu_affinity()
        psutil.Process(pid).cpu_affinity([cores[core % len(cores)]])


@contextmanager
def child(name: str, kind: str, model: Path, chunk: int = 4096) -> Iterator[Subject]:
    command = [sys.executable, __file__, "--child", kind, "--chunk", str(chunk)]
    command += ["--model", str(model)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    pin(process.pid, 0)

    def run(what: str, n: int) -> float:
        process.stdin.write(f"{what} {n}\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    try:
        if process.stdout.readline().strip() != "ready":
            sys.exit(f"{name} did not start")
        yield Subject(name, 1, run)
    finally:
        process.stdin.close()
        process.wait(30)


@contextmanager
def workers(spans: list[str], options: argparse.Namespace) -> Iterator[Subject]:
    """Start workers, and a coordinator without layers in this process."""
    card, n_ctx = read_model(EngineConfig(model=options.model))
    with ExitStack() as stack:
        ports = [stack.enter_context(worker(i, s, options)) for i, s in enumerate(spans)]
        route = tuple(RouteEntry(Address("127.0.0.1", port)) for port in ports)
        tuning = PrefillTuning(chunk=options.chunk)
        config = CoordinatorConfig(route=route, prefill=tuning)
        coordinator = Coordinator(card, n_ctx, config, SocketConfig())
        stack.callback(coordinator.close)
        coordinator.start()
        deadline = time.monotonic() + READY_SECONDS
        if not coordinator.wait_ready(lambda: time.monotonic() > deadline, lambda _: None):
            sys.exit("the workers did not come up")
        prefill, decode = session_timers(ClusterBackend(coordinator, 1))
        run = lambda what, n: (prefill if what == "prefill" else decode)(n)  # noqa: E731
        yield Subject(f"{len(spans)} workers", len(spans), run)


@contextmanager
def worker(index: int, layers: str, options: argparse.Namespace) -> Iterator[int]:
    program = Path(sys.executable).parent / "ds4py-server"
    command = [str(program), "--dist-role", "worker", "--dist-listen", "127.0.0.1:0"]
    command += ["--dist-layers", layers, "-m", str(options.model), "-t", "1", "--sessions", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    pin(process.pid, index)
    try:
        for line in process.stderr:
            if "ready: worker on " in line:
                yield int(line.rsplit(":", 1)[1])
                return
        sys.exit(f"the worker for layers {layers} did not start")
    finally:
        process.terminate()
        process.wait(30)


def even_cuts(n_layers: int, n: int) -> list[str]:
    bounds = [round(i * n_layers / n) for i in range(n + 1)]
    return [f"{a}-{b - 1}" for a, b in itertools.pairwise(bounds)]


def llama_bench_rates(program: Path, model: Path) -> dict[str, list[float]]:
    """Run the llama-bench program once, with one thread."""
    sizes = ",".join(str(n) for n in PREFILLS)
    command = [str(program), "-m", str(model), "-t", "1", "-p", sizes, "-n", str(DECODE_TOKENS)]
    output = subprocess.run([*command, "-o", "json"], capture_output=True, text=True, check=True)
    rates: dict[str, list[float]] = {}
    for row in json.loads(output.stdout):
        key = f"prefill {row['n_prompt']}" if row["n_prompt"] else "decode"
        rates[key] = [row["avg_ts"]]
    return rates


def _not_timed(what: str, n: int) -> float:
    raise NotImplementedError(f"{what} {n}: llama-bench has measured already")


# --- report ---------------------------------------------------------------------------------------


def measure(subjects: list[Subject], rounds: int) -> None:
    jobs = [("prefill", n) for n in PREFILLS] + [("decode", DECODE_TOKENS)]
    console = Console(stderr=True)
    for subject in subjects:
        subject.run("prefill", 64)  # first-use costs
    for _ in track(range(rounds), "measuring", console=console, transient=True):
        for what, n in jobs:
            for subject in subjects:
                key = f"prefill {n}" if what == "prefill" else "decode"
                subject.rates.setdefault(key, []).append(n / subject.run(what, n))


def ratio(subject: Subject, base: Subject, key: str) -> float:
    ours, theirs = subject.rates[key], base.rates[key]
    if len(ours) != len(theirs):
        return statistics.median(ours) / statistics.median(theirs)
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def ideal(stages: int, chunks: int) -> float:
    """Speed-up of a full pipeline of equal stages: S*C / (C + S - 1)."""
    return stages * chunks / (chunks + stages - 1)


def report(subjects: list[Subject], options: argparse.Namespace) -> None:
    base, chunked = subjects[:2]
    keys = list(base.rates)
    table = Table("subject", *(f"{key} t/s" for key in keys), *(f"{k} vs 1" for k in keys))
    for key in keys[:-1]:
        table.add_column(f"efficiency {key.split()[1]}")
    rows = []
    for subject in subjects:
        medians = [statistics.median(subject.rates[key]) for key in keys]
        ratios = [ratio(subject, base, key) for key in keys]
        efficiency = []
        for key in keys[:-1]:
            chunks = -(-int(key.split()[1]) // options.chunk)
            efficiency.append(ratio(subject, chunked, key) / ideal(subject.stages, chunks))
        is_route = subject.stages > 1
        table.add_row(
            subject.name,
            *(f"{m:.0f}" for m in medians),
            *(f"{r:.2f}x" for r in ratios),
            *(f"{e:.0%}" if is_route else "" for e in efficiency),
        )
        rows.append(
            {
                "subject": subject.name,
                "tokens_per_second": dict(zip(keys, (round(m, 1) for m in medians), strict=True)),
                "ratio_to_one_process": dict(zip(keys, (round(r, 3) for r in ratios), strict=True)),
                "pipeline_efficiency": [round(e, 3) for e in efficiency] if is_route else None,
            }
        )
    Console(width=160).print(table)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(
        "efficiency: speed-up over one process with the same chunks, as a part of S*C/(C+S-1) for "
        f"S stages and C chunks; {cores} cores here"
    )
    facts = {
        "machine": platform.processor() or platform.machine(),
        "cores": cores,
        "model": options.model.name,
        "chunk": options.chunk,
        "rounds": options.rounds,
    }
    print(json.dumps(facts | {"results": rows}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--chunk", type=int, default=256, help="prompt tokens per chunk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's benchmark program")
    parser.add_argument("--child", choices=["ds4py", "llama"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "ds4py":
        return ds4py_child(options.model, options.chunk)
    if options.child == "llama":
        return llama_child(options.model)
    n_layers = read_model(EngineConfig(model=options.model))[0].n_layers
    with ExitStack() as stack:
        chunked = f"1 process, chunks of {options.chunk}"
        subjects = [
            stack.enter_context(child("1 process", "ds4py", options.model)),
            stack.enter_context(child(chunked, "ds4py", options.model, options.chunk)),
        ]
        subjects += [stack.enter_context(workers(even_cuts(n_layers, n), options)) for n in (2, 3)]
        if options.llama_bench is None and find_spec("llama_cpp") is not None:
            subjects.append(stack.enter_context(child("llama.cpp", "llama", options.model)))
        measure(subjects, options.rounds)
    if options.llama_bench is not None:
        rates = llama_bench_rates(options.llama_bench, options.model)
        subjects.append(Subject("llama-bench", 1, _not_timed, rates))
    report(subjects, options)
    return None


if __name__ == "__main__":
    main()
