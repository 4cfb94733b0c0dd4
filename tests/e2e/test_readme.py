"""The commands of README.md, run as printed but for hosts, ports and the path of the model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

from tests.e2e.support import endless_toy
from tests.processes import Launcher, environment, free_port, run

ROOT = Path(__file__).parents[2]


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
