"""A session's cache on a device <-> a portable shard of a saved session.

Owns: the way between a `LocalRunner` and `ds4py.snapshot`. Refuses to know: bytes, files, peers,
what a cache's rows mean. Invariant: a shard that does not fit is refused before the session is
touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import torch

from ds4py.config import EngineConfig
from ds4py.contracts import CacheForm, ModelCard, SessionId
from ds4py.errors import SnapshotError
from ds4py.models.base import SavedLayer
from ds4py.snapshot import CacheSizes, Capacities, Shard

if TYPE_CHECKING:
    from ds4py.engine.runner import LocalRunner


def cache_form(saved_layers: Sequence[SavedLayer] | None) -> CacheForm | None:
    """Return what a model's card says of saved sessions: `Shape.saved_layers`, all in one."""
    if saved_layers is None:
        return None
    return CacheForm(
        ratios=tuple(layer.ratio for layer in saved_layers),
        width=saved_layers[0].width,
        index_width=max(layer.index_width for layer in saved_layers),
        window=saved_layers[0].window,
    )


def cache_sizes(card: ModelCard) -> CacheSizes:
    """Return what a saved session of a model depends on.

    Raises:
        SnapshotError: Sessions of this architecture have no portable form.
    """
    return CacheSizes(**asdict(card.saved_form()), n_vocab=card.n_vocab)


def capacities(config: EngineConfig, card: ModelCard, n_ctx: int) -> Capacities | None:
    """Return what saved sessions name, None if they have no portable form."""
    if card.cache_form is None:
        return None
    window = card.cache_form.window
    return Capacities.of(n_ctx, window, prefill_cap=config.prefill_cap, raw_cap=config.raw_cap)


def save_shard(runner: LocalRunner, session: SessionId) -> Shard:
    """Return a copy of a session's cache; must be called on the runner's thread.

    Raises:
        SnapshotError: The model's sessions have no portable form.
        ModelError: The session is unknown or empty.
    """
    sizes = cache_sizes(runner.card)
    assert runner.capacities is not None
    n_tokens, saved = runner.export_cache(session)
    tensors = iter(saved)
    return Shard(
        sizes=sizes,
        span=runner.span,
        capacities=runner.capacities,
        n_tokens=n_tokens,
        layers=[
            [next(tensors).numpy() for _ in sizes.shapes(layer, n_tokens)]
            for layer in runner.span.layers
        ],
    )


def load_shard(runner: LocalRunner, session: SessionId, shard: Shard) -> None:
    """Replace a session's cache, or begin a session with it; must be called on the runner's thread.

    Raises:
        SnapshotError: The shard is of another model or other layers, or its tokens leave no room
            in the context; the session is as before.
        CapacityError: The session is new and every cache slot is taken.
    """
    _check(runner, shard)
    # torch wants aligned memory that may be written; what is both is not copied here
    saved = [
        torch.from_numpy(np.require(tensor, np.float32, ["C", "A", "W"]))
        for layer in shard.layers
        for tensor in layer
    ]
    runner.import_cache(session, shard.n_tokens, saved)


def _check(runner: LocalRunner, shard: Shard) -> None:
    if shard.sizes != (sizes := cache_sizes(runner.card)):
        raise SnapshotError(f"saved cache: of {shard.sizes}, expected {sizes}")
    if shard.span.layers != runner.span.layers:
        raise SnapshotError(
            f"saved cache: layers {shard.span}, expected {runner.span}; split the session anew"
        )
    if shard.n_tokens >= runner.n_ctx:
        raise SnapshotError(
            f"saved cache: {shard.n_tokens} tokens, expected at most {runner.n_ctx - 1}; "
            f"start with a context of at least {shard.n_tokens + 1} tokens"
        )
