"""What runs next on a device that many sessions share: here a batch is formed.

Owns: the order of what waits, how many single tokens a batch should have, how long it may wait for
them. Refuses to know: threads, clocks, runners, where items come from. Invariant: items of one
session leave in the order in which they came, and while both kinds wait, single tokens and chunks
of prompts take turns: a single token waits for one chunk at most, a chunk for one batch.

1. Control items (copies, saves, ends of sessions) are short, and run before anything else.
2. Single tokens (decode) of different sessions form one batch, the oldest first, up to `max_batch`.
3. Then one chunk of a prompt (prefill), alone. Sessions take turns with theirs (round robin), so
   that a long prompt does not hold up a short one.

Sessions that were answered together come back one after the other, a thread switch apart. A stage
that is idle then would run the first one alone and the others behind it, so that each pass over the
weights serves fewer sessions than it could. So a batch waits for its target, a moment at most. To
wait for all sessions would be as bad, since then they would move through the stages together and
leave all but one idle: each stage's target is the number of sessions over the number of stages.
With one session, or with no more sessions than stages, nothing waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, TypeVar

T = TypeVar("T")

MAX_BATCH: Final = 32
"""Single tokens that run between two chunks."""

MAX_WAIT_SECONDS: Final = 1e-3
_WAIT_PART_OF_BATCH: Final = 0.25
"""A batch may wait for so much of the time that the one before it took."""

_SOON_SECONDS: Final = 1.0
"""In which a session that decodes is here again."""


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
        n_stages: Stages of the route, as far as is known.
        max_batch: Single tokens that may run between two chunks.
    """

    def __init__(self, n_stages: int = 1, *, max_batch: int = MAX_BATCH):
        self._n_stages = n_stages
        self._max_batch = max_batch
        # sessions stand in the order in which their chunks get their turn
        self._lines: dict[Hashable, deque[_Entry[T]]] = {}
        self._arrivals = 0
        self._waiting = 0
        self._chunk_is_next = False
        # of the latest batches of single tokens: who was in them, how long the last one took, when
        self._latest: deque[Hashable] = deque(maxlen=MAX_BATCH)
        self._last: frozenset[Hashable] = frozenset()
        self._last_seconds, self._last_at = 0.0, -_SOON_SECONDS

    def __len__(self) -> int:
        return self._waiting

    @property
    def only_decodes(self) -> bool:
        """Whether something waits, and no chunk or call could run now."""
        heads = [line[0].kind for line in self._lines.values()]
        return bool(heads) and all(kind is WorkKind.DECODE for kind in heads)

    @property
    def target_batch(self) -> int:
        """Single tokens that a batch should have."""
        return -(-len(set(self._latest)) // self._n_stages)

    @property
    def max_wait(self) -> float:
        """Seconds for which a batch may wait for its target: little beside what one takes."""
        return min(MAX_WAIT_SECONDS, self._last_seconds * _WAIT_PART_OF_BATCH)

    @property
    def wants_more(self) -> bool:
        """Whether only single tokens could run, and they are fewer than the target."""
        return len(self) < self.target_batch and self.only_decodes

    def expects_decodes_beside(self, session: Hashable, now: float) -> bool:
        """Whether single tokens of another session may come soon.

        Args:
            session: The one that does not count.
            now: Seconds, on the clock of `decoded`.
        """
        return now - self._last_at < _SOON_SECONDS and not self._last <= {session}

    def decoded(self, sessions: Collection[Hashable], seconds: float, now: float) -> None:
        """Take note of a batch of single tokens.

        Args:
            sessions: Whose tokens they were.
            seconds: What the batch took.
            now: When it was done, in seconds on any clock that never goes back.
        """
        self._latest.extend(sessions)
        self._last, self._last_seconds, self._last_at = frozenset(sessions), seconds, now

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


def stages_alike(n_layers: int, n_own: int) -> int:
    """Return how many stages a model has if all are about as large as one's own."""
    return max(1, round(n_layers / n_own))
