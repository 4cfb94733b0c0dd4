"""Every kernel gives the same for a view as for a copy of it, or raises before it touches memory.

A kernel sees addresses and sizes. For each argument of each kernel, on the CPU and in Triton's
interpreter, the memory is laid out in every way that torch has: with gaps, odd offsets, transposed,
repeated, empty, of another type. What is contiguous must work; what is not must be refused, with
all memory as it was.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4py.errors import KernelError
from ds4py.kernels.cache import CacheTensor
from ds4py.kernels.cpu import attention, fused, sinkhorn
from ds4py.kernels.cpu.activations import Quantized, quantize
from ds4py.kernels.cpu.gemv import PackedRows
from ds4py.kernels.cpu.linear import BlockWeights, ExpertBlocks
from ds4py.kernels.memory import ALIGNMENT, KernelBuffer, cache_address, check_launch
from ds4py.layers.compare import position_in
from ds4py.layers.kv_cache import KvRows
from ds4py.quant.tensor import QuantTensor
from tests.unit.kernels.packed_matrices import buffer, matrix

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

HEADS = attention.AttentionHeads(2, 3, 32, 16)
ROOM, POSITION = 24, 7
ROWS = (0, 1, 2, 5)

CONVERTED = ("few rows", "many rows", "experts")
"""Products that convert floats of other types themselves."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One kernel.

    Args:
        make: Contiguous arguments by name, for so many rows.
        call: Runs the kernel; returns what it gives, besides what it writes into its arguments.
        apart: Arguments whose rows may be apart: the kernel is told by how much.
    """

    make: Callable[[int], Tensors]
    call: Callable[[Tensors], list[torch.Tensor]]
    apart: frozenset[str] = field(default_factory=frozenset)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(rounded: Quantized) -> list[torch.Tensor]:
    return [rounded.codes, rounded.scales, rounded.sums]


# --- layouts: the same values elsewhere ----------------------------------------------------------


def _like(base_shape: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    base = torch.zeros(base_shape, dtype=x.dtype)
    return base.fill_(3)


def gap_behind(x: torch.Tensor, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    base = _like((*x.shape[:-1], x.shape[-1] + pad), x)
    return base, base[..., : x.shape[-1]]


def gap_before(x: torch.Tensor, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    base = _like((*x.shape[:-1], x.shape[-1] + pad), x)
    return base, base[..., pad:]


def offset(x: torch.Tensor, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    base = _like((x.numel() + pad,), x)
    return base, base[pad:].view(x.shape)


def later_rows(x: torch.Tensor, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    base = _like((x.shape[0] + pad, *x.shape[1:]), x)
    return base, base[pad:]


def every_second(x: torch.Tensor, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    base = _like((2 * x.shape[0] + pad, *x.shape[1:]), x)
    return base, base[: 2 * x.shape[0] : 2]


def transposed(x: torch.Tensor, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    del pad
    base = _like(tuple(reversed(x.shape)), x)
    return base, base.permute(*reversed(range(x.dim())))


LAYOUTS = (gap_behind, gap_before, offset, later_rows, every_second, transposed)


# --- kernels of the CPU --------------------------------------------------------------------------


def rotation() -> torch.Tensor:
    return torch.polar(torch.ones(HEADS.n_rotated // 2), normal(HEADS.n_rotated // 2, seed=9))


def product_case(form: str) -> Case:
    width = 512
    raw = matrix(form, (19, width)).raw

    def call(t: Tensors) -> list[torch.Tensor]:
        # fixing the factors in place would leave other bytes for the next layout
        raw = t["raw"].clone() if t["raw"].is_contiguous() else t["raw"]
        packed = PackedRows(raw, form)
        packed.multiply(quantize(t["x"]), buffer(t["y"]))
        return [packed.decode(0, 19).float()]

    def make(n: int) -> Tensors:
        return {"x": normal(n, width), "y": torch.zeros(n, 19), "raw": raw.clone()}

    return Case(make, call)


def blocks_case(n_rows_least: int = 0) -> Case:
    weights = matrix("Q4_K", (19, 512))

    def call(t: Tensors) -> list[torch.Tensor]:
        own = QuantTensor("w", weights.format, (19, 512), weights.raw.clone())
        return [BlockWeights(own)(t["x"])]

    return Case(lambda n: {"x": normal(n + n_rows_least, 512)}, call)


def experts_case() -> Case:
    weights = matrix("Q8_0", (3 * 19, 64))

    def call(t: Tensors) -> list[torch.Tensor]:
        own = QuantTensor("w", weights.format, (3, 19, 64), weights.raw.clone())
        n = t["x"].shape[0]
        groups = [(0, 0, n // 2), (2, n // 2, n)]
        return [ExpertBlocks(own)(t["x"], [one for one in groups if one[1] < one[2]])]

    return Case(lambda n: {"x": normal(n, 64)}, call)


def norm_case() -> Case:
    def call(t: Tensors) -> list[torch.Tensor]:
        out = Quantized(*t["x"].shape)
        fused.FusedNorm(t["weight"], 1e-5)(buffer(t["x"]), out)
        return integers(out)

    return Case(lambda n: {"x": normal(n, 160), "weight": normal(160, seed=1)}, call)


def gate_case() -> Case:
    def call(t: Tensors) -> list[torch.Tensor]:
        out = Quantized(t["gate_up"].shape[0], 160)
        fused.gate(buffer(t["gate_up"]), out)
        return integers(out)

    return Case(lambda n: {"gate_up": normal(n, 320)}, call)


def quantize_case() -> Case:
    return Case(lambda n: {"x": normal(n, 288)}, lambda t: integers(quantize(t["x"])))


def balance_case() -> Case:
    return Case(
        lambda n: {"scores": normal(n, 16)}, lambda t: [sinkhorn.balanced(t["scores"], 20, 1e-6)]
    )


def attend_case(dtype: torch.dtype) -> Case:
    planes, width = 2 * HEADS.n_groups, HEADS.width

    def make(n: int) -> Tensors:
        rows = KvRows(
            torch.zeros((planes, ROOM, width), dtype=dtype),
            torch.zeros(planes, ROOM, 1) if dtype is torch.int8 else None,
        )
        rows.write(0, normal(planes, POSITION, width, seed=2))
        made = {
            "qkv": normal(n, HEADS.n_queries + planes * width, seed=3),
            "out": torch.zeros(n, HEADS.n_queries),
            "cache": rows.values,
            "rotation": rotation(),
        }
        return made if rows.scales is None else made | {"scales": rows.scales}

    def call(t: Tensors) -> list[torch.Tensor]:
        position = position_in(KvRows(t["cache"], t.get("scales")), POSITION, buffer(t["rotation"]))
        qkv, out = buffer(t["qkv"]), buffer(t["out"])
        for row in range(t["qkv"].shape[0]):
            attention.attend(HEADS, qkv, row, position, out)
        return []

    return Case(make, call)


CPU_CASES: Mapping[str, Case] = {
    "quantize": quantize_case(),
    "product Q4_1": product_case("Q4_1"),
    "product Q6_K": product_case("Q6_K"),
    "few rows": blocks_case(),
    "many rows": blocks_case(20),
    "experts": experts_case(),
    "norm": norm_case(),
    "gate": gate_case(),
    "balance": balance_case(),
    **{
        f"attend {dtype}": attend_case(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8)
    },
}


# --- kernels of a GPU, in the interpreter --------------------------------------------------------


def few_case(*, grouped: bool) -> Case:
    weights = matrix("Q4_0", (3 * 5 if grouped else 5, 64))

    def make(n: int) -> Tensors:
        own = {"x": normal(n, 64), "raw": weights.raw.clone()}
        return own | ({"experts": torch.arange(n) % 3} if grouped else {})

    def call(t: Tensors) -> list[torch.Tensor]:
        from ds4py.kernels import cuda

        shape = (3, 5, 64) if grouped else (5, 64)
        tensor = QuantTensor("w", weights.format, shape, t["raw"])
        return [cuda.multiply_few(t["x"], tensor, torch.float32, t.get("experts"))]

    return Case(make, call)


def many_case() -> Case:
    weights = matrix("Q4_0", (5, 64))

    def call(t: Tensors) -> list[torch.Tensor]:
        from ds4py.kernels import cuda

        tensor = QuantTensor("w", weights.format, (5, 64), t["raw"])
        return [cuda.multiply_many(t["x"], tensor, torch.float32)]

    return Case(lambda n: {"x": normal(n, 64), "raw": weights.raw.clone()}, call)


def decode_case() -> Case:
    weights = matrix("Q4_0", (5, 64))

    def call(t: Tensors) -> list[torch.Tensor]:
        from ds4py.kernels import cuda

        tensor = QuantTensor("w", weights.format, (5, 64), t["raw"])
        return [cuda.decode(tensor, torch.float32, t["index"])]

    return Case(lambda n: {"index": torch.arange(n) % 5, "raw": weights.raw.clone()}, call)


def cuda_balance_case() -> Case:
    def call(t: Tensors) -> list[torch.Tensor]:
        from ds4py.kernels.cuda.sinkhorn import balanced

        return [balanced(t["scores"], 4, 20, 1e-6)]

    return Case(lambda n: {"scores": normal(n, 16)}, call, apart=frozenset({"scores"}))


FORM = CacheTensor((4, ROOM, 32), torch.float32)


def _sessions(n: int) -> Tensors:
    caches = normal(max(n, 1), *FORM.shape, seed=4)
    return {
        "caches": caches,
        "addresses": torch.tensor([cache_address(one) for one in caches][:n], dtype=torch.int64),
        "positions": torch.arange(n, dtype=torch.int64) + 3,
    }


def sessions_case() -> Case:
    def call(t: Tensors) -> list[torch.Tensor]:
        from ds4py.kernels.cuda.decode_attention import attend_sessions

        return [attend_sessions(t["q"], t["addresses"], t["positions"], FORM)]

    def make(n: int) -> Tensors:
        return {"q": normal(n, 2, 3, 32), **_sessions(n)}

    return Case(make, call, apart=frozenset({"q"}))


def store_case() -> Case:
    def call(t: Tensors) -> list[torch.Tensor]:
        from ds4py.kernels.cuda.rope_store import rotate_and_store

        rotate_and_store(t["qkv"], t["rotations"], t["addresses"], t["positions"], FORM)
        return []

    def make(n: int) -> Tensors:
        angles = normal(ROOM, 1, 8, seed=5)
        rotations = torch.polar(torch.ones_like(angles), angles)
        return {"qkv": normal(n, 10 * 32), "rotations": rotations, **_sessions(n)}

    return Case(make, call)


GPU_CASES: Mapping[str, Case] = {
    "few": few_case(grouped=False),
    "few of experts": few_case(grouped=True),
    "many": many_case(),
    "decode": decode_case(),
    "balance": cuda_balance_case(),
    "attend sessions": sessions_case(),
    "rotate and store": store_case(),
}


# --- the property --------------------------------------------------------------------------------


def run(case: Case, tensors: Tensors) -> list[torch.Tensor]:
    """Return all that the kernel gave and all that its arguments hold then."""
    return [*case.call(tensors), *(one.clone() for one in tensors.values())]


def must_work(case: Case, name: str, view: torch.Tensor) -> bool:
    rows = view[:1] if name in case.apart else view
    return rows.is_contiguous()


def check(case: Case, name: str, layout: Callable, n_rows: int, pad: int) -> None:
    expected = run(case, case.make(n_rows))
    tensors = case.make(n_rows)
    base, view = layout(tensors[name], pad)
    view.copy_(tensors[name])
    tensors[name] = view
    before, held = base.clone(), {key: one.clone() for key, one in tensors.items()}
    works = must_work(case, name, view)
    try:
        got = run(case, tensors)
    except KernelError:
        assert not works, "contiguous memory was refused"
        for key, one in tensors.items():
            if key != "y":  # what comes before the refused argument may have run
                torch.testing.assert_close(one, held[key], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(base, before)
        return
    assert works, "memory with gaps was taken"
    _assert_alike(got, expected, skip=tensors)
    view.copy_(held[name])
    assert torch.equal(base, before), "memory beside the view was written"


def _assert_alike(got, expected, skip: Tensors) -> None:
    names = [None] * (len(got) - len(skip)) + list(skip)
    for name, one, other in zip(names, got, expected, strict=True):
        if name not in {"addresses", "caches"}:  # other caches, at other addresses
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def arguments(cases: Mapping[str, Case]) -> list[tuple[str, str]]:
    return [
        (kernel, name)
        for kernel, case in cases.items()
        for name in case.make(1)
        if name != "caches"
    ]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize(("kernel", "name"), arguments(CPU_CASES))
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=5, deadline=None)
@given(n_rows=st.sampled_from(ROWS), pad=st.sampled_from([1, 3, 16, 64]))
def test_a_view_is_taken_as_it_is_or_refused(kernel, name, layout, n_rows, pad):
    check(CPU_CASES[kernel], name, layout, n_rows, pad)


@pytest.mark.parametrize(("kernel", "name"), arguments(GPU_CASES))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_view_is_taken_as_it_is_or_refused_on_a_gpu(kernel, name, layout):
    pytest.importorskip("triton", reason="triton is not installed")
    for n_rows, pad in ((1, 1), (2, 3), (5, 16)):
        check(GPU_CASES[kernel], name, layout, n_rows, pad)


def others(dtype: torch.dtype) -> list[torch.dtype]:
    """Types that no kernel takes for this one: with more bytes, with fewer, with as many."""
    return {
        torch.float32: [torch.float64, torch.int16, torch.int32],
        torch.complex64: [torch.complex128, torch.float32, torch.float64],
        torch.int64: [torch.int16, torch.float64],
    }.get(dtype, [torch.int16, torch.bool, torch.float64])


@pytest.mark.parametrize(
    ("cases", "kernel", "name"),
    [
        pytest.param(cases, kernel, name, id=f"{where}-{kernel}-{name}")
        for where, cases in (("cpu", CPU_CASES), ("gpu", GPU_CASES))
        for kernel, name in arguments(cases)
        if kernel not in CONVERTED
    ],
)
def test_another_type_is_refused(cases, kernel, name):
    if cases is GPU_CASES:
        pytest.importorskip("triton", reason="triton is not installed")
    case = cases[kernel]
    for dtype in others(case.make(2)[name].dtype):
        tensors = case.make(2)
        tensors[name] = torch.ones_like(tensors[name], dtype=dtype)
        with pytest.raises(KernelError):
            case.call(tensors)


# --- the door itself -----------------------------------------------------------------------------


def test_a_buffer_says_what_was_found_and_what_was_expected():
    with pytest.raises(KernelError) as caught:
        KernelBuffer(torch.zeros(4, 6)[:, :3], torch.float32, "rows of a test")
    assert str(caught.value) == (
        "rows of a test: got torch.float32 of shape (4, 3) with strides (6, 1) on cpu, "
        "expected contiguous torch.float32 on cpu"
    )


def test_memory_elsewhere_is_refused():
    with pytest.raises(KernelError, match="on meta, expected contiguous"):
        KernelBuffer(torch.empty(3, device="meta"), torch.float32, "rows")


def test_a_buffer_keeps_its_memory():
    held = KernelBuffer(torch.full((1 << 16,), 7.0), torch.float32, "rows")
    torch.full((1 << 16,), 3.0)  # would get the same memory if it were free
    assert held.tensor.data_ptr() == held.address
    assert (held.tensor == 7).all()


def test_rows_of_a_buffer_are_where_they_say():
    whole = KernelBuffer(torch.arange(12.0).view(4, 3), torch.float32, "rows")
    part = whole.rows(1, 3)
    assert part.address == whole.address + whole.row_bytes
    assert part.tensor.tolist() == [[3, 4, 5], [6, 7, 8]]
    with pytest.raises(KernelError, match=r"of shape \(2, 3\), expected .* of shape \(3, 3\)"):
        part.expect("part", (3, 3))


def test_a_cache_that_begins_between_two_loads_is_refused():
    memory = torch.zeros(ALIGNMENT)
    assert cache_address(memory) % ALIGNMENT == 0
    with pytest.raises(KernelError, match="expected a multiple of 16"):
        cache_address(memory[1:])


def test_what_a_launch_needs_is_said_axis_by_axis():
    with pytest.raises(KernelError, match=r"expected torch.float32 of shape \(any, 3\) on cpu"):
        check_launch(
            torch.zeros(2, 4),
            "x",
            dtypes=(torch.float32,),
            shape=(None, 3),
            device=torch.device("cpu"),
        )


def test_a_slice_of_columns_is_refused_whatever_the_number_of_rows():
    """The fault that made this module: right for one row, wrong for two to twelve, right again."""
    weights = BlockWeights(matrix("Q8_0", (8, 64)))
    for n_rows in (2, 12, 13, 64):
        with pytest.raises(KernelError):
            weights(torch.zeros(n_rows, 128)[:, :64])
    assert weights(torch.zeros(1, 128)[:, :64]).shape == (1, 8)


def test_nan_in_the_gaps_never_arrives():
    """Views that are taken are read where they are: gaps of NaN would show."""
    base = torch.full((9, 64), math.nan)
    base[4:7] = normal(3, 64)
    assert torch.equal(quantize(base[4:7]).codes, quantize(base[4:7].clone()).codes)
