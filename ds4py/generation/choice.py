"""What is known about one chosen token.

Owns: the values that pass from the code that chooses a token to the code that reports it. Refuses
to know: how it was chosen. Invariant: everything here is frozen.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one step; none is above 0.

    Args:
        chosen: Of the token that was taken; -inf if the model ruled it out.
        ranked: The most probable ids with theirs, best first, equal ones by id. Ids with a
            probability of zero are not listed.
    """

    chosen: float
    ranked: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The token that comes next.

    Args:
        id: Token id.
        logprobs: How probable the model found it, if anybody asked.
        final: Nothing may follow it but the end of the reply.
    """

    id: int
    logprobs: TokenLogprobs | None = None
    final: bool = False
