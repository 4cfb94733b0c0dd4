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
from ds4py.kernels.cache import Cache, CacheTensor, Segment
from ds4py.kernels.cpu.fused import AttentionHeads, FusedNorm
from ds4py.kernels.cuda.decode_step import DecodeStep
from ds4py.kernels.memory import KernelBuffer
from ds4py.layer_range import LayerRange
from ds4py.layers.attention import attend_many, attend_one
from ds4py.layers.compare import trusts_steps
from ds4py.layers.fused_layer import FusedLayer, LayerLinears, Scratch, position_in
from ds4py.layers.kv_cache import KvForm, KvRows
from ds4py.layers.linear import PackedLinear
from ds4py.layers.lm_head import OutputHead
from ds4py.layers.norm import RmsNorm
from ds4py.layers.rope import Rope, RopeParams
from ds4py.models.base import DeviceSpec, Identity, SavedRows, Take, TensorNeed, positive
from ds4py.quant.tensor import QuantTensor

_EMBEDDING: Final = "token_embd.weight"
_NORM: Final = "output_norm.weight"
_HEAD: Final = "output.weight"
_ROPE_FACTORS: Final = "rope_freqs.weight"

KV_IS_FREE: Final = True
"""Caches take any type; see `models.base.Architecture`."""


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
    def saved_layers(self) -> SavedRows:
        """Sizes of every layer's saved cache."""
        return SavedRows(n_heads=self.n_head_kv, width=self.d_head)

    def canonical(self) -> str:
        """Return every field as `name=value`, in the order of the class, separated by spaces."""
        fields = asdict(self)
        rope = fields.pop("rope")
        fields |= {f"rope.{key}": value for key, value in rope.items()}
        return " ".join(f"{key}={value}" for key, value in fields.items())

    def tensor_needs(
        self, layers: LayerRange, may_have: Callable[[str], bool], *, head: bool
    ) -> Mapping[str, TensorNeed]:
        """Name the tensors of a slice; see `models.base.Shape`."""
        needs = {_ROPE_FACTORS: TensorNeed((self.rope.n_dims // 2,), optional=True)}
        if layers.start == 0:
            needs[_EMBEDDING] = TensorNeed((self.n_vocab, self.n_embd))
        if head:
            needs[_NORM] = TensorNeed((self.n_embd,))
            name = _HEAD if may_have(_HEAD) else _EMBEDDING
            needs[name] = TensorNeed((self.n_vocab, self.n_embd))
        for layer in layers.indices:
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

    def __init__(self, take: Take, spec: DeviceSpec):
        self._take = take
        self._spec = spec

    @property
    def dtype(self) -> torch.dtype:
        return self._spec.dtype

    def tensor(self, name: str) -> QuantTensor:
        tensor = self._take(name)
        assert tensor is not None, f"{name} was checked before loading"
        return tensor

    def vector(self, name: str) -> torch.Tensor | None:
        tensor = self._take(name)
        return None if tensor is None else tensor.decode(torch.float32)

    def dense(self, name: str) -> torch.Tensor:
        return self.tensor(name).decode(torch.float32)

    def linear(self, blk: str, *names: str) -> PackedLinear:
        tensors = [self.tensor(f"{blk}{name}.weight") for name in names]
        biases = [self.vector(f"{blk}{name}.bias") for name in names]
        return self.packed(tensors, _joined(tensors, biases))

    def packed(
        self, tensors: Sequence[QuantTensor], bias: torch.Tensor | None = None
    ) -> PackedLinear:
        spec = self._spec
        return PackedLinear(tensors, dtype=spec.dtype, bias=bias, budget=spec.budget)


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


_Segment = tuple[KvRows, int, int]
"""A session's cache in one layer, first position, number of tokens."""


class _Layer:
    """One layer's weights and arithmetic."""

    def __init__(self, shape: Shape, weights: _Weights, blk: str):
        self._q_width = shape.n_head * shape.d_head
        self._n_rotated = shape.n_head + shape.n_head_kv
        self._dtype = weights.dtype
        self._heads = (shape.n_head_kv, shape.n_head // shape.n_head_kv, shape.d_head)
        norms = [weights.dense(f"{blk}{name}_norm.weight") for name in ("attn", "ffn")]
        self._attn_norm, self._ffn_norm = (
            RmsNorm(norm, shape.norm_eps, weights.dtype) for norm in norms
        )
        self._linears = LayerLinears(
            qkv=weights.linear(blk, "attn_q", "attn_k", "attn_v"),
            output=weights.linear(blk, "attn_output"),
            gate_up=weights.linear(blk, "ffn_gate", "ffn_up"),
            down=weights.linear(blk, "ffn_down"),
        )
        self.fused = self._fused(shape, norms)

    def _fused(self, shape: Shape, norms: Sequence[torch.Tensor]) -> FusedLayer | None:
        """Return the fast path for few rows, if these weights have one."""
        heads = AttentionHeads(*self._heads, shape.rope.n_dims)
        if not (self._linears.are_packed and heads.fits):
            return None
        attn, ffn = (FusedNorm(norm, shape.norm_eps) for norm in norms)
        return FusedLayer(heads, (attn, ffn), self._linears)

    def __call__(
        self, x: torch.Tensor, rope: Rope, rotation: torch.Tensor, segments: Sequence[_Segment]
    ) -> None:
        """Update float32 `[T, W]` and the sessions' caches in place."""
        linears = self._linears
        qkv = linears.qkv(self._attn_norm(x)).float()
        heads = qkv.view(x.shape[0], -1, self._heads[2])
        rope.rotate_(heads[:, : self._n_rotated], rotation)
        x.add_(linears.output(self._attend(qkv, heads, segments)))
        gate, up = linears.gate_up(self._ffn_norm(x)).chunk(2, 1)
        x.add_(linears.down(silu(gate).mul_(up)))

    def decode(
        self,
        x: torch.Tensor,
        step: DecodeStep,
        addresses: torch.Tensor,
        rope: Rope,
        form: CacheTensor,
    ) -> None:
        """Update float32 `[B, W]`, one token of each session, and their caches, on a GPU."""
        # here, because they need triton
        from ds4py.kernels.cuda.decode_attention import attend_sessions  # noqa: PLC0415
        from ds4py.kernels.cuda.rope_store import rotate_and_store  # noqa: PLC0415

        linears = self._linears
        qkv = linears.qkv(self._attn_norm(x)).float()
        rotate_and_store(qkv, rope.table, addresses, step.positions, form)
        q = qkv[:, : self._q_width].view(-1, *self._heads)
        attended = attend_sessions(q, addresses, step.positions, form)
        x.add_(linears.output(attended.to(self._dtype)))
        gate, up = linears.gate_up(self._ffn_norm(x)).chunk(2, 1)
        x.add_(linears.down(silu(gate).mul_(up)))

    def _attend(
        self, qkv: torch.Tensor, heads: torch.Tensor, segments: Sequence[_Segment]
    ) -> torch.Tensor:
        n_groups, per_group, _ = self._heads
        parts, start = [], 0
        for kv, pos0, T in segments:
            new_rows = heads[start : start + T, n_groups * per_group :]
            q = qkv[start : start + T, : self._q_width]
            kv.write(pos0, new_rows.transpose(0, 1))
            if T == 1:
                seen = kv.read(pos0 + 1, torch.float32)
                parts.append(attend_one(q.view(self._heads), seen, pos0 + 1).to(self._dtype))
            else:
                seen = kv.read(pos0 + T, self._dtype)
                parts.append(_attend_many(q.view(T, *self._heads), seen, pos0))
            start += T
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_many(q: torch.Tensor, kv: torch.Tensor, pos0: int) -> torch.Tensor:
    if kv.is_cuda:  # imported here, because it takes torch a second
        from ds4py.kernels.cuda.chunk_attention import attend_chunk  # noqa: PLC0415

        return attend_chunk(q, kv, pos0)
    return attend_many(q, kv, pos0)


class Slice:
    """A span of layers, with embedding and output head where the span has them.

    Make it with `Slice.load`.
    """

    def __init__(
        self,
        kv: KvForm,
        layers: Sequence[_Layer],
        rope: Rope,
        *,
        embedding: PackedLinear | None,
        head: OutputHead | None,
    ):
        self._kv = kv
        self._layers = layers
        self._rope = rope
        self._embedding = embedding
        self._head = head
        self._scratch: dict[int, Scratch] = {}
        if layers and (fused := layers[0].fused) is not None:
            if trusts_steps(fused.heads, kv.dtype):
                fused.prepare(kv.dtype)
            else:
                for layer in layers:
                    layer.fused = None

    @classmethod
    def load(
        cls, shape: Shape, layer_range: LayerRange, take: Take, spec: DeviceSpec, *, head: bool
    ) -> Slice:
        """Build a slice from checked tensors; see `models.base.BuildSlice`."""
        weights = _Weights(take, spec)
        factors = weights.vector(_ROPE_FACTORS)
        rope = Rope(shape.rope, spec.n_ctx, spec.device, factors)
        embedding = weights.linear("", "token_embd") if layer_range.start == 0 else None
        layers = [_Layer(shape, weights, f"blk.{layer}.") for layer in layer_range.indices]
        output = None
        if head:
            norm = RmsNorm(weights.dense(_NORM), shape.norm_eps, torch.float32)
            own = take(_HEAD)
            vocabulary = embedding if own is None else weights.packed([own])
            output = OutputHead(norm, vocabulary or weights.linear("", "token_embd"))
        rows = (2 * shape.n_head_kv, spec.n_ctx, shape.d_head)
        kv = KvForm(rows, spec.kv_dtype or spec.dtype)
        stepping = spec.device.type == "cuda" and not kv.has_scales
        return (SteppingSlice if stepping else cls)(
            kv, layers, rope, embedding=embedding, head=output
        )

    @property
    def has_head(self) -> bool:
        """Whether `logits` can run."""
        return self._head is not None

    def cache_layout(self) -> list[CacheTensor]:
        """Describe one session's cache: per layer `[2 G, C, D]`, keys then values, and scales."""
        return self._kv.layout(len(self._layers))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return float32 `[T, W]` of token ids int64 `[T]`."""
        assert self._embedding is not None, "only the first slice embeds"
        return self._embedding.rows(tokens)

    def forward(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,  # noqa: ARG002 - only the embedding depends on them
        segments: Sequence[Segment],
    ) -> torch.Tensor:
        """Run the layers over float32 `[T, W]`; overwrites and returns it."""
        fast = hidden.shape[0] == len(segments) and all(layer.fused for layer in self._layers)
        if fast:
            self._step(hidden, segments)
            return hidden
        rotations = [self._rope.at(part.pos0, part.n_tokens) for part in segments]
        rotation = rotations[0] if len(rotations) == 1 else torch.cat(rotations)
        caches = [self._kv.layers(part.cache) for part in segments]
        for layer, *own in zip(self._layers, *caches, strict=True):
            spans = [(kv, part.pos0, part.n_tokens) for kv, part in zip(own, segments, strict=True)]
            layer(hidden, self._rope, rotation, spans)
        return hidden

    def _step(self, hidden: torch.Tensor, segments: Sequence[Segment]) -> None:
        """Run the layers over one token of each session."""
        scratch = None
        x = KernelBuffer(hidden, torch.float32, "hidden states")
        rotations = [
            KernelBuffer(self._rope.at(part.pos0, 1), torch.complex64, "rotation")
            for part in segments
        ]
        caches = [self._kv.layers(part.cache) for part in segments]
        for layer, *own in zip(self._layers, *caches, strict=True):
            assert layer.fused is not None, "the caller has looked"
            scratch = scratch or self._scratch_for(layer.fused, hidden)
            places = [
                position_in(kv, part.pos0, rotation)
                for kv, part, rotation in zip(own, segments, rotations, strict=True)
            ]
            layer.fused(x, places, scratch)

    def _scratch_for(self, layer: FusedLayer, hidden: torch.Tensor) -> Scratch:
        n_rows = hidden.shape[0]
        if n_rows not in self._scratch:
            self._scratch[n_rows] = layer.scratch(n_rows, hidden.shape[1])
        return self._scratch[n_rows]

    def rewind_floor(self, length: int) -> int:  # noqa: ARG002 - rows can be forgotten one by one
        """Return 0: a timeline can be cut anywhere."""
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
        return self._head(hidden)


class SteppingSlice(Slice):
    """A slice on a GPU whose decode steps ask the host nothing; see `DecodesSteps`.

    Its caches hold floats: kernels read no codes with scales.
    """

    def decode_step(self, step: DecodeStep) -> torch.Tensor:
        """Run the layers over one token of each session; see `DecodesSteps.decode_step`."""
        x = self.embed(step.tokens) if step.hidden is None else step.hidden.clone()
        (form,) = self._kv.layout(1)
        for layer, addresses in zip(self._layers, step.addresses, strict=True):
            layer.decode(x, step, addresses, self._rope, form)
        return x
