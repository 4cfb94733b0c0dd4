"""One token timeline over a route: sync, eval, rewind, and replay when a stage forgets.

Owns: the timeline, its rolling hash, what to reuse of it, the one replay
(docs/spec/wire-protocol.md 6.5 to 6.7). Refuses to know: sockets, registries, layers. Invariant:
`tokens` are cached on every stage; after a failure the timeline is empty, so that old logits are
never given for a new prompt.

A process that owns every layer is a route without hops: there is no second kind of session.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Final

from ds4py.cluster.chunking import GRANULE, StageKey, Stretch, choose
from ds4py.cluster.pipeline import Drive, SpanRun
from ds4py.cluster.prefill import Span, cut_spans, given_chunk, prefill_cap, window_size
from ds4py.cluster.recovery import Failure, Recovery, classify
from ds4py.cluster.route import Route, RouteSource
from ds4py.cluster.snapshots import FIRST_REQUEST, Snapshots, Transcript
from ds4py.config import CoordinatorConfig
from ds4py.contracts import Cancelled, Progress, SessionId, SyncResult
from ds4py.errors import CancelledError, CapacityError, Ds4Error, SnapshotError
from ds4py.hidden import F32
from ds4py.wire.prefix_hash import INIT, prefix_hash

log = logging.getLogger(__name__)

_NEWS_SECONDS: Final = 1.0


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens are equal."""
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):  # the usual case, a conversation that goes on, at C's speed
        return n
    return next(i for i in range(n) if a[i] != b[i])


def reusable_prefix(cached: Sequence[int], wanted: Sequence[int], *, can_rewind: bool) -> int:
    """Return how many leading tokens need no evaluation.

    At least one token is left over, because the logits come from evaluating the last one. Without
    rewind, caches are of use only if all of them are a prefix of what is wanted.
    """
    usable = min(common_prefix(cached, wanted), len(wanted) - 1)
    if usable < len(cached) and not can_rewind:
        return 0
    return usable


def stage_keys(route: Route) -> list[StageKey]:
    """Return the layer ranges that a span passes, in order."""
    own = [] if route.local_span is None else [route.local_span]
    return [(span.start, span.end) for span in (*own, *(hop.span for hop in route.hops))]


class ClusterSession:
    """A `contracts.Session` over whatever route its coordinator finds.

    Args:
        session_id: Fixed for life; names the timeline on every stage.
        source: Finds routes and hands out request ids.
        config: Chunks, windows, widths, deadlines.
    """

    def __init__(self, session_id: SessionId, source: RouteSource, config: CoordinatorConfig):
        self.session_id = session_id
        self._source = source
        self._config = config
        self._tokens: list[int] = []
        self._hash = INIT
        self._stages_hold_more = False
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
        return self._advance(wanted, progress, cancelled)

    def eval(self, token: int) -> F32:
        """Append one token; see `contracts.Session.eval`."""
        self._check_length(len(self._tokens) + 1)
        return self._advance([*self._tokens, token], None, None).logits

    def rewind(self, n_tokens: int) -> None:
        """Forget everything after the first `n_tokens` tokens; stages follow with the next span."""
        if n_tokens < len(self._tokens):
            del self._tokens[n_tokens:]
            self._hash = prefix_hash(self._tokens)
            self._stages_hold_more = True
            self._logits = None

    def save(self) -> list[memoryview]:
        """Return a `DSV4` payload in pieces; see `contracts.Session.save`."""
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
        self._snapshots.load(route, transcript, whole)
        self._tokens, self._hash = tokens, transcript.token_hash
        self._logits = whole.logits.copy()

    def close(self) -> None:
        """Forget the timeline; the id lives on, since a C worker never frees a session."""
        self._forget()
        self._source.end_session(self.session_id)

    def _check_length(self, n_tokens: int) -> None:
        if not 1 <= n_tokens <= self.n_ctx:
            raise CapacityError("context tokens", needed=n_tokens, available=self.n_ctx)

    def _forget(self) -> None:
        self._tokens, self._hash = [], INIT
        self._stages_hold_more = False
        self._logits = None

    def _advance(
        self, wanted: list[int], progress: Progress | None, cancelled: Cancelled | None
    ) -> SyncResult:
        """Evaluate what is missing, replaying from zero if a stage refuses or is lost."""
        recovery = Recovery()
        after_loss = False
        while True:
            route = self._source.ensure_route(after_loss=after_loss, cancelled=cancelled)
            try:
                return self._evaluate(route, wanted, progress, cancelled)
            except CancelledError:
                raise
            except Ds4Error as e:
                self._forget()
                failure = self._meaning(e, route, recovery)
                if not recovery.allows(failure):
                    raise
                after_loss = failure is Failure.LOST
                log.warning("replaying %d tokens from the start: %s", len(wanted), e)

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

    def _evaluate(
        self,
        route: Route,
        wanted: list[int],
        progress: Progress | None,
        cancelled: Cancelled | None,
    ) -> SyncResult:
        """Evaluate `wanted` after what is reusable of the timeline, over one route."""
        start = self._keep(route, wanted)
        spans = self._cut(route, wanted, start)
        pipelined = self._pipelined(route, spans)
        tuning = self._config.prefill
        window = window_size(tuning, len(route.hops), len(spans)) if pipelined else 1

        def completed(n_spans: int) -> None:
            if n_spans:
                done = spans[n_spans - 1]
                self._tokens.extend(wanted[len(self._tokens) : done.end])
                self._hash = done.result_hash
                if progress is not None:
                    progress(done.end, len(wanted))

        # until it returns, stages may be ahead of `tokens` by spans that were cut short
        self._stages_hold_more, self._logits = True, None
        run = SpanRun(
            self._drive(route), spans, window=window, pipelined=pipelined, completed=completed
        )
        try:
            logits = run.run(cancelled)
        except CancelledError:
            # all that was sent has been answered; a span that was evaluated aligned every stage
            self._stages_hold_more = run.left_uneven or len(self._tokens) == start
            raise
        self._stages_hold_more, self._logits = False, logits
        return SyncResult(logits=logits, n_cached=start)

    def _keep(self, route: Route, wanted: list[int]) -> int:
        """Cut the timeline to what can be reused for `wanted` and return its length."""
        keep = 0
        if route.can_rewind or not self._stages_hold_more:
            keep = reusable_prefix(self._tokens, wanted, can_rewind=route.can_rewind)
        if keep < len(self._tokens):
            del self._tokens[keep:]
            self._hash = prefix_hash(self._tokens)
        return keep

    def _cut(self, route: Route, wanted: list[int], start: int) -> list[Span]:
        """Return the spans after `start`."""
        tuning = self._config.prefill
        chunk = given_chunk(tuning, self.n_ctx)
        if chunk is None:
            chunk = self._choose_chunk(route, start, len(wanted) - start)
        return cut_spans(
            wanted,
            start,
            self._hash,
            chunk=chunk,
            shape=route.shape,
            ack_early=tuning.pipeline and tuning.ack_only and bool(route.hops),
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

    def _pipelined(self, route: Route, spans: list[Span]) -> bool:
        """Whether spans overlap: more than one, and somewhere to send them (spec 7.2)."""
        return self._config.prefill.pipeline and len(spans) > 1 and bool(route.hops)

    def _drive(self, route: Route) -> Drive:
        return Drive(
            route=route,
            session=self.session_id,
            card=self._source.card,
            bits=self._config.activation_bits,
            result_timeout=self._config.result_timeout,
            next_request_id=self._source.next_request_id,
            decode_profile=self._config.decode_profile,
        )
