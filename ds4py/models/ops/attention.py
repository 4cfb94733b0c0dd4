"""Causal attention of grouped heads over one session's cache.

Owns: the two code paths, one token and many. Refuses to know: projections, rotations. Invariant:
softmax and sums are float32, whatever the type of the cache.

A cache is `[2 G, C, D]`: `G` key heads, then `G` value heads.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch.nn.functional import scaled_dot_product_attention

QUERY_BLOCK: Final = 256
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
    queries = q.permute(1, 2, 0, 3).to(kv.dtype)
    spread = kv[:, None].expand(-1, per_group, -1, -1)
    keys, values = spread[:n_groups], spread[n_groups:]
    mask = _causal_mask(min(T, QUERY_BLOCK), pos0 + T, kv)
    out = torch.empty((T, n_groups, per_group, D), dtype=kv.dtype, device=kv.device)
    for start in range(0, T, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, T)
        n_keys = pos0 + end
        # the mask ends with a square triangle; a shorter last block takes its upper left corner
        past = mask.shape[1] - mask.shape[0] + end - start
        block = scaled_dot_product_attention(
            queries[:, :, start:end],
            keys[:, :, :n_keys],
            values[:, :, :n_keys],
            attn_mask=mask[: end - start, past - n_keys : past],
        )
        out[start:end] = block.permute(2, 0, 1, 3)
    return out.view(T, -1)


def _causal_mask(n_rows: int, n_keys: int, like: torch.Tensor) -> torch.Tensor:
    """Return `[n_rows, n_keys + n_rows]`: zeros, then a triangle that hides what follows a row."""
    mask = torch.zeros((n_rows, n_keys + n_rows), dtype=like.dtype, device=like.device)
    hidden = torch.full((n_rows, n_rows), -math.inf, dtype=like.dtype, device=like.device)
    mask[:, n_keys:] = hidden.triu_(1)
    return mask
