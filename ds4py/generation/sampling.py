"""Choosing the next token: ds4's rules and random numbers, over whole vocabularies at once.

Owns: the order of the filters, the generator, and the walk that turns a random number into a token
(docs/spec/deepseek4-model.md#sampling). Refuses to know: sessions and text. Invariant: every
operation is done in float32 and every sum in ds4's order, so that a seed gives ds4's tokens for the
same logits.

NumPy's running sums (`accumulate`) add one element after the other, which is the order of a plain
loop; its plain `sum` does not, and is not used here.
"""

from __future__ import annotations

import secrets
from typing import Final

import numpy as np
import numpy.typing as npt

from ds4py.config import SamplingParams
from ds4py.errors import ModelError
from ds4py.generation.choice import Choice

F32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]

MAX_TOP_K: Final = 1024
_FIRST_CANDIDATES: Final = 256
_MASK: Final = 2**64 - 1


class XorShift64Star:
    """ds4's random numbers (docs/spec/deepseek4-model.md#random-numbers).

    Args:
        state: 64-bit state; a zero is replaced when the first number is drawn.
    """

    def __init__(self, state: int) -> None:
        self.state = state & _MASK

    def next_u64(self) -> int:
        """Return the next 64 bits."""
        x = self.state or 0x9E3779B97F4A7C15
        x ^= x >> 12
        x ^= x << 25 & _MASK
        x ^= x >> 27
        self.state = x
        return x * 0x2545F4914F6CDD1D & _MASK

    def uniform(self) -> np.float32:
        """Return the next number in [0, 1), a multiple of 2**-24."""
        return np.float32((self.next_u64() >> 40) / 2**24)


class Sampler:
    """Picks the tokens of one reply; used by one thread at a time.

    Args:
        params: Filters and seed. A seed of 0 or less is replaced by an unpredictable one.
        state: Generator state to begin with instead of the seed.
    """

    def __init__(self, params: SamplingParams, *, state: int | None = None) -> None:
        self._temperature = np.float32(params.temperature)
        self._top_k = min(max(params.top_k, 0), MAX_TOP_K)
        self._top_p = np.float32(params.top_p if 0 < params.top_p <= 1 else 1)
        self._min_p = np.float32(max(0, params.min_p))
        if state is None:
            state = params.seed if params.seed > 0 else secrets.randbits(64)
        self._random = XorShift64Star(state)

    @property
    def state(self) -> int:
        """The generator's 64-bit state; each sampled token uses one number, a greedy one none."""
        return self._random.state

    def choose(self, logits: F32) -> Choice:
        """Return `pick`, as the token loop wants it."""
        return Choice(self.pick(logits))

    def pick(self, logits: F32) -> int:
        """Return the id of the next token.

        Args:
            logits: `f32[V]`; only read. Values that are not finite are never sampled.

        Raises:
            ModelError: The logits are not one row of at least one value.
        """
        if logits.ndim != 1 or logits.size == 0:
            raise ModelError("logits", got=f"shape {logits.shape}", expected="[V] with V > 0")
        if not self._temperature > 0:
            return greedy(logits)
        ids: Ids | None = None  # None: all of them
        finite = np.isfinite(logits)
        if not finite.all():
            ids = np.flatnonzero(finite)
            if ids.size == 0:
                return greedy(logits)
            logits = logits[ids]
        index = self._pick_finite(logits)
        return index if ids is None else int(ids[index])

    def _pick_finite(self, logits: F32) -> int:
        """Return the place of the chosen one among finite logits."""
        best = int(np.argmax(logits))
        with np.errstate(over="ignore", under="ignore"):
            weights = np.exp((logits - logits[best]) / self._temperature)
        if self._top_k > 0:
            order = largest(logits, self._top_k)[: self._top_k]
            return self._pick_ranked(order, weights[order], _running_sum(weights[order])[-1])
        if self._top_p < 1:
            return self._pick_nucleus(logits, weights)
        kept = np.flatnonzero(weights >= self._min_p)
        index = self._walk(weights[kept], fallback=-1)
        return best if index < 0 else int(kept[index])

    def _pick_nucleus(self, logits: F32, weights: F32) -> int:
        """Choose by top_p over the whole vocabulary, ranking no more of it than is needed."""
        total = _running_sum(weights)[-1]
        n_ranked = _FIRST_CANDIDATES
        while True:
            order = largest(logits, n_ranked)
            n_taken = self._count_taken(weights[order], total)
            if n_taken < len(order) or len(order) == len(logits):
                order = order[:n_taken]
                return int(order[self._walk(weights[order], fallback=n_taken - 1)])
            n_ranked *= 8

    def _pick_ranked(self, order: Ids, weights: F32, total: np.float32) -> int:
        n_taken = self._count_taken(weights, total)
        return int(order[self._walk(weights[:n_taken], fallback=n_taken - 1)])

    def _count_taken(self, weights: F32, total: np.float32) -> int:
        """Return how many of the ranked candidates min_p and top_p leave, at least one.

        Equals `len(weights)` when neither of them stopped inside.
        """
        n_likely = len(weights)
        too_unlikely = weights / total < weights[0] / total * self._min_p
        too_unlikely[0] = False  # the best one is always taken
        if too_unlikely.any():
            n_likely = int(np.argmax(too_unlikely))
        enough = _running_sum(weights[:n_likely]) / total >= self._top_p
        return int(np.argmax(enough)) + 1 if enough.any() else n_likely

    def _walk(self, weights: F32, *, fallback: int) -> int:
        """Return the place where a random share of the weights is used up."""
        u = self._random.uniform()
        if len(weights) == 0:
            return fallback
        remaining = np.empty(len(weights) + 1, np.float32)
        remaining[0] = u * _running_sum(weights)[-1]
        remaining[1:] = weights
        used_up = np.subtract.accumulate(remaining)[1:] <= 0
        return int(np.argmax(used_up)) if used_up.any() else fallback


def greedy(logits: F32) -> int:
    """Return the first id with the largest logit; NaN never wins, and nothing at all gives 0."""
    return int(np.argmax(np.where(np.isnan(logits), -np.inf, logits)))


def _running_sum(values: F32) -> F32:
    return np.add.accumulate(values, dtype=np.float32)


def largest(logits: F32, count: int) -> Ids:
    """Return the places of the `count` largest, best first, equal ones by place.

    Args:
        logits: Without NaN.
        count: At least 1. Ties may add a few more.
    """
    if count >= len(logits):
        candidates = np.arange(len(logits))
    else:
        threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
        candidates = np.flatnonzero(logits >= threshold)
    return candidates[np.argsort(-logits[candidates], kind="stable")]
