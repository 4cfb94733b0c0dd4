"""One token timeline over a pipeline: sync, eval, rewind, and replay when a stage forgets.

Owns: the timeline, its rolling hash, what to reuse of it, the one replay
(docs/spec/wire-protocol.md#plan-lifetime, #replay, #sync-and-decode). Refuses to know: sockets,
registries, layers. Invariant: `tokens` are cached on every stage, or the stage refuses to go on;
after a failure the timeline is empty, unless nothing but room was missing, and old logits are never
given for a new prompt.

A process that owns every layer is a pipeline without remote stages: there is no second kind of
session. A decode step touches nothing that is as long as the context.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ds4py.activations import F32
from ds4py.config import CoordinatorConfig
from ds4py.contracts import Cancelled, Progress, SessionId, SyncResult
from ds4py.coordinator.chunk_planner import ChunkPlanner
from ds4py.coordinator.pipeline import Pipeline, PipelineSource, Transcript
from ds4py.coordinator.prefix_sharing import MIN_SAVED, choose_copy, common_prefix
from ds4py.coordinator.recovery import Failure, Recovery, as_capacity, classify
from ds4py.errors import CancelledError, CapacityError, Ds4Error, RemoteWorkError, SnapshotError
from ds4py.snapshot import read_whole, saved_sizes
from ds4py.wire.prefix_hash import INIT, prefix_hash

log = logging.getLogger(__name__)

_NEWS_SECONDS: Final = 1.0


class EvictionPolicy(Protocol):
    """The other sessions of the process."""

    def others(self, session: ClusterSession) -> Iterable[ClusterSession]:
        """Return all but one, in use or not."""

    def make_room(self, n_tokens: int) -> bool:
        """Give back the caches of sessions that nobody uses, of so many tokens; False if none."""


class NoEviction:
    """The company of a session without any."""

    def others(self, session: ClusterSession) -> Iterable[ClusterSession]:
        """Return nobody."""
        del session
        return ()

    def make_room(self, n_tokens: int) -> bool:
        """Return False."""
        del n_tokens
        return False


@dataclass(slots=True)
class _Goal:
    """The timeline that a call wants: leading tokens of the present one, then others.

    Args:
        n_same: Tokens that stay.
        todo: Tokens to evaluate behind them, at least one: the logits come from the last.
        n_done: How many of those that stay this call has evaluated itself.
    """

    n_same: int
    todo: list[int]
    n_done: int = 0

    @property
    def length(self) -> int:
        """Tokens of the whole timeline."""
        return self.n_same + len(self.todo)

    @property
    def n_cached(self) -> int:
        """Tokens that were there before the call."""
        return self.n_same - self.n_done


class ClusterSession:
    """A `contracts.Session` over whatever pipeline its source finds.

    Args:
        session_id: Fixed for life; names the timeline on every stage.
        source: Finds pipelines.
        config: Chunks, windows, widths, deadlines.
        eviction: Sessions to copy common prefixes from, and to let go when memory is short.
    """

    def __init__(
        self,
        session_id: SessionId,
        source: PipelineSource,
        config: CoordinatorConfig,
        eviction: EvictionPolicy | None = None,
    ):
        self.session_id = session_id
        self._source = source
        self._config = config
        self._eviction = eviction or NoEviction()
        self._planner = ChunkPlanner(config.prefill, source.n_ctx)
        self._held_on: Hashable = None  # stages that have cached the tokens
        self._takes_memory = False
        self._tokens: list[int] = []
        self._hash = INIT
        self._stages_hold_more = False
        self._rewinds = False  # on the pipeline that was used last
        self._logits: F32 | None = None

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens that every stage has cached."""
        return tuple(self._tokens)

    @property
    def n_ctx(self) -> int:
        """Tokens that the session can hold."""
        return self._source.n_ctx

    @property
    def takes_memory(self) -> bool:
        """Whether stages may hold anything of the session."""
        return self._takes_memory

    def shares(self, wanted: Sequence[int], pipeline: Pipeline) -> int:
        """Return how many leading tokens of a prompt a pipeline's stages hold; on any thread.

        The answer may be out of date at once.
        """
        return common_prefix(self._tokens[:], wanted) if self._held_on == pipeline.stages else 0

    def reusable(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens need no evaluation; see `contracts.Session.reusable`."""
        held = self._tokens[:]
        n_same = min(common_prefix(held, tokens), max(len(tokens) - 1, 0))
        whole = n_same == len(held) and not self._stages_hold_more
        return n_same if whole or self._rewinds else 0

    def sync(
        self,
        tokens: Sequence[int],
        *,
        progress: Progress | None = None,
        cancelled: Cancelled | None = None,
    ) -> SyncResult:
        """Bring every stage to exactly `tokens`; see `contracts.Session.sync`."""
        wanted = list(tokens)
        self._check_length(len(wanted))
        if wanted == self._tokens and self._logits is not None:
            return SyncResult(logits=self._logits, n_cached=len(wanted))
        n_same = min(common_prefix(self._tokens, wanted), len(wanted) - 1)
        return self._advance(_Goal(n_same, wanted[n_same:]), progress, cancelled)

    def eval(self, token: int) -> F32:
        """Append one token; see `contracts.Session.eval`."""
        self._check_length(len(self._tokens) + 1)
        return self._advance(_Goal(len(self._tokens), [token]), None, None).logits

    def rewind(self, n_tokens: int) -> None:
        """Forget everything after the first `n_tokens` tokens; stages follow with the next span."""
        if n_tokens < len(self._tokens):
            self._cut_back(n_tokens)
            self._stages_hold_more = True
            self._logits = None

    def save(self) -> list[memoryview]:
        """Return the session's payload in pieces; see `contracts.Session.save`."""
        if self._logits is None:
            raise SnapshotError(
                f"session of {len(self._tokens)} tokens: has no logits for the last one, "
                "expected an evaluated prompt; sync it first"
            )
        pipeline = self._source.ensure_pipeline(after_loss=False, cancelled=None)
        transcript = Transcript(tokens=tuple(self._tokens), token_hash=self._hash)
        return pipeline.save(self.session_id, transcript, self._logits.copy())

    def load(self, payload: bytes | memoryview) -> None:
        """Continue a saved session; see `contracts.Session.load`."""
        sizes = saved_sizes(self._source.card)
        state = read_whole(payload, sizes, n_ctx=self.n_ctx)
        pipeline = self._source.ensure_pipeline(after_loss=False, cancelled=None)
        tokens = state.tokens.tolist()
        transcript = Transcript(tokens=tuple(tokens), token_hash=prefix_hash(tokens))
        self._forget()  # a stage that is not reached keeps what it has, until a replay
        self._takes_memory = True
        pipeline.load(self.session_id, transcript, state)
        self._tokens, self._hash = tokens, transcript.token_hash
        self._logits = state.logits.copy()
        self._held_on, self._rewinds = pipeline.stages, pipeline.can_rewind

    def close(self) -> None:
        """Forget the timeline; the id lives on, since a C worker never frees a session."""
        self._forget()
        self._source.end_session(self.session_id)
        self._takes_memory = False

    def _check_length(self, n_tokens: int) -> None:
        if not 1 <= n_tokens <= self.n_ctx:
            raise CapacityError("context tokens", needed=n_tokens, available=self.n_ctx)

    def _forget(self) -> None:
        self._tokens, self._hash = [], INIT
        self._stages_hold_more = False
        self._logits = None

    def _cut_back(self, n_tokens: int) -> None:
        if n_tokens < len(self._tokens):
            del self._tokens[n_tokens:]
            self._hash = prefix_hash(self._tokens)

    def _advance(
        self, goal: _Goal, progress: Progress | None, cancelled: Cancelled | None
    ) -> SyncResult:
        """Evaluate what is missing, replaying from zero if a stage refuses or is lost."""
        recovery = Recovery()
        failure: Failure | None = None
        while True:
            after_loss = failure is Failure.LOST
            pipeline = self._source.ensure_pipeline(after_loss=after_loss, cancelled=cancelled)
            self._rewinds = pipeline.can_rewind
            try:
                self._keep(pipeline, goal)
                if failure is None and self._copy_prefix(pipeline, goal):
                    recovery.refused += 1  # the notice may come too late twice: for the replay too
                return self._evaluate(pipeline, goal, progress, cancelled)
            except CancelledError:
                raise
            except Ds4Error as e:
                failure = self._meaning(e, pipeline, recovery)
                if failure is Failure.FULL:
                    self._get_room(e, pipeline, recovery, goal)
                    continue
                self._start_over(goal)
                if not recovery.allows(failure):
                    raise
                self._source.count_replay()
                log.warning("replaying %d tokens from the start: %s", goal.length, e)

    def _start_over(self, goal: _Goal) -> None:
        """Forget the timeline, of which nothing is certain any more."""
        goal.todo = [*self._tokens[: goal.n_same], *goal.todo]
        goal.n_same = goal.n_done = 0
        self._forget()

    def _get_room(
        self, error: Ds4Error, pipeline: Pipeline, recovery: Recovery, goal: _Goal
    ) -> None:
        """Let idle sessions go, for an attempt to go on from what is cached.

        Raises:
            CapacityError: There are none, or it did not help.
            RemoteWorkError: The same, in words of a hop that cannot be understood.
        """
        n_done = len(self._tokens) - goal.n_same
        goal.todo = goal.todo[n_done:]
        goal.n_same, goal.n_done = goal.n_same + n_done, goal.n_done + n_done
        again = recovery.allows(Failure.FULL)
        if again and recovery.full:
            again = self._eviction.make_room(len(goal.todo))
            log.info("idle sessions make room for %d tokens: %s; %s", len(goal.todo), again, error)
        elif again and isinstance(error, RemoteWorkError):
            # hops read of those who went on other connections than of this span: perhaps later
            self._source.wait_for_change(pipeline, _NEWS_SECONDS)
        if not again:
            told = as_capacity(error)
            raise told from (None if told is error else error)

    def _meaning(self, error: Ds4Error, pipeline: Pipeline, recovery: Recovery) -> Failure:
        """Decide what a failed attempt means.

        A hop may report that its next hop died before our own connection to that one breaks, so
        news is waited for before a refusal is final.
        """
        failure = classify(error, route_is_current=self._source.is_current(pipeline))
        final = failure is Failure.REFUSED and not recovery.refused
        if final and self._source.wait_for_change(pipeline, _NEWS_SECONDS):
            return Failure.LOST
        return failure

    def _keep(self, pipeline: Pipeline, goal: _Goal) -> None:
        """Cut the timeline to what can be reused.

        Without rewind, caches are of use only if all that every stage holds is to stay.
        """
        whole = goal.n_same == len(self._tokens) and not self._stages_hold_more
        if not (whole or pipeline.can_rewind):
            goal.todo = [*self._tokens[: goal.n_same], *goal.todo]
            goal.n_same = goal.n_done = 0
        self._cut_back(goal.n_same)

    def _copy_prefix(self, pipeline: Pipeline, goal: _Goal) -> bool:
        """Begin as another session did, if that saves much; False if nothing was copied."""
        if len(goal.todo) <= MIN_SAVED:
            return False
        wanted = [*self._tokens, *goal.todo]
        self._takes_memory = True
        others = self._eviction.others(self)
        copy = choose_copy(pipeline, others, wanted, goal.n_same)
        if copy is None:
            return False
        prefix, seconds = wanted[: copy.n_tokens], self._config.result_timeout
        if not pipeline.copy_prefix(copy.source, self.session_id, prefix, timeout=seconds):
            return False
        self._tokens, goal.todo = prefix, wanted[copy.n_tokens :]
        self._hash = prefix_hash(prefix)
        goal.n_same = copy.n_tokens
        return True

    def _evaluate(
        self,
        pipeline: Pipeline,
        goal: _Goal,
        progress: Progress | None,
        cancelled: Cancelled | None,
    ) -> SyncResult:
        """Evaluate what is to do behind the timeline."""
        start, todo, length = goal.n_same, goal.todo, goal.length
        plan = self._planner.plan(pipeline, self._tokens, self._hash, todo)

        def completed(end: int, token_hash: int) -> None:
            self._held_on = pipeline.stages
            self._tokens.extend(todo[len(self._tokens) - start : end - start])
            self._hash = token_hash
            if progress is not None:
                progress(end, length)

        # until it returns, stages may be ahead of `tokens` by chunks that were cut short
        self._stages_hold_more, self._logits = True, None
        self._takes_memory = True
        try:
            rows = pipeline.run(
                self.session_id,
                plan.chunks,
                window=plan.window,
                completed=completed,
                cancelled=cancelled,
            )
        except CancelledError as e:
            # all that was sent has been answered; a chunk that was evaluated aligned every stage
            self._stages_hold_more = e.uneven or len(self._tokens) == start
            raise
        self._stages_hold_more, self._logits = False, rows[-1]
        return SyncResult(logits=rows[-1], n_cached=goal.n_cached)
