"""Sizes of saved sessions, against the table of the specification."""

import pytest

from ds4py.layer_range import LayerRange
from ds4py.snapshot import CacheSizes, Capacities


def ds4_model(first: int, n_layers: int) -> CacheSizes:
    """Flash has two layers without compression in front, PRO two of ratio 128."""
    return CacheSizes(
        ratios=(first, first, *((4, 128)[layer % 2] for layer in range(2, n_layers))),
        width=512,
        index_width=128,
        window=128,
        n_vocab=129280,
    )


FLASH, PRO = ds4_model(0, 43), ds4_model(128, 61)


@pytest.mark.parametrize(
    ("sizes", "n_tokens", "expected"),
    [
        (FLASH, 2048, 52_184_460),
        (FLASH, 100_000, 1_400_385_548),
        (FLASH, 1_000_000, 13_787_975_308),
        (PRO, 32_768, 680_748_572),
        (PRO, 1_000_000, 19_735_187_228),
    ],
)
def test_a_whole_payload_has_the_documented_size(sizes, n_tokens, expected):
    layers = LayerRange(0, sizes.n_layers - 1)
    before = 52 + 4 * n_tokens + 4 * sizes.n_vocab
    assert before + sizes.range_bytes(layers, n_tokens) == expected


def test_one_layer_of_three_tokens_has_the_documented_size():
    assert FLASH.range_bytes(LayerRange(2, 2), 3) == 8 + 88_064


def test_a_layer_has_rows_for_complete_windows_only():
    assert [FLASH.compressed_rows(2, n) for n in (3, 4, 7, 8)] == [0, 1, 1, 2]
    assert [FLASH.compressed_rows(3, n) for n in (127, 128, 255, 256)] == [0, 1, 1, 2]
    assert FLASH.counts(LayerRange(1, 3), 256) == ([0, 64, 2], [0, 64, 0])


def test_raw_rows_are_those_of_the_window():
    assert [FLASH.shapes(0, n) for n in (1, 128, 129)] == [[(1, 512)], [(128, 512)], [(128, 512)]]


def test_capacities_follow_the_context():
    assert Capacities.of(32_768, 128) == Capacities(
        n_ctx=32_768, prefill_cap=4096, raw_cap=4352, raw_window=128, comp_cap=8194
    )
    assert Capacities.of(100, 128) == Capacities(
        n_ctx=100, prefill_cap=100, raw_cap=100, raw_window=100, comp_cap=27
    )


@pytest.mark.parametrize(
    ("n_ctx", "given", "prefill_cap", "raw_cap"),
    [
        (512, {}, 512, 512),  # 640 rows do not fit into the context
        (4096, {}, 4096, 4096),
        (8192, {}, 4096, 4352),  # 4224 rows, and up to a multiple of 256
        (32_768, {"prefill_cap": 128}, 128, 256),
        (32_768, {"prefill_cap": 129}, 129, 512),
        (32_768, {"prefill_cap": 8000}, 8000, 8192),  # at most so many
        (32_768, {"prefill_cap": None}, 32_768, 8192),
        (32_768, {"raw_cap": 300}, 4096, 300),
        (32_768, {"raw_cap": 1}, 4096, 128),  # the window has room in any case
        (512, {"raw_cap": 9999}, 512, 512),
        (512, {"raw_cap": 128}, 512, 128),  # as a build that saves on the CPU
    ],
)
def test_capacities_are_those_of_a_gpu_node_unless_told_otherwise(
    n_ctx, given, prefill_cap, raw_cap
):
    capacities = Capacities.of(n_ctx, 128, **given)
    assert (capacities.prefill_cap, capacities.raw_cap) == (prefill_cap, raw_cap)
