"""The indexer: hand-made queries and rows, and the selection against a sorted list."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds4py.layer_range import LayerRange
from ds4py.models.base import DeviceSpec
from ds4py.models.deepseek4.cache import CacheLayout, CompressedCache
from ds4py.models.deepseek4.indexer import Indexer, IndexQueries, choose_rows
from ds4py.models.deepseek4.rotary import rotate_
from ds4py.models.deepseek4.rounding import round_index
from ds4py.models.deepseek4.shape import Shape
from tests.unit.models.deepseek4.support import (
    empty_cache,
    normal,
    place,
    small_shape,
    step_of,
    weights,
)

WIDTH, Q_RANK, D = 32, 16, 24


def shape_of(**changes: object) -> Shape:
    sizes = {"index_heads": 2, "index_width": WIDTH, "n_rot": 8, "q_rank": Q_RANK, "n_embd": D}
    return small_shape(4, **{**sizes, "index_top_k": 3, **changes})


def arrays(shape: Shape, *, seed: int = 0) -> dict[str, np.ndarray]:
    own, wide = "indexer_compressor_", 2 * WIDTH
    sizes = {
        "indexer.attn_q_b.weight": (shape.index_heads * WIDTH, Q_RANK),
        "indexer.proj.weight": (shape.index_heads, D),
        f"{own}kv.weight": (wide, D),
        f"{own}gate.weight": (wide, D),
        f"{own}ape.weight": (4, wide),
        f"{own}norm.weight": (WIDTH,),
    }
    return {
        name: normal(*size, seed=seed + k).numpy() for k, (name, size) in enumerate(sizes.items())
    }


def indexer(shape: Shape, where: DeviceSpec | None = None) -> Indexer:
    return Indexer(shape, weights(arrays(shape), where=where))


def index_cache(shape: Shape) -> CompressedCache:
    layout = CacheLayout(shape, LayerRange(0, 0), 512)
    (layer,) = layout.layers(empty_cache(layout.tensors(), math.nan))
    assert layer.index is not None
    return layer.index


def weighed_vectors(queries: IndexQueries) -> torch.Tensor:
    """Read `[T, index width]` of single-headed queries off their scores for unit rows."""
    units = torch.eye(WIDTH)
    return queries.scores(units) - queries.scores(-units)


def test_point_22_queries_are_made_only_when_a_token_sees_more_rows_than_are_chosen():
    shape = shape_of(index_top_k=3)
    part = indexer(shape)
    for pos0, n_tokens, expected in [(0, 15, False), (0, 16, True), (14, 1, False), (15, 1, True)]:
        q_low, x = normal(n_tokens, Q_RANK), normal(n_tokens, D)
        got = part.queries(q_low, x, step_of(shape, (pos0, n_tokens)))
        assert (got is not None) == expected, (pos0, n_tokens)


def test_point_22_one_long_segment_makes_queries_for_the_whole_batch():
    shape = shape_of(index_top_k=3)
    got = indexer(shape).queries(normal(3, Q_RANK), normal(3, D), step_of(shape, (0, 2), (99, 1)))
    assert got is not None
    assert got.scores(torch.zeros(5, WIDTH)).shape == (3, 5)


def test_point_23_queries_are_rotated_then_rounded():
    shape = shape_of(index_heads=1)
    q_low, x, step = normal(5, Q_RANK), torch.ones(5, D), step_of(shape, (40, 5))
    got = weighed_vectors(indexer(shape).queries(q_low, x, step))
    own = arrays(shape)
    weight = own["indexer.proj.weight"].sum() / math.sqrt(WIDTH)
    heads = (q_low @ torch.tensor(own["indexer.attn_q_b.weight"]).t()).view(5, 1, WIDTH)
    rotate_(heads, step.extended)
    expected = round_index(heads)[:, 0] * weight
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got, heads[:, 0] * weight, rtol=1e-2, atol=1e-2)


def test_point_23_rows_are_rotated_to_the_first_token_of_their_window_then_rounded():
    shape = shape_of()
    cache, step = index_cache(shape), step_of(shape, (0, 12))
    x = torch.ones(12, D)  # equal tokens: the pool is the token
    own = arrays(shape)
    own["indexer_compressor_gate.weight"] *= 0
    own["indexer_compressor_ape.weight"] *= 0
    kv = own["indexer_compressor_kv.weight"]
    kv[:WIDTH] = kv[WIDTH:]
    Indexer(shape, weights(own)).write_rows(x, step, [cache])
    row = torch.tensor(kv[:WIDTH]).sum(1)
    row = row / (row.square().mean() + 1e-6).sqrt()
    heads = (row * torch.tensor(own["indexer_compressor_norm.weight"])).expand(3, 1, -1).clone()
    rotate_(heads, step.extended[[0, 4, 8]])
    assert torch.equal(cache.rows[:3].float(), round_index(heads)[:, 0])
    assert len({tuple(row) for row in cache.rows[:3].tolist()}) == 3


def test_point_24_relu_comes_before_the_weight_which_may_be_negative():
    heads = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    queries = IndexQueries(heads, torch.tensor([[2.0, -3.0]]))
    rows = torch.tensor([[5.0, 0.0], [0.0, 5.0], [-5.0, 0.0], [0.0, -5.0], [1.0, 1.0]])
    assert queries.scores(rows).tolist() == [[10, -15, 0, 0, -1]]


@given(st.integers(0, 1000))
def test_point_24_scores_are_the_sum_over_heads(seed):
    heads, share = normal(3, 4, 8, seed=seed), normal(3, 4, seed=seed + 1)
    rows = normal(6, 8, seed=seed + 2).half()
    got = IndexQueries(heads, share).scores(rows)
    for t, c in np.ndindex(3, 6):
        dots = [float(head.double() @ rows[c].double()) for head in heads[t]]
        terms = [max(dot, 0) * float(w) for dot, w in zip(dots, share[t], strict=True)]
        assert got[t, c].item() == pytest.approx(sum(terms), rel=1e-4, abs=1e-5)


def test_the_weights_are_divided_by_the_root_of_heads_times_width():
    shape = shape_of(index_heads=4)
    x, q_low = normal(2, D), normal(2, Q_RANK)
    queries = indexer(shape).queries(q_low, x, step_of(shape, (100, 2)))
    row = normal(1, WIDTH, seed=9)
    own = arrays(shape)
    heads = (q_low @ torch.tensor(own["indexer.attn_q_b.weight"]).t()).view(2, 4, WIDTH)
    rotate_(heads, step_of(shape, (100, 2)).extended)
    share = x @ torch.tensor(own["indexer.proj.weight"]).t() / math.sqrt(4 * WIDTH)
    expected = ((round_index(heads) @ row[0]).relu() * share).sum(1, keepdim=True)
    assert torch.allclose(queries.scores(row), expected, rtol=1e-4, atol=1e-5)


def test_a_slice_of_queries_asks_for_its_tokens():
    queries = IndexQueries(normal(5, 2, 8), normal(5, 2))
    rows = normal(3, 8, seed=1)
    assert torch.allclose(queries[1:3].scores(rows), queries.scores(rows)[1:3], atol=1e-6)


# --- selection ------------------------------------------------------------------------------------


@given(
    scores=st.lists(
        st.lists(st.sampled_from([0.0, 0.0, -9.0, 1.0, 2.5]), min_size=12, max_size=12),
        min_size=1,
        max_size=4,
    ),
    visible=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    top_k=st.integers(1, 14),
)
def test_point_25_the_largest_scores_win_and_of_equal_ones_the_older_row(scores, visible, top_k):
    seen = torch.arange(12) < torch.tensor(visible[: len(scores)]).unsqueeze(1)
    got = choose_rows(torch.tensor(scores), seen, top_k)
    assert got.shape == (len(scores), min(top_k, 12))
    for row, chosen, n_visible in zip(scores, got.tolist(), visible, strict=False):
        best = sorted(range(n_visible), key=lambda c: (-row[c], c))[:top_k]
        assert [c for c in chosen if c < n_visible] == sorted(best)
        assert chosen == sorted(set(chosen))


def test_point_25_all_equal_scores_choose_the_oldest_rows_of_many():
    got = choose_rows(torch.zeros(2, 3000), None, 512)
    assert torch.equal(got, torch.arange(512).expand(2, -1))


def test_choosing_changes_no_score():
    scores = normal(2, 9)
    before = scores.clone()
    choose_rows(scores, torch.zeros(2, 9, dtype=torch.bool), 3)
    assert torch.equal(scores, before)


def test_point_35_a_binary16_index_matrix_gets_unrounded_queries():
    shape = shape_of(index_heads=1)
    own = {name: values.astype(np.float16) for name, values in arrays(shape).items()}
    q_low, x, step = normal(3, Q_RANK), normal(3, D), step_of(shape, (60, 3))
    row = normal(1, WIDTH, seed=5)
    rounded, plain = (
        Indexer(shape, weights(own, where=place(act_quant=act_quant)))
        .queries(q_low, x, step)
        .scores(row)
        for act_quant in (True, False)
    )
    assert torch.equal(rounded, plain)
