"""What a session knows of the layers below it: a pipeline, wherever its stages are.

Owns: the contract between policy (what is evaluated, reused, started over: `session`) and transport
(how a chunk gets there and its logits come back: `relay`). Refuses to know: sockets, frames, any
one transport. Invariant: a second transport implements these Protocols and edits nothing above.

A pipeline is a snapshot: when a worker comes or goes it stays as it was, is no longer current, and
the source makes another one. Sessions belong to the stages, not to the pipeline: a later pipeline
over the same stages finds what an earlier one left there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ds4py.activations import F32
from ds4py.config import CoordinatorConfig
from ds4py.contracts import Cancelled, Health, ModelCard, SessionId
from ds4py.coordinator.chunk_size import StageKey, StageModel
from ds4py.coordinator.chunked_prefill import Chunk
from ds4py.snapshot import SavedShard, SessionState

Completed = Callable[[int, int], None]
"""Told, in order, of each length of the timeline that every stage has reached, and of the prefix
hash of that many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """What a session's stages have evaluated.

    Args:
        tokens: Ids, oldest first.
        token_hash: Prefix hash of all of them.
    """

    tokens: tuple[int, ...]
    token_hash: int


class Pipeline(Protocol):
    """All layers of a model, as one thing that evaluates chunks of sessions.

    Runs of different sessions may be under way at once, each on a thread of its own.
    """

    @property
    def stages(self) -> Hashable:
        """What names the remote processes that hold sessions' caches; equal over the same ones."""

    @property
    def n_remote(self) -> int:
        """Stages that are other processes; without any, chunks have nothing to overlap with."""

    @property
    def can_rewind(self) -> bool:
        """Whether every stage can cut a timeline at any position."""

    @property
    def can_fork(self) -> bool:
        """Whether every stage can copy a prefix from session to session."""

    def costs(self) -> Mapping[StageKey, StageModel] | None:
        """Return what chunks cost each stage, in order; None while that is not known of all."""

    def run(
        self,
        session: SessionId,
        chunks: Sequence[Chunk],
        *,
        window: int,
        completed: Completed,
        cancelled: Cancelled | None,
    ) -> F32:
        """Evaluate consecutive chunks of one session on every stage.

        Args:
            session: Its timeline must end where the first chunk begins, unless that resets it.
            chunks: In order; the last one asks for logits.
            window: Most chunks under way; 1 waits for each before the next.
            completed: Called on this thread.
            cancelled: Polled; stages are told to leave out what has not begun.

        Returns:
            Logits f32 `[n, V]` of all rows that chunks ask for, in order.

        Raises:
            CancelledError: `cancelled` became true; what was under way has been waited for.
            PrefixMismatchError: A stage of this process holds other tokens.
            RemoteWorkError: A stage refused or failed, in its own words.
            CapacityError: A stage of this process has no room.
            TransportError: A stage was lost.
            Ds4Error: Anything else, for good.
        """

    def copy_prefix(
        self, source: SessionId, target: SessionId, tokens: Sequence[int], *, timeout: float
    ) -> bool:
        """Have every stage begin a session as another one did (only if `can_fork`).

        A remote stage that cannot copy refuses the chunk that comes next.

        Args:
            source: Goes on unchanged.
            target: What it holds is replaced.
            tokens: What both are to begin with.
            timeout: Seconds that stages of this process may take.

        Returns:
            False if a stage of this process could not; then none was told to.
        """

    def save(self, session: SessionId, transcript: Transcript, logits: F32) -> list[memoryview]:
        """Return the pieces of a session's payload; see `contracts.Session.save`.

        Args:
            session: Goes on unchanged.
            transcript: What its stages must hold.
            logits: After the last token, float32 `[V]`; not copied.
        """

    def load(
        self, session: SessionId, transcript: Transcript, state: SessionState[SavedShard]
    ) -> None:
        """Give every stage its part of a saved session.

        Raises:
            Ds4Error: As in `save`; some stages may have their part and others not.
        """


class PipelineSource(Protocol):
    """Where sessions get their pipelines: what keeps the workers."""

    @property
    def card(self) -> ModelCard:
        """The served model."""

    @property
    def n_ctx(self) -> int:
        """Tokens that one session can hold."""

    @property
    def config(self) -> CoordinatorConfig:
        """Chunks, windows, deadlines."""

    @property
    def can_fork(self) -> bool:
        """Whether the latest pipeline can copy prefixes."""

    def new_session(self) -> SessionId:
        """Return a name for a timeline, unlike all others."""

    def end_session(self, session: SessionId) -> None:
        """Let every stage free what it holds of a session, also those of earlier pipelines."""

    def ensure_pipeline(self, *, after_loss: bool, cancelled: Cancelled | None) -> Pipeline:
        """Return a current pipeline, waiting for a lost worker to come back if that may help.

        Args:
            after_loss: The caller has just lost a stage.
            cancelled: Polled while waiting.

        Raises:
            RouteIncompleteError: Nobody came in time; names the missing layers.
            CancelledError: `cancelled` became true.
        """

    def is_current(self, pipeline: Pipeline) -> bool:
        """Whether no worker came or went since the pipeline was made."""

    def wait_for_change(self, pipeline: Pipeline, seconds: float) -> bool:
        """Wait until a pipeline is current no more; False if it still is after `seconds`."""

    def count_replay(self) -> None:
        """Take note that a timeline is evaluated again from its start."""

    def health(self) -> Health:
        """Report readiness and the stages that are known; never blocks."""
