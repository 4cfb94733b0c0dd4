"""How often a call may start again, and why.

Owns: the replay budget. Refuses to know: routes, sessions, clocks. Invariant: a call replays at
most once because a stage refused, and at most once because a stage was lost, so it always ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ds4py.errors import (
    Ds4Error,
    PrefixMismatchError,
    RemoteWorkError,
    TransportError,
)


class Failure(Enum):
    """What a failed attempt means for the next one."""

    REFUSED = "refused"  # a stage answered with an error: replay from zero
    LOST = "lost"  # a stage is gone: find a route, then replay
    FINAL = "final"  # trying again can not help


def classify(error: Ds4Error, *, route_is_current: bool) -> Failure:
    """Decide what an error of an attempt means.

    A refusal by a stage whose next hop has died counts as a loss: only the registry knows.
    """
    if isinstance(error, TransportError):
        return Failure.LOST
    if isinstance(error, (RemoteWorkError, PrefixMismatchError)):
        return Failure.REFUSED if route_is_current else Failure.LOST
    return Failure.FINAL


@dataclass(slots=True)
class Recovery:
    """The replay budget of one call."""

    refused: int = 1
    lost: int = 1

    def allows(self, failure: Failure) -> bool:
        """Take one replay from the budget; False when it is used up."""
        if failure is Failure.REFUSED and self.refused:
            self.refused -= 1
            return True
        if failure is Failure.LOST and self.lost:
            self.lost -= 1
            return True
        return False
