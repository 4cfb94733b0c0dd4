"""What can be given hostile input.

Owns: the seam between targets and campaigns. Refuses to know: both. Invariant: an input is a value
of bytes, and all that a target does with it follows from them, so that a saved one fails again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import Final, final

LOGS: Final = ("ds4py", "uvicorn", "asyncio")
"""Loggers of what is tested."""


class Target(ABC):
    """Something that reads bytes of strangers.

    Attributes:
        name: For tables and file names; no hyphens.
        deadline: Seconds that one input may take.
        check_every: Inputs after which `check` is called; 0 never.
        sample_every: Of so many inputs the memory of one is measured.
        bytes_allowed: Memory that an input may take, besides 64 times its own size.
    """

    name: str
    deadline = 5.0
    check_every = 0
    sample_every = 500
    bytes_allowed = 64 << 10

    @final
    def make(self, rng: Random) -> bytes:
        """Return the next input."""
        return self._make(rng)

    @final
    def feed(self, data: bytes) -> Sequence[str]:
        """Read an input; return how each of its frames ended, or raise if that was not legal."""
        return self._feed(data)

    @final
    def check(self) -> None:
        """Raise unless an honest request is answered."""
        self._check()

    @final
    def open(self) -> None:
        """Start what is needed."""
        self._open()

    @final
    def close(self) -> None:
        """Stop it, and raise if something is left of it."""
        self._close()

    @abstractmethod
    def _make(self, rng: Random) -> bytes: ...

    @abstractmethod
    def _feed(self, data: bytes) -> Sequence[str]: ...

    def _check(self) -> None:
        return

    def _open(self) -> None:
        return

    def _close(self) -> None:
        return
