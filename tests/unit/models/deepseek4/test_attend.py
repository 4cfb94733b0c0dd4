"""Attention over given rows: golden vector B.7, masks and sums against double loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds4py.models.deepseek4.attend import Keys, attend, finished_mask, recent_mask
from tests.unit.models.deepseek4.support import CPU, normal

B7_Q = torch.tensor([[[2.0, -1]]])
B7_ROWS = torch.tensor([[1.0, 0], [0, 1], [1, 1]])
B7_OUT = [0.74142825, 0.30437479]


def test_b7_and_point_26_the_sink_takes_weight_and_gives_no_value():
    out = attend(B7_Q, torch.tensor([0.5]), Keys(B7_ROWS, None))
    assert out.flatten().tolist() == pytest.approx(B7_OUT, rel=1e-6)


@pytest.mark.parametrize("n_shared", [0, 1, 2])
def test_b7_with_rows_of_the_querys_own(n_shared):
    shared, own = Keys(B7_ROWS[:n_shared], None), Keys(B7_ROWS[n_shared:].unsqueeze(0), None)
    out = attend(B7_Q, torch.tensor([0.5]), shared, own)
    assert out.flatten().tolist() == pytest.approx(B7_OUT, rel=1e-6)


def test_point_26_the_sink_is_not_scaled_and_takes_part_in_the_maximum():
    rows = torch.ones(1, 64)
    out = attend(
        torch.zeros(1, 3, 64), torch.tensor([math.log(3), 200.0, -200.0]), Keys(rows, None)
    )
    assert out[0, :, 0].tolist() == pytest.approx([0.25, 0, 1])
    # scores far beyond the range of exp: only differences to the largest matter
    out = attend(torch.full((1, 1, 64), 500.0), torch.tensor([3999.0]), Keys(rows, None))
    assert out[0, 0, 0].item() == pytest.approx(1 / (1 + math.exp(-1)), rel=1e-3)


def attended_by_loop(q, sinks, rows, sees) -> np.ndarray:
    """Attend query by query and head by head in float64; `sees[t][j]` is the mask."""
    out = np.zeros(q.shape)
    for t, h in np.ndindex(*q.shape[:2]):
        keys = [row for row, seen in zip(rows[t], sees[t], strict=True) if seen]
        z = [float(q[t, h] @ key) / math.sqrt(q.shape[2]) for key in keys]
        top = max([float(sinks[h]), *z])
        shares = [math.exp(each - top) for each in z]
        total = sum(shares) + math.exp(float(sinks[h]) - top)
        out[t, h] = sum(s / total * key for s, key in zip(shares, keys, strict=True))
    return out


masks = st.none() | st.integers(0, 2**30)


def drawn_mask(bits: int | None, n_tokens: int, n_rows: int) -> torch.Tensor | None:
    if bits is None:
        return None
    flat = [bits >> (place % 30) & 1 == 1 for place in range(n_tokens * n_rows)]
    return torch.tensor(flat, dtype=torch.bool).view(n_tokens, n_rows)


@given(
    n_tokens=st.integers(1, 4),
    n_shared=st.integers(1, 7),
    n_own=st.none() | st.integers(1, 5),
    mask_bits=st.tuples(masks, masks),
    seed=st.integers(0, 100),
)
def test_attention_is_the_sum_over_what_the_masks_leave(n_tokens, n_shared, n_own, mask_bits, seed):
    q, sinks = normal(n_tokens, 3, 8, seed=seed), normal(3, seed=seed + 1)
    shared = Keys(normal(n_shared, 8, seed=seed + 2), drawn_mask(mask_bits[0], n_tokens, n_shared))
    every, seen = [shared.rows.expand(n_tokens, -1, -1)], [shared.mask]
    own = None
    if n_own is not None:
        own = Keys(
            normal(n_tokens, n_own, 8, seed=seed + 3), drawn_mask(mask_bits[1], n_tokens, n_own)
        )
        every.append(own.rows)
        seen.append(own.mask)
    sees = [
        torch.ones(n_tokens, part.shape[1], dtype=torch.bool) if mask is None else mask
        for part, mask in zip(every, seen, strict=True)
    ]
    expected = attended_by_loop(
        q.double().numpy(), sinks, torch.cat(every, 1).double().numpy(), torch.cat(sees, 1)
    )
    assert attend(q, sinks, shared, own).numpy() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_point_38_a_query_that_sees_no_row_at_all_gets_zeros():
    nothing = torch.tensor([[False, False, False], [True, False, False]])
    out = attend(B7_Q.expand(2, 1, 2).contiguous(), torch.tensor([0.5]), Keys(B7_ROWS, nothing))
    assert out[0].tolist() == [[0, 0]]
    assert out[1, 0, 0] > 0


@given(start=st.integers(0, 300), n=st.integers(1, 70), window=st.integers(1, 140))
def test_point_20_a_query_sees_its_own_row_and_the_window_before(start, n, window):
    queries, first = range(start, start + n), max(start - window + 1, 0)
    got = recent_mask(queries, first, window, CPU)
    expected = [[t - window < p <= t for p in range(first, start + n)] for t in queries]
    if got is None:
        assert all(map(all, expected))
    else:
        assert got.tolist() == expected
    assert all(sum(row) == min(t + 1, window) for row, t in zip(expected, queries, strict=True))


@pytest.mark.parametrize("ratio", [4, 128])
@given(start=st.integers(0, 600), n=st.integers(1, 140))
def test_point_19_a_row_is_visible_from_the_last_token_of_its_window_on(ratio, start, n):
    queries = range(start, start + n)
    n_rows = queries.stop // ratio
    got = finished_mask(queries, n_rows, ratio, CPU)
    expected = [[ratio * c + ratio - 1 <= t for c in range(n_rows)] for t in queries]
    if got is None:
        assert all(map(all, expected))
    else:
        assert got.tolist() == expected


@pytest.mark.parametrize("masked", [(False, False), (True, False), (False, True), (True, True)])
def test_keys_side_by_side_keep_their_masks(masked):
    left_mask = torch.tensor([[True, False], [False, True]]) if masked[0] else None
    right_mask = torch.tensor([[False], [True]]) if masked[1] else None
    left, right = normal(2, 4), normal(1, 4, seed=1)
    both = Keys(left, left_mask).beside(Keys(right, right_mask))
    assert torch.equal(both.rows, torch.cat((left, right)))
    if not any(masked):
        assert both.mask is None
        return
    columns = [[True, False], [False, True]] if masked[0] else [[True, True]] * 2
    last = [[False], [True]] if masked[1] else [[True]] * 2
    assert both.mask.tolist() == [a + b for a, b in zip(columns, last, strict=True)]
