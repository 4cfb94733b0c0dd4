"""The output head: final norm, product with the vocabulary, and the last bits of the best logits.

Owns: logits. Refuses to know: sampling. Invariant: the leading logits have float32 sums in every
precision, so that equal bits never decide between likely tokens.
"""

from __future__ import annotations

from typing import Final

import torch

from ds4py.layers.linear import PackedLinear
from ds4py.layers.norm import RmsNorm

N_SHARPENED: Final = 64
"""Logits per row that are computed again in float32 after a bfloat16 product."""


class OutputHead:
    """Norm and vocabulary matrix `[V, W]`.

    A bfloat16 product rounds a logit of 20 to a multiple of 1/8, which often makes the two best
    tokens equal. So the leading ones are computed again from their rows, at some 3 % of the time
    of a token.

    Args:
        norm: Final norm, with float32 results.
        vocabulary: One matrix without bias.
    """

    def __init__(self, norm: RmsNorm, vocabulary: PackedLinear):
        self._norm = norm
        self._vocabulary = vocabulary

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 `[T, V]` for hidden states float32 `[T, W]`."""
        x = self._norm(hidden)
        if self._vocabulary.exact_for(x.shape[0]):
            return self._vocabulary(x)
        logits = self._vocabulary(x.to(self._vocabulary.dtype)).float()
        leading = logits.topk(min(N_SHARPENED, logits.shape[1]), sorted=False).indices
        rows = self._vocabulary.rows(leading.flatten()).view(*leading.shape, -1)
        return logits.scatter_(1, leading, (rows @ x.unsqueeze(2)).squeeze(2))
