"""A kernel that differs from torch on the user's processor is found, named once, and not used."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from ds4py.kernels.cpu import attention, compare, fused, gemv, sinkhorn
from ds4py.kernels.cpu import linear as cpu
from ds4py.kernels.cpu.blocks import LAYOUTS
from ds4py.kernels.cpu.trust import TRUST, Comparison, Trust
from ds4py.layers import compare as steps
from ds4py.layers.experts import ExpertGroups, ExpertProduct
from ds4py.layers.linear import DecodedWeights, PackedLinear
from ds4py.models.deepseek4.hyper import Sinkhorn
from tests.unit.kernels.packed_matrices import activations, matrix


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """Verdicts of this process begin again, and end with the test."""
    monkeypatch.setattr(TRUST, "memory", None)
    TRUST.forget()
    yield
    TRUST.forget()


HEADS = attention.AttentionHeads(2, 3, 32, 16)


@pytest.mark.parametrize("form", LAYOUTS)
def test_the_real_products_are_right(form):
    found = compare.compare_products(form)
    assert 1e-6 < found.error < found.limit


def test_the_real_steps_are_right():
    found = [steps.compare_norm(), steps.compare_gate(), steps.compare_sinkhorn()]
    found += [steps.compare_attention(HEADS, dtype) for dtype in attention.CACHE_TYPES]
    assert all(one.is_right for one in found)
    assert all(0 < one.error < one.limit / 3 for one in found)


def off_by_a_row(monkeypatch, count: int) -> None:
    """A compiler's fault: for groups of so many rows, the last row of the result is not written."""
    real = gemv._product

    class Short:
        def __init__(self, kernel):
            self._kernel = kernel

        def parallel(self, *values: int) -> None:
            changed = list(values)
            changed[1] -= 1  # rows of weights
            self._kernel.parallel(*changed)

    monkeypatch.setattr(
        gemv,
        "_product",
        lambda form, n, *, alone: (
            Short(real(form, n, alone=alone))
            if n == count and form == "Q8_0"
            else real(form, n, alone=alone)
        ),
    )


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_product_that_is_wrong_for_some_rows_is_found(monkeypatch, count):
    off_by_a_row(monkeypatch, count)
    assert not compare.compare_products("Q8_0").is_right
    assert compare.compare_products("Q4_1").is_right


def test_a_wrong_product_is_left_out_and_torch_serves(monkeypatch, caplog):
    off_by_a_row(monkeypatch, 4)
    weights, x = matrix("Q8_0", (20, 64)), activations(5, 64)
    expected = x.double() @ weights.decode().double().T
    with caplog.at_level(logging.WARNING):
        product = PackedLinear([weights], dtype=torch.bfloat16)
        again = PackedLinear([matrix("Q8_0", (4, 64))], dtype=torch.bfloat16)
    assert not product.is_packed
    assert isinstance(again._only, DecodedWeights)
    error = (product(x) - expected).norm() / expected.norm()
    assert error < 1e-2
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("kernel 'products with Q8_0' gives other results than torch")
    assert "run ds4py selftest" in text


def test_formats_that_are_kept_as_q8_0_are_left_out_with_it(monkeypatch):
    off_by_a_row(monkeypatch, 4)
    weights = matrix("Q8_0", (20, 256))
    assert cpu.kept_format(weights) == "Q8_0"
    assert not compare.trusts_products("Q8_0")
    assert compare.trusts_products("Q4_K")


def test_experts_do_without_a_wrong_product(monkeypatch):
    off_by_a_row(monkeypatch, 4)
    weights = matrix("Q8_0", (2 * 20, 64))
    stack = type(weights)("w", weights.format, (2, 20, 64), weights.raw)
    product = ExpertProduct(stack, torch.bfloat16)
    x = activations(5, 64)
    groups = ExpertGroups(torch.tensor([0, 0, 0, 0, 1]), 2)
    exact = stack.decode().double()
    expected = torch.cat([x[:4].double() @ exact[0].T, x[4:].double() @ exact[1].T])
    assert (product(x, groups) - expected).norm() / expected.norm() < 1e-2


def test_a_wrong_step_leaves_the_fused_layer_out(monkeypatch):
    real = fused.gate

    def gate(gate_up, out, activation) -> None:
        real(gate_up, out, activation)
        out.codes[-1, 0] += 3000

    assert steps.trusts_steps(HEADS, torch.bfloat16)
    TRUST.forget()
    monkeypatch.setattr(fused, "gate", gate)
    assert not steps.trusts_steps(HEADS, torch.bfloat16)


def test_a_wrong_sinkhorn_is_left_out(monkeypatch):
    real = sinkhorn.balanced
    monkeypatch.setattr(sinkhorn, "balanced", lambda *args: real(*args).flip(0))
    plain = Sinkhorn(4, 20, 1e-6, torch.device("cpu"))
    assert not plain._for_cpu
    scores = torch.randn(3, 16)
    torch.testing.assert_close(plain(scores), real(scores, 20, 1e-6), rtol=2e-5, atol=1e-7)


def test_numbers_that_are_none_are_no_agreement():
    assert not Comparison(error=math.nan, limit=1.0).is_right
    assert Comparison(error=1.0, limit=1.0).is_right


def test_a_kernel_that_cannot_be_compiled_is_left_out(caplog):
    def fails() -> Comparison:
        raise RuntimeError("LLVM ERROR: no such instruction")

    trust = Trust()
    assert not trust.in_kernel("norm", fails)
    assert "kernel 'norm'" in caplog.text


class Notes:
    """Verdicts of earlier processes, in memory."""

    def __init__(self, **known: bool):
        self.known = known

    def get(self, kernel: str) -> bool | None:
        return self.known.get(kernel)

    def put(self, kernel: str, *, is_right: bool) -> None:
        self.known[kernel] = is_right


def test_a_kernel_is_compared_once_and_then_remembered(caplog):
    calls = []

    def check() -> Comparison:
        calls.append(1)
        return Comparison(error=0.0, limit=1.0)

    notes = Notes()
    first, second = Trust(notes), Trust(notes)
    assert all(first.in_kernel("norm", check) for _ in range(3))
    assert second.in_kernel("norm", check)
    assert len(calls) == 1
    assert not caplog.records


def test_a_kernel_that_was_wrong_is_named_again_in_each_process(caplog):
    trust = Trust(Notes(norm=False))
    for _ in range(2):
        assert not trust.in_kernel("norm", lambda: pytest.fail("it is known"))
    (record,) = caplog.records
    assert "kernel 'norm' gives other results than torch" in record.getMessage()
