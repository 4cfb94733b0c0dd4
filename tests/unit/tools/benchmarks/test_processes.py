"""Taking turns, and real processes: timed, pinned, failing, and gone afterwards."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from ds4py.errors import ClusterError
from ds4py.layer_range import balanced_cuts
from tests.toys import toy_llama
from tools.benchmarks.processes import (
    TimedProcess,
    WorkerSettings,
    available_cores,
    child,
    route,
    running,
    take_turns,
    told_rates,
    whole_model,
)
from tools.benchmarks.timers import TimedJob

PREFILL, DECODE = TimedJob("prefill", 100), TimedJob("decode", 10)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_llama(tmp_path_factory.mktemp("toy") / "toy.gguf", n_layers=2)


# --- turns ----------------------------------------------------------------------------------------


def test_everybody_does_every_job_once_a_round_in_changing_order() -> None:
    done: list[tuple[str, TimedJob]] = []

    def subject(name: str, seconds: float) -> TimedProcess:
        def run(job: TimedJob) -> float:
            done.append((name, job))
            return seconds

        return TimedProcess(name, run)

    told: list[str] = []
    subjects = (subject("a", 2.0), subject("b", 0.5))
    rates = take_turns(subjects, (PREFILL, DECODE), 3, told.append)
    assert rates == {
        "a": {PREFILL: [50.0] * 3, DECODE: [5.0] * 3},
        "b": {PREFILL: [200.0] * 3, DECODE: [20.0] * 3},
    }
    warm_up, rounds = done[:4], done[4:]
    assert {job.n for _, job in warm_up} == {64, 10}
    assert len(rounds) == 12
    assert [name for name, job in rounds if job is PREFILL] == ["a", "b", "b", "a", "a", "b"]
    assert told[-1] == "b: decode 10"
    assert told_rates(rates, PREFILL) == "a 50 t/s, b 200 t/s"


@pytest.mark.parametrize("job", [PREFILL, DECODE])
def test_a_job_survives_its_way_to_a_child(job: TimedJob) -> None:
    assert TimedJob.parse(f"{job}\n") == job


# --- processes ------------------------------------------------------------------------------------


def script(text: str) -> list[object]:
    return [sys.executable, "-c", text]


def test_a_child_answers_jobs_on_its_core_and_is_gone_afterwards() -> None:
    talk = (
        "import os, sys\nprint('ready', flush=True)\n"
        "for line in sys.stdin: print(len(os.sched_getaffinity(0)), flush=True)\n"
    )
    before = set(psutil.Process().children())
    with child("one", script(talk), core=1) as subject:
        assert subject.run(PREFILL) == 1.0
        assert set(psutil.Process().children()) > before
    assert set(psutil.Process().children()) == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys; sys.exit('no such model')", "no such model"),
        ("print('hello')", "is not ready"),
        ("pass", r"\(nothing on stderr\)"),
    ],
)
def test_a_child_that_does_not_start_says_why(text: str, said: str) -> None:
    with pytest.raises(ClusterError, match=f"one: .*{said}"), child("one", script(text)):
        raise AssertionError


def test_a_child_that_dies_at_work_ends_the_measurement() -> None:
    talk = "import sys; print('ready', flush=True); input(); sys.exit('out of memory')"
    with (
        child("one", script(talk)) as subject,
        pytest.raises(ClusterError, match="gave no answer; it said: out of memory"),
    ):
        subject.run(PREFILL)


def test_a_process_that_ends_is_not_waited_for() -> None:
    with (
        running("one", script("import sys; sys.exit('port is taken')"), None) as process,
        pytest.raises(ClusterError, match="ended at once; it said: port is taken"),
    ):
        process.wait_log("ready")


def test_the_cores_are_those_of_this_process() -> None:
    assert len(available_cores()) >= 1


# --- ds4py ----------------------------------------------------------------------------------------


def test_a_whole_model_in_a_child_is_timed(toy: Path) -> None:
    with child("ds4py", whole_model(toy, n_ctx=256, chunk=16)) as subject:
        assert 0 < subject.run(TimedJob("prefill", 64)) < 60
        assert 0 < subject.run(TimedJob("decode", 2)) < 60


def test_a_route_of_workers_is_timed_and_accounts_for_its_time(toy: Path) -> None:
    job, cuts = TimedJob("prefill", 64), balanced_cuts([1, 1], 2)
    with route(toy, cuts, WorkerSettings(n_ctx=256), chunk=16) as under_test:
        assert 0 < under_test.subject("2 workers").run(job) < 60
        stages = under_test.backend.health().stages
    assert [stage.prefill_tokens for stage in stages[1:]] == [64, 64]
    shares = under_test.shares[job]
    assert len(shares) == 3
    for own in shares.values():
        assert own.compute + own.wire + own.wait + own.idle == pytest.approx(1.0)
    assert [worker.seconds > 0 for worker in under_test.workers] == [True, True]
