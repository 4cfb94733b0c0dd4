"""The fused steps between products beside the torch operations that they stand for.

Owns: the comparison of norm, gate, attention and Sinkhorn's loop. Refuses to know: what follows
from it, models. Invariant: what a kernel is compared with uses no kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from ds4py.kernels.cpu import attention, fused, sinkhorn
from ds4py.kernels.cpu.activations import CHUNK, Quantized
from ds4py.kernels.cpu.trust import ROWS, TRUST, Comparison, relative_error
from ds4py.kernels.memory import KernelBuffer
from ds4py.kernels.scores import ScoreRules
from ds4py.layers.attention import attend_one
from ds4py.layers.block_spec import Activation
from ds4py.layers.kv_cache import KvForm, KvRows
from ds4py.layers.moe import gated
from ds4py.layers.norm import RmsNorm

NORM: Final = "norm"
GATE: Final = "gate"
SINKHORN: Final = "Sinkhorn"

_WIDTH: Final = 288  # a whole group of 256 that share a scale, and a part of one
_POSITION: Final = 37
_SHORT_WINDOW: Final = 21
_LIMIT: Final = 1e-3
"""Of float32 results, and of integers of 15 bits; measured: 6e-5 at most."""

_CACHE_LIMIT: Final = {
    torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.int8: 8e-3,
}  # fmt: skip
"""By the type of a cache. Both sides read the same rows; only the token's own may be rounded
otherwise, by a last bit of its type."""


def trusts_steps(
    heads: attention.AttentionHeads, cache_type: torch.dtype, activation: Activation = "silu"
) -> bool:
    """Say whether this processor runs a layer's steps as torch's operations."""
    return (
        TRUST.in_kernel(NORM, compare_norm)
        and TRUST.in_kernel(gate_name(activation), lambda: compare_gate(activation))
        and TRUST.in_kernel(
            attention_name(heads, cache_type), lambda: compare_attention(heads, cache_type)
        )
    )


def attention_name(heads: attention.AttentionHeads, cache_type: torch.dtype) -> str:
    """Return how verdicts call an attention."""
    rules = {
        "normed": heads.norm_eps is not None,
        f"scaled by {heads.scale}": bool(heads.scale),
        f"window of {heads.window}": bool(heads.window),
        f"capped at {heads.soft_cap}": bool(heads.soft_cap),
        "sinks": heads.sinks,
    }
    return (
        f"attention of {heads.n_groups}x{heads.per_group} heads of {heads.width}, "
        f"{heads.n_rotated} rotated, {''.join(f'{rule}, ' for rule, on in rules.items() if on)}"
        f"cache of {str(cache_type).removeprefix('torch.')}"
    )


def gate_name(activation: Activation) -> str:
    """Return how verdicts call a gate."""
    return GATE if activation == "silu" else f"{GATE} of {activation}"


def position_in(rows: KvRows, position: int, rotation: KernelBuffer) -> attention.CachedPosition:
    """Return where a session's token is in one layer.

    Raises:
        KernelError: The cache is not contiguous memory of the process.
    """
    scales = rows.scales
    return attention.CachedPosition(
        KernelBuffer(rows.values, rows.values.dtype, "cache"),
        None if scales is None else KernelBuffer(scales, torch.float32, "scales of a cache"),
        position,
        rotation,
    )


def trusts_sinkhorn() -> bool:
    """Say whether this processor balances matrices as torch's operations do."""
    return TRUST.in_kernel(SINKHORN, compare_sinkhorn)


def compare_norm() -> Comparison:
    """Compare the norm that leaves integers."""
    weight = _normal(_WIDTH, seed=1)
    errors = []
    for n_rows in ROWS:
        x, out = _normal(n_rows, _WIDTH), Quantized(n_rows, _WIDTH)
        fused.FusedNorm(weight, 1e-5)(KernelBuffer(x, torch.float32, "rows"), out)
        errors.append(relative_error(_values(out), RmsNorm(weight, 1e-5, torch.float32)(x)))
    return _worst(errors, _LIMIT)


def compare_gate(activation: Activation = "silu") -> Comparison:
    """Compare the gate that leaves integers."""
    errors = []
    for n_rows in ROWS:
        x, out = 3 * _normal(n_rows, 2 * _WIDTH), Quantized(n_rows, _WIDTH)
        fused.gate(KernelBuffer(x, torch.float32, "gates"), out, activation)
        gate, up = x.chunk(2, 1)
        errors.append(relative_error(_values(out), gated(gate, up, activation)))
    return _worst(errors, _LIMIT)


