"""The connections of the coordinator to the first hop of a route.

Owns: which of them carries a span, opening and losing the priority one, how prompts share the
window. Refuses to know: routes, prompts, what an answer means. Invariant: all spans of one run
leave over one connection, and the bulk one does not need the priority one: without it, single
tokens wait behind the chunks of other sessions' prompts, and nothing else changes.

A worker answers one connection in order and reads a few spans ahead only. A token that is sent
behind the chunks of a prompt would wait for all of them, at every hop. Over a connection of its own
it waits for the chunk that is being computed, since every stage takes turns (`stage.scheduler`),
and each hop has connections of its own to the next one for each that it serves.

Order within a session needs no care: its driver sends nothing before all that was sent
before is answered, or is lost with its connection; and what a lost connection leaves behind in a
stage is refused there by its prefix hash, or continues the very same tokens.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from ds4py.coordinator.relay.hop import Link
from ds4py.coordinator.relay.workers.dialer import DialerHost
from ds4py.coordinator.relay.workers.registry import LinkId, WorkerRecord
from ds4py.coordinator.relay.workers.worker_hello import layers_of, refusal_of
from ds4py.errors import ClusterError, Ds4Error, TransportError
from ds4py.peer.handshake import ask
from ds4py.stage.scheduler import MAX_BATCH
from ds4py.transport.connection import Connection
from ds4py.wire.extensions import PeerHello

log = logging.getLogger(__name__)

OPEN_SECONDS: Final = 0.2
"""How long a token waits for a priority connection instead of waiting behind a prompt."""

RETRY_SECONDS: Final = 60.0
"""Pause before a priority connection that failed is tried again: each loss costs its sessions a
replay."""

Dial = Callable[[Callable[[], bool]], Connection]
"""Opens a connection to the hop; polls whether it should give up; raises `Ds4Error`."""


class HopChannels:
    """The bulk connection to a hop, and a priority one for single tokens, opened when it is missed.

    Args:
        bulk: The connection that the hop is registered with; not owned.
        dial: Opens the priority one.
        timeout: Seconds that a post waits for room.
        alive_timeout: As for the bulk one.
    """

    def __init__(self, bulk: Link, dial: Dial, *, timeout: float, alive_timeout: float | None):
        self.bulk = bulk
        self._dial = dial
        self._timeout = timeout
        self._alive_timeout = alive_timeout
        self._lock = threading.Lock()
        self._priority: Link | None = None
        self._attempt: threading.Event | None = None  # set when the one in progress has ended
        self._patience_ends = 0.0
        self._not_before = 0.0
        self._closed = False
        self._n_prefills = 0

    def choose(self, *, is_token: bool) -> Link:
        """Return the connection for a run of spans.

        Args:
            is_token: The run is a single token. It waits up to `OPEN_SECONDS` for a priority
                connection if it would have to wait behind a prompt otherwise.
        """
        if not is_token:
            return self.bulk
        priority = self._priority
        if priority is None and self.bulk.carries_chunks:
            priority = self._open()
        return self.bulk if priority is None or priority.lost else priority

    @contextmanager
    def prefilling(self) -> Iterator[None]:
        """Count one more prompt that is on its way."""
        with self._lock:
            self._n_prefills += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_prefills -= 1

    def share(self, window: int) -> int:
        """Return how many chunks one of the prompts that are on their way may have in flight.

        Together they have about as many as one alone, so that a newcomer's first chunk waits for a
        window and not for a window of each of the others; and one for each at least.
        """
        return -(-window // max(1, self._n_prefills))

    def expire_after(self, seconds: float, reason: str) -> None:
        """End both connections unless all that was posted until now is answered soon."""
        priority = self._priority
        for link in (self.bulk,) if priority is None else (self.bulk, priority):
            link.expire_after(seconds, lambda: self.bulk.close(reason))

    def close(self, reason: str) -> None:
        """End the priority connection for good; anyone who waits for its answers is told."""
        with self._lock:
            self._closed = True
            priority = self._priority
        if priority is not None:
            priority.close(reason)

    def _open(self) -> Link | None:
        """Wait a moment for the priority connection; None if it does not come."""
        with self._lock:
            now = time.monotonic()
            if self._attempt is None and not self._closed and now >= self._not_before:
                self._attempt = threading.Event()
                self._patience_ends = now + OPEN_SECONDS
                name = f"lane {self.bulk.connection.peer}"
                threading.Thread(target=self._serve, name=name, daemon=True).start()
            attempt = self._attempt
        if attempt is not None:
            attempt.wait(max(0.0, self._patience_ends - time.monotonic()))
        return self._priority

    def _serve(self) -> None:
        """Open the connection and read its answers until it is gone, on a thread of its own."""
        link = self._connect()
        with self._lock:
            attempt, self._attempt = self._attempt, None
            closed = self._closed
            if link is None:
                self._not_before = time.monotonic() + RETRY_SECONDS
            elif not closed:
                self._priority = link
        assert attempt is not None
        attempt.set()
        if link is None:
            return
        if closed:
            link.close()
        link.run()
        with self._lock:
            self._priority = None
            self._not_before = time.monotonic() + RETRY_SECONDS

    def _connect(self) -> Link | None:
        peer = self.bulk.connection.peer
        try:
            connection = self._dial(lambda: self._closed)
        except Ds4Error as e:
            log.info("%s: no second connection, tokens wait behind prompts: %s", peer, e)
            return None
        except Exception:  # anyone who waits for the connection must be told
            log.exception("%s: opening a second connection failed", peer)
            return None
        return Link(
            self.bulk.link_id,
            connection,
            send_depth=MAX_BATCH,
            timeout=self._timeout,
            alive_timeout=self._alive_timeout,
            on_closed=self._ended,
        )

    def _ended(self, _: LinkId, cause: TransportError) -> None:
        if not self._closed:
            log.warning("%s: the second connection is lost: %s", self.bulk.connection.peer, cause)


def dial_priority_channel(
    record: WorkerRecord, host: DialerHost, stopped: Callable[[], bool]
) -> Connection:
    """Open a further connection to a registered worker.

    Another ds4py is greeted, so that both sides watch the connection and a hop knows who drives it;
    a plain one is not: its data port takes spans without a word
    (docs/spec/wire-protocol.md#as-coordinator).

    Args:
        record: The worker.
        host: The coordinator.
        stopped: Polled; True gives up.

    Raises:
        Ds4Error: The data port is not reached, or somebody else is behind it.
    """
    connection = host.connector.connect(
        record.address, host.result_limits(), rounds=1, stopped=stopped
    )
    try:
        if record.features:
            _greet(connection, record, host)
    except BaseException:
        connection.close()
        raise
    return connection


def _greet(connection: Connection, record: WorkerRecord, host: DialerHost) -> None:
    answer = ask(connection, host.introduce())
    fits = isinstance(answer, PeerHello) and refusal_of(answer, host.facts()) is None
    if not (fits and isinstance(answer, PeerHello) and layers_of(answer) == record.layers):
        raise ClusterError(f"data port of {record.name}: got another peer, expected that worker")
