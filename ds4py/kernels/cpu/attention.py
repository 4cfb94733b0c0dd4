"""Attention of one token of one session on the CPU: norm, rotation, caching, softmax, in one pass.

Owns: the kernel, compiled for the sizes and rules of one attention, and the checks of what goes to
it. Refuses to know: weights' names, layers, sessions. Invariant: float32 inside; the same formulas
as `layers.attention`, `layers.rope` and `layers.norm`, which are its reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from ds4py.errors import KernelError
from ds4py.kernels.cache import block_size
from ds4py.kernels.cpu.cache_rows import PARAMS, CacheRows, cache_rows
from ds4py.kernels.cpu.fused import exponential
from ds4py.kernels.cpu.jit import F32, I32, I64, LANES, Code, Kernel, Value, vector
from ds4py.kernels.memory import KernelBuffer

_ROW: Final = vector(F32, LANES)

CACHE_TYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
"""Types of caches that a kernel reads and writes; int8 are codes with scales."""


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """An attention, as its kernel is compiled for it.

    Args:
        n_groups: Key/value heads.
        per_group: Query heads of each.
        width: Values of a head, a multiple of 16.
        n_rotated: Leading values of a head that are rotated, a multiple of 16.
        norm_eps: Epsilon of the RMS norm of every query and key head; None for no norm.
        scale: Factor on scores; 0 means `1 / sqrt(width)`.
        window: Keys that a token sees, its own among them; 0 means all.
        soft_cap: Scores `s` become `cap * tanh(s / cap)`; 0 means they stay.
        sinks: Whether each head has one more score, without a value.
    """

    n_groups: int
    per_group: int
    width: int
    n_rotated: int
    norm_eps: float | None = None
    scale: float = 0.0
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False

    @property
    def fits(self) -> bool:
        """Whether kernels can do it."""
        return self.width % LANES == 0 and self.n_rotated % LANES == 0

    @property
    def n_queries(self) -> int:
        """Values of one token's queries, and of what they attend to."""
        return self.n_groups * self.per_group * self.width


class HeadWeights:
    """What an attention has besides its sizes; None where `AttentionHeads` says that there is none.

    Args:
        q_norm: Weight of the norm of query heads, float32 `[D]`.
        k_norm: Of key heads.
        sinks: float32 `[H]`.

    Attributes:
        addresses: Where they are, in this order; 0 where there is none.
    """

    def __init__(
        self,
        q_norm: KernelBuffer | None = None,
        k_norm: KernelBuffer | None = None,
        sinks: KernelBuffer | None = None,
    ):
        self._parts = q_norm, k_norm, sinks
        self.addresses = tuple(0 if part is None else part.address for part in self._parts)

    def check(self, heads: AttentionHeads) -> None:
        """Check that all that such heads need is there.

        Raises:
            KernelError: Something is missing or of another size.
        """
        q_norm, k_norm, sinks = self._parts
        if heads.norm_eps is not None:
            _expect(q_norm, "norm of queries", heads.width)
            _expect(k_norm, "norm of keys", heads.width)
        if heads.sinks:
            _expect(sinks, "sinks", heads.n_groups * heads.per_group)


def _expect(held: KernelBuffer | None, name: str, size: int) -> None:
    if held is None:
        raise KernelError(name, got="nothing", expected=f"torch.float32 of shape ({size},)")
    held.expect(name, (size,))


