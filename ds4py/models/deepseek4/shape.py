"""Sizes, constants and tensor names of a DeepSeek V4.

Owns: the metadata keys and the tensor table (docs/spec/deepseek4-model.md#keys, #tensors), and
which shapes are models that ds4 knows. Refuses to know: weights, arithmetic. Invariant: a shape
that exists can be computed; constants are rounded to float32, as the engine that made them up does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Final

import numpy as np

from ds4py.errors import ModelError
from ds4py.gguf.metadata import Metadata
from ds4py.layer_range import LayerRange
from ds4py.models.base import Identity, SavedLayer, TensorNeed
from ds4py.models.deepseek4.rotary import Yarn
from ds4py.models.keys import MetadataKeys
from ds4py.quant.formats import FORMATS

RATIOS: Final = (0, 4, 128)
"""Compression ratios that the architecture defines."""

OVERLAPPED: Final = 4
"""The ratio whose windows overlap, and whose layers have an indexer."""

_NAME: Final = "deepseek4"
_PLAIN: Final = ("F32", "F16", "BF16")
_MATRIX: Final = tuple(
    kind.name for kind in FORMATS.values() if kind.name not in {"I8", "I16", "I32", "I64", "F64"}
)
_KV_BLOCK: Final = 64
_INDEX_BLOCK: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes and constants of one DeepSeek V4.

    Args:
        n_layers: Layers, without those that predict further tokens.
        n_embd: Model width `D`.
        n_vocab: Vocabulary size `V`.
        n_head: Query heads.
        d_head: Head width `HD`; key and value are the same vector.
        n_rot: Rotary dimensions `R`, the last ones of a head.
        q_rank: Rank of the query projection.
        out_groups: Groups of heads in the output projection.
        out_rank: Rank of the output projection per group.
        n_expert: Routed experts `X`.
        n_used: Experts used per token `U`.
        n_ff: Hidden width of an expert.
        n_hash_layers: Leading layers whose experts are chosen by token id.
        window: Raw rows that a query sees.
        index_heads: Heads of the indexer.
        index_width: Width of an indexer's head.
        index_top_k: Compressed rows that a query may see in layers with an indexer.
        n_streams: Hyper-connection streams `S`.
        sinkhorn: Sinkhorn iterations.
        ratios: Compression ratio of every layer.
        clamps: SwiGLU limit of every layer.
        rope_base: Frequency base of layers without compression.
        compressed_rope_base: Frequency base of the others.
        yarn: Context extension of the others.
        expert_scale: Factor on the experts' weights.
        norm_eps: Epsilon of the norms.
        hc_eps: Epsilon of the hyper-connections.
        n_ctx_train: Context length of the training.
    """

    n_layers: int
    n_embd: int
    n_vocab: int
    n_head: int
    d_head: int
    n_rot: int
    q_rank: int
    out_groups: int
    out_rank: int
    n_expert: int
    n_used: int
    n_ff: int
    n_hash_layers: int
    window: int
    index_heads: int
    index_width: int
    index_top_k: int
    n_streams: int
    sinkhorn: int
    ratios: tuple[int, ...]
    clamps: tuple[float, ...]
    rope_base: float
    compressed_rope_base: float
    yarn: Yarn
    expert_scale: float
    norm_eps: float
    hc_eps: float
    n_ctx_train: int

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> Shape:
        """Read the shape.

        Raises:
            ModelError: A key is missing, of another type, or impossible; or the file is of a
                variant that the architecture does not define.
        """
        keys = MetadataKeys(metadata, _NAME)
        _refuse_variants(keys)
        n_layers = _stored_layers(keys)
        n_head = keys.size("attention.head_count", 1 << 12)
        n_rot, d_head = _head(keys)
        n_expert = keys.size("expert_count", 1 << 16)
        yarn = _yarn(keys)
        shape = cls(
            n_layers=n_layers,
            n_embd=keys.size("embedding_length"),
            n_vocab=keys.size("vocab_size"),
            n_head=n_head,
            d_head=d_head,
            n_rot=n_rot,
            q_rank=keys.size("attention.q_lora_rank"),
            out_groups=keys.divisor("attention.output_group_count", n_head, "query heads"),
            out_rank=keys.size("attention.output_lora_rank"),
            n_expert=n_expert,
            n_used=keys.size("expert_used_count", n_expert),
            n_ff=keys.size("expert_feed_forward_length"),
            n_hash_layers=keys.count("hash_layer_count", n_layers),
            window=keys.size("attention.sliding_window", 1 << 20),
            index_heads=keys.size("attention.indexer.head_count", 1 << 12),
            index_width=_index_width(keys, n_rot),
            index_top_k=keys.size("attention.indexer.top_k"),
            n_streams=keys.size("hyper_connection.count", 16),
            sinkhorn=keys.size("hyper_connection.sinkhorn_iterations", 1000),
            ratios=_ratios(keys, n_layers),
            clamps=keys.floats("swiglu_clamp_exp", n_layers),
            rope_base=keys.above_zero("rope.freq_base"),
            compressed_rope_base=keys.above_zero("attention.compress_rope_freq_base"),
            yarn=yarn,
            expert_scale=keys.above_zero("expert_weights_scale"),
            norm_eps=keys.above_zero("attention.layer_norm_rms_epsilon"),
            hc_eps=keys.above_zero("hyper_connection.epsilon"),
            n_ctx_train=keys.size(
                "context_length", 1 << 31, int(yarn.n_ctx_original * yarn.factor)
            ),
        )
        _check_vocabulary(metadata, shape.n_vocab)
        # constants of ds4's own models are its own, whatever last digits a file gives them
        fields = astuple(replace(shape, n_ctx_train=0))
        known = next((model for model in KNOWN if _alike(fields, astuple(model))), shape)
        return replace(known, n_ctx_train=shape.n_ctx_train)

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return _NAME

    @property
    def hidden_width(self) -> int:
        """Values per token between layers: all streams, one after the other."""
        return self.n_streams * self.n_embd

    @property
    def identity(self) -> Identity | None:
        """Return ds4's id and name if this is one of its models."""
        return KNOWN.get(replace(self, n_ctx_train=0))

    @property
    def saved_layers(self) -> Sequence[SavedLayer] | None:
        """Sizes of every layer's saved cache."""
        return [
            SavedLayer(
                ratio=ratio,
                width=self.d_head,
                index_width=self.index_width if ratio == OVERLAPPED else 0,
                window=self.window,
            )
            for ratio in self.ratios
        ]

    def canonical(self) -> str:
        """Return every field that results depend on as `name=value`, separated by spaces."""
        fields = asdict(self)
        del fields["n_ctx_train"]
        yarn = fields.pop("yarn")
        fields |= {f"yarn.{key}": value for key, value in yarn.items()}
        return " ".join(f"{key}={value}" for key, value in fields.items())

    def tensor_needs(
        self,
        layers: LayerRange,
        may_have: Callable[[str], bool],  # noqa: ARG002 - embedding and head are never tied
        *,
        head: bool,
    ) -> Mapping[str, TensorNeed]:
        """Name the tensors of a slice; see `models.base.Shape`."""
        needs: dict[str, TensorNeed] = {}
        if layers.start == 0:
            needs["token_embd.weight"] = _matrix(self.n_vocab, self.n_embd)
        if head:
            needs |= {
                "output_hc_base.weight": _plain(self.n_streams),
                "output_hc_fn.weight": _matrix(self.n_streams, self.hidden_width),
                "output_hc_scale.weight": _plain(1),
                "output_norm.weight": _plain(self.n_embd),
                "output.weight": _matrix(self.n_vocab, self.n_embd),
            }
        for layer in layers.indices:
            parts = self._attention_needs(self.ratios[layer]) | self._expert_needs(layer)
            needs |= {f"blk.{layer}.{name}": need for name, need in parts.items()}
        return needs

    def _hyper_needs(self, half: str) -> dict[str, TensorNeed]:
        mixes = self.n_streams * (2 + self.n_streams)
        return {
            f"hc_{half}_fn.weight": _matrix(mixes, self.hidden_width),
            f"hc_{half}_scale.weight": _plain(3),
            f"hc_{half}_base.weight": _plain(mixes),
        }

    def _attention_needs(self, ratio: int) -> dict[str, TensorNeed]:
        grouped = self.d_head * self.n_head // self.out_groups
        needs = self._hyper_needs("attn") | {
            "attn_norm.weight": _plain(self.n_embd),
            "attn_q_a.weight": _matrix(self.q_rank, self.n_embd),
            "attn_q_a_norm.weight": _plain(self.q_rank),
            "attn_q_b.weight": _matrix(self.n_head * self.d_head, self.q_rank),
            "attn_kv.weight": _matrix(self.d_head, self.n_embd),
            "attn_kv_a_norm.weight": _plain(self.d_head),
            "attn_sinks.weight": _plain(self.n_head),
            "attn_output_a.weight": _matrix(self.out_groups * self.out_rank, grouped),
            "attn_output_b.weight": _matrix(self.n_embd, self.out_groups * self.out_rank),
        }
        if ratio:
            needs |= self._compressor_needs("attn_compressor_", ratio, self.d_head)
        if ratio == OVERLAPPED:
            index = self.index_heads * self.index_width
            needs |= self._compressor_needs("indexer_compressor_", ratio, self.index_width)
            needs["indexer.attn_q_b.weight"] = _matrix(index, self.q_rank)
            needs["indexer.proj.weight"] = _matrix(self.index_heads, self.n_embd)
        return needs

    def _compressor_needs(self, prefix: str, ratio: int, width: int) -> dict[str, TensorNeed]:
        wide = compressor_width(ratio, width)
        return {
            f"{prefix}ape.weight": _plain(ratio, wide),
            f"{prefix}kv.weight": _matrix(wide, self.n_embd),
            f"{prefix}gate.weight": _matrix(wide, self.n_embd),
            f"{prefix}norm.weight": _plain(width),
        }

    def _expert_needs(self, layer: int) -> dict[str, TensorNeed]:
        D, F, X = self.n_embd, self.n_ff, self.n_expert
        needs = self._hyper_needs("ffn") | {
            "ffn_norm.weight": _plain(D),
            "ffn_gate_inp.weight": _matrix(X, D),
            "exp_probs_b.bias": TensorNeed((X,), optional=True, types=_PLAIN),
            "ffn_gate_exps.weight": _matrix(X, F, D),
            "ffn_up_exps.weight": _matrix(X, F, D),
            "ffn_down_exps.weight": _matrix(X, D, F),
            "ffn_gate_shexp.weight": _matrix(F, D),
            "ffn_up_shexp.weight": _matrix(F, D),
            "ffn_down_shexp.weight": _matrix(D, F),
        }
        if layer < self.n_hash_layers:
            table = TensorNeed((self.n_vocab, self.n_used), types=("I32",))
            needs["ffn_gate_tid2eid.weight"] = table
        return needs


