"""Both code paths against the formula, including blocks and a cache that is longer than used."""

import math

import pytest
import torch

from ds4py.layers import attention
from ds4py.layers.attention import attend_many, attend_one

GROUPS, PER_GROUP, D = 2, 3, 16
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def cache(n_valid: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows after the valid ones hold what memory held: here the worst."""
    kv = torch.full((2 * GROUPS, n_valid + 9, D), math.nan, dtype=dtype)
    kv[:, :n_valid] = torch.randn(2 * GROUPS, n_valid, D)
    return kv


def expected(q: torch.Tensor, kv: torch.Tensor, n_keys: int) -> torch.Tensor:
    """One token `[G, H / G, D]`, in float64."""
    rows = kv[:, :n_keys].double()
    heads = []
    for group in range(GROUPS):
        scores = q[group].double() @ rows[group].T / math.sqrt(D)
        heads.append(scores.softmax(1) @ rows[GROUPS + group])
    return torch.cat(heads).reshape(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_keys", [1, 2, 50])
def test_one_token_attends_to_all_valid_rows(dtype, n_keys):
    q, kv = torch.randn(GROUPS, PER_GROUP, D), cache(n_keys, dtype)
    got = attend_one(q, kv, n_keys)
    assert got.dtype is dtype
    error = (got[0].double() - expected(q, kv, n_keys)).abs().max()
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("pos0", "T"), [(0, 1), (0, 5), (7, 2), (3, 8), (0, 17), (30, 19)])
def test_each_token_attends_to_itself_and_what_was_before(monkeypatch, dtype, pos0, T):
    monkeypatch.setattr(attention, "QUERY_BLOCK", 8)
    q, kv = torch.randn(T, GROUPS, PER_GROUP, D), cache(pos0 + T, dtype)
    got = attend_many(q, kv, pos0)
    assert got.shape == (T, GROUPS * PER_GROUP * D)
    for t in range(T):
        error = (got[t].double() - expected(q[t], kv, pos0 + t + 1)).abs().max()
        assert error < TOLERANCE[dtype]
