"""Attention of one token in each of several sessions, every session's keys split over programs.

Owns: the split, and how parts of a softmax are put together. Refuses to know: rotations, layers.
Invariant: a session's result depends neither on the other sessions nor on how many there are: the
number of splits follows from the cache's shape alone.

Each part keeps its largest score and the sum of its exponentials, so that parts join exactly as in
a softmax that is computed block by block (Dao et al., FlashAttention; its decoding form splits the
keys). One load of a row serves all query heads of its group.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from ds4py.kernels.cache import CacheTensor
from ds4py.kernels.cuda.decode_step import check_step
from ds4py.kernels.cuda.element_types import kind_of
from ds4py.kernels.memory import KernelBuffer
from ds4py.kernels.scores import PLAIN, ScoreRules

KEYS_PER_BLOCK: Final = 64
"""Keys of one product; half as many in float32, so that they fit the memory of small GPUs."""

PROGRAMS_OF_ONE_SESSION: Final = 256
"""About two for each multiprocessor of a large GPU, so that one session alone uses all of it."""

_FEWEST_ROWS: Final = 16  # of a matrix product
_LOG2_E: Final = math.log2(math.e)


def attend_sessions(
    q: torch.Tensor,
    addresses: torch.Tensor,
    positions: torch.Tensor,
    cache: CacheTensor,
    rules: ScoreRules = PLAIN,
) -> torch.Tensor:
    """Attend from one token of each session to the rows up to its own.

    Args:
        q: float32 `[B, G, H / G, D]`; the last three axes contiguous.
        addresses: Where each session's cache begins, int64 `[B]`, on the device.
        positions: Positions of the tokens, int64 `[B]`, on the device; their rows are written.
        cache: Form of a session's cache, `[2 G, C, D]`, contiguous: key heads, then value heads.
        rules: What becomes of scores.

    Returns:
        `[B, H * D]` in the cache's type.

    Raises:
        KernelError: A tensor is of another type or size, elsewhere, or lies otherwise.
    """
    B, n_groups, per_group, D = q.shape
    planes, capacity, width = cache.shape
    row = (planes // 2, per_group, width)
    check_step(q, addresses, positions, row, rows_apart=True)
    n_heads = n_groups * per_group
    if rules.sinks is not None:
        KernelBuffer(rules.sinks, torch.float32, "sinks", q.device).expect("sinks", (n_heads,))
    # a window has no more rows to share among programs than it is wide
    n_splits = splits(n_groups, min(capacity, rules.window or capacity))
    parts = q.new_empty((B, n_heads, n_splits, D))
    weights = q.new_empty((B, n_heads, n_splits, 2))
    out = torch.empty((B, n_heads * D), dtype=cache.dtype, device=q.device)
    wide = triton.next_power_of_2(D)
    exact = cache.dtype is torch.float32
    _attend_split[(B, n_groups, n_splits)](
        q,
        addresses,
        positions,
        parts,
        weights,
        q.stride(0),
        capacity * D,
        (rules.scale or 1 / math.sqrt(D)) * (1.0 if rules.soft_cap else _LOG2_E),
        WINDOW=rules.window,
        CAP=rules.soft_cap,
        N_SPLITS=n_splits,
        PER_GROUP=per_group,
        ROWS=max(triton.next_power_of_2(per_group), _FEWEST_ROWS),
        D=D,
        WIDE=wide,
        KEYS=KEYS_PER_BLOCK // 2 if exact else KEYS_PER_BLOCK,
        KIND=kind_of(cache.dtype),
        # bfloat16 rows are exact in the shorter format, whose products are the quick ones
        PRECISION="ieee" if exact else "tf32",
        enable_fp_fusion=True,
    )
    _join(parts, weights, rules.sinks, out)
    return out


def _join(
    parts: torch.Tensor, weights: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Put the parts `[B, H, splits, D]` of all softmaxes together, into `[B, H * D]`."""
    B, n_heads, n_splits, D = parts.shape
    _join_splits[(B, n_heads)](
        parts,
        weights,
        weights if sinks is None else sinks,  # without sinks not looked at
        out,
        SINKS=sinks is not None,
        N_SPLITS=n_splits,
        D=D,
        WIDE=triton.next_power_of_2(D),
        num_warps=2,
        enable_fp_fusion=True,
    )


