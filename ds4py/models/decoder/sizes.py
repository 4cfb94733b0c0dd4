"""The metadata keys that all decoders have, read and checked.

Owns: `DecoderSizes`. Refuses to know: what one architecture does with them. Invariant: a value that
does not fit is refused with the key, what was found and what was expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ds4py.errors import ModelError
from ds4py.gguf.metadata import Metadata
from ds4py.layers.block_spec import AttentionSpec, BlockSpec, ExpertsSpec, FeedForwardSpec
from ds4py.layers.rope import RopeParams
from ds4py.models.base import positive
from ds4py.models.decoder.shape import DecoderShape
from ds4py.models.keys import MetadataKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """What a file says of its model under the common keys.

    Args:
        keys: The architecture's own keys, for what is not here.
        metadata: All keys of the file.
        architecture: `general.architecture`.
        n_layers: Layers, without those that predict further tokens (`nextn_predict_layers`).
        n_vocab: Vocabulary size.
        n_embd: Width of the model.
        n_head: Query heads.
        n_head_kv: Key/value heads.
        d_head: Values of a head.
        norm_eps: Epsilon of the norms.
        n_ctx_train: Context length of the training.
    """

    keys: MetadataKeys
    metadata: Metadata
    architecture: str
    n_layers: int
    n_vocab: int
    n_embd: int
    n_head: int
    n_head_kv: int
    d_head: int
    norm_eps: float
    n_ctx_train: int

    @classmethod
    def read(cls, metadata: Metadata, name: str) -> DecoderSizes:
        """Read the keys of an architecture.

        Raises:
            ModelError: One is missing, of another type, or impossible.
        """
        keys = MetadataKeys(metadata, name)
        n_embd = keys.size("embedding_length")
        n_head = keys.size("attention.head_count", n_embd)
        n_ctx_train = keys.size("context_length", 1 << 31)
        n_blocks = keys.size("block_count", 1024)
        n_more = keys.count("nextn_predict_layers", n_blocks - 1, 0)
        return cls(
            keys=keys,
            metadata=metadata,
            architecture=name,
            n_layers=n_blocks - n_more,
            n_vocab=_vocabulary(metadata, keys.name("vocab_size")),
            n_embd=n_embd,
            n_head=n_head,
            d_head=_head_width(metadata, keys.name("attention"), n_embd, n_head),
            n_head_kv=_groups(metadata, keys.name("attention.head_count_kv"), n_head),
            norm_eps=metadata.require_float(keys.name("attention.layer_norm_rms_epsilon")),
            n_ctx_train=n_ctx_train,
        )

    def rope(self) -> RopeParams:
        """Return the rotation of the `rope.*` keys."""
        return RopeParams.from_metadata(
            self.metadata, self.architecture, self.d_head, self.n_ctx_train
        )

    def attention(self, **switches: Any) -> AttentionSpec:
        """Return an attention of these sizes.

        Args:
            switches: Fields of `AttentionSpec` besides the sizes; `rope` is that of the keys
                unless given.
        """
        switches.setdefault("rope", self.rope())
        if "scale" not in switches and self.keys.name("attention.scale") in self.metadata:
            switches["scale"] = self.keys.above_zero("attention.scale")
        return AttentionSpec(
            n_head=self.n_head, n_head_kv=self.n_head_kv, d_head=self.d_head, **switches
        )

    def windowed(self, period: int) -> list[bool]:
        """Say of every layer whether it sees a window only.

        Args:
            period: One layer of so many, the last, sees everything, unless the file says otherwise:
                by another number, 0 for no such layer, or by an entry for each layer.
        """
        key = "attention.sliding_window_pattern"
        told = self.metadata.get(self.keys.name(key))
        if isinstance(told, np.ndarray):
            if len(told) < self.n_layers or not np.issubdtype(told.dtype, np.bool_):
                self.keys.refuse(key, f"{len(told)} of {told.dtype}", f"{self.n_layers} booleans")
            return [bool(one) for one in told[: self.n_layers]]
        every = self.keys.count(key, 1 << 16, period)
        return [not every or layer % every != every - 1 for layer in range(self.n_layers)]

    def dense(self, **switches: Any) -> FeedForwardSpec:
        """Return a dense feed-forward half."""
        return FeedForwardSpec(n_ff=self.keys.size("feed_forward_length"), **switches)

    def experts(self, width_key: str, **switches: Any) -> ExpertsSpec:
        """Return a half of experts.

        Args:
            width_key: Where the width of one is.
            switches: Fields of `ExpertsSpec` besides the sizes.
        """
        n_expert = self.keys.size("expert_count", 1 << 16)
        return ExpertsSpec(
            n_expert=n_expert,
            n_used=self.keys.size("expert_used_count", n_expert),
            n_ff=self.keys.size(width_key),
            scale=self.keys.above_zero("expert_weights_scale", 1.0),
            **switches,
        )

    def shape(self, blocks: Sequence[BlockSpec], **rest: Any) -> DecoderShape:
        """Return the model of these sizes with these layers.

        Args:
            blocks: One description for each layer.
            rest: Further fields of `DecoderShape`.
        """
        return DecoderShape(
            architecture=self.architecture,
            n_vocab=self.n_vocab,
            n_embd=self.n_embd,
            norm_eps=self.norm_eps,
            n_ctx_train=self.n_ctx_train,
            blocks=tuple(blocks),
            **rest,
        )


def _vocabulary(metadata: Metadata, key: str) -> int:
    if key in metadata:
        return positive(metadata, key)
    return len(metadata.require_strings("tokenizer.ggml.tokens"))


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
