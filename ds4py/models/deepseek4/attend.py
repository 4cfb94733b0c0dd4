"""Attention of a block of queries: one key/value row for all heads, sinks, masks.

Owns: the arithmetic (docs/spec/deepseek4-model.md#attention) and the masks of
docs/spec/deepseek4-model.md#batches. Refuses to know: caches, layers. Invariant: scores, softmax
and sums are float32; the value of a row is the row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Keys:
    """Rows that queries see.

    Args:
        rows: float32 `[N, HD]`, shared by all queries, or `[T, N, HD]`, own ones for each.
        mask: Which rows a query sees, bool `[T, N]`; None: all.
    """

    rows: torch.Tensor
    mask: torch.Tensor | None

    def beside(self, other: Keys) -> Keys:
        """Return these shared rows followed by others."""
        return Keys(torch.cat((self.rows, other.rows)), _joined(self, other))


def attend(
    q: torch.Tensor, sinks: torch.Tensor, shared: Keys, own: Keys | None = None
) -> torch.Tensor:
    """Attend with a sink: a score of every head that takes weight and gives no value.

    Args:
        q: float32 `[T, heads, HD]`, contiguous.
        sinks: float32 `[heads]`.
        shared: Rows that all queries may see.
        own: Further rows of each query.

    Returns:
        float32 `[T, heads, HD]`.
    """
    n_tokens, n_heads, width = q.shape
    flat, n_shared = q.view(-1, width), shared.rows.shape[0]
    scores = [(flat @ shared.rows.t()).view(n_tokens, n_heads, -1)]
    if own is not None:
        scores.append(torch.bmm(q, own.rows.transpose(1, 2)))
    weights = _softmax(scores, sinks, [shared, *([own] if own is not None else [])], width)
    # the two views share rows of `weights`, so nothing is copied
    out = weights.view(-1, weights.shape[2])[:, :n_shared] @ shared.rows
    out = out.view(q.shape)
    if own is not None:
        out.baddbmm_(weights[:, :, n_shared:-1], own.rows)
    return out


def _softmax(
    scores: list[torch.Tensor], sinks: torch.Tensor, keys: list[Keys], width: int
) -> torch.Tensor:
    """Return the weights of all rows, and that of the sink in the last column."""
    n_tokens, n_heads, _ = scores[0].shape
    for part, key in zip(scores, keys, strict=True):
        part.mul_(1 / math.sqrt(width))
        if key.mask is not None:
            part.masked_fill_(~key.mask.unsqueeze(1), -math.inf)
    sink = sinks.view(1, n_heads, 1).expand(n_tokens, -1, -1)
    return torch.cat([*scores, sink], 2).softmax(2)


def recent_mask(
    queries: range, first: int, window: int, device: torch.device
) -> torch.Tensor | None:
    """Say which recent rows are inside the queries' windows.

    Args:
        queries: Positions of the queries.
        first: Position of the first row; there is one for each position up to the last query's.
        window: Rows that a query sees, its own among them.
        device: Where the mask is needed.

    Returns:
        bool `[T, N]`, None for a single query, which sees all rows.
    """
    if len(queries) == 1:
        return None
    at = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    row = torch.arange(first, queries.stop, device=device)
    return (row <= at) & (row > at - window)


def finished_mask(
    queries: range, n_rows: int, ratio: int, device: torch.device
) -> torch.Tensor | None:
    """Say which compressed rows were finished when the queries' tokens were.

    Returns:
        bool `[T, n_rows]`, None if every query sees all rows.
    """
    if (queries.start + 1) // ratio == n_rows:
        return None
    at = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    row = torch.arange(n_rows, device=device)
    return row < (at + 1) // ratio


def _joined(left: Keys, right: Keys) -> torch.Tensor | None:
    """Put two masks beside each other; a missing one is all true."""
    masks = [left.mask, right.mask]
    known = next((mask for mask in masks if mask is not None), None)
    if known is None:
        return None
    parts = [
        known.new_ones((known.shape[0], keys.rows.shape[0])) if keys.mask is None else keys.mask
        for keys in (left, right)
    ]
    return torch.cat(parts, 1)
