"""The rows of the table: who coordinates, who works, over how many hops, how wide, doing what.

Owns: their names, their order, the cuts. Refuses to know: processes, texts. Invariant: a row's name
says everything about it, and no two are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import Final

from ds4py.activations import WIDTHS
from ds4py.layer_range import balanced_cuts

C: Final = "c"
PY: Final = "py"
KINDS: Final = (C, PY)
EXACT: Final = 32
HOPS: Final = (1, 2, 3)
SHORT: Final = "short"
CHUNKED: Final = "chunked"
RESTART: Final = "restart"
CASES: Final = (SHORT, CHUNKED, RESTART)


@dataclass(frozen=True, slots=True)
class Route:
    """A coordinator with the first layers, and workers with the others.

    Args:
        coordinator: `C` or `PY`.
        workers: The kind of all of them.
        n_hops: Their number; 0 is a coordinator with all layers.
        bits: Per value between machines.
    """

    coordinator: str
    workers: str
    n_hops: int
    bits: int

    @property
    def name(self) -> str:
        """Such as `c-py-2-16`."""
        return f"{self.coordinator}-{self.workers}-{self.n_hops}-{self.bits}"

    @property
    def is_ours(self) -> bool:
        """Whether all of it is ds4py."""
        return {self.coordinator, self.workers} == {PY}

    @property
    def is_exact(self) -> bool:
        """Whether nothing is rounded between machines."""
        return self.bits == EXACT

    def row(self, case: str) -> str:
        """Return the name of one of its rows, such as `c-py-2-16-short`."""
        return f"{self.name}-{case}"


def alone(kind: str) -> Route:
    """Return the route without workers that the others are compared with."""
    return Route(kind, kind, 0, EXACT)


def routes() -> list[Route]:
    """Return all routes, in the order of the table."""
    return [Route(*parts) for parts in product(KINDS, KINDS, HOPS, WIDTHS)]


def chosen(patterns: Sequence[str]) -> Iterator[tuple[Route, list[str]]]:
    """Yield routes with those of their cases whose row matches a pattern such as `py-*-2-*`."""
    for route in routes():
        cases = [
            case
            for case in CASES
            if any(fnmatchcase(route.row(case), pattern) for pattern in patterns)
        ]
        if cases:
            yield route, cases


def cuts(n_layers: int, n_hops: int) -> list[str]:
    """Return the layers of the coordinator and of each worker, as ds4 spells them.

    Raises:
        ConfigError: More machines than layers.
    """
    ranges = balanced_cuts([1] * n_layers, n_hops + 1)
    return [f"{layers.start}:{'output' if layers.has_output else layers.end}" for layers in ranges]
