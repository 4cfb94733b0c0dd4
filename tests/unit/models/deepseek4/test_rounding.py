"""The hard roundings: golden vectors B.1, B.4, B.5, and searches in tables of all codes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds4py.models.deepseek4.rounding import (
    hadamard,
    round_e2m1,
    round_index,
    round_kv,
    round_q8_0,
    round_q8_k,
)
from tests.unit.models.deepseek4.support import normal

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [m * 2.0**-9 for m in range(8)]
E4M3 += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]

values = st.floats(-1e4, 1e4, width=32)
tiny_or_more = values.map(lambda x: x if abs(x) > 1e-30 else 0.0)
"""The scale of smaller blocks has no reciprocal in float32."""


def nearest(x: float, codes: list[float]) -> float:
    """Search the table: the nearest code, of two equally near ones the even number."""
    number = min(range(len(codes)), key=lambda n: (abs(codes[n] - abs(x)), n % 2))
    return math.copysign(codes[number], x)


def power_of_two_at_least(x: float) -> float:
    mantissa, exponent = math.frexp(x)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def padded(first: list[float], width: int) -> torch.Tensor:
    return torch.tensor(first + [0.0] * (width - len(first)))


# --- int8 activations -----------------------------------------------------------------------------


def test_b1_q8_0_vector():
    got = round_q8_0(torch.linspace(-1, 1, 32))
    q = [-127, -119, -111, -102, -94, -86, -78, -70, -61, -53, -45, -37, -29, -20, -12, -4]
    q += [-each for each in reversed(q)]
    assert torch.equal(got, torch.tensor(q) * torch.tensor(0.007874016))


def test_b1_q8_k_vector_with_a_negative_extreme():
    got = round_q8_k(padded([-2, 1, 0.5, -0.01], 256))
    expected = torch.tensor([-127.0, 64, 32, -1]) * torch.tensor(0.015748031)
    assert torch.equal(got[:4], expected)
    assert not got[4:].any()


def test_b1_q8_k_vector_with_a_positive_extreme():
    got = round_q8_k((torch.arange(256) - 100) / 16)
    d = torch.tensor(-0.0762795284)
    q = (got / d).round()
    assert torch.equal(got, q * d)
    assert q[:4].tolist() == [82, 81, 80, 79]
    assert q[-3:].tolist() == [-125, -126, -127]
    assert q.sum() == -5769


def test_point_32_the_extreme_of_q8_k_is_minus_127_times_the_inverse_of_its_own_inverse():
    for extreme in normal(50, scale=5).tolist():
        inverse = np.float32(-127) / np.float32(extreme)
        expected = np.float32(-127) * (np.float32(1) / inverse)
        got = round_q8_k(padded([extreme], 256))[0].item()
        assert got == expected


def test_point_32_of_equal_magnitudes_the_first_decides_the_sign():
    # 0.5 / 127 is a tie for one sign as for the other: even goes to 0 in both, so look at d
    first = round_q8_k(padded([3.0, -3.0, 0.1], 256))
    second = round_q8_k(padded([-3.0, 3.0, 0.1], 256))
    assert first.tolist()[2] == second.tolist()[2]
    assert first.tolist()[:2] == [-each for each in second.tolist()[:2]]


def test_point_33_the_scale_of_q8_0_stays_float32():
    x = normal(32)
    scale = x.abs().max() / 127
    assert scale.half().float() != scale
    got = round_q8_0(x)
    assert torch.equal(got, (got / scale).round() * scale)


@pytest.mark.parametrize(("rounding", "width"), [(round_q8_0, 32), (round_q8_k, 256)])
def test_point_34_int8_ties_go_to_the_even_integer(rounding, width):
    halves = [0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, 125.5]
    got = rounding(padded([127.0, *halves], width))
    assert got[: len(halves) + 1].tolist() == [127, 0, 2, 2, 4, 0, -2, -2, 126]


@pytest.mark.parametrize(("rounding", "width"), [(round_q8_0, 32), (round_q8_k, 256)])
def test_blocks_too_small_for_a_scale_become_zeros(rounding, width):
    assert not rounding(padded([1e-39, -1e-40], width)).any()


@pytest.mark.parametrize(("rounding", "width"), [(round_q8_0, 32), (round_q8_k, 256)])
def test_int8_blocks_are_independent_and_a_block_of_zeros_stays_zero(rounding, width):
    x = torch.cat((torch.zeros(width), normal(width), normal(width, seed=1) * 1e6))
    got = rounding(x.view(1, -1)).view(3, width)
    assert not got[0].any()
    assert torch.equal(got[1], rounding(x[width : 2 * width]))
    assert torch.equal(got[2], rounding(x[2 * width :]))


@given(st.lists(tiny_or_more, min_size=32, max_size=32))
def test_q8_0_is_never_further_off_than_half_a_step(row):
    x = torch.tensor(row)
    step = x.abs().max() / 127
    assert ((round_q8_0(x) - x).abs() <= step * 0.5001).all()


# --- FP8 cache rows -------------------------------------------------------------------------------


def kv(block: list[float], rotary: list[float] | None = None) -> list[float]:
    """Round one block of 64 and a rotary part; return as many values as were given."""
    rotary = rotary or [0.0, 0.0]
    row = round_kv(torch.cat((padded(block, 64), torch.tensor(rotary))), len(rotary)).float()
    return [*row[: len(block)].tolist(), *row[64:].tolist()]


def test_b4_kv_vector():
    got = kv([0.1, -0.2, 0.3, 1, -3.7, 0.013, 5.5, -0.0009])[:8]
    expected = [0.1015625, -0.203125, 0.3125, 1, -3.75, 0.0126953125, 5.5, -9.15527344e-4]
    assert got == pytest.approx(expected, rel=1e-8)


def test_b4_kv_vector_below_the_floor():
    got = kv([1e-6, 2e-6, -3e-6, 5e-5])[:4]
    expected = [9.5367432e-7, 1.9073486e-6, -3.0994415e-6, 4.9591064e-5]
    assert got == pytest.approx(expected, rel=1e-7)


def test_point_13_the_rotary_part_is_only_rounded_to_half():
    assert kv([448.0], [0.1, 1 / 3])[1:] == pytest.approx([0.09997559, 0.33325195], rel=1e-6)


def test_b4_nearest_e4m3():
    # 448 in the block makes the scale 1
    x = [0.5, 0.53125, 0.5625, 0.59375, 2**-10, 1.5 * 2**-9, 2.5 * 2**-9, 447, 448]
    assert kv(x)[:9] == [0.5, 0.5, 0.5625, 0.625, 0, 2**-8, 2**-8, 448, 448]


def test_point_12_a_row_of_zeros_stays_zero():
    assert not round_kv(torch.zeros(3, 160), 32).any()


def test_point_12_every_64_values_have_a_scale_of_their_own():
    large, small = torch.full((64,), 0.01), torch.full((64,), 0.01)
    large[0], small[0] = 1000.0, 1.0
    got = round_kv(torch.cat((large, small, torch.zeros(2))), 2).float()
    # the smallest steps: 2**-9 times 4, and 2**-9 / 256
    assert (got[1:64] == nearest(0.01 / 4, E4M3) * 4).all()
    assert (got[65:128] == nearest(0.01 * 256, E4M3) / 256).all()
    assert got[1] != got[65]


def test_point_12_the_largest_value_is_never_clamped_because_the_scale_is_rounded_up():
    for extreme in (447.9, 448.0, 449.0, 500.0, 1e-3, 3.14):
        (got, *_) = kv([extreme])
        assert got == pytest.approx(extreme, rel=2**-4)


@given(st.lists(values, min_size=64, max_size=64))
def test_kv_rows_are_the_nearest_codes_times_the_smallest_power_of_two_that_fits(row):
    x = np.array(row, np.float32)
    largest = max(float(np.abs(x).max()), float(np.float32(1e-4)))
    scale = power_of_two_at_least(float(np.float32(largest) / np.float32(448)))
    expected = [np.float16(nearest(float(value) / scale, E4M3) * scale) for value in x]
    assert kv(x.tolist())[:64] == expected


# --- FP4 index vectors ----------------------------------------------------------------------------


def test_b5_nearest_e2m1():
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.01, 7, -2.5])
    assert round_e2m1(x).tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 6, -2]


@given(st.floats(-8, 8, width=32))
def test_e2m1_is_the_nearest_code_of_the_table(x):
    assert round_e2m1(torch.tensor([x])).item() == nearest(x, E2M1)


@pytest.mark.parametrize("middle", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
def test_point_34_beside_a_tie_of_e2m1_the_nearer_code_wins(middle):
    around = torch.tensor([middle]).expand(3).clone()
    around[0], around[2] = around[0].nextafter(around[0] - 1), around[2].nextafter(around[2] + 1)
    got = round_e2m1(around)
    assert got.tolist() == [nearest(x, E2M1) for x in around.tolist()]
    assert got[0] < got[2]


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ([1.0, 2.0], [0.25, -0.09375] * 2),
        ([1.0, 0.5, -0.25], [0.125, 0.015625, 0.125, 0.0625] * 2),
    ],
)
def test_b5_index_vectors(first, expected):
    got = round_index(padded(first, 128))
    assert got.tolist() == (expected * 64)[:128]


def test_b5_index_vector_with_all_values():
    got = round_index((torch.arange(128) % 7 - 3).float())
    expected = [-0.5, 0, 0.5, -0.5, -1, -0.5, -2, 0.5, 0, 0.5, -0.5, -0.5, -0.5, -0.5, 0.5, 0.5]
    assert got[:16].tolist() == expected
    assert math.copysign(1, got[1].item()) == -1
    assert got.sum() == -31
    assert got.square().sum() == 507


@pytest.mark.parametrize("width", [32, 128])
def test_point_23_the_transform_is_the_butterfly_of_natural_order(width):
    x = normal(width).double()
    butterfly = x.clone()
    for stride in (2**k for k in range(width.bit_length() - 1)):
        a, b = butterfly.view(-1, 2, stride).unbind(1)
        butterfly = torch.stack((a + b, a - b), 1).flatten()
    assert torch.allclose(hadamard(width).double() @ x, butterfly)


def test_point_23_index_vectors_lie_on_the_grid_of_their_block():
    got = round_index(normal(20, 128) * torch.logspace(-20, 10, 20).unsqueeze(1))
    for block in got.view(-1, 32):
        largest = block.abs().max().item()
        scale = power_of_two_at_least(largest / 6)
        assert set((block.abs() / scale).tolist()) <= set(E2M1)


def test_an_index_vector_of_zeros_stays_zero():
    assert not round_index(torch.zeros(2, 128)).any()
