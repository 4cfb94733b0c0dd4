"""Which workers are connected, and who is told when one comes or goes.

Owns: the registry with its lock, the links, what else leads to a worker, those that a newcomer has
displaced, those who watch some of them. Refuses to know: routes, sessions, how workers are found
and greeted. Invariant: one worker's loss removes that worker only; everyone who waits on `changed`
is woken by every change, and what is told of a loss is told after the lost one cannot be used.

A worker that another one displaces stays connected, without being used: closed, it would come back
and displace that one.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ds4py.config import CoordinatorConfig, SocketConfig
from ds4py.coordinator.relay.hop import Link
from ds4py.coordinator.relay.hop_channels import HopChannels, dial_priority_channel
from ds4py.coordinator.relay.workers.dialer import DialerHost
from ds4py.coordinator.relay.workers.registry import LinkId, Registry, WorkerRecord
from ds4py.errors import TransportError, TransportTimeoutError
from ds4py.transport.connection import Connection
from ds4py.wire.extensions import HOP_LOST, HopLost, Notice

log = logging.getLogger(__name__)

_CLOSING = "the coordinator is shutting down"

Lost = Callable[[], None]
"""Told of a loss, on any thread; must return at once."""


class MembershipHost(DialerHost, Protocol):
    """What the book of workers needs of its coordinator."""

    config: CoordinatorConfig
    sockets: SocketConfig

    def lost(self, record: WorkerRecord, *, silent: bool) -> None:
        """Take note that a worker is gone, on any thread; `silent` if it just said nothing."""


class Membership:
    """The workers that are connected.

    Args:
        host: The coordinator.
    """

    def __init__(self, host: MembershipHost):
        self._host = host
        self.changed = threading.Condition()
        self.registry = Registry()
        self.links: dict[LinkId, Link] = {}
        # of each link, for when it leads to the first hop
        self.channels: dict[LinkId, HopChannels] = {}
        self.retired: dict[LinkId, Link] = {}  # displaced by another worker, still connected
        self._watched: dict[object, tuple[Collection[WorkerRecord], Lost]] = {}
        self._closed = False

    @property
    def records(self) -> tuple[WorkerRecord, ...]:
        """All of them, as the registry orders them."""
        with self.changed:
            return self.registry.records

    def alive(self) -> list[WorkerRecord]:
        """Return those that can be used, with the lock held.

        A link is lost before its worker is removed: anyone who was told of that must not get it
        again.
        """
        return [record for record in self.registry.records if not self.links[record.link].lost]

    def serve(self, connection: Connection, record: WorkerRecord) -> None:
        """Register a worker and read its results on the calling thread until it is gone."""
        link = Link(
            record.link,
            connection,
            send_depth=self._host.config.prefill.send_depth,
            timeout=self._host.sockets.send_timeout,
            alive_timeout=record.alive_timeout,
            on_closed=self._lost,
        )
        with self.changed:
            if self._closed:
                link.close(_CLOSING)
                return
            displaced = [(old, self.links.pop(old.link)) for old in self.registry.add(record)]
            self.retired.update((old.link, link) for old, link in displaced)
            self.links[record.link] = link
            self.channels[record.link] = self._channels_of(link, record)
            self.changed.notify_all()
        log.info("%s joined", record.name)
        for old, old_link in displaced:
            log.warning("%s is replaced by a newcomer", old.name)
            old_link.retire("replaced by a newcomer")
            self._close_channels(old.link, "replaced by a newcomer")
            self._announce_loss(old)
        link.run()

    def _channels_of(self, link: Link, record: WorkerRecord) -> HopChannels:
        return HopChannels(
            link,
            functools.partial(dial_priority_channel, record, self._host),
            timeout=self._host.sockets.send_timeout,
            alive_timeout=record.alive_timeout,
        )

    def _close_channels(self, link_id: LinkId, reason: str) -> None:
        """End what else leads to a worker that is in use no more."""
        with self.changed:
            channels = self.channels.pop(link_id, None)
        if channels is not None:
            channels.close(reason)

    def _lost(self, link_id: LinkId, cause: TransportError) -> None:
        with self.changed:
            self.links.pop(link_id, None)
            self.retired.pop(link_id, None)
            record = self.registry.remove(link_id)
            self.changed.notify_all()
        self._close_channels(link_id, cause.what)
        if record is None or self._closed:
            return
        log.warning("%s left: %s", record.name, cause.what)
        self._announce_loss(record)
        self._host.lost(record, silent=isinstance(cause, TransportTimeoutError))

    @contextmanager
    def watching(self, hops: Collection[WorkerRecord], lost: Lost) -> Iterator[None]:
        """Call a function, from any thread, if one of some hops is lost, now or meanwhile."""
        key = object()
        with self.changed:
            self._watched[key] = (hops, lost)
            late = not set(hops).issubset(self.registry.records)
        if late:
            lost()
        try:
            yield
        finally:
            with self.changed:
                del self._watched[key]

    def _announce_loss(self, lost: WorkerRecord) -> None:
        """Tell who uses a lost stage, and let the others answer what they have sent to it."""
        with self.changed:
            workers = self.registry.records
            watched = list(self._watched.values())
        for hops, told in watched:  # first: what comes after the next notice may dial it again
            if lost in hops:
                told()
        self.tell(workers, HOP_LOST, HopLost(lost.address.host, lost.address.port))

    def tell(self, workers: Iterable[WorkerRecord], feature: str, notice: Notice) -> None:
        """Send a notice to those of some workers that understand it."""
        for worker in workers:
            link = self.links.get(worker.link)
            if link is not None and feature in worker.features:
                link.tell(notice)

    def close(self) -> list[Link]:
        """Take no more workers; return the links that stand, for the caller to close."""
        with self.changed:
            self._closed = True
            links = [*self.links.values(), *self.retired.values()]
            self.changed.notify_all()
        return links
