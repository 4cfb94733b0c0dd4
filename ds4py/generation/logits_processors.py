"""Everything that moves a reply's tokens besides the sampler's own filters.

Owns: the order of the steps between logits and a token (bias and penalties, grammar, choice) and
what one reply remembers for them. Refuses to know: text, sessions, why a token is forced.
Invariant: without controls the tokens and random numbers are those of the plain sampler, and the
caller's logits are never written to.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ds4py.errors import RequestError
from ds4py.generation.choice import Choice
from ds4py.generation.grammar import Constraint
from ds4py.generation.logprobs import top_logprobs
from ds4py.generation.sampling import F32, Sampler, greedy

MAX_BIASED: Final = 1024
"""Most entries of a `logit_bias`."""

_BIAS: Final = 100.0
_PENALTY: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitBias:
    """What is added to logits before anything else, as OpenAI's API defines it.

    Args:
        bias: Added to the logit of an id, -100 to 100; ids beyond the vocabulary do nothing.
        presence_penalty: Taken from the logit of every token that the reply has, -2 to 2.
        frequency_penalty: Taken from it once for each time that the reply has it, -2 to 2.

    Raises:
        RequestError: A value is out of its range.
    """

    bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        if len(self.bias) > MAX_BIASED:
            raise RequestError(
                f"logit_bias: got {len(self.bias)} entries, expected at most {MAX_BIASED}",
                param="logit_bias",
            )
        for token, value in self.bias.items():
            if token < 0:
                raise RequestError(
                    f"logit_bias: got the token id {token}, expected 0 or more", param="logit_bias"
                )
            _check_range("logit_bias", value, _BIAS)
        _check_range("presence_penalty", self.presence_penalty, _PENALTY)
        _check_range("frequency_penalty", self.frequency_penalty, _PENALTY)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingControls:
    """How one reply is steered; what is absent costs nothing.

    Args:
        logit_bias: Added to the logits first.
        constraint: The grammar of the reply. Anyone who follows the text calls its `start`.
        greedy_now: Asked before each choice whether to take the best allowed token instead of a
            sampled one, without using a random number (docs/spec/server-and-cli.md#sampling).
        forced: Asked before each choice for tokens that must come next, none by default. They are
            taken one after the other before it is asked again.
        n_logprobs: Report log probabilities with that many alternatives; None reports none.
    """

    logit_bias: LogitBias | None = None
    constraint: Constraint | None = None
    greedy_now: Callable[[], bool] | None = None
    forced: Callable[[], Sequence[int]] | None = None
    n_logprobs: int | None = None


class SamplingController:
    """Chooses the tokens of one reply under controls; used by one thread at a time.

    Args:
        sampler: Chooses where nothing else decides.
        controls: Of this reply only, since a constraint remembers its text.
    """

    def __init__(self, sampler: Sampler, controls: SamplingControls) -> None:
        self._sampler = sampler
        self._controls = controls
        self._adjusted = None if controls.logit_bias is None else _BiasedLogits(controls.logit_bias)
        self._forced: deque[int] = deque()

    def choose(self, logits: F32) -> Choice:
        """Return the next token.

        Its log probabilities are those of the model's own distribution: of `logits` as they are.

        Args:
            logits: `f32[V]`, only read.

        Raises:
            RequestError: The grammar allows no token of the model, or not the forced one.
            ModelError: The logits are not one row of at least one value.
        """
        controls = self._controls
        token = self._next_forced()
        if token is None:
            token = self._pick(logits)
        if controls.constraint is not None:
            controls.constraint.accept(token)
        if self._adjusted is not None:
            self._adjusted.count(token)
        n_listed = controls.n_logprobs
        return Choice(
            token,
            None if n_listed is None else top_logprobs(logits, token, n_listed),
            final=controls.constraint is not None and controls.constraint.finished,
        )

    def _next_forced(self) -> int | None:
        if not self._forced and self._controls.forced is not None:
            self._forced.extend(self._controls.forced())
        return self._forced.popleft() if self._forced else None

    def _pick(self, logits: F32) -> int:
        if self._adjusted is not None:
            logits = self._adjusted.apply(logits)
        if self._controls.constraint is not None:
            logits = self._controls.constraint.mask(logits)
        if self._controls.greedy_now is not None and self._controls.greedy_now():
            return greedy(logits)
        return self._sampler.pick(logits)


class _BiasedLogits:
    """An `LogitBias` and the tokens so far."""

    def __init__(self, logit_bias: LogitBias) -> None:
        self._ids = np.fromiter(logit_bias.bias, np.intp)
        self._values = np.fromiter(logit_bias.bias.values(), np.float32)
        self._presence = np.float32(logit_bias.presence_penalty)
        self._frequency = np.float32(logit_bias.frequency_penalty)
        self._seen: Counter[int] = Counter()

    def count(self, token: int) -> None:
        self._seen[token] += 1

    def apply(self, logits: F32) -> F32:
        adjusted = logits.copy()
        known = self._ids < len(logits)
        adjusted[self._ids[known]] += self._values[known]
        if self._seen and (self._presence or self._frequency):
            ids = np.fromiter(self._seen, np.intp)
            counts = np.fromiter(self._seen.values(), np.float32)
            adjusted[ids] -= self._frequency * counts + self._presence
        return adjusted


def _check_range(name: str, value: float, limit: float) -> None:
    if not math.isfinite(value) or abs(value) > limit:
        raise RequestError(
            f"{name}: got {value}, expected a number from {-limit:g} to {limit:g}", param=name
        )
