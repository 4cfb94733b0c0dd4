"""Sections: which run, what they say without their baselines, and what a failure leaves."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ds4py.errors import ClusterError, ConfigError
from ds4py.tracing.events import COORDINATOR, Shares
from tools.benchmarks import cpu, pipeline, run, targets
from tools.benchmarks.llama import Llama
from tools.benchmarks.sections import SMOLLM2, Bench
from tools.benchmarks.targets import Finding, Verdict, found
from tools.benchmarks.timers import TimedJob


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Without a model, without llama.cpp."""
    return Bench(
        models=tmp_path,
        rounds=1,
        chunk=256,
        cores=2,
        llama=None,
        llama_bench=None,
        step=lambda _: None,
    )


def test_sections_run_in_their_own_order_and_by_default_all_of_them() -> None:
    assert run.chosen(("start", "cpu")) == ["cpu", "start"]
    assert run.chosen(()) == list(run.SECTIONS)
    with pytest.raises(ConfigError, match="'speed': expected one of cpu, pipeline"):
        run.chosen(("cpu", "speed"))


def test_every_section_has_bars_and_every_bar_a_section() -> None:
    assert {target.section for target in targets.ALL} == set(run.SECTIONS)


def test_without_llama_cpp_the_section_says_how_to_get_it(bench: Bench) -> None:
    findings = list(cpu.measure(bench))
    assert {finding.target for finding in findings} == {
        *targets.PREFILL.values(),
        *targets.DECODE.values(),
    }
    for finding in findings:
        assert finding.verdict is Verdict.NOT_RUN
        assert "pip install -e '.[baselines]'" in finding.detail


def test_a_missing_model_says_what_makes_it(bench: Bench) -> None:
    with_llama = replace(bench, llama=Llama(Path("python"), has_rpc=False))
    findings = [*cpu.measure(with_llama), *pipeline.measure(with_llama)]
    assert {finding.verdict for finding in findings} == {Verdict.NOT_RUN}
    details = {finding.target: finding.detail for finding in findings}
    assert "tools/get_models.py smollm2" in details[targets.RPC]
    assert "--mix Q8_0" in details[targets.DECODE["1B Q8_0"]]


def test_a_model_that_is_there_is_not_missing(bench: Bench) -> None:
    assert SMOLLM2 in bench.missing(SMOLLM2)
    bench.model(SMOLLM2).touch()
    assert bench.missing(SMOLLM2) == ""


def test_a_section_that_fails_keeps_what_it_has_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(_: Bench) -> Iterator[Finding]:
        yield found(targets.HELP, 0.1, cores=1)
        raise ClusterError("the worker is gone")

    monkeypatch.setitem(run.SECTIONS, "start", breaks)
    findings = run.run(bench, ["start", "cpu"])
    start = {f.target: f for f in findings if f.target.section == "start"}
    assert start[targets.HELP].verdict is Verdict.PASS
    assert start[targets.MEMORY].verdict is Verdict.FAILED
    assert start[targets.MEMORY].detail == "the worker is gone"
    assert len(start) == 4
    assert sum(f.target.section == "cpu" for f in findings) == 6


def test_the_report_has_a_line_for_each_bar_and_one_json_object(bench: Bench) -> None:
    findings = [
        found(targets.HELP, 0.154, cores=2, detail="ds4py 0.154 s"),
        found(targets.PIPELINE[3, 2048], 0.5, cores=2),
        *run.run(bench, ["cpu"]),
    ]
    console = Console(width=150, file=io.StringIO(), record=True)
    console.print(run.table(findings))
    text = console.export_text()
    for words in ("0.15 s", "at most 0.20 s", "pass", "50.0 %", "not judged", "needs 3 cores"):
        assert words in text
    line = run.json_line(findings, bench)
    assert "\n" not in line
    told = json.loads(line)
    assert told["cores"] == 2
    assert [item["verdict"] for item in told["findings"]][:2] == ["pass", "not judged"]
    assert len(told["findings"]) == 8


# --- the arithmetic of the pipeline ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "value", "verdict"),
    [(4, 2.4 / (96 / 34), Verdict.SHORT), (3, 2.4 / (96 / 34), Verdict.SHORT), (2, 1.2, None)],
)
def test_a_route_is_compared_with_what_its_cores_allow(
    bench: Bench, cores: int, value: float, verdict: Verdict | None
) -> None:
    job = TimedJob("prefill", 8192)
    rates = {"1 process": {job: [100.0, 50.0]}, "3 workers": {job: [240.0, 120.0]}}
    here = replace(bench, cores=cores)
    finding = pipeline.part_of_ideal(here, targets.PIPELINE[3, 8192], rates, 3, job)
    assert finding.value == pytest.approx(value)
    assert finding.verdict is (verdict or Verdict.NOT_JUDGED)
    assert "2.40x of" in finding.detail
    assert "in 32 chunks" in finding.detail


def test_the_shares_of_workers_are_told_without_the_coordinator() -> None:
    own = Shares(compute=0.9, wire=0.05, wait=0.03, idle=0.02)
    text = pipeline.told({COORDINATOR: own, "a": own, "b": own})
    part = "90% compute 5% wire 3% wait 2% idle"
    assert text == f"stage 0: {part}; stage 1: {part}"
