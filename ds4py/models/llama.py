"""The llama architecture: RMS norms, grouped attention with rotary positions, gated SiLU.

Owns: its metadata keys, tensor names and layer arithmetic. Refuses to know: files, sessions,
tokens' text. Invariant: hidden states stay float32 from the embedding to the head, whatever the
precision of the products, so that a cut between layers changes nothing.

Files of this architecture store the rows of Q and K so that adjacent values form a rotary pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import torch
from torch.nn.functional import silu

from ds4py.errors import ModelError
from ds4py.gguf.metadata import Metadata
from ds4py.models.base import (
    Cache,
    CacheTensor,
    Identity,
    Placement,
    SavedLayer,
    Segment,
    Take,
    TensorNeed,
    positive,
)
from ds4py.models.ops.attention import attend_many, attend_one
from ds4py.models.ops.head import OutputHead
from ds4py.models.ops.norm import RmsNorm
from ds4py.models.ops.rope import Rope, RopeParams
from ds4py.quant.linear import PackedLinear
from ds4py.quant.tensor import QuantTensor
from ds4py.spans import LayerSpan

_EMBEDDING: Final = "token_embd.weight"
_NORM: Final = "output_norm.weight"
_HEAD: Final = "output.weight"
_ROPE_FACTORS: Final = "rope_freqs.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes and constants of one llama.

    Args:
        architecture: "llama".
        n_layers: Layers of the whole model.
        n_vocab: Vocabulary size.
        n_embd: Model width.
        n_head: Query heads.
        n_head_kv: Key/value heads; divides `n_head`.
        d_head: Values per head.
        n_ff: Width between gate and down.
        norm_eps: Epsilon of the norms.
        n_ctx_train: Context length of the training.
        rope: Rotary positions.
    """

    architecture: str
    n_layers: int
    n_vocab: int
    n_embd: int
    n_head: int
    n_head_kv: int
    d_head: int
    n_ff: int
    norm_eps: float
    n_ctx_train: int
    rope: RopeParams

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> Shape:
        """Read the shape.

        Raises:
            ModelError: A key is missing, of another type, or impossible.
        """
        name = "llama"
        n_embd = positive(metadata, f"{name}.embedding_length")
        n_head = positive(metadata, f"{name}.attention.head_count", n_embd)
        n_ctx_train = positive(metadata, f"{name}.context_length", 1 << 31)
        _refuse_experts(metadata, f"{name}.expert_count")
        d_head = _head_width(metadata, f"{name}.attention", n_embd, n_head)
        return cls(
            architecture=name,
            n_layers=positive(metadata, f"{name}.block_count", 1024),
            n_vocab=_vocabulary(metadata, f"{name}.vocab_size"),
            n_embd=n_embd,
            n_head=n_head,
            n_head_kv=_groups(metadata, f"{name}.attention.head_count_kv", n_head),
            d_head=d_head,
            n_ff=positive(metadata, f"{name}.feed_forward_length"),
            norm_eps=metadata.require_float(f"{name}.attention.layer_norm_rms_epsilon"),
            n_ctx_train=n_ctx_train,
            rope=RopeParams.from_metadata(metadata, name, d_head, n_ctx_train),
        )

    @property
    def hidden_width(self) -> int:
        """Values per token between layers."""
        return self.n_embd

    @property
    def identity(self) -> Identity | None:
        """None: ds4 computes no llama."""
        return None

    @property
    def saved_layers(self) -> Sequence[SavedLayer] | None:
        """None: there is no portable form of this cache yet."""
        return None

    def canonical(self) -> str:
        """Return every field as `name=value`, in the order of the class, separated by spaces."""
        fields = asdict(self)
        rope = fields.pop("rope")
        fields |= {f"rope.{key}": value for key, value in rope.items()}
        return " ".join(f"{key}={value}" for key, value in fields.items())

    def tensor_needs(
        self, span: LayerSpan, may_have: Callable[[str], bool], *, head: bool
    ) -> Mapping[str, TensorNeed]:
        """Name the tensors of a slice; see `models.base.Shape`."""
        needs = {_ROPE_FACTORS: TensorNeed((self.rope.n_dims // 2,), optional=True)}
        if span.start == 0:
            needs[_EMBEDDING] = TensorNeed((self.n_vocab, self.n_embd))
        if head:
            needs[_NORM] = TensorNeed((self.n_embd,))
            name = _HEAD if may_have(_HEAD) else _EMBEDDING
            needs[name] = TensorNeed((self.n_vocab, self.n_embd))
        for layer in span.layers:
            needs |= self._layer_needs(f"blk.{layer}.")
        return needs

    def _layer_needs(self, blk: str) -> dict[str, TensorNeed]:
        W, F = self.n_embd, self.n_ff
        q, kv = self.n_head * self.d_head, self.n_head_kv * self.d_head
        matrices = {
            "attn_q": (q, W),
            "attn_k": (kv, W),
            "attn_v": (kv, W),
            "attn_output": (W, q),
            "ffn_gate": (F, W),
            "ffn_up": (F, W),
            "ffn_down": (W, F),
        }
        needs = {f"{blk}{name}.weight": TensorNeed(shape) for name, shape in matrices.items()}
        for name, shape in matrices.items():
            needs[f"{blk}{name}.bias"] = TensorNeed(shape[:1], optional=True)
        for name in ("attn_norm", "ffn_norm"):
            needs[f"{blk}{name}.weight"] = TensorNeed((W,))
        return needs


def _vocabulary(metadata: Metadata, key: str) -> int:
    if key in metadata:
        return positive(metadata, key)
    return len(metadata.require_strings("tokenizer.ggml.tokens"))


def _refuse_experts(metadata: Metadata, key: str) -> None:
    n_experts = metadata.get_int(key, 0)
    if n_experts:
        raise ModelError(f"metadata key {key}", got=n_experts, expected="0: no expert layers")


def _groups(metadata: Metadata, key: str, n_head: int) -> int:
    n_head_kv = metadata.get_int(key, n_head)
    if n_head_kv < 1 or n_head % n_head_kv:
        raise ModelError(
            f"metadata key {key}", got=n_head_kv, expected=f"a divisor of {n_head} query heads"
        )
    return n_head_kv


def _head_width(metadata: Metadata, prefix: str, n_embd: int, n_head: int) -> int:
    if f"{prefix}.key_length" not in metadata and n_embd % n_head:
        raise ModelError(
            f"metadata key {prefix}.head_count", got=n_head, expected=f"a divisor of {n_embd}"
        )
    width = metadata.get_int(f"{prefix}.key_length", n_embd // n_head)
    value_width = metadata.get_int(f"{prefix}.value_length", width)
    if not 2 <= width <= 1 << 16 or width % 2:
        raise ModelError(f"metadata key {prefix}.key_length", got=width, expected="an even number")
    if value_width != width:
        raise ModelError(f"metadata key {prefix}.value_length", got=value_width, expected=width)
    return width


class _Weights:
    """Turns tensors by name into the parts of a slice."""

    def __init__(self, take: Take, place: Placement):
        self._take = take
        self._place = place

    def tensor(self, name: str) -> QuantTensor:
        tensor = self._take(name)
        assert tensor is not None, f"{name} was checked before loading"
        return tensor

    def vector(self, name: str) -> torch.Tensor | None:
        tensor = self._take(name)
        return None if tensor is None else tensor.decode(torch.float32)

    def norm(self, name: str, eps: float) -> RmsNorm:
        return RmsNorm(self.tensor(name).decode(torch.float32), eps, self._place.dtype)

    def linear(self, blk: str, *names: str) -> PackedLinear:
        tensors = [self.tensor(f"{blk}{name}.weight") for name in names]
        biases = [self.vector(f"{blk}{name}.bias") for name in names]
        return self.packed(tensors, _joined(tensors, biases))

    def packed(
        self, tensors: Sequence[QuantTensor], bias: torch.Tensor | None = None
    ) -> PackedLinear:
        place = self._place
        return PackedLinear(tensors, dtype=place.dtype, bias=bias, budget=place.budget)


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


class _Layer:
    """One layer's weights and arithmetic."""

    def __init__(self, shape: Shape, weights: _Weights, blk: str):
        self._q_width = shape.n_head * shape.d_head
        self._n_rotated = shape.n_head + shape.n_head_kv
        self._heads = (shape.n_head_kv, shape.n_head // shape.n_head_kv, shape.d_head)
        self._attn_norm = weights.norm(f"{blk}attn_norm.weight", shape.norm_eps)
        self._qkv = weights.linear(blk, "attn_q", "attn_k", "attn_v")
        self._output = weights.linear(blk, "attn_output")
        self._ffn_norm = weights.norm(f"{blk}ffn_norm.weight", shape.norm_eps)
        self._gate_up = weights.linear(blk, "ffn_gate", "ffn_up")
        self._down = weights.linear(blk, "ffn_down")

    def __call__(
        self, x: torch.Tensor, kv: torch.Tensor, rope: Rope, rotation: torch.Tensor, pos0: int
    ) -> None:
        """Update float32 `[T, W]` and the layer's cache in place."""
        qkv = self._qkv(self._attn_norm(x)).float()
        x.add_(self._output(self._attend(qkv, kv, rope, rotation, pos0)))
        gate, up = self._gate_up(self._ffn_norm(x)).chunk(2, 1)
        x.add_(self._down(silu(gate).mul_(up)))

    def _attend(
        self, qkv: torch.Tensor, kv: torch.Tensor, rope: Rope, rotation: torch.Tensor, pos0: int
    ) -> torch.Tensor:
        T, (n_groups, per_group, d_head) = qkv.shape[0], self._heads
        heads = qkv.view(T, -1, d_head)
        rope.rotate_(heads[:, : self._n_rotated], rotation)
        new_rows = heads[:, n_groups * per_group :]
        q = qkv[:, : self._q_width]
        if T == 1:
            kv[:, pos0].copy_(new_rows[0])
            return attend_one(q.view(self._heads), kv, pos0 + 1)
        kv[:, pos0 : pos0 + T].copy_(new_rows.transpose(0, 1))
        return attend_many(q.view(T, *self._heads), kv, pos0)


class Slice:
    """A span of layers, with embedding and output head where the span has them.

    Make it with `Slice.load`.
    """

    def __init__(
        self,
        place: Placement,
        cache_shape: tuple[int, ...],
        layers: Sequence[_Layer],
        rope: Rope,
        *,
        embedding: QuantTensor | None,
        head: OutputHead | None,
    ):
        self._place = place
        self._cache_shape = cache_shape
        self._layers = layers
        self._rope = rope
        self._embedding = embedding
        self._head = head

    @classmethod
    def load(
        cls, shape: Shape, span: LayerSpan, take: Take, place: Placement, *, head: bool
    ) -> Slice:
        """Build a slice from checked tensors; see `models.base.BuildSlice`.

        A process that owns both ends of a tied model holds the embedding twice: as rows to look
        up, and in the form that products want.
        """
        weights = _Weights(take, place)
        factors = weights.vector(_ROPE_FACTORS)
        rope = Rope(shape.rope, place.n_ctx, place.device, factors)
        embedding = weights.tensor(_EMBEDDING) if span.start == 0 else None
        layers = [_Layer(shape, weights, f"blk.{layer}.") for layer in span.layers]
        output = None
        if head:
            norm = RmsNorm(weights.tensor(_NORM).decode(), shape.norm_eps, torch.float32)
            matrix = take(_HEAD) or embedding or weights.tensor(_EMBEDDING)
            output = OutputHead(norm, weights.packed([matrix]))
        cache_shape = (2 * shape.n_head_kv, place.n_ctx, shape.d_head)
        return cls(place, cache_shape, layers, rope, embedding=embedding, head=output)

    @property
    def has_head(self) -> bool:
        """Whether `logits` can run."""
        return self._head is not None

    def cache_layout(self) -> list[CacheTensor]:
        """Describe one session's cache: per layer `[2 G, C, D]`, keys then values."""
        return [CacheTensor(self._cache_shape, self._place.dtype) for _ in self._layers]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return float32 `[T, W]` of token ids int64 `[T]`."""
        assert self._embedding is not None, "only the first slice embeds"
        return self._embedding.rows(tokens, torch.float32)

    def forward(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,  # noqa: ARG002 - only the embedding depends on them
        segments: Sequence[Segment],
    ) -> torch.Tensor:
        """Run the layers over float32 `[T, W]`; overwrites and returns it.

        Segments run one after the other, so that a session's answer does not depend on others.
        """
        start = 0
        for segment in segments:
            rows = hidden[start : start + segment.n_tokens]
            rotation = self._rope.at(segment.pos0, segment.n_tokens)
            for layer, kv in zip(self._layers, segment.cache, strict=True):
                layer(rows, kv, self._rope, rotation, segment.pos0)
            start += segment.n_tokens
        return hidden

    def rewind_floor(self, length: int) -> int:  # noqa: ARG002 - rows can be forgotten one by one
        """Return 0: a timeline can be cut anywhere."""
        return 0

    def export_cache(self, cache: Cache, length: int) -> list[torch.Tensor]:
        """Raise: see `Shape.saved_layers`."""
        raise NotImplementedError("llama has no portable cache")

    def import_cache(self, cache: Cache, length: int, saved: Sequence[torch.Tensor]) -> None:
        """Raise: see `Shape.saved_layers`."""
        raise NotImplementedError("llama has no portable cache")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 `[T, V]` for float32 `[T, W]`."""
        assert self._head is not None, "only a slice with the head gives logits"
        return self._head(hidden)
