"""What becomes of the products of queries and keys before they are weights.

Owns: the rules of one attention, for torch's operations and for kernels alike. Refuses to know: how
they are computed, caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRules:
    """From products to scores.

    Args:
        scale: Factor on scores; 0 means `1 / sqrt(D)`.
        window: Keys that a token sees, its own among them; 0 means all.
        soft_cap: Scores `s` become `cap * tanh(s / cap)`; 0 means they stay.
        sinks: float32 `[H]`, one more score of each head, without a value; None for none.
    """

    scale: float = 0.0
    window: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None

    @property
    def only_scale(self) -> bool:
        """Whether at most the scale differs from a plain attention."""
        return not (self.window or self.soft_cap) and self.sinks is None

    def first_key(self, position: int) -> int:
        """Return the oldest position that a token sees."""
        return max(position - self.window + 1, 0) if self.window else 0


PLAIN: Final = ScoreRules()
