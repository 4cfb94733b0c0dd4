"""A session as a value, cut and joined by layers, whatever its layers keep.

Owns: `SessionState`, `split`, `join`. Refuses to know: what a layer's cache is made of, bytes.
Invariant: a session that exists has token ids, logits and layers of one model and one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from ds4py.errors import SnapshotError
from ds4py.layer_range import LayerRange
from ds4py.snapshot.binary import F32, OTHER_MODEL, U32, U32_LE


class Sizes(Protocol):
    """What is asked here of a model."""

    @property
    def n_layers(self) -> int:
        """Layers of the whole model."""

    @property
    def n_vocab(self) -> int:
        """Vocabulary size."""


class CachePart(Protocol):
    """What is asked here of the cache of some layers: a dataclass with these fields."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def sizes(self) -> Sizes:
        """Of the whole model."""

    @property
    def layer_range(self) -> LayerRange:
        """The layers."""

    @property
    def n_tokens(self) -> int:
        """Evaluated tokens, at least 1."""

    @property
    def layers(self) -> Sequence[Any]:
        """What each layer keeps."""

    @property
    def common(self) -> Sequence[tuple[str, object]]:
        """What the parts of one session have in common, by name."""


P_co = TypeVar("P_co", bound=CachePart, covariant=True)
P = TypeVar("P", bound=CachePart)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionState(Generic[P_co]):
    """All of a session.

    Args:
        tokens: Ids of the evaluated tokens, uint32 `[n]`; not owned.
        logits: After the last token, float32 `[V]`; not owned.
        cache: Of all layers.

    Raises:
        SnapshotError: The parts do not belong together.
    """

    tokens: U32
    logits: F32
    cache: P_co

    def __post_init__(self) -> None:
        sizes = self.cache.sizes
        _agree("saved session", "layers", len(self.cache.layers), sizes.n_layers)
        _agree("saved session", "token ids", self.tokens.shape, (self.cache.n_tokens,))
        _agree("saved session", "logits", self.logits.shape, (sizes.n_vocab,))
        if (largest := int(self.tokens.max())) >= sizes.n_vocab:
            raise SnapshotError(
                f"saved session: token id {largest}, expected 0 to {sizes.n_vocab - 1}; "
                f"{OTHER_MODEL}"
            )


def split(whole: SessionState[P], layers: LayerRange) -> P:
    """Return some layers of a session, sharing its memory."""
    return replace(
        whole.cache, layer_range=layers, layers=whole.cache.layers[layers.start : layers.end + 1]
    )


def join(shards: Sequence[P], tokens: Sequence[int] | U32, logits: F32) -> SessionState[P]:
    """Return the session that some shards make up, sharing their memory.

    What the shards need not have in common, the session takes from the first.

    Args:
        shards: In layer order.
        tokens: Ids of the evaluated tokens.
        logits: After the last token, float32 `[V]`.

    Raises:
        SnapshotError: Layers are missing or there twice, or the shards are of different sessions.
    """
    first, next_layer = shards[0], 0
    for shard in shards:
        subject = f"shard of layers {shard.layer_range}"
        _agree(subject, "first layer", shard.layer_range.start, next_layer)
        for (what, got), (_, expected) in zip(shard.common, first.common, strict=True):
            _agree(subject, what, got, expected)
        next_layer = shard.layer_range.end + 1
    layers = [layer for shard in shards for layer in shard.layers]
    cache = replace(first, layer_range=LayerRange(0, next_layer - 1), layers=layers)
    return SessionState(tokens=np.asarray(tokens, U32_LE), logits=logits, cache=cache)


def _agree(subject: str, what: str, got: object, expected: object) -> None:
    if got != expected:
        raise SnapshotError(f"{subject}: {what} {got}, expected {expected}")
