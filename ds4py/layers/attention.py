"""Causal attention of grouped heads over one session's cache.

Owns: the two code paths, one token and many. Refuses to know: projections, rotations. Invariant:
softmax and sums are float32, whatever the type of the cache.

A cache is `[2 G, C, D]`: `G` key heads, then `G` value heads.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from ds4py.kernels.scores import PLAIN, ScoreRules

QUERY_BLOCK: Final = 64
"""Queries that share one product; keys after a block's last query are not touched."""


def attend_one(
    q: torch.Tensor, kv: torch.Tensor, n_keys: int, rules: ScoreRules = PLAIN
) -> torch.Tensor:
    """Attend from one token.

    Args:
        q: float32 `[G, H / G, D]`, contiguous.
        kv: The cache; its first `n_keys` rows are valid.
        n_keys: Rows up to the token's own, which is the last of them.
        rules: What becomes of scores.

    Returns:
        `[1, H * D]` in the cache's type.
    """
    n_groups = q.shape[0]
    # widened once and multiplied in float32: quicker than any bfloat16 product for so few rows,
    # the fused kernel among them, and exact
    seen = kv[:, rules.first_key(n_keys - 1) : n_keys].float()
    scores = _capped_(torch.bmm(_scaled(q, rules), seen[:n_groups].transpose(1, 2)), rules)
    return torch.bmm(_weights(scores, rules), seen[n_groups:]).to(kv.dtype).view(1, -1)


def attend_many(
    q: torch.Tensor, kv: torch.Tensor, pos0: int, rules: ScoreRules = PLAIN
) -> torch.Tensor:
    """Attend causally from consecutive tokens, all of whose rows are in the cache.

    Args:
        q: float32 `[T, G, H / G, D]`.
        kv: The cache; rows up to `pos0 + T` are valid.
        pos0: Position of the first token.
        rules: What becomes of scores.

    Returns:
        `[T, H * D]` in the cache's type, contiguous.
    """
    T, n_groups, per_group, D = q.shape
    queries = _scaled(q, rules).to(kv.dtype).transpose(0, 1)
    out = torch.empty((n_groups, T, per_group, D), dtype=kv.dtype, device=kv.device)
    # products and softmax one by one: on the CPU twice as fast as the fused kernel
    for start in range(0, T, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, T)
        # what the block's first query sees no longer, none of the others does
        seen = kv[:, rules.first_key(pos0 + start) : pos0 + end]
        rows = queries[:, start:end].reshape(n_groups, -1, D)
        scores = _capped_(torch.bmm(rows, seen[:n_groups].transpose(1, 2)), rules)
        by_query = scores.view(n_groups, end - start, per_group, -1)
        _hide_later(by_query)
        if rules.window:
            _hide_older(by_query, rules.window)
        mixed = torch.bmm(_weights(scores, rules), seen[n_groups:])
        out[:, start:end] = mixed.view(n_groups, end - start, per_group, D)
    return out.transpose(0, 1).reshape(T, -1)


def _scaled(q: torch.Tensor, rules: ScoreRules) -> torch.Tensor:
    """Scale queries and not scores: they are fewer numbers."""
    return q * (rules.scale or 1 / math.sqrt(q.shape[-1]))


def _capped_(scores: torch.Tensor, rules: ScoreRules) -> torch.Tensor:
    """Cap scores in place; before any mask, whose infinities would become finite."""
    if not rules.soft_cap:
        return scores
    return scores.div_(rules.soft_cap).tanh_().mul_(rules.soft_cap)


def _weights(scores: torch.Tensor, rules: ScoreRules) -> torch.Tensor:
    """Turn scores `[G, n H / G, N]`, a group's heads in turn, into weights."""
    if rules.sinks is None:
        return scores.softmax(2)
    n_groups, n_rows, _ = scores.shape
    sinks = rules.sinks.to(scores.dtype).view(n_groups, 1, -1)
    column = sinks.expand(-1, n_rows // sinks.shape[2], -1).reshape(n_groups, n_rows, 1)
    return torch.cat((scores, column), 2).softmax(2)[:, :, :-1]


def _hide_later(scores: torch.Tensor) -> None:
    """Hide from each query the keys after its own, the last of which is the last query's.

    Args:
        scores: `[G, T, H / G, N]`; changed in place.
    """
    T, n_keys = scores.shape[1], scores.shape[3]
    later = torch.ones((T, T), dtype=torch.bool, device=scores.device).triu_(1)
    scores[..., n_keys - T :].masked_fill_(later.unsqueeze(1), -math.inf)


def _hide_older(scores: torch.Tensor, window: int) -> None:
    """Hide from each query the keys behind its window; arguments as in `_hide_later`."""
    T, n_keys = scores.shape[1], scores.shape[3]
    # query t stands at key n_keys - T + t, and sees `window` keys that end there
    older = torch.ones((T, n_keys), dtype=torch.bool, device=scores.device)
    scores.masked_fill_(older.tril_(n_keys - T - window).unsqueeze(1), -math.inf)
