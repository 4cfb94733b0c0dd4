"""docs/reference.md says what the programs say, and its tables are those of the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from ds4py.cli import exits
from ds4py.config import ServerConfig
from ds4py.server.http.app import create_app, queue_of
from tests.unit.server.support import backend, text_stack
from tools import run_make_reference as made
from tools.reference_tables import CODES, ENDPOINTS, EXITS, STATUSES, VARIABLES

ROOT = Path(__file__).parents[3]


def source() -> str:
    """All code that may answer HTTP."""
    files = [path for part in ("server", "text") for path in (ROOT / "ds4py" / part).rglob("*.py")]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def test_the_file_is_what_the_programs_say() -> None:
    found = made.FILE.read_text(encoding="utf-8")
    assert found == made.reference(), "docs/reference.md is out of date: run tools/make_reference"


def test_every_installed_program_is_in_it() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(made.PROGRAMS) == set(scripts)


def test_the_terminal_has_no_influence(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = made.reference()
    monkeypatch.setenv("COLUMNS", "24")
    assert made.reference() == wide


def test_every_flag_is_listed_once_in_its_program() -> None:
    text = made.reference()
    for name, command in made.PROGRAMS.items():
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        for param in command.params:
            flags = ", ".join(param.opts)
            listed = re.findall(rf"^- `{re.escape(flags)}[ `]", section, re.MULTILINE)
            assert len(listed) == (0 if getattr(param, "hidden", True) else 1), (name, flags)


def test_a_variable_that_is_not_described_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = {name: row for name, row in VARIABLES.items() if name != "DS4_LOCK_FILE"}
    monkeypatch.setattr(made, "VARIABLES", fewer)
    with pytest.raises(ValueError, match="DS4_LOCK_FILE"):
        made.reference()


def test_every_exit_status_is_described() -> None:
    known = {value for name, value in vars(exits).items() if name.isupper() and type(value) is int}
    assert set(EXITS) == known


def test_the_paths_are_those_of_the_server() -> None:
    app = create_app(backend(), text_stack(), ServerConfig())
    queue_of(app).close(0)
    served = set()
    for route in app.routes:
        path = re.sub(r"\{(\w+):path\}", r"{\1}", route.path)
        path = re.sub("^/console/.*", "/console/...", path)
        served |= {(method, path) for method in route.methods if method != "HEAD"}
    told = {
        (method, path)
        for method, paths, _ in ENDPOINTS
        for path in paths.replace("`", "").split(", ")
    }
    assert told == served


def test_the_codes_and_statuses_are_those_of_the_server() -> None:
    code = source()
    assert {name for name, _, _ in CODES} == set(re.findall(r'\bcode="(\w+)"', code))
    raised = {int(status) for status in re.findall(r"\bstatus(?:_code)?=(\d{3})\b", code)}
    assert raised - {304, 200} <= set(STATUSES)  # 304 is for a browser's cache
    assert {int(status) for _, status, _ in CODES} <= set(STATUSES)
