"""A bound on how many of something there may be.

Owns: the count of free places. Refuses to know: what takes them. Invariant: what was given back can
be taken again at once, by any thread.
"""

from __future__ import annotations

import queue

from ds4py.stage.mailbox import Mailbox


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
