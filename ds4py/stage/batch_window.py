"""How many single tokens a stage hopes for before it runs those that are there.

Owns: the count of sessions that decode now, the share of them that is to meet in one batch, for how
long it is worth to wait. Refuses to know: threads, clocks, what a token computes. Invariant: with
one session, or with no more sessions than stages, nothing is waited for.

Sessions that were answered together come back one after the other, a thread switch apart. A stage
that is idle then would run the first one alone and the others behind it, so that each pass over the
weights serves fewer sessions than it could. Hoping for all of them would be as bad, since then they
would move through the stages together and leave all but one idle: each stage's share is the number
of sessions over the number of stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable
from typing import Final

from ds4py.stage.scheduler import MAX_BATCH

MAX_SECONDS: Final = 1e-3
_PART_OF_BATCH: Final = 0.25


class BatchWindow:
    """What the latest batches of one device say about the next one.

    Args:
        n_stages: Stages of the route, as far as is known.
    """

    def __init__(self, n_stages: int):
        self._n_stages = n_stages
        self._latest: deque[Hashable] = deque(maxlen=MAX_BATCH)
        self._seconds = 0.0

    def ran(self, sessions: Collection[Hashable], seconds: float) -> None:
        """Take note of a batch of single tokens and of the time that it took."""
        self._latest.extend(sessions)
        self._seconds = seconds

    @property
    def target_batch(self) -> int:
        """Single tokens that a batch should have."""
        return -(-len(set(self._latest)) // self._n_stages)

    @property
    def max_wait(self) -> float:
        """Seconds to wait for them: little beside what a batch takes."""
        return min(MAX_SECONDS, self._seconds * _PART_OF_BATCH)


def stages_alike(n_layers: int, n_own: int) -> int:
    """Return how many stages a model has if all are about as large as one's own."""
    return max(1, round(n_layers / n_own))
