"""The cost model of chunks: what is kept, what is fitted, what is forecast, what is chosen."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.coordinator.chunk_size import (
    COURTESY,
    GRANULE,
    UNMEASURED_CHUNK,
    ChunkChoice,
    ChunkCost,
    StageCosts,
    StageModel,
    Stretch,
    choose,
    fit,
    forecast,
)

STAGE = (0, 5)
U32 = st.integers(0, 2**32 - 1)
NOTHING = StageModel(fixed=0, per_token=0, per_pair=0)

models = st.builds(
    StageModel,
    fixed=st.floats(0, 0.2),
    per_token=st.floats(1e-5, 1e-2),
    per_pair=st.floats(0, 1e-6),
    hop_fixed=st.floats(0, 0.05),
    hop_per_token=st.floats(0, 1e-3),
)
stretches = st.builds(
    Stretch,
    start=st.integers(0, 5000),
    n_tokens=st.integers(1, 5000),
    cap=st.sampled_from([16, 100, 256, 1000, 4096]),
    window=st.integers(1, 8),
)


def seen(model: StageModel, pos0: int, n_tokens: int, *, factor: float = 1.0) -> ChunkCost:
    """What a stage that obeys a model would report."""
    pairs = n_tokens * (pos0 + n_tokens / 2)
    seconds = model.fixed + model.per_token * n_tokens + model.per_pair * pairs
    return ChunkCost(pos0, n_tokens, seconds * factor, model.hop_seconds(n_tokens))


def error(fitted: StageModel, true: StageModel, n_tokens: int, pos0: int) -> float:
    """Relative error of a prediction."""
    return abs(fitted.seconds(n_tokens, pos0) / true.seconds(n_tokens, pos0) - 1)


# --- the fit --------------------------------------------------------------------------------------


@given(models)
def test_observations_of_several_sizes_and_positions_give_the_model_back(true) -> None:
    sizes = [(0, 128), (0, 512), (512, 512), (1024, 300), (2000, 1024), (0, 256), (3000, 640)] * 4
    observations = [seen(true, pos0, n) for pos0, n in sizes]
    fitted, middle = fit(observations), median(o.eval_seconds for o in observations)
    for pos0, n in [(0, 128), (0, 2048), (4000, 128), (4000, 1024)]:
        gap = abs(fitted.seconds(n, pos0) - true.seconds(n, pos0))
        assert gap < 0.05 * true.seconds(n, pos0) + 0.02 * middle
    assert fitted.hop_fixed == min(true.hop_seconds(n) for _, n in sizes)
    assert fitted.hop_per_token == min(true.hop_seconds(n) / n for _, n in sizes)


@given(st.floats(1e-4, 1e-2), st.integers(128, 2048))
def test_one_size_alone_is_explained_by_a_modest_fixed_cost(per_token, n) -> None:
    """It cannot tell the fixed cost from the tokens'; neither may be taken for all of it."""
    fitted = fit([ChunkCost(0, n, per_token * n, 0.0)] * 5)
    assert fitted.fixed == pytest.approx(64 * fitted.per_token, rel=0.05)
    assert fitted.seconds(n, 0) == pytest.approx(per_token * n + 0.0005, rel=0.01)


@given(models, st.lists(st.floats(0.9, 1.1), min_size=40, max_size=40))
def test_noise_of_a_tenth_moves_predictions_by_less_than_two(true, factors) -> None:
    sizes = [(0, 512), (512, 512), (1024, 384), (0, 256), (256, 300)] * 8
    noisy = [seen(true, pos0, n, factor=f) for (pos0, n), f in zip(sizes, factors, strict=True)]
    fitted = fit(noisy)
    assert all(error(fitted, true, n, pos0) < 0.2 for pos0, n in sizes)


