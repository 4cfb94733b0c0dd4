"""The composition root: from configs to running processes.

Owns: which parts meet which. Refuses to know: flags, terminals, what any part does. Invariant: this
is the only module that imports both towers; only `cli` and tests import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from ds4py.cluster.coordinator import Coordinator
from ds4py.cluster.pool import ClusterBackend
from ds4py.cluster.port import CoordinatorPort
from ds4py.cluster.worker import Worker, data_listener
from ds4py.config import (
    Address,
    CoordinatorConfig,
    EngineConfig,
    ServerConfig,
    SocketConfig,
    WorkerConfig,
)
from ds4py.engine.open import open_runner, read_model
from ds4py.gguf.file import GgufFile
from ds4py.server.app import create_app
from ds4py.server.prompts import TextStack
from ds4py.server.serve import HttpServer
from ds4py.text.families import chat_for
from ds4py.text.tokenizer import load_tokenizer
from ds4py.transport.sockets import Listener, Socket, listen, local_address

LoadProgress = Callable[[int, int], None]
"""Called with (bytes of weights loaded, bytes of weights in the slice)."""

_CLOSE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Node:
    """A coordinator with everything that a request needs; closed by `open_node`."""

    coordinator: Coordinator
    backend: ClusterBackend
    text: TextStack


@contextmanager
def open_node(
    engine: EngineConfig,
    config: CoordinatorConfig,
    sockets: SocketConfig,
    *,
    whole: bool = False,
    progress: LoadProgress | None = None,
) -> Iterator[Node]:
    """Load a coordinator's own layers and its tokenizer; nothing is dialled yet.

    Args:
        engine: Model, device, context.
        config: Own layers and how workers are driven.
        sockets: Socket options.
        whole: Own every layer: a process without workers.
        progress: Told how far loading is.
    """
    card, n_ctx = read_model(engine)
    text = load_text(engine, n_ctx)
    local = None
    if whole:
        local = open_runner(engine, progress=progress)
    elif config.layers is not None:
        local = open_runner(engine, config.layers, want_head=True, progress=progress)
    coordinator = Coordinator(card, n_ctx, config, sockets, local=local)
    try:
        yield Node(coordinator, ClusterBackend(coordinator, config.n_sessions), text)
    finally:
        coordinator.close()


def load_text(engine: EngineConfig, n_ctx: int | None = None) -> TextStack:
    """Build the tokenizer and the chat format of a model file.

    Args:
        engine: Names the file.
        n_ctx: Context size in tokens; None takes what `engine` and the file say.
    """
    if n_ctx is None:
        _, n_ctx = read_model(engine)
    with GgufFile.open(engine.model) as file:
        tokenizer = load_tokenizer(file.metadata)
        return TextStack(tokenizer, chat_for(file.metadata, tokenizer, n_ctx))


@contextmanager
def open_worker(
    engine: EngineConfig,
    config: WorkerConfig,
    sockets: SocketConfig,
    *,
    progress: LoadProgress | None = None,
) -> Iterator[Worker]:
    """Load a worker's slice and serve it while the context lasts.

    The port is taken before anything is loaded, so that a busy one is told at once; whoever dials
    meanwhile waits.
    """
    with ExitStack() as stack:
        listener = data_listener(config, sockets)
        stack.callback(listener.close)
        runner = open_runner(engine, config.layers, progress=progress)
        stack.callback(runner.close)
        worker = Worker(runner, config, sockets, listener)
        stack.pop_all()  # the worker owns both now
        stack.callback(worker.close)
        worker.start()
        yield worker


@dataclass(frozen=True, slots=True)
class Doors:
    """Addresses that are taken before a model is loaded; closed by `open_doors`.

    Args:
        shared: Of workers, and of HTTP clients unless they have their own.
        http: Own listening sockets of HTTP; None shares.
    """

    shared: Listener | None
    http: Socket | None

    @property
    def http_addresses(self) -> list[Address]:
        """Where HTTP clients are served."""
        if self.http is not None:
            return [local_address(self.http)]
        return [] if self.shared is None else [self.shared.address]


@contextmanager
def open_doors(
    config: CoordinatorConfig, front: ServerConfig | None, sockets: SocketConfig
) -> Iterator[Doors]:
    """Take a coordinator's addresses.

    Args:
        config: Names the shared address, if there is one.
        front: Names HTTP's own, if there is one; None serves no HTTP.
        sockets: Socket options.

    Raises:
        ConfigError: An address can not be used.
    """
    with ExitStack() as stack:
        shared = http = None
        if config.listen is not None:
            shared = Listener(config.listen, sockets)
            stack.callback(shared.close)
        if front is not None and front.address is not None:
            http = listen(front.address)
            stack.callback(http.close)
        yield Doors(shared, http)


@contextmanager
def join_cluster(node: Node, doors: Doors, sockets: SocketConfig) -> Iterator[None]:
    """Dial the workers of a node and accept those that dial it; no HTTP."""
    with ExitStack() as stack:
        if doors.shared is not None:
            port = CoordinatorPort(doors.shared, node.coordinator, sockets, None)
            stack.callback(port.close)
            port.start()
        node.coordinator.start()
        yield


@contextmanager
def serve_http(
    node: Node, doors: Doors, config: ServerConfig, sockets: SocketConfig
) -> Iterator[None]:
    """Serve HTTP clients and workers of a node.

    Without an address of its own, HTTP shares the coordinator's port.
    """
    coordinator = node.coordinator
    app = create_app(node.backend, node.text, config, n_sessions=coordinator.config.n_sessions)
    server = HttpServer(app)
    with ExitStack() as stack:
        stack.callback(server.close, _CLOSE_SECONDS)
        port = None
        if doors.shared is not None:
            adopt = server.adopt if doors.http is None else None
            port = CoordinatorPort(doors.shared, coordinator, sockets, adopt)
            stack.callback(port.close)
        server.start([] if doors.http is None else [doors.http])
        if port is not None:
            port.start()
        coordinator.start()
        yield
