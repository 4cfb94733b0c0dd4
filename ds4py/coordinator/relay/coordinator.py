"""A coordinator: finds its workers, keeps the route, hands out sessions.

Owns: the registry and its lock, the links, the dialers, the coordinator's own slice, request ids.
Refuses to know: prompts, timelines, HTTP. Invariant: one worker's misfortune removes that worker
only; anyone who waits for a route is woken by every change.
"""

from __future__ import annotations

import functools
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from ds4py.activations import F32, HiddenBatch
from ds4py.config import CoordinatorConfig, SocketConfig
from ds4py.contracts import Cancelled, Health, ModelCard, ModelRunner, SessionId, StageStatus
from ds4py.coordinator.pipeline import Pipeline
from ds4py.coordinator.relay.context import RelayContext
from ds4py.coordinator.relay.hop import Link
from ds4py.coordinator.relay.hop_channels import HopChannels, dial_priority_channel
from ds4py.coordinator.relay.pipeline import RelayPipeline
from ds4py.coordinator.relay.planner import Demand, plan_route
from ds4py.coordinator.relay.route import Lost, Route, route_blob
from ds4py.coordinator.relay.telemetry import RouteTelemetry
from ds4py.coordinator.relay.workers.dialer import Dialer
from ds4py.coordinator.relay.workers.registration import WorkerRegistrar
from ds4py.coordinator.relay.workers.registry import LinkId, Registry, WorkerRecord
from ds4py.coordinator.relay.workers.worker_hello import CoordinatorFacts
from ds4py.errors import (
    CancelledError,
    ClusterError,
    Ds4Error,
    RouteIncompleteError,
    TransportError,
    TransportTimeoutError,
)
from ds4py.peer.hello import coordinator_hello
from ds4py.peer.known_peers import PeerIdentityLog
from ds4py.stage.executor import wait_for
from ds4py.stage.stage import Stage
from ds4py.tracing.events import TraceRecorder
from ds4py.transport.connection import Connection
from ds4py.transport.connector import Connector
from ds4py.transport.security import PLAIN, Security
from ds4py.wire.extensions import DROP, HOP_LOST, REWIND, Drop, HopLost, Notice, PeerHello
from ds4py.wire.frames import coordinator_limits

log = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1
_LOSS_SECONDS: Final = 10.0


