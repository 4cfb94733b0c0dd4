"""`python -m interop.conformance`: run the numbered conformance tests and write CONFORMANCE.md.

Owns: which test proves which statement of docs/spec/wire-protocol.md#checklist, and the table that
says so. Refuses to know: how a test proves it. Invariant: the same tests with the same results give
the same bytes, and a statement counts as covered only if a test of its number was collected.

A test proves a statement by its name, `test_statement_NNN_...`. The first line of its docstring is
the statement; a paragraph that starts with "Differs from C" is a deliberate deviation.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
SPEC: Final = ROOT / "docs" / "spec" / "wire-protocol.md"
TABLE: Final = ROOT / "interop" / "CONFORMANCE.md"

_FOLDER: Final = "tests/conformance/statements/"
_PREFIX: Final = "test_statement_"
_NAME: Final = re.compile(rf"{_PREFIX}(\d{{3}})_\w+")
_DIFFERENCE: Final = re.compile(r"Differs from C\W*(.+)", re.DOTALL)
_STATEMENT: Final = re.compile(r"^(\d+)\. (.+)$", re.MULTILINE)
OUTCOMES: Final = ("failed", "skipped", "known to fail", "passed")
_INTRODUCTION: Final = f"""\
# Conformance with the wire protocol

Written by `python -m interop.conformance`; do not edit. It runs every test that carries the number
of a statement of [the specification](../docs/spec/wire-protocol.md#checklist). The peers in
these tests are made of bytes after the tables of that document and share no code with ds4py. "C"
marks behaviour of the C programs, "R" a recommendation. Tests are functions of files in
`{_FOLDER}`; a number behind one counts its cases.
"""


@dataclass(slots=True)
class Proof:
    """One test function.

    Args:
        number: Of the statement.
        test: Node id without parameters.
        words: The statement, as the test says it.
        difference: How ds4py deviates from the C programs on purpose; may be empty.
        cases: Tests that its parameters make of it.
        outcome: The worst of its cases, one of `OUTCOMES`; expected of them until they run.
    """

    number: int
    test: str
    words: str
    difference: str
    cases: int = 0
    outcome: str = "passed"

    def note(self, outcome: str) -> None:
        """Take note of one case."""
        self.outcome = worst([self.outcome, outcome])


class Survey:
    """A pytest plugin that takes note of numbered tests."""

    def __init__(self) -> None:
        self.proofs: dict[str, Proof] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out tests whose function has no number."""
        items[:] = [
            item
            for item in items
            if isinstance(item, pytest.Function) and item.originalname.startswith(_PREFIX)
        ]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Take note of what was collected."""
        for item in session.items:
            assert isinstance(item, pytest.Function)
            test = _function_of(item.nodeid)
            if test not in self.proofs:
                self.proofs[test] = describe(test, item.function.__doc__)
            self.proofs[test].cases += 1
            if item.get_closest_marker("xfail") is not None:
                self.proofs[test].note("known to fail")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take note of one phase of one case."""
        known = report.skipped and hasattr(report, "wasxfail")
        self.proofs[_function_of(report.nodeid)].note("known to fail" if known else report.outcome)


def _function_of(node_id: str) -> str:
    return node_id.partition("[")[0]


def describe(test: str, docstring: str | None) -> Proof:
    """Read what a test function says about itself.

    Raises:
        pytest.UsageError: Its name holds no number, or its docstring no statement.
    """
    name = _NAME.fullmatch(test.rpartition("::")[2])
    paragraphs = [" ".join(text.split()) for text in (docstring or "").split("\n\n")]
    if name is None or not paragraphs[0]:
        expected = f"a name {_PREFIX}NNN_... and a docstring that begins with the statement"
        raise pytest.UsageError(f"{test}: expected {expected}")
    matches = filter(None, map(_DIFFERENCE.match, paragraphs))
    difference = next((match[1] for match in matches), "")
    return Proof(int(name[1]), test, paragraphs[0], difference[:1].upper() + difference[1:])


def survey(folder: Path, *, run: bool) -> list[Proof]:
    """Collect the numbered tests of a suite in the order of their numbers, and perhaps run them.

    Only files that hold such a test are imported: that is the same, and quicker.

    Raises:
        SystemExit: pytest could not do it.
    """
    holders = [p for p in folder.rglob("test_*.py") if f"def {_PREFIX}" in p.read_text()]
    options = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider"]
    options += [] if run else ["-q", "--collect-only"]
    found = Survey()
    status = pytest.main([f"--rootdir={ROOT}", *options, *map(str, sorted(holders))], [found])
    if status not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
        raise SystemExit(f"the numbered tests cannot be collected: pytest ended with {status!r}")
    return sorted(found.proofs.values(), key=lambda proof: proof.number)


def statements() -> dict[int, str]:
    """Return number -> marks ("C", "R" or "C, R") of every statement of the checklist."""
    section = SPEC.read_text(encoding="utf-8").partition("\n## 14.")[2].partition("\n## 15.")[0]
    return {
        int(number): ", ".join(re.findall(r"\(([CR])\)", text))
        for number, text in _STATEMENT.findall(section)
    }


def render(proofs: Sequence[Proof], marks: dict[int, str]) -> str:
    """Return the text of CONFORMANCE.md."""
    by_number = {n: list(group) for n, group in groupby(proofs, lambda proof: proof.number)}
    unknown = by_number.keys() - marks.keys()
    if unknown:
        raise SystemExit(f"tests of statements that the checklist does not have: {sorted(unknown)}")
    missing = [str(number) for number in marks if number not in by_number]
    wanting = [str(number) for number, group in by_number.items() if _outcome(group) != "passed"]
    verdict = f"not passed: {', '.join(wanting)}" if wanting else "all of them passed"
    return "\n".join(
        [
            _INTRODUCTION,
            f"**{len(by_number)} of {len(marks)} statements are covered, {verdict}.**\n",
            f"Statements without a test: {', '.join(missing) or 'none'}.\n",
            "| no. | C/R | statement, as its tests say it | tests | result |",
            "|---:|---|---|---|---|",
            *(_row(number, marks[number], group) for number, group in by_number.items()),
            "\n## Where ds4py differs from C on purpose\n",
            *(f"- {n}: {text}" for n, text in _differences(proofs)),
            "",
        ]
    )


def worst(outcomes: Iterable[str]) -> str:
    """Return the outcome that weighs most."""
    return min(outcomes, key=OUTCOMES.index)


def _outcome(group: Iterable[Proof]) -> str:
    return worst(proof.outcome for proof in group)


def _row(number: int, marks: str, group: list[Proof]) -> str:
    words = "<br>".join(dict.fromkeys(proof.words for proof in group)).replace("|", "\\|")
    tests = "<br>".join(
        f"`{proof.test.removeprefix(_FOLDER)}`" + (f" {proof.cases}" if proof.cases > 1 else "")
        for proof in group
    )
    return f"| {number} | {marks} | {words} | {tests} | {_outcome(group)} |"


def _differences(proofs: Iterable[Proof]) -> dict[tuple[int, str], None]:
    return dict.fromkeys((p.number, p.difference) for p in proofs if p.difference)


def main() -> int:
    """Run the tests, write the table and return the exit status."""
    proofs = survey(ROOT / "tests", run=True)
    TABLE.write_text(render(proofs, statements()), encoding="utf-8")
    return 0 if _outcome(proofs) in {"known to fail", "passed"} else 1


if __name__ == "__main__":
    sys.exit(main())
