"""`python -m tests.conformance.server.table`: run the checklist's tests, write their table.

Owns: which test proves which statement of docs/spec/server-and-cli.md#checklist. Refuses to know:
how. Invariant: the same tests with the same results give the same bytes, and a statement counts as
passed only if all of its tests did.

A test proves a statement by its name, `test_c07_...`, or several, `test_c13_c14_...`. A paragraph
of its docstring that starts with "Differs from ds4" or "Weaker than asked" is a remark on what its
first paragraph says.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[3]
SPEC: Final = ROOT / "docs" / "spec" / "server-and-cli.md"
TABLE: Final = ROOT / "docs" / "server-checklist.md"

HOLDERS: Final = ("tests/conformance/server", "tests/e2e/test_sdks.py")
ELSEWHERE: Final[dict[int, tuple[str, ...]]] = {
    61: (
        "tests/unit/snapshot/test_disk_cache.py"
        "::test_the_folder_is_never_larger_than_the_budget_after_a_save",
        "tests/unit/snapshot/test_disk_cache.py::test_the_lowest_score_goes_first",
        "tests/unit/snapshot/test_kvc_policy.py::test_the_score_of_a_file",
    ),
    62: (
        "tests/unit/snapshot/test_disk_cache.py"
        "::test_whatever_happens_to_a_file_its_content_is_right_or_not_loaded",
    ),
    67: (
        "tests/e2e/test_commands.py::test_bad_usage_of_the_client_is_status_2_and_one_sentence",
        "tests/e2e/test_commands.py::test_bad_usage_of_the_server_is_status_2_and_one_sentence",
    ),
    69: (
        "tests/e2e/test_chat.py::test_ctrl_c_stops_an_answer_and_the_next_turn_remembers_it",
        "tests/unit/cli/chat/test_local.py::test_ctrl_c_keeps_what_was_said_with_its_end_mark",
    ),
    70: (
        "tests/e2e/test_chat.py::test_lines_are_remembered_from_chat_to_chat",
        "tests/unit/cli/chat/test_line_history.py::test_the_513th_line_drops_the_first",
    ),
    71: (
        "tests/unit/cli/diagnostics/test_dumps.py"
        "::test_logprobs_are_those_of_the_greedy_answer_over_the_whole_vocabulary",
        "tests/unit/cli/diagnostics/test_dumps.py::test_the_bytes_of_every_token_are_told",
    ),
}
"""Tests of other suites, which have no numbers in their names."""

_STATEMENT: Final = re.compile(r"^\| C(\d\d) \| (.+) \| ([SM]) \|$", re.MULTILINE)
_NAME: Final = re.compile(r"test_((?:c\d\d_)+)\w+")
_REMARKS: Final = ("Differs from ds4: ", "Weaker than asked: ")
_INTRODUCTION: Final = """\
# The checklist of the server, the command line and the bench

