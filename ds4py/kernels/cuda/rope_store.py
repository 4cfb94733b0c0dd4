"""Norming and turning queries and keys, and putting keys and values into the caches.

Owns: what lies between the QKV product and the attention of a decode step, as one kernel. Refuses
to know: angles, projections. Invariant: the same products and sums as `layers.rope.Rope.rotate_`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from ds4py.kernels.cache import CacheTensor
from ds4py.kernels.cuda.decode_step import check_step
from ds4py.kernels.cuda.element_types import kind_of
from ds4py.kernels.memory import KernelBuffer


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of single heads.

    Args:
        q: Weight for query heads, float32 `[D]`.
        k: Weight for key heads, float32 `[D]`.
        eps: Added to the mean square.
    """

    q: torch.Tensor
    k: torch.Tensor
    eps: float


def rotate_and_store(
    qkv: torch.Tensor,
    rotations: torch.Tensor,
    addresses: torch.Tensor,
    positions: torch.Tensor,
    cache: CacheTensor,
    norms: HeadNorms | None = None,
) -> None:
    """Norm and turn the query heads in place; the key heads too, written with the value heads.

    Args:
        qkv: float32 `[B, (H + 2 G) * D]`, contiguous: query, key and value heads of one token of
            each session; only the query heads are changed.
        rotations: Table of all positions, complex64 `[C, ..., n_dims / 2]`, contiguous; turns the
            leading pairs of adjacent values of a head.
        addresses: Where each session's cache begins, int64 `[B]`, on the device.
        positions: Positions of the tokens, int64 `[B]`, on the device.
        cache: Form of a session's cache, `[2 G, C, D]`, contiguous.
        norms: Applied before the rotation; None for none.

    Raises:
        KernelError: A tensor is of another type or size, elsewhere, or lies otherwise.
    """
    n_kv, capacity, D = cache.shape
    n_heads = qkv.shape[1] // D
    check_step(qkv, addresses, positions, (n_heads * D,))
    KernelBuffer(rotations, torch.complex64, "rotations", qkv.device)
    weights = (qkv, qkv) if norms is None else (norms.q, norms.k)  # without norms not looked at
    if norms is not None:
        for weight in weights:
            KernelBuffer(weight, torch.float32, "norm of heads", qkv.device).expect(
                "norm of heads", (D,)
            )
    _rotate_and_store[(qkv.shape[0], n_heads)](
        qkv,
        torch.view_as_real(rotations),
        addresses,
        positions,
        *weights,
        0.0 if norms is None else norms.eps,
        capacity * D,
        n_heads - n_kv,
        n_heads - n_kv // 2,
        PAIRS=D // 2,
        ROTATED=rotations.shape[-1],
        WIDE=triton.next_power_of_2(D // 2),
        NORMED=norms is not None,
        KIND=kind_of(cache.dtype),
        num_warps=1,  # a head has at most some hundred values: more warps would wait for each other
        enable_fp_fusion=True,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_store(  # noqa: PLR0913, PLR0917
    qkv: tl.tensor,
    rotations: tl.tensor,
    addresses: tl.tensor,
    positions: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    eps: tl.tensor,
    head_stride: tl.tensor,
    first_key: tl.tensor,
    first_value: tl.tensor,
    PAIRS: tl.constexpr,
    ROTATED: tl.constexpr,
    WIDE: tl.constexpr,
    NORMED: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    """Handle one head of one session's token."""
    session, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + session)
    pair = tl.arange(0, WIDE)
    there, turns = pair < PAIRS, pair < tl.where(head < first_value, ROTATED, 0)
    source = qkv + (session * tl.num_programs(1) + head).to(tl.int64) * (2 * PAIRS) + 2 * pair
    # the padding to a power of two reads zeros, so that it adds nothing to the mean square
    real, imaginary = tl.load(source, there, other=0.0), tl.load(source + 1, there, other=0.0)
    if NORMED:
        # no branch: a value head is multiplied and divided by 1, a query head by key weights of 1
        n_query = tl.where(head < first_key, PAIRS, 0)
        n_normed = tl.where(head < first_value, PAIRS, 0)
        for_q, for_k = pair < n_query, pair < n_normed - n_query
        square = tl.sum(real * real + imaginary * imaginary, 0)
        length = tl.where(n_normed > 0, tl.sqrt(square / (2 * PAIRS) + eps), 1.0)
        first = tl.load(q_norm + 2 * pair, for_q, other=1.0)
        second = tl.load(q_norm + 2 * pair + 1, for_q, other=1.0)
        real = real * first * tl.load(k_norm + 2 * pair, for_k, other=1.0) / length
        imaginary = imaginary * second * tl.load(k_norm + 2 * pair + 1, for_k, other=1.0) / length
    angle = rotations + position * (2 * ROTATED) + 2 * pair
    cosine, sine = tl.load(angle, turns, other=1.0), tl.load(angle + 1, turns, other=0.0)
    turned_real = real * cosine - imaginary * sine
    turned_imaginary = real * sine + imaginary * cosine
    if head < first_key:
        tl.store(source, turned_real, there)
        tl.store(source + 1, turned_imaginary, there)
    else:
        rows = tl.load(addresses + session).to(tl.pointer_type(KIND))
        row = (head - first_key).to(tl.int64) * head_stride + position * (2 * PAIRS) + 2 * pair
        tl.store(rows + row, turned_real.to(KIND), there)
        tl.store(rows + row + 1, turned_imaginary.to(KIND), there)
