"""Hyper-connections: several residual streams, mixed anew around every half of a layer.

Owns: the three kinds of weights that a state gives itself, Sinkhorn's normalization, and the mix of
the streams before the head (docs/spec/deepseek4-model.md 3.2, 3.13). Refuses to know: what happens
between split and merge. Invariant: float32 throughout, in every precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ds4py.models.deepseek4.products import Weights
from ds4py.models.deepseek4.shape import Shape


@dataclass(frozen=True, slots=True)
class StreamMix:
    """How a half's result goes back into the streams.

    Args:
        post: Share of the result in every stream, `[T, S]`.
        residual: `[T, S, S]`; row: the stream that gives, column: the stream that takes.
    """

    post: torch.Tensor
    residual: torch.Tensor

    def merge(self, y: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the new state `[T, S * D]` of a result `[T, D]` and the state before the split."""
        streams = hidden.view(*self.post.shape, -1)
        given = self.post.unsqueeze(2) * y.unsqueeze(1)
        return given.baddbmm_(self.residual.transpose(1, 2), streams).flatten(1)


class HyperConnection:
    """Splits a state into the input of a half and the mix for its result.

    Args:
        fn: float32 `[2 S + S * S, S * D]`.
        scale: float32 `[3]`: factors of the three parts of `fn`'s result.
        base: float32 `[2 S + S * S]`, added to it.
        shape: The model.
    """

    def __init__(self, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, shape: Shape):
        S = shape.n_streams
        self._fn = fn.t()
        self._scale = scale.repeat_interleave(torch.tensor([S, S, S * S], device=scale.device))
        self._base = base
        self._shape = shape

    @classmethod
    def load(cls, shape: Shape, weights: Weights) -> HyperConnection:
        """Take `fn`, `scale` and `base` from the weights of one half."""
        fn, scale, base = (weights.dense(f"{name}.weight") for name in ("fn", "scale", "base"))
        return cls(fn, scale, base, shape)

    def split(self, hidden: torch.Tensor) -> tuple[torch.Tensor, StreamMix]:
        """Return the half's input `[T, D]` and the mix, for a state `[T, S * D]`."""
        S, eps = self._shape.n_streams, self._shape.hc_eps
        mixes = scale_free(hidden, self._fn, self._shape.norm_eps)
        mixes = torch.addcmul(self._base, mixes, self._scale)
        pre, post = mixes[:, : 2 * S].sigmoid().chunk(2, 1)
        scores = mixes[:, 2 * S :].reshape(-1, S, S)
        residual = sinkhorn(scores, self._shape.sinkhorn, eps)
        return weigh_streams(pre + eps, hidden), StreamMix(2 * post, residual)


class HyperHead:
    """Joins the streams into one vector.

    Args:
        fn: float32 `[S, S * D]`.
        scale: float32 `[1]`.
        base: float32 `[S]`.
        shape: The model.
    """

    def __init__(self, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, shape: Shape):
        self._fn = fn.t()
        self._scale = scale
        self._base = base
        self._shape = shape

    @classmethod
    def load(cls, shape: Shape, weights: Weights) -> HyperHead:
        """Take `fn`, `scale` and `base` from the weights of the head."""
        fn, scale, base = (weights.dense(f"{name}.weight") for name in ("fn", "scale", "base"))
        return cls(fn, scale, base, shape)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[T, D]` for a state `[T, S * D]`; the streams' weights do not add up to one."""
        mixes = scale_free(hidden, self._fn, self._shape.norm_eps)
        weights = torch.addcmul(self._base, mixes, self._scale).sigmoid_() + self._shape.hc_eps
        return weigh_streams(weights, hidden)


def scale_free(x: torch.Tensor, matrix: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the product of RMS-normed rows `[T, K]` (without weight) and a matrix `[K, N]`.

    The rows' factor is applied to the product, which is shorter.
    """
    width = x.shape[1]
    floor = torch.full((1, 1), math.sqrt(width * eps), device=x.device)
    length = torch.linalg.vector_norm(x, dim=1, keepdim=True).hypot_(floor)
    return (x @ matrix).mul_(math.sqrt(width) / length)


def weigh_streams(weights: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum `[T, D]` of a state's streams, for weights `[T, S]`."""
    streams = hidden.view(*weights.shape, -1)
    return torch.bmm(weights.unsqueeze(1), streams).squeeze(1)


def sinkhorn(scores: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Make matrices `[T, S, S]` nearly doubly stochastic.

    A softmax over rows stands for the first normalization of rows; the last one is of columns.
    """
    matrix = scores.softmax(2).add_(eps)
    for iteration in range(iterations):
        if iteration:
            matrix /= matrix.sum(2, keepdim=True).add_(eps)
        matrix /= matrix.sum(1, keepdim=True).add_(eps)
    return matrix
