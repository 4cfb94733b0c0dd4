"""`coordinator.pipeline.Pipeline` over DS4D: own layers, then workers that forward to each other.

Owns: putting the parts of the relay behind that contract. Refuses to know: timelines, replay, how
routes are found. Invariant: as immutable as its route; it keeps nothing of a session.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from ds4py.activations import F32
from ds4py.contracts import Cancelled, SessionId
from ds4py.coordinator.chunk_size import StageKey, StageModel
from ds4py.coordinator.chunked_prefill import Chunk, one_row_each
from ds4py.coordinator.pipeline import Completed, Transcript
from ds4py.coordinator.relay.context import RelayContext
from ds4py.coordinator.relay.kv_transfer import KvTransfer
from ds4py.coordinator.relay.route import Route
from ds4py.coordinator.relay.run import PipelinedRun
from ds4py.errors import CapacityError, ModelError, PrefixMismatchError
from ds4py.snapshot import SavedShard, SessionState
from ds4py.stage.executor import wait_for
from ds4py.wire.extensions import FORK, Fork
from ds4py.wire.prefix_hash import prefix_hash


class RelayPipeline:
    """A route as a pipeline.

    Args:
        route: The stages.
        context: What all routes of a coordinator share.
    """

    def __init__(self, route: Route, context: RelayContext):
        self.route = route
        self._context = context
        self._transfer = KvTransfer(route, context)

    @property
    def stages(self) -> Hashable:
        """The hops; a worker that has come back is another one, since it has forgotten."""
        return self.route.hops

    @property
    def n_remote(self) -> int:
        """Hops."""
        return len(self.route.hops)

    @property
    def can_rewind(self) -> bool:
        """Whether every stage can cut its timeline."""
        return self.route.can_rewind

    @property
    def can_fork(self) -> bool:
        """Whether every stage can copy a prefix."""
        return self.route.can_fork

    def costs(self) -> Mapping[StageKey, StageModel] | None:
        """Return what chunks cost each stage; see `Pipeline.costs`."""
        keys = self.route.stage_keys
        models = self.route.telemetry.costs.models(keys)
        return None if models is None else dict(zip(keys, models, strict=True))

    def run(
        self,
        session: SessionId,
        chunks: Sequence[Chunk],
        *,
        window: int,
        completed: Completed,
        cancelled: Cancelled | None,
    ) -> F32:
        """Evaluate chunks; see `Pipeline.run`."""
        if self.route.last_has_output:  # a RESULT has logits of one row
            chunks = one_row_each(chunks)
        run = PipelinedRun(
            self.route, self._context, session, chunks, window=window, completed=completed
        )
        return run.run(cancelled)

    def copy_prefix(
        self, source: SessionId, target: SessionId, tokens: Sequence[int], *, timeout: float
    ) -> bool:
        """Have every stage copy a prefix; see `Pipeline.copy_prefix`."""
        fork = Fork(source, target, len(tokens), prefix_hash(tokens))
        if self.route.local is not None:
            copy = self.route.local.copy_prefix(source, target, fork.n_tokens, fork.prefix_hash)
            try:
                wait_for(copy, timeout)
            except (PrefixMismatchError, CapacityError, ModelError):
                return False
        self.route.tell(self.route.hops, FORK, fork)
        return True

    def save(self, session: SessionId, transcript: Transcript, logits: F32) -> list[memoryview]:
        """Return a session's payload; see `Pipeline.save`."""
        return self._transfer.save(session, transcript, logits)

    def load(
        self, session: SessionId, transcript: Transcript, state: SessionState[SavedShard]
    ) -> None:
        """Give every stage its part of a saved session; see `Pipeline.load`."""
        self._transfer.load(session, transcript, state)
