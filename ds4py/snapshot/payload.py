"""A session's cache as a value, and its two forms as bytes.

Owns: `Shard`, `Whole`, their reading and writing, cutting and joining by layers. Refuses to know:
who sends a payload and where it is kept. Invariant: a value that exists has exactly the tensors
that its tokens and its model call for, and no byte of a body is read before the body's size is
known to be right.

Reading copies nothing but the rare state whose empty slots are minus infinity; writing copies
nothing. Values are float32, little-endian.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ds4py.errors import SnapshotError
from ds4py.snapshot.header import SHARD, WHOLE, Form, Header
from ds4py.snapshot.layout import EMPTY_SCORE, SCORES, CacheSizes, Capacities
from ds4py.spans import LayerSpan

F32 = npt.NDArray[np.float32]
U32 = npt.NDArray[np.uint32]
Buffer = bytes | bytearray | memoryview

_F32: Final = np.dtype("<f4")
_U32: Final = np.dtype("<u4")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """The cache of some layers of a session.

    Args:
        sizes: Of the whole model.
        span: The layers; who owns the output head plays no part.
        capacities: Of the engine that saved it.
        n_tokens: Evaluated tokens, at least 1.
        layers: Per layer the tensors named by `CacheSizes.shapes`; not owned.

    Raises:
        SnapshotError: A tensor is missing, superfluous or of another shape.
    """

    sizes: CacheSizes
    span: LayerSpan
    capacities: Capacities
    n_tokens: int
    layers: Sequence[Sequence[F32]]

    def __post_init__(self) -> None:
        if len(self.layers) != len(self.span):
            raise SnapshotError(
                f"saved layers {self.span}: tensors of {len(self.layers)} layers, "
                f"expected {len(self.span)}"
            )
        for layer, tensors in zip(self.span.layers, self.layers, strict=True):
            got = [tensor.shape for tensor in tensors]
            expected = self.sizes.shapes(layer, self.n_tokens)
            if got != expected:
                raise SnapshotError(
                    f"saved layer {layer}: tensors of {got}, "
                    f"expected {expected} after {self.n_tokens} tokens"
                )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Whole:
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
    cache: Shard

    def __post_init__(self) -> None:
        sizes = self.cache.sizes
        _agree("saved session", "layers", len(self.cache.layers), sizes.n_layers)
        _agree("saved session", "token ids", self.tokens.shape, (self.cache.n_tokens,))
        _agree("saved session", "logits", self.logits.shape, (sizes.n_vocab,))
        if (largest := int(self.tokens.max())) >= sizes.n_vocab:
            raise SnapshotError(
                f"saved session: token id {largest}, expected 0 to {sizes.n_vocab - 1}; "
                "load it with the model that saved it"
            )


def read_dsv4(raw: Buffer, sizes: CacheSizes, *, n_ctx: int) -> Whole:
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
    header.expect("vocab", sizes.n_vocab, "load it with the model that saved it")
    header.check(sizes, n_ctx)
    span = LayerSpan(0, sizes.n_layers - 1)
    before = _U32.itemsize * header.n_tokens + _F32.itemsize * sizes.n_vocab
    body = _Body(view, WHOLE, before + sizes.span_bytes(span, header.n_tokens))
    return Whole(
        tokens=body.take(_U32, header.n_tokens),
        logits=body.take(_F32, sizes.n_vocab),
        cache=_read_layers(body, header, sizes, span),
    )


def read_dsvl(
    raw: Buffer, sizes: CacheSizes, span: LayerSpan, *, n_ctx: int, n_tokens: int
) -> Shard:
    """Read some layers of a session.

    Args:
        raw: The payload; the result holds views into it.
        sizes: Of the whole model that is to continue the session.
        span: The layers that it must hold.
        n_ctx: Tokens that a session of it can hold.
        n_tokens: Tokens that it must stand for.

    Raises:
        SnapshotError: The payload is damaged, of another model, other layers or another session,
            or too long for the context.
    """
    view = memoryview(raw).cast("B")
    header = SHARD.read(view)
    header.check(sizes, n_ctx)
    header.expect("tokens", n_tokens, "it belongs to another session")
    header.expect("first layer", span.start, f"ask for layers {span}")
    header.expect("last layer", span.end, f"ask for layers {span}")
    body = _Body(view, SHARD, sizes.span_bytes(span, n_tokens))
    return _read_layers(body, header, sizes, span)


def shard_bytes(sizes: CacheSizes, span: LayerSpan, n_tokens: int) -> int:
    """Return the bytes of a `DSVL` payload."""
    return SHARD.n_bytes + sizes.span_bytes(span, n_tokens)


def write_dsv4(whole: Whole) -> list[memoryview]:
    """Return the pieces of a `DSV4` payload: views into the session's own tensors."""
    cache = whole.cache
    live = len(cache.layers[0][0])
    header = WHOLE.write(cache.sizes, cache.capacities, cache.n_tokens, cache.sizes.n_vocab, live)
    pieces = [_bytes(whole.tokens, _U32), _bytes(whole.logits, _F32)]
    return [memoryview(header), *pieces, *_write_layers(cache)]


