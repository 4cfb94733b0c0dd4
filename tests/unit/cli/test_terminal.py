"""Log lines and progress bars on stderr."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest

from ds4py.cli.terminal import progress_bar, prompt_progress, start_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("unit", ["bytes", "tokens"])
def test_a_terminal_sees_a_bar(monkeypatch, unit) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar("loading", unit=unit) as progress:
        progress(1, 2)
        progress(2, 2)
    assert "loading" in terminal.getvalue()


def test_a_pipe_sees_nothing(monkeypatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    with progress_bar("loading", unit="bytes") as progress:
        progress(1, 2)
    assert pipe.getvalue() == ""


def test_a_prompt_is_told_in_ds4s_lines_each_once(monkeypatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    with prompt_progress() as progress:
        for done in (1, 2, 2, 3):
            progress(done, 3)
        progress(0, 0)
    assert pipe.getvalue() == (
        "processing 3 input tokens: 1/3 (33%)\n"
        "processing 3 input tokens: 2/3 (66%)\n"
        "processing 3 input tokens: 3/3 (100%)\n"
    )


def test_a_terminal_sees_how_fast_a_prompt_is_read(monkeypatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with prompt_progress() as progress:
        for done in range(10, 50, 10):
            progress(done, 100)
        progress(100, 100)
    assert "prompt" in terminal.getvalue()
    assert re.search(r"tokens \(\d+ t/s\)", terminal.getvalue())


def test_log_lines_carry_stamp_and_program(monkeypatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    start_logging("ds4py-server", level=logging.INFO)
    logging.getLogger("ds4py.test").info("ready: %s", 1)
    logging.getLogger("ds4py.test").debug("not this")
    logging.getLogger("httpx").info("nor this")
    assert re.fullmatch(r"\d{4} \d\d:\d\d:\d\d ds4py-server: ready: 1\n", stream.getvalue())


def test_a_line_of_the_log_stays_one_line(capsys):
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        start_logging("ds4py-server", level=logging.INFO)
        logging.getLogger("x").info("refused: %s", "a\nb\x1b[31m")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(r"ds4py-server: refused: a\nb\x1b[31m")
