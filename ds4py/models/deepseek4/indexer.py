"""Choosing the compressed rows that a query may see.

Owns: index queries, scores, the selection (docs/spec/deepseek4-model.md#indexer). Refuses to know:
the attention over what was chosen. Invariant: the rows with the largest scores are chosen, of equal
ones the older; a query that sees no more rows than are chosen sees them all.
"""

from __future__ import annotations

import math

import torch

from ds4py.models.deepseek4.cache import CompressedCache
from ds4py.models.deepseek4.compressor import Compressor
from ds4py.models.deepseek4.linear import Weights
from ds4py.models.deepseek4.rotary import rotate_
from ds4py.models.deepseek4.rounding import round_index
from ds4py.models.deepseek4.shape import OVERLAPPED, Shape
from ds4py.models.deepseek4.step import Step


class IndexQueries:
    """What a batch asks the index for.

    Args:
        heads: Rounded queries, float32 `[T, index heads, index width]`.
        weights: Their weights, float32 `[T, index heads]`; may be negative.
    """

    def __init__(self, heads: torch.Tensor, weights: torch.Tensor):
        self._heads = heads
        self._weights = weights

    def __getitem__(self, tokens: slice) -> IndexQueries:
        return IndexQueries(self._heads[tokens], self._weights[tokens])

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        """Return float32 `[T, N]` for index rows `[N, index width]`."""
        dots = (self._heads @ rows.float().t()).relu_()
        return torch.bmm(self._weights.unsqueeze(1), dots).squeeze(1)


class Indexer:
    """The indexer of one layer.

    Args:
        shape: The model.
        weights: Of the layer.
    """

    def __init__(self, shape: Shape, weights: Weights):
        self._heads = (shape.index_heads, shape.index_width)
        self.top_k = shape.index_top_k
        own = weights.below("indexer.")
        self._queries = own.linear("attn_q_b.weight")
        self._weights = own.linear("proj.weight")
        self._factor = 1 / math.sqrt(shape.index_heads * shape.index_width)
        compressor = weights.below("indexer_compressor_")
        self._compressor = Compressor(shape, OVERLAPPED, compressor, round_index)

    def write_rows(self, x: torch.Tensor, step: Step, caches: list[CompressedCache]) -> None:
        """Write the index rows that a batch of normed inputs `[T, D]` finishes."""
        self._compressor(x, step, caches)

    def queries(self, q_low: torch.Tensor, x: torch.Tensor, step: Step) -> IndexQueries | None:
        """Return the queries of a batch, None if every token sees all its rows.

        Args:
            q_low: Low-rank queries of the attention, normed, `[T, q rank]`.
            x: Normed inputs `[T, D]`.
            step: The batch.
        """
        if all((pos0 + n) // OVERLAPPED <= self.top_k for pos0, n in step.segments):
            return None
        heads = self._queries(q_low).view(-1, *self._heads)
        rotate_(heads, step.extended)
        return IndexQueries(round_index(heads), self._weights(x).mul_(self._factor))


def choose_rows(scores: torch.Tensor, finished: torch.Tensor | None, top_k: int) -> torch.Tensor:
    """Choose the rows with the largest scores for every query.

    Args:
        scores: float32 `[T, N]`.
        finished: Which rows a query may see, bool `[T, N]`; None: all.
        top_k: Rows per query; a query that may see fewer gets others too.

    Returns:
        Row numbers, int64 `[T, min(top_k, N)]`, ascending.
    """
    if finished is not None:
        scores = scores.masked_fill(~finished, -math.inf)
    # stable, because equal scores are common (relu) and the older row must win
    ranked = scores.sort(dim=1, descending=True, stable=True).indices
    chosen: torch.Tensor = ranked[:, :top_k].sort(dim=1).values
    return chosen
