"""Hyper-connections: several residual streams, mixed again around every half of a layer.

Owns: the three kinds of weights that a state gives itself, Sinkhorn's normalization, and the mix of
the streams before the head (docs/spec/deepseek4-model.md#hyper-connections, #output-head). Refuses
to know: what happens between split and merge. Invariant: float32 throughout, in every precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from ds4py.kernels.cpu import sinkhorn
from ds4py.layers.compare import trusts_sinkhorn
from ds4py.models.deepseek4.linear import Weights
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
        self._mixes = ScaleFreeProduct(fn, shape.norm_eps)
        self._scale = scale.repeat_interleave(torch.tensor([S, S, S * S], device=scale.device))
        self._base = base
        self._n_streams = S
        self._eps = torch.full((1, 1), shape.hc_eps, device=fn.device)
        self._sinkhorn = Sinkhorn(S, shape.sinkhorn, shape.hc_eps, fn.device)

    @classmethod
    def load(cls, shape: Shape, weights: Weights) -> HyperConnection:
        """Take `fn`, `scale` and `base` from the weights of one half."""
        fn, scale, base = (weights.dense(f"{name}.weight") for name in ("fn", "scale", "base"))
        return cls(fn, scale, base, shape)

    def split(self, hidden: torch.Tensor) -> tuple[torch.Tensor, StreamMix]:
        """Return the half's input `[T, D]` and the mix, for a state `[T, S * D]`."""
        S = self._n_streams
        mixes = torch.addcmul(self._base, self._mixes(hidden), self._scale)
        pre, post = mixes[:, : 2 * S].sigmoid().chunk(2, 1)
        residual = self._sinkhorn(mixes[:, 2 * S :])
        return weigh_streams(pre + self._eps, hidden), StreamMix(post + post, residual)


class HyperHead:
    """Joins the streams into one vector.

    Args:
        fn: float32 `[S, S * D]`.
        scale: float32 `[1]`.
        base: float32 `[S]`.
        shape: The model.
    """

    def __init__(self, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, shape: Shape):
        self._mixes = ScaleFreeProduct(fn, shape.norm_eps)
        self._scale = scale
        self._base = base
        self._eps = shape.hc_eps

    @classmethod
    def load(cls, shape: Shape, weights: Weights) -> HyperHead:
        """Take `fn`, `scale` and `base` from the weights of the head."""
        fn, scale, base = (weights.dense(f"{name}.weight") for name in ("fn", "scale", "base"))
        return cls(fn, scale, base, shape)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[T, D]` for a state `[T, S * D]`; the streams' weights do not add up to one."""
        mixes = torch.addcmul(self._base, self._mixes(hidden), self._scale)
        weights = mixes.sigmoid_().add_(self._eps)
        return weigh_streams(weights, hidden)


class ScaleFreeProduct:
    """Product of RMS-normed states (without weight) and a small matrix.

    Args:
        fn: float32 `[N, S * D]`.
        eps: Of the norm.
    """

    def __init__(self, fn: torch.Tensor, eps: float):
        width = fn.shape[1]
        self._matrix = fn.t()
        self._floor = torch.full((1, 1), math.sqrt(width * eps), device=fn.device)
        self._unit = torch.full((1, 1), math.sqrt(width), device=fn.device)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[T, N]` for states `[T, S * D]`, all streams normed together."""
        length = torch.linalg.vector_norm(hidden, dim=1, keepdim=True).hypot_(self._floor)
        # the factor of a row is applied to its product, which is shorter
        return (hidden @ self._matrix).mul_(self._unit / length)


class Sinkhorn:
    """Makes matrices `[S, S]` nearly doubly stochastic.

    A sum over a row or column is written as a product with a matrix of ones and zeros, which
    gives every entry its own divisor: two operations a normalization, where sums need three.

    Args:
        size: `S`.
        iterations: Normalizations of columns; rows have one fewer, besides the softmax.
        eps: Added to every sum, and to the softmax.
        device: Home of the matrices.
    """

    def __init__(self, size: int, iterations: int, eps: float, device: torch.device):
        entry = torch.arange(size * size, device=device)
        row, column = entry // size, entry % size
        self._same_row = (row == row.unsqueeze(1)).float()
        self._same_column = (column == column.unsqueeze(1)).float()
        self._eps = torch.full((size * size,), eps, device=device)
        self._eps_value = eps
        on_cpu = device.type == "cpu" and size == sinkhorn.SIZE
        self._for_cpu = on_cpu and trusts_sinkhorn()
        self._for_cuda = device.type == "cuda" and find_spec("triton") is not None
        self._size = size
        self._iterations = iterations

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """Return float32 `[T, S, S]` for scores `[T, S * S]`, row after row."""
        if self._for_cpu:  # one call instead of four operations for each iteration
            # a copy of 64 bytes a token: the scores of several stand beside other weights
            return sinkhorn.balanced(scores.contiguous(), self._iterations, self._eps_value)
        if self._for_cuda:
            from ds4py.kernels.cuda.sinkhorn import balanced  # noqa: PLC0415 - needs triton

            return balanced(scores, self._size, self._iterations, self._eps_value)
        square = (-1, self._size, self._size)
        matrix = scores.reshape(square).softmax(2).view(scores.shape).add_(self._eps)
        sums = torch.empty_like(matrix)
        for iteration in range(self._iterations):
            if iteration:
                matrix.div_(torch.addmm(self._eps, matrix, self._same_row, out=sums))
            matrix.div_(torch.addmm(self._eps, matrix, self._same_column, out=sums))
        return matrix.view(square)


def weigh_streams(weights: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum `[T, D]` of a state's streams, for weights `[T, S]`."""
    streams = hidden.view(*weights.shape, -1)
    return torch.bmm(weights.unsqueeze(1), streams).squeeze(1)