class Coordinator:
    """Owns the route from the coordinator's own layers to the output head.

    Args:
        card: The model.
        n_ctx: Tokens that one session can hold.
        config: Addresses, chunks, deadlines.
        sockets: Socket options.
        local: The coordinator's own slice, owned and closed here; None if it owns none.
        trace: Where single spans leave their times; None keeps none.
        security: Of every connection, dialled or accepted.
    """

    def __init__(
        self,
        card: ModelCard,
        n_ctx: int,
        config: CoordinatorConfig,
        sockets: SocketConfig,
        *,
        local: ModelRunner | None = None,
        trace: TraceRecorder | None = None,
        security: Security = PLAIN,
    ):
        self._card = card
        self._n_ctx = n_ctx
        self.config = config
        self.sockets = sockets
        self.connector = Connector(sockets, security)
        self.local = None if local is None else Stage(local, batching=config.batching)
        self._registry = Registry()
        self._links: dict[LinkId, Link] = {}
        # of each link, for when it leads to the first hop
        self._channels: dict[LinkId, HopChannels] = {}
        self._retired: dict[LinkId, Link] = {}  # displaced by another worker, still connected
        self._changed = threading.Condition()
        self._pipeline: RelayPipeline | None = None
        self._was_complete = False
        self._watched: dict[object, tuple[Collection[WorkerRecord], Lost]] = {}
        self._closed = False
        self._link_ids = itertools.count(1)
        self._context = RelayContext(
            card=card, n_ctx=n_ctx, config=config, connector=self.connector
        )
        self._sessions: set[SessionId] = set()
        self.telemetry = RouteTelemetry(trace)
        self.known_peers = PeerIdentityLog(card)
        self._reception = WorkerRegistrar(self, plain=config.plain)
        self._dialers = [Dialer(entry, self) for entry in config.route]

    # --- what sessions see -------------------------------------------------------------------

    @property
    def card(self) -> ModelCard:
        """The served model."""
        return self._card

    @property
    def n_ctx(self) -> int:
        """Tokens that one session can hold."""
        return self._n_ctx

    def new_session(self) -> SessionId:
        """Return a name for a token timeline: random, so that it means nothing to anybody."""
        session = SessionId(secrets.randbits(64) or 1)
        self._sessions.add(session)
        return session

    def end_session(self, session: SessionId) -> None:
        """Let every stage that listens free what it holds of a session, now."""
        with self._changed:
            workers = self._registry.records
        self._tell(workers, DROP, Drop(session))
        if self.local is not None:
            self.local.end(session)

    @property
    def can_fork(self) -> bool:
        """Whether the latest route's stages can copy a common prefix from session to session."""
        pipeline = self._pipeline
        return pipeline is not None and pipeline.can_fork

    def is_current(self, pipeline: Pipeline) -> bool:
        """Whether no worker came or went since the pipeline was made."""
        assert isinstance(pipeline, RelayPipeline), "it was made here"
        route = pipeline.route
        lost = route.link is not None and route.link.lost
        return route.generation == self._registry.generation and not lost

    def wait_for_change(self, pipeline: Pipeline, seconds: float) -> bool:
        """Wait until a pipeline is current no more; False if it still is after `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.is_current(pipeline), seconds)

    def count_replay(self) -> None:
        """Take note that a timeline is evaluated again from its start."""
        self.telemetry.count_replay()

    def ensure_pipeline(self, *, after_loss: bool, cancelled: Cancelled | None) -> RelayPipeline:
        """Return a current pipeline; see `PipelineSource.ensure_pipeline`.

        A route that was complete before is waited for, since its worker may come back; one that
        never was fails at once.

        """
        deadline = time.monotonic() + self.config.rejoin_timeout
        with self._changed:
            while True:
                try:
                    return self._current()
                except RouteIncompleteError:
                    patient = after_loss or self._was_complete
                    if not patient or time.monotonic() >= deadline:
                        raise
                if self._closed:
                    raise ClusterError("the coordinator is shutting down")
                if cancelled is not None and cancelled():
                    raise CancelledError("the request was cancelled")
                self._changed.wait(_POLL_SECONDS)

    def _current(self) -> RelayPipeline:
        """Return the pipeline of the cached route, or plan a new one; the lock is held."""
        if self._pipeline is None or not self.is_current(self._pipeline):
            self._pipeline = None
            route = self._plan()
            self._pipeline = RelayPipeline(route, self._context)
            self._was_complete = True
            self.telemetry.took_route([hop.link for hop in route.hops])
            log.info("route: %s", " -> ".join(self._stage_names(route)))
        return self._pipeline

    def _plan(self) -> Route:
        # anyone who was told of a loss must not be given the lost link again
        alive = [r for r in self._registry.records if not self._links[r.link].lost]
        hops = plan_route(self._demand(), alive)
        local_rewinds = self.local is None or self.local.runner.can_rewind
        return Route(
            generation=self._registry.generation,
            hops=hops,
            channels=self._channels[hops[0].link] if hops else None,
            blob=route_blob(hops) if hops else b"",
            local=self.local,
            apply_head=self._apply_head if self._demand().local_head else None,
            telemetry=self.telemetry,
            tell=self._tell,
            watching=self._watching,
            can_rewind=local_rewinds and all(REWIND in hop.features for hop in hops),
        )

    def _demand(self) -> Demand:
        local = None if self.local is None else self.local.layers
        local_head = self.local is not None and self.local.runner.has_head
        return Demand(local, self._card.n_layers, local_head)

    def _stage_names(self, route: Route) -> list[str]:
        own = [] if route.local_layers is None else [f"coordinator (layers {route.local_layers})"]
        return own + [hop.name for hop in route.hops]

    def _apply_head(self, hidden: HiddenBatch) -> F32:
        """Run the output head for a last hop that has none."""
        assert self.local is not None  # otherwise the route has no `apply_head`
        return wait_for(self.local.apply_head(hidden), self.config.result_timeout)

    # --- what workers see --------------------------------------------------------------------

    def start(self) -> None:
        """Begin to dial the workers of the configured route."""
        for dialer in self._dialers:
            dialer.start()

    def facts(self) -> CoordinatorFacts:
        """Return what a worker's introduction is compared with."""
        return CoordinatorFacts(
            model_id=self._card.model_id,
            name=self._card.name,
            n_layers=self._card.n_layers,
            n_ctx=self._n_ctx,
        )

    def introduce(self) -> PeerHello:
        """Return our half of the handshake with another ds4py."""
        own = None if self.local is None else self.local.layers
        return coordinator_hello(self._card, self._n_ctx, own, self.config)

    def result_limits(self) -> dict[int, int]:
        """Return the frames that a registered worker may send."""
        return coordinator_limits(self._card.n_vocab, self._card.hidden_width, self._n_ctx)

    def welcome(self, connection: Connection) -> None:
        """Serve a worker that dialled us, on the calling thread, until it is gone."""
        try:
            record = self._reception.admit(connection)
            if record is not None:
                self.serve(connection, record)
        except Ds4Error as e:
            log.warning("connection from %s: %s", connection.peer, e)
        finally:
            connection.close()

    def new_link_id(self) -> LinkId:
        """Return a name for a new link."""
        return LinkId(next(self._link_ids))

    def serve(self, connection: Connection, record: WorkerRecord) -> None:
        """Register a worker and read its results on the calling thread until it is gone."""
        connection.expect(self.result_limits())
        link = Link(
            record.link,
            connection,
            send_depth=self.config.prefill.send_depth,
            timeout=self.sockets.send_timeout,
            alive_timeout=record.alive_timeout,
            on_closed=self._lost,
        )
        with self._changed:
            if self._closed:
                link.close("the coordinator is shutting down")
                return
            displaced = [(old, self._links.pop(old.link)) for old in self._registry.add(record)]
            self._retired.update((old.link, link) for old, link in displaced)
            self._links[record.link] = link
            self._channels[record.link] = self._channels_of(link, record)
            self._changed.notify_all()
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
            functools.partial(dial_priority_channel, record, self),
            timeout=self.sockets.send_timeout,
            alive_timeout=record.alive_timeout,
        )

    def _close_channels(self, link_id: LinkId, reason: str) -> None:
        """End what else leads to a worker that is in use no more."""
        with self._changed:
            channels = self._channels.pop(link_id, None)
        if channels is not None:
            channels.close(reason)

    def _lost(self, link_id: LinkId, cause: TransportError) -> None:
        with self._changed:
            self._links.pop(link_id, None)
            self._retired.pop(link_id, None)
            record = self._registry.remove(link_id)
            pipeline = self._pipeline
            self._changed.notify_all()
        self._close_channels(link_id, cause.what)
        if record is None or self._closed:
            return
        log.warning("%s left: %s", record.name, cause.what)
        self._announce_loss(record)
        if pipeline is not None:
            _hurry(pipeline.route, record, silent=isinstance(cause, TransportTimeoutError))

    @contextmanager
    def _watching(self, hops: Collection[WorkerRecord], lost: Lost) -> Iterator[None]:
        """Call a function, from any thread, if one of some hops is lost, now or meanwhile."""
        key = object()
        with self._changed:
            self._watched[key] = (hops, lost)
            late = not set(hops).issubset(self._registry.records)
        if late:
            lost()
        try:
            yield
        finally:
            with self._changed:
                del self._watched[key]

    def _announce_loss(self, lost: WorkerRecord) -> None:
        """Tell who uses a lost stage, and let the others answer what they have sent to it."""
        with self._changed:
            workers = self._registry.records
            watched = list(self._watched.values())
        for hops, told in watched:  # first: what comes after the next notice may dial it again
            if lost in hops:
                told()
        self._tell(workers, HOP_LOST, HopLost(lost.address.host, lost.address.port))

    def _tell(self, workers: Iterable[WorkerRecord], feature: str, notice: Notice) -> None:
        """Send a notice to those of some workers that understand it."""
        for worker in workers:
            link = self._links.get(worker.link)
            if link is not None and feature in worker.features:
                link.tell(notice)

    # --- what operators see ------------------------------------------------------------------

    def health(self) -> Health:
        """Report readiness and the stages that are known."""
        with self._changed:
            missing, workers = "", self._registry.records
            try:
                workers = self._current().route.hops
            except RouteIncompleteError as e:
                missing = e.missing
            return Health(
                ready=not missing,
                missing=missing,
                stages=self._stages(workers),
                replays=self.telemetry.replays,
                route_changes=self.telemetry.route_changes,
            )

    def _stages(self, workers: tuple[WorkerRecord, ...]) -> tuple[StageStatus, ...]:
        own = None if self.local is None else self.local.runner
        first = self.telemetry.status(
            "coordinator",
            None if own is None else own.layers,
            0 if own is None else own.weight_bytes,
        )
        if own is not None:
            first = _with_cache(first, own)
        ordered = sorted(workers, key=lambda w: w.layers)
        return (
            first,
            *(self.telemetry.status(str(w.address), w.layers, w.weight_bytes) for w in ordered),
        )

    def wait_ready(self, cancelled: Cancelled, progress: Callable[[str], None]) -> bool:
        """Wait until the route is complete; False if `cancelled` became true first.

        Args:
            cancelled: Polled while waiting.
            progress: Told what is missing, whenever that changes.
        """
        said = ""
        while not (health := self.health()).ready:
            if health.missing != said:
                said = health.missing
                progress(said)
            if cancelled():
                return False
            with self._changed:
                self._changed.wait(_POLL_SECONDS)
        return True

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Close every link and the own slice, end the dialers; idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            links = [*self._links.values(), *self._retired.values()]
            self._changed.notify_all()
        self._reception.close()
        for session in self._sessions:
            self.end_session(session)
        for dialer in self._dialers:
            dialer.stop()
        for link in links:
            link.close()
        for dialer in self._dialers:
            dialer.close()
        if self.local is not None:
            self.local.close()


def _with_cache(status: StageStatus, runner: ModelRunner) -> StageStatus:
    """Add what a runner says of its cache memory, if it keeps an account."""
    try:
        use = getattr(runner, "kv_use", None)
    except Ds4Error:  # closed in this moment
        use = None
    if use is None:
        return status
    return replace(status, kv_bytes=use.used, kv_budget_bytes=use.budget)


def _hurry(route: Route, lost: WorkerRecord, *, silent: bool) -> None:
    """Wait for answers of a route with a lost stage no longer than it makes sense.

    The stage before the lost one answers with errors as soon as it reads of the loss, which a full
    queue delays. A plain one is never told; it sees a broken connection itself, but no silence.
    """
    if route.channels is not None and lost in route.hops[1:]:
        before = route.hops[route.hops.index(lost) - 1]
        never = silent and HOP_LOST not in before.features
        seconds = 0.0 if never else _LOSS_SECONDS
        route.channels.expire_after(seconds, f"no answer after the loss of {lost.name}")