def write_dsvl(shard: Shard) -> list[memoryview]:
    """Return the pieces of a `DSVL` payload: views into the shard's own tensors."""
    span, live = shard.span, len(shard.layers[0][0])
    header = SHARD.write(shard.sizes, shard.capacities, shard.n_tokens, span.start, span.end, live)
    return [memoryview(header), *_write_layers(shard)]


def split(whole: Whole, span: LayerSpan) -> Shard:
    """Return some layers of a session, sharing its tensors."""
    cache = whole.cache
    return Shard(
        sizes=cache.sizes,
        span=span,
        capacities=cache.capacities,
        n_tokens=cache.n_tokens,
        layers=cache.layers[span.start : span.end + 1],
    )


def join(shards: Sequence[Shard], tokens: Sequence[int] | U32, logits: F32) -> Whole:
    """Return the session that some shards make up, sharing their tensors.

    The writers may differ in `prefill_cap` and `raw_cap`, which say nothing about the tensors; the
    session takes those of the first.

    Args:
        shards: In layer order.
        tokens: Ids of the evaluated tokens.
        logits: After the last token, float32 `[V]`.

    Raises:
        SnapshotError: Layers are missing or there twice, or the shards are of different sessions.
    """
    first, next_layer = shards[0], 0
    for shard in shards:
        subject = f"shard of layers {shard.span}"
        _agree(subject, "first layer", shard.span.start, next_layer)
        _agree(subject, "model", shard.sizes, first.sizes)
        _agree(subject, "tokens", shard.n_tokens, first.n_tokens)
        _agree(subject, "ctx", shard.capacities.n_ctx, first.capacities.n_ctx)
        next_layer = shard.span.end + 1
    return Whole(
        tokens=np.asarray(tokens, _U32),
        logits=logits,
        cache=Shard(
            sizes=first.sizes,
            span=LayerSpan(0, next_layer - 1),
            capacities=first.capacities,
            n_tokens=first.n_tokens,
            layers=[layer for shard in shards for layer in shard.layers],
        ),
    )


class _Body:
    """What follows a header, taken from front to back.

    Raises:
        SnapshotError: It has not exactly `n_bytes`.
    """

    def __init__(self, raw: memoryview, form: Form, n_bytes: int):
        if len(raw) != form.n_bytes + n_bytes:
            raise SnapshotError(
                f"{form.name} payload: {len(raw)} bytes, expected {form.n_bytes + n_bytes}; "
                "it was cut short or something follows it: save the session again"
            )
        self._raw = raw
        self.at = form.n_bytes

    def take(self, dtype: np.dtype[Any], *shape: int) -> npt.NDArray[Any]:
        """Return a view of the next values."""
        array = np.frombuffer(self._raw, dtype, math.prod(shape), self.at).reshape(shape)
        self.at += array.nbytes
        return array


def _read_layers(body: _Body, header: Header, sizes: CacheSizes, span: LayerSpan) -> Shard:
    _check_counts(body, sizes, span, header.n_tokens)
    return Shard(
        sizes=sizes,
        span=span,
        capacities=header.capacities,
        n_tokens=header.n_tokens,
        layers=[_read_layer(body, sizes.shapes(n, header.n_tokens)) for n in span.layers],
    )


def _check_counts(body: _Body, sizes: CacheSizes, span: LayerSpan, n_tokens: int) -> None:
    for kind, expected in zip(("compressed", "index"), sizes.counts(span, n_tokens), strict=True):
        start = body.at
        counts = body.take(_U32, len(span)).tolist()
        for place, (got, want) in enumerate(zip(counts, expected, strict=True)):
            if got != want:
                raise SnapshotError(
                    f"{kind} rows of layer {span.start + place}: got {got}, expected {want} "
                    f"after {n_tokens} tokens; the payload is damaged: save the session again",
                    offset=start + place * _U32.itemsize,
                )


def _read_layer(body: _Body, shapes: Sequence[tuple[int, int]]) -> list[F32]:
    tensors = [body.take(_F32, *shape) for shape in shapes]
    for place in SCORES:
        if place < len(tensors):
            tensors[place] = _finite(tensors[place])
    return tensors


def _finite(scores: F32) -> F32:
    """Return scores whose empty slots can be computed with; some engines save minus infinity."""
    empty = np.isneginf(scores)
    return np.where(empty, np.float32(EMPTY_SCORE), scores) if empty.any() else scores


def _write_layers(shard: Shard) -> list[memoryview]:
    counts = np.array(shard.sizes.counts(shard.span, shard.n_tokens), _U32)
    tensors = [_bytes(tensor, _F32) for layer in shard.layers for tensor in layer]
    return [_bytes(counts, _U32), *tensors]


def _bytes(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> memoryview:
    """Return an array's memory, in row-major order."""
    return np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data


def _agree(subject: str, what: str, got: object, expected: object) -> None:
    if got != expected:
        raise SnapshotError(f"{subject}: {what} {got}, expected {expected}")
