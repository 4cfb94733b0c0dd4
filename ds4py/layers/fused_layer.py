"""One layer of the llama kind over one token of each of some sessions, on the CPU.

Owns: the order of the fused steps, and the memory between them. Refuses to know: names of weights,
sessions. Invariant: a row's result depends on the batch only by whether it is alone in it; a step
takes no memory but its scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds4py.kernels.cpu import fused
from ds4py.kernels.cpu.activations import Quantized, quantize
from ds4py.kernels.memory import KernelBuffer
from ds4py.layers.kv_cache import KvRows
from ds4py.layers.linear import PackedLinear


def position_in(rows: KvRows, position: int, rotation: KernelBuffer) -> fused.CachedPosition:
    """Return where a session's token is in one layer.

    Raises:
        KernelError: The cache is not contiguous memory of the process.
    """
    scales = rows.scales
    return fused.CachedPosition(
        KernelBuffer(rows.values, rows.values.dtype, "cache"),
        None if scales is None else KernelBuffer(scales, torch.float32, "scales of a cache"),
        position,
        rotation,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLinears:
    """The matrices of a layer.

    Args:
        qkv: Queries, keys, values, one below the other.
        output: Of the attention.
        gate_up: Gates, then what they let through.
        down: Back to the model's width.
    """

    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear

    @property
    def are_packed(self) -> bool:
        """Whether all of them multiply rounded activations."""
        every = (self.qkv, self.output, self.gate_up, self.down)
        return all(product.is_packed for product in every)


class Scratch:
    """Memory between the steps, for so many rows; used again by every layer.

    Args:
        n_rows: Rows of the batch.
        width: Of the model.
        heads: Of the attention.
        linears: Of any layer; all have the same sizes.
    """

    def __init__(self, n_rows: int, width: int, heads: fused.AttentionHeads, linears: LayerLinears):
        attended = heads.n_queries
        n_gates = linears.gate_up.n_rows // 2
        self.normed = Quantized(n_rows, width)
        self.qkv = KernelBuffer.empty((n_rows, linears.qkv.n_rows))
        self.attended = KernelBuffer.empty((n_rows, attended))
        self.mixed = Quantized(n_rows, attended)
        self.gate_up = KernelBuffer.empty((n_rows, 2 * n_gates))
        self.gated = Quantized(n_rows, n_gates)


class FusedLayer:
    """A layer's fast path for few rows.

    Args:
        heads: Of the attention.
        norms: Before attention and before the gates.
        linears: All packed.
    """

    def __init__(
        self,
        heads: fused.AttentionHeads,
        norms: tuple[fused.FusedNorm, fused.FusedNorm],
        linears: LayerLinears,
    ):
        self.heads = heads
        self._attn_norm, self._ffn_norm = norms
        self._linears = linears

    def prepare(self, cache_type: torch.dtype) -> None:
        """Compile what a step runs, so that no token waits for that."""
        fused.compile_steps(self.heads, cache_type)
        quantize(torch.zeros((1, self.heads.width * 2)))

    def scratch(self, n_rows: int, width: int) -> Scratch:
        """Return memory for a batch."""
        return Scratch(n_rows, width, self.heads, self._linears)

    def __call__(
        self, x: KernelBuffer, positions: Sequence[fused.CachedPosition], s: Scratch
    ) -> None:
        """Update float32 `[T, W]` and the sessions' caches in place."""
        linears = self._linears
        self._attn_norm(x, s.normed)
        linears.qkv.multiply(s.normed, s.qkv)
        for row, position in enumerate(positions):
            fused.attend(self.heads, s.qkv, row, position, s.attended)
        linears.output.multiply(quantize(s.attended, s.mixed), x, add=True)
        self._ffn_norm(x, s.normed)
        linears.gate_up.multiply(s.normed, s.gate_up)
        fused.gate(s.gate_up, s.gated)
        linears.down.multiply(s.gated, x, add=True)
