"""What every architecture module offers, and the checks that all of them need.

Owns: the Protocols of `Shape` and `Slice`, `TensorNeed`. Refuses to know: any architecture.
Invariant: a slice is built only from tensors that were all checked before the first weight was
read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from ds4py.errors import ModelError
from ds4py.gguf.metadata import Metadata
from ds4py.kernels.cache import Cache, CacheTensor, Segment
from ds4py.kernels.cuda.decode_step import DecodesSteps
from ds4py.layer_range import LayerRange
from ds4py.layers.linear import KeepBudget
from ds4py.quant.tensor import QuantTensor


@dataclass(frozen=True, slots=True)
class TensorNeed:
    """One tensor that a slice takes from the file.

    Args:
        shape: Expected shape, row-major.
        optional: Whether the slice works without it.
        types: Names of the tensor types that fit; empty accepts every type that can be decoded.
        more_rows: Whether the first axis may be longer; then all of it is handed over.
    """

    shape: tuple[int, ...]
    optional: bool = False
    types: tuple[str, ...] = ()
    more_rows: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of a file is of the expected shape.

        Axes of length 1 are no difference: some writers add them, others leave them away.
        """
        found, wanted = ([size for size in one if size != 1] for one in (shape, self.shape))
        if self.more_rows and found and wanted and found[0] > wanted[0]:
            return found[1:] == wanted[1:]
        return found == wanted


Take = Callable[[str], QuantTensor | None]
"""Hands over a checked tensor, each at most once; None if an optional one is absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """How ds4 itself calls a model on the wire.

    Args:
        model_id: 32-bit id.
        name: Display name.
    """

    model_id: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLayer:
    """Sizes of one layer's saved cache (docs/spec/deepseek4-model.md#payloads).

    Args:
        ratio: Tokens per compressed row; 0 for a layer without.
        width: Values of a cached row.
        index_width: Values of an index row; 0 for a layer without.
        window: Raw rows that are kept.
    """

    ratio: int
    width: int
    index_width: int
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRows:
    """Sizes of the saved cache of layers that keep a key and a value of every token.

    Such a layer's first cache tensor is `[2 heads, tokens, width]`, keys before values; of a type
    with scales, its second are these, `[2 heads, tokens, scales]` (docs/spec/kv-payload.md).

    Args:
        n_heads: Key/value heads of a layer.
        width: Values of a key, and of a value, of one head.
    """

    n_heads: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Where and how a slice computes.

    Args:
        device: Home of weights, caches and activations.
        dtype: float32 for exactness, bfloat16 for speed; hidden states are float32 in both.
        n_ctx: Tokens that one session can hold.
        budget: Memory that decoded weights may take.
        act_quant: Whether activations are rounded as the C engine does on the CPU; only
            architectures that ds4 computes know it.
        kv_dtype: Type of cached keys and values, int8 with scales; None is `dtype`. Only
            architectures whose caches have no type of their own know it.
    """

    device: torch.device
    dtype: torch.dtype
    n_ctx: int
    budget: KeepBudget
    act_quant: bool = False
    kv_dtype: torch.dtype | None = None


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

    @property
    def identity(self) -> Identity | None:
        """What ds4 calls this model, or None if ds4 does not know it."""

    @property
    def saved_layers(self) -> Sequence[SavedLayer] | SavedRows | None:
        """Sizes of every layer's saved cache, or None if there is no portable form."""

    def canonical(self) -> str:
        """Return the text whose checksum identifies models that compute alike."""

    def tensor_needs(
        self, layers: LayerRange, may_have: Callable[[str], bool], *, head: bool
    ) -> Mapping[str, TensorNeed]:
        """Name the tensors of a slice.

        Args:
            layers: The layers.
            may_have: Whether a tensor is in the file, or could be in a missing part of it; decides
                whether head and embedding are tied.
            head: Whether final norm and output head are wanted.
        """


Described_contra = TypeVar("Described_contra", bound=Shape, contravariant=True)


class Slice(Protocol):
    """Some layers of a model with their weights, stateless except for them."""

    @property
    def has_head(self) -> bool:
        """Whether `logits` can run."""

    @property
    def recordable(self) -> DecodesSteps | None:
        """What runs decode steps that a device can record; None where nothing does."""

    def cache_layout(self) -> Sequence[CacheTensor]:
        """Describe one session's cache."""

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return hidden states float32 `[T, W]` of token ids int64 `[T]` (first slice only)."""

    def forward(
        self, hidden: torch.Tensor, tokens: torch.Tensor, segments: Sequence[Segment]
    ) -> torch.Tensor:
        """Run the layers over the tokens of some sessions and write their cache rows.

        Args:
            hidden: float32 `[T, W]` on the slice's device, the segments' rows one below the
                other; overwritten.
            tokens: The tokens' ids, int64 `[T]` on the slice's device.
            segments: One or more, of different sessions; their lengths add up to `T`.

        Returns:
            Hidden states float32 `[T, W]`.
        """

    def rewind_floor(self, length: int) -> int:
        """Return the shortest timeline to which one of `length` tokens can be cut back."""

    def export_cache(self, cache: Cache, length: int) -> list[torch.Tensor]:
        """Return a session's cache in the portable form (only with `Shape.saved_layers`).

        Returns:
            Copies on the CPU, layer by layer. With `SavedRows` the first `length` rows of every
            tensor of the cache; else float32 tensors in the order of
            docs/spec/deepseek4-model.md#dsv4 item 5, oldest rows first, slots of the compressors'
            state without meaning cleared.
        """

    def import_cache(self, cache: Cache, length: int, saved: Sequence[torch.Tensor]) -> None:
        """Fill a session's cache from what `export_cache` returned, on any device."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 `[T, V]` for hidden states float32 `[T, W]` (only with the head)."""


class BuildSlice(Protocol[Described_contra]):
    """Makes a slice of an architecture."""

    def __call__(
        self,
        shape: Described_contra,
        layers: LayerRange,
        take: Take,
        spec: DeviceSpec,
        /,
        *,
        head: bool,
    ) -> Slice:
        """Build a slice; `take` answers for every name of `shape.tensor_needs`."""


ReadShape = Callable[[Metadata], Shape]
"""A model's shape; raises `ModelError` with key, got, expected."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What an architecture's module offers, under the name `ARCHITECTURE`.

    Args:
        read_shape: Reads its shape.
        build_slice: Builds a slice of it, from the shape that `read_shape` gave.
        kv_is_free: Whether slices take any `DeviceSpec.kv_dtype`.
    """

    read_shape: ReadShape
    build_slice: BuildSlice[Any]
    kv_is_free: bool


def positive(metadata: Metadata, key: str, limit: int = 1 << 24) -> int:
    """Return an integer of at least 1 that must be there.

    Raises:
        ModelError: It is missing, no integer, or outside 1 to `limit`.
    """
    value = metadata.require_int(key)
    if not 1 <= value <= limit:
        raise ModelError(f"metadata key {key}", got=value, expected=f"1 to {limit}")
    return value
