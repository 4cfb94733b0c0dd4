"""The cache of a session that keeps a key and a value of every token, and our payloads of it.

Owns: `PlainSizes`, `PlainShard`, reading and writing of `DPKV` and `DPKL`, see
docs/spec/kv-payload.md. Refuses to know: who sends a payload, how a model attends. Invariant: a
value that exists has exactly the rows that its tokens and its model call for, and no row of a body
is read before the body's size is known to be right.

Rows are saved in the type in which the stage holds them, so that a session that was loaded goes on
to the bit; each layer names its type, since stages of one route may hold different ones. Reading
and writing copy nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ds4py.errors import SnapshotError
from ds4py.layer_range import LayerRange
from ds4py.snapshot.binary import (
    DAMAGED,
    F32_LE,
    OTHER_MODEL,
    U32_LE,
    WORD,
    Array,
    Buffer,
    Header,
    HeaderForm,
    PayloadBody,
    as_bytes,
)
from ds4py.snapshot.session_state import SessionState

_FIELDS: Final = (
    *("magic", "version", "model id", "layers", "KV heads", "head width", "vocab", "tokens"),
    *("first layer", "last layer"),
)
WHOLE: Final = HeaderForm("DPKV", 1, _FIELDS)
"""A session of all layers."""

SHARD: Final = HeaderForm("DPKL", 1, _FIELDS)
"""A session's cache of some layers."""

_SCALED: Final = 32


@dataclass(frozen=True, slots=True)
class KvKind:
    """A type of keys and values.

    Args:
        name: As of `--kv-type`.
        code: In a payload.
        dtype: Of one value; 16-bit floats are carried as bare bits.
        has_scales: Whether every 32 values of a head share a float32 scale.
    """

    name: str
    code: int
    dtype: np.dtype[Any]
    has_scales: bool = False


KV_KINDS: Final = {
    kind.name: kind
    for kind in (
        KvKind("f32", 1, F32_LE),
        KvKind("f16", 2, np.dtype("<i2")),
        KvKind("bf16", 3, np.dtype("<i2")),
        KvKind("q8_0", 4, np.dtype("i1"), has_scales=True),
    )
}
"""All types by name."""

