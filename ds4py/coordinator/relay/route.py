"""A route that is ready to carry spans.

Owns: the value that binds a plan to live connections and to the coordinator's own slice. Refuses to
know: how it was found, which sessions use it. Invariant: a route is current while its generation
equals the registry's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ds4py.coordinator.chunk_size import StageKey
from ds4py.coordinator.chunked_prefill import Chunk
from ds4py.coordinator.relay.hop import Link
from ds4py.coordinator.relay.hop_channels import HopChannels
from ds4py.coordinator.relay.telemetry import RouteTelemetry
from ds4py.coordinator.relay.workers.membership import Lost
from ds4py.coordinator.relay.workers.registry import WorkerRecord
from ds4py.layer_range import LayerRange
from ds4py.stage.stage import Stage
from ds4py.wire.extensions import FORK, Notice
from ds4py.wire.messages import WorkFlags
from ds4py.wire.route import HopEntry, encode_route


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteShape:
    """What of a route decides the flags of a frame.

    Args:
        first_layer: First layer of hop 0; input travels unless it is 0.
        first_is_output: Hop 0 owns the output head.
    """

    first_layer: int
    first_is_output: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The coordinator's own slice, then the hops.

    Args:
        generation: Of the registry when the plan was made.
        hops: Remote stages in layer order; may be empty.
        channels: Connections to hop 0; None without hops.
        blob: Encoded route, forwarded unchanged by every hop.
        local: The coordinator's own layers; None if it owns none.
        local_head: Whether own layers can apply the output head, for a headless last hop.
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
    local: Stage | None
    local_head: bool
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
        return None if self.local is None else self.local.layers

    @property
    def stage_names(self) -> list[str]:
        """The stages in order, for the log."""
        own = [] if self.local_layers is None else [f"coordinator (layers {self.local_layers})"]
        return own + [hop.name for hop in self.hops]

    @property
    def stage_keys(self) -> list[StageKey]:
        """Layer ranges that a chunk passes, in order."""
        own = [] if self.local_layers is None else [self.local_layers]
        ranges = (*own, *(hop.layers for hop in self.hops))
        return [(layers.start, layers.end) for layers in ranges]

    def record_local(self, pos0: int, n_tokens: int, eval_usec: int) -> None:
        """Take note of a chunk that own layers have evaluated."""
        assert self.local_layers is not None
        self.telemetry.record_local(self.local_layers, n_tokens, eval_usec)
        key = self.local_layers.start, self.local_layers.end
        self.telemetry.costs.add(key, pos0, n_tokens, eval_usec=eval_usec)

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
        """What of the route decides the flags of a frame."""
        first = self.hops[0].layers if self.hops else None
        return RouteShape(
            first_layer=0 if first is None else first.start,
            first_is_output=first is not None and first.has_output,
        )

    @property
    def last_has_output(self) -> bool:
        """Whether the last hop answers with logits."""
        return bool(self.hops) and self.hops[-1].layers.has_output


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


def work_flags(shape: RouteShape, chunk: Chunk, *, ack_early: bool) -> WorkFlags:
    """Return the flags of a chunk's frame to hop 0 (docs/spec/wire-protocol.md#pipelined-prefill).

    Args:
        shape: The route.
        chunk: One that begins a timeline resets the session on every stage.
        ack_early: Whether chunks without logits ask for an ACK instead of their full result.
    """
    flags = WorkFlags(0)
    if shape.first_layer != 0:
        flags |= WorkFlags.INPUT_HC
    if shape.first_is_output:
        flags |= WorkFlags.OUTPUT_LOGITS
    if chunk.pos0 == 0:
        flags |= WorkFlags.RESET_SESSION
    if ack_early and not chunk.n_logits:
        flags |= WorkFlags.ACK_ONLY
    return flags
