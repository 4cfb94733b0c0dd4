"""A span of layers: two halves each, with hyper-connections around them.

Owns: the order of the parts, the embedding, the head, what a batch's positions are. Refuses to
know: what is inside attention and experts. Invariant: the state between layers is float32 `[T, S *
D]`, stream after stream, as it goes over the wire (docs/spec/deepseek4-model.md#overview,
#slice-contract).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds4py.kernels.cache import Cache, CacheTensor, Segment
from ds4py.kernels.cuda.decode_step import DecodesSteps
from ds4py.layer_range import LayerRange
from ds4py.layers.norm import RmsNorm
from ds4py.models.base import DeviceSpec, Take
from ds4py.models.deepseek4.attention import Attention
from ds4py.models.deepseek4.cache import REWIND_SLACK, CacheLayout, LayerCache
from ds4py.models.deepseek4.hyper import HyperConnection, HyperHead
from ds4py.models.deepseek4.linear import Linear, Weights
from ds4py.models.deepseek4.moe import FeedForward
from ds4py.models.deepseek4.shape import Shape
from ds4py.models.deepseek4.step import Rotaries, Step
from ds4py.quant.tensor import QuantTensor


class Layer:
    """One layer; its halves can be run alone, as tests do.

    Args:
        shape: The model.
        layer: Number in the whole model.
        weights: Of the whole slice.
    """

    def __init__(self, shape: Shape, layer: int, weights: Weights):
        own = weights.below(f"blk.{layer}.")
        self._attn_hyper = HyperConnection.load(shape, own.below("hc_attn_"))
        self._attn_norm = _norm(shape, own, "attn_norm.weight")
        self._attention = Attention(shape, layer, own)
        self._ffn_hyper = HyperConnection.load(shape, own.below("hc_ffn_"))
        self._ffn_norm = _norm(shape, own, "ffn_norm.weight")
        self._feed_forward = FeedForward(shape, layer, own)

    def attention_half(
        self, hidden: torch.Tensor, step: Step, caches: Sequence[LayerCache]
    ) -> torch.Tensor:
        """Return the state `[T, S * D]` after the attention half, and write the caches' rows."""
        x, mix = self._attn_hyper.split(hidden)
        return mix.merge(self._attention(self._attn_norm(x), step, caches), hidden)

    def feed_forward_half(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the state `[T, S * D]` after the feed-forward half of tokens int64 `[T]`."""
        x, mix = self._ffn_hyper.split(hidden)
        return mix.merge(self._feed_forward(self._ffn_norm(x), tokens), hidden)


class _Head:
    """Streams to one vector to logits."""

    def __init__(self, shape: Shape, weights: Weights):
        self._hyper = HyperHead.load(shape, weights.below("output_hc_"))
        self._norm = _norm(shape, weights, "output_norm.weight")
        self._vocabulary: Linear = weights.linear("output.weight")

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._vocabulary(self._norm(self._hyper(hidden)))


class Slice:
    """A span of layers, with embedding and output head where the span has them.

    Make it with `Slice.load`.
    """

    def __init__(
        self,
        shape: Shape,
        layers: Sequence[Layer],
        layout: CacheLayout,
        rotaries: Rotaries,
        *,
        embedding: QuantTensor | None,
        head: _Head | None,
    ):
        self._shape = shape
        self.layers = layers
        self.layout = layout
        self._rotaries = rotaries
        self._embedding = embedding
        self._head = head

    @classmethod
    def load(
        cls, shape: Shape, layer_range: LayerRange, take: Take, spec: DeviceSpec, *, head: bool
    ) -> Slice:
        """Build a slice from checked tensors; see `models.base.BuildSlice`."""
        weights = Weights(take, spec)
        embedding = weights.packed("token_embd.weight") if layer_range.start == 0 else None
        layers = [Layer(shape, layer, weights) for layer in layer_range.indices]
        return cls(
            shape,
            layers,
            CacheLayout(shape, layer_range, spec.n_ctx),
            Rotaries(shape, spec),
            embedding=embedding,
            head=_Head(shape, weights) if head else None,
        )

    @property
    def has_head(self) -> bool:
        """Whether `logits` can run."""
        return self._head is not None

    @property
    def recordable(self) -> DecodesSteps | None:
        """None: which rows a layer reads depends on values, so no step can be recorded."""
        return None

    def cache_layout(self) -> list[CacheTensor]:
        """Describe one session's cache, layer by layer."""
        return self.layout.tensors()

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return float32 `[T, S * D]` of token ids int64 `[T]`: every stream is the embedding."""
        assert self._embedding is not None, "only the first slice embeds"
        return self._embedding.rows(tokens, torch.float32).repeat(1, self._shape.n_streams)

    def step(self, segments: Sequence[Segment]) -> Step:
        """Return what the layers need to know of a batch."""
        return Step(self._rotaries, [(segment.pos0, segment.n_tokens) for segment in segments])

    def forward(
        self, hidden: torch.Tensor, tokens: torch.Tensor, segments: Sequence[Segment]
    ) -> torch.Tensor:
        """Run the layers over float32 `[T, S * D]`; see `models.base.Slice.forward`."""
        step = self.step(segments)
        caches = [self.layout.layers(segment.cache) for segment in segments]
        for layer, *own in zip(self.layers, *caches, strict=True):
            hidden = layer.attention_half(hidden, step, own)
            hidden = layer.feed_forward_half(hidden, tokens)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 `[T, V]` for float32 `[T, S * D]`."""
        assert self._head is not None, "only a slice with the head gives logits"
        return self._head(hidden)

    def rewind_floor(self, length: int) -> int:
        """Return the shortest timeline that the rings of the caches still hold everything for."""
        return max(length - REWIND_SLACK, 0)

    def export_cache(self, cache: Cache, length: int) -> list[torch.Tensor]:
        """Return a session's cache in the portable form; see `models.base.Slice`."""
        return self.layout.export(cache, length)

    def import_cache(self, cache: Cache, length: int, saved: Sequence[torch.Tensor]) -> None:
        """Fill a session's cache from its portable form; see `models.base.Slice`."""
        self.layout.fill(cache, length, saved)


def _norm(shape: Shape, weights: Weights, name: str) -> RmsNorm:
    return RmsNorm(weights.dense(name), shape.norm_eps, torch.float32)
