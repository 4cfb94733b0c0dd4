"""Activations as integers of 16 bits, for products with packed weights on the CPU.

Owns: their form, and code that rounds a row to it. Refuses to know: weights, where rows come from.
Invariant: a row's integers do not depend on other rows.

A scale belongs to 256 values, whose largest counts 16383 steps: 16 of them times as many weights of
13 bits add up in 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final

import torch

from ds4py.errors import KernelError
from ds4py.kernels.cpu.blocks import GROUP
from ds4py.kernels.cpu.jit import F32, I16, I32, I64, LANES, Code, Kernel, Value, vector
from ds4py.kernels.memory import KernelBuffer

CHUNK: Final = 256
"""Activations that share a scale."""

_LARGEST_X: Final = 16383.0
_SMALLEST_X: Final = 1e-30  # chunks of smaller ones count as zeros: their inverse has no float32


class Quantized:
    """Activations as integers.

    Args:
        n_rows: Rows, `T`.
        width: Values of a row, `K`; a multiple of 32.

    Attributes:
        codes: int16 `[T, K]`.
        scales: float32 `[T, ceil(K / 256)]`.
        sums: float32 `[T, K / 16]`, of 16 codes each.
        paired: The codes once more, int16 `[T, chunks, 2, 4, 32]`, in the order of nibbles in pairs
            of bytes.
        addresses: Where they are, for kernels with the parameters `TARGETS`.
    """

    def __init__(self, n_rows: int, width: int):
        self.n_rows, self.width, self.n_chunks = n_rows, width, -(-width // CHUNK)
        arrays = (
            KernelBuffer.empty((n_rows, width), torch.int16),
            KernelBuffer.empty((n_rows, self.n_chunks)),
            KernelBuffer.empty((n_rows, width // LANES)),
            KernelBuffer.empty((n_rows, self.n_chunks * CHUNK), torch.int16),
        )
        self.codes, self.scales, self.sums, self.paired = (array.tensor for array in arrays)
        self.addresses = tuple(array.address for array in arrays)


TARGETS: Final = ("codes", "scales", "sums", "paired")
"""Parameters of a kernel that writes `Quantized`."""


def quantize(x: torch.Tensor | KernelBuffer, out: Quantized | None = None) -> Quantized:
    """Round activations to integers.

    Args:
        x: float32 `[T, K]`, contiguous, on the CPU; `K` a multiple of 32.
        out: Gets the result; None takes new memory.

    Raises:
        KernelError: `x` lies otherwise, or `out` has other sizes.
    """
    rows = x if isinstance(x, KernelBuffer) else KernelBuffer(x, torch.float32, "activations")
    if out is None:
        if len(rows.shape) != 2 or rows.shape[1] % GROUP:
            raise KernelError(
                "activations", got=f"shape {rows.shape}", expected=f"rows of a multiple of {GROUP}"
            )
        out = Quantized(*rows.shape)
    rows.expect("activations", (out.n_rows, out.width))
    _quantize()(rows.address, *out.addresses, out.n_rows, out.width)
    return out


def write_quantized(k: Code, row: Value, width: Value, values: Callable[[Value], Value]) -> None:
    """Write code that rounds one row of activations.

    Args:
        k: Has the parameters of `TARGETS`.
        row: Its number.
        width: Values of a row.
        values: Writes code for float32 `[16]` from a position on.
    """
    b = k.b
    n_chunks = b.udiv(b.add(width, I64(CHUNK - 1)), I64(CHUNK))
    codes = k.at(k.pointer("codes"), b.mul(row, width), 2)
    scales = k.at(k.pointer("scales"), b.mul(row, n_chunks), 4)
    sums = k.at(k.pointer("sums"), b.udiv(b.mul(row, width), I64(LANES)), 4)
    paired = k.at(k.pointer("paired"), b.mul(row, n_chunks), 2 * CHUNK)
    kept = k.array(F32, CHUNK)
    with k.loop(0, n_chunks) as chunk:
        first = b.mul(chunk, I64(CHUNK))
        left = b.sub(width, first)
        n = b.select(b.icmp_signed("<", left, I64(CHUNK)), left, I64(CHUNK))
        largest = k.variable(k.full(I32, LANES, 0))
        with k.loop(0, n, LANES) as i:
            part = values(b.add(first, i))
            k.store(part, k.at(kept, i, 4))
            largest.set(k.call("smax", largest.get(), k.magnitudes(part)))
        most = b.bitcast(k.reduce("smax", largest.get()), F32)
        inverse = b.select(
            b.fcmp_ordered("<", most, F32(_SMALLEST_X)), F32(0), b.fdiv(F32(_LARGEST_X), most)
        )
        k.store(b.fmul(most, F32(1 / _LARGEST_X)), k.at(scales, chunk, 4))
        with k.loop(0, n, LANES) as i:
            part = b.fmul(k.load(vector(F32, LANES), k.at(kept, i, 4)), k.splat(inverse))
            whole = b.fptosi(k.call("rint", part), vector(I32, LANES))
            at = b.add(first, i)
            own = b.trunc(whole, vector(I16, LANES))
            k.store(own, k.at(codes, at, 2))
            _store_paired(k, own, k.at(paired, chunk, 2 * CHUNK), i)
            total = b.sitofp(k.reduce("add", whole), F32)
            k.store(total, k.at(sums, b.udiv(at, I64(LANES)), 4))


def _store_paired(k: Code, codes: Value, chunk: Value, i: Value) -> None:
    """Write code that stores 16 of a chunk's codes where `_Tile._paired_dots` wants them.

    In the order half, then low even, low odd, high even, high odd; see there.
    """
    b = k.b
    half, group, place = (
        b.and_(b.lshr(i, I64(bit)), I64(mask)) for bit, mask in ((7, 1), (5, 3), (4, 1))
    )
    first = b.add(b.shl(half, I64(7)), b.shl(b.and_(group, I64(1)), I64(6)))
    lane = b.add(b.shl(b.lshr(group, I64(1)), I64(4)), b.shl(place, I64(3)))
    for odd in range(2):
        target = k.at(chunk, b.add(b.add(first, I64(GROUP * odd)), lane), 2)
        k.store(k.pick(codes, range(odd, LANES, 2)), target)


@cache
def _quantize() -> Kernel:
    k = Code("quantize", ("x", *TARGETS, "n_rows", "width"))
    width = k.integer("width")
    with k.loop(0, k.integer("n_rows")) as row:
        line = k.at(k.pointer("x"), k.b.mul(row, width), 4)
        write_quantized(
            k, row, width, lambda start: k.load(vector(F32, LANES), k.at(line, start, 4))
        )
    return k.compiled()
