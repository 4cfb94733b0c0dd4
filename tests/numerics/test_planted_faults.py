"""Faults of the kind that once shipped, planted one by one: the matrix must see each of them.

Each is wrong only for some sizes of a batch, or only behind a context, as such faults are. The
first is the one that shipped, with the check that would refuse it today taken away.
"""

from __future__ import annotations

import pytest
import torch

from ds4py.errors import KernelError
from ds4py.kernels import memory
from ds4py.kernels.cpu import attention as cpu_attention
from ds4py.kernels.cpu import fused, gemv
from ds4py.kernels.cpu import linear as cpu
from ds4py.layers import attention, torch_steps
from ds4py.models.deepseek4.attention import GroupedOutput
from tests.numerics.measure import Found, measure_layers
from tests.numerics.modes import Mode, defaults, row_of
from tests.numerics.truths import FILES, truth

pytestmark = pytest.mark.xdist_group("numerics")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


def default_of(architecture: str) -> Mode:
    (mode,) = (row_of(choice) for choice in defaults() if choice.architecture == architecture)
    assert mode is not None
    return mode


def faults(architecture: str, situation: str, *sizes: int) -> list[str]:
    """What the matrix says of the default mode of an architecture."""
    mode, found = default_of(architecture), Found()
    file = FILES[architecture][0]
    exact = truth(file, rounds=mode.rounds)
    measure_layers(mode, file, exact, found, sizes, [situation])
    return found.faults


@pytest.mark.parametrize("architecture", FILES)
@pytest.mark.parametrize("situation", ["span", "tail", "sessions"])
def test_without_a_planted_fault_there_is_none(architecture, situation):
    assert faults(architecture, situation, 1, 2, 3, 5, 13) == []


def slices_of_columns(self, heads: torch.Tensor) -> torch.Tensor:
    """`GroupedOutput.__call__` as it was."""
    grouped = heads.view(heads.shape[0], len(self._groups), -1)
    low = [linear(grouped[:, number]) for number, linear in enumerate(self._groups)]
    return self._join(torch.cat(low, 1))


def trusting(self, tensor, dtype, name, device=torch.device("cpu")):  # noqa: B008
    """`KernelBuffer.__init__` without its check."""
    self.tensor, self.dtype, self.shape = tensor, dtype, tuple(tensor.shape)
    self.address, self.row_bytes = tensor.data_ptr(), tensor[0].numel() * tensor.itemsize


@pytest.mark.parametrize("situation", ["span", "tail", "sessions"])
def test_rows_with_gaps_are_seen(monkeypatch, situation):
    """Off by 0.13 after the first layer for 2 to 12 rows; right for 1 and for 13."""
    monkeypatch.setattr(GroupedOutput, "__call__", slices_of_columns)
    monkeypatch.setattr(memory.KernelBuffer, "__init__", trusting)
    found = faults("deepseek4", situation, 1, 2, 12, 13)
    assert any(" of 2 rows" in fault for fault in found)
    assert any(" of 12 rows" in fault for fault in found)
    assert not any(" of 1 rows" in fault or " of 13 rows" in fault for fault in found)


def test_rows_with_gaps_are_refused_at_the_door(monkeypatch):
    monkeypatch.setattr(GroupedOutput, "__call__", slices_of_columns)
    with pytest.raises(KernelError, match="strides"):
        faults("deepseek4", "span", 2)


class Twisted:
    """A kernel whose arguments are changed on the way."""

    def __init__(self, kernel, twist):
        self._kernel, self._twist = kernel, twist

    def parallel(self, *values: int) -> None:
        """As `Kernel.parallel`."""
        self._kernel.parallel(*self._twist(list(values)))


def plant_in_product(monkeypatch, which, twist) -> None:
    """Change what the product of some rows gets, where `which(count, alone)`."""
    real = gemv._product

    def product(form: str, count: int, *, alone: bool):
        kernel = real(form, count, alone=alone)
        return Twisted(kernel, twist) if which(count, alone) else kernel

    monkeypatch.setattr(gemv, "_product", product)


