"""One prompt over any cut of a model: a coordinator and its workers over loopback, in one process.

Owns: building such a cluster, and what a model says in it. Invariant: float32 and one thread, so
that two cuts can be compared to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np

from ds4py.activations import F32
from ds4py.config import CoordinatorConfig, EngineConfig, PrefillTuning, WorkerConfig
from ds4py.contracts import SessionId
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.session import ClusterSession
from ds4py.engine.open import open_runner, read_model
from ds4py.layer_range import LayerSpec
from ds4py.worker.worker import Worker
from tests.e2e.support import ANY_PORT, SOCKETS, route
from tests.support.processes import wait_for


@dataclass(frozen=True)
class Said:
    """What a model says after a prompt.

    Args:
        logits: `f32[V]` after the prompt.
        tokens: Greedy continuation.
    """

    logits: F32
    tokens: list[int]


def say(coordinator: Coordinator, prompt: Sequence[int], chunk: int | None, n_tokens: int) -> Said:
    """Evaluate the prompt in chunks and continue greedily, in a session of its own."""
    config = replace(coordinator.config, prefill=PrefillTuning(chunk=chunk))
    session = ClusterSession(SessionId(1 + (chunk or 0)), coordinator, config)
    logits = session.sync(prompt).logits
    said = Said(logits.copy(), [])
    for _ in range(n_tokens):
        said.tokens.append(int(np.argmax(logits)))
        logits = session.eval(said.tokens[-1])
    return said


@contextmanager
def coordinator_of(
    model: EngineConfig, local: str | None, cuts: Sequence[str], *, bits: int = 32
) -> Iterator[Coordinator]:
    """A coordinator with own layers or none, and its workers."""
    card, n_ctx = read_model(model)
    with ExitStack() as stack:
        workers = []
        for layers in map(LayerSpec.parse, cuts):
            config = WorkerConfig(layers=layers, listen=ANY_PORT)
            workers.append(Worker(open_runner(model, layers), config, SOCKETS))
            workers[-1].start()
            stack.callback(workers[-1].close)
        own = None
        if local is not None:
            own = open_runner(model, LayerSpec.parse(local), want_head=True)
        config_ = CoordinatorConfig(route=route(*workers), result_timeout=60, activation_bits=bits)
        built = Coordinator(card, n_ctx, config_, SOCKETS, local=own)
        stack.callback(built.close)
        built.start()
        wait_for(lambda: built.health().ready, "the route is complete")
        yield built