def compare_attention(heads: attention.AttentionHeads, cache_type: torch.dtype) -> Comparison:
    """Compare the attention of one token of each of some sessions."""
    errors = []
    # a window that hides something here; code for another one differs in a single constant
    heads = replace(heads, window=min(heads.window, _SHORT_WINDOW))
    turns = torch.polar(torch.ones(heads.n_rotated // 2), _normal(heads.n_rotated // 2, seed=2))
    weights = _Weights(heads)
    for n_rows in ROWS:
        n_values = (heads.n_groups * (heads.per_group + 2)) * heads.width
        qkv, out = _normal(n_rows, n_values, seed=3), KernelBuffer.empty((n_rows, heads.n_queries))
        expected = []
        given = KernelBuffer(qkv.clone(), torch.float32, "queries, keys, values")
        for row in range(n_rows):
            rows = _history(heads, cache_type, seed=row)
            expected.append(_attended(heads, weights, qkv[row], turns, rows))
            rows = _history(heads, cache_type, seed=row)
            position = position_in(
                rows, _POSITION, KernelBuffer(turns, torch.complex64, "rotation")
            )
            attention.attend(heads, given, row, position, out, weights.in_kernel)
        errors.append(relative_error(out.tensor, torch.cat(expected)))
    return _worst(errors, _CACHE_LIMIT[cache_type])


def compare_sinkhorn() -> Comparison:
    """Compare the normalization of matrices."""
    errors = []
    for n_rows in ROWS:
        scores = 3 * _normal(n_rows, sinkhorn.SIZE**2)
        got = sinkhorn.balanced(scores, 20, 1e-6)
        matrix = scores.view(-1, sinkhorn.SIZE, sinkhorn.SIZE).softmax(2) + 1e-6
        matrix = matrix / (matrix.sum(1, keepdim=True) + 1e-6)
        for _ in range(19):
            matrix = matrix / (matrix.sum(2, keepdim=True) + 1e-6)
            matrix = matrix / (matrix.sum(1, keepdim=True) + 1e-6)
        errors.append(relative_error(got, matrix))
    return _worst(errors, _LIMIT)


class _Weights:
    """Random weights of the norms and sinks that heads have."""

    def __init__(self, heads: attention.AttentionHeads):
        n_heads = heads.n_groups * heads.per_group
        is_normed = heads.norm_eps is not None
        self.q_norm, self.k_norm = (
            1 + _normal(heads.width, seed=seed) / 4 if is_normed else None for seed in (4, 5)
        )
        self.sinks = _normal(n_heads, seed=6) if heads.sinks else None

    @property
    def in_kernel(self) -> attention.HeadWeights:
        """What the kernel takes."""
        parts = (
            None if part is None else KernelBuffer(part, torch.float32, "weights of heads")
            for part in (self.q_norm, self.k_norm, self.sinks)
        )
        return attention.HeadWeights(*parts)


def _attended(
    heads: attention.AttentionHeads,
    weights: _Weights,
    qkv: torch.Tensor,
    turns: torch.Tensor,
    rows: KvRows,
) -> torch.Tensor:
    """Return `[1, H * D]` by torch's operations; writes the token's row."""
    n_queries = heads.n_groups * heads.per_group
    parts = qkv.clone().view(-1, heads.width)
    keys = slice(n_queries, n_queries + heads.n_groups)
    for own, norm in ((slice(n_queries), weights.q_norm), (keys, weights.k_norm)):
        if norm is not None:
            parts[own] = RmsNorm(norm, heads.norm_eps or 0.0, torch.float32)(parts[own])
    turned = parts[: n_queries + heads.n_groups, : heads.n_rotated]
    pairs = torch.view_as_complex(turned.reshape(turned.shape[0], -1, 2)) * turns
    turned.copy_(torch.view_as_real(pairs).flatten(1))
    rows.write(_POSITION, parts[n_queries:].unsqueeze(1))
    q = parts[:n_queries].view(heads.n_groups, heads.per_group, heads.width)
    rules = ScoreRules(
        scale=heads.scale, window=heads.window, soft_cap=heads.soft_cap, sinks=weights.sinks
    )
    return attend_one(q, rows.read(_POSITION + 1, torch.float32), _POSITION + 1, rules)


def _history(heads: attention.AttentionHeads, cache_type: torch.dtype, seed: int) -> KvRows:
    """Return a cache with rows up to the token's."""
    planes = 2 * heads.n_groups
    form = KvForm((planes, _POSITION + 3, heads.width), cache_type)
    rows = KvRows(*(torch.zeros(part.shape, dtype=part.dtype) for part in form.tensors()))
    rows.write(0, _normal(planes, _POSITION, heads.width, seed=seed))
    return rows


def _values(rounded: Quantized) -> torch.Tensor:
    """Return what integers stand for, float64 `[T, W]`."""
    scales = rounded.scales.double().repeat_interleave(CHUNK, 1)[:, : rounded.width]
    return rounded.codes * scales


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _worst(errors: list[float], limit: float) -> Comparison:
    # `max` of Python would pass a NaN over
    return Comparison(error=float(torch.tensor(errors).max()), limit=limit)
