"""From tensors by name to the weights of described layers.

Owns: how the file's form becomes the one that the body computes with: matrices with a common input
one below the other, pairs of rotated values side by side. Refuses to know: how anything is
computed, architectures.

Pairs: the body and its kernels rotate neighbours, `(2 j, 2 j + 1)`. Where the file pairs halves,
`(j, j + R / 2)`, the rows of queries and keys are put into the other order as they are loaded, and
so are the biases and norms on them. Products of queries and keys do not notice, as both are in the
same order; values keep theirs. Rows are whole in every packed format, so this moves bytes only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds4py.kernels.scores import ScoreRules
from ds4py.layers.block_spec import AttentionSpec, BlockSpec, ExpertsSpec, FeedForwardSpec
from ds4py.layers.decoder import (
    AttentionWeights,
    DecoderLayer,
    GatedMlp,
    NormWeights,
    Residual,
)
from ds4py.layers.kv_cache import KvForm
from ds4py.layers.linear import PackedLinear
from ds4py.layers.moe import ExpertMatrices, ExpertRouter, ExpertsHalf, SharedExpert
from ds4py.layers.rope import Rope, RopeParams
from ds4py.models.base import DeviceSpec, Take
from ds4py.models.decoder.tensors import ROPE_FACTORS, Names
from ds4py.quant.tensor import QuantTensor


class DecoderWeights:
    """Turns tensors by name into the parts of a slice.

    Args:
        take: From the loader; every name was checked.
        spec: Device, precision, context.
        norm_eps: Epsilon of all norms.
        names: What the family calls differently.
    """

    def __init__(self, take: Take, spec: DeviceSpec, norm_eps: float, names: Names):
        self._take = take
        self._spec = spec
        self._eps = norm_eps
        self._names = names
        self._factors = self.vector(ROPE_FACTORS)
        self._ropes: dict[RopeParams, Rope] = {}

    def layer(self, block: BlockSpec, index: int, prefix: str) -> DecoderLayer:
        """Return one layer.

        Args:
            block: What it is.
            index: Its place in the slice.
            prefix: Of its tensors.
        """
        spec, attention = self._spec, block.attention
        rows = (2 * attention.n_head_kv, spec.n_ctx, attention.d_head)
        after = block.norm_after
        scale = block.residual_scale
        before = block.norm_before
        return DecoderLayer(
            index=index,
            spec=block,
            kv=KvForm(rows, spec.kv_dtype or spec.dtype),
            attn_norm=self.norm(f"{prefix}attn_norm.weight") if before else None,
            attention=self._attention(attention, prefix),
            attn_residual=Residual(
                self.norm(f"{prefix}post_attention_norm.weight") if after else None, scale
            ),
            ffn_norm=self.norm(f"{prefix}{self._names.ffn_norm}.weight") if before else None,
            feed_forward=self._feed_forward(block.feed_forward, prefix),
            ffn_residual=Residual(
                self.norm(f"{prefix}post_ffw_norm.weight") if after else None, scale
            ),
        )

    def norm(self, name: str, order: torch.Tensor | None = None) -> NormWeights:
        """Return a norm, its weight in another order if one is given."""
        weight = self._needed(name).decode(torch.float32)
        return NormWeights(_ordered(weight, order), self._eps, self._spec.dtype)

    def vector(self, name: str) -> torch.Tensor | None:
        """Return a small tensor as float32, None if the file does not have it."""
        tensor = self._take(name)
        return None if tensor is None else tensor.decode(torch.float32)

    def matrix(self, name: str) -> PackedLinear | None:
        """Return one matrix without bias, None if the file does not have it."""
        tensor = self._take(name)
        return None if tensor is None else self._linear([tensor])

    def _attention(self, spec: AttentionSpec, prefix: str) -> AttentionWeights:
        orders = [_pair_order(spec, n_heads) for n_heads in (spec.n_head, spec.n_head_kv)]
        own = [None if order is None else order.to(self._spec.device) for order in orders]
        q_norm = k_norm = None
        if spec.qk_norm != "none":
            whole = spec.qk_norm == "whole"
            # the norm of single heads has one weight for all: its order is that of one head
            of_norm = own if whole else [None if one is None else one[: spec.d_head] for one in own]
            q_norm = self.norm(f"{prefix}attn_q_norm.weight", of_norm[0])
            k_norm = self.norm(f"{prefix}attn_k_norm.weight", of_norm[1])
        names = [f"{prefix}attn_{name}" for name in "qkv"]
        return AttentionWeights(
            qkv=self._stack(names, [*own, None]),
            q_norm=q_norm,
            k_norm=k_norm,
            rope=self._rope(spec.rope),
            scores=ScoreRules(
                scale=spec.scale,
                window=spec.window,
                soft_cap=spec.soft_cap,
                sinks=self.vector(f"{prefix}attn_sinks.weight") if spec.sinks else None,
            ),
            output=self._stack([f"{prefix}attn_output"]),
        )

    def _feed_forward(
        self, spec: FeedForwardSpec | ExpertsSpec, prefix: str
    ) -> GatedMlp | ExpertsHalf:
        if isinstance(spec, ExpertsSpec):
            return self._experts(spec, prefix)
        return GatedMlp(
            gate_up=self._stack([f"{prefix}ffn_gate", f"{prefix}ffn_up"]),
            activation=spec.activation,
            down=self._stack([f"{prefix}ffn_down"]),
        )

    def _experts(self, spec: ExpertsSpec, prefix: str) -> ExpertsHalf:
        router = self._needed(f"{prefix}ffn_gate_inp.weight").decode(torch.float32)
        bias = self.vector(f"{prefix}exp_probs_b.bias")
        if bias is None:
            bias = self.vector(f"{prefix}exp_probs_b")
        gate, up, down = (
            self._needed(f"{prefix}ffn_{name}_exps.weight") for name in ("gate", "up", "down")
        )
        shared = None
        if spec.n_ff_shared:
            weigh = f"{prefix}ffn_gate_inp_shexp.weight"
            shared = SharedExpert(
                self._stack([f"{prefix}ffn_gate_shexp", f"{prefix}ffn_up_shexp"]),
                self._stack([f"{prefix}ffn_down_shexp"]),
                self.vector(weigh) if spec.shared_gate else None,
            )
        return ExpertsHalf(
            spec.activation,
            ExpertRouter(spec, router, bias),
            ExpertMatrices(gate, up, down, self._spec.dtype),
            shared,
        )

    def _rope(self, params: RopeParams) -> Rope:
        """Return a table of rotations, one for all layers that turn alike."""
        if params not in self._ropes:
            spec = self._spec
            self._ropes[params] = Rope(params, spec.n_ctx, spec.device, self._factors)
        return self._ropes[params]

    def _stack(
        self, names: Sequence[str], orders: Sequence[torch.Tensor | None] = ()
    ) -> PackedLinear:
        """Return matrices with their biases, one below the other.

        Args:
            names: Without suffix.
            orders: Of the rows of each; None keeps the file's, and no orders keep all.
        """
        tensors, biases = [], []
        for name, order in zip(names, orders or [None] * len(names), strict=True):
            tensor, bias = self._needed(f"{name}.weight"), self.vector(f"{name}.bias")
            biases.append(None if bias is None else _ordered(bias, order))
            tensors.append(tensor if order is None else _rows_ordered(tensor, order))
        return self._linear(tensors, _joined(tensors, biases))

    def _linear(
        self, tensors: Sequence[QuantTensor], bias: torch.Tensor | None = None
    ) -> PackedLinear:
        spec = self._spec
        return PackedLinear(tensors, dtype=spec.dtype, bias=bias, budget=spec.budget)

    def _needed(self, name: str) -> QuantTensor:
        tensor = self._take(name)
        assert tensor is not None, f"{name} was checked before loading"
        return tensor


def _pair_order(spec: AttentionSpec, n_heads: int) -> torch.Tensor | None:
    """Return which row of the file comes where, int64 `[n_heads * D]`; None if all stay."""
    if not spec.halves or spec.rope.n_dims == 0:
        return None
    half = spec.rope.n_dims // 2
    pairs = torch.stack((torch.arange(half), torch.arange(half, 2 * half)), 1).flatten()
    head = torch.cat((pairs, torch.arange(2 * half, spec.d_head)))
    return (torch.arange(n_heads).unsqueeze(1) * spec.d_head + head).flatten()


def _ordered(values: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    return values if order is None else values[order]


def _rows_ordered(tensor: QuantTensor, order: torch.Tensor) -> QuantTensor:
    raw = tensor.raw.index_select(0, order)
    return QuantTensor(tensor.name, tensor.format, tensor.shape, raw)


def _joined(
    tensors: Sequence[QuantTensor], biases: Sequence[torch.Tensor | None]
) -> torch.Tensor | None:
    """Put biases below each other, zeros where there is none; None if there are none at all."""
    if all(bias is None for bias in biases):
        return None
    parts = [
        torch.zeros(tensor.shape[0], device=tensor.device) if bias is None else bias
        for tensor, bias in zip(tensors, biases, strict=True)
    ]
    return torch.cat(parts)
