"""Processes that are timed: whole models, routes of workers, llama.cpp.

Owns: starting, pinning and ending them, and taking turns. Refuses to know: bars, tables. Invariant:
every process that was started is gone when its context ends, and computes with one thread on one
core.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]  # the package has no annotations

from ds4py.config import (
    Address,
    CoordinatorConfig,
    EngineConfig,
    PrefillTuning,
    RouteEntry,
    SocketConfig,
)
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.session_pool import SessionPool
from ds4py.engine.open import read_model
from ds4py.errors import ClusterError
from ds4py.layer_range import LayerRange
from ds4py.tracing.events import Shares, TraceRecorder, stage_shares
from tools.benchmarks.timers import TimedJob, timed_job

_ROOT: Final = Path(__file__).parents[2]
LOOPBACK: Final = "127.0.0.1"
_READY_SECONDS: Final = 300.0
_END_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class TimedProcess:
    """Something that can be timed.

    Args:
        name: As it stands in a report.
        run: Does a job and returns its seconds.
    """

    name: str
    run: Callable[[TimedJob], float]


Rates = dict[str, dict[TimedJob, list[float]]]
"""Tokens per second of each round, by subject and job."""


def take_turns(
    subjects: Sequence[TimedProcess],
    jobs: Sequence[TimedJob],
    rounds: int,
    step: Callable[[str], None],
) -> Rates:
    """Do every job with every subject once a round.

    Subjects change their order from round to round, so that being first favours nobody, and a job's
    subjects follow each other closely.

    Args:
        subjects: All started; anyone who is not at work is idle.
        jobs: Done once before, untimed, for first-use costs.
        rounds: At least 1.
        step: Told what comes next.
    """
    rates: Rates = {subject.name: {job: [] for job in jobs} for subject in subjects}
    for turn in range(rounds + 1):
        for job in jobs:
            for subject in subjects if turn % 2 else reversed(subjects):
                step(f"{subject.name}: {job}")
                warm_up = TimedJob(job.what, min(job.n, 64))
                seconds = subject.run(job if turn else warm_up)
                if turn:
                    rates[subject.name][job].append(job.n / seconds)
    return rates


def told_rates(rates: Rates, job: TimedJob) -> str:
    """Return the median rate of every subject as text."""
    medians = {name: statistics.median(by_job[job]) for name, by_job in rates.items()}
    return ", ".join(f"{name} {median:.3g} t/s" for name, median in medians.items())


# --- processes ------------------------------------------------------------------------------------


@cache
def available_cores() -> list[int]:
    """Return the cores that this process could use at its start."""
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):
        return list(process.cpu_affinity())
    return list(range(psutil.cpu_count() or 1))


def _pin(pid: int, core: int) -> None:
    """Keep a process that has just been started on one core, if the system can do that."""
    process, cores = psutil.Process(pid), available_cores()
    if hasattr(process, "cpu_affinity"):
        process.cpu_affinity([cores[core % len(cores)]])


@contextmanager
def pinned_here(core: int) -> Iterator[None]:
    """Keep this thread, and threads that it starts meanwhile, on one core if the system can."""
    cores, process = available_cores(), psutil.Process()
    if not hasattr(process, "cpu_affinity"):
        yield
        return
    process.cpu_affinity([cores[core % len(cores)]])
    try:
        yield
    finally:
        process.cpu_affinity(cores)


@dataclass(frozen=True, slots=True)
class Running:
    """A process that was started.

    Args:
        name: For errors.
        process: With pipes for stdin and stdout.
        log: Where its stderr goes.
    """

    name: str
    process: subprocess.Popen[str]
    log: Path

    def ask(self, question: str) -> str:
        """Write a line and return the line that comes back; an empty question only reads."""
        pipes = self.process
        assert pipes.stdin is not None
        assert pipes.stdout is not None
        try:
            if question:
                pipes.stdin.write(f"{question}\n")
                pipes.stdin.flush()
            answer = pipes.stdout.readline().strip()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise self.failed("gave no answer")
        return answer

    def wait_log(self, words: str) -> str:
        """Wait for a line on stderr and return what follows the words in it."""
        deadline = time.monotonic() + _READY_SECONDS
        while words not in (text := self.log.read_text(errors="replace")):
            if self.process.poll() is not None:
                raise self.failed("ended at once")
            if time.monotonic() > deadline:
                raise self.failed(f"said no {words!r} in {_READY_SECONDS:g} s")
            time.sleep(_PAUSE_SECONDS)
        return text.partition(words)[2].partition("\n")[0]

    def failed(self, what: str) -> ClusterError:
        """Return an error with the last thing that the process said."""
        lines = self.log.read_text(errors="replace").splitlines() or ["(nothing on stderr)"]
        return ClusterError(f"{self.name}: {what}; it said: {lines[-1]}")


@contextmanager
def running(name: str, command: Sequence[object], core: int | None) -> Iterator[Running]:
    """Run a program while the context lasts.

    Args:
        name: For errors.
        command: Program and arguments.
        core: The how-manieth of the available cores, modulo their number; None does not pin.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stderr"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=_environment(),
            )
        try:
            if core is not None:
                _pin(process.pid, core)
            yield Running(name, process, log)
        finally:
            _end(process)