def splits(n_groups: int, capacity: int) -> int:
    """Return over how many programs the keys of one group and session are split: a power of two."""
    wanted = max(PROGRAMS_OF_ONE_SESSION // n_groups, 1)
    useful = max(capacity // KEYS_PER_BLOCK, 1)
    return 1 << (min(wanted, useful).bit_length() - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_split(  # noqa: PLR0913, PLR0915, PLR0917
    q: tl.tensor,
    addresses: tl.tensor,
    positions: tl.tensor,
    parts: tl.tensor,
    weights: tl.tensor,
    q_stride: tl.tensor,
    head_stride: tl.tensor,
    scale: tl.tensor,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    N_SPLITS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    KEYS: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Attend from one group's heads to one split of one session's rows."""
    session, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n_groups = tl.num_programs(1)
    n_keys = (tl.load(positions + session) + 1).to(tl.int32)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(n_keys - WINDOW, 0)
    # whole blocks for each program but the last ones, which may get none: their sum stays 0
    length = tl.cdiv(tl.cdiv(n_keys - oldest, KEYS), N_SPLITS) * KEYS
    first = oldest + split * length
    end = tl.minimum(first + length, n_keys)
    head, column = tl.arange(0, ROWS), tl.arange(0, WIDE)
    # the matrix units take at least 16 rows, and widths that are powers of two: what is padded is
    # read as 0, adds nothing to a score, and is not stored
    is_head, is_column = head < PER_GROUP, column < D
    own = is_head[:, None] & is_column[None, :]
    rows = tl.load(addresses + session).to(tl.pointer_type(KIND))
    rows = tl.multiple_of(rows, 16)  # memory begins at such addresses; allows wide loads
    keys = rows + group.to(tl.int64) * head_stride
    values = keys + n_groups.to(tl.int64) * head_stride
    at = session.to(tl.int64) * q_stride + (group * PER_GROUP + head[:, None]) * D
    query = tl.load(q + at + column[None, :], own, other=0.0) * scale
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDE), tl.float32)
    for start in range(first, end, KEYS):
        key = start + tl.arange(0, KEYS)
        seen = key < end
        row = key.to(tl.int64)[:, None] * D + column[None, :]
        there = seen[:, None] & is_column[None, :]
        k = tl.load(keys + row, there, other=0.0).to(tl.float32)
        score = tl.dot(query, tl.trans(k), input_precision=PRECISION)
        if CAP > 0:  # tanh(x) = 1 - 2 / (exp(2 x) + 1); then to the base of the exponentials
            power = tl.exp2(score * (2 * 1.4426950408889634 / CAP))
            score = (1 - 2 / (power + 1)) * (CAP * 1.4426950408889634)
        score = tl.where(seen[None, :], score, -float("inf"))
        # the running softmax: what was summed up so far shrinks when a larger score comes; a block
        # has at least one key that is seen, so `highest` is a number
        highest = tl.maximum(largest, tl.max(score, 1))
        weight = tl.exp2(score - highest[:, None])
        kept = tl.exp2(largest - highest)
        v = tl.load(values + row, there, other=0.0).to(tl.float32)
        mixed = mixed * kept[:, None] + tl.dot(weight, v, input_precision=PRECISION)
        total = total * kept + tl.sum(weight, 1)
        largest = highest
    n_heads = n_groups * PER_GROUP
    place = ((session * n_heads + group * PER_GROUP + head) * N_SPLITS + split).to(tl.int64)
    tl.store(parts + place[:, None] * D + column[None, :], mixed, own)
    tl.store(weights + place * 2, largest, is_head)
    tl.store(weights + place * 2 + 1, total, is_head)


@triton.jit  # type: ignore[untyped-decorator]
def _join_splits(  # noqa: PLR0913, PLR0917
    parts: tl.tensor,
    weights: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    SINKS: tl.constexpr,
    N_SPLITS: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Put the parts of one session's head together; a split without keys has no weight."""
    session, head = tl.program_id(0), tl.program_id(1)
    place = session * tl.num_programs(1) + head
    split, column = tl.arange(0, N_SPLITS), tl.arange(0, WIDE)
    row = place.to(tl.int64) * N_SPLITS + split
    largest = tl.load(weights + row * 2)
    highest = tl.max(largest, 0)
    share = tl.exp2(largest - highest)
    total = tl.sum(share * tl.load(weights + row * 2 + 1), 0)
    if SINKS:  # relative to the largest score of a key, which is there: a token sees itself
        total += tl.exp2(tl.load(sinks + head) * 1.4426950408889634 - highest)
    is_column = column < D
    part = tl.load(parts + row[:, None] * D + column[None, :], is_column[None, :], other=0.0)
    mixed = tl.sum(part * share[:, None], 0) / total
    tl.store(out + place.to(tl.int64) * D + column, mixed.to(out.dtype.element_ty), is_column)
