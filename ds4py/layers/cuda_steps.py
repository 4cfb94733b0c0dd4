"""A layer's steps for one token of each session on a GPU, so that they can be recorded as a graph.

Owns: which layers the kernels can do (`refusal`), attention over sessions whose caches are known by
address. Refuses to know: the order of the steps, graphs. Invariant: nothing here asks the host for
anything, and what changes from step to step is read from the tensors of a `DecodeStep`.

Norms, products, gates and experts are those of `TorchSteps`: on a GPU a torch operation only queues
its kernel. Triton is imported when a step is first computed, as it may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ds4py.kernels.cuda.decode_step import DecodeStep
from ds4py.layers.block_spec import AttentionSpec
from ds4py.layers.decoder import DecoderLayer, run_layers
from ds4py.layers.torch_steps import TorchSteps, norm_heads_


def refusal(layers: Sequence[DecoderLayer], device: torch.device) -> str | None:
    """Say why these layers cannot run in steps that are recorded; None if they can."""
    if device.type != "cuda":
        return "only a GPU has them"
    if any(layer.kv.has_scales for layer in layers):
        return "the kernels read no cache of codes with scales; use --kv-type bf16"
    return None


class CudaLayers:
    """The layers of a slice, ready to run steps; see `DecodesSteps`.

    Args:
        layers: Layers for which there is no `refusal`.
        dtype: Of products.
        embed: Hidden states float32 `[B, W]` of token ids int64 `[B]`.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        dtype: torch.dtype,
        embed: Callable[[torch.Tensor], torch.Tensor],
    ):
        self._layers = layers
        self._dtype = dtype
        self._embed = embed

    def decode_step(self, step: DecodeStep) -> torch.Tensor:
        """Run the layers over one token of each session; see `DecodesSteps.decode_step`."""
        x = self._embed(step.tokens) if step.hidden is None else step.hidden.clone()
        attend = _StepAttention(step)
        run_layers(TorchSteps(self._dtype, attend), self._layers, x)
        return x


class _StepAttention:
    """Attention over one token of each session; see `torch_steps.Attend`."""

    def __init__(self, step: DecodeStep):
        self._step = step

    def __call__(self, layer: DecoderLayer, qkv: torch.Tensor) -> torch.Tensor:
        # here, because they need triton
        from ds4py.kernels.cuda.decode_attention import attend_sessions  # noqa: PLC0415
        from ds4py.kernels.cuda.rope_store import HeadNorms, rotate_and_store  # noqa: PLC0415

        spec, weights, step = layer.spec.attention, layer.attention, self._step
        norms = None
        if spec.qk_norm == "whole":
            norm_heads_(qkv, weights, spec)
        elif weights.q_norm is not None and weights.k_norm is not None:
            norms = HeadNorms(weights.q_norm.weight, weights.k_norm.weight, weights.q_norm.eps)
        form, addresses = layer.kv.values, step.addresses[layer.index]
        rotate_and_store(qkv, weights.rope.table, addresses, step.positions, form, norms)
        q = _queries(qkv, spec)
        return attend_sessions(q, addresses, step.positions, form, weights.scores)


def _queries(qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Return the query heads `[B, G, H / G, D]` of `[B, (H + 2 G) D]`; shares the memory."""
    per_group = spec.n_head // spec.n_head_kv
    q = qkv[:, : spec.n_head * spec.d_head]
    return q.view(-1, spec.n_head_kv, per_group, spec.d_head)
