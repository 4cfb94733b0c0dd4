"""What a reply consists of while it arrives.

Owns: the values. Refuses to know: who shows them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a reply.

    Args:
        text: What the answer grows by; may be empty while a character or a stop string is unclear.
        ids: The tokens that were sampled for it.
        reasoning: What the reasoning before the answer grows by.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The end of a reply, and what it cost.

    Args:
        n_prompt: Tokens of the prompt.
        n_cached: Leading ones that needed no evaluation.
        n_generated: Tokens of the reply.
        prefill_per_second: Evaluated prompt tokens per second.
        decode_per_second: Generated tokens per second.
        finish: "stop", "length" or "cancelled".
    """

    n_prompt: int
    n_cached: int
    n_generated: int
    prefill_per_second: float
    decode_per_second: float
    finish: str


Event = Piece | Figures