NO_WEIGHTS: Final = HeadWeights()


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
    heads: AttentionHeads,
    qkv: KernelBuffer,
    row: int,
    position: CachedPosition,
    out: KernelBuffer,
    weights: HeadWeights = NO_WEIGHTS,
) -> None:
    """Attend from one token of one session, whose keys and values are cached first.

    Args:
        heads: Sizes.
        qkv: float32 `[T, (G P + 2 G) D]`; the token's row is overwritten.
        row: Of the token, in `qkv` and in `out`.
        position: Where its session is.
        out: float32 `[T, G P D]`; the token's row gets the result.
        weights: Of norms and sinks, where the heads have such.

    Raises:
        KernelError: The sizes do not fit; nothing was written.
    """
    n_rows, n_queries = qkv.shape[0], heads.n_queries
    qkv.expect("queries, keys, values", (n_rows, n_queries + 2 * heads.n_groups * heads.width))
    out.expect("result of an attention", (n_rows, n_queries))
    if not 0 <= row < n_rows:
        raise KernelError("row of a token", got=row, expected=f"0 to {n_rows - 1}")
    position.check(heads)
    weights.check(heads)
    padded = -(-(position.position + 1) // LANES) * LANES
    scores = KernelBuffer.empty((heads.n_groups * heads.per_group, padded))
    attention_kernel(heads, position.cache.dtype).parallel(
        qkv.address + row * qkv.row_bytes,
        position.rotation.address,
        *weights.addresses,
        position.cache.address,
        0 if position.scales is None else position.scales.address,
        position.cache.shape[1],
        position.position,
        padded,
        scores.address,
        out.address + row * out.row_bytes,
    )


@cache
def attention_kernel(heads: AttentionHeads, dtype: torch.dtype = torch.bfloat16) -> Kernel:
    """Compile the kernel of an attention and a type of caches.

    Threads share the groups: a group's query heads read the same keys, so a row is loaded and
    widened once for all of them.
    """
    weights = ("q_norm", "k_norm", "sinks")
    params = ("qkv", "rotation", *weights, *PARAMS, "position", "padded", "scores", "out")
    k = Code("attend", params)
    rows = cache_rows(k, heads.width, dtype)
    with k.loop(*k.share(I64(heads.n_groups))) as group:
        work = _Attention(k, heads, rows, group)
        work.cache_row()
        work.rotate_queries()
        work.score()
        for head in range(heads.per_group):
            work.softmax(head)
        # as many running sums as 16 vectors hold, which are the registers that every target has
        tile = max(1, LANES * LANES // heads.width)
        for first in range(0, heads.per_group, tile):
            work.weighted_sum(range(first, min(first + tile, heads.per_group)))
    return k.compiled()


class _Attention:
    """Code for the heads of one group."""

    def __init__(self, k: Code, heads: AttentionHeads, rows: CacheRows, group: Value):
        self._k, self._heads, self._rows = k, heads, rows
        self._starts = range(0, heads.width, LANES)
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
        self._first = self._start = I64(0)
        if heads.window:
            oldest = b.sub(self._n_keys, I64(heads.window))
            self._first = b.select(b.icmp_signed(">", oldest, I64(0)), oldest, I64(0))
            # vectors of scores begin at multiples of 16; what lies before the window counts as none
            self._start = b.and_(self._first, I64(-LANES))
        self._sink = None
        if heads.sinks:
            self._sink = k.at(k.pointer("sinks"), own, 4)
        self._weights_sum: dict[int, Value] = {}

    def cache_row(self) -> None:
        """Store the token's own key and value."""
        k, place = self._k, self._k.integer("position")
        key = self._turned(self._normed(self._key, "k_norm"))
        self._rows.write(self._rows.row(self._keys, place), key)
        value = [k.load(_ROW, self._value, 4 * start) for start in self._starts]
        self._rows.write(self._rows.row(self._values, place), value)

    def rotate_queries(self) -> None:
        """Norm, rotate and scale the queries in place."""
        k, D = self._k, self._heads.width
        scale = k.splat(self._heads.scale or 1 / math.sqrt(D))
        for head in range(self._heads.per_group):
            query = k.at(self._queries, head, 4 * D)
            parts = self._turned(self._normed(query, "q_norm"))
            for start, part in zip(self._starts, parts, strict=True):
                k.store(k.b.fmul(part, scale), query, 4 * start)

    def score(self) -> None:
        """Multiply all queries with all keys that they see."""
        k, D = self._k, self._heads.width
        with k.loop(self._first, self._n_keys) as place:
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
        if self._heads.soft_cap:
            self._cap(line)  # before the padding, whose infinities would become finite
        unseen = [(self._n_keys, padded)]
        if self._heads.window:
            unseen.append((self._start, self._first))
        for first, end in unseen:
            with k.loop(first, end) as place:
                k.store(F32(-math.inf), k.at(line, place, 4))
        lowest = k.splat(-math.inf)
        if self._sink is not None:
            lowest = k.splat(k.load(F32, self._sink, 4 * head))
        largest = k.variable(lowest)
        with k.loop(self._start, padded, LANES) as place:
            largest.set(k.larger(largest.get(), k.load(_ROW, k.at(line, place, 4))))
        most, total = k.splat(k.reduce("fmax", largest.get())), k.variable(k.splat(0.0))
        with k.loop(self._start, padded, LANES) as place:
            at = k.at(line, place, 4)
            weight = exponential(k, b.fsub(k.load(_ROW, at), most))
            # the exponential of what is not there is tiny, not 0
            beyond = k.b.fcmp_ordered("==", k.load(_ROW, at), k.splat(-math.inf))
            weight = b.select(beyond, k.splat(0.0), weight)
            k.store(weight, at)
            total.set(b.fadd(total.get(), weight))
        whole = k.total(total.get())
        if self._sink is not None:
            share = exponential(k, b.fsub(lowest, most))
            whole = b.fadd(whole, b.extract_element(share, I32(0)))
        self._weights_sum[head] = whole

    def weighted_sum(self, some: range) -> None:
        """Add up the values, for some heads at a time."""
        k, D = self._k, self._heads.width
        totals = {
            (head, start): k.variable(k.splat(0.0)) for head in some for start in self._starts
        }
        with k.loop(self._first, self._n_keys) as place:
            parts = self._rows.read(self._rows.row(self._values, place))
            for head in some:
                weight = k.splat(k.load(F32, k.at(self._line(head), place, 4)))
                for start, part in zip(self._starts, parts, strict=True):
                    total = totals[head, start]
                    total.set(k.fma(part, weight, total.get()))
        for (head, start), total in totals.items():
            value = k.b.fdiv(total.get(), k.splat(self._weights_sum[head]))
            k.store(value, self._out, 4 * (head * D + start))

    def _line(self, head: int) -> Value:
        k = self._k
        return k.at(self._scores, k.b.mul(k.integer("padded"), I64(head)), 4)

    def _cap(self, line: Value) -> None:
        """Cap a line of scores: `tanh(x)` is `1 - 2 / (exp(2 x) + 1)`."""
        k, b, cap = self._k, self._k.b, self._heads.soft_cap
        with k.loop(self._start, k.integer("padded"), LANES) as place:
            at = k.at(line, place, 4)
            power = exponential(k, b.fmul(k.load(_ROW, at), k.splat(2 / cap)))
            below = b.fdiv(k.splat(2.0), b.fadd(power, k.splat(1.0)))
            k.store(b.fmul(b.fsub(k.splat(1.0), below), k.splat(cap)), at)

    def _normed(self, row: Value, weight: str) -> list[Value]:
        """Return a head, 16 values each, normed if it is to be; see `layers.norm.RmsNorm`."""
        k, b, eps = self._k, self._k.b, self._heads.norm_eps
        parts = [k.load(_ROW, row, 4 * start) for start in self._starts]
        if eps is None:
            return parts
        squares = k.splat(0.0)
        for part in parts:
            squares = k.fma(part, part, squares)
        mean = b.fdiv(k.total(squares), F32(self._heads.width))
        length = k.call("sqrt", b.fadd(mean, F32(eps)))
        scale = k.splat(b.fdiv(F32(1), length))
        factors = [k.load(_ROW, k.pointer(weight), 4 * start) for start in self._starts]
        pairs = zip(parts, factors, strict=True)
        return [b.fmul(b.fmul(part, factor), scale) for part, factor in pairs]

    def _turned(self, parts: Sequence[Value]) -> list[Value]:
        """Rotate the leading values of a head."""
        pairs = zip(self._starts, parts, strict=True)
        return [
            self._turn(part, start) if start < self._heads.n_rotated else part
            for start, part in pairs
        ]

    def _turn(self, part: Value, start: int) -> Value:
        """Rotate 16 values, pairs of neighbours."""
        k = self._k
        angle = k.load(_ROW, k.pointer("rotation"), 4 * start)  # cosine, sine of each pair
        cosine = k.pick(angle, [lane & ~1 for lane in range(LANES)])
        sine = k.pick(angle, [lane | 1 for lane in range(LANES)])
        # the other value of each pair times the sine: subtracted from the first, else added
        turned = k.b.fmul(k.pick(part, [lane ^ 1 for lane in range(LANES)]), sine)
        minus = k.pick(
            turned, [lane + LANES * (lane % 2 == 0) for lane in range(LANES)], k.b.fneg(turned)
        )
        return k.fma(part, cosine, minus)
