"""The latest lines of the log, for anyone who looks at a running server.

Owns: which lines are worth keeping, how many, how long. Refuses to know: HTTP, who writes them.
Invariant: memory is bounded, whatever a peer makes somebody log.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

MAX_EVENTS: Final = 100
"""Lines that are kept."""

MAX_TEXT: Final = 300
"""Characters of a line that are kept."""

_ROUTINE: Final = ("ds4py.server.", "ds4py.coordinator.relay.profile", "ds4py.worker.profile")
"""Loggers with a line per request or token: their news would push out everything else."""

Level = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class LogEvent:
    """A line of the log.

    Args:
        time: Unix seconds.
        level: How grave.
        text: One line, cut to `MAX_TEXT` characters.
    """

    time: float
    level: Level
    text: str


class EventLog(logging.Handler):
    """Keeps the latest lines from INFO on; those of single requests only if they are warnings."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._events: deque[LogEvent] = deque(maxlen=MAX_EVENTS)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record; called by `logging` with the handler's lock held."""
        try:
            if record.levelno >= logging.WARNING or not record.name.startswith(_ROUTINE):
                text = _one_line(record.getMessage())
                self._events.append(LogEvent(record.created, _level(record.levelno), text))
        except Exception:  # noqa: BLE001 - a handler never fails anyone who logs
            self.handleError(record)

    def recent(self) -> tuple[LogEvent, ...]:
        """Return what is kept, oldest first."""
        self.acquire()
        try:
            return tuple(self._events)
        finally:
            self.release()

    @contextmanager
    def attached(self, logger: str = "ds4py") -> Iterator[None]:
        """Listen to a logger and all below it meanwhile."""
        target = logging.getLogger(logger)
        target.addHandler(self)
        try:
            yield
        finally:
            target.removeHandler(self)


def _one_line(text: str) -> str:
    line = " ".join(text[: 2 * MAX_TEXT].split())
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "…"


def _level(number: int) -> Level:
    if number >= logging.ERROR:
        return "error"
    return "warning" if number >= logging.WARNING else "info"
