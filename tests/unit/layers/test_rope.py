import math

import pytest
import torch

from ds4py.layers.rope import Rope, RopeParams, frequencies_of, length_factor

CPU = torch.device("cpu")


def test_adjacent_pairs_turn_by_position_times_frequency():
    rope = Rope(RopeParams(n_dims=8, base=100.0), 32, CPU)
    heads = torch.randn(3, 2, 8)
    before = heads.clone()
    rope.rotate_(heads, rope.at(7, 3))
    for t in range(3):
        for pair in range(4):
            angle = (7 + t) * 100.0 ** (-pair / 4)
            a, b = before[t, :, 2 * pair], before[t, :, 2 * pair + 1]
            c, s = math.cos(angle), math.sin(angle)
            torch.testing.assert_close(heads[t, :, 2 * pair], a * c - b * s)
            torch.testing.assert_close(heads[t, :, 2 * pair + 1], a * s + b * c)


def test_values_beyond_the_rotated_ones_stay():
    rope = Rope(RopeParams(n_dims=4, base=100.0), 32, CPU)
    heads = torch.randn(1, 2, 8)
    before = heads.clone()
    rope.rotate_(heads, rope.at(5, 1))
    assert torch.equal(heads[..., 4:], before[..., 4:])
    assert not torch.equal(heads[..., :4], before[..., :4])


def test_products_of_rotated_vectors_depend_on_the_distance_only():
    rope = Rope(RopeParams(n_dims=16, base=10000.0), 4096, CPU)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def product(at_q: int, at_k: int) -> torch.Tensor:
        a, b = q.clone(), k.clone()
        rope.rotate_(a, rope.at(at_q, 1))
        rope.rotate_(b, rope.at(at_k, 1))
        return (a * b).sum()

    torch.testing.assert_close(product(9, 4), product(4000, 3995), rtol=1e-4, atol=1e-4)


def test_yarn_leaves_fast_pairs_alone_and_slows_slow_ones_fully():
    params = RopeParams(n_dims=64, base=10000.0, scaling="yarn", factor=8.0, n_ctx_original=2048)
    plain = frequencies_of(RopeParams(n_dims=64, base=10000.0))
    ratio = plain / frequencies_of(params)
    assert ratio[0] == 1
    assert ratio[-1] == 8
    assert (ratio.diff() >= 0).all()
    assert length_factor(params) == pytest.approx(1 + 0.1 * math.log(8))


def test_yarn_without_extension_is_plain():
    params = RopeParams(n_dims=64, base=10000.0, scaling="yarn", factor=1.0, n_ctx_original=2048)
    plain = frequencies_of(RopeParams(n_dims=64, base=10000.0))
    torch.testing.assert_close(frequencies_of(params), plain)
    assert length_factor(params) == 1
