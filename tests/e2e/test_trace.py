"""`--dist-trace`: what the programs write about a prompt and an answer over two workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Launcher, run, wait_for

EXACT = ("--precision", "f32", "--dist-alive-timeout", 0)
PROMPT = [5, 80, 3, 41, 9] * 8
CHUNK = 8
N_TOKENS = 6
# what is evaluated: the chunks of the prompt, then all tokens but the last
SPANS = {(pos0, CHUNK) for pos0 in range(0, len(PROMPT), CHUNK)} | {
    (len(PROMPT) + n, 1) for n in range(N_TOKENS - 1)
}
PHASES = {"run", "compute", "head", "send", "wait", "queue", "wire"}


@dataclass(frozen=True)
class Trace:
    """The events of a file and the names in it."""

    events: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path, end: str = "") -> Trace:
        return cls(json.loads(path.read_text() + end))

    @property
    def complete(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["ph"] == "X"]

    @property
    def stages(self) -> dict[str, int]:
        """Process ids by name."""
        return {e["args"]["name"]: e["pid"] for e in self.events if e["name"] == "process_name"}

    def of(self, stage: str, phase: str) -> list[dict[str, Any]]:
        pid = self.stages[stage]
        return [e for e in self.complete if e["pid"] == pid and e["cat"].startswith(f"{phase},")]

    def spans(self, stage: str, phase: str) -> set[tuple[int, int]]:
        return {(e["args"]["pos0"], e["args"]["tokens"]) for e in self.of(stage, phase)}


@dataclass(frozen=True)
class Run:
    """Traces of one run, and the names that the coordinator gives its workers."""

    coordinator: Trace
    first: Trace
    killed: Path
    workers: list[str]


@pytest.fixture(scope="module")
def traced(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("traces")
    files = [folder / f"{name}.json" for name in ("coordinator", "first", "second")]
    with Launcher(folder / "run") as launch:
        first, second = (
            launch.worker(
                *("--dist-role", "worker", "--dist-layers", layers, "-m", toy, *EXACT),
                *("--dist-listen", "127.0.0.1:0", "--dist-trace", file),
            )
            for layers, file in zip(("2-3", "4-5"), files[1:], strict=True)
        )
        answer = run(
            *("ds4py-cli", "-m", toy, "-t", 1, *EXACT, "--dist-trace", files[0], "--temp", 0),
            *("--dist-route", f"{first.address},{second.address}", "--dist-layers", "0-1"),
            *("--dist-prefill-chunk", CHUNK, "--print-ids", "-n", N_TOKENS),
            *("--prompt-ids", ",".join(map(str, PROMPT))),
        )
        assert answer.status == 0, answer.err
        assert first.program.stop() == 0
        wait_for(lambda: len(events_of(files[2])) >= len(SPANS), "the worker has written")
        second.program.kill()
        names = [
            f"worker {first.address} (layers 2-3)",
            f"worker {second.address} (layers 4-5 and the output head)",
        ]
        yield Run(Trace.read(files[0]), Trace.read(files[1]), files[2], names)


def events_of(unfinished: Path) -> list[dict[str, Any]]:
    return Trace.read(unfinished, "]").of("worker (layers 4-5 and the output head)", "compute")


def test_every_event_has_what_the_viewers_need(traced: Run) -> None:
    for trace in (traced.coordinator, traced.first):
        for event in trace.complete:
            assert all(isinstance(event[key], int) for key in ("ts", "dur", "pid", "tid"))
            assert event["dur"] >= 0
            phase, step = event["cat"].split(",")
            assert phase in PHASES
            args = event["args"]
            assert step == ("decode" if args["tokens"] == 1 else "prefill")
            assert event["name"].startswith(f"{step} {args['pos0']}")
        tracks = {(e["pid"], e["tid"]) for e in trace.complete}
        named = {(e["pid"], e["tid"]) for e in trace.events if e["name"] == "thread_name"}
        assert tracks == named
        assert {pid for pid, _ in tracks} == set(trace.stages.values())


def test_the_coordinator_shows_the_computation_of_each_span_on_each_stage(traced: Run) -> None:
    trace = traced.coordinator
    assert list(trace.stages) == ["coordinator", *traced.workers]
    for stage in trace.stages:
        assert trace.spans(stage, "compute") == SPANS
    assert len({event["args"]["session"] for event in trace.complete}) == 1
    assert trace.spans("coordinator", "send") == trace.spans("coordinator", "wait") == SPANS
    assert (0, len(PROMPT)) in trace.spans("coordinator", "run")


def test_what_remote_stages_did_lies_inside_the_wait_for_their_answer(traced: Run) -> None:
    trace = traced.coordinator
    waits = {e["args"]["request"]: e for e in trace.of("coordinator", "wait")}
    remote = [e for e in trace.complete if e["pid"] != trace.stages["coordinator"]]
    assert {event["args"]["request"] for event in remote} == set(waits)
    for event in remote:
        wait = waits[event["args"]["request"]]
        assert wait["ts"] <= event["ts"]
        assert event["ts"] + event["dur"] <= wait["ts"] + wait["dur"]


def test_a_worker_shows_the_same_spans_on_its_own_clock(traced: Run) -> None:
    stage = "worker (layers 2-3)"
    assert list(traced.first.stages) == [stage]
    assert traced.first.spans(stage, "compute") == SPANS
    waited = traced.first.spans(stage, "wait")  # one of no microsecond is left out
    assert waited
    assert waited <= SPANS
    runs = traced.coordinator.of("coordinator", "run")
    for event in traced.first.of(stage, "compute"):
        args = event["args"]
        (told,) = (
            e
            for e in traced.coordinator.of(traced.workers[0], "compute")
            if e["args"]["request"] == args["request"]
        )
        assert told["args"] == args
        # one machine has one clock, so the run that the span belongs to encloses both
        (run_,) = (e for e in runs if 0 <= args["pos0"] - e["args"]["pos0"] < e["args"]["tokens"])
        for inner in (event, told):
            assert run_["ts"] <= inner["ts"]
            assert inner["ts"] + inner["dur"] <= run_["ts"] + run_["dur"]


def test_a_killed_program_leaves_a_trace_that_lacks_its_closing_bracket_only(traced: Run) -> None:
    with pytest.raises(json.JSONDecodeError):
        Trace.read(traced.killed)
    trace = Trace.read(traced.killed, "]")
    assert trace.spans("worker (layers 4-5 and the output head)", "compute") == SPANS


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (("--dist-route", "127.0.0.1:1"), "Not a directory"),
        ((), "--dist-trace needs a role"),
    ],
)
def test_a_trace_that_can_not_be_written_is_told_in_one_line(toy: Path, where, words) -> None:
    asked = ("-m", toy, "-p", "a", *where, "--dist-trace", toy / "trace.json")
    answer = run("ds4py-cli", *asked)
    assert answer.status == 2
    assert words in answer.err
    assert "--dist-trace" in answer.err
    assert answer.err.count("\n") == 1
