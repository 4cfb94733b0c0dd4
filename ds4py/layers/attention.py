"""Causal attention of grouped heads over one session's cache.

Owns: the two code paths, one token and many. Refuses to know: projections, rotations. Invariant:
softmax and sums are float32, whatever the type of the cache.

A cache is `[2 G, C, D]`: `G` key heads, then `G` value heads.
"""

from __future__ import annotations

import math
from typing import Final

import torch

QUERY_BLOCK: Final = 64
"""Queries that share one product; keys after a block's last query are not touched."""


def attend_one(q: torch.Tensor, kv: torch.Tensor, n_keys: int) -> torch.Tensor:
    """Attend from one token.

    Args:
        q: float32 `[G, H / G, D]`, contiguous.
        kv: The cache; its first `n_keys` rows are valid.
        n_keys: Rows to attend to, the token's own among them.

    Returns:
        `[1, H * D]` in the cache's type.
    """
    n_groups = q.shape[0]
    # widened once and multiplied in float32: quicker than any bfloat16 product for so few rows,
    # the fused kernel among them, and exact
    seen = kv[:, :n_keys].float()
    scores = torch.bmm(q * (1 / math.sqrt(q.shape[2])), seen[:n_groups].transpose(1, 2))
    return torch.bmm(scores.softmax(2), seen[n_groups:]).to(kv.dtype).view(1, -1)


def attend_many(q: torch.Tensor, kv: torch.Tensor, pos0: int) -> torch.Tensor:
    """Attend causally from consecutive tokens, all of whose rows are in the cache.

    Args:
        q: float32 `[T, G, H / G, D]`.
        kv: The cache; rows up to `pos0 + T` are valid.
        pos0: Position of the first token.

    Returns:
        `[T, H * D]` in the cache's type, contiguous.
    """
    T, n_groups, per_group, D = q.shape
    queries = (q * (1 / math.sqrt(D))).to(kv.dtype).transpose(0, 1)
    out = torch.empty((n_groups, T, per_group, D), dtype=kv.dtype, device=kv.device)
    # products and softmax one by one: on the CPU twice as fast as the fused kernel
    for start in range(0, T, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, T)
        n_keys = pos0 + end
        rows = queries[:, start:end].reshape(n_groups, -1, D)
        scores = torch.bmm(rows, kv[:n_groups, :n_keys].transpose(1, 2))
        _hide_later(scores.view(n_groups, end - start, per_group, n_keys))
        mixed = torch.bmm(scores.softmax(2), kv[n_groups:, :n_keys])
        out[:, start:end] = mixed.view(n_groups, end - start, per_group, D)
    return out.transpose(0, 1).reshape(T, -1)


def _hide_later(scores: torch.Tensor) -> None:
    """Hide from each query the keys after its own, the last of which is the last query's.

    Args:
        scores: `[G, T, H / G, N]`; changed in place.
    """
    T, n_keys = scores.shape[1], scores.shape[3]
    later = torch.ones((T, T), dtype=torch.bool, device=scores.device).triu_(1)
    scores[..., n_keys - T :].masked_fill_(later.unsqueeze(1), -math.inf)
