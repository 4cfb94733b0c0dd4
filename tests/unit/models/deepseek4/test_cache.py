"""Rings against a list of everything written; the portable form against a session's history."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds4py.layer_range import LayerRange
from ds4py.models.deepseek4.cache import NO_SCORE, REWIND_SLACK, CacheLayout, CompressedCache, Ring
from ds4py.models.deepseek4.shape import OVERLAPPED
from tests.unit.models.deepseek4.support import N_CTX, empty_cache, known_shape

SHAPE = known_shape(2, window=16, ratios=(0, 4, 128, 4, 128, 0))
LAYOUT = CacheLayout(SHAPE, LayerRange(0, 3), N_CTX)
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 127, 128, 129, 131, 132, 255, 256, 257, 299)

chunks = st.lists(st.integers(1, 90), max_size=8)


@given(capacity=st.integers(1, 50), sizes=chunks, data=st.data())
def test_a_ring_holds_the_last_of_everything_written(capacity, sizes, data):
    ring, written = Ring(torch.full((capacity, 1), -1.0)), []
    for size in sizes:
        rows = torch.arange(len(written), len(written) + size, dtype=torch.float32)
        ring.write(len(written), rows.unsqueeze(1))
        written += rows.tolist()
        end = len(written)
        start = data.draw(st.integers(max(end - capacity, 0), end))
        assert ring.read(start, end).flatten().tolist() == written[start:end]


def test_a_ring_can_be_read_before_its_end_and_written_again():
    ring = Ring(torch.zeros(5, 1))
    ring.write(0, torch.arange(13.0).unsqueeze(1))
    assert ring.read(9, 11).flatten().tolist() == [9, 10]
    ring.write(11, torch.tensor([[-11.0]]))
    assert ring.read(8, 12).flatten().tolist() == [8, 9, 10, -11]


def test_only_what_a_ring_can_hold_is_read():
    with pytest.raises(AssertionError):
        Ring(torch.zeros(5, 1)).read(0, 6)


def test_an_empty_read_and_an_empty_write_are_fine():
    ring = Ring(torch.ones(5, 2))
    assert ring.read(7, 7).shape == (0, 2)
    ring.write(7, torch.zeros(0, 2))
    assert ring.rows.all()


@pytest.mark.parametrize("ratio", [4, 128])
@given(length=st.integers(0, 2000), back=st.integers(0, REWIND_SLACK))
def test_the_rings_hold_all_that_a_timeline_needs_after_it_was_cut_back(ratio, length, back):
    (_, _, kv, *_) = CacheLayout(known_shape(2, ratios=(ratio,)), LayerRange(0, 0), 8).tensors()
    cache = CompressedCache(ratio, torch.empty(0), Ring(torch.empty(0)), Ring(torch.empty(0)))
    back = min(back, length)
    needed = cache.pending_from(length - back)
    assert needed >= length - kv.shape[0]
    # the next row to be finished begins there, with overlap one window earlier
    next_row = (length - back) // ratio
    assert needed == max((next_row - (ratio == OVERLAPPED)) * ratio, 0)


def test_the_layout_has_rows_for_every_window_of_the_context_and_slack_in_every_ring():
    plain, four, long = (
        [(part.shape, part.dtype) for part in layout]
        for layout in (
            CacheLayout(SHAPE, LayerRange(layer, layer), 513).tensors() for layer in (0, 1, 2)
        )
    )
    raw = ((16 + REWIND_SLACK, 160), torch.float16)
    assert plain == [raw]
    ring = ((8 + REWIND_SLACK, 320), torch.float32)
    index_ring = ((8 + REWIND_SLACK, 256), torch.float32)
    assert four == [
        raw,
        *(((129, 160), torch.float16), ring, ring),
        *(((129, 128), torch.float16), index_ring, index_ring),
    ]
    ring = ((128 + REWIND_SLACK, 160), torch.float32)
    assert long == [raw, ((5, 160), torch.float16), ring, ring]


# --- portable form --------------------------------------------------------------------------------


@dataclass
class History:
    """A session whose row of position `p`, everywhere, is filled with a number made of `p`."""

    cache: list[torch.Tensor]
    length: int = 0

    def feed(self, n_tokens: int) -> None:
        start, self.length = self.length, self.length + n_tokens
        for layer in LAYOUT.layers(self.cache):
            layer.raw.write(start, self._rows(start, layer.raw.rows))
            for part in filter(None, (layer.compressed, layer.index)):
                part.kv.write(start, self._rows(start, part.kv.rows) / 8)
                part.score.write(start, -self._rows(start, part.score.rows) / 8)
                first, end = start // part.ratio, self.length // part.ratio
                numbers = torch.arange(first, end).unsqueeze(1)
                part.rows[first:end] = (1000 + numbers).to(part.rows.dtype)

    def _rows(self, start: int, like: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(start, self.length, dtype=like.dtype) + 1
        return positions.unsqueeze(1).expand(-1, like.shape[1])


def history(length: int, fill: float = float("nan")) -> History:
    session = History(empty_cache(LAYOUT.tensors(), fill))
    while session.length < length:
        session.feed(min(150, length - session.length))
    return session


def first_values(part: torch.Tensor) -> list[float]:
    assert (part == part[:, :1]).all(), "every row is one number"
    return part[:, 0].tolist()


def state_slots(ratio: int, length: int) -> list[int | None]:
    """Which token stands in which slot after `length` tokens, by the engine's own rule."""
    slots: list[int | None] = [None] * (2 * ratio if ratio == 4 else ratio)
    for token in range(length):
        slots[(4 if ratio == 4 else 0) + token % ratio] = token
        if token % ratio == ratio - 1:
            slots = [*slots[4:], *[None] * 4] if ratio == 4 else [None] * ratio
    return slots