STRIDE, CODES = 9, 4
"""Which argument of a product is the distance of result rows, and which the first activation."""


def test_a_wrong_stride_is_seen(monkeypatch):
    def twist(values: list[int]) -> list[int]:
        values[STRIDE] -= 1
        return values

    plant_in_product(monkeypatch, lambda count, alone: count > 1, twist)
    found = faults("llama", "sessions", 1, 2, 3, 13)
    assert any(" of 3 rows" in fault for fault in found)
    assert not any(" of 1 rows" in fault for fault in found)


def test_an_activation_of_the_row_before_is_seen(monkeypatch):
    """What is left over of a batch after groups of eight, four and two."""

    def twist(values: list[int]) -> list[int]:
        width = values[2] * 32  # blocks of Q4_1
        values[CODES] -= 2 * width
        return values

    plant_in_product(monkeypatch, lambda count, alone: count == 1 and not alone, twist)
    assert faults("llama", "sessions", 2, 4) == []
    assert any(" of 3 rows" in fault for fault in faults("llama", "sessions", 2, 3, 4))


def test_a_key_too_few_behind_a_context_is_seen(monkeypatch):
    real = attention.attend_many
    monkeypatch.setattr(
        torch_steps,
        "attend_many",
        lambda q, kv, pos0, rules: real(q, kv, pos0 - 1 if pos0 else 0, rules),
    )
    assert faults("llama", "span", 2, 16) == []
    assert faults("llama", "tail", 2, 16) != []


def test_stale_memory_between_batches_is_seen(monkeypatch):
    """A norm that finds its result there already, from the batch before."""
    real, seen = fused.FusedNorm.__call__, set()

    def call(self, x, out) -> None:
        if (id(self), id(out)) not in seen:
            real(self, x, out)
        seen.add((id(self), id(out)))

    monkeypatch.setattr(fused.FusedNorm, "__call__", call)
    assert any(" of 3 rows" in fault for fault in faults("llama", "sessions", 3, 2, 3))


def test_the_mask_of_another_row_is_seen(monkeypatch):
    def hide(scores: torch.Tensor) -> None:
        T, n_keys = scores.shape[1], scores.shape[3]
        later = torch.ones((T, T), dtype=torch.bool).triu_(1)
        if T == 5:
            later[2:4] = later[2:4].flip(0)
        scores[..., n_keys - T :].masked_fill_(later.unsqueeze(1), -torch.inf)

    monkeypatch.setattr(attention, "_hide_later", hide)
    found = faults("llama", "tail", 3, 5, 13)
    assert found
    assert all(" of 5 rows" in fault for fault in found)


def test_swapped_heads_in_batches_of_three_are_seen(monkeypatch):
    real = cpu_attention.attend

    def attend(heads, qkv, row, place, out, *weights) -> None:
        real(heads, qkv, row, place, out, *weights)
        if qkv.shape[0] == 3:
            by_head = out.tensor[row].view(-1, heads.width)
            by_head[:2] = by_head[:2].flip(0)

    monkeypatch.setattr(cpu_attention, "attend", attend)
    found = faults("llama", "sessions", 2, 3, 5)
    assert found
    assert all(" of 3 rows" in fault for fault in found)


def test_experts_of_many_rows_that_take_each_others_place_are_seen(monkeypatch):
    """The first and last row of what is decoded at once change places, from 13 rows on."""
    real = cpu.multiply_decoded

    def swapped(packed, x):
        y = real(packed, x)
        return torch.cat((y[-1:], y[1:-1], y[:1])) if x.shape[0] > 1 else y

    monkeypatch.setattr(cpu, "multiply_decoded", swapped)
    found = faults("deepseek4", "span", 12, 13, 16)
    assert any(" of 13 rows" in fault for fault in found)
