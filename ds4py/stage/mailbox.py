"""A queue between threads whose waits end when they should.

Owns: items on their way from any thread to any thread, and a semaphore made of that. Refuses to
know: what they are. Invariant: every item is got once, in the order of putting; a wait ends within
its timeout, however busy the machine is.

Why not the standard library's: `queue.SimpleQueue.get` of CPython 3.11 (seen with 3.11.7) waits for
ever if its timeout passes between two looks at the queue, as the time that is left is then
negative. `queue.Queue` is right, but a hand-off from thread to thread costs it some 4 us more, and
a token makes about three of them on its way through a stage.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """An unbounded first-in first-out queue; any thread may put and get."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        # Locked while there is no need to look. Opened after every item that is put: a reader that
        # finds no item and then waits here has missed none; opened for nothing, it costs a look.
        self._bell = threading.Lock()
        self._bell.acquire()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Add an item; never waits."""
        self._items.append(item)
        self._ring()

    def get(self, timeout: float | None = None) -> T:
        """Take the oldest item, waiting for one if need be.

        Args:
            timeout: Seconds; None waits without limit, 0 or less does not wait.

        Raises:
            queue.Empty: There was none in time.
        """
        deadline = None
        while True:
            try:
                item = self._items.popleft()
            except IndexError:
                pass
            else:
                if self._items:  # the bell rings once for many items, and others may wait too
                    self._ring()
                return item
            if timeout is None:
                self._bell.acquire()
                continue
            now = time.monotonic()
            deadline = now + timeout if deadline is None else deadline
            # a negative time would mean none at all to `acquire`, so it is compared first
            in_time = now < deadline and self._bell.acquire(timeout=deadline - now)
            if not in_time and not self._items:
                raise queue.Empty

    def _ring(self) -> None:
        try:  # noqa: SIM105 - every token comes here, and `suppress` takes three times as long
            self._bell.release()
        except RuntimeError:  # it rings already
            pass


class Credits:
    """A semaphore whose free places lie in a `Mailbox`.

    `threading.Semaphore` notifies through a condition: taking and giving back one place of it are
    eight calls, for every token on its way through a stage.

    Args:
        n_places: Places that are free at first.
    """

    def __init__(self, n_places: int):
        self._free: Mailbox[None] = Mailbox()
        for _ in range(n_places):
            self._free.put(None)

    def acquire(self, *, timeout: float) -> bool:
        """Take a place, waiting for one if need be; False if none became free in time.

        Args:
            timeout: Seconds.
        """
        try:
            self._free.get(timeout)
        except queue.Empty:
            return False
        return True

    def release(self) -> None:
        """Free a place that was taken; never waits."""
        self._free.put(None)
