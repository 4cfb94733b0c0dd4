"""Common prefixes: what sessions share, and how one begins with a copy of another's cache.

Owns: how long a common prefix is, when copying it pays, the order of the copies. Refuses to know:
timelines, replay, who else has sessions. Invariant: nothing is copied unless it is known to stand
for the wanted tokens: every stage, our own one too, compares their prefix hash.

A stage that cannot copy does nothing. Then it refuses the span that comes next, and the session is
evaluated from its start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from ds4py.contracts import SessionId
from ds4py.coordinator.relay.route import Route
from ds4py.errors import CapacityError, ModelError, PrefixMismatchError
from ds4py.stage.executor import wait_for
from ds4py.stage.stage import Stage
from ds4py.wire.extensions import FORK, Fork
from ds4py.wire.prefix_hash import prefix_hash

MIN_SAVED: Final = 64
"""Tokens that a copy must save: below, evaluating them costs hardly more than asking for it."""

_LEFT_OVER: Final = 2  # a run of a single token may overtake the notice, on a connection of its own
_BLOCK: Final = 256


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens are equal."""
    n = min(len(a), len(b))
    for start in range(0, n, _BLOCK):  # whole blocks are compared at C's speed
        one, other = a[start : start + _BLOCK], b[start : start + _BLOCK]
        if list(one) != list(other):
            pairs = zip(one, other, strict=False)
            return start + next((i for i, (x, y) in enumerate(pairs) if x != y), n - start)
    return n


class PrefixSource(Protocol):
    """Another session, as far as it is of use here; every method may be called on any thread."""

    @property
    def session_id(self) -> SessionId:
        """Its name on every stage."""

    def shares(self, wanted: Sequence[int], route: Route) -> int:
        """Return how many leading tokens of a prompt the stages of a route hold for it."""


class PrefixSharing:
    """Lets one session begin as another one of the same process did.

    Args:
        session: The one that begins.
        timeout: Seconds that the own device may take.
    """

    def __init__(self, session: SessionId, timeout: float):
        self._session = session
        self._timeout = timeout

    def copy_prefix(
        self, route: Route, sources: Iterable[PrefixSource], wanted: Sequence[int], n_held: int
    ) -> int:
        """Have every stage copy the longest prefix that another session has, if it pays.

        Args:
            route: The stages.
            sources: The other sessions.
            wanted: The prompt.
            n_held: Leading tokens of it that the session holds itself.

        Returns:
            The tokens that stages were told to copy, unless they hold other ones; 0 if none were.
        """
        most = len(wanted) - _LEFT_OVER
        if not route.can_fork or most - n_held < MIN_SAVED:
            return 0
        shared = [(min(source.shares(wanted, route), most), source) for source in sources]
        n_shared, source = max(shared, key=lambda pair: pair[0], default=(0, None))
        if source is None or n_shared - n_held < MIN_SAVED:
            return 0
        prefix = wanted[:n_shared]
        fork = Fork(source.session_id, self._session, n_shared, prefix_hash(prefix))
        if route.local is not None and not self._copy_own(route.local, source.session_id, fork):
            return 0
        route.tell(route.hops, FORK, fork)
        return n_shared

    def _copy_own(self, local: Stage, source: SessionId, fork: Fork) -> bool:
        """Copy the cache of the coordinator's own layers; False if that was not possible."""
        copy = local.copy_prefix(source, self._session, fork.n_tokens, fork.prefix_hash)
        try:
            wait_for(copy, self._timeout)
        except (PrefixMismatchError, CapacityError, ModelError):
            return False
        return True
