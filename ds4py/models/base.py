"""What every architecture module offers, and the checks that all of them need.

Owns: the Protocols of `Shape` and `Slice`, `TensorNeed`, `CacheTensor`. Refuses to know: any
architecture. Invariant: a slice is built only from tensors that were all checked before the first
weight was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ds4py.errors import ModelError
from ds4py.gguf.metadata import Metadata
from ds4py.quant.linear import KeepBudget
from ds4py.quant.tensor import QuantTensor
from ds4py.spans import LayerSpan


@dataclass(frozen=True, slots=True)
class TensorNeed:
    """One tensor that a slice takes from the file.

    Args:
        shape: Expected shape, row-major.
        optional: Whether the slice works without it.
    """

    shape: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One tensor of a session's cache.

    Args:
        shape: Shape for one session.
        dtype: Element type.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


Take = Callable[[str], QuantTensor | None]
"""Hands over a checked tensor, each at most once; None if an optional one is absent."""

Cache = Sequence[torch.Tensor]
"""One session's cache, as described by `Slice.cache_layout`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where and how a slice computes.

    Args:
        device: Home of weights, caches and activations.
        dtype: float32 for exactness, bfloat16 for speed; hidden states are float32 in both.
        n_ctx: Tokens that one session can hold.
        budget: Memory that decoded weights may take.
    """

    device: torch.device
    dtype: torch.dtype
    n_ctx: int
    budget: KeepBudget


class Shape(Protocol):
    """Sizes and constants of one model, from its metadata alone."""

    @property
    def architecture(self) -> str:
        """`general.architecture`."""

    @property
    def n_layers(self) -> int:
        """Layers of the whole model."""

    @property
    def n_vocab(self) -> int:
        """Vocabulary size `V`."""

    @property
    def hidden_width(self) -> int:
        """Values per token between layers, `W`."""

    @property
    def n_ctx_train(self) -> int:
        """Context length that the model was trained for, in tokens."""

    def canonical(self) -> str:
        """Return the text whose checksum identifies models that compute alike."""

    def tensor_needs(
        self, span: LayerSpan, may_have: Callable[[str], bool], *, head: bool
    ) -> Mapping[str, TensorNeed]:
        """Name the tensors of a slice.

        Args:
            span: The layers.
            may_have: Whether a tensor is in the file, or could be in a missing part of it; decides
                whether head and embedding are tied.
            head: Whether final norm and output head are wanted.
        """


class Slice(Protocol):
    """Some layers of a model with their weights, stateless but for them."""

    @property
    def has_head(self) -> bool:
        """Whether `logits` can run."""

    def cache_layout(self) -> Sequence[CacheTensor]:
        """Describe one session's cache."""

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return hidden states float32 `[T, W]` of token ids int64 `[T]` (first slice only)."""

    def forward(self, hidden: torch.Tensor, cache: Cache, pos0: int) -> torch.Tensor:
        """Run the layers over `T` consecutive tokens and write their cache rows.

        Args:
            hidden: float32 `[T, W]` on the slice's device; overwritten.
            cache: The session's cache; rows before `pos0` are read, rows from `pos0` written.
            pos0: Position of the first token.

        Returns:
            Hidden states float32 `[T, W]`.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 `[T, V]` for hidden states float32 `[T, W]` (only with the head)."""


class BuildSlice(Protocol):
    """`Slice.load` of an architecture."""

    def __call__(
        self, shape: Shape, span: LayerSpan, take: Take, place: Placement, *, head: bool
    ) -> Slice:
        """Build a slice; `take` answers for every name of `shape.tensor_needs`."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The two public names of an architecture's module, as its users need them.

    Args:
        read_shape: `Shape.from_metadata`; raises `ModelError` with key, got, expected.
        build_slice: `Slice.load`.
    """

    read_shape: Callable[[Metadata], Shape]
    build_slice: BuildSlice


def positive(metadata: Metadata, key: str, limit: int = 1 << 24) -> int:
    """Return an integer of at least 1 that must be there.

    Raises:
        ModelError: It is missing, no integer, or outside 1 to `limit`.
    """
    value = metadata.require_int(key)
    if not 1 <= value <= limit:
        raise ModelError(f"metadata key {key}", got=value, expected=f"1 to {limit}")
    return value
