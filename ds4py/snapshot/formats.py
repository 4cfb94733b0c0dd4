"""Both forms of saved sessions, for anyone who moves them without caring which it is.

Owns: which form a model's sessions have. Refuses to know: either form's bytes. Invariant: of one
model there is one form.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ds4py.contracts import CacheForm, ModelCard
from ds4py.layer_range import LayerRange
from ds4py.snapshot.binary import Buffer
from ds4py.snapshot.ds4_format import (
    Shard,
    read_dsv4,
    read_dsvl,
    shard_bytes,
    write_dsv4,
    write_dsvl,
)
from ds4py.snapshot.layout import CacheSizes
from ds4py.snapshot.mha_format import (
    PlainShard,
    PlainSizes,
    read_dpkl,
    read_dpkv,
    write_dpkl,
    write_dpkv,
)
from ds4py.snapshot.session_state import SessionState

SavedSizes = CacheSizes | PlainSizes
"""What the payloads of a model depend on."""

SavedShard = Shard | PlainShard
"""The cache of some layers of a session."""


def shard_sizes(sizes: SavedSizes, layers: LayerRange, n_tokens: int) -> list[int]:
    """Return the bytes that a stage's shard may have, in ascending order; never empty."""
    if isinstance(sizes, CacheSizes):
        return [shard_bytes(sizes, layers, n_tokens)]
    return sizes.shard_sizes(layers, n_tokens)


def read_whole(raw: Buffer, sizes: SavedSizes, *, n_ctx: int) -> SessionState[SavedShard]:
    """Read a whole session; see `read_dsv4`, `read_dpkv`."""
    if isinstance(sizes, CacheSizes):
        return read_dsv4(raw, sizes, n_ctx=n_ctx)
    return read_dpkv(raw, sizes, n_ctx=n_ctx)


def read_shard(
    raw: Buffer, sizes: SavedSizes, layers: LayerRange, *, n_ctx: int, n_tokens: int
) -> SavedShard:
    """Read some layers of a session; see `read_dsvl`, `read_dpkl`."""
    if isinstance(sizes, CacheSizes):
        return read_dsvl(raw, sizes, layers, n_ctx=n_ctx, n_tokens=n_tokens)
    return read_dpkl(raw, sizes, layers, n_ctx=n_ctx, n_tokens=n_tokens)


def write_whole(whole: SessionState[Any]) -> list[memoryview]:
    """Return the pieces of a whole session's payload: views into its own arrays."""
    return write_dsv4(whole) if isinstance(whole.cache, Shard) else write_dpkv(whole)


def write_shard(shard: SavedShard) -> list[memoryview]:
    """Return the pieces of a shard's payload: views into its own arrays."""
    return write_dsvl(shard) if isinstance(shard, Shard) else write_dpkl(shard)


def saved_sizes(card: ModelCard) -> SavedSizes:
    """Return what a saved session of a model depends on.

    Raises:
        SnapshotError: Sessions of this architecture have no portable form.
    """
    form = card.saved_form()
    if isinstance(form, CacheForm):
        return CacheSizes(**asdict(form), n_vocab=card.n_vocab)
    return PlainSizes(
        **asdict(form), model_id=card.model_id, n_layers=card.n_layers, n_vocab=card.n_vocab
    )
