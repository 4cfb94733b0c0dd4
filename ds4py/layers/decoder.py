"""One decoder layer, written once, over whatever multiplies, norms and attends.

Owns: the order of a layer's steps (`run_layers`), a layer's weights (`DecoderLayer`), what a
backend must offer (`DecoderBackend`). Refuses to know: names of weights, devices, how a step is
computed. Invariant: the layer is the same on every backend; they differ by rounding only.

A backend is asked once, when a slice is loaded, whether it serves the slice's layers, and says why
not (`Backend.refusal`). It has two kinds of values of its own: float32 **states** `[T, N]`, and
**rows**, which are what its products take: rounded to the product's type by torch, to integers
with scales by the kernels of the CPU.

| backend       | module          | serves                                                |
|---------------|-----------------|-------------------------------------------------------|
| torch         | `torch_steps`   | everything, any batch                                 |
| CPU kernels   | `cpu_steps`     | one token of each session, packed weights, bfloat16   |
| Triton        | `cuda_steps`    | one token of each session, may be recorded as a graph |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

import torch

from ds4py.kernels.cpu.fused import FusedNorm
from ds4py.kernels.scores import ScoreRules
from ds4py.layers.block_spec import Activation, BlockSpec
from ds4py.layers.kv_cache import KvForm
from ds4py.layers.linear import PackedLinear
from ds4py.layers.moe import ExpertsHalf
from ds4py.layers.norm import RmsNorm
from ds4py.layers.rope import Rope


class NormWeights:
    """The weight of an RMS norm, and the norm in the form that each backend wants.

    Args:
        weight: float32 `[W]`.
        eps: Added to the mean square.
        dtype: Type of the products that take the normed rows.
    """

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype):
        self.weight = weight
        self.eps = eps
        self.to_rows = RmsNorm(weight, eps, dtype)

    @cached_property
    def to_states(self) -> RmsNorm:
        """The norm with float32 results."""
        return RmsNorm(self.weight, self.eps, torch.float32)

    @cached_property
    def to_codes(self) -> FusedNorm:
        """The norm that leaves integers, on the CPU."""
        return FusedNorm(self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Residual:
    """How a half's result goes into the states.

    Args:
        after: Norm of the result; None for none.
        scale: Factor on what is added.
    """

    after: NormWeights | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """A dense feed-forward half.

    Args:
        gate_up: Gates, then what they let through, `[2 F, W]`.
        activation: Of the gates.
        down: Back to the model's width.
    """

    gate_up: PackedLinear
    activation: Activation
    down: PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """The attention half.

    Args:
        qkv: Queries, keys, values, one below the other, `[(H + 2 G) D, W]`.
        q_norm: Norm of queries, `[D]` or `[H D]`; None for none.
        k_norm: Norm of keys, `[D]` or `[G D]`.
        rope: Rotations of all positions.
        scores: What becomes of scores.
        output: Back to the model's width.
    """

    qkv: PackedLinear
    q_norm: NormWeights | None
    k_norm: NormWeights | None
    rope: Rope
    scores: ScoreRules
    output: PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One layer's description, weights, and form of its cache.

    Args:
        index: Place in the slice, from 0.
        spec: What it is.
        kv: How it keeps keys and values.
        attn_norm: Before the attention; None for none.
        attention: Its first half.
        attn_residual: How that goes into the states.
        ffn_norm: Before the feed-forward half; None for none.
        feed_forward: Its second half.
        ffn_residual: How that goes into the states.
    """

    index: int
    spec: BlockSpec
    kv: KvForm
    attn_norm: NormWeights | None
    attention: AttentionWeights
    attn_residual: Residual
    ffn_norm: NormWeights | None
    feed_forward: GatedMlp | ExpertsHalf
    ffn_residual: Residual

    @property
    def matrices(self) -> Sequence[PackedLinear]:
        """The dense matrices that a backend multiplies with."""
        own = (self.attention.qkv, self.attention.output)
        if isinstance(self.feed_forward, ExpertsHalf):
            return own
        return (*own, self.feed_forward.gate_up, self.feed_forward.down)


States = TypeVar("States")
Rows = TypeVar("Rows")


class DecoderBackend(Protocol[States, Rows]):
    """The steps of a layer, for one batch whose positions and caches it knows."""

    def norm(self, x: States, norm: NormWeights | None) -> Rows:
        """Norm states `[T, W]`, or only make rows of them."""

    def multiply(self, matrix: PackedLinear, rows: Rows) -> States:
        """Return `rows @ matrix.T`, `[T, N]`; may be overwritten by the layer's next step."""

    def attend(self, layer: DecoderLayer, qkv: States) -> Rows:
        """Norm and rotate queries and keys, cache keys and values, attend: `[T, H D]`."""

    def gate(self, gate_up: States, activation: Activation) -> Rows:
        """Return `activation(gate) * up`, `[T, F]`, of `[T, 2 F]`."""

    def add(self, x: States, matrix: PackedLinear, rows: Rows, residual: Residual) -> None:
        """Add `rows @ matrix.T` to the states."""

    def add_experts(
        self, x: States, norm: NormWeights | None, half: ExpertsHalf, residual: Residual
    ) -> None:
        """Add what a half of experts gives for the normed states."""


def run_layers(
    backend: DecoderBackend[States, Rows], layers: Sequence[DecoderLayer], x: States
) -> None:
    """Update states `[T, W]` and the sessions' caches in place.

    Args:
        backend: The steps, for this batch.
        layers: In order.
        x: Hidden states, float32; every half adds to them.
    """
    for layer in layers:
        attention, half = layer.attention, layer.feed_forward
        qkv = backend.multiply(attention.qkv, backend.norm(x, layer.attn_norm))
        backend.add(x, attention.output, backend.attend(layer, qkv), layer.attn_residual)
        if isinstance(half, ExpertsHalf):
            backend.add_experts(x, layer.ffn_norm, half, layer.ffn_residual)
        else:
            gate_up = backend.multiply(half.gate_up, backend.norm(x, layer.ffn_norm))
            gated = backend.gate(gate_up, half.activation)
            backend.add(x, half.down, gated, layer.ffn_residual)
