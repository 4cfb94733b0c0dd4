"""Stand-ins for the seams of `ds4py.contracts`: sessions and backends made of integer arithmetic.

The logits of a `FakeSession` are a function of the whole token timeline, so a token that is lost,
doubled or out of order changes everything that follows. Nothing here sleeps: a test that needs a
slow model passes a `Gate` and opens it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from ds4py.activations import F32
from ds4py.contracts import (
    Cancelled,
    Health,
    ModelCard,
    Progress,
    StageStatus,
    SyncResult,
)
from ds4py.errors import CancelledError, CapacityError, Ds4Error, SnapshotError
from ds4py.layer_range import whole_model

DEADLINE = 10.0
"""Seconds after which a wait in a fake means a broken test."""

N_VOCAB = 64

Script = Sequence[int] | Callable[[Sequence[int]], Sequence[int]]
"""What a fake says: tokens, or what makes them of the prompt."""


def timeline_hash(tokens: Sequence[int]) -> int:
    """64-bit rolling hash of a timeline; order and length matter."""
    state = 0x9E3779B97F4A7C15
    for token in tokens:
        state = ((state ^ (token + 1)) * 0xD6E8FEB86659FD93 + 0x2545F491) & (2**64 - 1)
        state ^= state >> 29
    return state


def fake_logits(tokens: Sequence[int], n_vocab: int = N_VOCAB) -> F32:
    """Logits `f32[n_vocab]` after a timeline, spread over about -8 to 8."""
    rng = np.random.default_rng(timeline_hash(tokens))
    return rng.normal(0.0, 3.0, n_vocab).astype(np.float32)


def greedy_tokens(prompt: Sequence[int], n_tokens: int, n_vocab: int = N_VOCAB) -> list[int]:
    """What a greedy sampler must produce on a `FakeSession` without a script."""
    timeline = list(prompt)
    for _ in range(n_tokens):
        timeline.append(int(np.argmax(fake_logits(timeline, n_vocab))))
    return timeline[len(prompt) :]


class Gate:
    """Holds a fake at each evaluation until the test lets it through.

    `wait_reached(n)` returns once `n` evaluations have arrived at the gate; `let(n)` lets `n` of
    them pass, `open()` all from now on.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived = 0
        self._allowed = 0.0

    def pass_through(self) -> None:
        """Arrive and wait to be let through (called by the fake)."""
        with self._changed:
            self._arrived += 1
            number = self._arrived
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._allowed >= number, DEADLINE):
                raise AssertionError("the gate was never opened")

    def wait_reached(self, n_evaluations: int) -> None:
        """Wait until `n_evaluations` have arrived since the start."""
        with self._changed:
            reached = self._changed.wait_for(lambda: self._arrived >= n_evaluations, DEADLINE)
        assert reached, f"only {self._arrived} of {n_evaluations} evaluations began"

    def let(self, n_evaluations: int) -> None:
        """Let `n_evaluations` more pass."""
        with self._changed:
            self._allowed += n_evaluations
            self._changed.notify_all()

    def open(self) -> None:
        """Let everything pass from now on."""
        with self._changed:
            self._allowed = float("inf")
            self._changed.notify_all()


class FakeSession:
    """A `contracts.Session` over `fake_logits`.

    Args:
        n_vocab: Vocabulary size.
        n_ctx: Tokens that fit.
        chunk: Prompt tokens per evaluation in `sync`.
        script: When given, the token that gets the largest logit after the prompt, after one more
            token, and so on; the last entry is repeated.
        failures: Error to raise instead of the k-th evaluation (0-based; chunks of `sync` and calls
            of `eval` count alike, over the life of the session).
        gate: Passed before each evaluation.

    Attributes:
        evaluated: Every token that was evaluated, in order: proves that nothing was done twice.
        n_evaluations: Chunks and single tokens evaluated or failed so far.
        n_prompt: Length of the prompt of the last `sync`.
        closed: Whether `close` was called.
    """

    def __init__(
        self,
        *,
        n_vocab: int = N_VOCAB,
        n_ctx: int = 256,
        chunk: int = 8,
        script: Script | None = None,
        failures: Mapping[int, Ds4Error] | None = None,
        gate: Gate | None = None,
    ) -> None:
        self._n_vocab = n_vocab
        self._n_ctx = n_ctx
        self._chunk = chunk
        self._script = script
        self._says: Sequence[int] | None = None
        self._failures = dict(failures or {})
        self._gate = gate
        self._tokens: list[int] = []
        self.evaluated: list[int] = []
        self.n_evaluations = 0
        self.n_prompt = 0
        self.closed = False

    @property
    def tokens(self) -> Sequence[int]:
        return tuple(self._tokens)

    @property
    def n_ctx(self) -> int:
        return self._n_ctx

    def reusable(self, tokens: Sequence[int]) -> int:
        return min(common_prefix(self._tokens, tokens), max(len(tokens) - 1, 0))

    def sync(
        self,
        tokens: Sequence[int],
        *,
        progress: Progress | None = None,
        cancelled: Cancelled | None = None,
    ) -> SyncResult:
        if not 1 <= len(tokens) <= self._n_ctx:
            raise CapacityError("context", needed=len(tokens), available=self._n_ctx)
        # as a real session: the last token is always evaluated, since its logits are needed
        n_cached = min(common_prefix(self._tokens, tokens), len(tokens) - 1)
        self._tokens = self._tokens[:n_cached]
        self.n_prompt = len(tokens)
        self._says = self._script(tokens) if callable(self._script) else self._script
        for start in range(n_cached, len(tokens), self._chunk):
            if cancelled is not None and cancelled():
                raise CancelledError("the prompt was cancelled")
            self._evaluate(tokens[start : start + self._chunk])
            if progress is not None:
                progress(len(self._tokens), len(tokens))
        return SyncResult(logits=self._logits(), n_cached=n_cached)

    def eval(self, token: int) -> F32:
        if len(self._tokens) >= self._n_ctx:
            raise CapacityError("context", needed=len(self._tokens) + 1, available=self._n_ctx)
        self._evaluate([token])
        return self._logits()

    def rewind(self, n_tokens: int) -> None:
        self._tokens = self._tokens[:n_tokens]

    def save(self) -> list[memoryview]:
        return [memoryview(b"FAKE"), memoryview(np.array(self._tokens, "<u4").tobytes())]

    def load(self, payload: bytes | memoryview) -> None:
        if bytes(payload[:4]) != b"FAKE" or len(payload) % 4:
            raise SnapshotError("is no saved fake session, expected FAKE and token ids")
        self._tokens = np.frombuffer(payload[4:], "<u4").tolist()

    def close(self) -> None:
        self.closed = True

    def _evaluate(self, tokens: Sequence[int]) -> None:
        number = self.n_evaluations
        self.n_evaluations += 1
        if self._gate is not None:
            self._gate.pass_through()
        if number in self._failures:
            raise self._failures[number]
        assert all(0 <= token < self._n_vocab for token in tokens), f"foreign token in {tokens}"
        self._tokens.extend(tokens)
        self.evaluated.extend(tokens)

    def _logits(self) -> F32:
        logits = fake_logits(self._tokens, self._n_vocab)
        if self._says is not None:
            step = min(len(self._tokens) - self.n_prompt, len(self._says) - 1)
            logits[self._says[step]] = 100.0
        return logits


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that are equal."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


