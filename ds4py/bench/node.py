"""A node that a benchmark drives, with somebody who records what its stages do.

Owns: the order of opening one. Refuses to know: flags, terminals, what is measured. Invariant: when
it is handed over, the whole model is reachable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ds4py.config import CoordinatorConfig, EngineConfig, SocketConfig
from ds4py.contracts import Cancelled, Progress
from ds4py.errors import CancelledError
from ds4py.runtime import Node, join_cluster, open_listeners, open_node
from ds4py.tracing.events import TraceRecorder


@contextmanager
def ready_node(
    engine: EngineConfig,
    config: CoordinatorConfig,
    sockets: SocketConfig,
    *,
    loaded: Progress,
    cancelled: Cancelled,
    missing: Callable[[str], None],
) -> Iterator[tuple[Node, TraceRecorder]]:
    """Load what this process owns and wait for the workers of the rest.

    Args:
        engine: Model, device, context.
        config: Own layers and workers; with neither a route nor a listener this process owns all.
        sockets: Socket options.
        loaded: Told (bytes of weights loaded, bytes in all).
        cancelled: Polled while workers are waited for.
        missing: Told which layers nobody serves, whenever that changes.

    Raises:
        CancelledError: `cancelled` became true first.
        Ds4Error: The model or an address cannot be used.
    """
    recorder = TraceRecorder()
    with ExitStack() as stack:
        listeners = stack.enter_context(open_listeners(config, None, sockets))
        node = stack.enter_context(
            open_node(
                engine, config, sockets, whole=is_whole(config), progress=loaded, trace=recorder
            )
        )
        stack.enter_context(join_cluster(node, listeners))
        if not node.coordinator.wait_ready(cancelled, missing):
            raise CancelledError("interrupted while waiting for workers")
        yield node, recorder


def is_whole(config: CoordinatorConfig) -> bool:
    """Whether a coordinator has no workers and so must own every layer."""
    return not config.route and config.listen is None
