"""Attention of one layer: recent rows, compressed rows, sinks, and the grouped output projection.

Owns: queries, the shared key/value row, which rows a query sees, the softmax with sinks
(docs/spec/deepseek4-model.md#projections, #raw-cache, #attention, #output-projection, #batches).
Refuses to know: how rows are compressed and chosen. Invariant: a token's result does not depend on
how its prompt was cut into chunks, except for the order of float32 sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from ds4py.layers.norm import RmsNorm
from ds4py.models.deepseek4.attend import Keys, attend, finished_mask, recent_mask
from ds4py.models.deepseek4.cache import CompressedCache, LayerCache
from ds4py.models.deepseek4.compressor import Compressor
from ds4py.models.deepseek4.indexer import Indexer, IndexQueries, choose_rows
from ds4py.models.deepseek4.linear import Linear, Weights
from ds4py.models.deepseek4.rotary import rotate_
from ds4py.models.deepseek4.rounding import round_kv
from ds4py.models.deepseek4.shape import OVERLAPPED, Shape
from ds4py.models.deepseek4.step import Step

QUERY_BLOCK: Final = 64
"""Queries that share one product with the recent rows; bounds the memory of scores."""


class Attention:
    """The attention half of one layer, between norm and merge.

    Args:
        shape: The model.
        layer: Number in the whole model.
        weights: Of the layer.
    """

    def __init__(self, shape: Shape, layer: int, weights: Weights):
        self._shape = shape
        self._ratio = shape.ratios[layer]
        self._low = weights.linear("attn_q_a.weight", "attn_kv.weight")
        self._q_norm = RmsNorm(weights.dense("attn_q_a_norm.weight"), shape.norm_eps, torch.float32)
        self._kv_norm = RmsNorm(
            weights.dense("attn_kv_a_norm.weight"), shape.norm_eps, torch.float32
        )
        self._queries = weights.linear("attn_q_b.weight")
        unweighted = torch.ones(shape.d_head, device=weights.spec.device)
        self._head_norm = RmsNorm(unweighted, shape.norm_eps, torch.float32)
        self._sinks = weights.dense("attn_sinks.weight")
        self._output = GroupedOutput(shape, weights)
        self._compressor = self._indexer = None
        if self._ratio:
            self._compressor = Compressor(
                shape, self._ratio, weights.below("attn_compressor_"), self._round
            )
        if self._ratio == OVERLAPPED:
            self._indexer = Indexer(shape, weights)

    def __call__(self, x: torch.Tensor, step: Step, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Return `[T, D]` for normed inputs `[T, D]`, and write the caches' rows.

        Args:
            x: Inputs of all segments, one below the other.
            step: The batch.
            caches: This layer's cache of every segment.
        """
        shape, rotation = self._shape, step.extended if self._ratio else step.plain
        low = self._low(x)
        q_low = self._q_norm(low[:, : shape.q_rank])
        heads = self._queries(q_low).view(-1, shape.d_head)
        q = self._head_norm(heads).view(-1, shape.n_head, shape.d_head)
        rows = self._kv_norm(low[:, shape.q_rank :])
        rotate_(q, rotation)
        rotate_(rows.unsqueeze(1), rotation)
        asked = self._compress(x, q_low, step, caches)
        out = self._attend_all(q, self._round(rows), asked, step, caches)
        rotate_(out, rotation.conj())
        return self._output(out)

    def _round(self, rows: torch.Tensor) -> torch.Tensor:
        return round_kv(rows, self._shape.n_rot)

    def _compress(
        self, x: torch.Tensor, q_low: torch.Tensor, step: Step, caches: Sequence[LayerCache]
    ) -> IndexQueries | None:
        """Write compressed and index rows, which a token's own query already sees."""
        if self._compressor is not None:
            self._compressor(x, step, [_there(cache.compressed) for cache in caches])
        if self._indexer is None:
            return None
        self._indexer.write_rows(x, step, [_there(cache.index) for cache in caches])
        return self._indexer.queries(q_low, x, step)

    def _attend_all(
        self,
        q: torch.Tensor,
        rows: torch.Tensor,
        asked: IndexQueries | None,
        step: Step,
        caches: Sequence[LayerCache],
    ) -> torch.Tensor:
        """Attend segment by segment: `[T, heads, HD]`."""
        out = torch.empty_like(q)
        start = 0
        for (pos0, n_tokens), cache in zip(step.segments, caches, strict=True):
            own = slice(start, start + n_tokens)
            oldest = max(pos0 - self._shape.window + 1, 0)
            recent = torch.cat((cache.raw.read(oldest, pos0), rows[own])).float()
            cache.raw.write(pos0, rows[own])
            for first in range(0, n_tokens, QUERY_BLOCK):
                end = min(first + QUERY_BLOCK, n_tokens)
                block = slice(start + first, start + end)
                questions = None if asked is None else asked[block]
                span = range(pos0 + first, pos0 + end)
                keys = self._visible(span, recent, oldest, cache, questions)
                out[block] = attend(q[block], self._sinks, *keys)
            start += n_tokens
        return out

    def _visible(
        self,
        queries: range,
        recent: torch.Tensor,
        oldest: int,
        cache: LayerCache,
        asked: IndexQueries | None,
    ) -> tuple[Keys, Keys | None]:
        """Return what a block of queries sees.

        Args:
            queries: Their positions.
            recent: Rows from position `oldest` on.
            oldest: Position of the first of them.
            cache: For compressed and index rows.
            asked: The queries' index queries, if some of them must choose.

        Returns:
            Rows that the whole block shares, and rows of each query's own choice.
        """
        window = self._shape.window
        first = max(queries.start - window + 1, 0)
        shared = Keys(
            recent[first - oldest : queries.stop - oldest],
            recent_mask(queries, first, window, recent.device),
        )
        compressed = cache.compressed
        if compressed is None:
            return shared, None
        n_rows = queries.stop // compressed.ratio
        finished = finished_mask(queries, n_rows, compressed.ratio, recent.device)
        if asked is not None and n_rows > self._shape.index_top_k:
            scores = asked.scores(_there(cache.index).rows[:n_rows])
            chosen = choose_rows(scores, finished, self._shape.index_top_k)
            mask = None if finished is None else finished.gather(1, chosen)
            return shared, Keys(compressed.rows[chosen].float(), mask)
        return shared.beside(Keys(compressed.rows[:n_rows].float(), finished)), None


class GroupedOutput:
    """The output projection: a low rank per group of heads, then one matrix for all.

    Args:
        shape: The model.
        weights: Of the layer.
    """

    def __init__(self, shape: Shape, weights: Weights):
        matrix = weights.packed("attn_output_a.weight")
        rank, n_groups = shape.out_rank, shape.out_groups
        self._groups = [
            Linear([matrix.part(group * rank, rank)], weights.spec) for group in range(n_groups)
        ]
        self._join = weights.linear("attn_output_b.weight")

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Return `[T, D]` for the heads' results `[T, heads, HD]`."""
        grouped = heads.view(heads.shape[0], len(self._groups), -1).transpose(0, 1)
        # one copy for all groups: a group's values of several tokens do not lie side by side, and
        # products take contiguous rows only; of one token they do, and nothing is copied
        low = [linear(own) for linear, own in zip(self._groups, grouped.contiguous(), strict=True)]
        return self._join(torch.cat(low, 1))


def _there(cache: CompressedCache | None) -> CompressedCache:
    assert cache is not None, "the layout of the cache follows from the same ratio"
    return cache
