"""Whether two greedy answers are as equal as they must be.

Owns: the rule. Refuses to know: where answers come from.

The rule. At 32 bits a route must answer what one process of its coordinator's kind answers. At 16
and 8 bits it cannot: its hidden states are rounded between the machines. There it must answer what
ds4py answers in one process with the same cuts and the same rounding; how long that is also the
answer without rounding is reported as drift. A route of ds4py alone must answer so to the end; one
with ds4 up to the first near tie, a step before which the two best logits are nearer than a margin,
because other arithmetic may choose the other token there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from interop.live.trace import Trace

MARGIN: Final = 0.5
"""Logits. Those of two implementations of the default model, whose activations are rounded to 8
bits, differ by 0.05 in the mean and 0.3 at most on short prompts."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a row: `fine` is None if it was not run."""

    fine: bool | None
    words: str


def judge(answer: str, expected: str, trace: Trace, margin: float | None) -> Verdict:
    """Compare an answer with the expected one.

    Args:
        answer: Of a route.
        expected: What it should be.
        trace: Of ds4py, for the same question, cuts and width.
        margin: In logits; None allows no difference.
    """
    n_tokens = len(trace.ends)
    if answer == expected:
        return Verdict(True, f"same text, {n_tokens} tokens")
    n_same = _n_same(answer, expected)
    told = f"same for {_n_tokens(trace, n_same)} of {n_tokens} tokens"
    if margin is None:
        return Verdict(False, f"DIFFERS: {told}")
    n_sure = next((k for k, gap in enumerate(trace.gaps) if gap < margin), n_tokens)
    told = f"{told}, near tie (below {margin:g}) after {n_sure}"
    if n_same < (trace.ends[n_sure - 1] if n_sure else 0):
        return Verdict(False, f"DIFFERS: {told}")
    return Verdict(True, told)


def drift(answer: str, says_alone: str, trace: Trace) -> str:
    """Say how long an answer with rounding is the one without."""
    if answer == says_alone:
        return "no drift"
    n_same = _n_tokens(trace, _n_same(answer, says_alone))
    return f"drift from one process after {n_same}"


def _n_same(one: str, other: str) -> int:
    """Return the length of what two texts begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((k for k, (a, b) in pairs if a != b), min(len(one), len(other)))


def _n_tokens(trace: Trace, n_characters: int) -> int:
    """Return how many tokens of an answer so many of its characters are."""
    return sum(end <= n_characters for end in trace.ends)
