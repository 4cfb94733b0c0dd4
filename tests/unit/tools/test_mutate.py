"""The faults that are made on purpose: found where they are, judged by tests that really run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutations import MUTATIONS, Mutation
from tools.run_mutate import StaleError, chosen, judge, main, mutated

ROOT = Path(__file__).parents[3]
CODE = """\
class Queue:
    def room(self, n):
        if n < 3:  # the limit
            return True
        return False


def room(n):
    if n < 3:
        return True
    return n < 3
"""
TESTS = "from ds4py.queue import Queue\n\n\ndef test_it():\n    assert not Queue().room(3)\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "ds4py").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "ds4py" / "queue.py").write_text(CODE)
    (tmp_path / "tests" / "test_queue.py").write_text(TESTS)
    return tmp_path


def fault(new: str, *, scope: str = "Queue.room", file: str = "queue.py") -> Mutation:
    return Mutation("toy-limit", file, scope, "if n < 3:", new, ("test_queue.py",))


def test_a_fault_is_made_in_its_scope_only(tree: Path) -> None:
    path, text = mutated(tree, fault("if n <= 3:"))
    assert path == tree / "ds4py" / "queue.py"
    assert text == CODE.replace("if n < 3:  # the limit", "if n <= 3:  # the limit")


def test_a_fault_is_found_where_its_scope_has_moved_and_its_lines_were_broken(tree: Path) -> None:
    moved = tree / "ds4py" / "deep" / "line.py"
    moved.parent.mkdir()
    moved.write_text(CODE.replace("if n < 3:  #", "if n <\\\n            3:  #"))
    (tree / "ds4py" / "queue.py").unlink()
    mutation = Mutation("toy-limit", "queue.py", "Queue.room", "if n <\\ 3:", "if 1:", ())
    path, text = mutated(tree, mutation)
    assert path == moved
    assert "if 1:  # the limit" in text


@pytest.mark.parametrize("scope", ["Queue.gone", "Queue", "room"])
def test_a_text_that_is_not_there_once_is_stale(tree: Path, scope: str) -> None:
    """A class has its methods' texts, and `room` outside of it two of the other kind."""
    mutation = Mutation("toy-limit", "queue.py", scope, "n < 3", "n < 4", ())
    if scope == "Queue":
        assert mutated(tree, mutation)
        return
    with pytest.raises(StaleError, match=f"toy-limit: {scope} does not hold its text once"):
        mutated(tree, mutation)


@pytest.mark.parametrize(
    ("new", "outcome", "who"),
    [
        ("if n <= 3:", "killed", "tests/test_queue.py::test_it"),
        ("if n < 3 and True:", "survived", "test_queue.py"),
        (
            "while n == 3:\n            pass\n        if n < 3:",
            "killed",
            "nothing ended within 5 s",
        ),
    ],
)
def test_tests_judge_a_fault_and_the_file_is_as_before(
    tree: Path, new: str, outcome: str, who: str
) -> None:
    assert judge(tree, fault(new), {("test_queue.py",)}, 5.0) == (outcome, who)
    assert (tree / "ds4py" / "queue.py").read_text() == CODE


def test_tests_that_fail_anyway_judge_nothing(tree: Path) -> None:
    (tree / "tests" / "test_queue.py").write_text("def test_it():\n    assert 0\n")
    outcome, why = judge(tree, fault("if n <= 3:"), set(), 60.0)
    assert (outcome, why) == ("stale", "fails without the fault: tests/test_queue.py::test_it")


def test_faults_are_chosen_by_room_and_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen([]) == list(MUTATIONS)
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS) > 60
    assert {m.room for m in MUTATIONS} == {"wire", "stage", "relay", "scheduler", "kernels"}
    assert {m.room for m in chosen(["wire"])} == {"wire"}
    assert [m.name for m in chosen(["wire-mag*"])] == ["wire-magic-not-looked-at"]
    assert main(["--list", "--only", "scheduler"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(chosen(["scheduler"]))
    with pytest.raises(SystemExit):
        main(["--only", "nonsense"])


def test_every_fault_is_still_where_it_was_seen() -> None:
    """Moved code keeps its faults; changed code wants others."""
    for mutation in MUTATIONS:
        mutated(ROOT, mutation)
