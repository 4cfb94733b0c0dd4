"""Every kind of wait that the programs use ends in time on a busy machine.

The kind of fault: `queue.SimpleQueue.get(timeout=t)` of CPython 3.11 waits for ever if t passes
between two looks at the queue, which needs a wake-up at the wrong moment and happens only when the
machine is busy. So each kind makes 10,000 short waits beside five busy processes, while another
thread now and then wakes it up, about when the wait ends.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import cycle

import pytest

from ds4py.stage.mailbox import Mailbox
from ds4py.transport.sockets import set_timeout
from ds4py.worker.credits import Credits

N_WAITS = 10_000
LONGEST = 2.0
PATIENCE = 60.0
"""Seconds after which a kind counts as hanging."""

PAUSE = 1e-4
"""Between two wake-ups. A system that counts time in steps of 4 ms lets a socket wait for one."""

TIMEOUTS = (1e-6, 2e-6, 1e-5, 5e-5)
BUSY = "import time\nend = time.monotonic() + 300\nwhile time.monotonic() < end: pass"

Wait = Callable[[float], None]
Wake = Callable[[], None]


def nothing() -> None:
    """Wake nobody."""


def mailbox(_: ExitStack) -> tuple[Wait, Wake]:
    box: Mailbox[int] = Mailbox()

    def wait(timeout: float) -> None:
        try:
            box.get(timeout)
        except queue.Empty:
            return

    return wait, lambda: box.put(1)


def places(_: ExitStack) -> tuple[Wait, Wake]:
    room = Credits(0)
    return lambda timeout: room.acquire(timeout=timeout) and None, room.release


def lock(_: ExitStack) -> tuple[Wait, Wake]:
    held = threading.Lock()
    held.acquire()

    def wake() -> None:
        if held.locked():
            held.release()

    return lambda timeout: held.acquire(timeout=timeout) and None, wake


def semaphore(_: ExitStack) -> tuple[Wait, Wake]:
    permits = threading.Semaphore(0)
    return lambda timeout: permits.acquire(timeout=timeout) and None, permits.release


def event(_: ExitStack) -> tuple[Wait, Wake]:
    happened = threading.Event()

    def wait(timeout: float) -> None:
        happened.wait(timeout)
        happened.clear()

    return wait, happened.set


def condition(_: ExitStack) -> tuple[Wait, Wake]:
    changed = threading.Condition()

    def wait(timeout: float) -> None:
        with changed:
            changed.wait(timeout)

    def wake() -> None:
        with changed:
            changed.notify_all()

    return wait, wake


def future(_: ExitStack) -> tuple[Wait, Wake]:
    current: list[Future[int]] = [Future()]

    def wait(timeout: float) -> None:
        try:
            current[0].result(timeout)
        except TimeoutError:
            return
        current[0] = Future()

    def wake() -> None:
        if not current[0].done():
            current[0].set_result(1)

    return wait, wake


def thread_join(stack: ExitStack) -> tuple[Wait, Wake]:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, args=(PATIENCE,), daemon=True)
    thread.start()
    stack.callback(ended.set)
    return thread.join, nothing


def receiving(stack: ExitStack) -> tuple[Wait, Wake]:
    ours, theirs = (stack.enter_context(end) for end in socket.socketpair())

    def wait(timeout: float) -> None:
        set_timeout(ours, socket.SO_RCVTIMEO, max(timeout, 1e-5))
        try:
            ours.recv(1)
        except BlockingIOError:
            return

    return wait, lambda: theirs.send(b"x") and None


def event_loop(stack: ExitStack) -> tuple[Wait, Wake]:
    loop = asyncio.new_event_loop()
    stack.callback(loop.close)
    current: list[asyncio.Event] = []

    async def once(timeout: float) -> None:
        happened = asyncio.Event()
        current[:] = [happened]
        try:
            async with asyncio.timeout(timeout):
                await happened.wait()
        except TimeoutError:
            return

    def wake() -> None:
        if current and not loop.is_closed():
            loop.call_soon_threadsafe(current[0].set)

    return lambda timeout: loop.run_until_complete(once(timeout)), wake


KINDS = {
    "Mailbox": mailbox,
    "Credits": places,
    "Lock": lock,
    "Semaphore": semaphore,
    "Event": event,
    "Condition": condition,
    "Future": future,
    "Thread": thread_join,
    "socket": receiving,
    "asyncio": event_loop,
}


@pytest.fixture(scope="module")
def busy_machine() -> Iterator[None]:
    programs = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(5)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait(10)


def longest_wait(wait: Wait, wake: Wake, rare: int = 2) -> float:
    """Return the seconds of the longest of many short waits; raises if one does not end.

    In the first half every second wait was woken up before it began, and nobody comes to help: a
    wait that has lost its end lasts. In the second half another thread wakes it up. So the fault of
    `queue.SimpleQueue` shows within 400 to 19,000 waits (CPython 3.11.7, three trials).

    Args:
        wait: Waits for so many seconds at most.
        wake: Ends a wait, or the next one.
        rare: Of how many waits one runs out in the first half.
    """
    longest, is_half, done = [0.0], threading.Event(), threading.Event()

    def run() -> None:
        for number, timeout in zip(range(N_WAITS), cycle(TIMEOUTS), strict=False):
            if number == N_WAITS // 2:
                is_half.set()
            if number % rare:
                wake()
            started = time.monotonic()
            wait(timeout)
            longest[0] = max(longest[0], time.monotonic() - started)
        done.set()

    def disturb() -> None:
        is_half.wait(PATIENCE)
        while not done.is_set():
            wake()
            time.sleep(PAUSE)

    threads = [threading.Thread(target=work, daemon=True) for work in (run, disturb)]
    for thread in threads:
        thread.start()
    ended = done.wait(PATIENCE)
    is_half.set()
    done.set()
    threads[1].join(PATIENCE)
    assert ended, f"a wait of {max(TIMEOUTS)} s at most has not ended after {PATIENCE} s"
    return longest[0]


@pytest.mark.usefixtures("busy_machine")
@pytest.mark.parametrize("kind", KINDS)
def test_short_waits_end_on_a_busy_machine(kind: str) -> None:
    with ExitStack() as stack:
        rare = 20 if kind == "socket" else 2  # one that runs out takes it 4 ms and more
        assert longest_wait(*KINDS[kind](stack), rare) < LONGEST