Written by `python -m tests.conformance.server.table`; do not edit. It runs every test that carries
the number of a statement of [the specification](spec/server-and-cli.md#checklist).
`pytest -k c07` runs those of one statement.

"S" marks statements that are proven with a scripted model behind a real server, "M" those that
need a real one. Numbers behind files count test functions. Remarks say where ds4py follows the
specification's [own table](spec/server-and-cli.md#divergences) instead of ds4, or where a proof
is weaker than the statement asks.
"""


@dataclass(frozen=True, slots=True)
class Proof:
    """One test function.

    Args:
        number: Of the statement.
        test: Node id.
        remarks: What its docstring says about differences.
    """

    number: int
    test: str
    remarks: tuple[str, ...] = ()


def statements() -> dict[int, tuple[str, str]]:
    """Return number -> text and engine of every statement of the checklist."""
    section = SPEC.read_text(encoding="utf-8").partition("\n# 8.")[2].partition("\n# 9.")[0]
    return {int(number): (text, engine) for number, text, engine in _STATEMENT.findall(section)}


def proofs() -> list[Proof]:
    """Return all proofs in the order of their numbers.

    Raises:
        ValueError: A test that is named here does not exist, or has no number where it must.
    """
    found = [proof for holder in HOLDERS for file in _files(holder) for proof in _in_file(file)]
    for number, tests in ELSEWHERE.items():
        for test in tests:
            file, _, name = test.partition("::")
            if name not in {function.name for function in _functions(ROOT / file)}:
                raise ValueError(f"C{number}: got the test {test}, expected one that exists")
            found.append(Proof(number, test))
    return sorted(found, key=lambda proof: (proof.number, proof.test))


def render(
    found: Sequence[Proof], wanted: dict[int, tuple[str, str]], failed: Collection[str] = ()
) -> str:
    """Return the text of the table.

    Args:
        found: All proofs.
        wanted: All statements.
        failed: Tests that did not pass.

    Raises:
        ValueError: A statement has no test, or a test another number.
    """
    numbers = {proof.number for proof in found}
    if numbers != wanted.keys():
        odd = ", ".join(f"C{number:02}" for number in sorted(numbers ^ wanted.keys()))
        raise ValueError(f"the checklist: got no test or no statement for {odd}, expected both")
    bad = sorted({f"C{proof.number:02}" for proof in found if proof.test in failed})
    verdict = f"not passed: {', '.join(bad)}" if bad else "all of them passed"
    n_tests = len({proof.test for proof in found})
    lines = [
        _INTRODUCTION,
        f"**{len(wanted)} statements, {n_tests} test functions; {verdict}.**\n",
        "| no. | statement | engine | tests | remarks |",
        "|---|---|---|---|---|",
    ]
    for number, (text, engine) in wanted.items():
        own = [proof for proof in found if proof.number == number]
        lines.append(f"| C{number:02} | {text} | {engine} | {_tests(own)} | {_remarks(own)} |")
    return "\n".join([*lines, ""])


def _files(holder: str) -> list[Path]:
    path = ROOT / holder
    return [path] if path.is_file() else sorted(path.glob("test_*.py"))


def _in_file(path: Path) -> Iterator[Proof]:
    for function in _functions(path):
        name = _NAME.fullmatch(function.name)
        if name is None:
            raise ValueError(f"{path.name}: got {function.name}, expected test_cNN_...")
        remarks = tuple(_remarks_in(ast.get_docstring(function) or ""))
        for number in re.findall(r"\d\d", name[1]):
            test = f"{path.relative_to(ROOT).as_posix()}::{function.name}"
            yield Proof(int(number), test, remarks)


def _functions(path: Path) -> list[ast.FunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return [function for function in functions if function.name.startswith("test_")]


def _remarks_in(docstring: str) -> Iterator[str]:
    summary, *others = (" ".join(text.split()) for text in docstring.split("\n\n"))
    for paragraph in others:
        if paragraph.startswith(_REMARKS):
            yield f"{summary} {paragraph}".replace("|", "\\|")


def _tests(own: Sequence[Proof]) -> str:
    files = Counter(proof.test.partition("::")[0] for proof in own)
    return "<br>".join(f"`{file}` {n}" for file, n in files.items())


def _remarks(own: Sequence[Proof]) -> str:
    return "<br>".join(dict.fromkeys(remark for proof in own for remark in proof.remarks))


class _Watch:
    """A pytest plugin that takes note of tests that fail or are skipped."""

    def __init__(self) -> None:
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take note of one phase of one case."""
        if not report.passed:
            self.failed.add(report.nodeid.partition("[")[0])


def main() -> int:
    """Run the tests, write the table, return the exit status."""
    found, watch = proofs(), _Watch()
    tests = dict.fromkeys(proof.test for proof in found)
    status = pytest.main([f"--rootdir={ROOT}", "-q", "-p", "no:cacheprovider", *tests], [watch])
    if status in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
        TABLE.write_text(render(found, statements(), watch.failed), encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