_BY_CODE: Final = {kind.code: kind for kind in KV_KINDS.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSizes:
    """What a payload depends on, of one model.

    Args:
        model_id: As on the wire; names architecture and shape.
        n_layers: Layers of the whole model.
        n_heads: Key/value heads of a layer.
        width: Values of a key, and of a value, of one head.
        n_vocab: Vocabulary size.
    """

    model_id: int
    n_layers: int
    n_heads: int
    width: int
    n_vocab: int

    def arrays(self, kind: KvKind, n_tokens: int) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
        """Return type and shape of a layer's arrays, in the order in which they are saved.

        Values `[2 heads, tokens, width]`, keys of all heads before values of all; of kinds with
        scales also these, `[2 heads, tokens, scales of a row]`.
        """
        rows = (2 * self.n_heads, n_tokens)
        arrays: list[tuple[np.dtype[Any], tuple[int, ...]]] = [(kind.dtype, (*rows, self.width))]
        if kind.has_scales:
            arrays.append((F32_LE, (*rows, self.width // math.gcd(self.width, _SCALED))))
        return arrays

    def layer_bytes(self, kind: KvKind, n_tokens: int) -> int:
        """Return the bytes of a layer's arrays."""
        return sum(
            dtype.itemsize * math.prod(shape) for dtype, shape in self.arrays(kind, n_tokens)
        )

    def shard_sizes(self, layers: LayerRange, n_tokens: int) -> list[int]:
        """Return the bytes that a `DPKL` payload of one stage may have: one number per type."""
        around = SHARD.n_bytes + WORD * len(layers)
        return sorted(
            {around + len(layers) * self.layer_bytes(kind, n_tokens) for kind in KV_KINDS.values()}
        )


@dataclass(frozen=True, slots=True)
class PlainLayer:
    """Keys and values of one layer.

    Args:
        kind: Their type.
        arrays: As described by `PlainSizes.arrays`; not owned.
    """

    kind: KvKind
    arrays: Sequence[Array]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlainShard:
    """The cache of some layers of a session.

    Args:
        sizes: Of the whole model.
        layer_range: The layers; who owns the output head plays no part.
        n_tokens: Evaluated tokens, at least 1.
        layers: What each layer keeps.

    Raises:
        SnapshotError: An array is missing, superfluous, or of another type or shape.
    """

    sizes: PlainSizes
    layer_range: LayerRange
    n_tokens: int
    layers: Sequence[PlainLayer]

    def __post_init__(self) -> None:
        if len(self.layers) != len(self.layer_range):
            raise SnapshotError(
                f"saved layers {self.layer_range}: rows of {len(self.layers)} layers, "
                f"expected {len(self.layer_range)}"
            )
        for number, layer in zip(self.layer_range.indices, self.layers, strict=True):
            got = [(array.dtype, array.shape) for array in layer.arrays]
            expected = self.sizes.arrays(layer.kind, self.n_tokens)
            if got != expected:
                raise SnapshotError(
                    f"saved layer {number}: {layer.kind.name} rows in arrays {got}, "
                    f"expected {expected} after {self.n_tokens} tokens"
                )

    @property
    def common(self) -> Sequence[tuple[str, object]]:
        """What the parts of one session have in common."""
        return (("model", self.sizes), ("tokens", self.n_tokens))


def read_dpkv(raw: Buffer, sizes: PlainSizes, *, n_ctx: int) -> SessionState[PlainShard]:
    """Read a whole session.

    Args:
        raw: The payload; the result holds views into it.
        sizes: Of the model that is to continue the session.
        n_ctx: Tokens that a session of it can hold.

    Raises:
        SnapshotError: The payload is damaged, of another model, or too long for the context.
    """
    view, layers = memoryview(raw).cast("B"), LayerRange(0, sizes.n_layers - 1)
    header, body = WHOLE.read(view), PayloadBody(view, WHOLE)
    n_tokens = _check(header, sizes, layers, n_ctx)
    body.expect(WORD * (n_tokens + sizes.n_vocab), more=True)
    return SessionState(
        tokens=body.take(U32_LE, n_tokens),
        logits=body.take(F32_LE, sizes.n_vocab),
        cache=_read_layers(body, sizes, layers, n_tokens),
    )


def read_dpkl(
    raw: Buffer, sizes: PlainSizes, layers: LayerRange, *, n_ctx: int, n_tokens: int
) -> PlainShard:
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
    _check(header, sizes, layers, n_ctx)
    header.expect("tokens", n_tokens, "it belongs to another session")
    return _read_layers(PayloadBody(view, SHARD), sizes, layers, n_tokens)


def write_dpkv(whole: SessionState[PlainShard]) -> list[memoryview]:
    """Return the pieces of a `DPKV` payload: views into the session's own arrays."""
    pieces = [as_bytes(whole.tokens, U32_LE), as_bytes(whole.logits, F32_LE)]
    return [_header(WHOLE, whole.cache), *pieces, *_write_layers(whole.cache)]


def write_dpkl(shard: PlainShard) -> list[memoryview]:
    """Return the pieces of a `DPKL` payload: views into the shard's own arrays."""
    return [_header(SHARD, shard), *_write_layers(shard)]


def _check(header: Header, sizes: PlainSizes, layers: LayerRange, n_ctx: int) -> int:
    """Check every word and return the number of tokens."""
    n_tokens = header.words["tokens"]
    header.expect("model id", sizes.model_id, OTHER_MODEL)
    header.expect("layers", sizes.n_layers, OTHER_MODEL)
    header.expect("KV heads", sizes.n_heads, OTHER_MODEL)
    header.expect("head width", sizes.width, OTHER_MODEL)
    header.expect("vocab", sizes.n_vocab, OTHER_MODEL)
    longer = f"start with a context of at least {n_tokens + 1} tokens"
    header.within("tokens", 1, n_ctx - 1, longer)
    header.expect("first layer", layers.start, f"ask for layers {layers}")
    header.expect("last layer", layers.end, f"ask for layers {layers}")
    return n_tokens


def _read_layers(
    body: PayloadBody, sizes: PlainSizes, layer_range: LayerRange, n_tokens: int
) -> PlainShard:
    kinds = _read_kinds(body, layer_range)
    body.expect(sum(sizes.layer_bytes(kind, n_tokens) for kind in kinds))
    layers = [
        PlainLayer(
            kind, [body.take(dtype, *shape) for dtype, shape in sizes.arrays(kind, n_tokens)]
        )
        for kind in kinds
    ]
    return PlainShard(sizes=sizes, layer_range=layer_range, n_tokens=n_tokens, layers=layers)


def _read_kinds(body: PayloadBody, layers: LayerRange) -> list[KvKind]:
    """Take the types of some layers."""
    body.expect(WORD * len(layers), more=True)
    start, kinds = body.at, []
    for index, code in enumerate(body.take(U32_LE, len(layers)).tolist()):
        if code not in _BY_CODE:
            raise SnapshotError(
                f"type of layer {layers.start + index}: got {code}, expected one of "
                f"{', '.join(map(str, _BY_CODE))}; {DAMAGED}",
                offset=start + index * WORD,
            )
        kinds.append(_BY_CODE[code])
    return kinds


def _header(form: HeaderForm, shard: PlainShard) -> memoryview:
    sizes, layers = shard.sizes, shard.layer_range
    words = (sizes.model_id, sizes.n_layers, sizes.n_heads, sizes.width, sizes.n_vocab)
    return memoryview(form.write(*words, shard.n_tokens, layers.start, layers.end))


def _write_layers(shard: PlainShard) -> list[memoryview]:
    kinds = np.array([layer.kind.code for layer in shard.layers], U32_LE)
    arrays = [array for layer in shard.layers for array in layer.arrays]
    return [as_bytes(kinds, U32_LE), *(as_bytes(array, array.dtype) for array in arrays)]
