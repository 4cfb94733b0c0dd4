"""What one layer of a decoder is, as frozen values: sizes and switches, nothing that computes.

Owns: `BlockSpec` with its two halves, `AttentionSpec` and `FeedForwardSpec` or `ExpertsSpec`.
Refuses to know: metadata keys, names of tensors, weights, devices. Invariant: whatever changes the
result of a layer, other than its weights, is a field here; so two layers with equal descriptions
and equal weights compute alike, on every backend.

The plain block, which every field varies:

    x = x + after(output(attend(rotate(norm(qkv(before(x)))))))
    x = x + after(down(act(gate(before(x))) * up(before(x))))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

from ds4py.layers.rope import RopeParams

Activation = Literal["silu", "gelu"]
"""What the gate goes through; "gelu" is the form with tanh."""

ACTIVATIONS: Final[tuple[Activation, ...]] = get_args(Activation)

QkNorm = Literal["none", "head", "whole"]
"""RMS norm of queries and keys before the rotation: of each head, or of all heads as one vector."""

Gating = Literal["softmax", "sigmoid", "chosen"]
"""Scores of experts; "chosen" is a softmax over the experts that were chosen by their logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The attention half of a layer.

    Args:
        n_head: Query heads, `H`.
        n_head_kv: Key/value heads, `G`; divides `n_head`.
        d_head: Values of a head, `D`, even.
        rope: How the leading values of a head turn; `n_dims` 0 turns nothing.
        halves: Values j and j + n_dims / 2 of a head are a pair in the file, instead of neighbours.
        qk_norm: Norm of queries and keys.
        biases: Whether the file must have biases on queries, keys and values; where it need not,
            they are still applied if they are there.
        scale: Factor on scores; 0 means `1 / sqrt(D)`.
        window: Keys that a token sees, its own among them; 0 means all.
        soft_cap: Scores `s` become `cap * tanh(s / cap)`; 0 means they stay.
        sinks: Whether each head has one more score, without a value, in its softmax.
    """

    n_head: int
    n_head_kv: int
    d_head: int
    rope: RopeParams
    halves: bool = False
    qk_norm: QkNorm = "none"
    biases: bool = False
    scale: float = 0.0
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False

    @property
    def score_scale(self) -> float:
        """Factor on scores."""
        return self.scale or 1 / math.sqrt(self.d_head)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardSpec:
    """A dense gated feed-forward half.

    Args:
        n_ff: Width between gate and down, `F`.
        activation: Of the gate.
    """

    n_ff: int
    activation: Activation = "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A feed-forward half of which every token takes a few parts.

    Args:
        n_expert: Experts, `E`.
        n_used: Experts of a token, `K`.
        n_ff: Width of an expert, `F`.
        gating: How scores become weights.
        normalise: Whether the weights of a token's experts are made to add up to 1.
        scale: Factor on the weights.
        n_ff_shared: Width of the expert that every token takes besides; 0 for none.
        shared_gate: Whether that one is weighted by a sigmoid of its own.
        activation: Of the gates.
    """

    n_expert: int
    n_used: int
    n_ff: int
    gating: Gating = "softmax"
    normalise: bool = True
    scale: float = 1.0
    n_ff_shared: int = 0
    shared_gate: bool = False
    activation: Activation = "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """One layer.

    Args:
        attention: Its first half.
        feed_forward: Its second half, dense or of experts.
        norm_before: Whether a half's input is normed.
        norm_after: Whether a half's result is normed before it is added.
        residual_scale: Factor on what a half adds.
    """

    attention: AttentionSpec
    feed_forward: FeedForwardSpec | ExpertsSpec
    norm_before: bool = True
    norm_after: bool = False
    residual_scale: float = 1.0
