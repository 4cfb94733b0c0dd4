"""The cache of a DeepSeek V4 session as a value, and ds4's two payloads of it.

Owns: `Shard`, reading and writing of `DSV4` and `DSVL`. Refuses to know: who sends a payload and
where it is kept. Invariant: a value that exists has exactly the tensors that its tokens and its
model call for, and no byte of a body is read before the body's size is known to be right.

Reading copies nothing but the rare state whose empty slots are minus infinity; writing copies
nothing. Values are float32, little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds4py.errors import SnapshotError
from ds4py.layer_range import LayerRange
from ds4py.snapshot.binary import (
    DAMAGED,
    F32,
    F32_LE,
    OTHER_MODEL,
    U32_LE,
    WORD,
    Buffer,
    PayloadBody,
    as_bytes,
)
from ds4py.snapshot.header import SHARD, WHOLE, capacities, check, shared_words
from ds4py.snapshot.layout import EMPTY_SCORE, SCORES, CacheSizes, Capacities
from ds4py.snapshot.session_state import SessionState


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """The cache of some layers of a session.

    Args:
        sizes: Of the whole model.
        layer_range: The layers; who owns the output head plays no part.
        capacities: Of the engine that saved it.
        n_tokens: Evaluated tokens, at least 1.
        layers: Per layer the tensors named by `CacheSizes.shapes`; not owned.

    Raises:
        SnapshotError: A tensor is missing, superfluous or of another shape.
    """

    sizes: CacheSizes
    layer_range: LayerRange
    capacities: Capacities
    n_tokens: int
    layers: Sequence[Sequence[F32]]

    def __post_init__(self) -> None:
        if len(self.layers) != len(self.layer_range):
            raise SnapshotError(
                f"saved layers {self.layer_range}: tensors of {len(self.layers)} layers, "
                f"expected {len(self.layer_range)}"
            )
        for layer, tensors in zip(self.layer_range.indices, self.layers, strict=True):
            got = [tensor.shape for tensor in tensors]
            expected = self.sizes.shapes(layer, self.n_tokens)
            if got != expected:
                raise SnapshotError(
                    f"saved layer {layer}: tensors of {got}, "
                    f"expected {expected} after {self.n_tokens} tokens"
                )

    @property
    def common(self) -> Sequence[tuple[str, object]]:
        """What the parts of one session have in common.

        Not `prefill_cap` and `raw_cap`, which say nothing about the tensors.
        """
        return (
            ("model", self.sizes),
            ("tokens", self.n_tokens),
            ("ctx", self.capacities.n_ctx),
        )


def read_dsv4(raw: Buffer, sizes: CacheSizes, *, n_ctx: int) -> SessionState[Shard]:
    """Read a whole session.

    Args:
        raw: The payload; the result holds views into it.
        sizes: Of the model that is to continue the session.
        n_ctx: Tokens that a session of it can hold.

    Raises:
        SnapshotError: The payload is damaged, of another model, or too long for the context.
    """
    view = memoryview(raw).cast("B")
    header = WHOLE.read(view)
    header.expect("vocab", sizes.n_vocab, OTHER_MODEL)
    n_tokens = check(header, sizes, n_ctx)
    layers, body = LayerRange(0, sizes.n_layers - 1), PayloadBody(view, WHOLE)
    body.expect(WORD * (n_tokens + sizes.n_vocab) + sizes.range_bytes(layers, n_tokens))
    return SessionState(
        tokens=body.take(U32_LE, n_tokens),
        logits=body.take(F32_LE, sizes.n_vocab),
        cache=_read_layers(body, capacities(header), sizes, layers, n_tokens),
    )


def read_dsvl(
    raw: Buffer, sizes: CacheSizes, layers: LayerRange, *, n_ctx: int, n_tokens: int
) -> Shard:
    """Read some layers of a session.

    Args:
        raw: The payload; the result holds views into it.
        sizes: Of the whole model that is to continue the session.
        layers: The layers that it must hold.
        n_ctx: Tokens that a session of it can hold.
        n_tokens: Tokens that it must stand for.

    Raises:
        SnapshotError: The payload is damaged, of another model, other layers or another session,
            or too long for the context.
    """
    view = memoryview(raw).cast("B")
    header = SHARD.read(view)
    check(header, sizes, n_ctx)
    header.expect("tokens", n_tokens, "it belongs to another session")
    header.expect("first layer", layers.start, f"ask for layers {layers}")
    header.expect("last layer", layers.end, f"ask for layers {layers}")
    body = PayloadBody(view, SHARD)
    body.expect(sizes.range_bytes(layers, n_tokens))
    return _read_layers(body, capacities(header), sizes, layers, n_tokens)


def shard_bytes(sizes: CacheSizes, layers: LayerRange, n_tokens: int) -> int:
    """Return the bytes of a `DSVL` payload."""
    return SHARD.n_bytes + sizes.range_bytes(layers, n_tokens)


def write_dsv4(whole: SessionState[Shard]) -> list[memoryview]:
    """Return the pieces of a `DSV4` payload: views into the session's own tensors."""
    cache = whole.cache
    words = shared_words(cache.sizes, cache.capacities, cache.n_tokens)
    header = WHOLE.write(*words, cache.sizes.n_vocab, len(cache.layers[0][0]))
    pieces = [as_bytes(whole.tokens, U32_LE), as_bytes(whole.logits, F32_LE)]
    return [memoryview(header), *pieces, *_write_layers(cache)]


