"""The feed-forward half: router, routed experts, shared expert.

Owns: which experts a token gets and with what weight, the clamped SwiGLU
(docs/spec/deepseek4-model.md#feed-forward). Refuses to know: how rows go through the experts, which
is `layers/moe.py`. Invariant: a token's result does not depend on its neighbours, except for the
order of float32 sums; experts' results are added in the order of their selection.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn.functional import silu, softplus

from ds4py.errors import ModelError
from ds4py.layers.moe import ExpertMatrices, best_experts, normalised
from ds4py.models.deepseek4.linear import Weights, activation_rounding
from ds4py.models.deepseek4.shape import Shape
from ds4py.quant.tensor import QuantTensor


class FeedForward:
    """Router and experts of one layer.

    Args:
        shape: The model.
        layer: Number in the whole model.
        weights: Of the layer.
    """

    def __init__(self, shape: Shape, layer: int, weights: Weights):
        self._router = Router(shape, layer, weights)
        self._experts = RoutedExperts(shape.clamps[layer], weights)
        self._limit = shape.clamps[layer]
        self._shared = weights.linear("ffn_gate_shexp.weight", "ffn_up_shexp.weight")
        self._shared_down = weights.linear("ffn_down_shexp.weight")

    def __call__(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return `[T, D]` for normed inputs `[T, D]` and token ids int64 `[T]`."""
        routed = self._experts(x, *self._router(x, tokens))
        gate, up = self._shared(x).chunk(2, 1)
        return routed.add_(self._shared_down(swiglu(gate, up, self._limit)))


class Router:
    """Chooses experts, by token id in the first layers and by score in the others.

    Args:
        shape: The model.
        layer: Number in the whole model.
        weights: Of the layer.
    """

    def __init__(self, shape: Shape, layer: int, weights: Weights):
        self._n_used = shape.n_used
        self._scale = shape.expert_scale
        self._matrix = weights.dense("ffn_gate_inp.weight").t()
        self._table = self._bias = None
        if layer < shape.n_hash_layers:
            self._table = _expert_table(weights, shape.n_expert)
        else:
            self._bias = weights.optional("exp_probs_b.bias")

    def __call__(self, x: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return experts int64 `[T, U]` and their weights float32 `[T, U]`, in selection order."""
        scores = softplus(x @ self._matrix).sqrt_()
        if self._table is not None:
            experts = self._table[tokens]
        else:
            # the bias decides who is chosen, not with what weight; ties go to the lower number
            ranked = scores if self._bias is None else scores + self._bias
            experts = best_experts(ranked, self._n_used)
        return experts, normalised(scores.gather(1, experts)).mul_(self._scale)


class RoutedExperts:
    """The experts' matrices.

    Args:
        limit: Clamp of the SwiGLU.
        weights: Of the layer.
    """

    def __init__(self, limit: float, weights: Weights):
        spec = weights.spec
        packed = [weights.packed(f"ffn_{name}_exps.weight") for name in ("gate", "up", "down")]
        _check_types(packed)
        gate, up, down = packed
        self._matrices = ExpertMatrices(gate, up, down, spec.dtype)
        self._gate = partial(swiglu, limit=limit)
        self._round_in = self._round_mid = None
        if spec.act_quant:
            self._round_in = activation_rounding(packed[0].format)
            self._round_mid = activation_rounding(packed[2].format)

    def __call__(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return float32 `[T, D]` for inputs `[T, D]`, experts and weights `[T, U]`."""
        return self._matrices.mix(
            x, experts, weights, self._gate, round_in=self._round_in, round_mid=self._round_mid
        )


def _expert_table(weights: Weights, n_expert: int) -> torch.Tensor:
    """Return the experts of every token id, int64 `[V, U]`.

    Raises:
        ModelError: An expert does not exist.
    """
    packed = weights.packed("ffn_gate_tid2eid.weight")
    table = packed.decode(torch.int64)
    low, high = (int(end) for end in table.aminmax())
    if low < 0 or high >= n_expert:
        bad = low if low < 0 else high
        raise ModelError(
            f"tensor {packed.name}", got=f"expert {bad}", expected=f"0 to {n_expert - 1}"
        )
    return table


def _check_types(packed: Sequence[QuantTensor]) -> None:
    """Refuse gate and up of different types: their common input is rounded once."""
    gate, up, _ = packed
    if gate.format.name != up.format.name:
        raise ModelError(
            f"tensor {up.name}",
            got=f"type {up.format.name}",
            expected=f"{gate.format.name}, as {gate.name}",
        )


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """Return `silu(gate) * up` with the gate clamped from above and `up` from both sides."""
    return silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))
