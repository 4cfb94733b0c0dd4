"""Chunks and windows of docs/spec/wire-protocol.md#prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.config import PrefillTuning, read_environment
from ds4py.coordinator.chunked_prefill import (
    Chunk,
    Window,
    cut_chunks,
    given_chunk,
    one_row_each,
    prefill_cap,
    window_size,
)
from ds4py.errors import ConfigError
from ds4py.wire.prefix_hash import INIT, prefix_hash


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=60),
    st.integers(1, 70),
    st.data(),
)
def test_spans_cover_every_token_once_in_order_with_hashes_that_join(tokens, chunk, data) -> None:
    start = data.draw(st.integers(0, len(tokens) - 1))
    n_logits = data.draw(st.integers(1, len(tokens) - start))
    chunks = cut_chunks(tokens, start, prefix_hash(tokens[:start]), chunk=chunk, n_logits=n_logits)
    check(chunks, tokens, start)
    assert max(len(part.tokens) for part in chunks) <= chunk
    wanted = [pos for part in chunks for pos in range(part.end - part.n_logits, part.end)]
    assert wanted == list(range(len(tokens)))[-n_logits:]
    single = one_row_each(chunks)
    check(single, tokens, start)
    assert [part.end for part in single if part.n_logits] == [pos + 1 for pos in wanted]
    assert {part.n_logits for part in single} <= {0, 1}
    assert single == chunks or n_logits > 1


def check(chunks: Sequence[Chunk], tokens: list[int], start: int) -> None:
    """Every token is in one chunk, in order, under the hashes of what comes before."""
    assert [t for part in chunks for t in part.tokens] == tokens[start:]
    at = start
    for part in chunks:
        assert part.pos0 == at
        at = part.end
        assert part.tokens
        assert part.prefix_hash == prefix_hash(tokens[: part.pos0])
        assert part.result_hash == prefix_hash(tokens[: part.end])
    assert start > 0 or chunks[0].prefix_hash == INIT


@pytest.mark.parametrize(
    ("tuning", "n_ctx", "chunk"),
    [
        (PrefillTuning(), 512, None),
        (PrefillTuning(prefill_cap=64), 8192, None),
        (PrefillTuning(chunk=100), 8192, 100),
        (PrefillTuning(chunk=4096), 8192, 4096),
        (PrefillTuning(chunk=9000), 512, 512),  # larger than the context is no use and no harm
        (PrefillTuning(chunk=8192, prefill_cap=None), 8192, 8192),
        (PrefillTuning(chunk=64, prefill_cap=64), 8192, 64),
    ],
)
def test_the_chunk_is_what_is_asked_for_within_the_cap(tuning, n_ctx, chunk) -> None:
    assert given_chunk(tuning, n_ctx) == chunk
    assert chunk is None or chunk <= prefill_cap(tuning, n_ctx)


@pytest.mark.parametrize(
    ("tuning", "n_ctx", "cap"),
    [
        (PrefillTuning(), 512, 512),
        (PrefillTuning(), 8192, 4096),
        (PrefillTuning(prefill_cap=None), 8192, 8192),
        (PrefillTuning(prefill_cap=64), 8192, 64),
        (PrefillTuning(prefill_cap=10_000), 512, 512),
    ],
)
def test_the_cap_is_4096_within_the_context_unless_another_is_given(tuning, n_ctx, cap) -> None:
    assert prefill_cap(tuning, n_ctx) == cap


def test_a_chunk_beyond_the_cap_is_refused() -> None:
    with pytest.raises(ConfigError, match="5000: more than the 4096"):
        given_chunk(PrefillTuning(chunk=5000), 8192)


@pytest.mark.parametrize(
    ("n_hops", "n_spans", "window"),
    [(1, 99, 3), (2, 99, 4), (0, 99, 2), (5, 99, 7), (6, 99, 8), (30, 99, 8), (3, 2, 2), (3, 1, 1)],
)
def test_the_default_window_is_hops_and_two_within_bounds(n_hops, n_spans, window) -> None:
    assert window_size(PrefillTuning(), n_hops, n_spans) == window


def test_a_given_window_counts_up_to_the_number_of_chunks() -> None:
    assert window_size(PrefillTuning(window=64), 1, 99) == 64
    assert window_size(PrefillTuning(window=64), 1, 5) == 5
    assert window_size(PrefillTuning(window=1), 9, 99) == 1


@pytest.mark.parametrize("value", ["x", "0", "-1", "65", "1.5", "3 "])
def test_an_unusable_window_of_the_environment_fails_the_prefill_and_nothing_before(value) -> None:
    tuning = read_environment({"DS4_DIST_PREFILL_WINDOW": value}).prefill
    with pytest.raises(ConfigError, match="DS4_DIST_PREFILL_WINDOW"):
        window_size(tuning, 1, 9)
    assert window_size(replace(tuning, window=3), 1, 9) == 3  # the flag comes first


@pytest.mark.parametrize("value", ["x", "0", "-1", "4294967296", "12 "])
def test_an_unusable_chunk_of_the_environment_fails_the_prefill_and_nothing_before(value) -> None:
    tuning = read_environment({"DS4_DIST_PREFILL_CHUNK": value}).prefill
    with pytest.raises(ConfigError, match="DS4_DIST_PREFILL_CHUNK"):
        given_chunk(tuning, 512)
    assert given_chunk(replace(tuning, chunk=7), 512) == 7


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_a_window_is_never_exceeded_and_every_span_leaves_once(n_spans, size, data) -> None:
    window = Window(n_spans, size)
    out: list[int] = []
    left: list[int] = []
    answered: set[int] = set()
    while not window.done:
        index = window.next_chunk
        assert (index is None) == (len(out) >= size or len(left) == n_spans)
        if index is not None and (not out or data.draw(st.booleans())):
            window.submitted()
            out.append(index)
            left.append(index)
        else:
            reply = out.pop(data.draw(st.integers(0, len(out) - 1)))
            window.answered(reply)
            answered.add(reply)
        assert window.in_flight == len(out) <= size
        leading = next((n for n in range(n_spans) if n not in answered), n_spans)
        assert window.completed == leading
    assert left == list(range(n_spans))
    assert window.next_chunk is None
