"""Pooling: golden vector B.6 through the real compressor, and loops over tokens and channels."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds4py.layer_range import LayerRange
from ds4py.models.deepseek4.cache import NO_SCORE, CacheLayout, CompressedCache
from ds4py.models.deepseek4.compressor import Compressor, FinishRow, pool
from ds4py.models.deepseek4.rotary import Rotary, rotate_
from tests.unit.models.deepseek4.support import (
    CPU,
    empty_cache,
    normal,
    small_shape,
    step_of,
    weights,
)

HEAD = 2
"""Width of the pooled rows; the whole head turns, as the only pair of `R` = 2."""


def shape_of(ratio: int, width: int):
    return small_shape(ratio, d_head=HEAD, n_rot=2, n_embd=width)


class Bench:
    """One compressor and one cache.

    Args:
        ratio: Tokens per row.
        kv, gate, ape: Weights, `[cw, D]` and `[ratio, cw]`.
        finish: Gets normed and rotated rows.
    """

    def __init__(
        self,
        ratio: int,
        kv: torch.Tensor,
        gate: torch.Tensor,
        ape: torch.Tensor,
        finish: FinishRow = torch.Tensor.half,
    ):
        self.shape = shape_of(ratio, kv.shape[1])
        norm = np.array([1, 2], np.float32)
        arrays = {"kv.weight": kv.numpy(), "gate.weight": gate.numpy(), "ape.weight": ape.numpy()}
        own = weights({**arrays, "norm.weight": norm})
        self._compressor = Compressor(self.shape, ratio, own, finish)
        layout = CacheLayout(self.shape, LayerRange(0, 0), 512)
        (layer,) = layout.layers(empty_cache(layout.tensors(), math.nan))
        assert layer.compressed is not None
        self.cache: CompressedCache = layer.compressed
        self.length = 0

    def feed(self, x: torch.Tensor) -> None:
        step = step_of(self.shape, (self.length, len(x)))
        self._compressor(x, step, [self.cache])
        self.length += len(x)

    def rows(self) -> torch.Tensor:
        return self.cache.rows[: self.length // self.cache.ratio]


def b6(ratio: int, finish: FinishRow = torch.Tensor.half) -> tuple[Bench, torch.Tensor]:
    width = 4 if ratio == 4 else 2
    t, j = torch.meshgrid(torch.arange(2 * ratio), torch.arange(width), indexing="ij")
    x = ((5 * t + 3 * j) % 11 - 5) / 2
    ape = ((3 * t + 5 * j) % 7 - 3)[:ratio] / 4
    return Bench(ratio, torch.eye(width), 0.5 * torch.eye(width), ape, finish), x


def unrotated(ratio: int) -> FinishRow:
    """Turn rows of windows 0, 1 … back from the positions of their first tokens."""

    def finish(rows: torch.Tensor) -> torch.Tensor:
        starts = ratio * np.arange(len(rows))
        back = Rotary(2, 160000.0, None, CPU).at(starts).conj()
        rotate_(rows.unsqueeze(1), back)
        return rows.half()

    return finish


@pytest.mark.parametrize(
    ("ratio", "rows"),
    [
        (4, [[1.25, 1.3232422], [1.4130859, 0.11920166]]),
        (128, [[1.0419922, 1.9121094], [0.98583984, 2.0292969]]),
    ],
)
def test_b6_and_point_11_rows_are_rotated_to_the_first_token_of_their_window(ratio, rows):
    bench, x = b6(ratio, unrotated(ratio))
    bench.feed(x)
    # the way there and back costs a last bit of float32, which can cost one of half
    assert bench.rows().float().numpy() == pytest.approx(np.array(rows), rel=2**-10)


def test_b6_the_state_after_two_windows():
    bench, x = b6(4)
    bench.feed(x)
    _, kv, _ = bench.cache.export(8)
    expected = [[2, -2, -0.5, 1], [-1, 0.5, 2, -2], [1.5, -2.5, -1, 0.5], [-1.5, 0, 1.5, -2.5]]
    assert kv[:4].tolist() == expected


def test_point_11_row_1_of_ratio_4_has_position_4():
    bench = Bench(4, torch.ones(4, 1), torch.zeros(4, 1), torch.zeros(4, 4))
    bench.feed(torch.ones(12, 1))
    turned = [[math.cos(p) - 2 * math.sin(p), math.sin(p) + 2 * math.cos(p)] for p in (0, 4, 8)]
    assert bench.rows().float().numpy() == pytest.approx(np.array(turned), abs=2e-3)


@pytest.mark.parametrize("ratio", [4, 128])
@given(cuts=st.lists(st.integers(1, 60), max_size=12))
def test_rows_do_not_depend_on_where_chunks_end(ratio, cuts):
    # products with an identity are exact, whatever their size
    x = normal(300, 4 if ratio == 4 else 2)
    whole, cut = (b6(ratio)[0] for _ in range(2))
    whole.feed(x)
    for part in x.tensor_split(np.cumsum(cuts, dtype=int).tolist()):
        if len(part):
            cut.feed(part)
    assert torch.allclose(whole.rows().float(), cut.rows().float(), rtol=2**-10, atol=1e-6)
    left, right = whole.cache.export(300), cut.cache.export(300)
    assert all(map(torch.equal, left[1:], right[1:]))


# --- the pooling itself ---------------------------------------------------------------------------


def pooled_by_loop(kv: np.ndarray, score: np.ndarray, ratio: int, row: int) -> list[float]:
    """Pool window `row` of a whole history, channel by channel, in float64."""
    if ratio == 4:
        width = kv.shape[1] // 2
        previous = range(4 * row - 4, 4 * row) if row else range(0)
        candidates = [(token, 0) for token in previous]
        candidates += [(token, width) for token in range(4 * row, 4 * row + 4)]
    else:
        width = kv.shape[1]
        candidates = [(token, 0) for token in range(ratio * row, ratio * (row + 1))]
    result = []
    for channel in range(width):
        scores = [float(score[token, half + channel]) for token, half in candidates]
        shares = [math.exp(each - max(scores)) for each in scores]
        values = [float(kv[token, half + channel]) for token, half in candidates]
        total = sum(share * value for share, value in zip(shares, values, strict=True))
        result.append(total / sum(shares))
    return result


@given(
    ratio=st.sampled_from([4, 128]),
    first=st.integers(0, 2),
    n_rows=st.integers(1, 3),
    scale=st.sampled_from([0.0, 1.0, 100.0]),
    seed=st.integers(0, 1000),
)
def test_pooling_is_a_softmax_for_every_channel(ratio, first, n_rows, scale, seed):
    kv, score = normal(2, ratio * (first + n_rows), 6, seed=seed)
    score = score * scale
    oldest = max(first - (ratio == 4), 0) * ratio
    got = pool(kv[oldest:], score[oldest:], ratio, has_previous=first > 0)
    rows = range(first, first + n_rows)
    expected = [pooled_by_loop(kv.numpy(), score.numpy(), ratio, row) for row in rows]
    assert got.numpy() == pytest.approx(np.array(expected), rel=1e-4, abs=1e-5)


def changed_rows(half: slice, token: int) -> list[bool]:
    """Say which of three rows depend on half the channels of one token."""
    kv, score = normal(12, 4), torch.zeros(12, 4)
    before = pool(kv, score, 4, has_previous=False)
    kv[token, half] += 1
    after = pool(kv, score, 4, has_previous=False)
    return (before != after).any(1).tolist()


def test_point_15_the_previous_window_gives_its_first_half_and_the_own_window_its_second():
    first_half, second_half = slice(0, 2), slice(2, 4)
    for token in range(4, 8):
        assert changed_rows(first_half, token) == [False, False, True]
        assert changed_rows(second_half, token) == [False, True, False]


def test_point_16_the_first_window_has_no_previous_one_not_one_of_zeros():
    kv, score = torch.ones(4, 2), torch.full((4, 2), -5.0)
    assert pool(kv, score, 4, has_previous=False).item() == 1
    bench = Bench(4, torch.ones(4, 1), torch.full((4, 1), -50.0), torch.zeros(4, 4))
    bench.feed(torch.ones(4, 1))
    assert bench.rows().tolist() == [[1, 2]]


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("offset", [0, 3])
def test_point_17_ape_goes_by_the_position_and_only_into_scores(ratio, offset):
    width = 4 if ratio == 4 else 2
    ape = torch.zeros(ratio, width)
    ape[2] = 1000.0  # the third token of every window takes all the weight
    kept: list[torch.Tensor] = []

    def keep(rows: torch.Tensor) -> torch.Tensor:
        kept.extend(rows.norm(dim=1))
        return rows.half()

    bench = Bench(ratio, torch.ones(width, 1), torch.zeros(width, 1), ape, keep)
    x = torch.zeros(2 * ratio, 1)
    x[ratio + 2] = -3.0
    for part in x.tensor_split([offset]):
        if len(part):
            bench.feed(part)
    # with overlap the row of the next window sees the old token 2 as well: half the weight each
    assert [value.item() > 0 for value in kept] == [False, True]
    assert bench.cache.kv.read(ratio + 2, ratio + 3).tolist() == [[-3.0] * width]


def test_point_18_every_channel_has_a_softmax_of_its_own():
    kv = torch.tensor([[1.0, 10, 100], [2, 20, 200], [3, 30, 300], *[[0.0] * 3] * 125])
    score = torch.zeros(128, 3)
    for channel, token in enumerate([2, 0, 1]):
        score[token, channel] = 1000.0
    assert pool(kv, score, 128, has_previous=False).tolist() == [[3, 10, 200]]


@pytest.mark.parametrize("ratio", [4, 128])
def test_point_38_the_score_of_a_missing_token_is_finite_and_weighs_nothing(ratio):
    assert math.isfinite(NO_SCORE - NO_SCORE)
    assert math.exp(NO_SCORE - 0.0) == 0
    bench, x = b6(ratio)
    bench.feed(x[:1])  # a single token finishes nothing, and leaves numbers
    rows, kv, score = bench.cache.export(1)
    assert rows.shape == (0, HEAD)
    assert kv.isfinite().all()
    assert score.isfinite().all()
    bench.feed(x[1:])
    assert bench.rows().isfinite().all()


def segments_alone(ratio: int, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    rows = []
    for part in parts:
        bench, _ = b6(ratio)
        bench.feed(part)
        rows.append(bench.rows())
    return rows


@pytest.mark.parametrize("ratio", [4, 128])
def test_segments_of_one_batch_are_pooled_as_if_alone(ratio):
    width = 4 if ratio == 4 else 2
    parts = [normal(size, width, seed=size) for size in (131, 1, 9, 128)]
    benches = [b6(ratio)[0] for _ in parts]
    step = step_of(benches[0].shape, *((0, len(part)) for part in parts))
    benches[0]._compressor(torch.cat(parts), step, [bench.cache for bench in benches])
    for bench, part, expected in zip(benches, parts, segments_alone(ratio, parts), strict=True):
        assert torch.equal(bench.cache.rows[: len(part) // ratio], expected)
