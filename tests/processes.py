"""Real programs for end-to-end tests: started, watched, hurt and ended by process id.

Every wait has a deadline and every program is gone when its `Launcher` is closed. Programs run with
one CPU thread each and without the caller's `DS4_*` variables.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import httpx

Found = TypeVar("Found")

DEADLINE = 90.0
"""Seconds for whatever a program has to do; starting takes 2 on a quiet machine."""

PAUSE = 0.02


def wait_for(condition: Callable[[], bool], what: str, *, deadline: float = DEADLINE) -> None:
    """Wait for a condition; the error says what never happened."""
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(PAUSE)


def free_port() -> int:
    """A port that nobody uses now, for programs that must be named before they start."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def installed(name: str) -> str:
    """Path of an installed program, beside the interpreter that runs the tests."""
    path = Path(sys.executable).with_name(name)
    assert path.exists(), f"{path} is missing: install the project into this environment"
    return str(path)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a program: one thread, none of our own settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DS4_")}
    return {**kept, "OMP_NUM_THREADS": "1", **(extra or {})}


class Program:
    """One running program, its output in two files.

    Args:
        args: The command line.
        folder: Where its output goes; made here.
        env: More environment variables.
    """

    def __init__(self, args: list[str], folder: Path, env: Mapping[str, str] | None = None):
        folder.mkdir()
        self.args = args
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                args, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment(env)
            )

    @property
    def output(self) -> bytes:
        return self._out.read_bytes()

    @property
    def log(self) -> str:
        return self._err.read_text(errors="replace")

    def wait_log(self, pattern: str, *, deadline: float = DEADLINE) -> re.Match[str]:
        """Wait for a line on stderr."""
        found = self.wait(lambda: re.search(pattern, self.log), f"log {pattern!r}", deadline)
        assert found is not None
        return found

    def wait_output(self, n_bytes: int = 1) -> None:
        """Wait for bytes on stdout."""
        self.wait(lambda: len(self.output) >= n_bytes, f"{n_bytes} bytes of output")

    def wait_exit(self, *, deadline: float = DEADLINE) -> int:
        """Wait for the end; the exit status, or minus the signal's number."""
        try:
            return self._process.wait(deadline)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"never ended:\n{self._tail()}") from None

    def wait(self, look: Callable[[], Found], what: str, deadline: float = DEADLINE) -> Found:
        """Wait for something true while the program runs; the error shows the end of its log."""
        end = time.monotonic() + deadline
        while True:
            ended = self._process.poll() is not None
            if found := look():
                return found
            assert not ended, f"ended without {what}:\n{self._tail()}"
            assert time.monotonic() < end, f"never came: {what}:\n{self._tail()}"
            time.sleep(PAUSE)

    def interrupt(self) -> None:
        """Ctrl+C."""
        self._process.send_signal(signal.SIGINT)

    def pause(self) -> None:
        """Stop it from running, as a machine that hangs."""
        self._process.send_signal(signal.SIGSTOP)
        wait_for(self._is_paused, "the process stops")

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait(DEADLINE)

    def terminate(self) -> None:
        """Ask it to stop, as a service manager does."""
        self._process.terminate()

    def stop(self) -> int:
        """Ask it to end (SIGTERM) and wait."""
        self._process.terminate()
        return self.wait_exit()

    def close(self) -> None:
        """End it whatever it does; idempotent."""
        if self._process.poll() is None:
            self.kill()

    def _is_paused(self) -> bool:
        stat = Path(f"/proc/{self._process.pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "T"

    def _tail(self) -> str:
        return f"{' '.join(self.args)}\n{self.log[-3000:]}"


@dataclass
class Server:
    """A coordinator or a server with all layers, reachable over HTTP.

    Args:
        program: The process.
        address: HOST:PORT of HTTP.
    """

    program: Program
    address: str

    def health(self) -> dict[str, object]:
        """What `/health` says, whatever the status."""
        return read_health(self.address)

    def wait_ready(self) -> None:
        """Wait until the whole route can be reached."""
        self.program.wait(lambda: self.health()["status"] == "ok", "a complete route")


@dataclass
class WorkerProgram:
    """A worker process and its data port."""

    program: Program
    port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Answer:
    """What a program that ran to its end left behind."""

    status: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        """The answer without the newline that ends it."""
        return self.out.decode(errors="replace").removesuffix("\n")

    @property
    def ids(self) -> list[int]:
        """The answer of `--print-ids`."""
        return [int(part) for part in self.text.split(",")]


def read_health(address: str) -> dict[str, object]:
    """What `/health` of a server says, whatever the status."""
    reply = httpx.get(f"http://{address}/health", trust_env=False, timeout=DEADLINE)
    return dict(reply.json(), http_status=reply.status_code)


def stage_sums(health: dict[str, object], key: str) -> int:
    """Sum of one figure over all stages of a `/health`."""
    stages = health["stages"]
    assert isinstance(stages, list)
    return sum(stage[key] for stage in stages)


def running(health: dict[str, object]) -> int:
    """Requests that a `/health` says are running."""
    requests = health["requests"]
    assert isinstance(requests, dict)
    return int(requests["running"])


class Launcher:
    """Starts programs and ends what is left of them.

    Args:
        folder: For their output; made if it is not there.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._programs: list[Program] = []

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        for program in self._programs:
            with suppress(ProcessLookupError):
                program.close()

    def inside(self, name: str) -> Launcher:
        """Return another one, which ends what it has started when it is left."""
        return Launcher(self._folder / name)

    def start(self, name: str, *args: object, env: Mapping[str, str] | None = None) -> Program:
        """Start a program without waiting for anything."""
        command = [installed(name), *map(str, args)]
        folder = self._folder / f"{len(self._programs):02}-{name}"
        program = Program(command, folder, env)
        self._programs.append(program)
        return program

    def server(self, *args: object, env: Mapping[str, str] | None = None) -> Server:
        """Start `ds4py-server` and wait until it says where HTTP is."""
        program = self.start("ds4py-server", *args, "-t", 1, env=env)
        return Server(program, program.wait_log(r"HTTP on (\S+)")[1])

    def worker(self, *args: object, env: Mapping[str, str] | None = None) -> WorkerProgram:
        """Start a `ds4py-server` with the arguments of a worker and wait until it listens."""
        program = self.start("ds4py-server", *args, "-t", 1, env=env)
        found = program.wait_log(r"layers \S.*, listening on \S+:(\d+)")
        program.wait_log("ready: worker on")
        return WorkerProgram(program, int(found[1]))


def run(
    name: str,
    *args: object,
    stdin: bytes | None = None,
    env: Mapping[str, str] | None = None,
    deadline: float = DEADLINE,
) -> Answer:
    """Run a program to its end."""
    done = subprocess.run(
        [installed(name), *map(str, args)],
        input=b"" if stdin is None else stdin,
        capture_output=True,
        env=environment(env),
        timeout=deadline,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr.decode(errors="replace"))
