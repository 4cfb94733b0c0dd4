"""`python -m interop.live`: ds4py alone gives the same answers on every route; rows of ds4 wait.

No ds4 program is here, so the part that would run one is tried with ds4py's own programs under its
name: they take ds4's flags.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest

from ds4py.errors import ConfigError
from interop.live.__main__ import main
from interop.live.cluster import LiveError, Program
from interop.live.commands import COORDINATOR, EXAMPLES, WORKER, check, fill, ours
from interop.live.judge import judge
from interop.live.matrix import CASES, PY, Route, chosen, cuts, routes
from interop.live.trace import Trace

TRACE = Trace("one two three", (3, 7, 13), (2.0, 0.4, 3.0))


def table(out: str) -> dict[str, str]:
    """Results by row."""
    lines = [line.split(maxsplit=5) for line in out.splitlines()]
    return {"-".join(line[:5]): line[5] for line in lines if len(line) > 5 and line[2].isdigit()}


def test_ds4py_alone_says_what_it_should_at_every_width_and_after_a_restart(capsys, tmp_path):
    status = main(["--rows", "py-py-2-*", "c-py-2-16-short", "--logs", str(tmp_path)])
    out = capsys.readouterr().out
    results = table(out)
    assert results.pop("c-py-2-16-short") == "not run: no ds4 binary given"
    assert EXAMPLES[COORDINATOR] in out
    assert EXAMPLES[WORKER] in out
    assert len(results) == 3 * len(CASES)
    for row, result in results.items():
        assert result.startswith("same text, 24 tokens"), f"{row}: {result}"
        assert "failed" not in result, f"{row}: {result}"
    for bits in (32, 16, 8):
        restarted = (tmp_path / f"py-py-2-{bits}" / "worker-2.log").read_text()
        assert restarted.count("ready: worker on") == 2
    assert status == 0


def test_given_commands_run_the_rows_of_ds4(capsys):
    commands = ("--c-coordinator", ours(COORDINATOR), "--c-worker", ours(WORKER))
    assert main(["--rows", "c-c-1-16-short", *commands]) == 0
    out = capsys.readouterr().out
    assert table(out)["c-c-1-16-short"].startswith("same text, 24 tokens")
    assert "not run" not in out


def test_a_program_that_can_not_work_fails_its_rows_at_once(capsys):
    worker = f"{sys.executable} -c 'import sys; sys.exit(\"no GPU\")'"
    assert main(["--rows", "py-c-1-32-*", "--c-worker", worker]) == 1
    results = table(capsys.readouterr().out)
    assert len(results) == len(CASES)
    for result in results.values():
        assert result.startswith("FAILED: worker-1 ended with status 1: no GPU")


def test_a_command_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(LiveError, match="/no/such/ds4: No such file"):
        Program(["/no/such/ds4"], tmp_path / "worker-1.log")


def test_the_table_has_every_mixture_once():
    names = [route.row(case) for route, cases in chosen(["*"]) for case in cases]
    assert len(names) == len(set(names)) == 2 * 2 * 3 * 3 * 3
    assert [route.name for route in routes() if route.is_ours and route.is_exact] == [
        "py-py-1-32", "py-py-2-32", "py-py-3-32"
    ]  # fmt: skip


def test_patterns_choose_rows():
    picked = list(chosen(["py-py-2-8-*", "c-py-1-*-restart"]))
    assert picked == [
        *((Route("c", PY, 1, bits), ["restart"]) for bits in (32, 16, 8)),
        (Route(PY, PY, 2, 8), list(CASES)),
    ]


@pytest.mark.parametrize("n_hops", [0, 1, 2, 3])
def test_cuts_join_from_the_first_layer_to_the_head(n_hops):
    spans = [part.split(":") for part in cuts(6, n_hops)]
    assert len(spans) == n_hops + 1
    assert (spans[0][0], spans[-1][1]) == ("0", "output")
    assert all(int(before[1]) + 1 == int(after[0]) for before, after in pairwise(spans))


def test_more_machines_than_layers_are_refused():
    with pytest.raises(ConfigError):
        cuts(3, 3)


def test_commands_are_filled_in_part_by_part():
    args = fill("ds4 -m {model} --listen {host} {port} 'a b'", {
        "model": "/models/with space.gguf", "host": "127.0.0.1", "port": 1,
    })  # fmt: skip
    assert args == ["ds4", "-m", "/models/with space.gguf", "--listen", "127.0.0.1", "1", "a b"]


@pytest.mark.parametrize("role", [COORDINATOR, WORKER])
def test_the_examples_are_commands(role):
    assert check(EXAMPLES[role], role) == EXAMPLES[role]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("ds4 {modle}", r"got \{modle\}, expected a command with some of \{model\}"),
        ("ds4 {http_port}", r"got \{http_port\}"),
        ("", "got no command"),
        ("ds4 'open", "No closing quotation"),
        ("ds4 {model", "expected '}'"),
    ],
)
def test_a_template_that_can_not_be_filled_in_is_refused(template, message):
    with pytest.raises(ConfigError, match=message):
        check(template, WORKER)


@pytest.mark.parametrize(
    ("answer", "margin", "fine", "words"),
    [
        ("one two three", None, True, "same text, 3 tokens"),
        ("one two four", None, False, "DIFFERS: same for 2 of 3 tokens"),
        ("one two", None, False, "DIFFERS: same for 2 of 3 tokens"),
        ("one six", 0.5, True, "same for 1 of 3 tokens, near tie (below 0.5) after 1"),
        ("on", 0.5, False, "DIFFERS: same for 0 of 3 tokens, near tie (below 0.5) after 1"),
        ("one", 0.3, False, "DIFFERS: same for 1 of 3 tokens, near tie (below 0.3) after 3"),
        ("", 2.5, True, "same for 0 of 3 tokens, near tie (below 2.5) after 0"),
    ],
)
def test_an_answer_must_be_the_expected_one_up_to_the_first_near_tie(answer, margin, fine, words):
    verdict = judge(answer, TRACE.text, TRACE, margin)
    assert (verdict.fine, verdict.words) == (fine, words)
