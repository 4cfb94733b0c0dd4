"""Log lines and progress bars on stderr."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest

from ds4py.cli.terminal import progress_bar, start_logging


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


def test_log_lines_carry_stamp_and_program(monkeypatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    start_logging("ds4py-server", level=logging.INFO)
    logging.getLogger("ds4py.test").info("ready: %s", 1)
    logging.getLogger("ds4py.test").debug("not this")
    logging.getLogger("httpx").info("nor this")
    assert re.fullmatch(r"\d{4} \d\d:\d\d:\d\d ds4py-server: ready: 1\n", stream.getvalue())
