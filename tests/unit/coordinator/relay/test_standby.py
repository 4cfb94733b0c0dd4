"""Stages that fall silent, stages that only take long, and those that stand by for others.

A stage that "stops" here holds its device and says nothing any more: as a stopped process does,
whose kernel still takes what others send.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from ds4py.config import (
    Address,
    CoordinatorConfig,
    PrefillTuning,
    RouteEntry,
    WorkerConfig,
    WorkerTuning,
)
from ds4py.contracts import ForwardRequest
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.relay.workers.listener import coordinator_port
from ds4py.coordinator.session_pool import SessionPool
from ds4py.layer_range import LayerSpec
from ds4py.transport.connector import Connector
from ds4py.transport.sockets import Listener
from ds4py.wire.extensions import Alive
from ds4py.wire.frames import ExtType, coordinator_limits
from ds4py.worker.worker import Worker
from tests.clusters import ANY_PORT, DEADLINE, SOCKETS, span, wait_until
from tests.fake_runner import N_VOCAB, WIDTH, FakeRunner, card, reference_logits
from tests.peers import N_CTX, Driver, entry
from tests.sockets import Background
from tests.unit.peer.extended import greet, read_to_close

PROMPT = [5, 80, 3, 3, 41, 9, 77, 12, 1]
ALIVE = 0.4


@dataclass
class Stoppable:
    """A worker whose process may be stopped."""

    layers: str
    listen: Address = ANY_PORT
    coordinator: Address | None = None
    running: threading.Event = field(default_factory=threading.Event)
    tuning: WorkerTuning = field(default_factory=WorkerTuning)

    def start(self) -> Stoppable:
        self.running.set()
        own = span(self.layers)
        self.runner = FakeRunner(own, before=self._before)
        config = WorkerConfig(
            layers=LayerSpec(own.start, own.end),
            listen=self.listen,
            coordinator=self.coordinator,
            tuning=self.tuning,
        )
        self.worker = Worker(self.runner, config, SOCKETS)
        self.worker.start()
        self.address = self.worker.address
        return self

    def _before(self, work: ForwardRequest) -> None:
        assert self.running.wait(20)

    @property
    def positions(self) -> list[int]:
        """Where the spans began that it has evaluated."""
        return [pos0 for pos0, _ in self.runner.evaluated]

    def stop(self) -> None:
        """Fall silent, with every connection standing."""
        self.running.clear()
        for upstream in list(self.worker._upstreams):
            if upstream._heartbeat is not None:
                upstream._heartbeat.stop()

    def close(self) -> None:
        self.running.set()
        self.worker.close()


@dataclass
class Scene:
    """A coordinator and workers that come one after the other."""

    dial_in: bool
    workers: list[Stoppable] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coordinator: Coordinator | None = None

    def begin(self, *cuts: str, chunk: int = 2) -> None:
        """Start the coordinator with all workers that will ever be dialled."""
        if not self.dial_in:
            self.workers += [Stoppable(cut).start() for cut in cuts]
        config = CoordinatorConfig(
            route=tuple(RouteEntry(Address("127.0.0.1", w.address.port)) for w in self.workers),
            alive_timeout=ALIVE,
            rejoin_timeout=DEADLINE,
            result_timeout=DEADLINE,
            prefill=PrefillTuning(chunk=chunk),
        )
        self.coordinator = Coordinator(card(), 64, config, SOCKETS)
        self.port = coordinator_port(Listener(ANY_PORT, SOCKETS), self.coordinator)
        self.port.start()
        self.backend = SessionPool(self.coordinator, 1)
        if self.dial_in:
            for n, cut in enumerate(cuts):
                self.workers.append(Stoppable(cut, coordinator=self.port.address).start())
                self.registered(n + 1)
        else:
            for n, dialler in enumerate(self.coordinator._dialers):
                dialler.start()
                self.registered(n + 1)

    def registered(self, n: int) -> None:
        wait_until(lambda: self.n_registered == n, f"{n} workers are registered")

    @property
    def n_registered(self) -> int:
        assert self.coordinator is not None
        return len(self.coordinator.workers.registry.records)

    def links(self) -> set[int]:
        assert self.coordinator is not None
        return set(self.coordinator.workers.links)


@contextmanager
def scene(*, dial_in: bool) -> Iterator[Scene]:
    s = Scene(dial_in)
    try:
        yield s
    finally:
        if s.coordinator is not None:
            s.port.close()
            s.coordinator.close()
        for w in s.workers:
            w.close()


@pytest.mark.parametrize("dial_in", [False, True])
def test_a_stopped_worker_gives_way_to_one_that_stands_by(dial_in) -> None:
    """The first to come serves; the other takes over, and keeps the route when it is back."""
    with scene(dial_in=dial_in) as s:
        s.begin("0-5", "0-5")
        first, second = s.workers
        with s.backend.lease(PROMPT) as session:
            session.sync(PROMPT)
            assert not second.positions
            first.stop()
            np.testing.assert_array_equal(session.eval(7), reference_logits([*PROMPT, 7]))
            assert second.positions[0] == 0  # it was replayed there
            first.running.set()
            s.registered(2)  # the first one is back, as the newer one now
            n_before = len(first.positions)
            line = [*PROMPT, 7]
            for token in (8, 9):
                line.append(token)
                np.testing.assert_array_equal(session.eval(token), reference_logits(line))
            assert len(first.positions) == n_before
            assert second.positions[-2:] == [10, 11]
            second.stop()
            line.append(1)
            np.testing.assert_array_equal(session.eval(1), reference_logits(line))


@pytest.mark.parametrize("dial_in", [False, True])
def test_a_stopped_stage_behind_another_is_replaced_and_the_other_is_kept(dial_in) -> None:
    """The first stage is told, and answers what it has sent to the stopped one; in the middle of
    a prefill whose spans wait in both of them."""
    with scene(dial_in=dial_in) as s:
        s.begin("0-2", "3-5", "3-5")
        front, first, second = s.workers
        (front_link, *_) = sorted(s.links())
        with s.backend.lease(PROMPT) as session:
            session.sync(PROMPT[:1])
            first.stop()
            result = session.sync(PROMPT)
            np.testing.assert_array_equal(result.logits, reference_logits(PROMPT))
            assert second.positions[0] == 0
            assert front_link in s.links()  # nobody else was forgotten
            assert len(front.runner._rows) == 1
            np.testing.assert_array_equal(session.eval(7), reference_logits([*PROMPT, 7]))


def test_a_stopped_worker_without_a_replacement_is_waited_for() -> None:
    with scene(dial_in=True) as s:
        s.begin("0-2", "3-5")
        _, last = s.workers
        with s.backend.lease(PROMPT) as session:
            session.sync(PROMPT)
            last.stop()
            asking = Background(lambda: session.eval(7))
            wait_until(lambda: s.n_registered == 1, "it is missed")
            last.running.set()
            np.testing.assert_array_equal(asking.result(), reference_logits([*PROMPT, 7]))


@pytest.mark.parametrize("tuning", [WorkerTuning(), WorkerTuning(prefetch=False)])
def test_a_worker_that_takes_long_is_not_lost_even_if_it_reads_nothing_meanwhile(tuning) -> None:
    """Its queue is full, so it does not listen to its coordinator, nor blame it for silence."""
    with scene(dial_in=True) as s:
        s.begin()
        slow = Stoppable("0-5", coordinator=s.port.address, tuning=tuning).start()
        s.workers.append(slow)
        s.registered(1)
        links = s.links()
        with s.backend.lease(PROMPT) as session:
            slow.running.clear()
            asking = Background(lambda: session.sync(PROMPT))
            threading.Event().wait(4 * ALIVE)
            assert s.links() == links
            slow.running.set()
            np.testing.assert_array_equal(asking.result().logits, reference_logits(PROMPT))
            assert s.links() == links
            assert slow.positions == [0, 2, 4, 6, 8]


def test_an_idle_route_is_not_lost() -> None:
    with scene(dial_in=False) as s:
        s.begin("0-2", "3-5")
        links = s.links()
        threading.Event().wait(4 * ALIVE)
        assert s.links() == links


def test_a_dead_coordinator_costs_a_worker_its_connection_and_nothing_else() -> None:
    worker = Stoppable("0-5").start()
    limits = coordinator_limits(N_VOCAB, WIDTH, N_CTX)
    connection = Connector(SOCKETS).connect(worker.address, limits)
    greet(connection, alive_timeout=ALIVE)
    connection.send(Alive().encode())
    assert Background(lambda: read_to_close(connection)).result()
    connection.close()
    wait_until(lambda: not worker.worker._upstreams, "it is given up")
    again = Connector(SOCKETS).connect(worker.address, limits)
    Driver(again, [entry(span("0-5"))]).check([], PROMPT)
    again.close()
    worker.close()


def test_a_worker_says_that_it_is_alive_while_its_device_is_busy() -> None:
    worker = Stoppable("0-5").start()
    limits = coordinator_limits(N_VOCAB, WIDTH, N_CTX)
    connection = Connector(SOCKETS).connect(worker.address, limits)
    greet(connection, alive_timeout=ALIVE)
    worker.running.clear()
    driver = Driver(connection, [entry(span("0-5"))])
    for n in range(5):  # more than it takes
        driver.ask([1] * 2 * n, [1, 1])
    for _ in range(6):
        frame = Background(connection.receive).result()
        assert frame is not None
        assert frame.type == ExtType.ALIVE
    worker.running.set()
    connection.close()
    worker.close()
