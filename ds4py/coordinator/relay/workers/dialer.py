"""Keep one connection from the coordinator to a worker that the user named.

Owns: dialling, the extension handshake and its plain fallback, dialling again for ever
(docs/design/protocol-extensions.md). Refuses to know: routes. Invariant: whatever the worker does,
the next attempt comes; a reason is logged once, not each second.
"""

from __future__ import annotations

import logging
import threading
from typing import Final, Protocol

from ds4py.config import Address, CoordinatorConfig, RouteEntry
from ds4py.contracts import ModelCard
from ds4py.coordinator.relay.workers import worker_hello
from ds4py.coordinator.relay.workers.registry import WorkerRecord
from ds4py.coordinator.relay.workers.worker_hello import layers_of, refusal_of
from ds4py.errors import ClusterError, ConfigError, Ds4Error
from ds4py.layer_range import LayerRange
from ds4py.peer.handshake import PlainMemory, ask
from ds4py.transport.connection import Connection
from ds4py.transport.connector import Connector
from ds4py.wire.extensions import PeerHello
from ds4py.wire.messages import ErrorText, encode

log = logging.getLogger(__name__)

REDIAL_PAUSE: Final = 1.0
_JOIN_SECONDS: Final = 10.0


class DialerHost(worker_hello.RegistrarHost, Protocol):
    """What a dialer needs of its coordinator."""

    config: CoordinatorConfig
    connector: Connector

    @property
    def card(self) -> ModelCard:
        """The served model."""

    def result_limits(self) -> dict[int, int]:
        """Return the frames that a worker may send."""

    def serve(self, connection: Connection, record: WorkerRecord) -> None:
        """Register a worker and read its results until it is gone."""


class Dialer:
    """Dials one worker of `--dist-route`.

    Args:
        entry: Where, and the layers if the peer cannot tell them.
        host: Gets the connection.
    """

    def __init__(self, entry: RouteEntry, host: DialerHost):
        self._entry = entry
        self._host = host
        self._stopping = threading.Event()
        self._said = ""
        self._memory = PlainMemory()
        self._connection: Connection | None = None  # the one in use, so that `stop` ends it
        name = f"dial {entry.address}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to dial."""
        self._thread.start()

    def stop(self) -> None:
        """Stop dialling, and end the connection that is in use; returns at once."""
        self._stopping.set()
        connection = self._connection
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Stop, and wait until the thread has ended."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._serve_once()
                self._said = ""
            except Ds4Error as e:
                if str(e) != self._said and not self._stopping.is_set():
                    log.warning("worker %s not in use, trying on: %s", self._entry.address, e)
                self._said = str(e)
            except Exception:  # nobody else would dial this worker again
                log.exception("dialling %s failed", self._entry.address)
            self._stopping.wait(REDIAL_PAUSE)

    def _serve_once(self) -> None:
        self._connect()
        try:
            record = self._introduce()
            self._said = ""
            self._host.serve(self._current(), record)
        finally:
            self._current().close()

    def _introduce(self) -> WorkerRecord:
        """Learn who is behind the current connection; a plain peer needs another one."""
        if not (self._memory.is_plain or self._host.config.plain):
            hello = self._handshake(self._current())
            if hello is not None:
                return self._accept(self._current(), hello)
            self._current().close()
        layers = self._plain_span()
        if self._current().closed:
            self._connect()
        log.info("worker %s speaks the plain protocol", self._entry.address)
        return WorkerRecord(
            link=self._host.new_link_id(),
            address=self._reached(self._current()),
            layers=layers,
            n_ctx=0,
            dialled=True,
        )

    def _current(self) -> Connection:
        assert self._connection is not None
        return self._connection

    def _connect(self) -> None:
        # one round: the pause between attempts is ours, and start order does not matter
        connection = self._host.connector.connect(
            self._entry.address,
            self._host.result_limits(),
            rounds=1,
            stopped=self._stopping.is_set,
        )
        self._connection = connection
        if self._stopping.is_set():  # `stop` did not see it
            connection.close()

    def _handshake(self, connection: Connection) -> PeerHello | None:
        """Introduce ourselves; None if the peer seems to speak the plain protocol only.

        An ERROR is a plain worker's answer and is remembered. A close may be the same, with the
        ERROR lost in a reset, or a ds4py that has just died, so it is not.
        """
        answer = ask(connection, self._host.introduce())
        if isinstance(answer, ErrorText):
            self._memory.remember()
            return None
        return answer

    def _accept(self, connection: Connection, hello: PeerHello) -> WorkerRecord:
        """Check a ds4py worker and describe it; tell it if it does not fit."""
        text = refusal_of(hello, self._host.facts())
        if text is not None:
            connection.send(encode(ErrorText.of(text)))
            connection.close()
            raise ClusterError(f"worker refused: {text}")
        self._check_layers(layers_of(hello))
        return worker_hello.register(self._host, hello, self._reached(connection), dialled=True)

    def _check_layers(self, layers: LayerRange) -> None:
        """Refuse a worker that says other layers than the user wrote beside its address."""
        if self._entry.layers is None:
            return
        wanted = self._entry.layers.resolve(self._host.card.n_layers)
        if wanted != layers:
            raise ConfigError(f"serves layers {layers}, but --dist-route says {wanted}")

    def _plain_span(self) -> LayerRange:
        """Return the layers that `--dist-route` says for a peer that cannot."""
        if self._entry.layers is None:
            raise ConfigError(
                "did not answer as a ds4py does; if it is none, write its layers in --dist-route, "
                f"for example {self._entry.address}=13:output"
            )
        return self._entry.layers.resolve(self._host.card.n_layers)

    def _reached(self, connection: Connection) -> Address:
        """Return the numeric host that we reached: a name may mean another one elsewhere."""
        return Address(connection.peer.host, self._entry.address.port)
