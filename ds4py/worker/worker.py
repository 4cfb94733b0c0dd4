"""A worker: owns one slice, serves anyone who connects, dials its coordinator if told to.

Owns: the worker's life cycle (docs/spec/wire-protocol.md#life-cycle), its acceptor, its control
connection. Refuses to know: what is said on a connection (`connection`), tensors. Invariant: a bad
peer ends its own connection at most; the device and all other connections go on, and nobody gives
up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from ds4py.config import Address, SocketConfig, WorkerConfig
from ds4py.contracts import ModelRunner
from ds4py.errors import Ds4Error
from ds4py.peer.hello import plain_hello, worker_hello
from ds4py.peer.known_peers import PeerIdentityLog
from ds4py.stage.stage import Stage
from ds4py.tracing.events import TraceRecorder
from ds4py.transport.acceptor import Acceptor, CallerLimits
from ds4py.transport.connection import Connection
from ds4py.transport.connector import Connector
from ds4py.transport.security import PLAIN, Security
from ds4py.transport.sockets import RETRY_ROUNDS, Listener
from ds4py.wire.conversation import ProtocolState, Role
from ds4py.wire.extensions import PeerHello
from ds4py.wire.frames import coordinator_limits, plain_limits, worker_limits
from ds4py.wire.messages import ErrorText
from ds4py.worker.connection import DataConnection
from ds4py.worker.context import WorkerContext
from ds4py.worker.registration import CoordinatorClient, WorkerIdentity
from ds4py.worker.work_frames import WorkerFacts

log = logging.getLogger(__name__)

RECONNECT_PAUSE: Final = 1.0
MAX_CONNECTIONS: Final = 256  # each takes two threads
NEXT_HOP_ROUNDS: Final = RETRY_ROUNDS  # a next hop may start later than we
_JOIN_SECONDS: Final = 10.0
_FLEETING_SECONDS: Final = 10.0  # a connection that ends sooner is no news if it ends as before


def worker_facts(runner: ModelRunner) -> WorkerFacts:
    """Return what spans are checked against."""
    card = runner.card
    return WorkerFacts(
        model_id=card.model_id,
        layers=runner.layers,
        n_layers=card.n_layers,
        n_ctx=runner.n_ctx,
        n_vocab=card.n_vocab,
        hidden_width=card.hidden_width,
    )


def data_listener(config: WorkerConfig, sockets: SocketConfig) -> Listener:
    """Open a worker's data port.

    Raises:
        ConfigError: It cannot be used.
    """
    return Listener(config.listen or Address("", 0), sockets)


class Worker:
    """Serves one slice until it is closed.

    Args:
        runner: The slice; owned and closed by the worker.
        config: Addresses and queues.
        sockets: Socket options.
        listener: The data port, if it is open already; owned from now on.
        trace: Where single spans leave their times; None keeps none.
        security: Of every connection, dialled or accepted.

    Raises:
        ConfigError: The data port cannot be used.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: WorkerConfig,
        sockets: SocketConfig,
        listener: Listener | None = None,
        trace: TraceRecorder | None = None,
        security: Security = PLAIN,
    ):
        self._config = config
        self._runner = runner
        limits = worker_limits(runner.n_ctx, runner.card.hidden_width)
        self._limits = plain_limits(limits) if config.plain else limits
        self._connector = Connector(sockets, security)
        self._acceptor = Acceptor(
            listener or data_listener(config, sockets),
            self._serve_data,
            frames=self._limits,
            limits=CallerLimits(served=MAX_CONNECTIONS),
            name="data",
            security=security,
        )
        self.stage = Stage(runner, batching=config.tuning.batching)
        self._context = WorkerContext(
            stage=self.stage,
            facts=worker_facts(runner),
            tuning=config.tuning,
            sockets=sockets,
            hello=worker_hello(runner, self.address.port, config),
            dial=self._dial_next_hop,
            hop_lost=self._forget_hop,
            known_peers=PeerIdentityLog(runner.card),
            trace=trace,
        )
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._upstreams: set[DataConnection] = set()
        self._threads: list[threading.Thread] = []
        self._refusal = ""

    @property
    def address(self) -> Address:
        """The data port that is bound."""
        return self._acceptor.address

    @property
    def n_callers(self) -> int:
        """Connections that others opened to the data port and that are served now."""
        return self._acceptor.n_callers

    def start(self) -> None:
        """Begin to accept, and to dial the coordinator if there is one."""
        self._acceptor.start()
        if self._config.coordinator is not None:
            self._spawn(self._control, "control")
        log.info("layers %s, listening on %s", self._context.facts.layers, self.address)

    def wait(self) -> None:
        """Block until the worker is closed from another thread or by a signal."""
        while not self._stopping.wait(0.5):
            pass

    def close(self) -> None:
        """Close every connection, free the device, end all threads; idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._acceptor.close()  # after this, no further connection comes
        with self._lock:
            upstreams = list(self._upstreams)
        for upstream in upstreams:
            upstream.close()
        self.stage.close(timeout=_JOIN_SECONDS)
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._acceptor.join(deadline)

    def _spawn(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve_data(self, connection: Connection) -> None:
        name = f"data {connection.peer}"
        conversation = ProtocolState(Role.DATA_SERVER)
        self._tell_refusal(self._serve(connection, name, conversation), name)

    def _tell_refusal(self, text: str | None, name: str) -> None:
        """Log why a peer parted with an ERROR: once, since it may try again each second."""
        if text is not None and text != self._refusal:
            log.error("%s: the peer refused us: %s", name, text)
        self._refusal = text or ""

    def _serve(
        self,
        connection: Connection,
        name: str,
        conversation: ProtocolState,
        peer: PeerHello | None = None,
    ) -> str | None:
        """Serve one connection to its end; return the peer's parting ERROR text, if any."""
        upstream = DataConnection(connection, self._context, name, conversation, peer)
        with self._lock:
            self._upstreams.add(upstream)
        try:
            if self._stopping.is_set():
                upstream.close()
            return upstream.run()
        finally:
            with self._lock:
                self._upstreams.discard(upstream)

    def _control(self) -> None:
        """Dial the coordinator, serve it, and dial again for ever (wire-protocol.md#life-cycle)."""
        address = self._config.coordinator
        assert address is not None
        enlistment = self._client(address)
        said = ""
        while not self._stopping.is_set():
            start = time.monotonic()
            text = self._serve_coordinator(address, enlistment)
            repeated = text == said and time.monotonic() - start < _FLEETING_SECONDS
            if not (repeated or self._stopping.is_set()):  # it may go on for hours
                log.warning("coordinator %s %s; dialling again", address, text)
            said = text
            self._stopping.wait(RECONNECT_PAUSE)

    def _client(self, address: Address) -> CoordinatorClient:
        identity = WorkerIdentity(
            plain=plain_hello(self._runner, self.address.port),
            extended=None if self._config.plain else self._context.hello,
            limits=self._limits,
        )
        return CoordinatorClient(address, identity, self._connector, self._stopping.is_set)

    def _serve_coordinator(self, address: Address, enlistment: CoordinatorClient) -> str:
        """Dial once and serve; return why that ended."""
        try:
            enlisted = enlistment.dial()
            if isinstance(enlisted, ErrorText):
                return f"refused us: {enlisted.text}"
            connection = enlisted.connection
            log.debug("connected to coordinator %s", connection.peer)
            name = f"control {connection.peer}"
            refusal = self._serve(connection, name, enlisted.conversation, enlisted.peer)
        except Ds4Error as e:
            return f"was not reached: {e}"
        except Exception as e:  # nobody else would dial the coordinator again
            log.exception("serving coordinator %s failed", address)
            return f"was given up: {e}"
        return "is gone" if refusal is None else f"refused us: {refusal}"

    def _forget_hop(self, address: Address) -> None:
        """Close what leads to a next hop that is lost, whatever asked for it."""
        with self._lock:
            upstreams = list(self._upstreams)
        for upstream in upstreams:
            upstream.forget_hop(address)

    def _dial_next_hop(self, address: Address, stopped: Callable[[], bool]) -> Connection:
        """Connect to another worker's data port; no handshake of any kind.

        See docs/spec/wire-protocol.md#worker-links.
        """
        card, n_ctx = self._runner.card, self._runner.n_ctx
        return self._connector.connect(
            address,
            coordinator_limits(card.n_vocab, card.hidden_width, n_ctx),
            rounds=NEXT_HOP_ROUNDS,
            stopped=lambda: stopped() or self._stopping.is_set(),
        )