@pytest.mark.parametrize("seed", range(10))
def test_other_programs_on_the_machine_do_not_raise_the_fit_much(seed) -> None:
    """Half of the spans take up to four times as long: a plain fit would give 1.25 of the time."""
    random = Random(seed)
    true = StageModel(fixed=0.05, per_token=1e-3, per_pair=2e-7)
    sizes = [(0, 512), (512, 512), (1024, 384), (0, 256), (256, 300)] * 12
    noisy = [
        seen(true, *size, factor=random.uniform(1, 4) if n % 2 else 1.0)
        for n, size in enumerate(sizes)
    ]
    ratios = [fit(noisy).seconds(n, pos0) / true.seconds(n, pos0) for pos0, n in sizes]
    assert 0.95 < sum(ratios) / len(ratios) < 1.1


@pytest.mark.parametrize("absurd", [0.0, 1e-6, 4294.0])
@pytest.mark.parametrize("place", [0, 20, 39])
def test_one_absurd_time_among_forty_moves_predictions_little(absurd, place) -> None:
    true = StageModel(fixed=0.05, per_token=1e-3, per_pair=2e-7)
    sizes = [(0, 512), (512, 512), (1024, 384), (0, 256), (256, 300)] * 8
    observations = [seen(true, pos0, n) for pos0, n in sizes]
    observations[place] = ChunkCost(*sizes[place], absurd, 0.0)
    fitted = fit(observations)
    assert all(error(fitted, true, n, pos0) < 0.15 for pos0, n in sizes)


def test_what_was_seen_last_counts_more() -> None:
    slow = StageModel(fixed=0.1, per_token=2e-3, per_pair=0)
    quick = StageModel(fixed=0.05, per_token=1e-3, per_pair=0)
    sizes = [(0, 512), (512, 256)]
    for earlier, later in ((slow, quick), (quick, slow)):
        before = [seen(earlier, *size) for size in sizes]
        after = [replace(seen(later, *size), number=2000) for size in sizes]
        assert error(fit([*after, *before]), later, 512, 0) < 0.05


@given(
    st.lists(
        st.builds(
            ChunkCost,
            st.integers(0, 2**31 - 1),
            st.integers(64, 2**31 - 1),
            st.floats(0, 5000),
            st.floats(0, 5000),
        ),
        min_size=1,
        max_size=64,
    )
)
def test_no_coefficient_is_ever_negative_or_no_number(observations) -> None:
    fitted = fit(observations)
    coefficients = [fitted.fixed, fitted.per_token, fitted.per_pair]
    coefficients += [fitted.hop_fixed, fitted.hop_per_token]
    assert all(math.isfinite(x) and x >= 0 for x in coefficients)


# --- what is kept ---------------------------------------------------------------------------------


def test_a_stage_is_measured_by_its_second_and_third_span() -> None:
    """The first one pays for first use."""
    costs = StageCosts()
    for _ in range(2):
        costs.add(STAGE, 0, 512, eval_usec=100_000)
        assert costs.models([STAGE]) is None
    costs.add(STAGE, 0, 512, eval_usec=100_000)
    assert costs.models([STAGE]) is not None
    assert costs.models([STAGE, (6, 9)]) is None


@pytest.mark.parametrize(
    ("pos0", "n_tokens"), [(0, 1), (0, 63), (0, 0), (-1, 512), (2**24, 512), (0, 2**24), (0, -512)]
)
def test_spans_that_no_chunk_resembles_are_not_kept(pos0, n_tokens) -> None:
    costs = StageCosts()
    for _ in range(9):
        costs.add(STAGE, pos0, n_tokens, eval_usec=1)
    assert costs.models([STAGE]) is None


def test_of_one_size_and_position_the_last_four_are_kept() -> None:
    costs = StageCosts()
    for usec in [900_000] * 100 + [100_000] * 4:
        costs.add(STAGE, 0, 512, eval_usec=usec)
    (fitted,) = costs.models([STAGE])
    assert fitted.seconds(512, 0) == pytest.approx(0.1, rel=0.02)
    assert len(costs._records[STAGE].observations) == 4