def compressor_width(ratio: int, width: int) -> int:
    """Return the channels per token of a compressor whose rows have `width` values."""
    return 2 * width if ratio == OVERLAPPED else width


def _plain(*shape: int) -> TensorNeed:
    return TensorNeed(shape, types=_PLAIN)


def _matrix(*shape: int) -> TensorNeed:
    return TensorNeed(shape, types=_MATRIX)


def _refuse_variants(keys: MetadataKeys) -> None:
    """Refuse what other models of the family do and this architecture does not define."""
    for key in ("expert_group_count", "expert_group_used_count"):
        if groups := keys.count(key, 1 << 16, 0):
            keys.refuse(key, groups, "0: experts without groups")
    for key in ("attention.head_count_kv", "expert_shared_count"):
        if (value := keys.integer(key)) != 1:
            keys.refuse(key, value, "1")
    if (norm := keys.boolean("expert_weights_norm")) is not True:
        keys.refuse("expert_weights_norm", "nothing" if norm is None else norm, "true")


def _stored_layers(keys: MetadataKeys) -> int:
    """Return the layers without those that predict further tokens, which no slice computes."""
    n_layers = keys.size("block_count", 1024)
    return n_layers - keys.count("nextn_predict_layers", n_layers - 1, 0)


def _head(keys: MetadataKeys) -> tuple[int, int]:
    """Return (rotary dimensions, head width)."""
    width = keys.size("attention.key_length", 1 << 16)
    if (value_width := keys.integer("attention.value_length")) != width:
        keys.refuse("attention.value_length", value_width, f"{width}, the width of the keys")
    n_rot = keys.size("rope.dimension_count", width)
    if n_rot % 2 or (width - n_rot) % _KV_BLOCK:
        keys.refuse(
            "rope.dimension_count",
            n_rot,
            f"an even number that leaves a multiple of {_KV_BLOCK} of {width} values",
        )
    return n_rot, width


