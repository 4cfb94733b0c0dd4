"""Coordinators whose workers are answered by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ds4py.config import CoordinatorConfig, PrefillTuning, RouteEntry
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.session_pool import SessionPool
from ds4py.errors import (
    Ds4Error,
    PeerClosedError,
)
from ds4py.wire.frames import FrameType
from ds4py.wire.messages import (
    Result,
    Work,
    WorkFlags,
    WorkHeader,
    encode,
)
from tests.clusters import SOCKETS, Cluster, cluster, registered, span, wait_until
from tests.fake_runner import card
from tests.peers import dial_in, hello, logits_for

PROMPT = [5, 80, 3, 3, 41, 9, 77, 12, 1]
WHOLE = span("0-5")
QUICK = CoordinatorConfig(rejoin_timeout=0.2, result_timeout=20)


def n_workers(c: Cluster) -> int:
    return len(registered(c.coordinator))


def joined(c: Cluster, n: int) -> None:
    wait_until(lambda: n_workers(c) == n, f"{n} workers are registered")


@contextmanager
def by_hand(config: CoordinatorConfig = QUICK, **prefill: object) -> Iterator[tuple]:
    """A coordinator with one hand-driven worker of all layers, and a session."""
    with cluster([], config=config, **prefill) as c, dial_in(c.port.address, hello(WHOLE)) as peer:
        joined(c, 1)
        with c.backend.lease(PROMPT) as session:
            yield c, peer, session


def serve(peer, answer: Callable[..., Result | None]) -> threading.Thread:
    """Answer every WORK of a connection until it ends; None leaves one unanswered."""

    def run() -> None:
        try:
            while (frame := peer.receive()) is not None and frame.type == FrameType.WORK:
                work = Work.from_body(WorkHeader.decode(frame.body), frame.body)
                result = answer(work)
                if result is not None:
                    peer.send(encode(result))
        except Ds4Error:
            pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def good(work) -> Result:
    """What a stage would say."""
    if work.flags & WorkFlags.ACK_ONLY:
        return Result(request_id=work.request_id, result_hash=work.result_hash)
    return logits_for(work)


def ended(connection) -> bool:
    try:
        return connection.receive() is None
    except PeerClosedError:
        return True


@contextmanager
def dialling(entry: RouteEntry) -> Iterator[Cluster]:
    config = replace(QUICK, route=(entry,), prefill=PrefillTuning())
    coordinator = Coordinator(card(), 64, config, SOCKETS)
    coordinator.start()
    try:
        yield Cluster(coordinator, SessionPool(coordinator, 1), None)  # type: ignore[arg-type]
    finally:
        coordinator.close()
