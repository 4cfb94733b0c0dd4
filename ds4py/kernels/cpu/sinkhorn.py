"""Sinkhorn's normalization of 4 x 4 matrices on the CPU, a matrix in one vector.

Owns: the loop. Refuses to know: where scores come from. Invariant: the order of operations of
docs/spec/deepseek4-model.md#hyper-connections, with float32 sums of two pairs.
`ops/cuda/sinkhorn.py` is the same for a GPU, and `deepseek4.hyper.Sinkhorn` the reference of both.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

from ds4py.kernels.cpu.fused import exponential
from ds4py.kernels.cpu.jit import F32, I64, LANES, Code, Kernel, Value, float_bits, vector
from ds4py.kernels.memory import KernelBuffer

SIZE: Final = 4
"""Rows and columns of a matrix."""

_ALONG_ROW: Final = (1, 2)  # bits of a lane's number that tell the column
_ALONG_COLUMN: Final = (4, 8)


def balanced(scores: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Return nearly doubly stochastic matrices.

    Args:
        scores: float32 `[T, 16]`, contiguous: matrices row after row.
        iterations: Normalizations of columns; rows have one fewer, besides the softmax.
        eps: Added to every sum, and to the softmax.

    Returns:
        float32 `[T, 4, 4]`.

    Raises:
        KernelError: The scores lie otherwise.
    """
    given = KernelBuffer(scores, torch.float32, "scores")
    n_tokens = given.shape[0]
    given.expect("scores", (n_tokens, LANES))
    matrices = KernelBuffer.empty((n_tokens, SIZE, SIZE))
    _balance()(given.address, matrices.address, n_tokens, iterations, float_bits(eps))
    return matrices.tensor


@cache
def _balance() -> Kernel:
    k = Code("balance", ("scores", "out", "n_tokens", "iterations", "eps"))
    b, eps = k.b, k.splat(k.real("eps"))
    with k.loop(0, k.integer("n_tokens")) as token:
        at = k.at(k.pointer("scores"), b.mul(token, I64(LANES)), 4)
        scores = k.load(vector(F32, LANES), at)
        weights = exponential(k, b.fsub(scores, _largest(k, scores)))
        start = b.fadd(b.fdiv(weights, _sum(k, weights, _ALONG_ROW)), eps)
        matrix = k.variable(_normed(k, start, _ALONG_COLUMN, eps))
        with k.loop(1, k.integer("iterations")):
            rows = _normed(k, matrix.get(), _ALONG_ROW, eps)
            matrix.set(_normed(k, rows, _ALONG_COLUMN, eps))
        k.store(matrix.get(), k.at(k.pointer("out"), b.mul(token, I64(LANES)), 4))
    return k.compiled()


def _normed(k: Code, matrix: Value, bits: tuple[int, int], eps: Value) -> Value:
    return k.b.fdiv(matrix, k.b.fadd(_sum(k, matrix, bits), eps))


def _sum(k: Code, matrix: Value, bits: tuple[int, int]) -> Value:
    """Give every lane the sum over its row or column."""
    for bit in bits:
        matrix = k.b.fadd(matrix, k.pick(matrix, [lane ^ bit for lane in range(LANES)]))
    return matrix


def _largest(k: Code, matrix: Value) -> Value:
    """Give every lane the largest of its row."""
    for bit in _ALONG_ROW:
        matrix = k.larger(matrix, k.pick(matrix, [lane ^ bit for lane in range(LANES)]))
    return matrix
