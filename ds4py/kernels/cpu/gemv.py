"""Products of few rows with packed weights, on the CPU.

Owns: weights as integers while they are multiplied, the largest weight of each row. Refuses to
know: layers, biases, files. Invariant: a row's result depends on the batch only by whether it is
alone in it.

Both factors become fixed-point numbers of 16 bits, so that one instruction multiplies and adds 32
of them. Weights count in steps of an 8000th of the row's largest, activations in steps of a 16383th
of the largest among 256: what bfloat16 keeps of numbers a sixth as large, so that products lose
less than in bfloat16 unless few values tower over all others. Sums of 256 products are exact in 32
bits, and are added in float32.
"""

from __future__ import annotations

from copy import copy
from functools import cache
from typing import Final

import torch

from ds4py.errors import KernelError
from ds4py.kernels.cpu.activations import CHUNK, TARGETS, Quantized
from ds4py.kernels.cpu.blocks import GROUP, LAYOUTS, BlockLayout, Factor, Parts
from ds4py.kernels.cpu.jit import F32, I8, I16, I32, I64, LANES, Code, Kernel, Value, vector
from ds4py.kernels.memory import KernelBuffer

ROWS_AT_ONCE: Final = (8, 4, 2, 1)
"""Rows of activations that share one pass over the weights."""

# The sums of a chunk stay below 2^31: each of the 16 lanes adds 16 products.
_LARGEST_WEIGHT: Final = 8000.0  # a little less than 2^13, as its parts are rounded one by one
_LARGEST_FACTOR: Final = 32000.0  # scales and minima must fit too


