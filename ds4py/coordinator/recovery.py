"""How often a call may start again, and why.

Owns: the replay budget, how a lack of room is told from another refusal. Refuses to know: routes,
sessions, clocks. Invariant: a call replays at most once because a stage refused (twice if it had
been told to copy), at most once because a stage was lost, and goes on at most twice because one was
full, so it always ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from ds4py.errors import (
    CacheFullError,
    CapacityError,
    Ds4Error,
    PrefixMismatchError,
    RemoteWorkError,
    TransportError,
)

_NUMBERS: Final = re.compile(
    r"(.*): needed (\d{1,20}), available (\d{1,20})", re.ASCII | re.DOTALL
).fullmatch


class Failure(Enum):
    """What a failed attempt means for the next one."""

    REFUSED = "refused"  # a stage answered with an error: replay from zero
    LOST = "lost"  # a stage is gone: find a route, then replay
    FULL = "full"  # a stage has no room: let others go, then go on
    FINAL = "final"  # trying again cannot help


def classify(error: Ds4Error, *, route_is_current: bool) -> Failure:
    """Decide what an error of an attempt means.

    A refusal by a stage whose next hop has died counts as a loss: only the registry knows.
    """
    if _is_full(error):
        return Failure.FULL
    if isinstance(error, TransportError):
        return Failure.LOST
    if isinstance(error, (RemoteWorkError, PrefixMismatchError)):
        return Failure.REFUSED if route_is_current else Failure.LOST
    return Failure.FINAL


def _is_full(error: Ds4Error) -> bool:
    """Whether other sessions stand in the way; of a hop that cannot tell, its words do."""
    if isinstance(error, RemoteWorkError):
        return error.cache_full or error.message.startswith(CacheFullError.PREFIX)
    return isinstance(error, CacheFullError)


def as_capacity(error: Ds4Error) -> Ds4Error:
    """Return a hop's lack of room as the `CapacityError` that it was there, if it can be read."""
    if isinstance(error, RemoteWorkError) and (told := _NUMBERS(error.message)) is not None:
        what, needed, available = told.groups()
        return CapacityError(what, needed=int(needed), available=int(available))
    return error


@dataclass(slots=True)
class Recovery:
    """The budget of further attempts of one call."""

    refused: int = 1
    lost: int = 1
    full: int = 2  # a stage may read only after the first that others were let go

    def allows(self, failure: Failure) -> bool:
        """Take one attempt from the budget; False when it is used up."""
        if failure is Failure.REFUSED and self.refused:
            self.refused -= 1
            return True
        if failure is Failure.LOST and self.lost:
            self.lost -= 1
            return True
        if failure is Failure.FULL and self.full:
            self.full -= 1
            return True
        return False
