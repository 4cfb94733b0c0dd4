"""A whole small model: cutting into chunks, slices and batches changes nothing.

The model rounds hard inside, so a last bit of float32 can become a step of a number format and
grows from layer to layer (docs/spec/deepseek4-model.md#matching). Hence three kinds of comparison:
bit for bit where the same products run; half layer by half layer with given inputs, where the
median tells formulas from noise; and end to end, which is sharp only without rounded activations.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate, pairwise

import pytest
import torch

from ds4py.config import ActQuant
from ds4py.kernels.cache import Segment
from ds4py.models.deepseek4.cache import REWIND_SLACK
from tests.unit.models.deepseek4.support import (
    MODES,
    Sessions,
    empty_cache,
    normal,
    prompt,
    tiny,
)

LENGTHS = (1, 3, 4, 5, 127, 128, 129, 131, 280)
N_STEPS = {"none": 280, "cpu": 5}
"""Single steps take long, and end to end they say little about rounded activations."""

NOISE = {"none": (1e-3, 2e-2, 0.2), "cpu": (5e-2, 0.2, 0.5)}
"""Relative RMS at the end of all layers: median, 95 % quantile, largest (a flipped choice)."""

modes = pytest.mark.parametrize("mode", MODES)


def relative_rms(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    error = (got - expected).square().mean(-1) / expected.square().mean(-1)
    return error.sqrt()


def assert_noise(mode: ActQuant, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Accept states or logits `[T, W]` that differ by noise."""
    errors = relative_rms(got, expected)
    for quantile, limit in zip((0.5, 0.95, 1.0), NOISE[mode], strict=True):
        assert errors.quantile(quantile) < limit, quantile


