"""What a person wants to know of a model file before cutting it over machines.

Owns: counting bytes by type, by layer, and at both ends of the model. Refuses to know: printing,
weights. Invariant: each tensor is counted once in `total_bytes`; a tied embedding is counted once
more where it also serves as the output head, because the last slice needs it too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ds4py.errors import ConfigError, ModelError
from ds4py.gguf import kinds
from ds4py.gguf.file import GgufFile
from ds4py.gguf.metadata import Metadata
from ds4py.gguf.parse import TensorInfo
from ds4py.layer_range import LayerRange, balanced_cuts

MAX_LAYERS: Final = 1024
EMBEDDING: Final = "token_embd.weight"
HEAD: Final = "output.weight"
_LAYER: Final = re.compile(r"blk\.(\d{1,9})\.", re.ASCII)


@dataclass(frozen=True, slots=True)
class QuantShare:
    """How much of a model has one tensor type."""

    type_name: str
    n_tensors: int
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """Sizes of one model; bytes are packed bytes of weights.

    Args:
        name: `general.name`, "" if there is none.
        architecture: `general.architecture`, "" if there is none.
        n_layers: Layers of the whole model; 0 if the file holds no layered model.
        n_ctx_train: Context length in tokens, None if unknown.
        n_vocab: Vocabulary size, None if unknown.
        n_embd: Model width, None if unknown.
        quants: Share of each tensor type, the largest first.
        layer_bytes: Bytes of each layer.
        embedding_bytes: Token embedding and what goes with it; needed by the first slice.
        head_bytes: Output head and final norm; needed by the last slice.
        tied: The embedding is the output head too, and is counted in `head_bytes`.
        other_bytes: Everything else, such as rotary tables.
        total_bytes: All tensors, each once.
        n_tensors: Number of tensors.
        missing_shards: Files whose tensors are not counted.
    """

    name: str
    architecture: str
    n_layers: int
    n_ctx_train: int | None
    n_vocab: int | None
    n_embd: int | None
    quants: tuple[QuantShare, ...]
    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    tied: bool
    other_bytes: int
    total_bytes: int
    n_tensors: int
    missing_shards: tuple[str, ...]

    def range_bytes(self, layers: LayerRange) -> int:
        """Return the weights that a machine with this slice holds."""
        ends = (self.embedding_bytes if layers.start == 0 else 0) + (
            self.head_bytes if layers.has_output else 0
        )
        if layers.start == 0 and layers.has_output and self.tied:
            ends -= self.embedding_bytes  # one copy serves both ends
        return sum(self.layer_bytes[layer] for layer in layers.indices) + ends


def summarize(file: GgufFile) -> ModelSummary:
    """Count a model's bytes; no weight is touched.

    Raises:
        ModelError: The metadata has a wrong type or an impossible number of layers.
    """
    meta = file.metadata
    architecture = meta.get_str("general.architecture", "")
    layers = [0] * _count_layers(meta, architecture, file.tensors)
    embedding = head = other = 0
    for info in file.tensors.values():
        layer = _layer_of(info)
        if layer is not None and layer < len(layers):
            layers[layer] += info.n_bytes
        elif info.name.startswith("token_embd"):
            embedding += info.n_bytes
        elif info.name.startswith("output"):
            head += info.n_bytes
        else:
            other += info.n_bytes
    tied = EMBEDDING in file.tensors and HEAD not in file.tensors and not file.missing_shards
    return ModelSummary(
        name=meta.get_str("general.name", ""),
        architecture=architecture,
        n_layers=len(layers),
        n_ctx_train=meta.get_int(f"{architecture}.context_length", None),
        n_vocab=_count_vocabulary(meta, architecture),
        n_embd=meta.get_int(f"{architecture}.embedding_length", None),
        quants=_quant_mix(file.tensors),
        layer_bytes=tuple(layers),
        embedding_bytes=embedding,
        head_bytes=head + (embedding if tied else 0),
        tied=tied,
        other_bytes=other,
        total_bytes=sum(info.n_bytes for info in file.tensors.values()),
        n_tensors=len(file.tensors),
        missing_shards=file.missing_shards,
    )


def suggest_cuts(summary: ModelSummary, n_machines: int) -> list[LayerRange]:
    """Cut a model so that the machine with the most weights has as few as possible.

    Args:
        summary: The model; shards that are missing count as nothing.
        n_machines: 1 to the number of layers.

    Raises:
        ConfigError: More machines than layers, or none.
    """
    if summary.n_layers == 0:
        raise ConfigError("the file holds no layers, so there is nothing to cut")
    first, *rest = summary.layer_bytes
    weights = [first + summary.embedding_bytes, *rest]
    return balanced_cuts(weights, n_machines, summary.head_bytes)


def _layer_of(info: TensorInfo) -> int | None:
    match = _LAYER.match(info.name)
    return int(match[1]) if match else None


def _count_layers(meta: Metadata, architecture: str, tensors: Mapping[str, TensorInfo]) -> int:
    """Take the number of layers from the metadata, or from the names where it is not there."""
    key = f"{architecture}.block_count"
    named = [layer for layer in map(_layer_of, tensors.values()) if layer is not None]
    count = meta.get_int(key, max(named, default=-1) + 1)
    if not 0 <= count <= MAX_LAYERS:
        raise ModelError(f"metadata key {key}", got=count, expected=f"0 to {MAX_LAYERS} layers")
    return count


def _count_vocabulary(meta: Metadata, architecture: str) -> int | None:
    tokens = meta.get_strings("tokenizer.ggml.tokens", None)
    return meta.get_int(f"{architecture}.vocab_size", None if tokens is None else len(tokens))


def _quant_mix(tensors: Mapping[str, TensorInfo]) -> tuple[QuantShare, ...]:
    counts: dict[int, tuple[int, int]] = {}
    for info in tensors.values():
        n, size = counts.get(info.type_id, (0, 0))
        counts[info.type_id] = (n + 1, size + info.n_bytes)
    shares = [QuantShare(kinds.type_name(kind), n, size) for kind, (n, size) in counts.items()]
    return tuple(sorted(shares, key=lambda share: (-share.n_bytes, share.type_name)))