class PackedRows:
    """A matrix of blocks that kernels multiply.

    Args:
        raw: uint8 `[N, bytes per row]`, contiguous, on the CPU. Taken over: its binary16 factors
            become integers, in place or, of wide layouts, in a copy.
        form: Name of the format, one of `LAYOUTS`.

    Raises:
        KernelError: `raw` lies otherwise, or its rows are no whole blocks.
    """

    def __init__(self, raw: torch.Tensor, form: str):
        layout = LAYOUTS[form]
        source = KernelBuffer(raw, torch.uint8, f"blocks of {form}")
        n_rows, row_bytes = source.shape
        self._form, self._n_blocks = form, row_bytes // layout.n_bytes
        whole = (n_rows, self._n_blocks * layout.n_bytes)
        source.expect(f"blocks of {form}", whole, torch.uint8)
        self.width = self._n_blocks * layout.n_values
        kept = source
        if layout.wide is not None:
            kept = KernelBuffer.empty((n_rows, self._n_blocks * layout.kept_bytes), torch.uint8)
        self._hold(kept, KernelBuffer.empty((n_rows,)))
        _fix(form).parallel(*self._place, source.address)
        _product(form, 1, alone=True)  # compiled now, not while somebody waits for a token
        _decode(form, torch.bfloat16)

    def part(self, start: int, end: int) -> PackedRows:
        """Return some rows of the matrix; shares the memory."""
        some = copy(self)
        some._hold(self._raw.rows(start, end), self._units.rows(start, end))
        return some

    def _hold(self, raw: KernelBuffer, units: KernelBuffer) -> None:
        self._raw, self._units, self.n_rows = raw, units, raw.shape[0]
        self._place = (raw.address, self.n_rows, self._n_blocks, units.address)

    def multiply(
        self,
        x: Quantized,
        y: KernelBuffer,
        *,
        column: int = 0,
        add: bool = False,
        rows: tuple[int, int] | None = None,
    ) -> None:
        """Multiply rows of activations.

        Args:
            x: Activations `[T, K]`.
            y: float32 `[T, M]`; some `N` columns get the result.
            column: The first of them.
            add: Add it to what `y` holds.
            rows: First row of `x` and `y`, and the one behind the last; None for all.

        Raises:
            KernelError: The sizes do not fit; `y` is as before.
        """
        stride = y.shape[1]
        y.expect("result of a product", (x.n_rows, stride))
        if x.width != self.width or not 0 <= column <= stride - self.n_rows:
            raise KernelError(
                f"product with {self._form}",
                got=f"activations [{x.n_rows}, {x.width}] into {y.shape} from column {column} on",
                expected=f"[T, {self.width}] into [T, at least {column + self.n_rows}]",
            )
        done, end = rows or (0, x.n_rows)
        if not 0 <= done <= end <= x.n_rows:
            raise KernelError("rows of a product", got=rows, expected=f"inside 0 to {x.n_rows}")
        codes, scales, sums, paired = x.addresses
        out, alone = y.address + 4 * column, end - done == 1
        # one pass over the weights for as many rows as fit: they are read from memory once
        for count in ROWS_AT_ONCE:
            while end - done >= count:
                _product(self._form, count, alone=alone).parallel(
                    *self._place,
                    codes + 2 * done * x.width,
                    scales + 4 * done * x.n_chunks,
                    sums + 4 * done * (x.width // LANES),
                    paired + 2 * done * x.n_chunks * CHUNK,
                    out + 4 * done * stride,
                    stride,
                    add,
                )
                done += count

    def decode(self, start: int, end: int) -> torch.Tensor:
        """Return rows `start` to `end` as bfloat16 `[end - start, K]`."""
        return _decoded(
            self._form,
            self._raw.rows(start, end),
            self._units.rows(start, end),
            KernelBuffer.empty((end - start, self.width), torch.bfloat16),
        )

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Return some rows: int64 `[R]` to float32 `[R, K]`."""
        return _decoded(
            self._form,
            KernelBuffer(self._raw.tensor.index_select(0, index), torch.uint8, "blocks"),
            KernelBuffer(self._units.tensor.index_select(0, index), torch.float32, "steps"),
            KernelBuffer.empty((index.shape[0], self.width)),
        )


def _decoded(
    form: str, raw: KernelBuffer, units: KernelBuffer, values: KernelBuffer
) -> torch.Tensor:
    """Decode fixed rows into `values`, whose type decides how they are rounded."""
    n_rows, width = values.shape
    n_blocks = width // LAYOUTS[form].n_values
    _decode(form, values.dtype).parallel(
        raw.address, n_rows, n_blocks, units.address, values.address
    )
    return values.tensor


@cache
def _fix(form: str) -> Kernel:
    """Return the kernel that turns the factors of each row's blocks into integers."""
    layout = LAYOUTS[form]
    k = Code(f"fix {form}", ("weights", "n_out", "n_blocks", "units", "raw"))
    b, n_blocks = k.b, k.integer("n_blocks")
    # threads get multiples of 16 rows: their results then lie in cache lines of their own
    with k.loop(*k.share(k.integer("n_out"), 16)) as row:
        largest = k.variable(k.full(I32, LANES, 0))
        factor = k.variable(F32(0))
        first = b.mul(row, n_blocks)
        line = k.at(k.pointer("raw"), first, layout.n_bytes)
        with k.loop(0, n_blocks) as number:
            at = k.at(line, number, layout.n_bytes)
            for value in _exact_values(k, layout, at):
                largest.set(k.call("smax", largest.get(), k.magnitudes(value)))
            for part in layout.factors:
                size = b.fmul(k.call("fabs", _read(k, part, at)), F32(float(1 << part.n_bits)))
                factor.set(k.larger(factor.get(), size))
        most = b.bitcast(k.reduce("smax", largest.get()), F32)
        for_weights = b.fdiv(most, F32(_LARGEST_WEIGHT))
        for_factors = b.fdiv(factor.get(), F32(_LARGEST_FACTOR))
        # the coarser of both, so that neither weights nor their factors leave 16 bits; no number if
        # a weight is none
        unit = k.larger(for_factors, for_weights)
        step = b.select(b.fcmp_ordered("==", unit, F32(0)), F32(0), b.fdiv(F32(1), unit))
        k.store(unit, k.at(k.pointer("units"), row, 4))
        with k.loop(0, n_blocks) as number:
            at = k.at(line, number, layout.n_bytes)
            if layout.wide is None:
                _fix_block(k, layout, at, step)
            else:
                kept = k.at(k.pointer("weights"), b.add(first, number), layout.kept_bytes)
                _widen_block(k, layout, at, kept, step)
    return k.compiled()


def _fix_block(k: Code, layout: BlockLayout, at: Value, step: Value) -> None:
    """Write code that turns the factors of a block into integers in place."""
    for part in layout.factors:
        steps = k.b.fmul(_read(k, part, at), k.b.fmul(step, F32(float(1 << part.n_bits))))
        k.store(k.b.trunc(k.b.fptosi(k.call("rint", steps), I32), I16), at, part.at)


def _widen_block(k: Code, layout: BlockLayout, at: Value, kept: Value, step: Value) -> None:
    """Write code that multiplies the scales of a block out and copies its codes behind them."""
    assert layout.wide is not None, "the caller has looked"
    b, n = k.b, layout.n_scales
    parts = layout.take_apart(k, at)
    for number, (factor, fields) in enumerate(
        zip(layout.factors, (parts.scales, parts.minima), strict=False)
    ):
        unit = b.fmul(step, F32(float(1 << (factor.n_bits - layout.scale_bits))))
        exact = b.fmul(k.floats(fields), k.splat(b.fmul(_read(k, factor, at), unit), n))
        whole = b.fptosi(k.call("rint", exact), vector(I32, n))
        k.store(b.trunc(whole, vector(I16, n)), kept, 2 * n * number)
    start, end = layout.wide
    for offset in range(start, end, GROUP):
        copied = k.load(vector(I8, GROUP), at, offset)
        k.store(copied, kept, layout.header + offset - start)


def _read(k: Code, factor: Factor, at: Value) -> Value:
    """Write code that reads a binary16 factor of a block: float32."""
    return k.b.fmul(k.from_half(k.load(I16, at, factor.at)), F32(factor.unit))


def _exact_values(k: Code, layout: BlockLayout, at: Value) -> list[Value]:
    """Write code for a block's weights: float32 `[16]` each."""
    values = []
    parts = layout.take_apart(k, at)
    d, m = [*(_read(k, factor, at) for factor in layout.factors), None][:2]
    for group, codes in enumerate(parts.codes):
        for half in range(2):
            lanes = _lanes(group, parts)[LANES * half : LANES * (half + 1)]
            part = k.floats(k.pick(codes, range(LANES * half, LANES * (half + 1))))
            value = k.b.fmul(part, _exact_factor(k, d, parts.scales, lanes))
            if m is not None:
                value = k.b.fsub(value, _exact_factor(k, m, parts.minima, lanes))
            values.append(value)
    return values


def _exact_factor(k: Code, factor: Value, fields: Value | None, lanes: list[int]) -> Value:
    factors = k.splat(factor)
    return factors if fields is None else k.b.fmul(k.floats(k.pick(fields, lanes)), factors)


def _lanes(group: int, parts: Parts) -> list[int]:
    """Return which scale belongs to each of a group's values."""
    per_group = 1 if parts.scales is None else parts.scales.type.count // len(parts.codes)
    return [group * per_group + lane * per_group // GROUP for lane in range(GROUP)]


def _weights(k: Code, layout: BlockLayout, at: Value) -> list[Value]:
    """Write code for a fixed block's weights in steps: int16 `[32]` each."""
    parts, scales, minima = _fixed_parts(k, layout, at)
    weights = []
    for group, codes in enumerate(parts.codes):
        lanes = _lanes(group, parts)
        # codes to the top of 16 bits: the upper half of the product is then the weight, rounded
        shifted = k.b.shl(codes, k.full(I16, GROUP, 15 - layout.code_bits))
        value = k.multiply_high(shifted, k.pick(scales, lanes))
        weights.append(value if minima is None else k.b.sub(value, k.pick(minima, lanes)))
    return weights


def _fixed_parts(k: Code, layout: BlockLayout, at: Value) -> tuple[Parts, Value, Value | None]:
    """Write code for a fixed block's codes, and its scales and minima in steps: int16 `[n]`.

    Scales count `2^code_bits` times as much.
    """
    if layout.wide is not None:
        n, base = layout.n_scales, k.at(at, layout.header - layout.wide[0])
        factors = [k.load(vector(I16, n), at, 2 * n * i) for i in range(len(layout.factors))]
        return layout.take_apart(k, base), *[*factors, None][:2]
    parts = layout.take_apart(k, at)
    scales = _scaled_factor(k, layout, k.load(I16, at, layout.d_at), parts.scales)
    if layout.m_at is None:
        return parts, scales, None
    return parts, scales, _scaled_factor(k, layout, k.load(I16, at, layout.m_at), parts.minima)


def _scaled_factor(k: Code, layout: BlockLayout, factor: Value, fields: Value | None) -> Value:
    """Write code for a block's scales or minima in steps: int16 `[n]`."""
    if fields is None:
        return k.splat(factor, 1)
    n = fields.type.count
    shifted = k.b.shl(fields, k.full(I16, n, 15 - layout.scale_bits))
    return k.multiply_high(shifted, k.splat(factor, n))


@cache
def _decode(form: str, dtype: torch.dtype) -> Kernel:
    layout = LAYOUTS[form]
    size = dtype.itemsize
    k = Code(f"decode {form}", ("weights", "n_out", "n_blocks", "units", "values"))
    b, n_blocks = k.b, k.integer("n_blocks")
    with k.loop(*k.share(k.integer("n_out"), 16)) as row:
        unit = k.splat(k.load(F32, k.at(k.pointer("units"), row, 4)))
        first = b.mul(row, n_blocks)
        with k.loop(first, b.add(first, n_blocks)) as number:
            at = k.at(k.pointer("weights"), number, layout.kept_bytes)
            target = k.at(k.pointer("values"), number, size * layout.n_values)
            for group, weights in enumerate(_weights(k, layout, at)):
                for half in range(2):
                    part = k.pick(weights, range(LANES * half, LANES * (half + 1)))
                    value = b.fmul(k.floats(part), unit)
                    if dtype is torch.bfloat16:
                        value = k.to_bfloat(value)
                    k.store(value, target, size * (GROUP * group + LANES * half))
    return k.compiled()


@cache
def _product(form: str, n_rows: int, *, alone: bool) -> Kernel:
    """Return the kernel for so many rows of activations, of a batch of one or of several."""
    params = ("weights", "n_out", "n_blocks", "units", *TARGETS, "out", "stride", "add")
    k = Code(f"product {form} {n_rows}", params)
    b, n_blocks = k.b, k.integer("n_blocks")
    together = CHUNK // LAYOUTS[form].n_values  # blocks of a chunk
    whole = b.mul(b.udiv(n_blocks, I64(together)), I64(together))
    with k.loop(*k.share(k.integer("n_out"), 16)) as row:
        tile = _Tile(k, form, row, n_rows)
        # the one place where a batch of one is computed otherwise: see `_Tile.add_scaled`
        scaled = alone and LAYOUTS[form].scale_bits > 0
        with k.loop(0, whole, together) as first:
            if scaled:
                tile.add_scaled(first)
            else:
                tile.add_chunk(first, together)
        if together > 1:
            # rows need not be whole chunks: what is left is summed by a loop of its own, so that
            # the one above needs no test in it
            left = b.icmp_signed(">", n_blocks, whole)
            with k.loop(0, b.zext(left, I64)):
                tile.add_rest(whole, n_blocks)
        tile.finish()
    return k.compiled()


class _Tile:
    """Code for one row of weights and some rows of activations."""

    def __init__(self, k: Code, form: str, row: Value, n_rows: int):
        self._k, self._layout, self._row = k, LAYOUTS[form], row
        self._totals = [k.variable(k.splat(0.0)) for _ in range(n_rows)]
        n_blocks = k.integer("n_blocks")
        self._line = k.at(k.pointer("weights"), k.b.mul(row, n_blocks), self._layout.kept_bytes)

    def add_chunk(self, first: Value, n_blocks: int) -> None:
        """Add the products of a whole chunk."""
        k = self._k
        sums = [k.full(I32, LANES, 0) for _ in self._totals]
        # written out, not a loop: addresses become constants, and sums stay in registers. Weights
        # are decoded once for all rows of activations, which is what makes few rows nearly free
        for number in range(n_blocks):
            block = k.b.add(first, I64(number))
            for group, weights in enumerate(self._weights(block)):
                for row, total in enumerate(sums):
                    dots = k.dot_pairs(weights, self._x(row, block, group))
                    sums[row] = k.b.add(total, dots)
        self._conclude(first, sums)

    def add_scaled(self, block: Value) -> None:
        """Add the products of a block, for one row of activations.

        Multiplies the sums of each scale's products instead of its weights, which costs less for
        one row, but more for each further one.
        """
        k, b = self._k, self._k.b
        parts, scales, minima = self._factors(block)
        dots = self._paired_dots(block) if self._layout.paired else self._plain_dots(block, parts)
        sums = [k.splat(0.0), k.splat(0.0)]  # two, or each addition would wait for the one before
        for number, (lanes, products) in enumerate(dots):
            own = k.fma(k.floats(products), k.pick(scales, lanes), sums[number % 2])
            sums[number % 2] = own
        total = b.fadd(*sums)
        if minima is not None:
            # sum of (code * scale - minimum) * x = sum of code * scale * x - minimum * sum of x:
            # the sums of 16 activations were made when they were rounded
            n = minima.type.count
            spread = k.pick(minima, [lane * n // LANES for lane in range(LANES)])
            x_sums = k.load(vector(F32, LANES), k.at(k.pointer("sums"), block, 4 * LANES))
            total = b.fsub(total, b.fmul(spread, x_sums))
        scale = k.splat(k.load(F32, k.at(k.pointer("scales"), block, 4)))
        self._totals[0].set(k.fma(total, scale, self._totals[0].get()))

    def _factors(self, block: Value) -> tuple[Parts, Value, Value | None]:
        """Return a block's codes, and its scales and minima in steps: float32 `[n]`."""
        k, b, layout, at = self._k, self._k.b, self._layout, self._block(block)
        if layout.wide is not None:
            parts, *wide = _fixed_parts(k, layout, at)
            scales = b.fmul(k.floats(wide[0]), k.splat(0.5**layout.code_bits, layout.n_scales))
            return parts, scales, None if wide[1] is None else k.floats(wide[1])
        parts = layout.take_apart(k, at)
        found: list[Value | None] = [None, None]
        pairs = zip(layout.factors, (parts.scales, parts.minima), strict=False)
        for number, (factor, fields) in enumerate(pairs):
            assert fields is not None, "the caller has looked"
            steps = b.sitofp(k.load(I16, at, factor.at), F32)
            unit = k.splat(b.fmul(steps, F32(0.5**factor.n_bits)), fields.type.count)
            found[number] = b.fmul(k.floats(fields), unit)
        return parts, found[0], found[1]

    def _plain_dots(self, block: Value, parts: Parts) -> list[tuple[list[int], Value]]:
        """Return sums of products of codes, int32 `[16]`, with the scale of each of them."""
        return [  # neighbours are added, so every second lane tells the scale
            (_lanes(group, parts)[::2], self._k.dot_pairs(codes, self._x(0, block, group)))
            for group, codes in enumerate(parts.codes)
        ]

    def _paired_dots(self, block: Value) -> list[tuple[list[int], Value]]:
        """Return the same of nibbles, taken out of pairs of bytes without widening them.

        Bytes 64 j to 64 j + 63 of the codes hold groups 4 j to 4 j + 3: the low nibbles of the
        first 32 bytes are group 4 j, the high ones 4 j + 1, those of the others 4 j + 2 and
        4 j + 3. As 32 numbers of 16 bits they give four vectors of codes: of even bytes low and
        high, of odd bytes low and high, each of two groups. Activations stand in the same order.
        """
        k, b, found = self._k, self._k.b, []
        at, mask = self._block(block), k.full(I16, GROUP, 15)
        x = k.at(k.pointer("paired"), block, 2 * CHUNK)
        for half in range(2):
            pairs = k.load(vector(I16, GROUP), at, self._layout.header + 64 * half)
            nibbles = [b.lshr(pairs, k.full(I16, GROUP, bit)) for bit in (0, 8, 4, 12)]
            for high in range(2):
                even, odd = (
                    k.dot_pairs(b.and_(codes, mask), k.load(vector(I16, GROUP), x, 64 * place))
                    for place, codes in enumerate(
                        nibbles[2 * high : 2 * high + 2], 4 * half + 2 * high
                    )
                )
                group = 4 * half + high
                found.append(([group] * 8 + [group + 2] * 8, b.add(even, odd)))
        return found

    def add_rest(self, first: Value, end: Value) -> None:
        """Add the products of the blocks after the last whole chunk."""
        zero = self._k.full(I32, LANES, 0)
        sums = [self._k.variable(zero) for _ in self._totals]
        with self._k.loop(first, end) as block:
            for group, weights in enumerate(self._weights(block)):
                for row, total in enumerate(sums):
                    dots = self._k.dot_pairs(weights, self._x(row, block, group))
                    total.set(self._k.b.add(total.get(), dots))
        self._conclude(first, [total.get() for total in sums])

    def finish(self) -> None:
        """Store the sums."""
        k, b = self._k, self._k.b
        unit = k.load(F32, k.at(k.pointer("units"), self._row, 4))
        for row, total in enumerate(self._totals):
            place = b.add(b.mul(k.integer("stride"), I64(row)), self._row)
            target = k.at(k.pointer("out"), place, 4)
            # a select, not a branch: what a result held may be no number, and must not be added
            adds = b.icmp_signed("!=", k.integer("add"), I64(0))
            before = b.select(adds, k.load(F32, target), F32(0))
            k.store(b.fadd(before, b.fmul(k.total(total.get()), unit)), target)

    def _weights(self, block: Value) -> list[Value]:
        return _weights(self._k, self._layout, self._block(block))

    def _block(self, number: Value) -> Value:
        return self._k.at(self._line, number, self._layout.kept_bytes)

    def _x(self, row: int, block: Value, group: int) -> Value:
        """Return activations: int16 `[32]`."""
        k, n_values = self._k, self._layout.n_values
        index = k.b.add(k.b.mul(k.integer("n_blocks"), I64(row)), block)
        at = k.at(k.pointer("codes"), index, 2 * n_values)
        return k.load(vector(I16, GROUP), at, 2 * GROUP * group)

    def _conclude(self, first: Value, sums: list[Value]) -> None:
        """Add a chunk's sums, times the scale of the activations."""
        k, b, blocks = self._k, self._k.b, I64(CHUNK // self._layout.n_values)
        n_chunks = b.udiv(b.add(k.integer("n_blocks"), b.sub(blocks, I64(1))), blocks)
        for row, total in enumerate(self._totals):
            index = b.add(b.mul(n_chunks, I64(row)), b.udiv(first, blocks))
            scale = k.splat(k.load(F32, k.at(k.pointer("scales"), index, 4)))
            total.set(k.fma(k.floats(sums[row]), scale, total.get()))
