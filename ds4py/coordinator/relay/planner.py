"""Choose a route through the registered workers.

Owns: the search of docs/spec/wire-protocol.md#route-selection and the words that explain why there
is no route. Refuses to know: connections, sessions. Invariant: a returned route is contiguous from
the layer after the coordinator's own to the last one, and somebody on it can run the output head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds4py.coordinator.relay.workers.registry import WorkerRecord
from ds4py.errors import RouteIncompleteError
from ds4py.layer_range import LayerRange, describe_missing


@dataclass(frozen=True, slots=True)
class Demand:
    """What a route has to cover.

    Args:
        local: The coordinator's own layers, from 0; None if it owns none.
        n_layers: Layers of the model.
        local_head: Whether the coordinator can run the output head.
    """

    local: LayerRange | None
    n_layers: int
    local_head: bool

    @property
    def first_remote(self) -> int:
        """The first layer that a worker has to own."""
        return 0 if self.local is None else self.local.end + 1


def plan_route(demand: Demand, workers: Sequence[WorkerRecord]) -> tuple[WorkerRecord, ...]:
    """Return the hops in layer order; empty if the coordinator owns everything.

    At one start layer, output owners come first, then longer ranges; equals keep their order, so
    that a newcomer never captures the place of a worker that holds running sessions.

    Raises:
        RouteIncompleteError: No combination covers the model; names what is missing.
    """
    last = demand.n_layers - 1
    if demand.first_remote > last and demand.local_head:
        return ()
    order = sorted(workers, key=lambda w: (w.layers.start, not w.layers.has_output, -w.layers.end))
    furthest = demand.first_remote
    dead: set[int] = set()  # without it, replicas make the search exponential

    def usable(worker: WorkerRecord) -> bool:
        if worker.layers.has_output:
            return True
        return worker.has_hidden and (worker.layers.end < last or demand.local_head)

    def search(start: int) -> tuple[WorkerRecord, ...] | None:
        nonlocal furthest
        furthest = max(furthest, start)
        if start in dead:
            return None
        for worker in order:
            if worker.layers.start != start or not usable(worker):
                continue
            if worker.layers.end >= last:
                return (worker,)
            rest = search(worker.layers.end + 1)
            if rest is not None:
                return (worker, *rest)
        dead.add(start)
        return None

    route = search(demand.first_remote)
    if route is None:
        raise RouteIncompleteError(
            _explain(demand, workers, furthest), first_missing=min(furthest, last)
        )
    return route


def _explain(demand: Demand, workers: Sequence[WorkerRecord], first: int) -> str:
    """Say what is missing from `first` on, and which range overlaps or stands behind the gap."""
    for worker in workers:
        if worker.layers.start < first <= worker.layers.end:
            return (
                f"{describe_missing(first, demand.n_layers, _next_start(workers, first))} "
                f"from layer {first} on ({worker.name} overlaps it, but ranges must join exactly)"
            )
    headless = [
        w for w in workers if w.layers.start == first and w.layers.end == demand.n_layers - 1
    ]
    if headless and not demand.local_head:
        return f"the output head ({headless[0].name} was started without it)"
    return describe_missing(first, demand.n_layers, _next_start(workers, first))


def _next_start(workers: Sequence[WorkerRecord], first: int) -> int | None:
    """Return where the next known range begins, if the gap before it ends there."""
    later = [w.layers.start for w in workers if w.layers.start > first]
    return min(later, default=None)
