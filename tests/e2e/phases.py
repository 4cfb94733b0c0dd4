"""Stages that are hurt at an exact moment: in their device, or in the middle of a frame.

Owns: stages of the fake model as real processes, doors (TCP proxies) that stand still inside a
chosen frame, a coordinator over both, what it must say. Invariant: every process, socket and thread
of these is gone when its owner is closed, and processes are ended by their own ids.
"""

from __future__ import annotations

import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from ds4py.config import Address, CoordinatorConfig, PrefillTuning, RouteEntry
from ds4py.contracts import Session
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.relay.workers.listener import coordinator_port
from ds4py.coordinator.relay.workers.registry import LinkId
from ds4py.coordinator.session_pool import SessionPool
from ds4py.transport.acceptor import Acceptor
from ds4py.transport.sockets import Listener
from tests.clusters import ANY_PORT, SOCKETS, registered, span, wait_until
from tests.fake_runner import FakeRunner, card, reference_logits
from tests.processes import environment
from tests.sockets import read_exactly

ROOT = Path(__file__).parents[2]
DEADLINE = 20.0
N_CTX = 64


# --- stages --------------------------------------------------------------------------------------


class Stage:
    """A `fake_stage` program.

    Args:
        layers: Its slice.
        port: Data port; 0 takes any.
        coordinator: Whom to dial; None waits to be dialled.
    """

    def __init__(self, layers: str, port: int = 0, coordinator: Address | None = None):
        self.layers = layers
        self._spans: list[tuple[int, int]] = []
        self._said: list[str] = []
        self._changed = threading.Condition()
        more = [] if coordinator is None else [str(coordinator)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.fake_stage", layers, str(port), *more],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = int(self.wait("ready").split()[1])

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, *numbers = line.split()
            with self._changed:
                if word == "ran":
                    self._spans.append((int(numbers[0]), int(numbers[1])))
                else:
                    self._said.append(line.strip())
                self._changed.notify_all()

    def wait(self, start: str) -> str:
        """Wait until it says a line that starts so; each line is heard once."""

        def found() -> str | None:
            return next((line for line in self._said if line.startswith(start)), None)

        with self._changed:
            line = self._changed.wait_for(found, DEADLINE)
            assert line is not None, f"stage {self.layers} never said {start!r}: {self._said}"
            self._said.remove(line)
        return line

    def order(self, *words: object) -> None:
        """Tell it what to do (see `fake_stage`)."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def spans(self) -> list[tuple[int, int]]:
        """First position and number of tokens of every span that it has evaluated."""
        self.order("report")
        self.wait("reported")
        return list(self._spans)

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait(DEADLINE)

    def stop(self) -> None:
        """Stop it from running, with every connection standing."""
        self._process.send_signal(signal.SIGSTOP)
        process = psutil.Process(self._process.pid)
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the process stops")

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    @property
    def fit(self) -> bool:
        """Whether it runs."""
        if self._process.poll() is not None:
            return False
        return psutil.Process(self._process.pid).status() != psutil.STATUS_STOPPED

    def close(self) -> None:
        """End it whatever it does; idempotent."""
        self.kill()
        self._reader.join(DEADLINE)
        with suppress(BrokenPipeError):
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()


# --- doors ---------------------------------------------------------------------------------------


@dataclass
class Hold:
    """Where a door stands still.

    Args:
        down: In what the caller says; else in what it is answered.
        frame_type: Of which frame.
        number: In the how manieth one from now on; 1 is the next.
        after: Bytes of it that still pass.
        deaf: Whether the end of the sender is kept back as well.
    """

    down: bool
    frame_type: int
    number: int
    after: int
    deaf: bool = False
    held: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        assert self.held.wait(DEADLINE), f"no such frame came: {self}"

    def release(self) -> None:
        self.released.set()


@dataclass(eq=False)
class _Call:
    """One connection through a door."""

    caller: socket.socket
    callee: socket.socket
    first_type: int | None = None

    def hang_up(self) -> None:
        for sock in (self.caller, self.callee):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class Door:
    """A TCP proxy that passes frames; when one side of a connection is gone, so is the other.

    Args:
        port: What is behind it, at 127.0.0.1.
    """

    def __init__(self, port: int):
        self._port = port
        self._listener = Listener(ANY_PORT, SOCKETS)
        self.address = self._listener.address
        self._lock = threading.Lock()
        self._calls: list[_Call] = []
        self._holds: list[Hold] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def hold(
        self, frame_type: int, *, down: bool, after: int, number: int = 1, deaf: bool = False
    ) -> Hold:
        """Stand still within a frame that is to come."""
        hold = Hold(down, frame_type, number, after, deaf)
        with self._lock:
            self._holds.append(hold)
        return hold

    def hang_up(self, first_type: int) -> int:
        """End the connections that began with a type of frame, as a network does; how many."""
        with self._lock:
            calls = [call for call in self._calls if call.first_type == first_type]
        for call in calls:
            call.hang_up()
        return len(calls)

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            for hold in self._holds:
                hold.release()
            for call in self._calls:
                call.hang_up()
        for thread in self._threads:
            thread.join(DEADLINE)

    def _accept(self) -> None:
        while (caller := self._listener.accept()) is not None:
            try:
                callee = socket.create_connection(("127.0.0.1", self._port), DEADLINE)
            except OSError:
                caller.close()
                continue
            callee.settimeout(None)
            call = _Call(caller, callee)
            thread = threading.Thread(target=self._serve, args=(call,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, call: _Call) -> None:
        with self._lock:
            self._calls.append(call)
        back = threading.Thread(target=self._pass, args=(call, False), daemon=True)
        back.start()
        self._pass(call, True)
        back.join(DEADLINE)
        with self._lock:
            self._calls.remove(call)
        call.caller.close()
        call.callee.close()

    def _pass(self, call: _Call, down: bool) -> None:
        """Pass the frames of one direction until either side has ended."""
        source, sink = (call.caller, call.callee) if down else (call.callee, call.caller)
        with suppress(OSError):
            while frame := _read_frame(source):
                frame_type = int.from_bytes(frame[4:8], "big")
                if down and call.first_type is None:
                    call.first_type = frame_type
                hold = self._hold_for(frame_type, down)
                if hold is not None:
                    sink.sendall(frame[: hold.after])
                    hold.held.set()
                    if not _stand_still(hold, source):
                        break
                sink.sendall(frame[0 if hold is None else hold.after :])
        call.hang_up()

    def _hold_for(self, frame_type: int, down: bool) -> Hold | None:
        with self._lock:
            for hold in self._holds:
                if hold.number and (hold.frame_type, hold.down) == (frame_type, down):
                    hold.number -= 1
                    return None if hold.number else hold
        return None


def _read_frame(sock: socket.socket) -> bytes:
    """The next frame, or what there is of it at the end."""
    head = read_exactly(sock, 12)
    return head + read_exactly(sock, int.from_bytes(head[8:12], "big"))


def _stand_still(hold: Hold, source: socket.socket) -> bool:
    """Wait to be released; False if the sender is gone before, and the rest with it."""
    poll = select.poll()
    poll.register(source, select.POLLRDHUP)
    while not hold.released.is_set():
        if poll.poll(10) and not hold.deaf:
            return False
    return True


# --- coordinators --------------------------------------------------------------------------------


@dataclass
class Fleet:
    """A coordinator over stages that are behind doors or not."""

    coordinator: Coordinator
    backend: SessionPool
    port: Acceptor
    stages: list[Stage]
    doors: list[Door]

    def restart(self, hop: int) -> None:
        """Start a killed stage again on its port."""
        old = self.stages[hop]
        old.close()
        self.stages[hop] = Stage(old.layers, old.port)

    def links(self) -> dict[int, LinkId]:
        """Connections of the coordinator by the first layer behind them."""
        return {r.layers.start: r.link for r in registered(self.coordinator)}

    def wait_new_link(self, old: LinkId) -> None:
        """Wait until all stages are known again, one of them over another connection."""

        def is_back() -> bool:
            links = self.links().values()
            return len(links) == len(self.stages) and old not in links

        wait_until(is_back, "the stage is back")

    def wait_known(self, n_stages: int) -> None:
        registry = self.coordinator.workers.registry
        wait_until(lambda: len(registry.records) == n_stages, f"{n_stages} stages are known")


@contextmanager
def fleet(
    stages: list[Stage],
    *,
    doors: bool = False,
    local: str | None = None,
    window: int | None = None,
    **config: object,
) -> Iterator[Fleet]:
    """A coordinator that dials stages one after the other, and cuts prompts in chunks of two.

    Args:
        stages: In this order, which is that of their seniority; not owned.
        doors: Whether each stage is reached through a door only.
        local: Layers of its own.
        window: Chunks on their way at once; None is the default, five for three hops.
        config: Fields of `CoordinatorConfig`.
    """
    with ExitStack() as stack:
        ways = [Door(stage.port) for stage in stages] if doors else []
        for door in ways:
            stack.callback(door.close)
        addresses = [d.address for d in ways] or [Address("127.0.0.1", s.port) for s in stages]
        fields = {"rejoin_timeout": DEADLINE, "result_timeout": DEADLINE, **config}
        built = CoordinatorConfig(
            route=tuple(map(RouteEntry, addresses)),
            prefill=PrefillTuning(chunk=2, window=window),
            **fields,  # type: ignore[arg-type]
        )
        own = None if local is None else FakeRunner(span(local))
        coordinator = Coordinator(card(), N_CTX, built, SOCKETS, local=own)
        stack.callback(coordinator.close)
        port = coordinator_port(Listener(ANY_PORT, SOCKETS), coordinator)
        stack.callback(port.close)
        port.start()
        made = Fleet(coordinator, SessionPool(coordinator, 1), port, stages, ways)
        for n, dialler in enumerate(coordinator._dialers):
            dialler.start()
            made.wait_known(n + 1)
        yield made


def greedy(session: Session, prompt: Sequence[int], n_tokens: int) -> list[int]:
    """Evaluate a prompt and continue it; the answer."""
    answer = [int(np.argmax(session.sync(prompt).logits))]
    while len(answer) < n_tokens:
        answer.append(int(np.argmax(session.eval(answer[-1]))))
    return answer


def truth(prompt: Sequence[int], n_tokens: int) -> list[int]:
    """The greedy answer of one process."""
    line = list(prompt)
    for _ in range(n_tokens):
        line.append(int(np.argmax(reference_logits(line))))
    return line[len(prompt) :]
