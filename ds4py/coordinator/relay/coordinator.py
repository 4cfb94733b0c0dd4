"""A coordinator over DS4D: finds its workers, keeps the pipeline, names sessions.

Owns: the dialers, the coordinator's own layers, the current route and when it is planned again.
Refuses to know: prompts, timelines, HTTP, who is connected (`workers.membership`). Invariant: a
pipeline that is handed out leads over links that stood when it was planned; anyone who waits for
one is woken by every change.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from ds4py.config import CoordinatorConfig, SocketConfig
from ds4py.contracts import Cancelled, Health, ModelCard, ModelRunner, SessionId, StageStatus
from ds4py.coordinator.pipeline import Pipeline
from ds4py.coordinator.relay.context import RelayContext
from ds4py.coordinator.relay.pipeline import RelayPipeline
from ds4py.coordinator.relay.planner import Demand, plan_route
from ds4py.coordinator.relay.route import Route, route_blob
from ds4py.coordinator.relay.telemetry import RouteTelemetry
from ds4py.coordinator.relay.workers.dialer import Dialer
from ds4py.coordinator.relay.workers.membership import Membership
from ds4py.coordinator.relay.workers.registration import WorkerRegistrar
from ds4py.coordinator.relay.workers.registry import LinkId, WorkerRecord
from ds4py.coordinator.relay.workers.worker_hello import CoordinatorFacts
from ds4py.errors import (
    CancelledError,
    ClusterError,
    Ds4Error,
    RouteIncompleteError,
)
from ds4py.peer.hello import coordinator_hello
from ds4py.peer.known_peers import PeerIdentityLog
from ds4py.stage.stage import Stage
from ds4py.tracing.events import TraceRecorder
from ds4py.transport.connection import Connection
from ds4py.transport.connector import Connector
from ds4py.transport.security import PLAIN, Security
from ds4py.wire.extensions import DROP, HOP_LOST, REWIND, Drop, PeerHello
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
        self.workers = Membership(self)
        self._changed = self.workers.changed  # guards the pipeline too
        self._pipeline: RelayPipeline | None = None
        self._was_complete = False
        self._closed = False
        self._link_ids = itertools.count(1)
        self._context = RelayContext(card, n_ctx, config, self.connector)
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
        self.workers.tell(self.workers.records, DROP, Drop(session))
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
        return route.generation == self.workers.registry.generation and not lost

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
                    may_wait = after_loss or self._was_complete
                    if not may_wait or time.monotonic() >= deadline:
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
            log.info("route: %s", " -> ".join(route.stage_names))
        return self._pipeline

    def _plan(self) -> Route:
        demand = self._demand()
        hops = plan_route(demand, self.workers.alive())
        local_rewinds = self.local is None or self.local.runner.can_rewind
        return Route(
            generation=self.workers.registry.generation,
            hops=hops,
            channels=self.workers.channels[hops[0].link] if hops else None,
            blob=route_blob(hops) if hops else b"",
            local=self.local,
            local_head=demand.local_head,
            telemetry=self.telemetry,
            tell=self.workers.tell,
            watching=self.workers.watching,
            can_rewind=local_rewinds and all(REWIND in hop.features for hop in hops),
        )

    def _demand(self) -> Demand:
        if self.local is None:
            return Demand(None, self._card.n_layers, local_head=False)
        return Demand(self.local.layers, self._card.n_layers, self.local.runner.has_head)

    # --- what workers see --------------------------------------------------------------------

    def start(self) -> None:
        """Begin to dial the workers of the configured route."""
        for dialer in self._dialers:
            dialer.start()

    def facts(self) -> CoordinatorFacts:
        """Return what a worker's introduction is compared with."""
        card = self._card
        return CoordinatorFacts(
            model_id=card.model_id, name=card.name, n_layers=card.n_layers, n_ctx=self._n_ctx
        )

    def introduce(self) -> PeerHello:
        """Return our half of the handshake with another ds4py."""
        own = self._demand().local
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
        self.workers.serve(connection, record)

    def lost(self, record: WorkerRecord, *, silent: bool) -> None:
        """Wait for answers of a route with a lost worker no longer than makes sense."""
        pipeline = self._pipeline
        if pipeline is not None:
            _hurry(pipeline.route, record, silent=silent)

    # --- what operators see ------------------------------------------------------------------

    def health(self) -> Health:
        """Report readiness and the stages that are known."""
        with self._changed:
            missing, workers = "", self.workers.registry.records
            try:
                workers = self._current().route.hops
            except RouteIncompleteError as e:
                missing = e.missing
            return Health(
                ready=not missing,
                missing=missing,
                stages=stage_statuses(self.telemetry, self.local, workers),
                replays=self.telemetry.replays,
                route_changes=self.telemetry.route_changes,
            )

    def wait_ready(self, cancelled: Cancelled, progress: Callable[[str], None]) -> bool:
        """Wait until the route is complete; False if `cancelled` became true first.

        What is missing is told to `progress` whenever it changes.
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
        links = self.workers.close()
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


def stage_statuses(
    telemetry: RouteTelemetry, local: Stage | None, workers: Iterable[WorkerRecord]
) -> tuple[StageStatus, ...]:
    """Return how the coordinator and some workers do, in layer order."""
    if local is None:
        first = telemetry.status("coordinator", None, 0)
    else:
        first = telemetry.status("coordinator", local.layers, local.runner.weight_bytes)
        first = _with_cache(first, local.runner)
    ordered = sorted(workers, key=lambda w: w.layers)
    return (
        first,
        *(telemetry.status(str(w.address), w.layers, w.weight_bytes) for w in ordered),
    )


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
