"""The commands of README.md, run as printed except for hosts, ports and the path of the model.

And of all texts for users: flags exist, quoted messages are the code's own.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.e2e.support import endless_toy
from tests.processes import Launcher, environment, free_port, run
from tools.run_make_reference import PROGRAMS

ROOT = Path(__file__).parents[2]
TEXTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("docs/*/*.md")),
]
FOR_USERS = [path for path in TEXTS if path.parent.name not in {"spec", "design"}]


def commands() -> list[list[str]]:
    """Every command line of the README's sh blocks, without comments."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def test_the_scripts_that_the_readme_names_can_be_run() -> None:
    scripts = [line[0] for line in commands() if line[0].startswith("./")]
    assert {"./tools/demo", "./tools/test"} <= set(scripts)
    for script in scripts:
        assert os.access(ROOT / script, os.X_OK), script


def test_the_three_machines_of_the_readme_answer(tmp_path: Path) -> None:
    """The example has 25 layers, so this toy has."""
    model = endless_toy(tmp_path / "toy.gguf", n_layers=25)
    ports = {port: free_port() for port in (8000, 8001, 8002)}

    def here(word: str) -> str:
        for port, other in ports.items():
            word = re.sub(rf"[\w.-]+:{port}", f"127.0.0.1:{other}", word)
        return str(model) if word == "M.gguf" else word

    lines = [[here(word) for word in line] for line in commands()]
    servers = [line for line in lines if line[0] == "ds4py-server"]
    (ask,) = [line for line in lines if line[0] == "ds4py-cli"]
    assert len(servers) == 3
    with Launcher(tmp_path / "run") as launch:
        programs = [launch.start(*line, "-t", 1) for line in servers]
        programs[-1].wait_log("ready: the whole model is reachable")
        answer = run(*ask, "--temp", 0)
        assert answer.status == 0, answer.err
        assert "answer: " in answer.err
        assert len(answer.text) > 20


def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    """As printed, except for the path of the model."""
    model = endless_toy(tmp_path / "toy.gguf", n_layers=2)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code.replace("M.gguf", str(model))],
        capture_output=True,
        text=True,
        env=environment({"OMP_NUM_THREADS": "1"}),
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "n_generated=40" in done.stdout
    assert len(done.stdout) > 100


def test_the_demo_streams_an_answer_and_shows_every_stage() -> None:
    done = subprocess.run(
        [str(ROOT / "tools" / "demo"), "What is two plus two?"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment({"COLUMNS": "120"}),
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prefill: " in done.stderr
    for row in (r"coordinator\s+│ none", r"│ 0-14\s+│", r"│ 15-29 \+ head │"):
        assert re.search(row, done.stdout), done.stdout


@pytest.mark.parametrize("path", FOR_USERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_flags_exist(path: Path) -> None:
    """In code spans, and in command lines of ours; other programs' flags stand in their blocks."""
    known = {
        flag for command in PROGRAMS.values() for param in command.params for flag in param.opts
    }
    text = path.read_text(encoding="utf-8")
    ours: list[str] = re.findall(r"^(?:\$ )?(ds4py.*)$", text, re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    spans = [span for span in spans if not span.startswith(("./tools/", "docker ", "pip "))]
    named = {
        flag for piece in ours + spans for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", piece)
    }
    assert (
        named - known - {"--help", "--version", "--llama-python", "--cuts", "--no-binary"} == set()
    )


@functools.cache
def code_texts() -> str:
    """Every text of the package's code; what differs at run time is `…`."""
    texts = []
    for path in (ROOT / "ds4py").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%[-\d.]*[sdrfx]", "…", node.value))
    return "\n".join(texts)


def quotations() -> list[str]:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^> `(.*)`$", text, re.MULTILINE) + re.findall(
        r"^\| `([^`]* [^`]*)` \|", text.partition("### A worker dials")[0], re.MULTILINE
    )


def test_quoted_messages_are_those_of_the_code() -> None:
    quoted = quotations()
    assert len(quoted) > 30
    for message in quoted:
        for piece in re.split("…|: got |, expected |: needed |, available ", message):
            assert piece.strip(" :;") in code_texts(), (piece, message)


def test_the_defaults_of_the_disk_cache_are_those_of_the_flags() -> None:
    text = (ROOT / "docs" / "sessions-and-cache.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(--kv-[\w-]+)` \| (\w+) \|", text, re.MULTILINE))
    params = {param.opts[0]: param for param in PROGRAMS["ds4py-server"].params}
    assert rows.keys() == {name for name in params if re.match("--kv-(disk|cache)-", name)}
    for name, default in rows.items():
        expected = params[name].default if isinstance(params[name].type, click.IntRange) else "off"
        assert default == str(expected), name
