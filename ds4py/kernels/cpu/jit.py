"""Kernels for the CPU, written as LLVM IR and compiled when first used.

Owns: a thin vocabulary over `llvmlite.ir` (vectors, loops, memory), compiling, calling, threads.
Refuses to know: formats of weights, models. Invariant: a kernel is compiled once in a process; a
call gives up Python's lock.

The code uses vectors of fixed sizes and no instruction of any processor: LLVM chooses those that
the machine has. Products of 16-bit pairs become one instruction where there is one (`vpmaddwd`).

A kernel takes one block of 64-bit integers: sizes and addresses, in the order of its parameters.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import llvmlite
import llvmlite.binding as llvm
import numpy as np
import torch
from llvmlite import ir
from numpy.typing import NDArray

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F32 = ir.FloatType()


class _BFloatType(ir.Type):  # type: ignore[misc]  # the base is untyped
    """bfloat16, which `llvmlite` does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloatType)

    def __hash__(self) -> int:
        return hash(_BFloatType)


PTR: Final = ir.PointerType()
LANES: Final = 16
"""float32 values in a vector."""

_ROUNDED_PRODUCT: Final = {32: "llvm.x86.avx512.pmul.hr.sw.512"}

Value = Any
"""`llvmlite` has no types of its own for values."""

Words = NDArray[np.uint64]
"""A table for `Code.constant`."""


def vector(kind: ir.Type, n: int) -> ir.Type:
    """Return the type of `n` values beside each other."""
    return ir.VectorType(kind, n)


