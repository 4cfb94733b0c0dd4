"""`--perplexity-file`: how surprised a model is by a text.

Owns: the sum, and its one line (docs/spec/server-and-cli.md#dumps). Refuses to know: how a node is
opened, files. Invariant: every token behind the first ones is scored once, from all before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ds4py.errors import CancelledError, CapacityError, ConfigError
from ds4py.generation.choice import Choice
from ds4py.generation.logprobs import top_logprobs
from ds4py.generation.loop import Token, generate
from ds4py.generation.sampling import F32

if TYPE_CHECKING:
    from ds4py.runtime import Node

N_CONTEXT: Final = 32
"""Leading tokens that are only read."""


@dataclass(frozen=True, slots=True)
class Score:
    """The outcome.

    Args:
        n_tokens: Of the text.
        n_scored: Those that were predicted.
        nll: Their negative log likelihood, in nats.
    """

    n_tokens: int
    n_scored: int
    nll: float

    @property
    def line(self) -> str:
        """What is printed."""
        mean = self.nll / self.n_scored
        ppl = math.exp(mean) if mean < 700 else math.inf
        return (
            f"tokens={self.n_tokens} scored={self.n_scored} nll={self.nll:.6f} "
            f"avg_nll={mean:.6f} ppl={ppl:.6f}"
        )


class _ScoringReader:
    """A chooser that takes the tokens of a text, whatever the model would say, and adds up."""

    def __init__(self, expected: Sequence[int]) -> None:
        self._expected = iter(expected)
        self.nll = 0.0

    def choose(self, logits: F32) -> Choice:
        token = next(self._expected)
        self.nll -= top_logprobs(logits, token, 0).chosen
        return Choice(token)


def score(
    node: Node,
    ids: Sequence[int],
    *,
    cancelled: Callable[[], bool],
    progress: Callable[[int, int], None],
) -> Score:
    """Score a text token by token.

    Args:
        node: Ready to serve.
        ids: The text.
        cancelled: Polled between tokens.
        progress: Told (tokens done, tokens of the text).

    Raises:
        ConfigError: The text is too short to score anything.
        CapacityError: It is longer than the context.
        CancelledError: `cancelled` became true.
        Ds4Error: A stage failed.
    """
    if len(ids) <= N_CONTEXT:
        raise ConfigError(f"--perplexity-file: {len(ids)} tokens, expected over {N_CONTEXT}")
    if len(ids) > node.backend.n_ctx:
        available = node.backend.n_ctx
        raise CapacityError("context for the text", needed=len(ids), available=available)
    context, rest = ids[:N_CONTEXT], ids[N_CONTEXT:]
    reader = _ScoringReader(rest)
    n_done = N_CONTEXT
    with node.backend.lease(context, cancelled=cancelled) as session:
        for step in generate(
            session,
            context,
            sampler=reader,
            eos_ids=(),
            max_tokens=len(rest),
            cancelled=cancelled,
        ):
            n_done += isinstance(step, Token)
            progress(n_done, len(ids))
    if n_done < len(ids):
        raise CancelledError(f"interrupted after {n_done} of {len(ids)} tokens")
    return Score(len(ids), len(rest), reader.nll)