def test_a_long_prompt_pushes_out_nothing_of_other_sizes() -> None:
    costs = StageCosts()
    for pos0, n_tokens in [(0, 512), (0, 512), *((128 * n, 128) for n in range(500))]:
        costs.add(STAGE, pos0, n_tokens, eval_usec=n_tokens * 1000)
    assert costs.models([STAGE])[0].sizes == (128, 512)


def test_observations_are_bounded_whatever_a_peer_says() -> None:
    costs, random = StageCosts(), Random(1)
    for _ in range(20_000):
        pos0, n_tokens = (int(2 ** random.uniform(0, 25)) for _ in range(2))
        costs.add(STAGE, pos0, n_tokens, eval_usec=1)
    assert len(costs._records[STAGE].observations) <= 4 * 25 * 37
    assert costs.models([STAGE]) is not None


@given(
    st.lists(st.tuples(U32, U32, U32, U32), min_size=3, max_size=80),
    st.lists(st.tuples(U32, U32), max_size=20),
    stretches,
)
def test_whatever_peers_report_the_choice_is_a_candidate(reports, plausible, stretch) -> None:
    costs = StageCosts()
    for pos0, n_tokens, eval_usec, hop_usec in reports:
        costs.add(STAGE, pos0, n_tokens, eval_usec=eval_usec, hop_usec=hop_usec)
    for eval_usec, hop_usec in plausible:
        costs.add(STAGE, 0, 512, eval_usec=eval_usec, hop_usec=hop_usec)
    choice = choose(costs.models([STAGE]), stretch)
    assert choice.chunk in stretch.candidates()
    assert 1 <= choice.chunk <= stretch.cap
    assert all(math.isfinite(f.seconds) for f in choice.forecasts.values())


# --- the candidates -------------------------------------------------------------------------------


@given(stretches)
def test_candidates_are_whole_granules_within_the_cap(stretch) -> None:
    sizes = stretch.candidates()
    assert sizes == sorted(set(sizes))
    assert sizes
    for size in sizes:
        assert size <= stretch.cap
        assert size % GRANULE == 0 or size == stretch.cap
        at = stretch.start
        for pos0, n_tokens in stretch.cut(size):
            assert pos0 == at
            assert 1 <= n_tokens <= size
            at += n_tokens
        assert at == stretch.start + stretch.n_tokens


@pytest.mark.parametrize(
    ("n_tokens", "cap", "sizes"),
    [
        (1, 4096, [128]),
        (128, 4096, [128]),
        (129, 4096, [128, 256]),
        (2048, 4096, [128, 256, 384, 512, 768, 1024, 2048]),
        (600, 4096, [128, 256, 384, 640]),
        (9000, 1000, [128, 256, 384, 512, 640, 768, 896, 1000]),
        (100, 16, [16]),
        (0x100000, 4096, [1024, 1152, 1280, 1408, 1536, 1664]),  # at most 1024 chunks
    ],
)
def test_the_sizes_that_are_compared(n_tokens, cap, sizes) -> None:
    got = Stretch(start=0, n_tokens=n_tokens, cap=cap).candidates()
    assert got[: len(sizes)] == sizes
    assert len(got) == len(sizes) or n_tokens > 10_000


# --- the forecast ---------------------------------------------------------------------------------


def played(stages, stretch: Stretch, chunk: int) -> float:
    """When the last chunk leaves the last stage, by its definition."""
    chunks = list(stretch.cut(chunk))

    @cache
    def done(index: int, stage: int) -> float:
        if index < 0:
            return 0.0
        pos0, n_tokens = chunks[index]
        if stage < 0:
            return done(index - stretch.window, len(stages) - 1)
        model = stages[stage]
        arrived = done(index, stage - 1) + model.hop_seconds(n_tokens)
        return max(arrived, done(index - 1, stage)) + model.seconds(n_tokens, pos0)

    return done(len(chunks) - 1, len(stages) - 1)


