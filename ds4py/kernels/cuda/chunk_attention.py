"""Causal attention of consecutive tokens through torch's fused kernels.

Owns: the form in which torch may take its flash kernel. Refuses to know: rotations, layers.

A mask, whatever it holds, forbids the flash kernel: with `layers.attention.attend_many` a GPU takes
the memory-efficient one and reads a mask beside the keys. Said as a bias that torch understands
("queries are the last rows"), the same attention has no mask: bfloat16 goes to the flash kernel,
float32, which flash does not know, to the memory-efficient one. No blocks of queries are needed
then, as neither kernel touches keys behind a query.
"""

from __future__ import annotations

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


def attend_chunk(
    q: torch.Tensor, kv: torch.Tensor, pos0: int, scale: float | None = None
) -> torch.Tensor:
    """Attend causally from consecutive tokens; the contract of `layers.attention.attend_many`.

    Args:
        q: float32 `[T, G, H / G, D]`.
        kv: The cache `[2 G, C, D]`; rows up to `pos0 + T` are valid.
        pos0: Position of the first token.
        scale: Factor on scores; None means `1 / sqrt(D)`.

    Returns:
        `[T, H * D]` in the cache's type, contiguous.
    """
    T, n_groups, per_group, _ = q.shape
    n_keys = pos0 + T
    queries = q.permute(1, 2, 0, 3).to(kv.dtype)
    spread = kv[:, None, :n_keys].expand(-1, per_group, -1, -1)
    out = scaled_dot_product_attention(
        queries,
        spread[:n_groups],
        spread[n_groups:],
        attn_mask=causal_lower_right(T, n_keys),
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).reshape(T, -1)
