"""The composition root: from configs to running processes.

Owns: which parts meet which. Refuses to know: flags, terminals, what any part does. Invariant: this
is the only module that imports both towers; only `bench`, `cli` and tests import it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from ds4py.config import (
    Address,
    CoordinatorConfig,
    EngineConfig,
    KvType,
    ServerConfig,
    SocketConfig,
    WorkerConfig,
)
from ds4py.contracts import CacheForm
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.relay.workers.listener import coordinator_port
from ds4py.coordinator.session_pool import SessionPool
from ds4py.engine.open import open_runner, read_model
from ds4py.engine.selftest import ComparedKernel, compare_all, processor
from ds4py.errors import ConfigError
from ds4py.gguf.file import GgufFile
from ds4py.server.http.app import create_app, save_sessions
from ds4py.server.http.server import HttpServer
from ds4py.server.observability.event_log import EventLog
from ds4py.server.requests.prompts import TextStack
from ds4py.snapshot.disk_cache import CacheIdentity, DiskCache, DiskCacheOptions
from ds4py.snapshot.kvc import ABI_DS4, ABI_OWN
from ds4py.text.chat_formats.choice import chat_for
from ds4py.text.tokenizer.tokenizer import load_tokenizer
from ds4py.tracing.events import COORDINATOR, TraceRecorder
from ds4py.tracing.perfetto import TraceWriter
from ds4py.transport.cores import keep_off
from ds4py.transport.sockets import Listener, Socket, listen, local_address
from ds4py.worker.profile import worker_name
from ds4py.worker.worker import Worker, data_listener

LoadProgress = Callable[[int, int], None]
"""Called with (bytes of weights loaded, bytes of weights in the slice)."""

_CLOSE_SECONDS: Final = 10.0

_SWITCH_SECONDS: Final = 0.0005
"""How long a thread that computes in Python keeps others waiting; Python's default is tenfold."""


def run_selftest() -> tuple[str, Iterator[ComparedKernel]]:
    """Return the processor's name, and what comparing every kernel of the CPU with torch gives."""
    return processor(), compare_all()


@dataclass(frozen=True, slots=True)
class Node:
    """A coordinator with everything that a request needs; closed by `open_node`."""

    coordinator: Coordinator
    backend: SessionPool
    text: TextStack


@contextmanager
def open_node(
    engine: EngineConfig,
    config: CoordinatorConfig,
    sockets: SocketConfig,
    *,
    whole: bool = False,
    progress: LoadProgress | None = None,
    trace: TraceRecorder | None = None,
) -> Iterator[Node]:
    """Load a coordinator's own layers and its tokenizer; nothing is dialled yet.

    Args:
        engine: Model, device, context.
        config: Own layers and how workers are driven.
        sockets: Socket options.
        whole: Own every layer: a process without workers.
        progress: Told how far loading is.
        trace: Where single spans leave their times, instead of the file that `config` may name.

    Raises:
        ConfigError: The file of the trace cannot be written.
    """
    _share_the_machine(sockets)
    with _trace_file(config.trace) as file, _recording(file, COORDINATOR) as written:
        card, n_ctx = read_model(engine)
        text = load_text(engine, n_ctx)
        local = None
        if whole:
            local = open_runner(engine, progress=progress)
        elif config.layers is not None:
            local = open_runner(engine, config.layers, want_head=True, progress=progress)
        recorder = written if trace is None else trace
        coordinator = Coordinator(card, n_ctx, config, sockets, local=local, trace=recorder)
        with closing(coordinator):
            yield Node(coordinator, SessionPool(coordinator, config.n_sessions), text)


@contextmanager
def _trace_file(path: Path | None) -> Iterator[BinaryIO | None]:
    """Open a trace before anything slow is done; what was in the file is lost."""
    if path is None:
        yield None
        return
    try:
        file = path.open("wb", buffering=0)
    except OSError as e:
        raise ConfigError(f"--dist-trace {path}: {e.strerror}") from e
    with file:
        yield file


@contextmanager
def _recording(file: BinaryIO | None, process: str) -> Iterator[TraceRecorder | None]:
    """Write to a file whatever is recorded meanwhile."""
    if file is None:
        yield None
        return
    recorder = TraceRecorder()
    with closing(TraceWriter(recorder, file, process=process, pid=os.getpid())):
        yield recorder


def _share_the_machine(sockets: SocketConfig) -> None:
    """Keep computation off the cores of the network, and let network threads in soon."""
    keep_off(sockets.cores)
    sys.setswitchinterval(_SWITCH_SECONDS)


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


