"""Sinkhorn's normalization of small matrices, all iterations in one kernel.

Owns: the loop. Refuses to know: where scores come from. Invariant: the order of operations of
docs/spec/deepseek4-model.md#hyper-connections, with float32 sums.

As torch operations an iteration is four launches, and a layer of DeepSeek V4 has forty iterations:
for one token that is most of the layer's launches.
"""

from __future__ import annotations

from typing import Final

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from ds4py.kernels.memory import check_launch

_TOKENS: Final = 32


def balanced(scores: torch.Tensor, size: int, iterations: int, eps: float) -> torch.Tensor:
    """Return nearly doubly stochastic matrices.

    Args:
        scores: float32 `[T, size * size]`, row after row; each row of values contiguous.
        size: A power of two.
        iterations: Normalizations of columns; rows have one fewer, besides the softmax.
        eps: Added to every sum, and to the softmax.

    Returns:
        float32 `[T, size, size]`.

    Raises:
        KernelError: The scores lie otherwise.
    """
    check_launch(
        scores,
        "scores",
        dtypes=(torch.float32,),
        shape=(None, size * size),
        device=scores.device,
        rows_apart=True,
    )
    n_tokens = scores.shape[0]
    matrices = scores.new_empty((n_tokens, size, size))
    _balance[(triton.cdiv(n_tokens, _TOKENS),)](
        scores,
        matrices,
        n_tokens,
        scores.stride(0),
        eps,
        ITERATIONS=iterations,
        SIZE=size,
        TOKENS=_TOKENS,
        num_warps=1,
        enable_fp_fusion=True,
    )
    return matrices


@triton.jit  # type: ignore[untyped-decorator]
def _balance(  # noqa: PLR0913, PLR0917
    scores: tl.tensor,
    matrices: tl.tensor,
    n_tokens: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    ITERATIONS: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """Normalize the matrices of some tokens."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    entry = tl.arange(0, SIZE)
    inside = entry[None, :, None] * SIZE + entry[None, None, :]
    there = (token < n_tokens)[:, None, None]
    at = token.to(tl.int64)[:, None, None]
    matrix = tl.load(scores + at * stride + inside, there, other=0.0)
    matrix = tl.exp(matrix - tl.max(matrix, 2, keep_dims=True))
    matrix = matrix / tl.sum(matrix, 2, keep_dims=True) + eps
    matrix = matrix / (tl.sum(matrix, 1, keep_dims=True) + eps)
    for _ in range(ITERATIONS - 1):
        matrix = matrix / (tl.sum(matrix, 2, keep_dims=True) + eps)
        matrix = matrix / (tl.sum(matrix, 1, keep_dims=True) + eps)
    tl.store(matrices + at * (SIZE * SIZE) + inside, matrix, there)
