"""`./tools/bench` as developers run it, without the models that its wrapper makes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import DEADLINE, environment
from tests.toys import toy_llama

ROOT = Path(__file__).parents[4]


def run_bench(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "run_bench.py", *map(str, args)],
        capture_output=True,
        text=True,
        env=environment({"PYTHONPATH": str(ROOT)}),
        timeout=DEADLINE,
        check=False,
    )


def test_the_targets_of_starting_are_judged(tmp_path: Path) -> None:
    """With a toy under the name of the big file; what it measures means nothing."""
    toy_llama(tmp_path / "toy-llama-1b-q4_k.gguf", n_layers=4, n_ctx=1024)
    done = run_bench("start", "--rounds", 1, "--models", tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    verdicts = {finding["bar"]: finding["verdict"] for finding in told["findings"]}
    assert len(verdicts) == 4
    assert verdicts.pop("opening a file of 262k tokens") == "not run"
    assert set(verdicts.values()) <= {"pass", "falls short"}
    assert "gemma-3-270m-q4_k_m.gguf is missing" in done.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--rounds", 0), "--rounds"),
        (("speed",), "section 'speed'"),
        (("cpu", "--llama-python", "/nowhere/python"), "--llama-python"),
    ],
)
def test_what_cannot_be_measured_ends_with_2(args: tuple[object, ...], said: str) -> None:
    done = run_bench(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
