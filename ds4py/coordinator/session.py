"""One token timeline over a route: sync, eval, rewind, and replay when a stage forgets.

Owns: the timeline, its rolling hash, what to reuse of it, the one replay
(docs/spec/wire-protocol.md#plan-lifetime, #replay, #sync-and-decode). Refuses to know: sockets,
registries, layers. Invariant: `tokens` are cached on every stage, or the stage refuses to go on;
after a failure the timeline is empty, unless nothing but room was missing, and old logits are never
given for a new prompt.

A process that owns every layer is a route without hops: there is no second kind of session. A
decode step touches nothing that is as long as the context.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ds4py.activations import F32
from ds4py.config import CoordinatorConfig
from ds4py.contracts import Cancelled, Progress, SessionId, SyncResult
from ds4py.coordinator.chunk_size import GRANULE, StageKey, Stretch, choose
from ds4py.coordinator.chunked_prefill import (
    Chunk,
    chunk_flags,
    cut_chunks,
    given_chunk,
    prefill_cap,
    window_size,
)
from ds4py.coordinator.prefix_sharing import MIN_SAVED, PrefixSharing, common_prefix
from ds4py.coordinator.recovery import Failure, Recovery, as_capacity, classify
from ds4py.coordinator.relay.kv_transfer import FIRST_REQUEST, Snapshots, Transcript
from ds4py.coordinator.relay.pipeline import PipelinedRun, RunContext
from ds4py.coordinator.relay.registry import WorkerRecord
from ds4py.coordinator.relay.route import Route, RouteSource
from ds4py.errors import (
    CancelledError,
    CapacityError,
    Ds4Error,
    RemoteWorkError,
    SnapshotError,
)
from ds4py.wire.prefix_hash import INIT, extend, prefix_hash

log = logging.getLogger(__name__)

_NEWS_SECONDS: Final = 1.0


def stage_keys(route: Route) -> list[StageKey]:
    """Return the layer ranges that a span passes, in order."""
    own = [] if route.local_layers is None else [route.local_layers]
    return [(layers.start, layers.end) for layers in (*own, *(hop.layers for hop in route.hops))]


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
    """A `contracts.Session` over whatever route its coordinator finds.

    Args:
        session_id: Fixed for life; names the timeline on every stage.
        source: Finds routes and hands out request ids.
        config: Chunks, windows, widths, deadlines.
        eviction: Sessions to copy common prefixes from, and to let go when memory is short.
    """

    def __init__(
        self,
        session_id: SessionId,
        source: RouteSource,
        config: CoordinatorConfig,
        eviction: EvictionPolicy | None = None,
    ):
        self.session_id = session_id
        self._source = source
        self._config = config
        self._eviction = eviction or NoEviction()
        self._sharing = PrefixSharing(session_id, config.result_timeout)
        self._held_on: tuple[WorkerRecord, ...] | None = None  # hops that have cached the tokens
        self._takes_memory = False
        self._tokens: list[int] = []
        self._hash = INIT
        self._stages_hold_more = False
        self._rewinds = False  # on the route that was used last
        self._chunk = 0
        self._logits: F32 | None = None
        self._snapshots = Snapshots(
            session=session_id,
            card=source.card,
            n_ctx=source.n_ctx,
            sockets=source.sockets,
            device_seconds=config.result_timeout,
            next_request_id=itertools.count(FIRST_REQUEST).__next__,
        )

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

    def shares(self, wanted: Sequence[int], route: Route) -> int:
        """Return how many leading tokens of a prompt a route's stages hold for it; on any thread.

        The answer may be out of date at once.
        """
        return common_prefix(self._tokens[:], wanted) if self._held_on == route.hops else 0

    def holds(self, prefix: Sequence[int]) -> bool:
        """Whether these are its first tokens; on any thread.

        Rows of own layers are overwritten only after their tokens were taken from the timeline.
        """
        return self._tokens[: len(prefix)] == list(prefix)

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
        route = self._source.ensure_route(after_loss=False, cancelled=None)
        transcript = Transcript(tokens=tuple(self._tokens), token_hash=self._hash)
        return self._snapshots.save(route, transcript, self._logits.copy())

    def load(self, payload: bytes | memoryview) -> None:
        """Continue a saved session; see `contracts.Session.load`."""
        whole = self._snapshots.read(payload)
        route = self._source.ensure_route(after_loss=False, cancelled=None)
        tokens = whole.tokens.tolist()
        transcript = Transcript(tokens=tuple(tokens), token_hash=prefix_hash(tokens))
        self._forget()  # a stage that is not reached keeps what it has, until a replay
        self._takes_memory = True
        self._snapshots.load(route, transcript, whole)
        self._tokens, self._hash = tokens, transcript.token_hash
        self._logits = whole.logits.copy()
        self._held_on, self._rewinds = route.hops, route.can_rewind

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
            route = self._source.ensure_route(after_loss=after_loss, cancelled=cancelled)
            self._rewinds = route.can_rewind
            try:
                self._keep(route, goal)
                if failure is None and self._copy_prefix(route, goal):
                    recovery.refused += 1  # the notice may come too late twice: for the replay too
                return self._evaluate(route, goal, progress, cancelled)
            except CancelledError:
                raise
            except Ds4Error as e:
                failure = self._meaning(e, route, recovery)
                if failure is Failure.FULL:
                    self._get_room(e, route, recovery, goal)
                    continue
                self._start_over(goal)
                if not recovery.allows(failure):
                    raise
                route.telemetry.count_replay()
                log.warning("replaying %d tokens from the start: %s", goal.length, e)

    def _start_over(self, goal: _Goal) -> None:
        """Forget the timeline, of which nothing is certain any more."""
        goal.todo = [*self._tokens[: goal.n_same], *goal.todo]
        goal.n_same = goal.n_done = 0
        self._forget()

    def _get_room(self, error: Ds4Error, route: Route, recovery: Recovery, goal: _Goal) -> None:
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
            self._source.wait_for_change(route, _NEWS_SECONDS)
        if not again:
            told = as_capacity(error)
            raise told from (None if told is error else error)

    def _meaning(self, error: Ds4Error, route: Route, recovery: Recovery) -> Failure:
        """Decide what a failed attempt means.

        A hop may report that its next hop died before our own connection to that one breaks, so
        news is waited for before a refusal is final.
        """
        failure = classify(error, route_is_current=self._source.is_current(route))
        final = failure is Failure.REFUSED and not recovery.refused
        if final and self._source.wait_for_change(route, _NEWS_SECONDS):
            return Failure.LOST
        return failure

    def _keep(self, route: Route, goal: _Goal) -> None:
        """Cut the timeline to what can be reused.

        Without rewind, caches are of use only if all that every stage holds is to stay.
        """
        whole = goal.n_same == len(self._tokens) and not self._stages_hold_more
        if not (whole or route.can_rewind):
            goal.todo = [*self._tokens[: goal.n_same], *goal.todo]
            goal.n_same = goal.n_done = 0
        self._cut_back(goal.n_same)

    def _copy_prefix(self, route: Route, goal: _Goal) -> bool:
        """Begin as another session did, if that saves much; False if nothing was copied."""
        if len(goal.todo) <= MIN_SAVED:
            return False
        wanted = [*self._tokens, *goal.todo]
        self._takes_memory = True
        others = self._eviction.others(self)
        n_copied = self._sharing.copy_prefix(route, others, wanted, goal.n_same)
        if n_copied:
            self._tokens, goal.todo = wanted[:n_copied], wanted[n_copied:]
            self._hash = prefix_hash(self._tokens)
            goal.n_same = n_copied
        return n_copied > 0

    def _evaluate(
        self, route: Route, goal: _Goal, progress: Progress | None, cancelled: Cancelled | None
    ) -> SyncResult:
        """Evaluate what is to do behind the timeline, over one route."""
        start, todo, length = goal.n_same, goal.todo, goal.length
        chunks = self._cut(route, goal)
        pipelined = self._pipelined(route, chunks)
        tuning = self._config.prefill
        window = window_size(tuning, len(route.hops), len(chunks)) if pipelined else 1

        def completed(n_chunks: int) -> None:
            if n_chunks:
                done = chunks[n_chunks - 1]
                self._held_on = route.hops
                self._tokens.extend(todo[len(self._tokens) - start : done.end - start])
                self._hash = done.result_hash
                if progress is not None:
                    progress(done.end, length)

        # until it returns, stages may be ahead of `tokens` by spans that were cut short
        self._stages_hold_more, self._logits = True, None
        self._takes_memory = True
        run = PipelinedRun(
            self._drive(route), chunks, window=window, pipelined=pipelined, completed=completed
        )
        try:
            logits = run.run(cancelled)
        except CancelledError:
            # all that was sent has been answered; a span that was evaluated aligned every stage
            self._stages_hold_more = run.left_uneven or len(self._tokens) == start
            raise
        self._stages_hold_more, self._logits = False, logits
        return SyncResult(logits=logits, n_cached=goal.n_cached)

    def _cut(self, route: Route, goal: _Goal) -> list[Chunk]:
        """Return the spans of what is to do."""
        if len(goal.todo) == 1:
            return [self._step(route, goal)]
        tuning = self._config.prefill
        chunk = given_chunk(tuning, self.n_ctx)
        if chunk is None:
            chunk = self._choose_chunk(route, goal.n_same, len(goal.todo))
        return cut_chunks(
            [*self._tokens, *goal.todo],
            goal.n_same,
            self._hash,
            chunk=chunk,
            shape=route.shape,
            ack_early=tuning.pipeline and tuning.ack_only and bool(route.hops),
        )

    def _step(self, route: Route, goal: _Goal) -> Chunk:
        """Return the span of a single token, in a time that does not depend on the context."""
        return Chunk(
            tokens=tuple(goal.todo),
            pos0=goal.n_same,
            prefix_hash=self._hash,
            result_hash=extend(self._hash, goal.todo),
            flags=chunk_flags(route.shape, reset=goal.n_same == 0),
            is_last=True,
        )

    def _choose_chunk(self, route: Route, start: int, n_tokens: int) -> int:
        """Return the tokens per chunk for `n_tokens` from `start` on, and log a new choice."""
        tuning = self._config.prefill
        cap = prefill_cap(tuning, self.n_ctx)
        if n_tokens <= GRANULE:
            return cap
        overlaps = tuning.pipeline and bool(route.hops)
        window = window_size(tuning, len(route.hops), n_tokens) if overlaps else 1
        stretch = Stretch(start=start, n_tokens=n_tokens, cap=cap, window=window)
        keys = stage_keys(route)
        models = route.telemetry.costs.models(keys)
        choice = choose(models, stretch)
        if choice.chunk != self._chunk:
            self._chunk = choice.chunk
            stages = dict(zip(keys, models or (), strict=False))
            log.debug("chunks of a prompt: %s", choice.explain(stretch, stages))
        return choice.chunk

    def _pipelined(self, route: Route, chunks: list[Chunk]) -> bool:
        """Whether spans overlap: more than one, and somewhere to send them.

        See docs/spec/wire-protocol.md#when-pipelined.
        """
        return self._config.prefill.pipeline and len(chunks) > 1 and bool(route.hops)

    def _drive(self, route: Route) -> RunContext:
        return RunContext(
            route=route,
            session=self.session_id,
            card=self._source.card,
            bits=self._config.activation_bits,
            result_timeout=self._config.result_timeout,
            next_request_id=self._source.next_request_id,
            decode_profile=self._config.decode_profile,
        )
