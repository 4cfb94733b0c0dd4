"""A route that is ready to carry spans.

Owns: the value that binds a plan to live connections and to the coordinator's own slice. Refuses to
know: how it was found, which sessions use it. Invariant: a route is current while its generation
equals the registry's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from ds4py.activations import F32, HiddenBatch
from ds4py.config import SocketConfig
from ds4py.contracts import Cancelled, ModelCard, SessionId
from ds4py.coordinator.chunked_prefill import RouteShape
from ds4py.coordinator.relay.hop import Link
from ds4py.coordinator.relay.hop_channels import HopChannels
from ds4py.coordinator.relay.registry import WorkerRecord
from ds4py.coordinator.relay.telemetry import RouteTelemetry
from ds4py.layer_range import LayerRange
from ds4py.stage.executor import DeviceThread
from ds4py.wire.extensions import FORK, Notice
from ds4py.wire.route import HopEntry, encode_route

Lost = Callable[[], None]
"""Told of a loss, on any thread; must return at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The coordinator's own slice, then the hops.

    Args:
        generation: Of the registry when the plan was made.
        hops: Remote stages in layer order; may be empty.
        channels: Connections to hop 0; None without hops.
        blob: Encoded route, forwarded unchanged by every hop.
        local: Device of the coordinator's own layers; None if it owns none.
        apply_head: Turns the last row of a hidden batch into logits, for a headless last hop; None
            where the coordinator has no head.
        telemetry: Where results leave their timings.
        tell: Sends a notice to those of some hops that have a feature.
        watching: While it is entered, a function is called if one of some hops is lost; at once if
            one is lost already.
        can_rewind: Whether every stage can cut its timeline.
    """

    generation: int
    hops: tuple[WorkerRecord, ...]
    channels: HopChannels | None
    blob: bytes
    local: DeviceThread | None
    apply_head: Callable[[HiddenBatch], F32] | None
    telemetry: RouteTelemetry
    tell: Callable[[Iterable[WorkerRecord], str, Notice], None]
    watching: Callable[[Collection[WorkerRecord], Lost], AbstractContextManager[None]]
    can_rewind: bool

    @property
    def link(self) -> Link | None:
        """The connection that hop 0 is registered with."""
        return None if self.channels is None else self.channels.bulk

    @property
    def local_layers(self) -> LayerRange | None:
        """The coordinator's own layers."""
        return None if self.local is None else self.local.runner.layers

    @property
    def can_fork(self) -> bool:
        """Whether every stage can let a session begin with a copy of another one's first tokens."""
        return self.can_rewind and all(FORK in hop.features for hop in self.hops)

    @property
    def may_skip(self) -> tuple[WorkerRecord, ...]:
        """Hops that may leave out spans of a cancelled request without harm.

        Stages that can rewind agree again with the next span. For others what is cached is of use
        only while all hold the same, so only the first stage of all may leave a span out.
        """
        if self.can_rewind:
            return self.hops
        return self.hops[:1] if self.local is None else ()

    @property
    def shape(self) -> RouteShape:
        """What of the route decides flags and windows."""
        first = self.hops[0].layers if self.hops else None
        return RouteShape(
            n_hops=len(self.hops),
            first_layer=0 if first is None else first.start,
            first_is_output=first is not None and first.has_output,
        )

    @property
    def last_has_output(self) -> bool:
        """Whether the last hop answers with logits."""
        return bool(self.hops) and self.hops[-1].layers.has_output


class RouteSource(Protocol):
    """What a session needs of its coordinator."""

    @property
    def card(self) -> ModelCard:
        """The served model."""

    @property
    def n_ctx(self) -> int:
        """Tokens that one session can hold."""

    @property
    def sockets(self) -> SocketConfig:
        """Options of connections."""

    def ensure_route(self, *, after_loss: bool, cancelled: Cancelled | None) -> Route:
        """Return a current route, waiting for a lost worker to come back if that may help."""

    def is_current(self, route: Route) -> bool:
        """Whether no worker came or went since the route was made."""

    def wait_for_change(self, route: Route, seconds: float) -> bool:
        """Wait until a route is current no more; False if it still is after `seconds`."""

    def next_request_id(self) -> int:
        """Return a request id that was never used before."""

    def end_session(self, session: SessionId) -> None:
        """Let every stage free what it holds of a session, the coordinator's own one too."""


def route_blob(hops: tuple[WorkerRecord, ...]) -> bytes:
    """Encode the hops and the return record (docs/spec/wire-protocol.md#route-plan)."""
    return encode_route(
        [
            HopEntry(
                host=hop.address.host,
                port=hop.address.port,
                layer_start=hop.layers.start,
                layer_end=hop.layers.end,
                has_output=hop.layers.has_output,
            )
            for hop in hops
        ]
    )
