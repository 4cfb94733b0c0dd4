"""Root-mean-square normalization.

Owns: the formula `x / sqrt(mean(x^2) + eps) * weight`. Invariant: float32 arithmetic.
"""

from __future__ import annotations

import math

import torch


class RmsNorm:
    """RMS norm over the last axis of `[T, W]`.

    Written as `x * (weight * sqrt(W)) / hypot(norm(x), sqrt(W * eps))`: four small kernels, where
    `torch.nn.functional.rms_norm` runs eight on the CPU, twice as slow for a single token.

    Args:
        weight: float32 `[W]`.
        eps: Added to the mean square.
        dtype: Type of the result.
    """

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype):
        width = weight.shape[0]
        self._weight = weight * math.sqrt(width)
        self._floor = torch.full((1, 1), math.sqrt(width * eps), device=weight.device)
        self._dtype = dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed rows of float32 `[T, W]`, in the chosen type."""
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True).hypot_(self._floor)
        return (x * self._weight).div_(length).to(self._dtype)
