"""How probable the model found a token, and what it would rather have said.

Owns: log probabilities of one step. Refuses to know: sampling, text, JSON. Invariant: they belong
to the softmax over the whole vocabulary, whatever was listed, sampled or forbidden.
"""

from __future__ import annotations

import math

import numpy as np

from ds4py.generation.choice import TokenLogprobs
from ds4py.generation.sampling import F32, largest


def top_logprobs(logits: F32, chosen: int, k: int) -> TokenLogprobs:
    """Return the log-softmax of the chosen token and of the `k` most probable ones.

    Pass the logits as the model gave them, before bias, penalties, temperature and grammar: what is
    told is then the model's own distribution, and a token that a grammar forced upon it shows how
    little it wanted it. The sum over the vocabulary is taken in float64.

    Args:
        logits: `f32[V]`, only read. Values that are not finite are never sampled, and count as a
            probability of zero.
        chosen: Id of the token that was taken, below `V`.
        k: Alternatives to list, as many as there are at most.
    """
    ids = np.flatnonzero(np.isfinite(logits))
    if ids.size == 0:
        return TokenLogprobs(-math.inf, ())
    values = logits[ids].astype(np.float64)
    best = float(values.max())
    log_sum = math.log(np.exp(values - best).sum())  # of the best one's multiples: from 1 to V

    def logprob(token: int) -> float:
        value = float(logits[token])
        return min(value - best - log_sum, 0.0) if math.isfinite(value) else -math.inf

    order = ids[largest(logits[ids], k)[:k]] if k > 0 else ids[:0]
    return TokenLogprobs(
        logprob(chosen), tuple((int(token), logprob(int(token))) for token in order)
    )
