"""How large the chunks of a prompt should be, by what chunks have cost so far.

A chunk of `n` tokens at position `p` costs a stage `fixed + per_token * n + per_pair * n * (p +
n/2)` seconds: weights are read or decoded once a chunk, projections work per token, attention per
pair of tokens. Small chunks keep every stage of a pipeline busy, large ones pay the fixed cost less
often; in between lies the least time.

Owns: observations, the fit, the forecast, the choice. Refuses to know: who measures, the user's
wish, tokens. Invariant: a choice is a candidate, and no candidate exceeds the cap or (except for
the cap) falls below `GRANULE`, whatever peers report.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log2
from typing import Final

import numpy as np
import numpy.typing as npt

GRANULE: Final = 128
"""Chunks are multiples of it: ds4's GPU stages compress windows of 4 and 128 tokens whole only
where a chunk begins and ends at one (docs/spec/deepseek4-model.md#prefill-chunks)."""

UNMEASURED_CHUNK: Final = 512
"""Tokens per chunk, at most, until every stage is measured: a fixed cost of 64 tokens' work is an
eighth of it, and four such chunks overlap on two stages at 80 %."""

COURTESY: Final = ((0.5, 1.03), (2.0, 1.05), (10.0, 1.10))
"""Others' decodes, progress and cancelling wait for a chunk. For chunks that hold no stage for more
than so many seconds, a prompt may take longer by such a factor; the first that can be had holds."""

_TIE: Final = 1.01
_KEPT: Final = 4  # observations of about one size and position
_FADING: Final = 0.5 ** (1 / 256)  # weight of an observation to that of the next span of its stage
_NEEDED: Final = 2  # observations per stage
_SMALLEST: Final = GRANULE // 2  # shorter spans may run through other kernels
_LONGEST: Final = 1 << 24  # tokens; also the last position
_MOST_CHUNKS: Final = 1024  # bounds the forecasts' own time
_UNSEEN_SECONDS: Final = 0.0005  # per span and stage: framing, hashing, queues
_PRIOR_TOKENS: Final = 64  # fixed cost in tokens' work, where sizes do not tell
_PRIOR_WEIGHT: Final = 0.05  # as a part of one observation
_TELLING: Final = 1.25  # between the sizes that tell a fixed cost from the tokens'
_MICRO: Final = 1e-6

_ROUNDS: Final = 3  # of the fit
_FAR_WEIGHT: Final = 0.3  # of errors above the fit, and below half of it
_REACH: Final = 2  # between a size that is chosen and those that were seen
_SETS: Final = ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,))

