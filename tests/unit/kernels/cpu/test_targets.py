"""The words kernels are made of, and the same bits on every processor and number of threads."""

import re

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch
from llvmlite import ir

from ds4py.kernels.cpu import activations as integers
from ds4py.kernels.cpu import attention, fused, gemv, jit
from ds4py.kernels.cpu.jit import F32, I16, I32, I64, LANES, Code, vector
from tests.unit.kernels.packed_matrices import (
    FORMS,
    WITH_SCALES,
    activations,
    buffer,
    for_processor,
    matrix,
    multiply,
    pack,
    wild_matrix,
)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(params=["this processor", "generic"])
def processor(request, monkeypatch):
    """Kernels for the real processor, then for the least that its family has."""
    if request.param == "generic":
        for_processor(monkeypatch, "generic")


def mapped(write, source: torch.Tensor, out: torch.Tensor, other: torch.Tensor | None = None):
    """Run `write(code, vector of 32[, other vector])` over whole arrays, into `out`."""
    kinds = {torch.int16: I16, torch.float32: F32, torch.int32: I32}
    k = Code("mapped", ("a", "b", "out", "n"))
    with k.loop(0, k.integer("n"), 32) as i:
        args = [
            k.load(vector(kinds[part.dtype], 32), k.at(k.pointer(name), i, part.itemsize))
            for name, part in (("a", source), ("b", other))
            if part is not None
        ]
        k.store(write(k, *args), k.at(k.pointer("out"), i, out.itemsize))
    second = source if other is None else other
    k.compiled()(source.data_ptr(), second.data_ptr(), out.data_ptr(), source.numel())
    return out


def all_shorts() -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)


@pytest.mark.usefixtures("processor")
def test_every_binary16_is_read_as_torch_reads_it():
    shorts, out = all_shorts(), torch.empty(1 << 16)

    k = Code("halves", ("halves", "out", "n"))
    with k.loop(0, k.integer("n")) as i:
        half = k.load(I16, k.at(k.pointer("halves"), i, 2))
        k.store(k.from_half(half), k.at(k.pointer("out"), i, 4))
    k.compiled()(shorts.data_ptr(), out.data_ptr(), 1 << 16)

    expected = shorts.view(torch.float16).float()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out.signbit()[expected == 0], expected.signbit()[expected == 0])


@pytest.mark.usefixtures("processor")
def test_every_bfloat16_is_read_as_torch_reads_it():
    shorts = all_shorts()
    out = mapped(Code.from_bfloat, shorts, torch.empty(1 << 16))
    assert torch.equal(out.view(torch.int32), shorts.view(torch.bfloat16).float().view(torch.int32))


@pytest.mark.usefixtures("processor")
def test_rounding_to_bfloat16_is_torchs():
    """Random bits, every bfloat16, the ties between them, and one bit to both sides of each."""
    rng = np.random.default_rng(0)
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    lows = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    words = [rng.integers(0, 1 << 32, 1 << 16, np.uint32), *(high | np.uint32(low) for low in lows)]
    values = torch.from_numpy(np.concatenate(words).view(np.float32))
    out = mapped(Code.to_bfloat, values, torch.empty(values.numel(), dtype=torch.int16))
    got, expected = out.view(torch.bfloat16), values.bfloat16()
    assert torch.equal(got.isnan(), values.isnan())
    known = ~values.isnan() & (values.abs() >= torch.finfo(torch.float32).tiny)
    below = ~values.isnan() & ~known
    assert (got[below].float().abs() <= torch.finfo(torch.float32).tiny).all()
    assert torch.equal(out[known], expected.view(torch.int16)[known])


@pytest.mark.usefixtures("processor")
def test_the_high_product_is_rounded_to_the_nearest():
    rng = np.random.default_rng(0)
    ends = np.array([-32768, -32767, -1, 0, 1, 16384, 32767])
    a = np.concatenate([rng.integers(-32768, 32768, 4096), np.repeat(ends, 32)]).astype(np.int16)
    b = np.concatenate([rng.integers(-32767, 32768, 4096), np.tile(ends[1:], 38)[:224]])
    out = mapped(
        Code.multiply_high, torch.from_numpy(a), torch.empty(a.size, dtype=torch.int16),
        torch.from_numpy(b.astype(np.int16)),
    )  # fmt: skip
    expected = (a.astype(np.int64) * b + (1 << 14)) >> 15
    assert np.array_equal(out.numpy(), expected)


@pytest.mark.usefixtures("processor")
def test_magnitudes_are_ordered_as_the_numbers_and_nan_is_the_largest():
    values = torch.tensor([0.0, -1e-45, 1e-30, -1.0, 1.5, -3e38, float("inf"), float("nan")] * 4)
    out = mapped(Code.magnitudes, values, torch.empty(32, dtype=torch.int32))
    assert (out[:8].diff() > 0).all()
    assert torch.equal(out[:7].view(torch.float32), values[:7].abs())


@pytest.mark.usefixtures("processor")
def test_lanes_are_added_halves_to_halves():
    values = activations(1, LANES)[0]
    k = Code("total", ("x", "out"))
    k.store(k.total(k.load(vector(F32, LANES), k.pointer("x"))), k.pointer("out"))
    out = torch.empty(1)
    k.compiled()(values.data_ptr(), out.data_ptr())
    tree = values
    while tree.numel() > 1:
        half = tree.numel() // 2
        tree = tree[:half] + tree[half:]
    assert torch.equal(out, tree)


