"""A feed-forward half of experts: who is chosen, with what weight, and the sum of what they give.

Owns: scores, choice, weights, the order in which rows go through the experts. Refuses to know: how
packed experts are multiplied, names of weights. Invariant: a token's result does not depend on its
neighbours, except for the order of float32 sums; experts' results are added in the order of their
choice. Nothing here makes the host wait for an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.functional import gelu, silu

from ds4py.layers.block_spec import Activation, ExpertsSpec
from ds4py.layers.experts import ExpertGroups, ExpertProduct
from ds4py.layers.linear import PackedLinear
from ds4py.quant.tensor import QuantTensor

_MIN_SUM: Final = 2.0**-14
"""Weights that add up to less are not made larger than this allows, as in ds4 and llama.cpp."""

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Gates and what they let through, `[M, F]` each, to `[M, F]`; may overwrite both."""

Round = Callable[[torch.Tensor], torch.Tensor]


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return `activation(gate) * up`, in new memory, of the type of both."""
    through = silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")
    return through.mul_(up)


def best_experts(ranked: torch.Tensor, n_used: int) -> torch.Tensor:
    """Return the experts with the largest scores, int64 `[T, K]`; ties go to the lower number."""
    return ranked.sort(dim=1, descending=True, stable=True).indices[:, :n_used]


def normalised(weights: torch.Tensor) -> torch.Tensor:
    """Make the weights of every token's experts, `[T, K]`, add up to 1."""
    return weights / weights.sum(1, keepdim=True).clamp_(min=_MIN_SUM)


class ExpertMatrices:
    """The matrices of all experts of a layer.

    Args:
        gate: `[E, F, W]`; its bytes are taken over, as those of the others.
        up: `[E, F, W]`.
        down: `[E, W, F]`.
        dtype: float32 for exactness, bfloat16 for speed.
    """

    def __init__(self, gate: QuantTensor, up: QuantTensor, down: QuantTensor, dtype: torch.dtype):
        self._gate, self._up, self._down = (
            ExpertProduct(tensor, dtype) for tensor in (gate, up, down)
        )
        self._n_experts = gate.shape[0]

    def mix(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        gate: Gate,
        *,
        round_in: Round | None = None,
        round_mid: Round | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of every token's experts, float32 `[T, W]`.

        Args:
            x: float32 `[T, W]`.
            experts: int64 `[T, K]`, in the order of their choice.
            weights: float32 `[T, K]`.
            gate: What stands between the products.
            round_in: Rounds the input of the first products.
            round_mid: Rounds that of the last.
        """
        groups = ExpertGroups(experts.flatten(), self._n_experts)
        rows = (x if round_in is None else round_in(x))[groups.order // experts.shape[1]]
        # weighed before the last product: there the rows are narrower than behind it, and the
        # rounding of its input may depend on the weight
        mid = gate(self._gate(rows, groups), self._up(rows, groups))
        mid = mid.mul_(weights.flatten()[groups.order].unsqueeze(1))
        out = self._down(mid if round_mid is None else round_mid(mid), groups)
        by_slot = torch.empty_like(out).index_copy_(0, groups.order, out)
        return by_slot.view(*experts.shape, -1).sum(1)


class ExpertRouter:
    """Chooses experts by score.

    Args:
        spec: How.
        matrix: float32 `[E, W]`.
        choice_bias: float32 `[E]`, added to the scores for the choice only; None for none.
    """

    def __init__(
        self, spec: ExpertsSpec, matrix: torch.Tensor, choice_bias: torch.Tensor | None = None
    ):
        self._spec = spec
        self._matrix = matrix.t()
        self._choice_bias = choice_bias

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return experts int64 `[T, K]` and their weights float32 `[T, K]` for float32 `[T, W]`."""
        spec, logits = self._spec, x @ self._matrix
        scores = logits
        if spec.gating != "chosen":
            scores = logits.softmax(1) if spec.gating == "softmax" else logits.sigmoid()
        ranked = scores if self._choice_bias is None else scores + self._choice_bias
        experts = best_experts(ranked, spec.n_used)
        weights = scores.gather(1, experts)
        if spec.gating == "chosen":
            weights = weights.softmax(1)
        if spec.normalise:
            weights = normalised(weights)
        return experts, weights * spec.scale


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The expert that every token takes.

    Args:
        gate_up: `[2 F, W]`.
        down: `[W, F]`.
        weigh: float32 `[W]`: its product with a token, through a sigmoid, is the expert's weight;
            None for 1.
    """

    gate_up: PackedLinear
    down: PackedLinear
    weigh: torch.Tensor | None

    def __call__(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return float32 `[T, W]` for float32 `[T, W]`."""
        gate, up = self.gate_up(x).chunk(2, 1)
        out = self.down(gated(gate, up, activation))
        return out if self.weigh is None else out.mul_((x @ self.weigh).sigmoid_().unsqueeze(1))


@dataclass(frozen=True, slots=True)
class ExpertsHalf:
    """Router and experts of one layer.

    Args:
        activation: Of every gate.
        router: Chooses.
        matrices: Of all experts.
        shared: Taken besides; None for none.
    """

    activation: Activation
    router: ExpertRouter
    matrices: ExpertMatrices
    shared: SharedExpert | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 `[T, W]` for normed float32 `[T, W]`."""

        def gate(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
            return gated(gates, ups, self.activation)

        out = self.matrices.mix(x, *self.router(x), gate)
        return out if self.shared is None else out.add_(self.shared(x, self.activation))
