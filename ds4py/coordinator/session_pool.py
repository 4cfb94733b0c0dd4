"""The fixed set of sessions of a process, lent to one request at a time.

Owns: who gets which session, in arrival order, and who is told his place meanwhile; whose cache is
given back when memory is short. Refuses to know: what requests are. Invariant: a session is lent to
one request at a time; the number of session ids never grows, because a C worker frees none of them.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from ds4py.contracts import Cancelled, Health, ModelCard, Session
from ds4py.coordinator.pipeline import PipelineSource
from ds4py.coordinator.prefix_sharing import MIN_SAVED, common_prefix
from ds4py.coordinator.session import ClusterSession
from ds4py.errors import CancelledError

_POLL_SECONDS: Final = 0.1
_LOSS_RATIO: Final = 4

TellPosition = Callable[[int], None]
"""Told the place in the queue, 1 for the next one, at first and whenever it changes."""


def choose_session(
    free: Sequence[ClusterSession], tokens: Sequence[int], *, can_fork: bool = False
) -> ClusterSession:
    """Return the free session that saves the most work; `free` is ordered oldest use first.

    Without a common prefix, an empty session comes before one whose conversation may go on, and the
    longest unused conversation goes first.

    Args:
        free: At least one.
        tokens: The prompt.
        can_fork: A common prefix can be copied from any session. Then the prompt may go elsewhere,
            and a conversation that begins like it can stay.
    """
    some_are_empty = not all(session.tokens for session in free)

    def merit(session: ClusterSession) -> tuple[int, bool]:
        held = session.tokens
        n_common = common_prefix(held, tokens)
        if can_fork and not _goes_on(n_common, len(held) - n_common, cheaply=some_are_empty):
            n_common = 0
        return n_common, not held

    return max(free, key=merit)


def _goes_on(n_common: int, n_lost: int, *, cheaply: bool) -> bool:
    """Whether a prompt is the next turn of a conversation, as far as lengths tell.

    The last reply may be missing in it, or parts of it. Where that is much, it may as well be
    another conversation that begins alike; if it is another one, this one had better stay.

    Args:
        n_common: Tokens that both begin with.
        n_lost: Cached tokens that are not in the prompt.
        cheaply: Nobody else would have to go.
    """
    return n_lost < MIN_SAVED or (not cheaply and n_lost * _LOSS_RATIO <= n_common)


class SessionPool:
    """A `contracts.Backend` over a source of pipelines.

    Args:
        source: Finds pipelines; not owned.
        n_sessions: Token timelines that may be open at once.
    """

    def __init__(self, source: PipelineSource, n_sessions: int):
        self._source = source
        self._changed = threading.Condition()
        self._sessions = tuple(
            ClusterSession(source.new_session(), source, source.config, self)
            for _ in range(n_sessions)
        )
        self._free = deque(self._sessions)
        self._tickets = itertools.count()
        self._waiting: deque[int] = deque()

    @property
    def card(self) -> ModelCard:
        """The served model."""
        return self._source.card

    @property
    def n_ctx(self) -> int:
        """Tokens that one session can hold."""
        return self._source.n_ctx

    @property
    def n_waiting(self) -> int:
        """Requests that wait for a session."""
        return len(self._waiting)

    def health(self) -> Health:
        """Report readiness; never blocks."""
        return self._source.health()

    def n_cached(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens the best session holds; see `contracts.Backend`."""
        with self._changed:
            free = tuple(self._free)
        useful = self._sessions if self._source.can_fork else free
        return max((session.reusable(tokens) for session in useful), default=0)

    def others(self, session: ClusterSession) -> Iterator[ClusterSession]:
        """Return all sessions but one; see `session.Company`."""
        return (other for other in self._sessions if other is not session)

    def make_room(self, n_tokens: int) -> bool:
        """Close idle sessions, the longest unused first, until they held so many tokens.

        Returns:
            Whether there was one that held anything.
        """
        n_freed = n_closed = 0
        with self._changed:  # meanwhile nobody gets one of them
            for session in self._free:
                if n_freed >= n_tokens:
                    break
                if session.takes_memory:
                    n_freed += len(session.tokens)
                    n_closed += 1
                    session.close()
        return n_closed > 0

    @contextmanager
    def lease(
        self,
        tokens: Sequence[int],
        *,
        cancelled: Cancelled | None = None,
        waiting: TellPosition | None = None,
    ) -> Iterator[Session]:
        """Borrow a session; see `contracts.Backend.lease`.

        Args:
            tokens: The prompt.
            cancelled: Polled while waiting.
            waiting: Called on this thread while all sessions are busy; must return at once.
        """
        session = self._take(tokens, cancelled, waiting)
        try:
            yield session
        finally:
            with self._changed:
                self._free.append(session)
                self._changed.notify_all()

    def _take(
        self, tokens: Sequence[int], cancelled: Cancelled | None, waiting: TellPosition | None
    ) -> ClusterSession:
        told = 0
        with self._changed:
            ticket = next(self._tickets)
            self._waiting.append(ticket)
            try:
                while not (self._free and self._waiting[0] == ticket):
                    if cancelled is not None and cancelled():
                        raise CancelledError("the request was cancelled while it waited")
                    position = self._waiting.index(ticket) + 1
                    if waiting is not None and position != told:
                        waiting(position)
                    told = position
                    self._changed.wait(_POLL_SECONDS)
                can_fork = self._source.can_fork
                session = choose_session(self._free, tokens, can_fork=can_fork)
                self._free.remove(session)
                return session
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
