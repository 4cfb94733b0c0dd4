"""What runs next on a device that many sessions share.

Owns: the order of what waits. Refuses to know: threads, runners, where items come from. Invariant:
items of one session leave in the order in which they came, and while both kinds wait, single tokens
and chunks of prompts take turns: a single token waits for one chunk at most, a chunk for one batch.

Chunks of several sessions take turns as well, each session's next one after the others' (round
robin), so that a long prompt does not hold up a short one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, TypeVar

T = TypeVar("T")

MAX_BATCH: Final = 32
"""Single tokens that run between two chunks."""


class WorkKind(Enum):
    """How an item takes its turn."""

    CONTROL = "control"  # is short and rare, and runs before whatever turn comes next
    DECODE = "decode"  # one token: may share a batch with those of other sessions
    PREFILL = "prefill"  # runs alone, and may take long


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    """An item in its session's line; `number` counts arrivals."""

    number: int
    kind: WorkKind
    item: T


@dataclass(frozen=True, slots=True)
class ScheduledBatch(Generic[T]):
    """What to run before anything else is considered: the calls first, in order, then the batch.

    Args:
        calls: Calls.
        batch: One chunk, or single tokens of different sessions; may be empty if there are calls.
    """

    calls: list[T]
    batch: list[T]


class Scheduler(Generic[T]):
    """Everything that waits for one device; for one thread.

    Args:
        max_batch: Single tokens that may run between two chunks.
    """

    def __init__(self, max_batch: int = MAX_BATCH):
        self._max_batch = max_batch
        # sessions stand in the order in which their chunks get their turn
        self._lines: dict[Hashable, deque[_Entry[T]]] = {}
        self._arrivals = 0
        self._waiting = 0
        self._chunk_is_next = False

    def __len__(self) -> int:
        return self._waiting

    @property
    def only_decodes(self) -> bool:
        """Whether something waits, and no chunk or call could run now."""
        heads = [line[0].kind for line in self._lines.values()]
        return bool(heads) and all(kind is WorkKind.DECODE for kind in heads)

    def add(self, session: Hashable, kind: WorkKind, item: T) -> None:
        """Let an item wait behind all of its session that wait already.

        Args:
            session: Whose order it keeps; calls of no session share one name of their own.
            kind: How it takes its turn.
            item: Anything.
        """
        self._arrivals += 1
        self._waiting += 1
        line = self._lines.setdefault(session, deque())
        line.append(_Entry(self._arrivals, kind, item))

    def went_alone(self, kind: WorkKind) -> None:
        """Take note of a single token or chunk that ran without having waited here."""
        self._chunk_is_next = kind is WorkKind.DECODE

    def next(self) -> ScheduledBatch[T] | None:
        """Take the next turn; None if nothing waits."""
        calls = self._take_calls()
        batch = self._take_chunk() if self._chunk_is_next else []
        self._chunk_is_next = False
        if not batch:
            batch = self._take_decodes()
            self._chunk_is_next = bool(batch)
        batch = batch or self._take_chunk()
        return ScheduledBatch(calls, batch) if calls or batch else None

    def _take_calls(self) -> list[T]:
        """Take all calls that may run now; overtaken, they would free too late what others need."""
        calls: list[T] = []
        while ready := self._first(WorkKind.CONTROL):
            calls += [self._take(session) for session in ready]
        return calls

    def _take_decodes(self) -> list[T]:
        """Take the single tokens that came first."""
        return [self._take(session) for session in self._first(WorkKind.DECODE)[: self._max_batch]]

    def _take_chunk(self) -> list[T]:
        """Take one chunk of the session that has waited for its turn the longest."""
        for session, line in self._lines.items():
            if line[0].kind is WorkKind.PREFILL:
                item = self._take(session)
                if session in self._lines:  # its next one comes after the others'
                    self._lines[session] = self._lines.pop(session)
                return [item]
        return []

    def _first(self, kind: WorkKind) -> list[Hashable]:
        """Return the sessions that such an item of heads, in the order of its arrival."""
        found = [(line[0].number, s) for s, line in self._lines.items() if line[0].kind is kind]
        return [session for _, session in sorted(found, key=lambda pair: pair[0])]

    def _take(self, session: Hashable) -> T:
        line = self._lines[session]
        entry = line.popleft()
        self._waiting -= 1
        if not line:
            del self._lines[session]
        return entry.item

    def drain(self) -> Iterator[T]:
        """Take all that waits, in the order of arrival."""
        entries = sorted((e for line in self._lines.values() for e in line), key=lambda e: e.number)
        self._lines.clear()
        self._waiting = 0
        return (entry.item for entry in entries)
