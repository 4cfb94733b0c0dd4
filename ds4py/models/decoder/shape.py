"""A decoder as a value: what the whole model shares, and a description of every layer.

Owns: `DecoderShape`, the text that identifies it. Refuses to know: metadata keys, weights, how
anything is computed. Invariant: two shapes with one `canonical` text compute alike, and every field
that changes a result is in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from ds4py.layer_range import LayerRange
from ds4py.layers.block_spec import BlockSpec
from ds4py.models.base import Identity, SavedRows, TensorNeed
from ds4py.models.decoder.tensors import Names, block_needs, model_needs


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes and constants of one model, layer by layer.

    Args:
        architecture: `general.architecture`.
        n_vocab: Vocabulary size.
        n_embd: Model width.
        norm_eps: Epsilon of the norms.
        n_ctx_train: Context length of the training.
        blocks: The layers.
        embedding_scale: Factor on what a token's row of the embedding gives.
        logit_scale: Factor on logits.
        logit_soft_cap: Logits `s` become `cap * tanh(s / cap)`; 0 means they stay.
        names: How the file calls what it may call otherwise; no part of what is computed.
    """

    architecture: str
    n_vocab: int
    n_embd: int
    norm_eps: float
    n_ctx_train: int
    blocks: Sequence[BlockSpec]
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0
    names: Names = Names()

    @property
    def n_layers(self) -> int:
        """Layers of the whole model."""
        return len(self.blocks)

    @property
    def hidden_width(self) -> int:
        """Values per token between layers."""
        return self.n_embd

    @property
    def identity(self) -> Identity | None:
        """None: ds4 computes no such model."""
        return None

    @property
    def saved_layers(self) -> SavedRows | None:
        """Sizes of every layer's saved cache; None if they differ from layer to layer."""
        sizes = {(block.attention.n_head_kv, block.attention.d_head) for block in self.blocks}
        if len(sizes) > 1:
            return None
        ((n_heads, width),) = sizes
        return SavedRows(n_heads=n_heads, width=width)

    def canonical(self) -> str:
        """Return every constant as `name=value`, separated by spaces.

        What all layers share is said once, what differs as a list with an entry for each layer.
        Switches that no layer turns are left out, so that a new switch changes no old identity.
        """
        told = {name: _joined(values) for name, values in self._columns()}
        return " ".join(f"{name}={value}" for name, value in told.items())

    def tensor_needs(
        self, layers: LayerRange, may_have: Callable[[str], bool], *, head: bool
    ) -> Mapping[str, TensorNeed]:
        """Name the tensors of a slice; see `models.base.Shape`."""
        rotated = {block.attention.rope.n_dims for block in self.blocks}
        needs = model_needs(
            self.n_vocab,
            self.n_embd,
            may_have,
            n_rotated=rotated.pop() if len(rotated) == 1 else 0,
            embeds=layers.start == 0,
            head=head,
        )
        for layer in layers.indices:
            prefix = f"blk.{layer}."
            own = block_needs(self.blocks[layer], self.n_embd, self.names, prefix, may_have)
            needs |= {f"{prefix}{name}": need for name, need in own.items()}
        return needs

    def _columns(self) -> Iterator[tuple[str, Sequence[Any]]]:
        """Return every constant's name, and its value in every layer."""
        attention = [block.attention for block in self.blocks]
        forward = [block.feed_forward for block in self.blocks]
        yield "architecture", [self.architecture]
        yield "n_layers", [self.n_layers]
        yield "n_vocab", [self.n_vocab]
        yield "n_embd", [self.n_embd]
        for name in ("n_head", "n_head_kv", "d_head"):
            yield name, [getattr(part, name) for part in attention]
        yield "n_ff", [part.n_ff for part in forward]
        yield "norm_eps", [self.norm_eps]
        yield "n_ctx_train", [self.n_ctx_train]
        for field in fields(attention[0].rope):
            yield f"rope.{field.name}", [getattr(part.rope, field.name) for part in attention]
        yield from _turned("", [self])
        yield from _turned("block.", self.blocks)
        yield from _turned("attention.", attention)
        yield from _turned("feed_forward.", forward)


def _turned(prefix: str, parts: Sequence[Any]) -> Iterator[tuple[str, Sequence[Any]]]:
    """Return the columns of switches that some part turns from their default.

    Args:
        prefix: Put before each name.
        parts: One for each layer, of one kind or of several.
    """
    defaults = {
        field.name: field.default
        for part in {type(part): part for part in parts}.values()
        for field in fields(part)
        if field.default is not MISSING and field.name != "names"
    }
    for name, default in defaults.items():
        values = [getattr(part, name, default) for part in parts]
        if any(value != default for value in values):
            yield prefix + name, values
    for name in ("n_expert", "n_used"):
        values = [getattr(part, name, 0) for part in parts]
        if any(values):
            yield prefix + name, values


def _joined(values: Sequence[Any]) -> str:
    texts = [str(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else ",".join(texts)