@given(st.lists(models, min_size=1, max_size=4), stretches.filter(lambda s: s.cap >= 100))
def test_a_forecast_is_the_end_of_the_last_chunk(stages, stretch) -> None:
    for size in stretch.candidates():
        if stretch.n_tokens <= 40 * size:
            got = forecast(stages, stretch, size)
            assert got.seconds == pytest.approx(played(stages, stretch, size))


@given(st.lists(models, min_size=1, max_size=4), stretches, st.data())
def test_a_forecast_lies_between_the_slowest_stage_and_no_overlap_at_all(
    stages, stretch, data
) -> None:
    size = data.draw(st.sampled_from(stretch.candidates()))
    chunks = list(stretch.cut(size))
    sums = [sum(model.seconds(n, pos0) for pos0, n in chunks) for model in stages]
    hops = sum(model.hop_seconds(n) for _, n in chunks for model in stages)
    got = forecast(stages, stretch, size)
    assert max(sums) * (1 - 1e-9) <= got.seconds <= (sum(sums) + hops) * (1 + 1e-9)
    assert got.longest == max(model.seconds(n, pos0) for pos0, n in chunks for model in stages)


@given(st.lists(models, min_size=1, max_size=3), stretches, st.data())
def test_more_room_and_quicker_stages_never_take_longer(stages, stretch, data) -> None:
    size = data.draw(st.sampled_from(stretch.candidates()))
    roomy = Stretch(
        start=stretch.start,
        n_tokens=stretch.n_tokens,
        cap=stretch.cap,
        window=stretch.window + 1,
    )
    worse = [
        StageModel(
            fixed=model.fixed + data.draw(st.floats(0, 0.1)),
            per_token=model.per_token + data.draw(st.floats(0, 0.01)),
            per_pair=model.per_pair,
            hop_fixed=model.hop_fixed + data.draw(st.floats(0, 0.1)),
            hop_per_token=model.hop_per_token,
        )
        for model in stages
    ]
    usual = forecast(stages, stretch, size).seconds
    assert forecast(stages, roomy, size).seconds <= usual * (1 + 1e-9)
    assert usual <= forecast(worse, stretch, size).seconds * (1 + 1e-9)


# --- the choice -----------------------------------------------------------------------------------


@given(st.lists(models, min_size=1, max_size=3), stretches.filter(lambda s: s.cap >= 256))
def test_no_candidate_is_better_than_the_choice_by_more_than_courtesy(stages, stretch) -> None:
    choice = choose(stages, stretch)
    mine = forecast(stages, stretch, choice.chunk)
    others = [forecast(stages, stretch, size) for size in stretch.candidates()]
    least = min(f.seconds for f in others)
    assert mine.seconds <= least * COURTESY[-1][1] * 1.01
    for longest, factor in COURTESY:
        if mine.longest > longest:  # then nothing shorter was to be had at this price
            assert all(f.longest > longest or f.seconds > factor * least for f in others)
        else:  # nor anything quicker that is as short
            short = [f.seconds for f in others if f.longest <= longest]
            assert mine.seconds <= 1.01 * min(short)
            break


