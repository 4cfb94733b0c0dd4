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

KEYS_PER_BLOCK: Final = 64
"""Keys of one product; half as many in float32, so that they fit the memory of small GPUs."""

PROGRAMS_OF_ONE_SESSION: Final = 256
"""About two for each multiprocessor of a large GPU, so that one session alone uses all of it."""

_FEWEST_ROWS: Final = 16  # of a matrix product
_LOG2_E: Final = math.log2(math.e)


def attend_sessions(
    q: torch.Tensor, addresses: torch.Tensor, positions: torch.Tensor, cache: CacheTensor
) -> torch.Tensor:
    """Attend from one token of each session to all rows up to its own.

    Args:
        q: float32 `[B, G, H / G, D]`; the last three axes contiguous.
        addresses: Where each session's cache begins, int64 `[B]`, on the device.
        positions: Positions of the tokens, int64 `[B]`, on the device; their rows are written.
        cache: Form of a session's cache, `[2 G, C, D]`, contiguous: key heads, then value heads.

    Returns:
        `[B, H * D]` in the cache's type.

    Raises:
        KernelError: A tensor is of another type or size, elsewhere, or lies otherwise.
    """
    B, n_groups, per_group, D = q.shape
    planes, capacity, width = cache.shape
    row = (planes // 2, per_group, width)
    check_step(q, addresses, positions, row, rows_apart=True)
    n_splits = splits(n_groups, capacity)
    parts = q.new_empty((B, n_groups * per_group, n_splits, D))
    weights = q.new_empty((B, n_groups * per_group, n_splits, 2))
    out = torch.empty((B, n_groups * per_group * D), dtype=cache.dtype, device=q.device)
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
        _LOG2_E / math.sqrt(D),
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
    _join_splits[(B, n_groups * per_group)](
        parts, weights, out, N_SPLITS=n_splits, D=D, WIDE=wide, num_warps=2, enable_fp_fusion=True
    )
    return out


def splits(n_groups: int, capacity: int) -> int:
    """Return over how many programs the keys of one group and session are split: a power of two."""
    wanted = max(PROGRAMS_OF_ONE_SESSION // n_groups, 1)
    useful = max(capacity // KEYS_PER_BLOCK, 1)
    return 1 << (min(wanted, useful).bit_length() - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_split(  # noqa: PLR0913, PLR0917
    q: tl.tensor,
    addresses: tl.tensor,
    positions: tl.tensor,
    parts: tl.tensor,
    weights: tl.tensor,
    q_stride: tl.tensor,
    head_stride: tl.tensor,
    scale: tl.tensor,
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
    length = tl.cdiv(tl.cdiv(n_keys, KEYS), N_SPLITS) * KEYS
    first = split * length
    end = tl.minimum(first + length, n_keys)
    head, column = tl.arange(0, ROWS), tl.arange(0, WIDE)
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
        score = tl.where(seen[None, :], score, -float("inf"))
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
def _join_splits(
    parts: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
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
    share = tl.exp2(largest - tl.max(largest, 0))
    total = tl.sum(share * tl.load(weights + row * 2 + 1), 0)
    is_column = column < D
    part = tl.load(parts + row[:, None] * D + column[None, :], is_column[None, :], other=0.0)
    mixed = tl.sum(part * share[:, None], 0) / total
    tl.store(out + place.to(tl.int64) * D + column, mixed.to(out.dtype.element_ty), is_column)
