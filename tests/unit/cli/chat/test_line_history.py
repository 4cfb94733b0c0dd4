"""The file of typed lines: its form, its limit, and what can be wrong with it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from ds4py.cli.chat import line_history
from ds4py.cli.chat.line_history import LIMIT, LineHistory, default_path


def test_lines_are_kept_in_ds4s_form_for_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / ".ds4_history"
    typed = LineHistory(path)
    assert typed.read() == []
    for line in ("hello", "/think", "/think", "", "größe"):
        typed.add(line)
    assert path.read_bytes() == "hello\n/think\ngröße\n".encode()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    assert LineHistory(path).read() == ["hello", "/think", "größe"]


def test_the_513th_line_drops_the_first(tmp_path: Path) -> None:
    typed = LineHistory(tmp_path / "h")
    for number in range(LIMIT):
        typed.add(f"line {number}")
    assert typed.read()[0] == "line 0"
    typed.add("one more")
    assert len((tmp_path / "h").read_text().splitlines()) == 512
    assert (len(typed.read()), typed.read()[0], typed.read()[-1]) == (512, "line 1", "one more")


def test_another_chats_lines_are_kept(tmp_path: Path) -> None:
    one, other = LineHistory(tmp_path / "h"), LineHistory(tmp_path / "h")
    one.add("a")
    other.add("b")
    one.add("c")
    assert other.read() == ["a", "b", "c"]


def test_a_link_to_the_file_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("a\n")
    link = tmp_path / "h"
    link.symlink_to(tmp_path / "real")
    LineHistory(link).add("b")
    assert link.is_symlink()
    assert (tmp_path / "real").read_text() == "a\nb\n"


def test_of_a_huge_or_broken_file_the_end_is_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(line_history, "_MAX_BYTES", 8)
    path = tmp_path / "h"
    path.write_bytes(b"x" * 100 + b"\na\xff\nb\n")
    assert LineHistory(path).read()[-2:] == ["a\N{REPLACEMENT CHARACTER}", "b"]
    assert sum(map(len, LineHistory(path).read())) < 8


@pytest.mark.parametrize("where", ["folder", "folder/no/such/h"])
def test_a_file_that_can_not_be_used_costs_the_history_only(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").mkdir()
    typed = LineHistory(tmp_path / where)
    typed.add("a")
    typed.add("b")
    assert typed.read() == []
    assert caplog.text.count("lines are not remembered") == 1


def test_a_user_without_a_home_has_no_history(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".ds4_history"

    def nowhere() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", nowhere)
    assert default_path() is None
    LineHistory(None).add("a")
    assert LineHistory(None).read() == []
