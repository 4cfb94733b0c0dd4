"""docs/server-checklist.md tells of exactly the tests that exist; no statement lacks one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.server import table
from tests.conformance.server.table import Proof, proofs, render, statements

WANTED = {1: ("It listens.", "S"), 2: ("It answers.", "M")}


def test_the_committed_table_is_that_of_the_tests_that_exist() -> None:
    committed = table.TABLE.read_text(encoding="utf-8")
    assert committed == render(proofs(), statements()), (
        "run python -m tests.conformance.server.table"
    )


def test_the_checklist_is_read_whole() -> None:
    found = statements()
    assert list(found) == list(range(1, 74))
    assert {number for number, (_, engine) in found.items() if engine == "M"} == {31, 32, 43, 49}


def test_a_whole_table() -> None:
    found = [
        Proof(1, "tests/a.py::test_c01_x", ("Differs from ds4: it does.",)),
        Proof(1, "tests/a.py::test_c01_y", ("Differs from ds4: it does.",)),
        Proof(2, "tests/b.py::test_c02_z"),
    ]
    text = render(found, WANTED)
    assert "**2 statements, 3 test functions; all of them passed.**" in text
    assert "| C01 | It listens. | S | `tests/a.py` 2 | Differs from ds4: it does. |\n" in text
    assert "| C02 | It answers. | M | `tests/b.py` 1 |  |\n" in text


def test_bad_news_stand_in_the_table() -> None:
    found = [Proof(1, "a.py::test_c01_x"), Proof(2, "a.py::test_c02_z")]
    assert "functions; not passed: C02.**" in render(found, WANTED, {"a.py::test_c02_z"})


@pytest.mark.parametrize("numbers", [[1], [1, 2, 3], []])
def test_every_statement_needs_a_test_and_every_test_a_statement(numbers: list[int]) -> None:
    found = [Proof(number, f"a.py::test_c0{number}_x") for number in numbers]
    with pytest.raises(ValueError, match=r"for C0\d"):
        render(found, WANTED)


def test_a_test_elsewhere_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        table, "ELSEWHERE", {1: ("tests/unit/cli/chat/test_line_history.py::test_gone",)}
    )
    with pytest.raises(ValueError, match="test_gone"):
        proofs()


SUITE = '''
def test_c07_c09_both():
    """So it is.

    Why it is.

    Differs from ds4: there it
    is | not.

    Weaker than asked: a little.
    """


def helper():
    pass
'''


def test_names_give_numbers_and_docstrings_remarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_a.py").write_text(SUITE, encoding="utf-8")
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(table, "HOLDERS", (".",))
    monkeypatch.setattr(table, "ELSEWHERE", {})
    remarks = (
        "So it is. Differs from ds4: there it is \\| not.",
        "So it is. Weaker than asked: a little.",
    )
    test = "test_a.py::test_c07_c09_both"
    assert proofs() == [Proof(7, test, remarks), Proof(9, test, remarks)]


def test_a_test_without_a_number_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_a.py").write_text("def test_anything():\n    pass\n", encoding="utf-8")
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(table, "HOLDERS", (".",))
    with pytest.raises(ValueError, match="test_anything"):
        proofs()
