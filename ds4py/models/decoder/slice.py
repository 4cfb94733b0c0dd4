"""A span of described layers, with embedding and output head where the span has them.

Owns: which backend runs a batch, the cache's layout, embedding and logits. Refuses to know: what a
layer computes, architectures, files. Invariant: hidden states stay float32 from the embedding to
the head, whatever the precision of the products, so that a cut between layers changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds4py.kernels.cache import Cache, CacheTensor, Segment
from ds4py.kernels.cuda.decode_step import DecodesSteps
from ds4py.layer_range import LayerRange
from ds4py.layers import cpu_steps, cuda_steps
from ds4py.layers.cpu_steps import CpuLayers
from ds4py.layers.cuda_steps import CudaLayers
from ds4py.layers.decoder import DecoderLayer, run_layers
from ds4py.layers.linear import PackedLinear
from ds4py.layers.lm_head import OutputHead
from ds4py.layers.norm import RmsNorm
from ds4py.layers.torch_steps import SegmentAttention, TorchSteps
from ds4py.models.base import DeviceSpec, Take
from ds4py.models.decoder.shape import DecoderShape
from ds4py.models.decoder.tensors import EMBEDDING, HEAD, NORM
from ds4py.models.decoder.weights import DecoderWeights

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Whether a backend serves a slice.

    Args:
        name: Of the backend.
        refusal: Why not; None if it does.
    """

    name: str
    refusal: str | None


class DecoderSlice:
    """Layers with their weights; see `models.base.Slice`.

    Make it with `DecoderSlice.load`.

    Args:
        shape: The whole model.
        layers: Of the span.
        dtype: Of products.
        device: Where they are.
        embedding: `[V, W]`, if the span embeds.
        head: If the span has it.
    """

    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[DecoderLayer],
        *,
        dtype: torch.dtype,
        device: torch.device,
        embedding: PackedLinear | None,
        head: OutputHead | None,
    ):
        self._shape = shape
        self.layers = layers
        self._dtype = dtype
        self._embedding = embedding
        self._head = head
        on_cpu = cpu_steps.refusal(layers, device, dtype)
        on_cuda = cuda_steps.refusal(layers, device)
        self._cpu = CpuLayers(layers) if on_cpu is None else None
        self._cuda = CudaLayers(layers, dtype, self.embed) if on_cuda is None else None
        self.backends = (
            BackendChoice("torch", None),
            BackendChoice("kernels of the CPU", on_cpu),
            BackendChoice("recorded steps of the GPU", on_cuda),
        )
        for backend in self.backends:
            log.debug("%s: %s", backend.name, backend.refusal or "used")

    @classmethod
    def load(
        cls,
        shape: DecoderShape,
        layer_range: LayerRange,
        take: Take,
        spec: DeviceSpec,
        *,
        head: bool,
    ) -> DecoderSlice:
        """Build a slice from checked tensors; see `models.base.BuildSlice`."""
        weights = DecoderWeights(take, spec, shape.norm_eps, shape.names)
        embedding = weights.matrix(EMBEDDING) if layer_range.start == 0 else None
        layers = [
            weights.layer(shape.blocks[number], index, f"blk.{number}.")
            for index, number in enumerate(layer_range.indices)
        ]
        return cls(
            shape,
            layers,
            dtype=spec.dtype,
            device=spec.device,
            embedding=embedding,
            head=_head(shape, weights, embedding) if head else None,
        )

    @property
    def has_head(self) -> bool:
        """Whether `logits` can run."""
        return self._head is not None

    @property
    def recordable(self) -> DecodesSteps | None:
        """What runs decode steps that a device can record; None where nothing does."""
        return self._cuda

    def cache_layout(self) -> list[CacheTensor]:
        """Describe one session's cache: per layer `[2 G, C, D]`, keys then values, and scales."""
        return [tensor for layer in self.layers for tensor in layer.kv.tensors()]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return float32 `[T, W]` of token ids int64 `[T]`."""
        assert self._embedding is not None, "only the first slice embeds"
        rows = self._embedding.rows(tokens)
        scale = self._shape.embedding_scale
        return rows if scale == 1 else rows * scale

    def forward(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,  # noqa: ARG002 - only the embedding depends on them
        segments: Sequence[Segment],
    ) -> torch.Tensor:
        """Run the layers over float32 `[T, W]`; overwrites and returns it."""
        if self._cpu is not None and hidden.shape[0] == len(segments):
            self._cpu.run(hidden, segments)
        else:
            attend = SegmentAttention(self.layers, segments, self._dtype)
            run_layers(TorchSteps(self._dtype, attend), self.layers, hidden)
        return hidden

    def rewind_floor(self, length: int) -> int:  # noqa: ARG002 - rows can be forgotten one by one
        """Return 0: a timeline can be cut anywhere, as windowed layers keep all rows too."""
        return 0

    def export_cache(self, cache: Cache, length: int) -> list[torch.Tensor]:
        """Return a session's rows as they are; see `models.base.Slice`."""
        whole = torch.contiguous_format
        return [held[:, :length].to("cpu", copy=True, memory_format=whole) for held in cache]

    def import_cache(self, cache: Cache, length: int, saved: Sequence[torch.Tensor]) -> None:
        """Fill a session's cache with saved rows; see `models.base.Slice`."""
        for held, rows in zip(cache, saved, strict=True):
            held[:, :length].copy_(rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 `[T, V]` for float32 `[T, W]`."""
        assert self._head is not None, "only a slice with the head gives logits"
        shape = self._shape
        logits = self._head(hidden)[:, : shape.n_vocab]  # the file may have rows for no token
        if shape.logit_scale != 1:
            logits = logits * shape.logit_scale
        if shape.logit_soft_cap:
            logits = (logits / shape.logit_soft_cap).tanh_().mul_(shape.logit_soft_cap)
        return logits


def _head(
    shape: DecoderShape, weights: DecoderWeights, embedding: PackedLinear | None
) -> OutputHead:
    """Return the output head, which is the embedding where the file has no matrix of its own."""
    norm = RmsNorm(weights.norm(NORM).weight, shape.norm_eps, torch.float32)
    vocabulary = weights.matrix(HEAD) or embedding or weights.matrix(EMBEDDING)
    assert vocabulary is not None, "one of the two was checked before loading"
    return OutputHead(norm, vocabulary)
