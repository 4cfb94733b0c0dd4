"""A layer's steps as torch operations: the reference, on every device, for every batch.

Owns: the types between the steps, and attention over segments of several sessions. Refuses to know:
the order of the steps, weights' names. Invariant: states are float32; rows are of the products'
type, and so is what lies between two products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ds4py.kernels.cache import Segment
from ds4py.layers.attention import attend_many, attend_one
from ds4py.layers.block_spec import Activation, AttentionSpec
from ds4py.layers.decoder import AttentionWeights, DecoderLayer, NormWeights, Residual
from ds4py.layers.kv_cache import KvRows
from ds4py.layers.linear import PackedLinear
from ds4py.layers.moe import ExpertsHalf, gated
from ds4py.layers.rope import Rope

Attend = Callable[[DecoderLayer, torch.Tensor], torch.Tensor]
"""Queries, keys, values float32 `[T, (H + 2 G) D]`, which may be overwritten, to `[T, H D]`."""


class TorchSteps:
    """The steps; see `decoder.DecoderBackend`.

    Args:
        dtype: Of products.
        attend: Over the caches of this batch.
    """

    def __init__(self, dtype: torch.dtype, attend: Attend):
        self._dtype = dtype
        self._attend = attend

    def norm(self, x: torch.Tensor, norm: NormWeights | None) -> torch.Tensor:
        """See `DecoderBackend.norm`."""
        return x.to(self._dtype) if norm is None else norm.to_rows(x)

    def multiply(self, matrix: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
        """See `DecoderBackend.multiply`; the result has the type of the rows."""
        return matrix(rows)

    def attend(self, layer: DecoderLayer, qkv: torch.Tensor) -> torch.Tensor:
        """See `DecoderBackend.attend`."""
        return self._attend(layer, qkv.float()).to(self._dtype)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """See `DecoderBackend.gate`."""
        gate, up = gate_up.chunk(2, 1)
        return gated(gate, up, activation)

    def add(
        self, x: torch.Tensor, matrix: PackedLinear, rows: torch.Tensor, residual: Residual
    ) -> None:
        """See `DecoderBackend.add`."""
        add_result(x, matrix(rows), residual)

    def add_experts(
        self, x: torch.Tensor, norm: NormWeights | None, half: ExpertsHalf, residual: Residual
    ) -> None:
        """See `DecoderBackend.add_experts`; experts round their rows themselves."""
        add_result(x, half(x if norm is None else norm.to_states(x)), residual)


def add_result(x: torch.Tensor, result: torch.Tensor, residual: Residual) -> None:
    """Add a half's result `[T, W]` to float32 states."""
    if residual.after is not None:
        result = residual.after.to_states(result.float())
    x.add_(result, alpha=residual.scale)


def norm_heads_(qkv: torch.Tensor, weights: AttentionWeights, spec: AttentionSpec) -> None:
    """Norm queries and keys, float32 `[T, (H + 2 G) D]`, in place, if the layer does."""
    if weights.q_norm is None or weights.k_norm is None:
        return
    n_q, n_k = spec.n_head * spec.d_head, spec.n_head_kv * spec.d_head
    for norm, part in ((weights.q_norm, qkv[:, :n_q]), (weights.k_norm, qkv[:, n_q : n_q + n_k])):
        rows = part.reshape(-1, norm.weight.shape[0])  # a head each, or all heads of a token
        part.copy_(norm.to_states(rows).view(part.shape))


class SegmentAttention:
    """Attention over a batch of segments, one after the other.

    Args:
        layers: Of the slice.
        segments: Of the batch.
        dtype: In which the keys and values of several tokens are multiplied.
    """

    def __init__(
        self, layers: Sequence[DecoderLayer], segments: Sequence[Segment], dtype: torch.dtype
    ):
        self._segments = segments
        self._dtype = dtype
        self._caches = [layer_caches(layers, segment) for segment in segments]
        self._rotations: dict[Rope, torch.Tensor] = {}

    def __call__(self, layer: DecoderLayer, qkv: torch.Tensor) -> torch.Tensor:
        """Rotate, cache, attend: see `Attend`."""
        spec, weights = layer.spec.attention, layer.attention
        norm_heads_(qkv, weights, spec)
        heads = qkv.view(qkv.shape[0], -1, spec.d_head)
        rotated = heads[:, : spec.n_head + spec.n_head_kv]
        weights.rope.rotate_(rotated, self._rotation(weights.rope))
        parts, start = [], 0
        for cache, segment in zip(self._caches, self._segments, strict=True):
            end = start + segment.n_tokens
            kv, pos0 = cache[layer.index], segment.pos0
            kv.write(pos0, heads[start:end, spec.n_head :].transpose(0, 1))
            q = heads[start:end, : spec.n_head]
            q = q.view(segment.n_tokens, spec.n_head_kv, -1, spec.d_head)
            # a single token is multiplied in float32 in every mode, see `attend_one`; what a
            # window has left behind is not even read, so positions count from its first key
            is_one, first = segment.n_tokens == 1, weights.scores.first_key(pos0)
            kind = torch.float32 if is_one else self._dtype
            seen = kv.read(pos0 + segment.n_tokens, kind, first)
            if is_one:
                attended = attend_one(q[0], seen, pos0 - first + 1, weights.scores)
            else:
                attended = _attend_chunk(q, seen, pos0 - first, weights)
            parts.append(attended.to(self._dtype))
            start = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _rotation(self, rope: Rope) -> torch.Tensor:
        """Return the rotations of the batch's positions, made once for all layers that share."""
        if rope not in self._rotations:
            parts = [rope.at(segment.pos0, segment.n_tokens) for segment in self._segments]
            self._rotations[rope] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._rotations[rope]


def layer_caches(layers: Sequence[DecoderLayer], segment: Segment) -> list[KvRows]:
    """Give a session's tensors, which lie layer after layer, their meaning."""
    found, at = [], 0
    for layer in layers:
        end = at + layer.kv.n_tensors
        found.append(KvRows(*segment.cache[at:end]))
        at = end
    return found


def _attend_chunk(
    q: torch.Tensor, kv: torch.Tensor, pos0: int, weights: AttentionWeights
) -> torch.Tensor:
    """Attend from several tokens by what the device does best."""
    rules = weights.scores
    if kv.is_cuda and rules.only_scale:  # imported here, because it takes torch a second
        from ds4py.kernels.cuda.chunk_attention import attend_chunk  # noqa: PLC0415

        return attend_chunk(q, kv, pos0, rules.scale or None)
    return attend_many(q, kv, pos0, rules)
