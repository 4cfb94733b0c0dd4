"""The live party: a real worker or coordinator of ds4py with the real tiny model, on loopback.

Owns: starting, stopping and driving it. Refuses to know: recordings, what is compared. Invariant:
everything that waits has a deadline.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Final

from ds4py.activations import F32
from ds4py.config import (
    Address,
    CoordinatorConfig,
    EngineConfig,
    PrefillTuning,
    SocketConfig,
    WorkerConfig,
)
from ds4py.contracts import Session
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.relay.workers.listener import coordinator_port
from ds4py.coordinator.session_pool import SessionPool
from ds4py.engine.open import open_runner, read_model
from ds4py.layer_range import LayerSpec
from ds4py.transport.sockets import Listener
from ds4py.worker.worker import Worker
from interop.replay.recording import RAW_CAP, Call, Scenario
from tests import golden

DEADLINE: Final = 20.0
"""Seconds for anything that should happen at once."""

SOCKETS: Final = SocketConfig(buffer_mb=0, send_timeout=DEADLINE)
ANY_PORT: Final = Address("127.0.0.1", 0)


def _engine(scenario: Scenario, n_ctx: int) -> EngineConfig:
    return EngineConfig(
        model=golden.path(scenario.model),
        precision="f32",
        threads=1,
        n_ctx=n_ctx,
        n_slots=2,
        raw_cap=RAW_CAP,
    )


class LiveWorker:
    """A worker that dials its coordinator.

    Args:
        scenario: Names the model and the layers.
        party: "worker A" or "worker B".
        coordinator: Whom it dials.
    """

    def __init__(self, scenario: Scenario, party: str, coordinator: Address):
        layers = LayerSpec.parse(scenario.worker_layers[party])
        self._engine = _engine(scenario, scenario.worker_ctx)
        self._config = WorkerConfig(layers=layers, listen=ANY_PORT, coordinator=coordinator)
        self._worker: Worker | None = None
        self.address = ANY_PORT

    def start(self) -> None:
        """Load the slice, take a port, dial."""
        runner = open_runner(self._engine, self._config.layers)
        self._worker = Worker(runner, self._config, SOCKETS)
        self.address = self._worker.address
        self._worker.start()

    def stop(self) -> None:
        """End as a process does; idempotent."""
        if self._worker is not None:
            self._worker.close()


class LiveCoordinator:
    """A coordinator with its own layers and one session.

    Args:
        scenario: Names the model, the layers, chunks and widths.
    """

    def __init__(self, scenario: Scenario):
        self._engine = _engine(scenario, scenario.n_ctx)
        self._config = CoordinatorConfig(
            layers=LayerSpec.parse(scenario.local_layers),
            activation_bits=scenario.bits,
            prefill=PrefillTuning(chunk=scenario.chunk),
            rejoin_timeout=DEADLINE,
            result_timeout=DEADLINE,
        )
        self._saved = scenario.saved
        self._stack = ExitStack()
        self._coordinator: Coordinator | None = None
        self._session: Session | None = None
        self.address = ANY_PORT

    def start(self) -> None:
        """Load the own layers and listen."""
        card, n_ctx = read_model(self._engine)
        runner = open_runner(self._engine, self._config.layers, want_head=True)
        coordinator = Coordinator(card, n_ctx, self._config, SOCKETS, local=runner)
        self._stack.callback(coordinator.close)
        port = coordinator_port(Listener(ANY_PORT, SOCKETS), coordinator)
        self._stack.callback(port.close)
        port.start()
        coordinator.start()
        self.address = port.address
        self._coordinator = coordinator
        self._session = self._stack.enter_context(SessionPool(coordinator, 1).lease(()))

    def stop(self) -> None:
        """End as a process does; idempotent."""
        self._stack.close()

    def perform(self, call: Call) -> F32 | bytes:
        """Do what the user asked for; return the saved session, or the logits `f32[V]`."""
        session = self._session
        assert session is not None
        match call.verb:
            case "sync":
                return session.sync(call.tokens).logits
            case "eval":
                return session.eval(call.tokens[-1])
            case "save":
                return b"".join(session.save())
            case "load":
                session.load(self._saved)
                return session.sync(call.tokens).logits  # costs nothing

    def n_workers(self, expected: int) -> int:
        """Return the number of registered workers, once it is as expected or time is up."""
        assert self._coordinator is not None
        deadline = time.monotonic() + DEADLINE
        while True:
            # the first stage is the coordinator itself
            n = len(self._coordinator.health().stages) - 1
            if n == expected or time.monotonic() >= deadline:
                return n
            time.sleep(0.002)