def expected_parts(length: int) -> list[list[float]]:
    parts: list[list[float]] = []
    for ratio in SHAPE.ratios[:4]:
        parts.append([token + 1.0 for token in range(max(length - 16, 0), length)])
        slots = state_slots(ratio, length) if ratio else []
        kv = [0.0 if token is None else (token + 1) / 8 for token in slots]
        score = [NO_SCORE if token is None else -(token + 1) / 8 for token in slots]
        rows = [1000.0 + row for row in range(length // ratio)] if ratio else []
        parts += {0: [], 4: [rows, kv, score] * 2, 128: [rows, kv, score]}[ratio]
    return parts


@pytest.mark.parametrize("length", LENGTHS)
def test_point_39_the_portable_form_has_the_engines_slots_and_clears_what_means_nothing(length):
    parts = LAYOUT.export(history(length).cache, length)
    assert all(part.dtype is torch.float32 for part in parts)
    got = [first_values(part) for part in parts]
    assert got == [pytest.approx(part, rel=1e-6) for part in expected_parts(length)]


def needed(cache: Sequence[torch.Tensor], length: int) -> list[torch.Tensor]:
    """Everything that the continuation of a timeline reads."""
    parts = []
    for layer in LAYOUT.layers(cache):
        parts.append(layer.raw.read(max(length - 15, 0), length))
        for part in filter(None, (layer.compressed, layer.index)):
            start = part.pending_from(length)
            parts += [part.kv.read(start, length), part.score.read(start, length)]
            parts.append(part.rows[: length // part.ratio])
    return parts


@given(length=st.integers(1, 299), further=chunks)
def test_an_imported_cache_holds_all_that_the_rest_of_the_timeline_reads(length, further):
    original, copy = history(length), History(empty_cache(LAYOUT.tensors(), float("nan")), length)
    saved = LAYOUT.export(original.cache, length)
    LAYOUT.fill(copy.cache, length, saved)
    again = LAYOUT.export(copy.cache, length)
    assert all(map(torch.equal, saved, again))
    for size in [*further, 0]:
        pairs = [needed(session.cache, original.length) for session in (original, copy)]
        assert all(map(torch.equal, *pairs))
        if original.length + size < N_CTX:
            original.feed(size)
            copy.feed(size)


def test_export_shares_no_memory_with_the_cache():
    session = history(40)
    saved = LAYOUT.export(session.cache, 40)
    before = [part.clone() for part in saved]
    for part in session.cache:
        part.fill_(7)
    assert all(map(torch.equal, saved, before))