def open_disk_cache(
    folder: Path, options: DiskCacheOptions, node: Node, kv_type: KvType
) -> DiskCache:
    """Open the folder in which prefixes of a node's model outlive their sessions.

    Args:
        folder: Made if it is not there.
        options: Budget and limits.
        node: Whose sessions are saved.
        kv_type: How its caches are held; what was saved in another way is not for it.

    Raises:
        ConfigError: The folder cannot be used, or the model's sessions cannot be saved.
    """
    card = node.backend.card
    if card.cache_form is None:
        raise ConfigError(
            f"--kv-disk-dir: sessions of {card.architecture} models cannot be saved; leave it out"
        )
    ds4s = isinstance(card.cache_form, CacheForm)
    identity = CacheIdentity(
        model_id=card.model_id,
        quant_bits=card.quant_bits,
        abi=ABI_DS4 if ds4s else ABI_OWN,
        n_ctx=node.backend.n_ctx,
        model=_digest(card.fingerprint, "" if ds4s else kv_type),
        tokenizer=_digest(card.fingerprint),
    )
    return DiskCache(folder, options, identity)


def _digest(*texts: str) -> str:
    """Return a fingerprint of 32 characters."""
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()


@contextmanager
def open_worker(
    engine: EngineConfig,
    config: WorkerConfig,
    sockets: SocketConfig,
    *,
    progress: LoadProgress | None = None,
) -> Iterator[Worker]:
    """Load a worker's slice and serve it while the context lasts.

    The port is taken before anything is loaded, so that a busy one is told at once; anyone who
    dials meanwhile waits.

    Raises:
        ConfigError: The port, or the file of the trace, cannot be used.
    """
    _share_the_machine(sockets)
    with _trace_file(config.trace) as file, ExitStack() as stack:
        listener = data_listener(config, sockets)
        stack.callback(listener.close)
        runner = open_runner(engine, config.layers, progress=progress)
        stack.callback(runner.close)
        with _recording(file, worker_name(runner.layers)) as trace:
            worker = Worker(runner, config, sockets, listener, trace)
            stack.pop_all()  # the worker owns both now
            with closing(worker):
                worker.start()
                yield worker


@dataclass(frozen=True, slots=True)
class Listeners:
    """Addresses that are taken before a model is loaded; closed by `open_listeners`.

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
def open_listeners(
    config: CoordinatorConfig, front: ServerConfig | None, sockets: SocketConfig
) -> Iterator[Listeners]:
    """Take a coordinator's addresses.

    Args:
        config: Names the shared address, if there is one.
        front: Names HTTP's own, if there is one; None serves no HTTP.
        sockets: Socket options.

    Raises:
        ConfigError: An address cannot be used.
    """
    with ExitStack() as stack:
        shared = http = None
        if config.listen is not None:
            shared = Listener(config.listen, sockets)
            stack.callback(shared.close)
        if front is not None and front.address is not None:
            http = listen(front.address)
            stack.callback(http.close)
        yield Listeners(shared, http)


@contextmanager
def join_cluster(node: Node, listeners: Listeners) -> Iterator[None]:
    """Dial the workers of a node and accept those that dial it; no HTTP."""
    with ExitStack() as stack:
        if listeners.shared is not None:
            port = coordinator_port(listeners.shared, node.coordinator)
            stack.callback(port.close)
            port.start()
        node.coordinator.start()
        yield


@contextmanager
def serve_http(
    node: Node,
    listeners: Listeners,
    config: ServerConfig,
    *,
    disk: DiskCache | None = None,
) -> Iterator[None]:
    """Serve HTTP clients and workers of a node.

    Without an address of its own, HTTP shares the coordinator's port.

    Args:
        node: What is served.
        listeners: Its addresses.
        config: Of the HTTP front.
        disk: Where prefixes outlive their sessions; None keeps none.
    """
    coordinator = node.coordinator
    n_sessions = coordinator.config.n_sessions
    events = EventLog()
    app = create_app(
        node.backend, node.text, config, n_sessions=n_sessions, events=events, disk=disk
    )
    server = HttpServer(app)
    with ExitStack() as stack:
        stack.enter_context(events.attached())
        port = None
        if listeners.shared is not None:
            adopt = server.adopt if listeners.http is None else None
            port = coordinator_port(listeners.shared, coordinator, adopt)
            stack.callback(port.close)
        stack.callback(save_sessions, app)
        stack.callback(server.close, _CLOSE_SECONDS, grace=config.grace_seconds)
        server.start([] if listeners.http is None else [listeners.http])
        if port is not None:
            port.start()
        coordinator.start()
        yield