class Code:
    """The body of one kernel while it is written.

    Args:
        name: Of the kernel.
        params: Names of its parameters.
    """

    def __init__(self, name: str, params: Sequence[str]):
        self.module = ir.Module(name)
        kind = ir.FunctionType(ir.VoidType(), [PTR, I64, I64])
        self._function = ir.Function(self.module, kind, "body")
        self._function.args[0].add_attribute("noalias")
        entry = self._function.append_basic_block("entry")
        self._variables = ir.IRBuilder(entry)
        self.b = ir.IRBuilder(self._function.append_basic_block("code"))
        self._params = {name: place for place, name in enumerate(params)}
        self._loaded: dict[str, Value] = {}

    # --- parameters, constants

    def integer(self, name: str) -> Value:
        """Return an integer parameter."""
        if name not in self._loaded:  # in the entry block, so that it is known everywhere
            place = self._variables.gep(
                self._function.args[0], [I64(self._params[name])], source_etype=I64
            )
            self._loaded[name] = self._variables.load(place, typ=I64)
        return self._loaded[name]

    def pointer(self, name: str) -> Value:
        """Return the address in a parameter."""
        key = f"{name} as address"
        if key not in self._loaded:
            self._loaded[key] = self._variables.inttoptr(self.integer(name), PTR)
        return self._loaded[key]

    def real(self, name: str) -> Value:
        """Return a float32 parameter, given as `float_bits`."""
        return self._variables.bitcast(self._variables.trunc(self.integer(name), I32), F32)

    def share(self, n: Value, multiple: int = 1) -> tuple[Value, Value]:
        """Return which of `n` items this thread does: first, end; cut at multiples."""
        b, (_, part, parts) = self.b, self._function.args
        units = b.udiv(b.add(n, I64(multiple - 1)), I64(multiple))
        bounds = []
        for number in (part, b.add(part, I64(1))):
            end = b.mul(b.udiv(b.mul(units, number), parts), I64(multiple))
            bounds.append(b.select(b.icmp_unsigned("<", end, n), end, n))
        return bounds[0], bounds[1]

    # --- memory

    def at(self, base: Value, offset: Value | int, size: int = 1) -> Value:
        """Return the address `offset` items of `size` bytes behind another one."""
        where = I64(offset) if isinstance(offset, int) else offset
        return self.b.gep(base, [where], source_etype=ir.ArrayType(I8, size))

    def load(self, kind: ir.Type, base: Value, offset: int = 0) -> Value:
        """Read a value `offset` bytes behind an address, aligned or not."""
        return self.b.load(self.at(base, offset), typ=kind, align=1)

    def store(self, value: Value, base: Value, offset: int = 0) -> None:
        """Write a value `offset` bytes behind an address, aligned or not."""
        self.b.store(value, self.at(base, offset), align=1)

    def variable(self, initial: Value) -> Variable:
        """Return a register that changes."""
        place = self._variables.alloca(initial.type)
        self.b.store(initial, place)
        return Variable(self, place, initial.type)

    def constant(self, words: Callable[[], Words]) -> Value:
        """Return the address of a table of 64-bit words, made once for the kernel."""
        name = words.__name__
        if name not in self.module.globals:
            values = [int(word) for word in words()]
            table = ir.Constant(ir.ArrayType(I64, len(values)), values)
            place = ir.GlobalVariable(self.module, table.type, name)
            place.initializer, place.global_constant, place.linkage = table, True, "internal"
        typed = self.module.globals[name]
        return self._variables.inttoptr(self._variables.ptrtoint(typed, I64), PTR)

    def array(self, kind: ir.Type, n: int) -> Value:
        """Return the address of memory that lasts as long as the call."""
        typed = self._variables.alloca(ir.ArrayType(kind, n))
        # `llvmlite` still tells addresses of different things apart, LLVM does not
        return self._variables.inttoptr(self._variables.ptrtoint(typed, I64), PTR)

    # --- flow

    @contextmanager
    def loop(self, start: Value | int, end: Value, step: int = 1) -> Iterator[Value]:
        """Write a loop over `range(start, end, step)`; gives its counter."""
        first = I64(start) if isinstance(start, int) else start
        counter = self.variable(first)
        test, body, done = (self._function.append_basic_block(n) for n in ("test", "body", "done"))
        self.b.branch(test)
        self.b.position_at_end(test)
        now = counter.get()
        self.b.cbranch(self.b.icmp_signed("<", now, end), body, done)
        self.b.position_at_end(body)
        yield now
        counter.set(self.b.add(now, I64(step)))
        self.b.branch(test)
        self.b.position_at_end(done)

    # --- vectors

    def splat(self, value: Value, n: int = LANES) -> Value:
        """Repeat a value, or take a constant."""
        if isinstance(value, float):
            return ir.Constant(vector(F32, n), [value] * n)
        one = self.b.insert_element(ir.Constant(vector(value.type, n), ir.Undefined), value, I32(0))
        return self.pick(one, [0] * n)

    def pick(self, value: Value, lanes: Sequence[int], other: Value | None = None) -> Value:
        """Return chosen lanes of one vector, or of two one behind the other."""
        mask = ir.Constant(vector(I32, len(lanes)), list(lanes))
        second = ir.Constant(value.type, ir.Undefined) if other is None else other
        return self.b.shuffle_vector(value, second, mask)

    def join(self, a: Value, b: Value) -> Value:
        """Put two vectors behind each other."""
        return self.pick(a, range(2 * a.type.count), b)

    def full(self, kind: ir.Type, n: int, value: int) -> Value:
        """Return a constant vector of integers."""
        return ir.Constant(vector(kind, n), [value] * n)

    def call(self, intrinsic: str, *args: Value) -> Value:
        """Call an operation of LLVM on values of one type, such as `sqrt` or `fabs`."""
        kind = args[0].type
        name = f"llvm.{intrinsic}.{_suffix(kind)}"
        function = self.module.globals.get(name) or ir.Function(
            self.module, ir.FunctionType(kind, [arg.type for arg in args]), name
        )
        return self.b.call(function, list(args))

    def reduce(self, operation: str, value: Value) -> Value:
        """Reduce a vector: `add` or `smax` of integers, `fmax` of floats."""
        name = f"llvm.vector.reduce.{operation}.{_suffix(value.type)}"
        function = self.module.globals.get(name) or ir.Function(
            self.module, ir.FunctionType(value.type.element, [value.type]), name
        )
        return self.b.call(function, [value])

    def total(self, value: Value) -> Value:
        """Add the lanes of floats: halves to each other, so that every kernel rounds alike."""
        while (n := value.type.count // 2) > 0:
            low, high = (self.pick(value, range(first, first + n)) for first in (0, n))
            value = self.b.fadd(low, high)
        return self.b.extract_element(value, I32(0))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Return `a * b + c`, rounded once."""
        return self.call("fma", a, b, c)

    def dot_pairs(self, a: Value, b: Value) -> Value:
        """Multiply int16 vectors and add neighbours: int32, half as many lanes."""
        n = a.type.count
        wide = vector(I32, n)
        products = self.b.mul(self.b.sext(a, wide), self.b.sext(b, wide))
        return self.b.add(self.pick(products, range(0, n, 2)), self.pick(products, range(1, n, 2)))

    def multiply_high(self, a: Value, b: Value) -> Value:
        """Return `a * b / 2^15` of int16 vectors, rounded to the nearest."""
        n = a.type.count
        instruction = _ROUNDED_PRODUCT.get(n) if _has("avx512bw") else None
        if instruction is not None:  # the one pattern that LLVM does not find by itself
            kind = ir.FunctionType(a.type, [a.type, a.type])
            known = self.module.globals.get(instruction)
            return self.b.call(known or ir.Function(self.module, kind, instruction), [a, b])
        wide = vector(I32, n)
        product = self.b.mul(self.b.sext(a, wide), self.b.sext(b, wide))
        doubled = self.b.add(self.b.ashr(product, self.full(I32, n, 14)), self.full(I32, n, 1))
        return self.b.trunc(self.b.ashr(doubled, self.full(I32, n, 1)), vector(I16, n))

    def larger(self, a: Value, b: Value) -> Value:
        """Return the larger of two floats, or of each lane; a NaN in `b` stays."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def magnitudes(self, value: Value) -> Value:
        """Return the bits of `|value|`: integers in the order of the numbers, NaN the largest."""
        n = value.type.count
        return self.b.and_(self.b.bitcast(value, vector(I32, n)), self.full(I32, n, 0x7FFFFFFF))

    def floats(self, value: Value) -> Value:
        """Convert signed integers to float32."""
        return self.b.sitofp(value, vector(F32, value.type.count))

    # --- small floats; by integers, as LLVM calls a library where an instruction is missing

    def from_half(self, value: Value) -> Value:
        """Convert an int16 that is a binary16 to float32."""
        b, bits = self.b, self.b.zext(value, I32)
        moved = b.bitcast(b.shl(b.and_(bits, I32(0x7FFF)), I32(13)), F32)
        finite = b.bitcast(b.fmul(moved, F32(2.0**112)), I32)  # exponents count from another place
        other = b.or_(b.bitcast(moved, I32), I32(0x7F800000))  # infinity or NaN
        is_finite = b.icmp_unsigned("<", b.and_(bits, I32(0x7FFF)), I32(0x7C00))
        sign = b.shl(b.and_(bits, I32(0x8000)), I32(16))
        return b.bitcast(b.or_(b.select(is_finite, finite, other), sign), F32)

    def from_bfloat(self, value: Value) -> Value:
        """Convert int16 `[n]` that are bfloat16 to float32."""
        n = value.type.count
        wide = self.b.zext(value, vector(I32, n))
        return self.b.bitcast(self.b.shl(wide, self.full(I32, n, 16)), vector(F32, n))

    def to_bfloat(self, value: Value) -> Value:
        """Round float32 `[n]` to the nearest bfloat16, as int16; ties go to the even one.

        What is below the normal numbers may become 0.
        """
        b, n = self.b, value.type.count
        if _has("avx512bf16"):
            return b.bitcast(b.fptrunc(value, vector(_BFloatType(), n)), vector(I16, n))
        bits = b.bitcast(value, vector(I32, n))
        high = b.lshr(bits, self.full(I32, n, 16))
        half = b.add(b.and_(high, self.full(I32, n, 1)), self.full(I32, n, 0x7FFF))
        rounded = b.lshr(b.add(bits, half), self.full(I32, n, 16))
        quiet = b.select(b.fcmp_unordered("uno", value, value), self.full(I32, n, 0x7FC0), rounded)
        return b.trunc(quiet, vector(I16, n))

    def compiled(self) -> Kernel:
        """End the body and compile it."""
        self.b.ret_void()
        self._variables.branch(self._function.basic_blocks[1])
        _add_entries(self.module, self._function)
        return Kernel(str(self.module), len(self._params))


class Variable:
    """A register that changes while a kernel runs."""

    def __init__(self, code: Code, place: Value, kind: ir.Type):
        self._code, self._place, self._kind = code, place, kind

    def get(self) -> Value:
        """Return the value of now."""
        return self._code.b.load(self._place, typ=self._kind)

    def set(self, value: Value) -> None:
        """Change the value."""
        self._code.b.store(value, self._place)


def float_bits(value: float) -> int:
    """Return a float32 as the integer that a kernel takes."""
    return int.from_bytes(struct.pack("<f", value), "little")


def _suffix(kind: ir.Type) -> str:
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{_suffix(kind.element)}"
    return str(getattr(kind, "intrinsic_name", None) or f"i{kind.width}")


def _add_entries(module: ir.Module, body: ir.Function) -> None:
    """Add what is called: `alone` does everything, `shared` the share of its OpenMP thread."""
    body.linkage = "internal"
    kind = ir.FunctionType(ir.VoidType(), [PTR])
    alone = ir.Function(module, kind, "alone")
    b = ir.IRBuilder(alone.append_basic_block())
    b.call(body, [alone.args[0], I64(0), I64(1)])
    b.ret_void()
    if _openmp() is None:
        return
    shared = ir.Function(module, kind, "shared")
    b = ir.IRBuilder(shared.append_basic_block())
    numbers = [
        b.sext(b.call(ir.Function(module, ir.FunctionType(I32, []), name), []), I64)
        for name in ("omp_get_thread_num", "omp_get_num_threads")
    ]
    b.call(body, [shared.args[0], *numbers])
    b.ret_void()


class Kernel:
    """Compiled code.

    Args:
        text: LLVM IR of a module with the functions of `_add_entries`.
        n_params: Integers that a call takes.
    """

    def __init__(self, text: str, n_params: int):
        self._block: Any = ctypes.c_int64 * n_params
        self._engine = _compile(text)  # `llvmlite` has a lock of its own
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self._alone = kind(self._engine.get_function_address("alone"))
        self._shared = None
        if _openmp() is not None:
            self._shared = kind(self._engine.get_function_address("shared"))

    def __call__(self, *values: int) -> None:
        """Run on the calling thread; the memory behind addresses stays the caller's."""
        self._alone(self._block(*values))

    def parallel(self, *values: int) -> None:
        """Run on as many threads as torch computes with, where a library offers them."""
        n_threads = torch.get_num_threads()
        fork = _openmp()
        if n_threads == 1 or fork is None:
            self._alone(self._block(*values))
        else:
            fork(self._shared, self._block(*values), n_threads, 0)


def _compile(text: str) -> Any:
    cpu, features = _processor()
    machine = _target().create_target_machine(
        cpu=cpu, features=features.flatten() + ",-prefer-256-bit", opt=3
    )
    module = llvm.parse_assembly(text)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


@cache
def _processor() -> tuple[str, Any]:
    """Return for which processor kernels are written: its name in LLVM, its features."""
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features()


def processor_name() -> str:
    """Return the processor that kernels are compiled for, in LLVM's words."""
    return _processor()[0]


def compiler() -> str:
    """Return what compiles kernels, and for which instructions."""
    features = zlib.crc32(str(_processor()[1].flatten()).encode())
    return f"llvmlite {llvmlite.__version__} features {features:08x}"


def _has(feature: str) -> bool:
    return bool(_processor()[1].get(feature))


@cache
def _target() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple()


@cache
def _openmp() -> Callable[..., None] | None:
    """Return the function that forks torch's own OpenMP threads; None if there is none."""
    for path in sorted(Path(torch.__file__).parent.glob("lib/lib*omp*")):
        try:
            library = ctypes.CDLL(str(path))
            fork = library.GOMP_parallel
            for name in ("omp_get_thread_num", "omp_get_num_threads"):
                address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
                llvm.add_symbol(name, address)
        except (OSError, AttributeError):
            continue
        fork.restype = None
        fork.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        return fork
    return None
