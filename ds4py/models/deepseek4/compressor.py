"""Pooling windows of tokens into single rows.

Owns: projections, scores, the pooling with and without overlap, and when a row is finished
(docs/spec/deepseek4-model.md#compressor). Refuses to know: who reads the rows. Invariant: a
window's row depends only on its own tokens and, with overlap, on those of the window before; it is
written when its last token is evaluated, whatever the cutting into chunks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ds4py.layers.norm import RmsNorm
from ds4py.models.deepseek4.cache import NO_SCORE, CompressedCache
from ds4py.models.deepseek4.linear import Weights
from ds4py.models.deepseek4.rotary import rotate_
from ds4py.models.deepseek4.shape import OVERLAPPED, Shape
from ds4py.models.deepseek4.step import Step

FinishRow = Callable[[torch.Tensor], torch.Tensor]
"""Rounds normed and rotated rows `[windows, width]`."""


class Compressor:
    """One compressor of one layer.

    Args:
        shape: The model.
        ratio: Tokens per row.
        weights: Its tensors: `kv`, `gate`, `ape`, `norm`.
        finish: Rounding of finished rows.
    """

    def __init__(self, shape: Shape, ratio: int, weights: Weights, finish: FinishRow):
        self._ratio = ratio
        self._project = weights.linear("kv.weight", "gate.weight")
        self._ape = weights.dense("ape.weight")
        self._norm = RmsNorm(weights.dense("norm.weight"), shape.norm_eps, torch.float32)
        self._finish = finish

    def __call__(self, x: torch.Tensor, step: Step, caches: list[CompressedCache]) -> None:
        """Take the normed inputs `[T, D]` of a batch and write the rows that they finish."""
        kv, score = self._project(x).chunk(2, 1)
        score = score + self._ape[step.phases(self._ratio)]
        start = 0
        for number, (pos0, n_tokens) in enumerate(step.segments):
            rows = slice(start, start + n_tokens)
            rotation = step.window_starts(self._ratio, number)
            self._advance(kv[rows], score[rows], caches[number], pos0, rotation)
            start += n_tokens

    def _advance(
        self,
        kv: torch.Tensor,
        score: torch.Tensor,
        cache: CompressedCache,
        pos0: int,
        rotation: torch.Tensor,
    ) -> None:
        """Finish the windows that end inside a segment, then keep its projections."""
        first, end = pos0 // self._ratio, (pos0 + kv.shape[0]) // self._ratio
        if first < end:
            oldest = cache.pending_from(pos0)
            past_kv, past_score = cache.kv.read(oldest, pos0), cache.score.read(oldest, pos0)
            length = end * self._ratio - oldest
            rows = pool(
                torch.cat((past_kv, kv))[:length],
                torch.cat((past_score, score))[:length],
                self._ratio,
                has_previous=first > 0,
            )
            rows = self._norm(rows)
            rotate_(rows.unsqueeze(1), rotation)
            cache.rows[first:end] = self._finish(rows)
        cache.kv.write(pos0, kv)
        cache.score.write(pos0, score)


def pool(kv: torch.Tensor, score: torch.Tensor, ratio: int, *, has_previous: bool) -> torch.Tensor:
    """Return one row per window, for every channel weighed by a softmax over its tokens.

    Args:
        kv: float32 `[windows * ratio, width]`, with overlap `[windows * ratio, 2 * width]` and
            the tokens of the window before the first in front, if there is one.
        score: The same for the scores, positions already added.
        ratio: Tokens per window.
        has_previous: With overlap: whether the window before the first is there.

    Returns:
        float32 `[windows, width]`.
    """
    if ratio == OVERLAPPED:
        kv, score = (
            overlapped(part, empty, ratio, has_previous=has_previous)
            for part, empty in ((kv, 0.0), (score, NO_SCORE))
        )
    else:
        kv, score = (part.view(-1, ratio, part.shape[1]) for part in (kv, score))
    return (score.softmax(1) * kv).sum(1)


def overlapped(
    tokens: torch.Tensor, empty: float, ratio: int, *, has_previous: bool
) -> torch.Tensor:
    """Return the candidates of every window: `[windows, 2 * ratio, width]`.

    A window sees the first half of the channels of the previous window's tokens, and the second
    half of its own tokens'.
    """
    windows = tokens.view(-1, ratio, tokens.shape[1])
    if not has_previous:
        windows = torch.cat((torch.full_like(windows[:1], empty), windows))
    previous, own = windows.chunk(2, 2)
    return torch.cat((previous[:-1], own[1:]), 1)
