"""A session's cache on a device <-> a portable shard of a saved session.

Owns: the way between a `LocalRunner` and `ds4py.snapshot`. Refuses to know: bytes, files, peers,
what a cache's rows mean. Invariant: a shard that does not fit is refused before the session is
touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ds4py.config import EngineConfig
from ds4py.contracts import CacheForm, ModelCard, PlainForm, SavedForm, SessionId
from ds4py.errors import SnapshotError
from ds4py.kernels.cache import CacheTensor
from ds4py.layer_range import LayerRange
from ds4py.models.base import SavedLayer, SavedRows
from ds4py.snapshot import (
    KV_KINDS,
    Capacities,
    KvKind,
    PlainLayer,
    PlainShard,
    PlainSizes,
    SavedShard,
    Shard,
    saved_sizes,
)

_KINDS: Final = {
    torch.float32: KV_KINDS["f32"],
    torch.float16: KV_KINDS["f16"],
    torch.bfloat16: KV_KINDS["bf16"],
    torch.int8: KV_KINDS["q8_0"],
}
_BITS: Final = torch.int16
"""What 16-bit floats are on their way, because NumPy has no bfloat16."""


def cache_form(saved: Sequence[SavedLayer] | SavedRows | None) -> SavedForm | None:
    """Return what a model's card says of saved sessions: `Shape.saved_layers`, all in one."""
    if saved is None:
        return None
    if isinstance(saved, SavedRows):
        return PlainForm(n_heads=saved.n_heads, width=saved.width)
    return CacheForm(
        ratios=tuple(layer.ratio for layer in saved),
        width=saved[0].width,
        index_width=max(layer.index_width for layer in saved),
        window=saved[0].window,
    )


class CachingRunner(Protocol):
    """What of a `LocalRunner` saving and loading need."""

    capacities: Capacities | None

    @property
    def card(self) -> ModelCard:
        """Identity of the whole model."""

    @property
    def layers(self) -> LayerRange:
        """The owned layers."""

    @property
    def n_ctx(self) -> int:
        """Tokens that one session can hold."""

    @property
    def cache_layout(self) -> Sequence[CacheTensor]:
        """One session's cache."""

    def export_cache(self, session: SessionId) -> tuple[int, list[torch.Tensor]]:
        """Return a session's length and cache in the portable form."""

    def import_cache(
        self, session: SessionId, n_tokens: int, saved: Sequence[torch.Tensor]
    ) -> None:
        """Replace a session's cache by a saved one, or begin a session with it."""


def capacities(config: EngineConfig, card: ModelCard, n_ctx: int) -> Capacities | None:
    """Return what saved sessions name of this process; None if their form names nothing."""
    if not isinstance(card.cache_form, CacheForm):
        return None
    window = card.cache_form.window
    return Capacities.of(n_ctx, window, prefill_cap=config.prefill_cap, raw_cap=config.raw_cap)


def save_shard(runner: CachingRunner, session: SessionId) -> SavedShard:
    """Return a copy of a session's cache; must be called on the runner's thread.

    Raises:
        SnapshotError: The model's sessions have no portable form.
        ModelError: The session is unknown or empty.
    """
    sizes, layer_range = saved_sizes(runner.card), runner.layers
    n_tokens, saved = runner.export_cache(session)
    if isinstance(sizes, PlainSizes):
        layers = list(_plain_layers(saved))
        return PlainShard(sizes=sizes, layer_range=layer_range, n_tokens=n_tokens, layers=layers)
    assert runner.capacities is not None
    tensors = iter(saved)
    return Shard(
        sizes=sizes,
        layer_range=layer_range,
        capacities=runner.capacities,
        n_tokens=n_tokens,
        layers=[
            [next(tensors).numpy() for _ in sizes.shapes(layer, n_tokens)]
            for layer in layer_range.indices
        ],
    )


def load_shard(runner: CachingRunner, session: SessionId, shard: SavedShard) -> None:
    """Replace a session's cache, or begin a session with it; must be called on the runner's thread.

    Raises:
        SnapshotError: The shard is of another model, other layers or another type of keys and
            values, or its tokens leave no room in the context; the session is as before.
        CapacityError: The session is new and every cache slot is taken.
    """
    _check(runner, shard)
    if isinstance(shard, PlainShard):
        held = runner.cache_layout[0].dtype
        _check_kinds(shard, _KINDS[held])
        saved = [_tensor(array, held) for layer in shard.layers for array in layer.arrays]
    else:
        saved = [_tensor(tensor, torch.float32) for layer in shard.layers for tensor in layer]
    runner.import_cache(session, shard.n_tokens, saved)


def _plain_layers(saved: Sequence[torch.Tensor]) -> Iterator[PlainLayer]:
    """Give exported tensors their type, layer by layer."""
    arrays = iter(saved)
    for values in arrays:
        kind = _KINDS[values.dtype]
        bits = values.view(torch.int16) if values.itemsize == _BITS.itemsize else values
        scales = [next(arrays)] if kind.has_scales else []
        yield PlainLayer(kind, [tensor.numpy() for tensor in (bits, *scales)])


def _tensor(array: npt.NDArray[Any], held: torch.dtype) -> torch.Tensor:
    """Return what a payload holds, the bits of 16-bit floats as the type that the cache has."""
    # torch wants aligned memory that may be written; what is both is not copied here
    tensor = torch.from_numpy(np.require(array, array.dtype, ["C", "A", "W"]))
    return tensor.view(held) if tensor.dtype is _BITS else tensor


def _check(runner: CachingRunner, shard: SavedShard) -> None:
    if shard.sizes != (sizes := saved_sizes(runner.card)):
        raise SnapshotError(f"saved cache: of {shard.sizes}, expected {sizes}")
    if shard.layer_range.indices != runner.layers.indices:
        raise SnapshotError(
            f"saved cache: layers {shard.layer_range}, expected {runner.layers}; "
            "split the session again"
        )
    if shard.n_tokens >= runner.n_ctx:
        raise SnapshotError(
            f"saved cache: {shard.n_tokens} tokens, expected at most {runner.n_ctx - 1}; "
            f"start with a context of at least {shard.n_tokens + 1} tokens"
        )


def _check_kinds(shard: PlainShard, own: KvKind) -> None:
    for number, layer in zip(shard.layer_range.indices, shard.layers, strict=True):
        if layer.kind != own:
            raise SnapshotError(
                f"saved cache: {layer.kind.name} keys and values in layer {number}, expected "
                f"{own.name}; start with --kv-type {layer.kind.name}, or evaluate the prompt again"
            )
