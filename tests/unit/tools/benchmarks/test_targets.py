"""Bars, verdicts, ratios of paired runs, the ideal of a pipeline."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.benchmarks import targets
from tools.benchmarks.targets import (
    Finding,
    Target,
    Verdict,
    found,
    ideal_speedup,
    median_ratio,
    not_run,
)

MORE = Target(section="cpu", name="more", limit=3.0, cores=2)
LESS = Target(section="start", name="less", limit=0.2, unit="s", at_least=False)


@pytest.mark.parametrize(
    ("target", "value", "verdict"),
    [
        (MORE, 3.0, Verdict.PASS),
        (MORE, 2.999, Verdict.SHORT),
        (MORE, 30.0, Verdict.PASS),
        (LESS, 0.2, Verdict.PASS),
        (LESS, 0.201, Verdict.SHORT),
        (LESS, 0.0, Verdict.PASS),
        (MORE, math.nan, Verdict.SHORT),
        (LESS, math.nan, Verdict.SHORT),
    ],
)
def test_a_value_is_judged_by_its_side_of_the_limit(
    target: Target, value: float, verdict: Verdict
) -> None:
    assert found(target, value, cores=2).verdict is verdict


def test_a_machine_with_too_few_cores_is_not_judged_but_its_value_is_told() -> None:
    finding = found(MORE, 9.0, cores=1, detail="9 / 1")
    assert finding.verdict is Verdict.NOT_JUDGED
    told = finding.as_object()
    assert (told["value"], told["verdict"]) == (9.0, "not judged")
    assert told["detail"] == "9 / 1; needs 2 cores, has 1"


def test_what_was_not_measured_says_why() -> None:
    assert not_run(MORE, "pip install it").verdict is Verdict.NOT_RUN
    broken = not_run(MORE, "it broke", failed=True)
    assert broken.verdict is Verdict.FAILED
    told = broken.as_object()
    assert (told["value"], told["detail"]) == (None, "it broke")


def test_a_limit_is_written_with_its_sense_and_unit() -> None:
    units = {"x": "1.50x", "%": "150.0 %", "s": "1.50 s", "us": "2 us", "chunks": "1.50 chunks"}
    for unit, text in units.items():
        target = Target(section="cpu", name="", limit=1.5, unit=unit)  # type: ignore[arg-type]
        assert target.wanted == f"at least {text}"
    assert LESS.wanted == "at most 0.20 s"


def test_a_slow_round_leaves_the_ratio_alone() -> None:
    """Both of the second round were ten times slower; means would say 1.8, medians 2.2."""
    assert median_ratio([20, 2, 22], [10, 1, 10]) == 2.0
    with pytest.raises(ValueError, match="shorter"):
        median_ratio([1, 2], [1])


@pytest.mark.parametrize(
    ("stages", "chunks", "cores", "ideal"),
    [(2, 8, 2, 16 / 9), (3, 32, 3, 96 / 34), (3, 32, 2, 2.0), (2, 1, 8, 1.0), (1, 5, 1, 1.0)],
)
def test_the_ideal_fills_the_pipeline_but_no_more_than_the_cores(
    stages: int, chunks: int, cores: int, ideal: float
) -> None:
    assert ideal_speedup(stages, chunks, cores) == pytest.approx(ideal)


@given(st.integers(1, 64), st.integers(1, 1000), st.integers(1, 64))
def test_the_ideal_is_never_beyond_stages_chunks_or_cores(
    stages: int, chunks: int, cores: int
) -> None:
    ideal = ideal_speedup(stages, chunks, cores)
    assert 1.0 <= ideal <= min(stages, chunks, cores) + 1e-9


def test_every_bar_has_its_own_name_and_a_section() -> None:
    keys = [(target.section, target.name) for target in targets.ALL]
    assert len(set(keys)) == len(keys)
    assert len(keys) == 6 + 5 + 2 + 3 + 4


def test_the_bars_are_those_that_were_asked_for() -> None:
    assert {target.limit for target in targets.PREFILL.values()} == {3.0}
    assert [target.limit for target in targets.DECODE.values()] == [0.9, 1.0, 1.0]
    assert {(n, target.cores, target.limit) for (n, _), target in targets.PIPELINE.items()} == {
        (2, 2, 0.95),
        (3, 3, 0.95),
    }
    assert targets.RPC.limit == 5.0
    assert Finding(target=targets.HELP, value=0.19).verdict is Verdict.PASS
