"""A worker's threads: those that move bytes stay on their cores, the device stays where it was."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from ds4py.config import WorkerConfig
from ds4py.layer_range import LayerSpec
from ds4py.worker.worker import Worker
from tests.support.clusters import ANY_PORT, SOCKETS, span, wait_until
from tests.support.fake_runner import FakeRunner
from tests.support.peers import driver, entry, next_hop, take_work

FIRST, LAST = span("0-2"), span("3-5")

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs Linux and two cores",
)


@contextmanager
def started(core: int) -> Iterator[Worker]:
    """A worker of layers 0-2 whose network threads are kept on one core."""
    config = WorkerConfig(layers=LayerSpec(FIRST.start, FIRST.end), listen=ANY_PORT)
    worker = Worker(FakeRunner(FIRST), config, replace(SOCKETS, cores=(core,)))
    worker.start()
    try:
        yield worker
    finally:
        worker.close()


def cores_of(name: str) -> set[int]:
    """Cores of the new threads with a name that contains this."""
    found = [thread.native_id for thread in threading.enumerate() if name in thread.name]
    assert found, f"no thread is called {name}"
    return set().union(*(os.sched_getaffinity(thread) for thread in found if thread is not None))


def test_readers_senders_and_relays_are_kept_on_their_cores_and_the_device_is_not() -> None:
    everywhere = os.sched_getaffinity(0)
    core = max(everywhere)
    with (
        started(core) as worker,
        next_hop() as hop,
        driver(worker.address, entry(FIRST), entry(LAST, hop.address)) as d,
    ):
        d.ask([], [5])
        take_work(hop.accept())
        for name in ("data ", " send", " relay"):
            wait_until(lambda name=name: cores_of(name) == {core}, f"{name} has moved")  # type: ignore[misc]
        assert cores_of("device") == everywhere
    assert os.sched_getaffinity(0) == everywhere
