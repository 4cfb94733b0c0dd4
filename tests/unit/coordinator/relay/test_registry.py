"""Who is registered, who replaces whom, and when a plan is out of date."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.config import Address
from ds4py.coordinator.relay.workers.registry import LinkId, Registry, WorkerRecord
from ds4py.layer_range import LayerRange


def record(link: int, host: str = "10.0.0.1", port: int = 7000, **fields) -> WorkerRecord:
    span = fields.pop("layers", LayerRange(0, 2))
    return WorkerRecord(
        link=LinkId(link), address=Address(host, port), layers=span, n_ctx=64, **fields
    )


def test_records_stand_in_the_order_of_registration() -> None:
    registry = Registry()
    first, second = record(1), record(2, "10.0.0.2")
    assert registry.add(first) == []
    assert registry.add(second) == []
    assert registry.records == (first, second)


@pytest.mark.parametrize(
    ("change", "replaces"),
    [
        ({}, True),
        ({"address": Address("10.0.0.1", 7001)}, True),  # another port: the same one come back
        ({"address": Address("10.0.0.2", 7000)}, False),
        ({"layers": LayerRange(0, 1)}, False),
        ({"layers": LayerRange(1, 2)}, False),
        ({"layers": LayerRange(0, 2, has_output=True)}, False),
        ({"dialled": True}, True),  # the same data port: the same process
        ({"dialled": True, "address": Address("10.0.0.1", 7001)}, False),
        ({"dialled": True, "layers": LayerRange(3, 5)}, True),
    ],
)
def test_a_newcomer_replaces_the_same_worker_only(change, replaces) -> None:
    registry = Registry()
    old = record(1)
    new = replace(record(2), **change)
    registry.add(old)
    assert registry.add(new) == ([old] if replaces else [])
    assert registry.records == ((new,) if replaces else (old, new))


def test_two_dialled_workers_of_one_host_and_range_stand_side_by_side() -> None:
    registry = Registry()
    registry.add(record(1, port=7000, dialled=True))
    assert registry.add(record(2, port=7001, dialled=True)) == []


def test_removing_a_replaced_link_changes_nothing() -> None:
    """Its connection ends later than its entry."""
    registry = Registry()
    registry.add(record(1))
    registry.add(record(2))
    generation = registry.generation
    assert registry.remove(LinkId(1)) is None
    assert registry.generation == generation
    assert [r.link for r in registry.records] == [2]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=20))
def test_the_generation_grows_exactly_with_the_changes(steps) -> None:
    registry, link = Registry(), 0
    for add, which in steps:
        before, generation = registry.records, registry.generation
        if add:
            link += 1
            registry.add(record(link, f"10.0.0.{which}"))
        else:
            registry.remove(LinkId(which))
        assert (registry.records != before) == (registry.generation != generation)
        assert registry.generation >= generation
        assert len({r.link for r in registry.records}) == len(registry.records)


def test_the_name_tells_address_and_layers() -> None:
    worker = record(1, layers=LayerRange(3, 5, has_output=True))
    assert worker.name == "worker 10.0.0.1:7000 (layers 3-5 and the output head)"
