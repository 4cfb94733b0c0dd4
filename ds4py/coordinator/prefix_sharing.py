"""Common prefixes: what sessions share, and from which one a session may begin with a copy.

Owns: how long a common prefix is, when copying it pays, which session is copied. Refuses to know:
timelines, replay, how stages copy. Invariant: nothing is chosen that saves less than it costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from ds4py.contracts import SessionId
from ds4py.coordinator.pipeline import Pipeline

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

    def shares(self, wanted: Sequence[int], pipeline: Pipeline) -> int:
        """Return how many leading tokens of a prompt a pipeline's stages hold for it."""


class PrefixCopy(NamedTuple):
    """What to copy."""

    source: SessionId
    n_tokens: int


def choose_copy(
    pipeline: Pipeline, sources: Iterable[PrefixSource], wanted: Sequence[int], n_held: int
) -> PrefixCopy | None:
    """Return the longest prefix of a prompt that another session has, if copying it pays.

    Args:
        pipeline: Whose stages are to copy.
        sources: The other sessions.
        wanted: The prompt.
        n_held: Leading tokens of it that the session holds itself.
    """
    most = len(wanted) - _LEFT_OVER
    if not pipeline.can_fork or most - n_held < MIN_SAVED:
        return None
    shared = [(min(source.shares(wanted, pipeline), most), source) for source in sources]
    n_shared, source = max(shared, key=lambda pair: pair[0], default=(0, None))
    if source is None or n_shared - n_held < MIN_SAVED:
        return None
    return PrefixCopy(source.session_id, n_shared)