def _environment() -> dict[str, str]:
    """Let children find these modules, from whatever folder the measurement is started."""
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), known)))}


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


@contextmanager
def child(name: str, command: Sequence[object], core: int | None = 0) -> Iterator[TimedProcess]:
    """Run a program that says "ready" and then answers each line of a job with seconds."""
    with running(name, command, core) as process:
        if process.ask("") != "ready":
            raise process.failed("is not ready")
        yield TimedProcess(name, lambda job: float(process.ask(str(job))))


def whole_model(model: Path, *, n_ctx: int, chunk: int = 0) -> list[object]:
    """Return the command of a process that owns every layer of a model; 0: the default chunk."""
    return [sys.executable, "-m", "tools.benchmarks.child", model, n_ctx, chunk]


def installed(program: str) -> Path:
    """Return the path of a program of this package, beside the interpreter that runs it."""
    return Path(sys.executable).with_name(program)


# --- routes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A worker that is ready.

    Args:
        running: Its process.
        port: Its data port, on this machine.
        seconds: From starting it until it was ready.
    """

    running: Running
    port: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How workers are started.

    Args:
        n_ctx: Tokens of a session.
        n_sessions: Sessions that they hold at once.
        batching: Whether single tokens of different sessions run together.
    """

    n_ctx: int
    n_sessions: int = 1
    batching: bool = True

    @property
    def prefix(self) -> list[object]:
        """What stands before the command."""
        return [] if self.batching else ["env", "DS4_DIST_DISABLE_BATCHING=1"]

    @property
    def flags(self) -> list[object]:
        """What stands behind it."""
        return ["-t", 1, "-c", self.n_ctx, "--sessions", self.n_sessions]


@contextmanager
def worker(
    model: Path, layers: LayerRange, settings: WorkerSettings, *, core: int | None = None
) -> Iterator[WorkerProcess]:
    """Start a worker with one thread and wait until it is ready."""
    command = [*settings.prefix, installed("ds4py-server"), "--dist-role", "worker", "-m", model]
    command += ["--dist-listen", f"{LOOPBACK}:0"]
    command += ["--dist-layers", f"{layers.start}-{layers.end}", *settings.flags]
    start = time.perf_counter()
    with running(f"worker for layers {layers}", command, core) as process:
        address = process.wait_log("ready: worker on ")
        seconds = time.perf_counter() - start
        yield WorkerProcess(process, Address.parse(address).port, seconds)


@dataclass(frozen=True, slots=True)
class RouteUnderTest:
    """A coordinator without layers in this process, and its workers in others.

    Args:
        backend: Sessions over the route.
        recorder: What its stages do.
        workers: In layer order.
        shares: What the stages did with the time of the last job of each kind, by stage name.
    """

    backend: SessionPool
    recorder: TraceRecorder
    workers: tuple[WorkerProcess, ...]
    shares: dict[TimedJob, dict[str, Shares]] = field(default_factory=dict)

    def subject(self, name: str) -> TimedProcess:
        """Return the route as something to time."""
        return TimedProcess(name, self._run)

    def _run(self, job: TimedJob) -> float:
        self.recorder.take()
        seconds = timed_job(self.backend, job)
        self.shares[job] = stage_shares(self.recorder.take())
        return seconds


@contextmanager
def route(
    model: Path, ranges: Sequence[LayerRange], settings: WorkerSettings, *, chunk: int
) -> Iterator[RouteUnderTest]:
    """Start a worker for each span, the i-th on core i, and a coordinator that drives them."""
    card, n_ctx = read_model(EngineConfig(model=model, n_ctx=settings.n_ctx))
    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker(model, layers, settings, core=core))
            for core, layers in enumerate(ranges)
        ]
        config = CoordinatorConfig(
            route=tuple(RouteEntry(Address(LOOPBACK, w.port)) for w in workers),
            prefill=PrefillTuning(chunk=chunk),
            n_sessions=settings.n_sessions,
        )
        recorder = TraceRecorder()
        coordinator = Coordinator(card, n_ctx, config, SocketConfig(), trace=recorder)
        backend = stack.enter_context(ready(coordinator))
        yield RouteUnderTest(backend, recorder, tuple(workers))


@contextmanager
def ready(coordinator: Coordinator) -> Iterator[SessionPool]:
    """Start a coordinator whose workers are there; closed at the end.

    Raises:
        ClusterError: They were not reached in time.
    """
    with closing(coordinator):
        coordinator.start()
        deadline = time.monotonic() + _READY_SECONDS
        if not coordinator.wait_ready(lambda: time.monotonic() > deadline, lambda _: None):
            raise ClusterError(f"not reached in time: {coordinator.health().missing}")
        yield SessionPool(coordinator, coordinator.config.n_sessions)