def _check_vocabulary(metadata: Metadata, n_vocab: int) -> None:
    """Refuse a tokenizer of another size; a part of a file may have none."""
    tokens = metadata.get_strings("tokenizer.ggml.tokens", None)
    if tokens is not None and len(tokens) != n_vocab:
        raise ModelError(
            "metadata key tokenizer.ggml.tokens",
            got=f"{len(tokens)} tokens",
            expected=f"{n_vocab}, the vocabulary size of the model",
        )


def _index_width(keys: MetadataKeys, n_rot: int) -> int:
    width = keys.size("attention.indexer.key_length", 1 << 12)
    if width & (width - 1) or width < max(_INDEX_BLOCK, n_rot):
        keys.refuse(
            "attention.indexer.key_length",
            width,
            f"a power of two of at least {max(_INDEX_BLOCK, n_rot)}",
        )
    return width


def _ratios(keys: MetadataKeys, n_layers: int) -> tuple[int, ...]:
    ratios = keys.integers("attention.compress_ratios", n_layers)
    for layer, ratio in enumerate(ratios):
        if ratio not in RATIOS:
            keys.refuse(
                "attention.compress_ratios",
                f"{ratio} for layer {layer}",
                " or ".join(map(str, RATIOS)),
            )
    return ratios


def _yarn(keys: MetadataKeys) -> Yarn:
    return Yarn(
        factor=keys.above_zero("rope.scaling.factor", 16.0),
        n_ctx_original=keys.size("rope.scaling.original_context_length", 1 << 31, 65536),
        beta_fast=keys.above_zero("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.above_zero("rope.scaling.yarn_beta_slow", 1.0),
    )


Nested = int | float | tuple["Nested", ...]


def _alike(got: Nested, want: Nested) -> bool:
    """Whether ds4 takes fields for those of its own model: constants may differ by 1e-6."""
    if isinstance(got, tuple) and isinstance(want, tuple):
        return len(got) == len(want) and all(map(_alike, got, want))
    if isinstance(got, tuple) or isinstance(want, tuple):
        return False
    tolerance = 1e-6 * max(1.0, abs(want)) if isinstance(want, float) else 0
    return abs(got - want) <= tolerance


def _alternating(first: int, n_layers: int) -> tuple[int, ...]:
    """Return ratios: two layers of `first`, then 4 and 128 by turns."""
    return (first, first, *((4, 128)[layer % 2] for layer in range(2, n_layers)))


_MICRO: Final = float(np.float32(1e-6))
_FLASH: Final = Shape(
    n_layers=43,
    n_embd=4096,
    n_vocab=129280,
    n_head=64,
    d_head=512,
    n_rot=64,
    q_rank=1024,
    out_groups=8,
    out_rank=1024,
    n_expert=256,
    n_used=6,
    n_ff=2048,
    n_hash_layers=3,
    window=128,
    index_heads=64,
    index_width=128,
    index_top_k=512,
    n_streams=4,
    sinkhorn=20,
    ratios=_alternating(0, 43),
    clamps=(10.0,) * 43,
    rope_base=10000.0,
    compressed_rope_base=160000.0,
    yarn=Yarn(factor=16.0, n_ctx_original=65536, beta_fast=32.0, beta_slow=1.0),
    expert_scale=1.5,
    norm_eps=_MICRO,
    hc_eps=_MICRO,
    n_ctx_train=0,
)
_PRO: Final = replace(
    _FLASH,
    n_layers=61,
    n_embd=7168,
    n_head=128,
    q_rank=1536,
    out_groups=16,
    n_expert=384,
    n_ff=3072,
    index_top_k=1024,
    ratios=_alternating(128, 61),
    clamps=(10.0,) * 61,
    expert_scale=2.5,
)
_TINY: Final = replace(
    _FLASH,
    n_layers=6,
    n_embd=256,
    n_vocab=768,
    n_head=4,
    d_head=160,
    n_rot=32,
    q_rank=64,
    out_groups=2,
    out_rank=32,
    n_expert=8,
    n_used=2,
    n_ff=256,
    window=16,
    index_heads=4,
    index_top_k=8,
    ratios=_alternating(0, 6),
    clamps=(10.0,) * 6,
)

KNOWN: Final[Mapping[Shape, Identity]] = {
    _FLASH: Identity(model_id=0, name="DeepSeek V4 Flash"),
    _PRO: Identity(model_id=1, name="DeepSeek V4 Pro"),
    _TINY: Identity(model_id=2, name="DeepSeek V4 Tiny"),
}
"""ds4's models; the last is the one that ds4's wire recordings were made with."""
