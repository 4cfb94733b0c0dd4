# mypy: ignore-errors
# ruff: noqa: D417, PLR0913, PLR0917
"""The Triton kernels over packed rows: products with few and with many tokens, and a decoder.

Owns: the split of work into programs, addresses, accumulation in float32. Refuses to know: what the
bits of a block mean (`blocks.py`), who launches. Invariant: no kernel waits for the host, uses
atomics or reads outside a row's blocks; a sum's order depends on the launch geometry alone.

Arguments that all kernels share: `raw`, packed rows, uint8; `table`, the codebook of a format that
has one; `n_parts`, parts of a row; `TILE`, parts that a program's threads take at once; `FORMAT`,
GGML's name; the other upper-case ones are the fields of `layouts.Layout`.

Upper-case arguments are known at compile time; a number of tokens must not be, or each would be
compiled again. A kernel's arguments are what its launch sends to the device, hence so many. Bodies
are Triton's language and not Python: mypy has no say here.
"""

import triton
import triton.language as tl

from ds4py.kernels.cuda.blocks import plane_of


@triton.jit(do_not_specialize_on_alignment=["n_tokens"])
def gemv(
    x,
    raw,
    experts,
    table,
    y,
    n_tokens,
    n_rows,
    n_parts,
    FORMAT: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """Multiply one packed row with up to four tokens.

    The program's threads stand side by side along the row, so its bytes are read in order. Programs
    of one row and neighbouring tokens follow each other, so that all but the first find the row in
    the cache.

    Args:
        x: Tokens `[n_tokens, K]`.
        experts: Matrix of each token, if GROUPED: each has `n_rows` rows in `raw`.
        y: Results `[n_tokens, n_rows]`.
        TOKENS: Tokens of a program: 1, 2 or 4; 1 if GROUPED.
        GROUPED: Whether every token has its own matrix.
    """
    tiles = (n_tokens + TOKENS - 1) // TOKENS
    token = tl.program_id(0) % tiles * TOKENS
    row = tl.program_id(0) // tiles
    packed_row = row.to(tl.int64)
    if GROUPED:
        packed_row += tl.load(experts + token).to(tl.int64) * n_rows
    raw += packed_row * (n_parts // PARTS) * BLOCK_BYTES
    x0 = _row(x, token, n_tokens, n_parts * (LANES * PLANES))
    x1 = _row(x, token + 1, n_tokens, n_parts * (LANES * PLANES))
    x2 = _row(x, token + 2, n_tokens, n_parts * (LANES * PLANES))
    x3 = _row(x, token + 3, n_tokens, n_parts * (LANES * PLANES))
    part = tl.arange(0, TILE)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    # one sum for each place in the tile, joined at the end: the order follows from TILE alone
    y0 = tl.zeros([TILE, LANES], tl.float32)
    y1, y2, y3 = y0, y0, y0
    for first in range(0, n_parts, TILE):
        inside = part < n_parts - first
        block = raw + part // PARTS * BLOCK_BYTES
        column = first * (LANES * PLANES) + _column(part, lane, LANES, PLANES, WIDTH)
        for plane in tl.static_range(PLANES):
            codes, scale, offset = plane_of(block, part % PARTS, lane, inside, table, FORMAT, plane)
            weights = tl.fma(codes, scale, offset)  # once for all tokens of the program
            own = column + plane * WIDTH
            y0 += weights * _values(x0 + own, inside)
            if TOKENS > 1:
                y1 += weights * _values(x1 + own, inside)
            if TOKENS > 2:
                y2 += weights * _values(x2 + own, inside)
                y3 += weights * _values(x3 + own, inside)
        raw += TILE // PARTS * BLOCK_BYTES  # cheaper than to find a part's block again
    y += token.to(tl.int64) * n_rows + row
    tl.store(y, tl.sum(y0))
    if TOKENS > 1:
        tl.store(y + n_rows, tl.sum(y1), mask=token + 1 < n_tokens)
    if TOKENS > 2:
        tl.store(y + 2 * n_rows, tl.sum(y2), mask=token + 2 < n_tokens)
        tl.store(y + 3 * n_rows, tl.sum(y3), mask=token + 3 < n_tokens)


@triton.jit
def _row(x, token, n_tokens, n_columns):
    """Return a token's address, or the last token's where there are no more."""
    return x + tl.minimum(token, n_tokens - 1).to(tl.int64) * n_columns


@triton.jit(do_not_specialize=["n_tokens"])
def gemm(
    x,
    raw,
    table,
    y,
    n_tokens,
    n_rows,
    n_parts,
    FORMAT: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Multiply packed rows with many tokens; weights are rounded to the tokens' type.

    The matrix units want weights as their longer side: few tokens fill a tile of 16. A plane is
    multiplied on its own, as the order of columns does not matter to a sum.

    Args:
        x: Tokens `[n_tokens, K]`.
        y: Results `[n_tokens, n_rows]`.
        TOKENS: Tokens of a program, a power of two from 16 on.
        ROWS: Rows of a program, a power of two from 16 on.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # rows and tokens behind the last ones are computed from the last ones, or from zeros, and not
    # stored: a tile of the matrix units has a fixed size, and masks on packed bytes cost more
    packed_row = tl.minimum(row, n_rows - 1).to(tl.int64)
    start = raw + packed_row[:, None, None] * (n_parts // PARTS) * BLOCK_BYTES
    tokens = x + token[None, :].to(tl.int64) * n_parts * (LANES * PLANES)
    lane = tl.arange(0, LANES)[None, None, :]
    flat = tl.arange(0, TILE * LANES)[:, None]
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    for first in range(0, n_parts, TILE):
        part = first + tl.arange(0, TILE)[None, :, None]
        block = start + part // PARTS * BLOCK_BYTES
        own = first + flat // LANES
        column = _column(own, flat % LANES, LANES, PLANES, WIDTH)
        there = (own < n_parts) & (token[None, :] < n_tokens)
        for plane in tl.static_range(PLANES):
            codes, scale, offset = plane_of(
                block, part % PARTS, lane, part < n_parts, table, FORMAT, plane
            )
            # a weight behind a row's end times a value that is 0: `there` masks the other side
            weights = tl.reshape(tl.fma(codes, scale, offset), (ROWS, TILE * LANES))
            values = tl.load(tokens + column + plane * WIDTH, mask=there, other=0.0)
            sums = tl.dot(weights.to(values.dtype), values, sums, input_precision="ieee")
    y += token[None, :].to(tl.int64) * n_rows + row[:, None]
    tl.store(y, sums, mask=(row[:, None] < n_rows) & (token[None, :] < n_tokens))


@triton.jit
def decode(
    raw,
    index,
    table,
    y,
    n_parts,
    FORMAT: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Decode one piece of one row.

    Args:
        index: Number in `raw` of each result row, if CHOSEN; otherwise they are in order.
        y: Values `[rows, K]`, rounded to their type.
        CHOSEN: Whether `index` is used.
    """
    pieces = (n_parts + TILE - 1) // TILE
    row = tl.program_id(0) // pieces
    packed_row = row.to(tl.int64)
    y += packed_row * n_parts * (LANES * PLANES)
    if CHOSEN:
        packed_row = tl.load(index + row).to(tl.int64)
    part = tl.program_id(0) % pieces * TILE + tl.arange(0, TILE)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    block = raw + (packed_row * (n_parts // PARTS) + part // PARTS) * BLOCK_BYTES
    inside = part < n_parts
    column = _column(part, lane, LANES, PLANES, WIDTH)
    for plane in tl.static_range(PLANES):
        codes, scale, offset = plane_of(block, part % PARTS, lane, inside, table, FORMAT, plane)
        values = tl.fma(codes, scale, offset)
        tl.store(y + column + plane * WIDTH, values, mask=inside)


@triton.jit
def _column(part, lane, LANES: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr):
    """Return the columns of the first plane; see `layouts`."""
    sides: tl.constexpr = WIDTH // LANES
    return part // sides * (WIDTH * PLANES) + part % sides * LANES + lane


@triton.jit
def _values(x, inside):
    return tl.load(x, mask=inside, other=0.0).to(tl.float32)
