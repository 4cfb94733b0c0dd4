"""The route search against every permutation, and the words for a missing route."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4py.config import Address
from ds4py.coordinator.relay.planner import Demand, plan_route
from ds4py.coordinator.relay.workers.registry import LinkId, WorkerRecord
from ds4py.errors import RouteIncompleteError
from ds4py.layer_range import LayerRange

N_LAYERS = 5
LAST = N_LAYERS - 1


def worker(n: int, start: int, end: int, *, head: bool = False, hidden: bool = True):
    return WorkerRecord(
        link=LinkId(n),
        address=Address(f"10.0.0.{n}", 7000),
        layers=LayerRange(start, end, has_output=head),
        n_ctx=64,
        has_hidden=hidden,
    )


def demand(local_end: int | None = None, *, head: bool = False, n_layers: int = N_LAYERS) -> Demand:
    local = None if local_end is None else LayerRange(0, local_end, has_output=False)
    return Demand(local, n_layers, head)


def usable(w: WorkerRecord, *, local_head: bool) -> bool:
    """docs/spec/wire-protocol.md#route-selection rule 4, word by word."""
    if (w.layers.end < LAST or not w.layers.has_output) and not w.has_hidden:
        return False
    return not (w.layers.end >= LAST and not w.layers.has_output and not local_head)


def joins(route, first: int, *, local_head: bool) -> bool:
    at = first
    for w in route:
        if w.layers.start != at or not usable(w, local_head=local_head):
            return False
        at = w.layers.end + 1
    return at > LAST


def all_routes(workers, first: int, *, local_head: bool):
    return [
        route
        for length in range(1, len(workers) + 1)
        for route in itertools.permutations(workers, length)
        if joins(route, first, local_head=local_head)
    ]


def preferred(workers, first: int, *, local_head: bool):
    """The best route: at each hop output owners, then longer ranges, then older entries."""
    age = {w.link: n for n, w in enumerate(workers)}
    routes = all_routes(workers, first, local_head=local_head)
    rank = lambda w: (not w.layers.has_output, -w.layers.end, age[w.link])  # noqa: E731
    return min(routes, key=lambda route: [rank(w) for w in route], default=None)


def furthest(workers, first: int, *, local_head: bool) -> int:
    reached, grew = {first}, True
    while grew:
        ends = {
            w.layers.end + 1
            for w in workers
            if w.layers.start in reached
            and usable(w, local_head=local_head)
            and w.layers.end < LAST
        }
        grew = not ends <= reached
        reached |= ends
    return max(reached)


@st.composite
def fleets(draw):
    fleet = []
    for n in range(draw(st.integers(0, 5))):
        start = draw(st.integers(0, LAST))
        end = draw(st.integers(start, LAST))
        head = end == LAST and draw(st.booleans())
        fleet.append(worker(n + 1, start, end, head=head, hidden=draw(st.booleans())))
    return fleet


@given(fleets(), st.none() | st.integers(0, LAST), st.booleans())
@settings(max_examples=400)
def test_the_search_finds_the_preferred_route_exactly_if_there_is_one(
    fleet, local_end, local_head
) -> None:
    wanted = demand(local_end, head=local_head)
    if wanted.first_remote > LAST and local_head:
        assert plan_route(wanted, fleet) == ()
        return
    best = preferred(fleet, wanted.first_remote, local_head=local_head)
    if best is not None:
        assert plan_route(wanted, fleet) == best
        return
    with pytest.raises(RouteIncompleteError) as caught:
        plan_route(wanted, fleet)
    reached = furthest(fleet, wanted.first_remote, local_head=local_head)
    assert caught.value.first_missing == min(reached, LAST)


def test_equals_keep_the_oldest() -> None:
    """A newcomer must not capture the place of a worker that holds running sessions (Q11)."""
    old, new = worker(1, 0, LAST, head=True), worker(2, 0, LAST, head=True)
    assert plan_route(demand(), [old, new]) == (old,)
    assert plan_route(demand(), [new, old]) == (new,)


def test_the_search_backtracks_from_a_dead_end() -> None:
    long, short, rest = worker(1, 0, 3), worker(2, 0, 1), worker(3, 2, LAST, head=True)
    assert plan_route(demand(), [long, short, rest]) == (short, rest)


def test_overlaps_are_never_trimmed() -> None:
    fleet = [worker(1, 0, 2), worker(2, 2, LAST, head=True)]
    with pytest.raises(RouteIncompleteError, match=r"overlaps it, but ranges must join exactly"):
        plan_route(demand(), fleet)


def test_replicas_do_not_make_a_failing_search_slow() -> None:
    """Three of each, one layer missing at the end: 3^39 paths, if dead ends are forgotten."""
    fleet = [worker(n + 1, n // 3, n // 3) for n in range(3 * 39)]
    with pytest.raises(RouteIncompleteError) as caught:
        plan_route(demand(n_layers=40), fleet)
    assert caught.value.first_missing == 39


@pytest.mark.parametrize(
    ("local_end", "fleet", "missing"),
    [
        (None, [], "layers 0-4 and the output head"),
        (1, [], "layers 2-4 and the output head"),
        (3, [], "layer 4 and the output head"),
        (None, [worker(1, 2, LAST, head=True)], "layers 0-1"),
        (None, [worker(1, 1, LAST, head=True)], "layer 0"),
        (0, [worker(1, 1, 2)], "layers 3-4 and the output head"),
        (0, [worker(1, 1, 1), worker(2, 4, 4, head=True)], "layers 2-3"),
        (0, [worker(1, 1, LAST)], "the output head (worker 10.0.0.1:7000 (layers 1-4)"),
        (LAST, [], "the output head"),
    ],
)
def test_the_missing_layers_are_named(local_end, fleet, missing) -> None:
    with pytest.raises(RouteIncompleteError) as caught:
        plan_route(demand(local_end), fleet)
    assert caught.value.missing.startswith(missing)


def test_a_headless_end_is_used_only_if_the_coordinator_has_the_head() -> None:
    last = worker(1, 1, LAST)
    assert plan_route(demand(0, head=True), [last]) == (last,)
    with pytest.raises(RouteIncompleteError):
        plan_route(demand(0), [last])


def test_a_worker_that_returns_no_hidden_states_is_used_only_as_output() -> None:
    mute_middle, mute_last = (
        worker(1, 1, 2, hidden=False),
        worker(2, 3, LAST, head=True, hidden=False),
    )
    middle = worker(3, 1, 2)
    assert plan_route(demand(0), [mute_middle, mute_last, middle]) == (middle, mute_last)
    with pytest.raises(RouteIncompleteError):
        plan_route(demand(0), [mute_middle, mute_last])
    headless_mute = worker(4, 1, LAST, hidden=False)
    with pytest.raises(RouteIncompleteError):
        plan_route(demand(0, head=True), [headless_mute])
