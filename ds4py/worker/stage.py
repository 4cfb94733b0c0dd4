"""What all connections of one worker share: its layers, and who may use them.

Owns: the way from a connection to device and sessions, making room, copies of prefixes.
Refuses to know: frames, sockets' contents, results. Invariant: a session that is given up for room
belongs to no connection that lives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from ds4py.config import Address, SocketConfig, WorkerTuning
from ds4py.contracts import ModelRunner, SessionId
from ds4py.errors import CapacityError
from ds4py.peer.known_peers import PeerIdentityLog
from ds4py.peer.validation import WorkerFacts
from ds4py.stage.aborts import AbortedRequests
from ds4py.stage.executor import DeviceThread
from ds4py.stage.session_table import SessionTable
from ds4py.tracing.events import TraceRecorder
from ds4py.wire.extensions import Fork, PeerHello
from ds4py.worker.forwarder import DialHop

T = TypeVar("T")

MAX_TRANSFERS: Final = 4
"""Shards that a worker holds in memory at once, over all connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What all connections of one worker share.

    Args:
        facts: The slice, for checking spans.
        device: The one device.
        session_table: Sessions; touched on the device thread only, except for `disown`.
        tuning: Queues.
        sockets: Socket options.
        hello: The answer to another ds4py's handshake.
        dial: Connects to a next hop.
        hop_lost: Closes every connection of the worker to a next hop.
        aborted: Spans that need not be evaluated.
        known_peers: Of the whole worker.
        transfers: Shards that may be in memory.
        trace: Where single spans leave their times; None keeps none.
    """

    facts: WorkerFacts
    device: DeviceThread
    session_table: SessionTable
    tuning: WorkerTuning
    sockets: SocketConfig
    hello: PeerHello
    dial: DialHop
    hop_lost: Callable[[Address], None]
    aborted: AbortedRequests
    known_peers: PeerIdentityLog
    transfers: threading.Semaphore = field(
        default_factory=lambda: threading.Semaphore(MAX_TRANSFERS)
    )
    trace: TraceRecorder | None = None

    def drop(self, session: SessionId) -> None:
        """Free a session's caches once what waits of it for the device is done."""

        def free(runner: ModelRunner) -> None:
            self.session_table.forget(session)
            runner.drop(session)

        self.device.post(free, session=session)

    def with_room(self, step: Callable[[], T], spare: Collection[SessionId]) -> T:
        """Do what takes cache memory, on the device thread, giving up orphans while it is short.

        Args:
            step: Changes nothing when it fails.
            spare: Sessions that it is about.

        Raises:
            CapacityError: There is too little even without the sessions of closed connections.
        """
        while True:
            try:
                return step()
            except CapacityError:
                unowned = self.session_table.evict(spare)
                if unowned is None:
                    raise
                self.device.runner.drop(unowned)

    def copy_prefix(self, fork: Fork, owner: Hashable) -> None:
        """Let a session begin as another one did, on the device thread.

        Raises:
            PrefixMismatchError: The other one does not hold these tokens.
            CapacityError: There is no room.
        """
        source, target = SessionId(fork.session_from), SessionId(fork.session_to)
        runner, spare = self.device.runner, (source, target)
        tokens = self.session_table.prefix(source, fork.n_tokens, fork.prefix_hash)
        for gone in self.session_table.reserve_slot(target, spare):
            runner.drop(gone)
        self.with_room(lambda: runner.fork(source, target, fork.n_tokens), spare)
        self.session_table.insert(target, tokens, fork.prefix_hash, owner)
