"""Hyper-connections: golden vector B.2, Sinkhorn against a loop in float64, special cases."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds4py.models.deepseek4.hyper import HyperConnection, HyperHead, StreamMix
from tests.unit.models.deepseek4.support import known_shape, normal

EPS = 1e-6
SHAPE = known_shape(0)
S = SHAPE.n_streams

B2_MIX = [1.0, -1, 0, 2, 0, 1, -2, 3] + [0.0] * 16
B2_BASE = [0.0] * 8 + [3.0, 0, 1, 0, 0, 2, 0, 0, 0, 0, 1, -1, 1, 0, 0, 4]
B2_STREAMS = [0.0, 1, 2, 3, 4, 5, 6, 7]
B2_MATRIX = [
    [0.7393328, 0.05070456, 0.18144059, 0.02856101],
    [0.07263842, 0.73931885, 0.13171835, 0.05636032],
    [0.13172174, 0.18144198, 0.6492774, 0.03759879],
    [0.05630608, 0.02853365, 0.03756272, 0.8774789],
]


def matrix_for(hidden: torch.Tensor, mix: Sequence[float]) -> torch.Tensor:
    """A matrix whose product with this normed state `[S * D]` is `mix`."""
    normed = hidden.double() / (hidden.double().square().mean() + EPS).sqrt()
    return (torch.outer(torch.tensor(mix).double(), normed) / normed.square().sum()).float()


def split(
    hidden: torch.Tensor, mix: Sequence[float], base: Sequence[float], **changes: object
) -> tuple[torch.Tensor, StreamMix]:
    """Split a state `[1, S * D]` whose mix, before scale and base, is given."""
    fn, shape = matrix_for(hidden[0], mix), replace(SHAPE, **changes)
    return HyperConnection(fn, torch.ones(3), torch.tensor(base), shape).split(hidden)


def balanced(scores: torch.Tensor, n_columns: int = 20) -> np.ndarray:
    """Return the matrix that a connection makes of scores `[S, S]`."""
    base = [0.0] * 8 + scores.flatten().tolist()
    _, mix = split(torch.ones(1, 8), [0.0] * 24, base, sinkhorn=n_columns)
    return mix.residual[0].double().numpy()


def b2() -> tuple[torch.Tensor, StreamMix, torch.Tensor]:
    hidden = torch.tensor([B2_STREAMS])
    return *split(hidden, B2_MIX, B2_BASE), hidden


def sinkhorn_loop(scores: np.ndarray, n_columns: int) -> np.ndarray:
    """Softmax of rows, then columns and rows by turns, one sum after the other."""
    c = [[math.exp(z - max(row)) for z in row] for row in scores.tolist()]
    c = [[e / sum(row) + EPS for e in row] for row in c]
    for number in range(n_columns):
        if number:
            c = [[e / (sum(row) + EPS) for e in row] for row in c]
        totals = [sum(row[j] for row in c) + EPS for j in range(S)]
        c = [[row[j] / totals[j] for j in range(S)] for row in c]
    return np.array(c)


def test_b2_and_point_3_pre_has_epsilon_and_post_is_doubled_without():
    x, mix, _ = b2()
    post = [1, 1.4621172, 0.23840584, 1.9051483]
    assert mix.post[0].tolist() == pytest.approx(post, rel=2e-7)
    assert x[0].tolist() == pytest.approx([7.822677, 10.203478], rel=2e-7)


def test_point_3_epsilon_is_all_that_a_closed_stream_gives():
    hidden = torch.tensor([[3.0, 0, 5, 0, 7, 0, 11, 0]])
    x, mix = split(hidden, [-200.0] * 8 + [0.0] * 16, [0.0] * 24)
    assert x[0].tolist() == pytest.approx([EPS * (3 + 5 + 7 + 11), 0])
    assert not mix.post.any()


def test_b2_and_point_2_the_matrix():
    _, mix, _ = b2()
    assert mix.residual[0].numpy() == pytest.approx(np.array(B2_MATRIX), rel=1e-6)
    rows = [1.000039, 1.0000359, 1.0000398, 0.9998813]
    assert mix.residual[0].sum(1).tolist() == pytest.approx(rows, abs=2e-6)


def test_b2_and_point_1_the_rows_of_the_matrix_are_the_sources():
    _, mix, hidden = b2()
    got = mix.merge(torch.tensor([[10.0, 20.0]]), hidden)
    expected = [11.01, 22.009998, 16.996778, 32.61795, 5.469981, 8.854038, 24.579472, 44.630955]
    assert got[0].tolist() == pytest.approx(expected, rel=5e-7)


def test_point_1_a_stream_goes_where_its_row_says():
    residual = torch.zeros(1, S, S)
    residual[0, 0, 3] = 1.0
    hidden = torch.arange(8.0).view(1, 8)
    got = StreamMix(torch.zeros(1, S), residual).merge(torch.zeros(1, 2), hidden)
    assert got.tolist() == [[0, 0, 0, 0, 0, 0, 0, 1]]


def test_point_2_twenty_columns_and_nineteen_rows_ending_with_columns():
    # a triangle has no doubly stochastic form: it is still moving after twenty rounds
    scores = normal(S, S) + torch.full((S, S), -30.0).triu(1)
    got = balanced(scores)
    assert got == pytest.approx(sinkhorn_loop(scores.numpy(), 20), rel=1e-5)
    for n_columns in (19, 21):
        assert got != pytest.approx(sinkhorn_loop(scores.numpy(), n_columns), rel=1e-3)
    assert got.sum(1) != pytest.approx(np.ones(S), rel=1e-2)


def test_point_2_epsilon_is_added_after_the_softmax_and_in_every_denominator():
    scores = torch.full((S, S), -1e4)
    scores.fill_diagonal_(0.0)
    got = balanced(scores)
    assert got[0, 1] == pytest.approx(EPS, rel=1e-3)
    assert got.sum(0) == pytest.approx([1 - EPS] * S, abs=2e-7)


@given(st.lists(st.floats(-30, 30, width=32), min_size=S * S, max_size=S * S))
def test_point_2_the_matrix_is_that_of_a_loop_and_its_columns_add_up_to_one(scores):
    got = balanced(torch.tensor(scores).view(S, S))
    expected = sinkhorn_loop(np.reshape(scores, (S, S)), 20)
    assert got == pytest.approx(expected, rel=2e-4, abs=1e-9)
    assert got.sum(0) == pytest.approx(expected.sum(0), abs=1e-6)
    assert got.sum(0) == pytest.approx(np.ones(S), abs=1e-2)


def test_point_4_the_norm_is_one_over_all_streams():
    hidden = torch.cat((normal(3, 3 * 64), 1000 * normal(3, 64, seed=1)), 1)
    fn = normal(24, 4 * 64, seed=2, scale=0.1)
    _, mix = HyperConnection(fn, torch.ones(3), torch.zeros(24), SHAPE).split(hidden)
    exact = hidden.double()
    normed = exact / (exact.square().mean(1, keepdim=True) + EPS).sqrt()
    expected = 2 * (normed @ fn.double().t())[:, S : 2 * S].sigmoid()
    assert torch.allclose(mix.post.double(), expected, rtol=1e-5)


@pytest.mark.parametrize(("size", "factor"), [(1e-3, math.sqrt(0.5)), (0.0, 0.0)])
def test_point_4_the_norm_has_its_epsilon(size, factor):
    fn = torch.eye(24, 8)
    hidden = torch.full((1, 8), size)
    _, mix = HyperConnection(fn, torch.ones(3), torch.zeros(24), SHAPE).split(hidden)
    assert mix.post[0].tolist() == pytest.approx([2 / (1 + math.exp(-factor))] * S)


def test_the_three_parts_have_scales_of_their_own():
    hidden = torch.tensor([B2_STREAMS])
    fn = matrix_for(hidden[0], B2_MIX)
    scale, base = torch.tensor([0.5, 2.0, 3.0]), torch.tensor(B2_BASE)
    _, mix = HyperConnection(fn, scale, base, SHAPE).split(hidden)
    post = [2 / (1 + math.exp(-2 * m)) for m in B2_MIX[4:8]]
    assert mix.post[0].tolist() == pytest.approx(post)
    x, _ = HyperConnection(fn, scale, torch.zeros(24), SHAPE).split(hidden)
    pre = [1 / (1 + math.exp(-m / 2)) + EPS for m in B2_MIX[:4]]
    expected = sum(p * h for p, h in zip(pre, B2_STREAMS[::2], strict=True))
    assert x[0, 0].item() == pytest.approx(expected)


def test_point_5_the_head_neither_normalizes_nor_shares_its_weights():
    hidden = torch.tensor([B2_STREAMS])
    mix = [1.0, -1, 0.5, 2]
    fn = matrix_for(hidden[0], mix)
    scale, base = torch.tensor([1.5]), torch.tensor([0.25, 0, 0, -1])
    weights = [1 / (1 + math.exp(-(1.5 * m + b))) + EPS for m, b in zip(mix, base, strict=True)]
    assert sum(weights) > 2
    expected = [sum(w * h for w, h in zip(weights, B2_STREAMS[d::2], strict=True)) for d in (0, 1)]
    assert HyperHead(fn, scale, base, SHAPE)(hidden)[0].tolist() == pytest.approx(expected)


def test_open_gates_and_a_diagonal_make_a_plain_residual_network():
    """Stream 0 gives all, takes all, and keeps to itself; the others only keep what they have."""
    base = [40.0, -40, -40, -40, 0.0, -40, -40, -40, *(40 * torch.eye(S)).flatten().tolist()]
    hidden, y = normal(5, S * 64), normal(5, 64, seed=1)
    x, mix = HyperConnection(
        torch.zeros(24, S * 64), torch.ones(3), torch.tensor(base), SHAPE
    ).split(hidden)
    assert torch.allclose(x, hidden[:, :64], atol=1e-4)
    merged = mix.merge(y, hidden)
    assert torch.allclose(merged[:, :64], hidden[:, :64] + y, atol=1e-4)
    assert torch.allclose(merged[:, 64:], hidden[:, 64:], atol=1e-4)


def test_tokens_do_not_see_each_other_and_the_state_before_is_kept():
    hidden = normal(4, S * 32)
    before = hidden.clone()
    layer = HyperConnection(
        normal(24, S * 32, seed=1, scale=0.1), torch.ones(3), normal(24, seed=2), SHAPE
    )
    y = normal(4, 32, seed=3)
    x, mix = layer.split(hidden)
    merged = mix.merge(y, hidden)
    assert torch.equal(hidden, before)
    for token in range(4):
        row = hidden[token : token + 1]
        x_alone, mix_alone = layer.split(row)
        assert torch.allclose(x_alone, x[token], atol=1e-6)
        alone = mix_alone.merge(y[token : token + 1], row)
        assert torch.allclose(alone, merged[token], atol=1e-5)
