"""The steps between matrix products of few rows, each in one pass, on the CPU.

Owns: norm, gated SiLU, rotary positions with attention, as kernels that leave integers for the next
product where they can. Refuses to know: weights, layers. Invariant: float32 inside; the same
formulas as `layers`, which is their reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from ds4py.errors import KernelError
from ds4py.kernels.cache import block_size
from ds4py.kernels.cpu.activations import TARGETS, Quantized, write_quantized
from ds4py.kernels.cpu.cache_rows import PARAMS, CacheRows, cache_rows
from ds4py.kernels.cpu.jit import F32, I32, I64, LANES, Code, Kernel, Value, float_bits, vector
from ds4py.kernels.memory import KernelBuffer

_ROW: Final = vector(F32, LANES)

CACHE_TYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
"""Types of caches that a kernel reads and writes; int8 are codes with scales."""


class FusedNorm:
    """RMS norm that leaves integers; see `layers.norm.RmsNorm`.

    Args:
        weight: float32 `[W]`, `W` a multiple of 32.
        eps: Added to the mean square.
    """

    def __init__(self, weight: torch.Tensor, eps: float):
        self._weight = KernelBuffer(weight, torch.float32, "weight of a norm")
        self._place = self._weight.address, float_bits(eps)

    def __call__(self, x: KernelBuffer, out: Quantized) -> None:
        """Norm float32 `[T, W]` into `out`.

        Raises:
            KernelError: The sizes do not fit.
        """
        self._weight.expect("weight of a norm", (out.width,))
        x.expect("input of a norm", (out.n_rows, out.width))
        _norm()(x.address, *self._place, *out.addresses, out.n_rows, out.width)


@cache
def _norm() -> Kernel:
    k = Code("norm", ("x", "weight", "eps", *TARGETS, "n_rows", "width"))
    b, width = k.b, k.integer("width")
    with k.loop(0, k.integer("n_rows")) as row:
        line = k.at(k.pointer("x"), b.mul(row, width), 4)
        squares = k.variable(k.splat(0.0))
        with k.loop(0, width, LANES) as i:
            part = k.load(_ROW, k.at(line, i, 4))
            squares.set(k.fma(part, part, squares.get()))
        mean = b.fdiv(k.total(squares.get()), b.sitofp(width, F32))
        length = k.call("sqrt", b.fadd(mean, k.real("eps")))
        scale = k.splat(b.fdiv(F32(1), length))

        def value(i: Value, line: Value = line, scale: Value = scale) -> Value:
            weight = k.load(_ROW, k.at(k.pointer("weight"), i, 4))
            return b.fmul(b.fmul(k.load(_ROW, k.at(line, i, 4)), weight), scale)

        write_quantized(k, row, width, value)
    return k.compiled()


def gate(gate_up: KernelBuffer, out: Quantized) -> None:
    """Write `silu(gate) * up` as integers.

    Args:
        gate_up: float32 `[T, 2 F]`: gates, then what they let through.
        out: `[T, F]`.

    Raises:
        KernelError: The sizes do not fit.
    """
    gate_up.expect("gates", (out.n_rows, 2 * out.width))
    _gate()(gate_up.address, *out.addresses, out.n_rows, out.width)


@cache
def _gate() -> Kernel:
    k = Code("gate", ("x", *TARGETS, "n_rows", "width"))
    b, width = k.b, k.integer("width")
    with k.loop(0, k.integer("n_rows")) as row:
        gates = k.at(k.pointer("x"), b.mul(b.mul(row, I64(2)), width), 4)
        ups = k.at(gates, width, 4)

        def value(i: Value, gates: Value = gates, ups: Value = ups) -> Value:
            x = k.load(_ROW, k.at(gates, i, 4))
            below = b.fadd(k.splat(1.0), exponential(k, b.fneg(x)))
            return b.fmul(b.fdiv(x, below), k.load(_ROW, k.at(ups, i, 4)))

        write_quantized(k, row, width, value)
    return k.compiled()


_LN2_PARTS: Final = 0.693359375, -2.12194440e-4
"""ln 2 in two parts, of which the first has few bits, so that its multiples are exact."""

_TAYLOR: Final = tuple(1 / math.factorial(n) for n in range(7, -1, -1))


def exponential(k: Code, x: Value) -> Value:
    """Write code for `exp` of float32 `[16]`, to some 2e-7; below -87 it is almost 0."""
    b = k.b
    x = b.select(b.fcmp_ordered("<", x, k.splat(-87.0)), k.splat(-87.0), x)
    x = b.select(b.fcmp_ordered(">", x, k.splat(88.0)), k.splat(88.0), x)
    n = k.call("rint", b.fmul(x, k.splat(1 / math.log(2))))
    for part in _LN2_PARTS:
        x = k.fma(n, k.splat(-part), x)
    total = k.splat(_TAYLOR[0])
    for factor in _TAYLOR[1:]:
        total = k.fma(total, x, k.splat(factor))
    power = b.shl(b.fptosi(n, vector(I32, LANES)), k.full(I32, LANES, 23))
    return b.bitcast(b.add(b.bitcast(total, vector(I32, LANES)), power), _ROW)


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """Sizes of an attention.

    Args:
        n_groups: Key/value heads.
        per_group: Query heads of each.
        width: Values of a head, a multiple of 16.
        n_rotated: Leading values of a head that are rotated, a multiple of 16.
    """

    n_groups: int
    per_group: int
    width: int
    n_rotated: int

    @property
    def fits(self) -> bool:
        """Whether kernels can do it."""
        return self.width % LANES == 0 and self.n_rotated % LANES == 0

    @property
    def n_queries(self) -> int:
        """Values of one token's queries, and of what they attend to."""
        return self.n_groups * self.per_group * self.width