class FakeBackend:
    """A `contracts.Backend` with a pool of `FakeSession`.

    Args:
        n_sessions: Sessions in the pool; a lease waits in arrival order while all are busy.
        n_vocab: Vocabulary size.
        n_ctx: Tokens that fit in a session.
        name: Name of the model.
        model_id: Its number; 0 and 1 are ds4's own models.
        chunk: See `FakeSession`, like `script`, `failures` and `gate`.
        script: One script for all sessions.
        failures: For the first session only, so that a second request can be seen to succeed.
        gate: One gate for all sessions.

    Attributes:
        sessions: The pool, in order.
        missing: Set to a text such as "layers 13-24" to report an incomplete route.
    """

    def __init__(
        self,
        *,
        n_sessions: int = 1,
        n_vocab: int = N_VOCAB,
        n_ctx: int = 256,
        name: str = "Fake Model",
        model_id: int = 0x8000FA4E,
        chunk: int = 8,
        script: Script | None = None,
        failures: Mapping[int, Ds4Error] | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.sessions = [
            FakeSession(
                n_vocab=n_vocab,
                n_ctx=n_ctx,
                chunk=chunk,
                script=script,
                failures=failures if number == 0 else None,
                gate=gate,
            )
            for number in range(n_sessions)
        ]
        self.missing = ""
        self._n_ctx = n_ctx
        self._card = ModelCard(
            model_id=model_id,
            name=name,
            architecture="fake",
            n_layers=4,
            n_vocab=n_vocab,
            hidden_width=8,
            n_ctx_train=n_ctx,
            quant_bits=4,
        )
        self._changed = threading.Condition()
        self._free = list(self.sessions)
        self._waiting: list[object] = []

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def n_ctx(self) -> int:
        return self._n_ctx

    @property
    def n_waiting(self) -> int:
        """Leases that wait for a session."""
        with self._changed:
            return len(self._waiting)

    @property
    def n_free(self) -> int:
        """Sessions that nobody holds."""
        with self._changed:
            return len(self._free)

    @contextmanager
    def lease(
        self, tokens: Sequence[int], *, cancelled: Cancelled | None = None
    ) -> Iterator[FakeSession]:
        session = self._take(tokens, cancelled)
        try:
            yield session
        finally:
            with self._changed:
                self._free.append(session)
                self._changed.notify_all()

    def n_cached(self, tokens: Sequence[int]) -> int:
        with self._changed:
            return max((session.reusable(tokens) for session in self._free), default=0)

    def health(self) -> Health:
        stage = StageStatus(name="coordinator", layers=whole_model(self._card.n_layers))
        return Health(ready=not self.missing, missing=self.missing, stages=(stage,))

    def _take(self, tokens: Sequence[int], cancelled: Cancelled | None) -> FakeSession:
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._wait_for_turn(ticket, cancelled)
                best = max(self._free, key=lambda session: common_prefix(session.tokens, tokens))
                self._free.remove(best)
                return best
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _wait_for_turn(self, ticket: object, cancelled: Cancelled | None) -> None:
        poll = 0.01  # `cancelled` is polled: nobody notifies about it
        for _ in range(int(DEADLINE / poll)):
            if cancelled is not None and cancelled():
                raise CancelledError("cancelled while waiting for a session")
            if self._free and self._waiting[0] is ticket:
                return
            self._changed.wait(poll)
        raise AssertionError("no session became free")