F64 = npt.NDArray[np.float64]
StageKey = tuple[int, int]
"""First and last layer."""


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """What one span has cost one stage.

    Args:
        pos0: Position of the first token.
        n_tokens: Tokens.
        eval_seconds: By the stage's own clock.
        hop_seconds: On the way to the stage and in its queue.
        number: Of the span among all that the stage was seen to evaluate.
    """

    pos0: int
    n_tokens: int
    eval_seconds: float
    hop_seconds: float
    number: int = 0

    @property
    def pairs(self) -> float:
        """Pairs of a token and a position that it attends to."""
        return self.n_tokens * (self.pos0 + self.n_tokens / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModel:
    """Predicts what a span costs one stage; no coefficient is negative.

    Args:
        fixed: Seconds per span.
        per_token: Seconds per token.
        per_pair: Seconds per pair of a token and a position before it.
        hop_fixed: Least seconds on the way to the stage.
        hop_per_token: Least seconds per token on that way.
        sizes: The shortest and the longest span that it rests on.
    """

    fixed: float
    per_token: float
    per_pair: float
    hop_fixed: float = 0.0
    hop_per_token: float = 0.0
    sizes: tuple[int, int] = (1, _LONGEST)

    def rests_on(self, chunk: int) -> bool:
        """Return whether it rests on spans of about one size only, which `chunk` is as well."""
        return max(*self.sizes, chunk) < _TELLING * min(*self.sizes, chunk)

    def seconds(self, n_tokens: int, pos0: int) -> float:
        """Return the time of evaluating a span, and of what the stage's clock does not see."""
        pairs = n_tokens * (pos0 + n_tokens / 2)
        return _UNSEEN_SECONDS + self.fixed + self.per_token * n_tokens + self.per_pair * pairs

    def hop_seconds(self, n_tokens: int) -> float:
        """Return the time on the way to the stage."""
        return max(self.hop_fixed, self.hop_per_token * n_tokens)

    def __str__(self) -> str:
        return (
            f"{self.fixed * 1e3:.2f} ms + {self.per_token * 1e6:.1f} us a token "
            f"+ {self.per_pair * 1e9:.2f} ns a pair, hop {self.hop_fixed * 1e3:.2f} ms"
        )


def fit(observations: Sequence[ChunkCost]) -> StageModel:
    """Fit a stage's coefficients by weighted least squares, none below zero.

    Errors count relative to an observation's time, but not to less than the median's, so that one
    tiny number decides nothing; old observations fade. Other programs on a machine only lengthen
    what a span takes, so observations above the fit count less than those below, as in a regression
    to a low expectile, and so do those below half of it, which no honest clock shows; in the same
    way the shortest of all hops counts. Two weak assumptions settle what the observations leave
    open: a fixed cost of `_PRIOR_TOKENS` tokens' work, and free attention.

    Args:
        observations: At least one, in any order.
    """
    seconds = np.array([o.eval_seconds for o in observations])
    columns = np.array([(1.0, o.n_tokens, o.pairs) for o in observations])
    middle = max(float(np.median(seconds)), _MICRO)
    numbers = np.array([o.number for o in observations])
    weights = _FADING ** (numbers.max() - numbers) / np.maximum(seconds, middle)
    doubt = _PRIOR_WEIGHT / middle
    priors = doubt * np.array([(1.0, -_PRIOR_TOKENS, 0.0), (0.0, 0.0, np.median(columns[:, 2]))])
    found = np.zeros(3)
    for _ in range(_ROUNDS):
        fitted = columns @ found
        near = (fitted / 2 <= seconds) & (seconds <= fitted)
        trust = weights * np.where(near, 1.0, _FAR_WEIGHT)
        rows = np.concatenate([columns * trust[:, None], priors])
        found = _least_squares(rows, np.append(seconds * trust, (0.0, 0.0)))
    return StageModel(
        fixed=float(found[0]),
        per_token=float(found[1]),
        per_pair=float(found[2]),
        hop_fixed=min(o.hop_seconds for o in observations),
        hop_per_token=min(o.hop_seconds / o.n_tokens for o in observations),
        sizes=(int(columns[:, 1].min()), int(columns[:, 1].max())),
    )


def _least_squares(rows: F64, values: F64) -> F64:
    """Return `x >= 0` with the least `|rows @ x - values|`.

    The best point has some set of positive coefficients and solves the free problem of that set, so
    the best feasible solution over all sets is it; with three columns these are seven. The whole
    set comes first: where it is feasible, no other is better.
    """
    scale = np.abs(rows).max(axis=0)
    rows = rows / scale
    best, least = np.zeros(rows.shape[1]), float(values @ values)
    for kept in _SETS:
        some = np.linalg.lstsq(rows[:, kept], values, rcond=None)[0]
        error = rows[:, kept] @ some - values
        if some.min() >= 0 and (squares := float(error @ error)) < least:
            best, least = np.zeros_like(best), squares
            best[list(kept)] = some
            if len(kept) == len(best):
                break
    result: F64 = best / scale
    return result


class _Record:
    """What is kept of one stage: the latest observations of each size and position.

    One long prompt must not push out what is known of other sizes, so sizes share a cell within
    half an octave, positions within an octave.
    """

    def __init__(self) -> None:
        self.count = 0
        self._cells: dict[tuple[int, int], deque[ChunkCost]] = {}

    @property
    def observations(self) -> list[ChunkCost]:
        return [cost for cell in self._cells.values() for cost in cell]

    def keep(self, cost: ChunkCost) -> None:
        cell = round(2 * log2(cost.n_tokens)), cost.pos0.bit_length()
        self._cells.setdefault(cell, deque(maxlen=_KEPT)).append(cost)


class StageCosts:
    """Observations of every stage, a bounded number; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[StageKey, _Record] = {}

    def add(
        self, stage: StageKey, pos0: int, n_tokens: int, *, eval_usec: int, hop_usec: int = 0
    ) -> None:
        """Keep one observation, unless no chunk could have made it.

        The first one of a stage is not kept: it pays for reading weights and starting threads.
        """
        if not (_SMALLEST <= n_tokens < _LONGEST and 0 <= pos0 < _LONGEST):
            return
        with self._lock:
            record = self._records.setdefault(stage, _Record())
            if record.count:
                seconds, hop = eval_usec * _MICRO, hop_usec * _MICRO
                record.keep(ChunkCost(pos0, n_tokens, seconds, hop, record.count))
            record.count += 1

    def models(self, stages: Sequence[StageKey]) -> list[StageModel] | None:
        """Return a model for each stage, or None if one was observed too little."""
        with self._lock:
            known = [self._records[s].observations for s in stages if s in self._records]
        if len(known) < len(stages) or min(map(len, known), default=0) < _NEEDED:
            return None
        return [fit(observations) for observations in known]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The part of a prompt that is to be evaluated.

    Args:
        start: Position of its first token.
        n_tokens: Its length, at least 1.
        cap: Most tokens that a chunk may have.
        window: Most chunks in flight.
    """

    start: int
    n_tokens: int
    cap: int
    window: int = 1

    def candidates(self) -> list[int]:
        """Return the sizes worth comparing, ascending: those that cut into even parts."""
        most = min(_MOST_CHUNKS, -(-self.n_tokens // GRANULE))
        parts = {-(-self.n_tokens // n) for n in range(1, most + 1)}
        return sorted({min(self.cap, -(-part // GRANULE) * GRANULE) for part in parts})

    def cut(self, chunk: int) -> Iterator[tuple[int, int]]:
        """Yield position and length of each chunk."""
        end = self.start + self.n_tokens
        return ((pos0, min(chunk, end - pos0)) for pos0 in range(self.start, end, chunk))


@dataclass(frozen=True, slots=True)
class Forecast:
    """What chunks of one size would give.

    Args:
        seconds: Until the last answer.
        longest: The longest time that a chunk takes in one stage.
    """

    seconds: float
    longest: float


def forecast(stages: Sequence[StageModel], stretch: Stretch, chunk: int) -> Forecast:
    """Play a prefill through its stages.

    A chunk begins in a stage when it has arrived from the stage before and the chunk before it is
    done there; it leaves when there is room in the window. The way of answers back counts as free.
    """
    free = [0.0] * len(stages)
    answers: deque[float] = deque(maxlen=stretch.window)
    longest = 0.0
    for pos0, n_tokens in stretch.cut(chunk):
        at = answers[0] if len(answers) == stretch.window else 0.0
        for index, stage in enumerate(stages):
            cost = stage.seconds(n_tokens, pos0)
            at = free[index] = max(at + stage.hop_seconds(n_tokens), free[index]) + cost
            longest = max(longest, cost)
        answers.append(at)
    return Forecast(answers[-1], longest)


@dataclass(frozen=True, slots=True)
class ChunkChoice:
    """A chunk size and why.

    Args:
        chunk: Tokens per chunk.
        forecasts: What each candidate would give; empty if nothing was measured.
    """

    chunk: int
    forecasts: dict[int, Forecast]

    def explain(self, stretch: Stretch, stages: dict[StageKey, StageModel]) -> str:
        """Return one line for the log."""
        n_chunks = -(-stretch.n_tokens // self.chunk)
        head = f"{stretch.n_tokens} tokens from {stretch.start}: {n_chunks} x {self.chunk}"
        if not self.forecasts:
            return f"{head}, as not every stage was measured yet"
        compared = ", ".join(f"{c}: {f.seconds:.3f}" for c, f in self.forecasts.items())
        models = "; ".join(f"layers {a}-{b}: {model}" for (a, b), model in stages.items())
        took = self.forecasts[self.chunk]
        return (
            f"{head}, predicted {took.seconds:.3f} s, longest chunk {took.longest:.3f} s "
            f"(candidates in s: {compared}; {models})"
        )


def choose(stages: Sequence[StageModel] | None, stretch: Stretch) -> ChunkChoice:
    """Choose the chunk size of a stretch.

    The least predicted time wins, except for `COURTESY`; of sizes within 1 %, the largest. No size
    is chosen that is more than twice or less than half of what every stage has seen, since models
    are less sure there. While a stage has seen no other size at all, its fixed cost is a guess, and
    the next smaller size is tried.

    Args:
        stages: Models in route order; None if a stage was never measured.
        stretch: What is to be cut.
    """
    sizes = stretch.candidates()
    if not stages:
        return ChunkChoice(max((s for s in sizes if s <= UNMEASURED_CHUNK), default=sizes[0]), {})
    sizes = _within_reach(sizes, stages)
    forecasts = {size: forecast(stages, stretch, size) for size in sizes}
    best = _quick_and_polite(forecasts)
    if any(stage.rests_on(best) for stage in stages):
        best = _another(best, sizes)
    return ChunkChoice(best, forecasts)


def _quick_and_polite(forecasts: dict[int, Forecast]) -> int:
    """Return the size that `choose` describes; where no courtesy helps, the smallest allowed."""
    least = min(f.seconds for f in forecasts.values())
    near: dict[int, Forecast] = {}
    for longest, factor in COURTESY:
        near = {s: f for s, f in forecasts.items() if f.seconds <= factor * least}
        polite = {s: f.seconds for s, f in near.items() if f.longest <= longest}
        if polite:
            quick = _TIE * min(polite.values())
            return max(s for s, seconds in polite.items() if seconds <= quick)
    return min(near)


def _within_reach(sizes: list[int], stages: Sequence[StageModel]) -> list[int]:
    """Leave out sizes far from what every stage has seen, unless none would be left."""
    low = max(stage.sizes[0] for stage in stages) / _REACH
    high = min(stage.sizes[1] for stage in stages) * _REACH
    return [size for size in sizes if low <= size <= high] or sizes


def _another(chunk: int, sizes: Sequence[int]) -> int:
    """Return the next smaller size that tells something new, or else a larger one, if any."""
    smaller = [size for size in sizes if size * _TELLING <= chunk]
    larger = [size for size in sizes if size >= chunk * _TELLING]
    return smaller[-1] if smaller else larger[0] if larger else chunk
