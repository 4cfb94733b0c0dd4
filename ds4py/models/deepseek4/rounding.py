"""The hard roundings inside a DeepSeek V4, as values on the grid of their number format.

Owns: int8 activations, FP8 cache rows, FP4 index vectors
(docs/spec/deepseek4-model.md#activation-rounding, #kv-rounding, #indexer). Refuses to know: where
they are applied. Invariant: float32 in, float32 out in new memory, the last axis is the vector;
ties go to the even code.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from ds4py.quant.bits import table

_E4M3_MAX: Final = 448.0
_E4M3_FLOOR: Final = 1e-4
_KV_BLOCK: Final = 64
_E2M1_MAX: Final = 6.0
_E2M1_FLOOR: Final = 6 * 2.0**-126
_INDEX_BLOCK: Final = 32


def round_q8_0(x: torch.Tensor) -> torch.Tensor:
    """Round to int8 with a float32 scale per 32 values."""
    blocks = _blocks(x, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    inverse = _zero_if_infinite(1 / scale)
    return (blocks * inverse).round_().clamp_(-128, 127).mul_(scale).flatten(-2)


def round_q8_k(x: torch.Tensor) -> torch.Tensor:
    """Round to int8 with a float32 scale per 256 values, whose extreme becomes -127."""
    blocks = _blocks(x, 256)
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    # divided by a tensor: a number would be multiplied by the reciprocal, which rounds twice
    inverse = _zero_if_infinite(extreme.new_full((), -127) / extreme)
    scale = _zero_if_infinite(1 / inverse)
    return (blocks * inverse).round_().clamp_(max=127).mul_(scale).flatten(-2)


def round_kv(rows: torch.Tensor, n_rot: int) -> torch.Tensor:
    """Round cache rows: FP8 (E4M3) per 64 values except for the last `n_rot`, then all to binary16.

    Returns:
        float16, same shape.
    """
    half = rows.to(torch.float16)
    blocks = _blocks(rows[..., : rows.shape[-1] - n_rot], _KV_BLOCK)
    extreme = blocks.abs().amax(-1, keepdim=True).clamp_(min=_E4M3_FLOOR)
    scale = _next_power_of_two(extreme / _E4M3_MAX)
    # clamped first: the cast does not saturate everywhere
    codes = (blocks / scale).clamp_(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    half[..., : rows.shape[-1] - n_rot] = codes.to(torch.float32).mul_(scale).flatten(-2)
    return half


def round_index(vectors: torch.Tensor) -> torch.Tensor:
    """Spread by a Hadamard transform, then round to FP4 (E2M1) per 32 values."""
    width = vectors.shape[-1]
    matrix = table(hadamard, vectors.device, width)
    blocks = _blocks((vectors @ matrix) * (1 / math.sqrt(width)), _INDEX_BLOCK)
    extreme = blocks.abs().amax(-1, keepdim=True).clamp_(min=_E2M1_FLOOR)
    scale = _next_power_of_two(extreme / _E2M1_MAX)
    return round_e2m1(blocks / scale).mul_(scale).flatten(-2)


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with the sign kept."""
    codes = torch.bucketize(x.abs(), table(_midpoints, x.device))
    return table(_e2m1, x.device)[codes].copysign(x)


def hadamard(width: int) -> torch.Tensor:
    """Return the Hadamard matrix of Sylvester's order: float32 `[width, width]` of 1 and -1."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def _blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return `[..., n]` as `[..., n / size, size]`."""
    return x.reshape(*x.shape[:-1], -1, size)


def _zero_if_infinite(x: torch.Tensor) -> torch.Tensor:
    """Make blocks of zeros, and of values too small to have a reciprocal, zeros."""
    return x.nan_to_num_(posinf=0.0, neginf=0.0)


def _next_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two that is not below `x` (positive and normal)."""
    # a carry out of the fraction raises the exponent unless the fraction is zero
    bits = (x.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return bits.view(torch.float32)


def _midpoints() -> torch.Tensor:
    """Return the borders between codes; a value on a border belongs to the lower code."""
    borders = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    # on every second border the even code is the upper one
    borders[1::2] = borders[1::2].nextafter(torch.zeros(()))
    return borders


def _e2m1() -> torch.Tensor:
    return torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
