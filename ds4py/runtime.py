"""The composition root: from configs to running processes.

Owns: which parts meet which. Refuses to know: flags, terminals, what any part does. Invariant: this
is the only module that imports both towers; only `cli` and tests import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from ds4py.cluster.coordinator import Coordinator
from ds4py.cluster.pool import ClusterBackend
from ds4py.cluster.port import CoordinatorPort
from ds4py.cluster.worker import Worker
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
from ds4py.text.chat import ChatTemplate
from ds4py.text.tokenizer import load_tokenizer
from ds4py.transport.sockets import Socket, listen, local_address

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
    text = load_text(engine)
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


def load_text(engine: EngineConfig) -> TextStack:
    """Build the tokenizer and the chat template of a model file."""
    with GgufFile.open(engine.model) as file:
        tokenizer = load_tokenizer(file.metadata)
        return TextStack(tokenizer, ChatTemplate.from_metadata(file.metadata, tokenizer))


@contextmanager
def open_worker(
    engine: EngineConfig,
    config: WorkerConfig,
    sockets: SocketConfig,
    *,
    progress: LoadProgress | None = None,
) -> Iterator[Worker]:
    """Load a worker's slice and serve it while the context lasts."""
    runner = open_runner(engine, config.layers, progress=progress)
    try:
        worker = Worker(runner, config, sockets)
    except BaseException:
        runner.close()
        raise
    try:
        worker.start()
        yield worker
    finally:
        worker.close()


@contextmanager
def join_cluster(node: Node, sockets: SocketConfig) -> Iterator[CoordinatorPort | None]:
    """Dial the workers of a node and accept those that dial it; no HTTP."""
    address = node.coordinator.config.listen
    port = None
    if address is not None:
        port = CoordinatorPort(address, node.coordinator, sockets, None)
        port.start()
    try:
        node.coordinator.start()
        yield port
    finally:
        if port is not None:
            port.close()


@contextmanager
def serve_http(node: Node, config: ServerConfig, sockets: SocketConfig) -> Iterator[list[Address]]:
    """Serve HTTP clients and workers of a node; yields the addresses that clients can use.

    Without an address of its own, HTTP shares the coordinator's port.

    Raises:
        ConfigError: An address can not be used.
    """
    coordinator = node.coordinator
    app = create_app(node.backend, node.text, config, n_sessions=coordinator.config.n_sessions)
    server = HttpServer(app)
    shared = config.address is None
    own: list[Socket] = [] if config.address is None else [listen(config.address)]
    port = None
    try:
        if coordinator.config.listen is not None:
            adopt = server.adopt if shared else None
            port = CoordinatorPort(coordinator.config.listen, coordinator, sockets, adopt)
        server.start(own)
        if port is not None:
            port.start()
        coordinator.start()
        yield [local_address(sock) for sock in own] or ([port.address] if port else [])
    finally:
        if port is not None:
            port.close()
        server.close(_CLOSE_SECONDS)
