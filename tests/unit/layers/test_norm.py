import math

import torch

from ds4py.layers.norm import RmsNorm


def test_the_norm_is_the_formula_row_by_row():
    x, weight = torch.randn(5, 48) * 3, torch.randn(48)
    got = RmsNorm(weight, 1e-5, torch.float32)(x)
    for row, out in zip(x.double(), got, strict=True):
        expected = row / math.sqrt((row * row).mean().item() + 1e-5) * weight.double()
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


def test_epsilon_bounds_the_gain_of_a_tiny_row():
    got = RmsNorm(torch.ones(16), 1e-2, torch.float32)(torch.full((1, 16), 1e-6))
    torch.testing.assert_close(got, torch.full((1, 16), 1e-5), rtol=1e-4, atol=0)


def test_a_row_of_zeros_stays_zero_and_the_input_is_not_changed():
    x = torch.zeros(2, 16)
    got = RmsNorm(torch.ones(16), 1e-5, torch.bfloat16)(x)
    assert got.dtype is torch.bfloat16
    assert not got.any()
    assert not x.any()
