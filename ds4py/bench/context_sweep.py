"""Prefill and decode rates of a session at growing context, as ds4-bench measures them.

Owns: the frontiers, the order of measuring, the CSV (docs/spec/server-and-cli.md#bench). Refuses to
know: where the layers are, how results are shown. Invariant: what brings a session back to its
frontier is not timed, and a rate is of its own increment alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from ds4py.activations import F32
from ds4py.contracts import Cancelled, Progress, Session
from ds4py.errors import CancelledError, CapacityError, ConfigError
from ds4py.tracing.events import Shares, TraceRecorder, stage_shares

_WARM_UP_TOKENS: Final = 32

CSV_HEADER: Final = "ctx_tokens,prefill_tokens,prefill_tps,gen_tokens,gen_tps,kvcache_bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What is measured.

    Args:
        start: First frontier, tokens.
        stop: Last frontier.
        step: From one to the next, if `factor` is 1.
        factor: From one to the next, if it is more than 1; rounded up.
        gen_tokens: Decoded at each frontier; 0 decodes nothing.
    """

    start: int
    stop: int
    step: int
    factor: float
    gen_tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.start <= self.stop:
            raise ConfigError(
                f"--ctx-start {self.start}, --ctx-max {self.stop}: expected at least 1 token, "
                "and the first no larger than the last"
            )
        if self.step < 1:
            raise ConfigError(f"--step-incr {self.step}: expected at least 1")
        if not 1 <= self.factor < math.inf:
            raise ConfigError(f"--step-mul {self.factor:g}: expected a number of 1 or more")
        if self.gen_tokens < 0:
            raise ConfigError(f"--gen-tokens {self.gen_tokens}: expected at least 0")

    @property
    def frontiers(self) -> list[int]:
        """Context lengths in ascending order; the last one is always `stop`."""
        found, at = [], self.start
        while at < self.stop:
            found.append(at)
            at = max(at + 1, math.ceil(at * self.factor)) if self.factor > 1 else at + self.step
        return [*found, self.stop]

    @property
    def n_ctx(self) -> int:
        """Tokens that the session must hold, with one to spare as in ds4."""
        return self.stop + self.gen_tokens + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the CSV, in the order of its columns.

    Args:
        ctx_tokens: The frontier.
        prefill_tokens: Tokens since the frontier before.
        prefill_tps: Tokens per second of that increment.
        gen_tokens: Tokens decoded behind the frontier.
        gen_tps: Their rate; 0 if there are none.
        kvcache_bytes: Size of the snapshot that was restored; 0 if the cache was cut back instead.
    """

    ctx_tokens: int
    prefill_tokens: int
    prefill_tps: float
    gen_tokens: int
    gen_tps: float
    kvcache_bytes: int

    @property
    def csv(self) -> str:
        """The line without its end."""
        return (
            f"{self.ctx_tokens},{self.prefill_tokens},{self.prefill_tps:.2f},"
            f"{self.gen_tokens},{self.gen_tps:.2f},{self.kvcache_bytes}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """What was measured at one frontier.

    Args:
        row: The figures.
        logits: `f32[V]` behind the last token of the prompt so far.
        prefill: What each stage did with the time of the increment, by name.
        decode: The same of the generated tokens; empty if there are none.
    """

    row: Row
    logits: F32
    prefill: dict[str, Shares]
    decode: dict[str, Shares]


class ContextSweep:
    """Walks a session along the frontiers.

    Args:
        session: Starts again; its route records into `recorder`.
        recorder: Asked for the stages' time; emptied.
        eos_ids: Never generated.
        portable: Bring the session back by a snapshot, not by cutting or replaying.
        progress: Told (tokens done, tokens in all).
        cancelled: Polled between chunks and tokens.
    """

    def __init__(
        self,
        session: Session,
        recorder: TraceRecorder,
        *,
        eos_ids: Collection[int],
        portable: bool,
        progress: Progress,
        cancelled: Cancelled,
    ):
        self._session = session
        self._recorder = recorder
        self._eos_ids = eos_ids
        self._portable = portable
        self._progress = progress
        self._cancelled = cancelled

    def measure(self, prompt: Sequence[int], plan: SweepPlan) -> Iterator[Frontier]:
        """Yield what was measured at each frontier of a plan, as soon as it is known.

        Raises:
            CapacityError: The prompt is shorter than the last frontier.
            Ds4Error: As `Session.sync`.
        """
        if len(prompt) < plan.stop:
            raise CapacityError("tokens in the prompt", needed=plan.stop, available=len(prompt))
        total = plan.stop + plan.gen_tokens * len(plan.frontiers)
        self._warm_up(prompt[: min(plan.stop, _WARM_UP_TOKENS)], decode=plan.gen_tokens > 0)
        reached = done = 0
        for frontier in plan.frontiers:
            told = partial(self._tell, more=done - reached, total=total)
            with self._timed() as prefill:
                synced = self._session.sync(
                    prompt[:frontier], progress=told, cancelled=self._cancelled
                )
            decode, n_bytes = self._decode(synced.logits, plan.gen_tokens)
            row = Row(
                ctx_tokens=frontier,
                prefill_tokens=frontier - reached,
                prefill_tps=(frontier - reached) / prefill.seconds,
                gen_tokens=plan.gen_tokens,
                gen_tps=plan.gen_tokens / decode.seconds if plan.gen_tokens else 0.0,
                kvcache_bytes=n_bytes,
            )
            done += frontier - reached + plan.gen_tokens
            reached = frontier
            self._progress(done, total)
            yield Frontier(
                row=row, logits=synced.logits, prefill=prefill.shares, decode=decode.shares
            )

    def _warm_up(self, prompt: Sequence[int], *, decode: bool) -> None:
        """Let first-use costs pass before anything is timed."""
        self._session.sync(prompt, cancelled=self._cancelled)
        if decode:
            self._session.eval(prompt[0])
        self._session.rewind(0)

    def _tell(self, n_tokens: int, _: int, *, more: int, total: int) -> None:
        self._progress(n_tokens + more, total)

    def _decode(self, logits: F32, n_tokens: int) -> tuple[_Timing, int]:
        """Generate greedily and go back; return the timing, and the size of the snapshot."""
        if not n_tokens:
            return _Timing(), 0
        session = self._session
        before = tuple(session.tokens)
        saved = b"".join(session.save()) if self._portable else b""
        with self._timed() as timing:
            for _ in range(n_tokens):
                if self._cancelled():
                    raise CancelledError("the measurement was cancelled")
                logits = session.eval(greedy(logits, self._eos_ids))
        if self._portable:
            session.load(saved)
        else:
            session.rewind(len(before))
            session.sync(before)  # where caches cannot be cut it replays now, not when timed
        return timing, len(saved)

    @contextmanager
    def _timed(self) -> Iterator[_Timing]:
        self._recorder.take()
        timing = _Timing()
        start = time.perf_counter()
        yield timing
        timing.seconds = time.perf_counter() - start
        timing.shares = stage_shares(self._recorder.take())


@dataclass(slots=True)
class _Timing:
    seconds: float = 0.0
    shares: dict[str, Shares] = field(default_factory=dict)


def greedy(logits: F32, excluded: Collection[int]) -> int:
    """Return the most probable token that is not excluded."""
    best = int(np.argmax(logits))
    if best in excluded:
        allowed = logits.copy()
        allowed[list(excluded)] = -np.inf
        best = int(np.argmax(allowed))
    return best
