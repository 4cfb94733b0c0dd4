"""The token loop: prompt in, events out, over any session.

Owns: the budget, the end of a reply, and cancelling between tokens. Refuses to know: text, stop
strings (their owner closes the generator), HTTP. Invariant: a token is evaluated only if a further
token will be sampled after it, so that nothing is computed that nobody reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from ds4py.contracts import Cancelled, Progress, Session
from ds4py.errors import CancelledError, CapacityError
from ds4py.generation.choice import Choice, TokenLogprobs
from ds4py.generation.sampling import F32


class FinishReason(StrEnum):
    """Why a reply ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt is in the session.

    Args:
        n_prompt: Tokens of the prompt.
        n_cached: Leading tokens that were reused instead of evaluated.
        seconds: Time that it took.
    """

    n_prompt: int
    n_cached: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Token:
    """One token that belongs to the reply.

    Args:
        id: Token id.
        logprobs: How probable the model found it, if the sampler was asked for that.
    """

    id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The reply is complete; the last event.

    Args:
        reason: Why it ended.
        n_tokens: Tokens of the reply, the end token not counted.
        seconds: Time from the end of the prompt.
        eos_id: The end token that was sampled; None for another reason, and for a reply that its
            grammar completed.
    """

    reason: FinishReason
    n_tokens: int
    seconds: float
    eos_id: int | None = None


GenerationStep = Prefilled | Token | Finished


class Chooser(Protocol):
    """Chooses tokens: a `Sampler`, or a `logits_processors.SamplingController` around one."""

    def choose(self, logits: F32) -> Choice:
        """Return the next token for logits `f32[V]`, which are only read."""


def generate(
    session: Session,
    prompt: Sequence[int],
    *,
    sampler: Chooser,
    eos_ids: Collection[int],
    max_tokens: int | None = None,
    progress: Progress | None = None,
    cancelled: Cancelled | None = None,
) -> Generator[GenerationStep, None, None]:
    """Yield one `Prefilled`, a `Token` per token of the reply, and one `Finished`.

    Nothing happens before the first event is asked for. Anyone who has read enough closes the
    generator; the token yielded last has then not been evaluated.

    Args:
        session: Brought to the prompt first; afterwards it holds the prompt and all tokens of the
            reply but the last.
        prompt: At least one token, and fewer than the session's context.
        sampler: Chooses the tokens.
        eos_ids: Tokens that end the reply; they are reported, but are no part of it.
        max_tokens: Budget; None and anything larger than the room left means the room left.
            0 only evaluates the prompt.
        progress: Passed to `Session.sync`.
        cancelled: Polled during the prompt and before each token.

    Raises:
        CapacityError: The prompt leaves no room for a token; nothing was changed.
        RequestError: The sampler cannot go on under its grammar.
        Ds4Error: What `Session.sync` and `Session.eval` raise, except for `CancelledError`, which
            becomes `Finished`.
    """
    room = session.n_ctx - len(prompt)
    if room < 1:
        raise CapacityError(
            "context for the prompt and one more token",
            needed=len(prompt) + 1,
            available=session.n_ctx,
        )
    stopwatch = _stopwatch()
    try:
        synced = session.sync(prompt, progress=progress, cancelled=cancelled)
    except CancelledError:
        yield Finished(FinishReason.CANCELLED, 0, 0.0)
        return
    yield Prefilled(len(prompt), synced.n_cached, stopwatch())
    budget = room if max_tokens is None else max(0, min(max_tokens, room))
    yield from _reply(session, synced.logits, sampler, frozenset(eos_ids), budget, cancelled)


def _reply(
    session: Session,
    logits: F32,
    sampler: Chooser,
    eos_ids: frozenset[int],
    budget: int,
    cancelled: Cancelled | None,
) -> Generator[GenerationStep, None, None]:
    seconds = _stopwatch()
    for n_tokens in range(budget):
        if cancelled is not None and cancelled():
            yield Finished(FinishReason.CANCELLED, n_tokens, seconds())
            return
        choice = sampler.choose(logits)
        if choice.id in eos_ids:
            yield Finished(FinishReason.STOP, n_tokens, seconds(), eos_id=choice.id)
            return
        yield Token(choice.id, choice.logprobs)
        if choice.final:
            yield Finished(FinishReason.STOP, n_tokens + 1, seconds())
            return
        if n_tokens + 1 < budget:
            try:
                logits = session.eval(choice.id)
            except CancelledError:
                yield Finished(FinishReason.CANCELLED, n_tokens + 1, seconds())
                return
    yield Finished(FinishReason.LENGTH, budget, seconds())


def _stopwatch() -> Callable[[], float]:
    start = time.monotonic()
    return lambda: time.monotonic() - start
