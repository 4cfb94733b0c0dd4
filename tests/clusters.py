"""Whole clusters in one process: real sockets on loopback, fake or real slices."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ds4py.config import (
    Address,
    CoordinatorConfig,
    PrefillTuning,
    RouteEntry,
    SocketConfig,
    WorkerConfig,
    WorkerTuning,
)
from ds4py.contracts import ModelRunner
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.relay.workers.listener import coordinator_port
from ds4py.coordinator.relay.workers.registry import WorkerRecord
from ds4py.coordinator.session_pool import SessionPool
from ds4py.layer_range import LayerRange, LayerSpec
from ds4py.transport.acceptor import Acceptor
from ds4py.transport.security import PLAIN, Security
from ds4py.transport.sockets import Listener
from ds4py.worker.worker import Worker
from tests.fake_runner import FakeRunner, card

DEADLINE = 20.0
SOCKETS = SocketConfig(buffer_mb=0, send_timeout=10)
ANY_PORT = Address("127.0.0.1", 0)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition with a deadline."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.005)


def span(text: str, n_layers: int = 6) -> LayerRange:
    """Read a layer range of the fake model."""
    return LayerSpec.parse(text).resolve(n_layers)


def start_worker(
    runner: ModelRunner,
    *,
    listen: Address = ANY_PORT,
    coordinator: Address | None = None,
    tuning: WorkerTuning | None = None,
    speaks_extensions: bool = True,
    security: Security = PLAIN,
) -> Worker:
    """Start a worker; without extensions it answers a handshake as a C worker does."""
    config = WorkerConfig(
        layers=LayerSpec(runner.layers.start, runner.layers.end),
        listen=listen,
        coordinator=coordinator,
        tuning=tuning or WorkerTuning(),
    )
    worker = Worker(runner, config, SOCKETS, security=security)
    if not speaks_extensions:
        for frame_type in [t for t in worker._limits if t >= 256]:
            del worker._limits[frame_type]
    worker.start()
    return worker


def registered(coordinator: Coordinator) -> tuple[WorkerRecord, ...]:
    """Return who has introduced itself, oldest first."""
    return coordinator.workers.records


@dataclass
class Cluster:
    """A coordinator, its port, its workers, and what these compute with."""

    coordinator: Coordinator
    backend: SessionPool
    port: Acceptor
    workers: list[Worker] = field(default_factory=list)
    runners: list[FakeRunner] = field(default_factory=list)

    def wait_ready(self) -> None:
        wait_until(lambda: self.coordinator.health().ready, "the route is complete")


@contextmanager
def cluster(
    cuts: Sequence[str],
    *,
    local: str | None = None,
    dial_in: bool = False,
    config: CoordinatorConfig | None = None,
    n_sessions: int = 2,
    n_ctx: int = 64,
    head: bool = False,
    can_rewind: bool = True,
    before: Callable[..., None] = lambda work: None,
    tuning: WorkerTuning | None = None,
    security: Security = PLAIN,
    **prefill: object,
) -> Iterator[Cluster]:
    """Run a cluster of fake slices.

    Args:
        cuts: Layer ranges of the workers.
        local: The coordinator's own layers.
        dial_in: Workers dial the coordinator instead of being dialled.
        head: The coordinator's slice holds the output head too.
        tuning: Queues of the workers.
        security: Of every connection.
        prefill: Fields of `PrefillTuning`.
    """
    make = lambda text, **more: FakeRunner(  # noqa: E731
        span(text), n_ctx=n_ctx, can_rewind=can_rewind, before=before, **more
    )
    runners = [make(cut) for cut in cuts]
    start = functools.partial(start_worker, tuning=tuning, security=security)
    workers = [] if dial_in else [start(runner) for runner in runners]
    config = replace(
        config or CoordinatorConfig(rejoin_timeout=DEADLINE, result_timeout=DEADLINE),
        route=tuple(RouteEntry(Address("127.0.0.1", w.address.port)) for w in workers),
        prefill=PrefillTuning(**prefill),  # type: ignore[arg-type]
    )
    coordinator = Coordinator(
        card(),
        n_ctx,
        config,
        SOCKETS,
        local=None if local is None else make(local, has_head=head),
        security=security,
    )
    port = coordinator_port(Listener(ANY_PORT, SOCKETS), coordinator)
    port.start()
    coordinator.start()
    if dial_in:
        workers = [start(runner, coordinator=port.address) for runner in runners]
    built = Cluster(coordinator, SessionPool(coordinator, n_sessions), port, workers, runners)
    try:
        yield built
    finally:
        port.close()
        coordinator.close()
        for worker in built.workers:
            worker.close()