@dataclass(frozen=True, slots=True)
class CachedPosition:
    """Where one token of one session is in one layer.

    Args:
        cache: `[2 G, C, D]` of any type of `KvRows`: keys, then values.
        scales: Of a cache of codes, float32 `[2 G, C, D / block]`; None for floats.
        position: Of the token; its row is written, and rows up to it are seen.
        rotation: complex64 of that position, `n_rotated / 2` numbers.
    """

    cache: KernelBuffer
    scales: KernelBuffer | None
    position: int
    rotation: KernelBuffer

    def check(self, heads: AttentionHeads) -> None:
        """Check that the cache is one of such heads and has the position.

        Raises:
            KernelError: It is not, or the position is outside.
        """
        planes, room, width = 2 * heads.n_groups, self.cache.shape[1], heads.width
        is_coded = self.cache.dtype is torch.int8
        if self.cache.dtype not in CACHE_TYPES or is_coded != (self.scales is not None):
            raise KernelError(
                "cache",
                got=f"{self.cache.dtype} {'without' if self.scales is None else 'with'} scales",
                expected="float32, bfloat16 or float16 without, or int8 with scales",
            )
        self.cache.expect("cache", (planes, room, width), self.cache.dtype)
        if self.scales is not None:
            self.scales.expect("scales of a cache", (planes, room, width // block_size(width)))
        if not 0 <= self.position < room:
            raise KernelError("position in a cache", got=self.position, expected=f"0 to {room - 1}")
        turned = (*self.rotation.shape[:-1], heads.n_rotated // 2)
        self.rotation.expect("rotation", turned, torch.complex64)


def attend(
    heads: AttentionHeads, qkv: KernelBuffer, row: int, position: CachedPosition, out: KernelBuffer
) -> None:
    """Attend from one token of one session, whose keys and values are cached first.

    Args:
        heads: Sizes.
        qkv: float32 `[T, (G P + 2 G) D]`; the token's row is overwritten.
        row: Of the token, in `qkv` and in `out`.
        position: Where its session is.
        out: float32 `[T, G P D]`; the token's row gets the result.

    Raises:
        KernelError: The sizes do not fit; nothing was written.
    """
    n_rows, n_queries = qkv.shape[0], heads.n_queries
    qkv.expect("queries, keys, values", (n_rows, n_queries + 2 * heads.n_groups * heads.width))
    out.expect("result of an attention", (n_rows, n_queries))
    if not 0 <= row < n_rows:
        raise KernelError("row of a token", got=row, expected=f"0 to {n_rows - 1}")
    position.check(heads)
    padded = -(-(position.position + 1) // LANES) * LANES
    scores = KernelBuffer.empty((heads.n_groups * heads.per_group, padded))
    _attend(heads, position.cache.dtype).parallel(
        qkv.address + row * qkv.row_bytes,
        position.rotation.address,
        position.cache.address,
        0 if position.scales is None else position.scales.address,
        position.cache.shape[1],
        position.position,
        padded,
        scores.address,
        out.address + row * out.row_bytes,
    )


def compile_steps(heads: AttentionHeads, cache_type: torch.dtype) -> None:
    """Compile the kernels of this module for a model and the type of its caches."""
    _norm()
    _gate()
    _attend(heads, cache_type)


@cache
def _attend(heads: AttentionHeads, dtype: torch.dtype = torch.bfloat16) -> Kernel:
    k = Code("attend", ("qkv", "rotation", *PARAMS, "position", "padded", "scores", "out"))
    rows = cache_rows(k, heads.width, dtype)
    with k.loop(*k.share(I64(heads.n_groups))) as group:
        work = _Attention(k, heads, rows, group)
        work.cache_row()
        work.rotate_queries()
        work.score()
        for head in range(heads.per_group):
            work.softmax(head)
        tile = max(1, LANES * LANES // heads.width)
        for first in range(0, heads.per_group, tile):
            work.weighted_sum(range(first, min(first + tile, heads.per_group)))
    return k.compiled()


class _Attention:
    """Code for the heads of one group."""

    def __init__(self, k: Code, heads: AttentionHeads, rows: CacheRows, group: Value):
        self._k, self._heads, self._rows = k, heads, rows
        b, D, P, G = k.b, heads.width, heads.per_group, heads.n_groups
        own = b.mul(group, I64(P))
        self._queries = k.at(k.pointer("qkv"), own, 4 * D)
        self._key = k.at(k.pointer("qkv"), b.add(group, I64(G * P)), 4 * D)
        self._value = k.at(k.pointer("qkv"), b.add(group, I64(G * P + G)), 4 * D)
        self._out = k.at(k.pointer("out"), own, 4 * D)
        self._keys = rows.plane(group)
        self._values = rows.plane(b.add(group, I64(G)))
        self._scores = k.at(k.pointer("scores"), b.mul(own, k.integer("padded")), 4)
        self._n_keys = b.add(k.integer("position"), I64(1))
        self._weights_sum: dict[int, Value] = {}

    def cache_row(self) -> None:
        """Store the token's own key and value."""
        k, D = self._k, self._heads.width
        place = k.integer("position")
        for source, target, rotated in (
            (self._key, self._keys, True),
            (self._value, self._values, False),
        ):
            parts = [
                self._turned(source, start) if rotated else k.load(_ROW, source, 4 * start)
                for start in range(0, D, LANES)
            ]
            self._rows.write(self._rows.row(target, place), parts)

    def rotate_queries(self) -> None:
        """Rotate and scale the queries in place."""
        k, D = self._k, self._heads.width
        for head in range(self._heads.per_group):
            query = k.at(self._queries, head, 4 * D)
            for start in range(0, D, LANES):
                part = k.b.fmul(self._turned(query, start), k.splat(1 / math.sqrt(D)))
                k.store(part, query, 4 * start)

    def score(self) -> None:
        """Multiply all queries with all keys."""
        k, D = self._k, self._heads.width
        with k.loop(0, self._n_keys) as place:
            parts = self._rows.read(self._rows.row(self._keys, place))
            for head in range(self._heads.per_group):
                total = k.splat(0.0)
                for number, part in enumerate(parts):
                    query = k.load(_ROW, self._queries, 4 * (head * D + LANES * number))
                    total = k.fma(part, query, total)
                k.store(k.total(total), k.at(self._line(head), place, 4))

    def softmax(self, head: int) -> None:
        """Turn one head's scores into weights whose sum is kept beside."""
        k, b, line = self._k, self._k.b, self._line(head)
        padded = k.integer("padded")
        with k.loop(self._n_keys, padded) as place:
            k.store(F32(-math.inf), k.at(line, place, 4))
        largest = k.variable(k.splat(-math.inf))
        with k.loop(0, padded, LANES) as place:
            largest.set(k.larger(largest.get(), k.load(_ROW, k.at(line, place, 4))))
        most, total = k.splat(k.reduce("fmax", largest.get())), k.variable(k.splat(0.0))
        with k.loop(0, padded, LANES) as place:
            at = k.at(line, place, 4)
            weight = exponential(k, b.fsub(k.load(_ROW, at), most))
            beyond = k.b.fcmp_ordered("==", k.load(_ROW, at), k.splat(-math.inf))
            weight = b.select(beyond, k.splat(0.0), weight)
            k.store(weight, at)
            total.set(b.fadd(total.get(), weight))
        self._weights_sum[head] = k.total(total.get())

    def weighted_sum(self, some: range) -> None:
        """Add up the values, for some heads at a time."""
        k, D = self._k, self._heads.width
        starts = range(0, D, LANES)
        totals = {(head, start): k.variable(k.splat(0.0)) for head in some for start in starts}
        with k.loop(0, self._n_keys) as place:
            parts = self._rows.read(self._rows.row(self._values, place))
            for head in some:
                weight = k.splat(k.load(F32, k.at(self._line(head), place, 4)))
                for start, part in zip(starts, parts, strict=True):
                    total = totals[head, start]
                    total.set(k.fma(part, weight, total.get()))
        for (head, start), total in totals.items():
            value = k.b.fdiv(total.get(), k.splat(self._weights_sum[head]))
            k.store(value, self._out, 4 * (head * D + start))

    def _line(self, head: int) -> Value:
        k = self._k
        return k.at(self._scores, k.b.mul(k.integer("padded"), I64(head)), 4)

    def _turned(self, row: Value, start: int) -> Value:
        """Return 16 values of a head, rotated if they are to be."""
        k, part = self._k, self._k.load(_ROW, row, 4 * start)
        if start >= self._heads.n_rotated:
            return part
        angle = k.load(_ROW, k.pointer("rotation"), 4 * start)  # cosine, sine of each pair
        cosine = k.pick(angle, [lane & ~1 for lane in range(LANES)])
        sine = k.pick(angle, [lane | 1 for lane in range(LANES)])
        turned = k.b.fmul(k.pick(part, [lane ^ 1 for lane in range(LANES)]), sine)
        minus = k.pick(
            turned, [lane + LANES * (lane % 2 == 0) for lane in range(LANES)], k.b.fneg(turned)
        )
        return k.fma(part, cosine, minus)
