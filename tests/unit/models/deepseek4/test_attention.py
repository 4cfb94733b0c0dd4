"""The attention half with hand-made weights: which rows a query sees, and what it makes of them.

The output projection is an identity, so the result is what the heads computed.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from ds4py.layer_range import LayerRange
from ds4py.models.deepseek4.attention import QUERY_BLOCK, Attention, GroupedOutput
from ds4py.models.deepseek4.cache import CacheLayout, LayerCache
from ds4py.models.deepseek4.rotary import rotate_
from ds4py.models.deepseek4.rounding import round_kv
from ds4py.models.deepseek4.shape import Shape
from tests.unit.models.deepseek4.support import empty_cache, normal, small_shape, step_of, weights

HEADS, HD, R, RANK, INDEX = 2, 80, 16, 8, 32
FLAT = HD - R
D = HEADS * HD
NO_SINK = -1e4
SINK = 64
MANY = 512


def shape_of(ratio: int, **changes: object) -> Shape:
    sizes = {
        "n_head": HEADS,
        "d_head": HD,
        "n_rot": R,
        "q_rank": RANK,
        "n_embd": D,
        "out_groups": HEADS,
        "out_rank": HD,
        "window": 128,
        "index_heads": 1,
        "index_width": INDEX,
        "index_top_k": MANY,
    }
    return small_shape(ratio, **{**sizes, **changes})


def arrays(ratio: int) -> dict[str, np.ndarray]:
    """Queries of zeros; the rows of an input of ones are ones, compressed or not."""
    wide = 2 * HD if ratio == 4 else HD
    parts = {
        "attn_q_a.weight": torch.ones(RANK, D),
        "attn_q_a_norm.weight": torch.ones(RANK),
        "attn_q_b.weight": torch.zeros(HEADS * HD, RANK),
        "attn_kv.weight": torch.ones(HD, D) / D,
        "attn_kv_a_norm.weight": torch.ones(HD),
        "attn_sinks.weight": torch.full((HEADS,), math.log(SINK)),
        "attn_output_a.weight": torch.eye(HD).repeat(HEADS, 1),
        "attn_output_b.weight": torch.eye(D),
    }
    if ratio:
        parts |= compressor("attn_compressor_", ratio, wide, HD)
    if ratio == 4:
        parts |= compressor("indexer_compressor_", 4, 2 * INDEX, INDEX)
        parts["indexer.attn_q_b.weight"] = torch.ones(INDEX, RANK)
        parts["indexer.proj.weight"] = torch.ones(1, D)
    return {name: part.numpy() for name, part in parts.items()}


def compressor(prefix: str, ratio: int, wide: int, width: int) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}ape.weight": torch.zeros(ratio, wide),
        f"{prefix}kv.weight": torch.ones(wide, D) / D,
        f"{prefix}gate.weight": torch.zeros(wide, D),
        f"{prefix}norm.weight": torch.ones(width),
    }


class Bench:
    """One layer's attention with one or more sessions.

    Args:
        shape: Of one layer.
        changes: Weights other than those of `arrays`.
        n_sessions: How many.
        fill: What the caches hold before.
    """

    def __init__(
        self,
        shape: Shape,
        changes: dict[str, np.ndarray] | None = None,
        *,
        n_sessions: int = 1,
        fill: float = math.nan,
    ):
        self.shape = shape
        own = arrays(shape.ratios[0]) | (changes or {})
        self._attention = Attention(shape, 0, weights(own))
        layout = CacheLayout(shape, LayerRange(0, 0), 512)
        self.caches: list[LayerCache] = [
            layout.layers(empty_cache(layout.tensors(), fill))[0] for _ in range(n_sessions)
        ]

    def __call__(self, x: torch.Tensor, *segments: tuple[int, int]) -> torch.Tensor:
        """Return the heads' results `[T, heads, HD]`; without segments, of a session's start."""
        segments = segments or ((0, len(x)),)
        step = step_of(self.shape, *segments)
        return self._attention(x, step, self.caches).view(-1, HEADS, HD)


def n_visible(out: torch.Tensor) -> list[int]:
    """Count rows: `N` rows of ones beside a sink of `SINK` times their weight."""
    mean = out[:, 0, 0].double()
    counts = SINK * mean / (1 - mean)
    assert counts.numpy() == pytest.approx(counts.round().numpy(), abs=0.05)
    return counts.round().int().tolist()


def counted(shape: Shape, n_tokens: int, cuts: Sequence[int]) -> list[int]:
    bench, counts = Bench(shape), []
    edges = [0, *cuts, n_tokens]
    for start, end in pairwise(edges):
        counts += n_visible(bench(torch.ones(end - start, D), (start, end - start)))
    return counts


CUTS = [(), range(1, 300), (127, 129), (3, 4, 90, 260)]


@pytest.mark.parametrize("cuts", CUTS, ids=["whole", "single", "window", "uneven"])
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_point_21_raw_rows_and_all_finished_rows_are_seen_whatever_they_cover(ratio, cuts):
    got = counted(shape_of(ratio), 300, cuts)
    finished = [(t + 1) // ratio if ratio else 0 for t in range(300)]
    assert got == [min(t + 1, 128) + finished[t] for t in range(300)]
    if ratio == 4:
        assert got[127] == 128 + 32


@pytest.mark.parametrize("cuts", CUTS[::2], ids=["whole", "window"])
def test_point_22_only_ratio_4_chooses_and_only_beyond_top_k(cuts):
    four = counted(shape_of(4, index_top_k=8), 300, cuts)
    assert four == [min(t + 1, 128) + min((t + 1) // 4, 8) for t in range(300)]
    long = counted(shape_of(128, index_top_k=1), 300, cuts)
    assert long == [min(t + 1, 128) + (t + 1) // 128 for t in range(300)]


def test_point_22_with_one_row_too_many_the_worst_one_is_left_out():
    """Three windows of ones, minus ones, ones: the second is what the query wants least."""
    own = arrays(4)
    for name, width in (("attn", HD), ("indexer", INDEX)):
        own[f"{name}_compressor_ape.weight"][:, :width] = -1000.0  # rows of their own window alone
    x = torch.ones(12, D)
    x[4:8] = -1
    for top_k, total in ((3, 2), (2, 3)):  # the token's own row, and the sum of those it attends
        bench = Bench(shape_of(4, window=1, index_top_k=top_k), own)
        mean = bench(x)[-1, 0, 0].item()
        n_rows = 1 + top_k
        assert mean * (n_rows + SINK) == pytest.approx(total, abs=0.01)


def test_point_19_the_row_that_a_token_finishes_is_visible_to_it():
    assert counted(shape_of(4, window=1), 9, ()) == [1, 1, 1, 2, 2, 2, 2, 3, 3]


def test_segments_of_one_batch_see_their_own_rows():
    bench = Bench(shape_of(4, index_top_k=8), n_sessions=3)
    lengths = [(0, 70), (0, 3), (0, 131)]
    bench(torch.ones(204, D), *lengths)
    got = n_visible(bench(torch.ones(72, D), (70, 1), (3, 70), (131, 1)))
    positions = [70, *range(3, 73), 131]
    assert got == [min(t + 1, 128) + min((t + 1) // 4, 8) for t in positions]


def test_blocks_of_queries_end_anywhere():
    assert 300 % QUERY_BLOCK, "the counts above must cross the end of an incomplete block"


def dominant(marked: int, n_tokens: int) -> tuple[dict[str, np.ndarray], torch.Tensor]:
    """Weights and inputs with which all queries want the row of one token."""
    wanted = torch.cat((torch.ones(32), torch.zeros(HD - 32)))
    other = torch.cat((torch.zeros(32), torch.ones(32), torch.zeros(R)))
    kv = torch.zeros(HD, D)
    kv[:, 0], kv[:, 1] = wanted, other
    q_a = torch.zeros(RANK, D)
    q_a[:, :2] = 1
    x = torch.zeros(n_tokens, D)
    x[:, 1] = 1
    x[marked, :2] = torch.tensor([1.0, 0])
    changes = {
        "attn_kv.weight": kv,
        "attn_q_a.weight": q_a,
        "attn_q_b.weight": wanted.repeat(HEADS).unsqueeze(1).expand(-1, RANK).contiguous(),
    }
    return {name: part.numpy() for name, part in changes.items()}, x


@pytest.mark.parametrize("single", [False, True])
def test_point_20_a_dominant_row_is_seen_for_128_tokens_with_its_own(single):
    changes, x = dominant(marked=1, n_tokens=131)
    bench = Bench(shape_of(0), changes)
    if single:
        out = torch.cat([bench(row.unsqueeze(0), (t, 1)) for t, row in enumerate(x)])
    else:
        out = bench(x)
    seen = (out[:, 0, 0] > 1).tolist()
    assert seen == [1 <= t <= 128 for t in range(131)]


# --- one key, two keys ----------------------------------------------------------------------------


def random_rows() -> dict[str, np.ndarray]:
    return {
        "attn_kv.weight": normal(HD, D, seed=1).numpy(),
        "attn_kv_a_norm.weight": (1 + normal(HD, seed=2, scale=0.2)).numpy(),
        "attn_q_a.weight": normal(RANK, D, seed=3).numpy(),
        "attn_q_a_norm.weight": (1 + normal(RANK, seed=4, scale=0.2)).numpy(),
        "attn_q_b.weight": normal(HEADS * HD, RANK, seed=5).numpy(),
    }


def normed(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def unrounded_rows(x: torch.Tensor) -> torch.Tensor:
    own = {name: torch.tensor(part).double() for name, part in random_rows().items()}
    return normed(x.double() @ own["attn_kv.weight"].t()) * own["attn_kv_a_norm.weight"]


@pytest.mark.parametrize("ratio", [0, 128])
def test_point_10_the_result_is_turned_back_by_the_position_of_the_query(ratio):
    x, sinks = normal(100, D), np.full(HEADS, NO_SINK, np.float32)
    shape = shape_of(ratio, window=1)  # a query sees its own row alone
    out = Bench(shape, random_rows() | {"attn_sinks.weight": sinks})(x)
    expected = unrounded_rows(x)
    for head in range(HEADS):
        assert torch.allclose(out[:, head, FLAT:].double(), expected[:, FLAT:], atol=4e-3)
        assert torch.allclose(out[:, head, :FLAT].double(), expected[:, :FLAT], rtol=2**-4)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_point_14_a_token_sees_its_own_row_rounded_as_the_cache_keeps_it(ratio, single):
    x, sinks = normal(3, D), np.full(HEADS, NO_SINK, np.float32)
    bench = Bench(shape_of(ratio, window=1), random_rows() | {"attn_sinks.weight": sinks})
    spans = [(0, 1), (1, 1), (2, 1)] if single else [(0, 3)]
    out = torch.cat([bench(x[start : start + n], (start, n)) for start, n in spans])
    kept = bench.caches[0].raw.read(0, 3).float()
    assert torch.equal(out[:, 0, :FLAT], kept[:, :FLAT])
    step = step_of(bench.shape, (0, 3))
    turned_back = kept.unsqueeze(1).clone()
    rotate_(turned_back, (step.extended if ratio else step.plain).conj())
    assert torch.allclose(out, turned_back.expand(-1, HEADS, -1), atol=1e-6)


@pytest.mark.parametrize(("ratio", "pos0"), [(0, 0), (0, 300), (4, 1), (128, 100)])
def test_points_6_and_8_queries_are_normed_without_weight_and_turned_as_their_layer_is(ratio, pos0):
    """Two keys, head by head, in float64: the rows as cached, the query by hand."""
    x, sinks = normal(2, D), normal(HEADS, seed=7)
    changes = random_rows() | {"attn_sinks.weight": sinks.numpy()}
    bench = Bench(shape_of(ratio, window=2), changes, fill=0.0)
    out = bench(x, (pos0, 2))[1].double()
    rows = bench.caches[0].raw.read(pos0, pos0 + 2).double()
    own = {name: torch.tensor(part).double() for name, part in random_rows().items()}
    q_low = normed(x.double()[1] @ own["attn_q_a.weight"].t()) * own["attn_q_a_norm.weight"]
    q = normed((own["attn_q_b.weight"] @ q_low).view(HEADS, HD))
    angles = layer_angles(ratio, pos0 + 1)
    q = turned(q, angles)
    shares = torch.cat((q @ rows.t() / math.sqrt(HD), sinks.double().unsqueeze(1)), 1).softmax(1)
    expected = turned(shares[:, :2] @ rows, -angles)
    assert torch.allclose(out, expected, atol=2e-5)


def layer_angles(ratio: int, t: int) -> torch.Tensor:
    """The formula of docs/spec/deepseek4-model.md#rope for `R` = 16."""
    pair = torch.arange(R // 2).double()
    if not ratio:
        return t * 10000 ** (-2 * pair / R)
    low, high = (
        R * math.log(65536 / (2 * math.pi * beta)) / (2 * math.log(160000)) for beta in (32, 1)
    )
    ramp = 1 - ((pair - math.floor(low)) / (math.ceil(high) - math.floor(low))).clamp(0, 1)
    return t * 160000 ** (-2 * pair / R) * (ramp + (1 - ramp) / 16)


def turned(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    a, b = heads[:, FLAT::2], heads[:, FLAT + 1 :: 2]
    pairs = (a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos())
    return torch.cat((heads[:, :FLAT], torch.stack(pairs, 2).flatten(1)), 1)


@pytest.mark.parametrize(("ratio", "pos0"), [(0, 0), (0, 300), (4, 0), (128, 100)])
def test_point_8_raw_rows_of_a_layer_turn_by_its_own_base(ratio, pos0):
    x = normal(1, D)
    bench = Bench(shape_of(ratio), random_rows(), fill=0.0)
    bench(x, (pos0, 1))
    expected = turned(unrounded_rows(x), layer_angles(ratio, pos0)).float()
    kept = bench.caches[0].raw.read(pos0, pos0 + 1).float()
    assert torch.allclose(kept, round_kv(expected, R).float(), rtol=2**-3, atol=1e-4)
    assert torch.allclose(kept[:, FLAT:], expected[:, FLAT:], rtol=2**-10, atol=1e-4)


def test_point_6_a_head_of_equal_values_becomes_ones_whatever_their_size():
    """The score of one key, read off its weight beside the sink."""
    x, row = normal(1, D), unrounded_rows(normal(1, D))[0]
    expected = row.sum().item() / math.sqrt(HD)
    ones = np.ones((RANK, D), np.float32) * np.sign(x.sum().numpy())
    for size in (1e-1, 1e3):
        changes = random_rows() | {
            "attn_q_a.weight": ones,
            "attn_q_a_norm.weight": np.ones(RANK, np.float32),
            "attn_q_b.weight": np.full((HEADS * HD, RANK), size, np.float32),
        }
        out = Bench(shape_of(0), changes)(x)[0, 0].double()
        weight = (out @ row / (row @ row)).item()
        score = math.log(weight / (1 - weight)) + math.log(SINK)
        assert score == pytest.approx(expected, abs=0.1)


def test_point_38_the_first_token_of_a_session_is_finite_in_every_kind_of_layer():
    for ratio in (0, 4, 128):
        bench = Bench(shape_of(ratio), random_rows())
        assert bench(normal(1, D)).isfinite().all()


def test_the_output_projection_is_of_one_rank_per_group_of_heads():
    shape = shape_of(0, n_head=6, out_groups=3, out_rank=5, n_embd=7)
    low, join = normal(3 * 5, 2 * HD), normal(7, 15, seed=1)
    own = {"attn_output_a.weight": low.numpy(), "attn_output_b.weight": join.numpy()}
    heads = normal(4, 6, HD, seed=2)
    got = GroupedOutput(shape, weights(own))(heads)
    for t in range(4):
        parts = [low[5 * g : 5 * g + 5] @ heads[t, 2 * g : 2 * g + 2].flatten() for g in range(3)]
        assert torch.allclose(got[t], join @ torch.cat(parts), rtol=1e-4, atol=1e-3)