@pytest.mark.parametrize(
    ("n_stages", "model", "n_tokens", "chunk"),
    [
        # short of half a second anyway: one process takes all at once, stages overlap; of sizes
        # within 1 % the largest
        (1, StageModel(fixed=0.005, per_token=1e-4, per_pair=0), 2048, 2048),
        (2, StageModel(fixed=0.005, per_token=1e-4, per_pair=0), 2048, 384),
        (3, StageModel(fixed=0.005, per_token=1e-4, per_pair=0), 8192, 640),
        # a fixed cost of thousands of tokens' work: do not cut
        (2, StageModel(fixed=0.4, per_token=1e-5, per_pair=0), 2048, 2048),
        # a token takes a millisecond: courtesy costs little, so chunks stay under half a second
        (1, StageModel(fixed=0.001, per_token=1e-3, per_pair=0), 2048, 384),
        # every chunk takes longer than half a second: ten seconds are worth more of them
        (1, StageModel(fixed=0.4, per_token=0.02, per_pair=0), 2048, 384),
        # or longer than ten: the smallest that costs a tenth at most
        (1, StageModel(fixed=1.0, per_token=0.1, per_pair=0), 2048, 128),
        (1, StageModel(fixed=5.0, per_token=0.1, per_pair=0), 2048, 512),
        # stages that take no time: what is not seen by their clocks decides
        (2, NOTHING, 2048, 2048),
    ],
)
def test_choices(n_stages, model, n_tokens, chunk) -> None:
    stretch = Stretch(start=0, n_tokens=n_tokens, cap=4096, window=min(8, n_stages + 2))
    assert choose([model] * n_stages, stretch).chunk == chunk


@pytest.mark.parametrize(
    ("usual", "n_tokens", "chunk"),
    [(512, 2048, 384), (384, 2048, 512), (256, 512, 128), (128, 2048, 256), (640, 128, 128)],
)
def test_a_stage_that_knows_one_size_is_given_another(usual, n_tokens, chunk) -> None:
    """The model says 384 or 512 for long prompts; what was never seen is tried."""
    model = fit([ChunkCost(0, usual, 0.001 * usual, 0.0)] * 4)
    stretch = Stretch(start=0, n_tokens=n_tokens, cap=4096, window=4)
    assert choose([model] * 2, stretch).chunk == chunk


@pytest.mark.parametrize(
    ("seen_sizes", "chunk"),
    [((256, 384), 768), ((64, 2048), 2048), ((1024, 3000), 2048), ((4096, 8192), 2048)],
)
def test_no_choice_goes_far_beyond_what_was_seen(seen_sizes, chunk) -> None:
    """The model alone says 2048, which is also taken if nothing else is near."""
    model = StageModel(fixed=0.1, per_token=1e-6, per_pair=0, sizes=seen_sizes)
    choice = choose([model], Stretch(start=0, n_tokens=2048, cap=4096))
    assert choice.chunk == chunk


@pytest.mark.parametrize(
    ("n_tokens", "cap", "chunk"),
    [
        *((1, 4096, 128), (300, 4096, 384), (512, 4096, 512), (513, 4096, 384)),
        *((9999, 4096, 512), (9999, 200, 200), (0x100000, 4096, 1024)),
    ],
)
def test_before_anything_is_measured_chunks_are_moderate(n_tokens, cap, chunk) -> None:
    stretch = Stretch(start=0, n_tokens=n_tokens, cap=cap)
    assert choose(None, stretch) == ChunkChoice(chunk, {})
    assert chunk <= UNMEASURED_CHUNK or n_tokens > 10**6


def test_an_explanation_names_sizes_times_and_stages() -> None:
    model = StageModel(fixed=0.005, per_token=1e-4, per_pair=2e-9, hop_fixed=0.001)
    stretch = Stretch(start=100, n_tokens=600, cap=4096, window=4)
    line = choose([model] * 2, stretch).explain(stretch, {(0, 2): model, (3, 5): model})
    assert line == (
        "600 tokens from 100: 5 x 128, predicted 0.108 s, longest chunk 0.018 s (candidates in s: "
        "128: 0.108, 256: 0.110, 384: 0.118, 640: 0.134; layers 0-2: 5.00 ms + 100.0 us a token "
        "+ 2.00 ns a pair, hop 1.00 ms; layers 3-5: 5.00 ms + 100.0 us a token + 2.00 ns a pair, "
        "hop 1.00 ms)"
    )
    assert choose(None, stretch).explain(stretch, {}) == (
        "600 tokens from 100: 2 x 384, as not every stage was measured yet"
    )
