"""The fixed set of sessions of a process, lent to one request at a time.

Owns: who gets which session, in arrival order, and who is told his place meanwhile. Refuses to
know: what requests are. Invariant: a session is lent to one request at a time; the number of
session ids never grows, because a C worker frees none of them.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from ds4py.cluster.coordinator import Coordinator
from ds4py.cluster.session import ClusterSession, common_prefix
from ds4py.contracts import Cancelled, Health, ModelCard, Session
from ds4py.errors import CancelledError

_POLL_SECONDS: Final = 0.1

Waiting = Callable[[int], None]
"""Told the place in the queue, 1 for the next one, at first and whenever it changes."""


def choose_session(free: Sequence[ClusterSession], tokens: Sequence[int]) -> ClusterSession:
    """Return the free session that saves the most work; `free` is ordered oldest use first.

    Without a common prefix, an empty session comes before one whose conversation may go on, and the
    longest unused conversation goes first.
    """
    return max(free, key=lambda s: (common_prefix(s.tokens, tokens), not s.tokens))


class ClusterBackend:
    """A `contracts.Backend` over a coordinator.

    Args:
        coordinator: Finds routes; not owned.
        n_sessions: Token timelines that may be open at once.
    """

    def __init__(self, coordinator: Coordinator, n_sessions: int):
        self._coordinator = coordinator
        self._changed = threading.Condition()
        self._free = deque(
            ClusterSession(coordinator.new_session(), coordinator, coordinator.config)
            for _ in range(n_sessions)
        )
        self._tickets = itertools.count()
        self._waiting: deque[int] = deque()

    @property
    def card(self) -> ModelCard:
        """The served model."""
        return self._coordinator.card

    @property
    def n_ctx(self) -> int:
        """Tokens that one session can hold."""
        return self._coordinator.n_ctx

    @property
    def n_waiting(self) -> int:
        """Requests that wait for a session."""
        return len(self._waiting)

    def health(self) -> Health:
        """Report readiness; never blocks."""
        return self._coordinator.health()

    @contextmanager
    def lease(
        self,
        tokens: Sequence[int],
        *,
        cancelled: Cancelled | None = None,
        waiting: Waiting | None = None,
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
        self, tokens: Sequence[int], cancelled: Cancelled | None, waiting: Waiting | None
    ) -> ClusterSession:
        told = 0
        with self._changed:
            ticket = next(self._tickets)
            self._waiting.append(ticket)
            try:
                while not (self._free and self._waiting[0] == ticket):
                    if cancelled is not None and cancelled():
                        raise CancelledError("the request was cancelled while it waited")
                    place = self._waiting.index(ticket) + 1
                    if waiting is not None and place != told:
                        waiting(place)
                    told = place
                    self._changed.wait(_POLL_SECONDS)
                session = choose_session(self._free, tokens)
                self._free.remove(session)
                return session
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
