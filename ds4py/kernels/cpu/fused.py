"""The steps between matrix products of few rows, each in one pass, on the CPU.

Owns: norm and gate as kernels that leave integers for the next product, and the exponential that
kernels share; the attention is a module of its own. Refuses to know: weights, layers. Invariant:
float32 inside; the same formulas as `layers`, which is their reference.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final

import torch

from ds4py.kernels.cpu.activations import TARGETS, Quantized, write_quantized
from ds4py.kernels.cpu.jit import F32, I32, I64, LANES, Code, Kernel, Value, float_bits, vector
from ds4py.kernels.memory import KernelBuffer

_ROW: Final = vector(F32, LANES)


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


def gate(gate_up: KernelBuffer, out: Quantized, activation: str = "silu") -> None:
    """Write `activation(gate) * up` as integers.

    Args:
        gate_up: float32 `[T, 2 F]`: gates, then what they let through.
        out: `[T, F]`.
        activation: "silu", or "gelu" for its form with tanh.

    Raises:
        KernelError: The sizes do not fit.
    """
    gate_up.expect("gates", (out.n_rows, 2 * out.width))
    _gate(activation)(gate_up.address, *out.addresses, out.n_rows, out.width)


@cache
def _gate(activation: str) -> Kernel:
    k = Code("gate", ("x", *TARGETS, "n_rows", "width"))
    b, width = k.b, k.integer("width")
    with k.loop(0, k.integer("n_rows")) as row:
        gates = k.at(k.pointer("x"), b.mul(b.mul(row, I64(2)), width), 4)
        ups = k.at(gates, width, 4)

        def value(i: Value, gates: Value = gates, ups: Value = ups) -> Value:
            x = k.load(_ROW, k.at(gates, i, 4))
            inside = x if activation == "silu" else _gelu_inside(k, x)
            below = b.fadd(k.splat(1.0), exponential(k, b.fneg(inside)))
            return b.fmul(b.fdiv(x, below), k.load(_ROW, k.at(ups, i, 4)))

        write_quantized(k, row, width, value)
    return k.compiled()


def _gelu_inside(k: Code, x: Value) -> Value:
    """Write code for what the sigmoid of GELU sees.

    `0.5 (1 + tanh(u))` is `sigmoid(2 u)`, so that SiLU and GELU differ only in this.
    """
    b, factor = k.b, 2 * math.sqrt(2 / math.pi)
    cubic = k.fma(b.fmul(x, x), k.splat(0.044715 * factor), k.splat(factor))
    return b.fmul(x, cubic)


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


def compile_steps(activation: str) -> None:
    """Compile the kernels of this module for a layer."""
    _norm()
    _gate(activation)
