"""What becomes of a request while the server works on it.

Owns: `RequestState`: the prompt in tokens, the grammar, the deadline, and what its run has counted.
Refuses to know: what was asked (`request`, which never changes), sessions, how events are made.
Invariant: used by one thread at a time; the queue hands it from the event loop to the thread that
generates.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ds4py.generation.grammar import Constraint
from ds4py.server.observability.request_metrics import RequestMeter, unmetered
from ds4py.server.requests.events import Tally
from ds4py.server.requests.request import GenerationRequest
from ds4py.text.tool_calls.formats import CallFormat


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the model reads it, and how its reply is to be read.

    Args:
        ids: Token ids, at least one, fewer than the context holds.
        thinking: It opened the reasoning, which is to be told apart from the answer.
        may_think: The model may open the reasoning itself.
        calls: How the model writes calls, which are to be read; None leaves them text.
    """

    ids: tuple[int, ...]
    thinking: bool = False
    may_think: bool = False
    calls: CallFormat | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """One run of a request; what a caller gives stays as it is, the rest is counted.

    Args:
        request: What was asked.
        prompt: Its prompt in tokens.
        constraint: The grammar of the answer, which follows its tokens; None leaves it free.
        deadline: When to give up, in seconds of `time.monotonic`; None never.
        meter: Counts what it costs.

    Attributes:
        evaluated: The prompt that is evaluated: another one of the same meaning may cost less, and
            a second attempt goes on behind the first one.
        began: When a generation thread took it, in seconds of `time.monotonic`.
        prefilled: When the first logits were there; None before.
        n_prompt: Tokens of the prompt that was evaluated first.
        n_cached: Leading ones of those that needed no evaluation; None before that is known.
        n_spent: Tokens of the output budget that went into an attempt that does not count.
    """

    request: GenerationRequest
    prompt: TokenizedPrompt
    constraint: Constraint | None = None
    deadline: float | None = None
    meter: RequestMeter = field(default_factory=unmetered)
    evaluated: tuple[int, ...] = field(default=(), init=False, repr=False)
    began: float = field(default=0.0, init=False)
    prefilled: float | None = field(default=None, init=False)
    n_prompt: int = field(default=0, init=False)
    n_cached: int | None = field(default=None, init=False)
    n_spent: int = field(default=0, init=False)

    @property
    def is_late(self) -> bool:
        """Whether its time is up."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def begin(self) -> None:
        """Take note that a generation thread works on it."""
        self.began = time.monotonic()
        self.evaluated = self.prompt.ids
        self.n_prompt = len(self.prompt.ids)

    def note_prefilled(self, n_cached: int) -> None:
        """Take note that a prompt is evaluated; only the first attempt's counts.

        Args:
            n_cached: Leading tokens that needed no evaluation, unless that is known already.
        """
        if self.prefilled is not None:
            return
        self.prefilled = time.monotonic()
        self.n_prompt = len(self.evaluated)
        if self.n_cached is None:
            self.n_cached = n_cached
        self.meter.prefilled(self.n_prompt, self.n_cached)

    def tally(self, n_completion: int, n_reasoning: int) -> Tally:
        """Return what the run has cost so far.

        Args:
            n_completion: Sampled tokens of the attempt that counts.
            n_reasoning: Those of them before the answer.
        """
        now = time.monotonic()
        prefilled = now if self.prefilled is None else self.prefilled
        return Tally(
            n_prompt=self.n_prompt,
            n_cached=self.n_cached or 0,
            n_completion=n_completion,
            n_reasoning=n_reasoning,
            prefill_seconds=prefilled - self.began,
            decode_seconds=now - prefilled,
        )
