"""`ds4py-bench` as people run it: rows, files, a route of real workers."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from ds4py.bench.context_sweep import CSV_HEADER
from tests.processes import Answer, Launcher, run
from tests.toys import toy_llama

TEXT = "hello the world and " * 60
WALK = ("--ctx-start", 32, "--ctx-max", 80, "--step-incr", 24, "-n", 4, "-t", 1)
FRONTIERS = [32, 56, 80]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_llama(tmp_path_factory.mktemp("toy") / "toy.gguf", n_layers=4)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def rows(text: str) -> list[dict[str, float]]:
    assert text.partition("\n")[0] == CSV_HEADER
    return [
        {key: float(value) for key, value in row.items()}
        for row in csv.DictReader(io.StringIO(text))
    ]


def check_walk(found: list[dict[str, float]]) -> None:
    assert [row["ctx_tokens"] for row in found] == FRONTIERS
    assert [row["prefill_tokens"] for row in found] == [32, 24, 24]
    for row in found:
        assert row["gen_tokens"] == 4
        assert row["prefill_tps"] > 0
        assert row["gen_tps"] > 0


def test_a_model_in_one_process_fills_every_file_that_was_asked_for(
    model: Path, book: Path, tmp_path: Path
) -> None:
    wanted = ("--csv", tmp_path / "rows.csv", "--png", tmp_path / "rates.png", "--json")
    dump = ("--dump-frontier-logits-dir", tmp_path / "logits")
    done = run("ds4py-bench", "-m", model, "--chat-prompt-file", book, *WALK, *wanted, *dump)
    assert done.status == 0, done.err
    check_walk(rows((tmp_path / "rows.csv").read_text(encoding="utf-8")))
    told = json.loads(done.out)
    assert [frontier["ctx_tokens"] for frontier in told["frontiers"]] == FRONTIERS
    assert list(told["frontiers"][0]["stages"]["decode"]) == ["coordinator"]
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    logits = [json.loads(p.read_text()) for p in sorted((tmp_path / "logits").iterdir())]
    assert [one["frontier_tokens"] for one in logits] == FRONTIERS
    assert len(logits[0]["logits"]) == logits[0]["vocab"]


def test_a_route_of_workers_is_measured_with_the_time_of_its_stages(
    model: Path, book: Path, tmp_path: Path
) -> None:
    with Launcher(tmp_path / "run") as launch:
        workers = [
            launch.worker(
                *("--dist-role", "worker", "--dist-listen", "127.0.0.1:0", "-m", model),
                *("--dist-layers", layers),
            )
            for layers in ("0-1", "2-3")
        ]
        route = ",".join(worker.address for worker in workers)
        chunked = ("--dist-role", "coordinator", "--dist-prefill-chunk", 8)
        done = run(
            *("ds4py-bench", "-m", model, "--prompt-file", book, *WALK),
            *("--dist-route", route, *chunked),
        )
    assert done.status == 0, done.err
    check_walk(rows(done.out.decode()))
    table = [line for line in done.err.splitlines() if "│" in line]
    for what in ("prefill", "decode"):
        assert sum(what in line for line in table) == 3, done.err


def refused(*args: object) -> Answer:
    done = run("ds4py-bench", *args)
    assert done.out == b""
    assert len(done.err.splitlines()) == 1
    return done


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "give one of --prompt-file and --chat-prompt-file"),
        (("--prompt-file", "a", "--chat-prompt-file", "b"), "give one of"),
        (("--prompt-file", "a"), "no model"),
        (("--prompt-file", "a", "--ctx-start", 0), "--ctx-start 0"),
        (("--prompt-file", "a", "--step-mul", "0.5"), "--step-mul 0.5"),
        (("--prompt-file", "a", "--ctx-alloc", 9), "--ctx-alloc 9"),
        (("--prompt-file", "a", "--ctx-alloc", 40000, "-c", 40000), "say the same"),
        (("--prompt-file", "a", "--role", "worker"), "start workers with ds4py-server"),
        (("--prompt-file", "a", "--dist-layers", "0-1"), "needs a role"),
        (("--prompt-file", "a", "--sessions", 2), "No such option"),
        (("--prompt-file", "a", "--rounds", 2), "No such option"),
        (("start",), "unexpected extra argument"),
    ],
)
def test_flags_that_can_not_work_end_with_2(args: tuple[object, ...], said: str) -> None:
    done = refused(*args)
    assert (done.status, said in done.err) == (2, True), done.err


def test_a_prompt_that_is_too_short_ends_with_1(model: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("hello")
    done = run("ds4py-bench", "-m", model, "--prompt-file", short, *WALK)
    assert done.status == 1
    assert "tokens in the prompt" in done.err
    assert done.out.decode().splitlines() == [CSV_HEADER]


def test_a_missing_prompt_ends_with_2(model: Path, tmp_path: Path) -> None:
    done = run("ds4py-bench", "-m", model, "--prompt-file", tmp_path / "none.txt", *WALK)
    assert done.status == 2
    assert "none.txt: No such file" in done.err


def test_help_names_the_frontiers() -> None:
    done = run("ds4py-bench", "--help")
    assert done.status == 0
    for word in ("--ctx-start", "--dump-frontier-logits-dir", "--dist-route", "--png"):
        assert word in done.text
    for word in ("--sessions", "--dist-trace"):
        assert word not in done.text