@pytest.mark.parametrize("n_threads", [1, 2, 5])
@pytest.mark.parametrize(("n", "multiple"), [(0, 1), (1, 1), (7, 1), (7, 16), (100, 16), (160, 16)])
def test_threads_share_everything_and_nothing_twice(n, multiple, n_threads):
    k = Code("share", ("counts", "n"))
    with k.loop(*k.share(k.integer("n"), multiple)) as i:
        at = k.at(k.pointer("counts"), i, 8)
        k.store(k.b.add(k.load(I64, at), I64(1)), at)
    kernel, counts = k.compiled(), torch.zeros(n + 1, dtype=torch.int64)
    torch.set_num_threads(n_threads)
    try:
        kernel.parallel(counts.data_ptr(), n)
    finally:
        torch.set_num_threads(1)
    assert counts.tolist() == [1] * n + [0]


def test_torch_lends_its_threads():
    """Without them the kernels would still be right, but slow."""
    assert jit._openmp() is not None


@pytest.mark.parametrize("form", ["Q4_1", "IQ2_XXS"])
def test_threads_change_no_bit(form):
    tensor, x = wild_matrix(form, (75, 512)), activations(3, 512)
    results = []
    for n_threads in (1, 2):
        torch.set_num_threads(n_threads)
        try:
            packed = pack(tensor)
            results.append((multiply(packed, x), packed.decode(0, 75)))
        finally:
            torch.set_num_threads(1)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_a_plain_processor_gives_the_same_bits(form, monkeypatch):
    tensor, x = matrix(form, (19, 512)), activations(2, 512)

    def results() -> list[torch.Tensor]:
        packed = pack(tensor)
        alone = multiply(packed, x[:1].contiguous()) if form in WITH_SCALES else x
        return [alone, multiply(packed, x), packed.decode(0, 19).view(torch.int16)]

    here = results()
    for_processor(monkeypatch, "generic")
    assert all(torch.equal(one, two) for one, two in zip(here, results(), strict=True))


def test_the_steps_between_products_give_the_same_bits_on_a_plain_processor(monkeypatch):
    def results() -> list[torch.Tensor]:
        outs = [integers.Quantized(2, 160) for _ in range(2)]
        fused.FusedNorm(activations(1, 160, 2)[0], 1e-5)(buffer(activations(2, 160)), outs[0])
        fused.gate(buffer(activations(2, 320, 3) / 100), outs[1])
        heads, out = attention.AttentionHeads(2, 3, 32, 16), torch.empty(1, 192)
        kv = activations(4, 40 * 32, 4).view(4, 40, 32).bfloat16()
        rotation = torch.polar(torch.ones(8), torch.arange(8.0))
        position = attention.CachedPosition(buffer(kv), None, 33, buffer(rotation))
        attention.attend(heads, buffer(activations(1, 320, 5)), 0, position, buffer(out))
        quantized = [part for one in outs for part in (one.codes, one.scales, one.sums)]
        return [*quantized, kv.view(torch.int16), out]

    here = results()
    for_processor(monkeypatch, "generic")
    assert all(torch.equal(one, two) for one, two in zip(here, results(), strict=True))


_HELPERS = re.compile(rb"__\w+")
"""How the functions of a compiler's own library are named; a process need not have them."""

ALL_RULES = attention.AttentionHeads(
    1, 2, 16, 16, norm_eps=1e-6, scale=0.2, window=9, soft_cap=5.0, sinks=True
)

KERNELS = (
    (gemv, "_fix", ("Q4_1",)),
    (gemv, "_decode", ("Q4_1", torch.bfloat16)),
    (gemv, "_product", ("Q4_1", 2)),
    (gemv, "_product", ("Q6_K", 1)),
    (integers, "_quantize", ()),
    (fused, "_norm", ()),
    (fused, "_gate", ("silu",)),
    (fused, "_gate", ("gelu",)),
    (attention, "attention_kernel", (attention.AttentionHeads(1, 2, 16, 16),)),
    (attention, "attention_kernel", (ALL_RULES,)),
)


class WrittenError(Exception):
    """Thrown instead of compiling, with the text."""


@pytest.mark.parametrize(("module", "name", "args"), KERNELS)
@pytest.mark.parametrize("triple", ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"])
def test_kernels_need_no_compilers_library(module, name, args, triple, monkeypatch):
    def refuse(text: str) -> None:
        raise WrittenError(text)

    for_processor(monkeypatch, "generic")
    monkeypatch.setattr(jit, "_compile", refuse)
    options = {"alone": args[1] == 1} if name == "_product" else {}
    with pytest.raises(WrittenError) as caught:
        getattr(module, name)(*args, **options)
    try:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        machine = llvm.Target.from_triple(triple).create_target_machine(opt=0)
    except RuntimeError:
        pytest.skip(f"this llvmlite has no {triple}")
    code = machine.emit_object(llvm.parse_assembly(caught.value.args[0]))
    assert _HELPERS.findall(code) == []


def test_a_kernel_that_is_not_sound_is_refused_before_it_runs():
    module = ir.Module("unsound")
    with pytest.raises(RuntimeError):
        jit._compile(str(module) + "define void @alone(ptr %x) { ret i32 0 }")