def assert_same_caches(
    mode: ActQuant, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> None:
    for left, right in zip(got, expected, strict=True):
        assert left.shape == right.shape
        empty = right < -1e29
        assert torch.equal(left < -1e29, empty)
        known = [part.masked_fill(empty, 0).flatten() for part in (left, right)]
        if known[1].any():
            assert relative_rms(*known) < NOISE[mode][2]


def cut(tokens: Sequence[int], sizes: Iterable[int]) -> list[Sequence[int]]:
    """Cut tokens into spans of the given sizes and the rest."""
    edges = [0, *accumulate(sizes), len(tokens)]
    return [tokens[start:end] for start, end in pairwise(edges) if start < end]


# --- end to end -----------------------------------------------------------------------------------


@cache
def stepped(mode: ActQuant) -> tuple[torch.Tensor, dict[int, list[torch.Tensor]]]:
    """Evaluate one token after the other; return all states and the caches after `LENGTHS`."""
    sessions, states, caches = Sessions(tiny(mode)), [], {}
    for length, token in enumerate(prompt()[: N_STEPS[mode]], start=1):
        states.append(sessions.feed([token]))
        if length in LENGTHS:
            caches[length] = sessions.exported()
    return torch.cat(states), caches


@pytest.mark.parametrize(
    ("mode", "length"), [(mode, n) for mode in MODES for n in LENGTHS if n <= N_STEPS[mode]]
)
def test_point_14_a_prefill_equals_single_steps(mode, length):
    states, caches = stepped(mode)
    sessions = Sessions(tiny(mode))
    got = sessions.feed(prompt()[:length])
    assert_noise(mode, got, states[:length])
    assert_noise(mode, *(tiny(mode).logits(part[-8:]) for part in (got, states[:length])))
    assert_same_caches(mode, sessions.exported(), caches[length])


def test_a_prompt_can_be_split_at_every_point():
    """Without rounded activations; with them, see the forced halves."""
    tokens, mode = prompt()[:40], "none"
    whole = Sessions(tiny(mode))
    expected = whole.logits(tokens)
    split = Sessions(tiny(mode), 39)
    split.feed(*(tokens[:point] for point in range(1, 40)))
    got = split.logits(*(tokens[point:] for point in range(1, 40)))
    assert_noise(mode, got, expected.expand(39, -1))
    for session in range(39):
        assert_same_caches(mode, split.exported(session), whole.exported())


@modes
@pytest.mark.parametrize("chunk", [37, 129])
def test_a_session_that_is_longer_than_every_ring(mode, chunk):
    rings = [part.shape[0] for part in tiny(mode).cache_layout()]
    assert max(rings) < 300
    whole, cut_up = Sessions(tiny(mode)), Sessions(tiny(mode))
    expected = whole.feed(prompt())
    got = torch.cat([cut_up.feed(part) for part in cut(prompt(), [chunk] * (300 // chunk))])
    assert_noise(mode, got, expected)
    assert_same_caches(mode, cut_up.exported(), whole.exported())


ROUNDS = ((40, 3, 129, 1), (1, 7, 1, 1), (0, 1, 2, 64), (1, 1, 1, 1), (25, 0, 1, 0))
"""Tokens of four sessions in five batches: prefill and decode side by side."""


@modes
def test_several_sessions_in_one_batch_equal_single_runs(mode):
    offsets = [0, 100, 17, 60]  # four different texts
    texts = [(prompt() * 2)[offset : offset + 250] for offset in offsets]
    together, alone = Sessions(tiny(mode), 4), [Sessions(tiny(mode)) for _ in texts]
    got, expected = [], []
    for sizes in ROUNDS:
        spans = [
            text[length : length + size]
            for text, length, size in zip(texts, together.lengths, sizes, strict=True)
        ]
        got.append(together.feed(*spans))
        expected += [session.feed(span) for session, span in zip(alone, spans, strict=True) if span]
    assert_noise(mode, torch.cat(got), torch.cat(expected))
    for number, session in enumerate(alone):
        assert_same_caches(mode, together.exported(number), session.exported())


# --- half layer by half layer ---------------------------------------------------------------------


def attention_half(
    mode: ActQuant, layer: int, states: torch.Tensor, plan: Sequence[Sequence[tuple[int, int]]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run one attention half over given states of several sessions.

    Args:
        mode: Of the model.
        layer: Number.
        states: `[sessions, T, W]`.
        plan: Batches: for every session, the tokens from where to where; (0, 0) leaves it out.

    Returns:
        The states after it `[sessions, T, W]`, and the cached rows of the first session: the last
        raw ones, and all compressed ones.
    """
    model = tiny(mode)
    caches = [empty_cache(model.cache_layout(), float("nan")) for _ in states]
    own = [model.layout.layers(part)[layer] for part in caches]
    out = torch.full_like(states, float("nan"))
    for batch in plan:
        spans = [(number, *span) for number, span in enumerate(batch) if span[1]]
        step = model.step([Segment(caches[n], start, end - start) for n, start, end in spans])
        rows = torch.cat([states[n, start:end] for n, start, end in spans])
        with torch.inference_mode():
            got = model.layers[layer].attention_half(rows, step, [own[n] for n, _, _ in spans])
        pieces = got.split([end - start for _, start, end in spans])
        for (n, start, end), piece in zip(spans, pieces, strict=True):
            out[n, start:end] = piece
    n_tokens = states.shape[1]
    compressed = own[0].compressed
    rows = compressed.rows[: n_tokens // compressed.ratio] if compressed else torch.empty(0)
    return out, own[0].raw.read(max(n_tokens - REWIND_SLACK, 0), n_tokens), rows


def assert_same_half(
    got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], layer: int
) -> None:
    """Apply deepseek4-model.md#matching; rows are on a coarse grid, so nearly all are equal."""
    errors = relative_rms(got[0], expected[0])
    assert errors.median() < 1e-6, layer
    assert errors.quantile(0.99) < 5e-3, layer
    assert errors.max() < 1e-2, layer
    for left, right in zip(got[1:], expected[1:], strict=True):
        assert left.shape == right.shape
        if left.numel():
            assert (left == right).float().mean() > 0.98, layer


EVERY_RATIO = pytest.mark.parametrize("layer", [1, 2, 3])


@modes
@EVERY_RATIO
def test_point_14_forced_halves_of_single_steps_equal_those_of_a_prefill(mode, layer):
    states = normal(1, 280, 1024, seed=layer)
    whole = attention_half(mode, layer, states, [[(0, 280)]])
    single = attention_half(mode, layer, states, [[(t, t + 1)] for t in range(280)])
    assert_same_half(single, whole, layer)


@modes
@EVERY_RATIO
def test_forced_halves_of_a_prompt_that_is_split_at_every_point(mode, layer):
    states = normal(1, 40, 1024, seed=layer)
    whole = attention_half(mode, layer, states, [[(0, 40)]])
    for point in range(1, 40):
        parts = attention_half(mode, layer, states, [[(0, point)], [(point, 40)]])
        assert_same_half(parts, whole, layer)


@modes
@EVERY_RATIO
def test_forced_halves_of_several_sessions_in_one_batch(mode, layer):
    states = normal(3, 140, 1024, seed=layer)
    alone = [attention_half(mode, layer, part[None], [[(0, 140)]]) for part in states]
    expected = (torch.cat([part[0] for part in alone]), *alone[0][1:])
    plan = [
        [(0, 40), (0, 3), (0, 129)],
        [(40, 41), (3, 140), (129, 130)],
        [(41, 140), (0, 0), (130, 140)],
    ]
    assert_same_half(attention_half(mode, layer, states, plan), expected, layer)


# --- bit for bit ----------------------------------------------------------------------------------

SPANS = (40, 1, 1, 88, 1, 7)
"""Sizes of the spans of one session: prefill, decode, and both again, across 128 tokens."""


@cache
def bits(mode: ActQuant) -> list[torch.Tensor]:
    """Return what the whole model says after each of the spans."""
    whole = Sessions(tiny(mode))
    return [whole.logits(span) for span in cut(prompt()[: sum(SPANS)], SPANS)]


@pytest.mark.parametrize(("mode", "last"), [*(("cpu", last) for last in range(5)), ("none", 2)])
def test_two_slices_equal_the_whole_model_bit_for_bit(mode, last):
    first, second = tiny(mode, 0, last), tiny(mode, last + 1, 5)
    assert (first.has_head, second.has_head) == (False, True)
    front = Sessions(first)
    rest, start = empty_cache(second.cache_layout(), float("nan")), 0
    for span, expected in zip(cut(prompt()[: sum(SPANS)], SPANS), bits(mode), strict=True):
        hidden, tokens = front.feed(span), torch.tensor(span)
        with torch.inference_mode():
            got = second.forward(hidden, tokens, [Segment(rest, start, len(span))])
            start += len(span)
            assert torch.equal(second.logits(got[-1:]), expected)


def test_point_29_a_later_slice_routes_by_the_ids_that_come_with_the_states():
    model, hidden = tiny("none", 1, 2), normal(5, 1024)
    ids = (torch.arange(5), torch.arange(5) + 40)
    with torch.inference_mode():
        states = [
            model.forward(hidden.clone(), part, [Segment(empty_cache(model.cache_layout()), 0, 5)])
            for part in ids
        ]
    assert (relative_rms(*states) > 1e-3).all()
    later = tiny("none", 3, 4)
    with torch.inference_mode():
        states = [
            later.forward(hidden.clone(), part, [Segment(empty_cache(later.cache_layout()), 0, 5)])
            for part in ids
        ]
    assert torch.equal(*states)


@modes
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), "an earlier session"])
def test_what_a_cache_held_before_never_leaks(mode, garbage):
    if isinstance(garbage, float):
        session = Sessions(tiny(mode), fill=garbage)
    else:
        session = Sessions(tiny(mode))
        session.feed(prompt()[::-1])
        session.lengths = [0]
    got = [session.logits(span) for span in cut(prompt()[: sum(SPANS)], SPANS)]
    assert all(map(torch.equal, got, bits(mode)))
    assert all(part.isfinite().all() for part in session.exported())


SAVED = (1, 2, 3, 4, 5, 9, 17, 63, 127, 128, 129, 293)


@modes
def test_an_imported_cache_continues_like_the_one_that_was_exported(mode):
    """At many lengths at once, as one batch; stale slots of the portable form are cleared."""
    model = tiny(mode)
    original = Sessions(model, len(SAVED))
    copy = Sessions(model, len(SAVED), fill=float("nan"))
    original.feed(*(prompt()[:length] for length in SAVED))
    copy.lengths = list(original.lengths)
    for session, length in enumerate(SAVED):
        saved = original.exported(session)
        assert all(part.isfinite().all() for part in saved)
        model.import_cache(copy.caches[session], length, saved)
        assert all(map(torch.equal, copy.exported(session), saved))
    for size in (1, 1, 3, 1):
        spans = [prompt()[length : length + size] for length in original.lengths]
        assert torch.equal(original.feed(*spans), copy.feed(*spans))


def test_every_stream_begins_with_the_embedding():
    model = tiny("none")
    hidden = model.embed(torch.tensor([5, 700]))
    streams = hidden.view(2, 4, 256)
    assert (streams == streams[:, :1]).all()
    assert not torch.equal(streams[0], streams[1])


def test_the_input_states_may_be_overwritten_but_not_shared_with_the_result():
    model = tiny("none", 3, 3)
    hidden = normal(4, 1024)
    segment = Segment(empty_cache(model.cache_layout()), 0, 4)
    with torch.inference_mode():
        result = model.forward(hidden, torch.arange(4), [segment])
    kept = result.clone()
    hidden.fill_(0)
    assert torch.equal(result, kept)