def write_dsvl(shard: Shard) -> list[memoryview]:
    """Return the pieces of a `DSVL` payload: views into the shard's own tensors."""
    words = shared_words(shard.sizes, shard.capacities, shard.n_tokens)
    header = SHARD.write(
        *words, shard.layer_range.start, shard.layer_range.end, len(shard.layers[0][0])
    )
    return [memoryview(header), *_write_layers(shard)]


def _read_layers(
    body: PayloadBody, caps: Capacities, sizes: CacheSizes, layers: LayerRange, n_tokens: int
) -> Shard:
    _check_counts(body, sizes, layers, n_tokens)
    return Shard(
        sizes=sizes,
        layer_range=layers,
        capacities=caps,
        n_tokens=n_tokens,
        layers=[_read_layer(body, sizes.shapes(layer, n_tokens)) for layer in layers.indices],
    )


def _check_counts(body: PayloadBody, sizes: CacheSizes, layers: LayerRange, n_tokens: int) -> None:
    for kind, expected in zip(("compressed", "index"), sizes.counts(layers, n_tokens), strict=True):
        start = body.at
        counts = body.take(U32_LE, len(layers)).tolist()
        for index, (got, want) in enumerate(zip(counts, expected, strict=True)):
            if got != want:
                raise SnapshotError(
                    f"{kind} rows of layer {layers.start + index}: got {got}, expected {want} "
                    f"after {n_tokens} tokens; {DAMAGED}",
                    offset=start + index * WORD,
                )


def _read_layer(body: PayloadBody, shapes: Sequence[tuple[int, int]]) -> list[F32]:
    tensors = [body.take(F32_LE, *shape) for shape in shapes]
    for index in SCORES:
        if index < len(tensors):
            tensors[index] = _finite(tensors[index])
    return tensors


def _finite(scores: F32) -> F32:
    """Return scores whose empty slots can be computed with; some engines save minus infinity."""
    empty = np.isneginf(scores)
    return np.where(empty, np.float32(EMPTY_SCORE), scores) if empty.any() else scores


def _write_layers(shard: Shard) -> list[memoryview]:
    counts = np.array(shard.sizes.counts(shard.layer_range, shard.n_tokens), U32_LE)
    tensors = [as_bytes(tensor, F32_LE) for layer in shard.layers for tensor in layer]
    return [as_bytes(counts, U32_LE), *tensors]
