"""interop/CONFORMANCE.md names exactly the numbered tests that exist, and hides no bad news."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from interop.conformance import ROOT, TABLE, Proof, describe, render, statements

MARKS = {1: "C", 2: "R", 3: "C, R"}


def python(*arguments: str) -> str:
    """Run another interpreter, since a test run cannot collect tests of its own."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


EXPECTED = """
import sys
from pathlib import Path
from interop.conformance import ROOT, render, statements, survey
text = render(survey(ROOT / "tests", run=False), statements())
Path(sys.argv[1]).write_text(text, encoding="utf-8")
"""


def test_the_committed_table_names_exactly_the_tests_that_exist(tmp_path: Path) -> None:
    """It is what a run without surprises writes, so nothing is run here."""
    python("-c", EXPECTED, str(tmp_path / "table.md"))
    expected = (tmp_path / "table.md").read_text(encoding="utf-8")
    committed = TABLE.read_text(encoding="utf-8")
    assert committed == expected, "run python -m interop.conformance"


def test_every_statement_has_a_test() -> None:
    rows = re.findall(r"^\| (\d+) \|", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(number) for number in rows] == list(statements())


def test_the_checklist_is_read_whole() -> None:
    marks = statements()
    assert list(marks) == list(range(1, 101))
    assert {number for number, mark in marks.items() if mark != "C"} == {8, 42, 61, 71, 99, 100}
    assert (marks[8], marks[42]) == ("R", "C, R")


def proof(number: int, name: str = "it", **fields: object) -> Proof:
    test = f"tests/conformance/statements/test_a.py::test_statement_{number:03}_{name}"
    return Proof(number, test, "So it is.", "", 1, **fields)  # type: ignore[arg-type]


def test_a_whole_table() -> None:
    text = render([proof(1), proof(2), proof(2, "too"), proof(3)], MARKS)
    assert "**3 of 3 statements are covered, all of them passed.**" in text
    assert "Statements without a test: none." in text
    both = "`test_a.py::test_statement_002_it`<br>`test_a.py::test_statement_002_too`"
    assert f"| 2 | R | So it is. | {both} | passed |\n" in text


@pytest.mark.parametrize("outcome", ["failed", "skipped", "known to fail"])
def test_bad_news_stand_in_the_table(outcome: str) -> None:
    text = render([proof(1), proof(2), proof(2, "too", outcome=outcome)], MARKS)
    assert "**2 of 3 statements are covered, not passed: 2.**" in text
    assert "Statements without a test: 3." in text
    assert f"too` | {outcome} |\n" in text


def test_a_number_that_the_checklist_does_not_have_is_an_error() -> None:
    with pytest.raises(SystemExit, match=r"\[4\]"):
        render([proof(4)], MARKS)


def test_a_docstring_gives_the_statement_and_the_difference() -> None:
    docstring = "It is so.\n\n    Why it is.\n\n    Differs from C: there it\n    is not.\n    "
    got = describe("a.py::test_statement_007_x", docstring)
    assert (got.number, got.words, got.difference) == (7, "It is so.", "There it is not.")
    assert describe("a.py::test_statement_007_x", "It is so.").difference == ""


@pytest.mark.parametrize(
    ("name", "docstring"),
    [
        ("test_statement_7_x", "It is so."),
        ("test_statement_007", "It is so."),
        ("test_statement_007_x", None),
        ("test_statement_007_x", "\n\n    It is so."),
    ],
)
def test_a_test_that_says_no_statement_is_an_error(name: str, docstring: str | None) -> None:
    with pytest.raises(pytest.UsageError, match="NNN"):
        describe(f"a.py::{name}", docstring)


SUITE = '''
import pytest


def test_statement_003_bad():
    """Bad."""
    pytest.fail("no")


@pytest.mark.parametrize("n", [1, 2, 3])
def test_statement_002_mixed(n):
    """Mixed."""
    if n == 2:
        pytest.skip("not today")


@pytest.mark.xfail(reason="a bug")
def test_statement_001_known():
    """Known."""
    assert False


def test_statement_001_good():
    """Good."""


def test_without_a_number():
    assert False
'''
SURVEY = """
import sys
from pathlib import Path
from interop.conformance import survey
found = survey(Path(sys.argv[1]), run=sys.argv[2] == "run")
print([(p.number, p.words, p.cases, p.outcome) for p in found])
"""


@pytest.mark.parametrize(
    ("mode", "outcomes"),
    [
        ("run", ["known to fail", "passed", "skipped", "failed"]),
        ("collect", ["known to fail", "passed", "passed", "passed"]),
    ],
)
def test_the_survey_counts_cases_and_tells_outcomes(
    mode: str, outcomes: list[str], tmp_path: Path
) -> None:
    (tmp_path / "test_numbered.py").write_text(SUITE)
    (tmp_path / "test_others.py").write_text("import nonsense\n")
    said = python("-c", SURVEY, str(tmp_path), mode).splitlines()[-1]
    expected = [(1, "Known.", 1), (1, "Good.", 1), (2, "Mixed.", 3), (3, "Bad.", 1)]
    assert said == str([(*row, outcome) for row, outcome in zip(expected, outcomes, strict=True)])
