"""Entries: one line, several, and what a pipe can hold."""

from __future__ import annotations

import io

import pytest

from ds4py.cli.chat import line_input
from ds4py.cli.chat.line_input import PipedLines, read_entry
from ds4py.errors import ConfigError


def entries(raw: bytes) -> list[str]:
    """All entries of a pipe."""
    piped, found = PipedLines(io.BytesIO(raw)), []
    while True:
        try:
            found.append(read_entry(piped))
        except EOFError:
            return found


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("", []),
        ("a\nb", ["a", "b"]),
        ("a\r\n\nb\n", ["a", "", "b"]),
        ("a\\\nb\\\nc\nd\n", ["a\nb\nc", "d"]),
        ("a\\", ["a"]),
        ('"""\na\n\n  b\n"""\nc', ["a\n\n  b", "c"]),
        ('"""a\nb"""  \nc', ["a\nb", "c"]),
        ('"""a\\\nb"""', ["a\\\nb"]),
        ('"""one line"""\n', ["one line"]),
        ('""""""\nx', ["", "x"]),
        ('"""a\nb', ["a\nb"]),
        ('say """this"""\n', ['say """this"""']),
    ],
)
def test_what_an_entry_is(raw: str, expected: list[str]) -> None:
    assert entries(raw.encode()) == expected


def test_a_line_that_is_no_text_is_refused_and_the_next_one_is_read() -> None:
    piped = PipedLines(io.BytesIO(b"ab\xff\nok\n"))
    with pytest.raises(ConfigError, match=r"stdin: a line that is not UTF-8 text \(byte 2\)"):
        read_entry(piped)
    assert read_entry(piped) == "ok"


def test_what_does_not_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_input, "MAX_ENTRY", 1 << 20)
    piped = PipedLines(io.BytesIO(b"x" * ((1 << 20) + 1) + b"y\n"))
    with pytest.raises(ConfigError, match="more than 1 MiB"):
        read_entry(piped)
    with pytest.raises(EOFError):  # "y" is the rest of a line, no question
        read_entry(piped)
    piped = PipedLines(io.BytesIO(b"xxxxxxxx\\\n" * (1 << 17)))
    with pytest.raises(ConfigError, match="an entry of more than 1 MiB"):
        read_entry(piped)
