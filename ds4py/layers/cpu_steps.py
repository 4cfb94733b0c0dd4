"""A layer's steps for one token of each session, as compiled kernels of the CPU.

Owns: which layers the kernels can do (`refusal`), what they need besides a layer's own weights, the
memory between the steps. Refuses to know: the order of the steps, weights' names. Invariant: a
row's result depends on the batch only by whether it is alone in it; a step takes no memory but its
scratch.

States are float32 memory; rows are integers with scales (`kernels/cpu/activations.py`), which the
norm, the gate and `quantize` leave for the next product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ds4py.kernels.cache import Segment
from ds4py.kernels.cpu import attention, fused
from ds4py.kernels.cpu.activations import Quantized, quantize
from ds4py.kernels.cpu.attention import AttentionHeads, HeadWeights
from ds4py.kernels.memory import KernelBuffer
from ds4py.layers.block_spec import Activation, AttentionSpec
from ds4py.layers.compare import position_in, trusts_steps
from ds4py.layers.decoder import DecoderLayer, NormWeights, Residual, run_layers
from ds4py.layers.linear import PackedLinear
from ds4py.layers.moe import ExpertsHalf
from ds4py.layers.rope import Rope
from ds4py.layers.torch_steps import add_result, layer_caches, norm_heads_


def heads_of(spec: AttentionSpec, norm_eps: float | None) -> AttentionHeads:
    """Return an attention as its kernel is compiled for it.

    Args:
        spec: What it is.
        norm_eps: Epsilon of the norm of single heads, if there is one.
    """
    return AttentionHeads(
        spec.n_head_kv,
        spec.n_head // spec.n_head_kv,
        spec.d_head,
        spec.rope.n_dims,
        norm_eps=norm_eps if spec.qk_norm == "head" else None,
        scale=spec.scale,
        window=spec.window,
        soft_cap=spec.soft_cap,
        sinks=spec.sinks,
    )


def heads_refusal(spec: AttentionSpec) -> str | None:
    """Say why the attention kernel cannot do this, from the description alone; None if it can."""
    heads = heads_of(spec, None)
    if heads.fits:
        return None
    return (
        f"heads of {heads.width} values, {heads.n_rotated} of them rotated: "
        "the kernels take multiples of 16"
    )


def refusal(layers: Sequence[DecoderLayer], device: torch.device, dtype: torch.dtype) -> str | None:
    """Say why the kernels cannot run these layers; None if they can.

    Compares the kernels with torch, unless that was done before on this processor.
    """
    if device.type != "cpu" or dtype is not torch.bfloat16:
        return "only bfloat16 on the CPU has them"
    for layer in layers:
        if (reason := heads_refusal(layer.spec.attention)) is not None:
            return reason
        for matrix in layer.matrices:
            if not matrix.is_packed:
                return f"{matrix.name}: the type has no product with packed blocks"
    for layer in {(layer.spec, layer.kv.dtype): layer for layer in layers}.values():
        # one comparison for all layers that are alike
        if not trusts_steps(_Part(layer).heads, layer.kv.dtype, _activation(layer)):
            return "a kernel gives other results than torch on this processor"
    return None


def _activation(layer: DecoderLayer) -> Activation:
    return layer.feed_forward.activation


class _Part:
    """What the attention kernel needs of one layer."""

    def __init__(self, layer: DecoderLayer):
        spec, weights = layer.spec.attention, layer.attention
        q_norm, k_norm = weights.q_norm, weights.k_norm
        self.heads = heads_of(spec, None if q_norm is None else q_norm.eps)
        self.n_queries = self.heads.n_queries
        in_kernel = spec.qk_norm == "head"
        self.whole = weights if spec.qk_norm == "whole" else None
        self.weights = HeadWeights(
            q_norm=_vector(q_norm.weight) if in_kernel and q_norm is not None else None,
            k_norm=_vector(k_norm.weight) if in_kernel and k_norm is not None else None,
            sinks=None if weights.scores.sinks is None else _vector(weights.scores.sinks),
        )

    def prepare(self, layer: DecoderLayer) -> None:
        """Compile what a step runs, so that no token waits for that."""
        attention.attention_kernel(self.heads, layer.kv.dtype)
        fused.compile_steps(_activation(layer))
        quantize(torch.zeros((1, self.heads.width * 2)))


def _vector(weight: torch.Tensor) -> KernelBuffer:
    return KernelBuffer(weight, torch.float32, "weights of heads")


class CpuLayers:
    """The layers of a slice, ready to be run over one token of each session.

    Args:
        layers: Layers for which there is no `refusal`.
    """

    def __init__(self, layers: Sequence[DecoderLayer]):
        self._layers = layers
        self._parts = [_Part(layer) for layer in layers]
        for part, layer in zip(self._parts, layers, strict=True):
            part.prepare(layer)
        self._memory: dict[int, _Memory] = {}

    def run(self, hidden: torch.Tensor, segments: Sequence[Segment]) -> None:
        """Update float32 `[B, W]` and the caches of `B` sessions in place."""
        n_rows = hidden.shape[0]
        if n_rows not in self._memory:
            self._memory[n_rows] = _Memory(n_rows)
        steps = CpuSteps(self._layers, self._parts, segments, self._memory[n_rows])
        run_layers(steps, self._layers, KernelBuffer(hidden, torch.float32, "hidden states"))


Kept = TypeVar("Kept")


class _ByWidth(dict[int, Kept]):
    """Memory by its width, made when first asked for; a lookup is on the path of every step."""

    def __init__(self, make: Callable[[int], Kept]):
        super().__init__()
        self._make = make

    def __missing__(self, width: int) -> Kept:
        self[width] = made = self._make(width)
        return made


class _Memory:
    """Scratch for so many rows, by what it is for: what lives at a time is never the same."""

    def __init__(self, n_rows: int):
        def states(width: int) -> KernelBuffer:
            return KernelBuffer.empty((n_rows, width))

        def rows(width: int) -> Quantized:
            return Quantized(n_rows, width)

        self.products, self.attended = _ByWidth(states), _ByWidth(states)
        self.normed, self.mixed, self.gated = _ByWidth(rows), _ByWidth(rows), _ByWidth(rows)


class CpuSteps:
    """The steps; see `decoder.DecoderBackend`.

    Args:
        layers: Of the slice.
        parts: What the attention kernel needs of each.
        segments: Of the batch, one token each.
        memory: For as many rows.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        parts: Sequence[_Part],
        segments: Sequence[Segment],
        memory: _Memory,
    ):
        self._parts = parts
        self._segments = segments
        self._memory = memory
        self._caches = [layer_caches(layers, segment) for segment in segments]
        self._rotations: dict[Rope, list[KernelBuffer]] = {}

    def norm(self, x: KernelBuffer, norm: NormWeights | None) -> Quantized:
        """See `DecoderBackend.norm`."""
        out = self._memory.normed[x.shape[1]]
        if norm is None:
            return quantize(x, out)
        norm.to_codes(x, out)
        return out

    def multiply(self, matrix: PackedLinear, rows: Quantized) -> KernelBuffer:
        """See `DecoderBackend.multiply`."""
        out = self._memory.products[matrix.n_rows]
        matrix.multiply(rows, out)
        return out

    def attend(self, layer: DecoderLayer, qkv: KernelBuffer) -> Quantized:
        """See `DecoderBackend.attend`."""
        part = self._parts[layer.index]
        if part.whole is not None:  # the kernel sees one group of heads, this norm sees all
            norm_heads_(qkv.tensor, part.whole, layer.spec.attention)
        out = self._memory.attended[part.n_queries]
        rotations = self._rotation(layer.attention.rope)
        for row, segment in enumerate(self._segments):
            cache = self._caches[row][layer.index]
            position = position_in(cache, segment.pos0, rotations[row])
            attention.attend(part.heads, qkv, row, position, out, part.weights)
        return quantize(out, self._memory.mixed[part.n_queries])

    def gate(self, gate_up: KernelBuffer, activation: Activation) -> Quantized:
        """See `DecoderBackend.gate`."""
        out = self._memory.gated[gate_up.shape[1] // 2]
        fused.gate(gate_up, out, activation)
        return out

    def add(
        self, x: KernelBuffer, matrix: PackedLinear, rows: Quantized, residual: Residual
    ) -> None:
        """See `DecoderBackend.add`."""
        if residual.after is None and residual.scale == 1:
            matrix.multiply(rows, x, add=True)
        else:
            add_result(x.tensor, self.multiply(matrix, rows).tensor, residual)

    def add_experts(
        self, x: KernelBuffer, norm: NormWeights | None, half: ExpertsHalf, residual: Residual
    ) -> None:
        """See `DecoderBackend.add_experts`; experts round their rows themselves."""
        states = x.tensor if norm is None else norm.to_states(x.tensor)
        add_result(x.tensor, half(states), residual)

    def _rotation(self, rope: Rope) -> list[KernelBuffer]:
        """Return every session's rotation, made once for all layers that share."""
        if rope not in self._rotations:
            self._rotations[rope] = [
                KernelBuffer(rope.at(segment.pos0, 1), torch.complex64, "rotation")
                for segment in self._segments
            ]
        return self._rotations[rope]
