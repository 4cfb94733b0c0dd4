"""One route of real processes: started, asked over HTTP, hurt, and ended.

Owns: the processes, their ports and logs. Refuses to know: what answers should be. Invariant: every
wait has a deadline, and no process outlives its cluster.

Coordinators are HTTP servers. One of ds4 refuses requests until its route is complete, and may fail
one request after it lost a worker (docs/spec/wire-protocol.md#quirks Q1, Q5, Q7), so anyone who
asks tries again, and says how often.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import httpx

from interop.live.commands import COORDINATOR, WORKER, fill
from interop.live.matrix import Route, cuts
from interop.live.trace import Messages

HOST: Final = "127.0.0.1"
_PAUSE: Final = 0.2
_LOG_TAIL: Final = 600


class LiveError(Exception):
    """A route cannot be asked; the message says why, with the end of a log."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all routes share.

    Args:
        model: The file.
        n_layers: Of the model.
        n_ctx: Tokens per session.
        chunk: Prompt tokens per chunk.
        n_tokens: Budget of each answer.
        deadline: Seconds for a start or an answer.
        commands: Templates by kind and role.
        folder: For logs and lock files.
    """

    model: Path
    n_layers: int
    n_ctx: int
    chunk: int
    n_tokens: int
    deadline: float
    commands: Mapping[tuple[str, str], str]
    folder: Path


@dataclass(frozen=True, slots=True)
class Answer:
    """A text, and how many requests failed before it came."""

    text: str
    n_failed: int


class Program:
    """A running process with its log.

    Args:
        args: The command line.
        log: Where its output goes, added to what is there.
    """

    def __init__(self, args: list[str], log: Path):
        self._log = log
        # ds4 allows one engine per lock file, and would find all others here
        environment = os.environ | {"DS4_LOCK_FILE": str(log.with_suffix(".lock"))}
        try:
            with log.open("ab") as out:
                self._process = subprocess.Popen(  # noqa: S603 - the user's own commands
                    args, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment
                )
        except OSError as e:
            raise LiveError(f"{args[0]}: {e.strerror}") from e

    def check(self) -> None:
        """Raise if it has ended."""
        status = self._process.poll()
        if status is not None:
            raise LiveError(f"{self._log.stem} ended with status {status}: {self.tail()}")

    def tail(self) -> str:
        """Return the end of its log."""
        return self._log.read_text(errors="replace")[-_LOG_TAIL:].strip()

    def kill(self) -> None:
        """End it at once; idempotent."""
        self._process.kill()
        self._process.wait()


class Cluster:
    """A coordinator and its workers.

    Args:
        route: Which ones.
        setting: What all routes share.
    """

    def __init__(self, route: Route, setting: Setting):
        self._route, self._setting = route, setting
        self._folder = setting.folder / route.name
        self._ports = [_free_port() for _ in range(2 + route.n_hops)]
        self._programs: list[Program] = []  # the coordinator, then the workers in layer order

    def __enter__(self) -> Cluster:
        self._folder.mkdir(exist_ok=True)
        try:
            for number in range(1 + self._route.n_hops):
                self._programs.append(self._start(number))
        except BaseException:
            self._kill_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._kill_all()

    def _kill_all(self) -> None:
        for program in self._programs:
            program.kill()

    def _start(self, number: int) -> Program:
        route, setting = self._route, self._setting
        role = WORKER if number else COORDINATOR
        kind = route.workers if number else route.coordinator
        values: dict[str, Any] = {
            "model": setting.model,
            "ctx": setting.n_ctx,
            "layers": cuts(setting.n_layers, route.n_hops)[number],
            "host": HOST,
            "port": self._ports[0],
            "http_host": HOST,
            "http_port": self._ports[1],
            "bits": route.bits,
            "chunk": setting.chunk,
            "worker_host": HOST,
            "worker_port": self._ports[1 + number],
        }
        args = fill(setting.commands[kind, role], values)
        return Program(args, self._folder / f"{role}-{number}.log")

    def restart_last_worker(self) -> None:
        """Kill the worker with the output head and start it again, with nothing in its memory."""
        self._programs[-1].kill()
        self._programs[-1] = self._start(self._route.n_hops)

    def ask(self, messages: Messages, n_tokens: int | None = None) -> Answer:
        """Return the greedy answer to a conversation.

        Args:
            messages: The conversation.
            n_tokens: Budget; None takes the setting's.

        Raises:
            LiveError: There is none in time, or a process has ended.
        """
        body = {"messages": messages, "temperature": 0, "think": False, "stream": False}
        body["max_tokens"] = n_tokens or self._setting.n_tokens
        end = time.monotonic() + self._setting.deadline
        n_failed, problem = 0, "no time"
        while (left := end - time.monotonic()) > 0:
            for program in self._programs:
                program.check()
            try:
                return Answer(self._post(body, left), n_failed)
            except (httpx.TransportError, _NotNowError) as e:
                problem = str(e)
            n_failed += 1
            time.sleep(_PAUSE)
        logs = "; ".join(program.tail() for program in self._programs)
        raise LiveError(f"no answer in {self._setting.deadline:g} s: {problem}; logs: {logs}")

    def _post(self, body: Mapping[str, object], timeout: float) -> str:
        url = f"http://{HOST}:{self._ports[1]}/v1/chat/completions"
        reply = httpx.post(url, json=body, timeout=timeout, trust_env=False)
        text = reply.content.decode(errors="replace")
        if reply.status_code >= 500:
            raise _NotNowError(f"status {reply.status_code}: {text}")
        if reply.status_code != 200:
            raise LiveError(f"status {reply.status_code}: {text}")
        return str(json.loads(text)["choices"][0]["message"]["content"])


class _NotNowError(Exception):
    """The server cannot answer at this time."""


def _free_port() -> int:
    """Return a port that nobody uses now."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])
