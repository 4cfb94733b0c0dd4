"""What all connections of one worker share.

Owns: nothing but the references. Refuses to know: frames, sessions, results. Invariant: fixed for
the life of the worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ds4py.config import Address, SocketConfig, WorkerTuning
from ds4py.peer.known_peers import PeerIdentityLog
from ds4py.stage.stage import Stage
from ds4py.tracing.events import TraceRecorder
from ds4py.wire.extensions import PeerHello
from ds4py.worker.forwarder import DialHop
from ds4py.worker.work_frames import WorkerFacts

MAX_TRANSFERS: Final = 4
"""Shards that a worker holds in memory at once, over all connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What all connections of one worker share.

    Args:
        stage: The layers, with everybody's sessions.
        facts: The slice, for checking spans.
        tuning: Queues.
        sockets: Socket options.
        hello: The answer to another ds4py's handshake.
        dial: Connects to a next hop.
        hop_lost: Closes every connection of the worker to a next hop.
        known_peers: Of the whole worker.
        transfers: Shards that may be in memory.
        trace: Where single spans leave their times; None keeps none.
    """

    stage: Stage
    facts: WorkerFacts
    tuning: WorkerTuning
    sockets: SocketConfig
    hello: PeerHello
    dial: DialHop
    hop_lost: Callable[[Address], None]
    known_peers: PeerIdentityLog
    transfers: threading.Semaphore = field(
        default_factory=lambda: threading.Semaphore(MAX_TRANSFERS)
    )
    trace: TraceRecorder | None = None
