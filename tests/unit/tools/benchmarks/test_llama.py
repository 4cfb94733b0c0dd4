"""Finding llama.cpp, and its benchmark program; programs that are not there stand in by scripts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ds4py.errors import ClusterError, ConfigError
from tools.benchmarks import llama
from tools.benchmarks.timers import TimedJob


def program(folder: Path, text: str) -> Path:
    """A Python script that can be run by its name."""
    path = folder / "program"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


def test_an_interpreter_is_asked_for_llama_cpp(tmp_path: Path) -> None:
    yes = program(tmp_path, "import sys; assert '--supports-rpc' in sys.argv; print('True')")
    assert llama.find_llama(yes) == llama.Llama(yes, has_rpc=True)
    no = program(tmp_path, "print('some greeting'); print('False')")
    assert llama.find_llama(no) == llama.Llama(no, has_rpc=False)


def test_a_named_interpreter_without_llama_cpp_is_an_error(tmp_path: Path) -> None:
    broken = program(tmp_path, "raise ModuleNotFoundError('no llama_cpp here')")
    with pytest.raises(ConfigError, match=r"--llama-python .*no llama_cpp here"):
        llama.find_llama(broken)
    with pytest.raises(ConfigError, match=r"--llama-python .*cannot be run"):
        llama.find_llama(tmp_path / "nowhere")


def test_the_command_names_the_script_of_the_package() -> None:
    interpreter, script, *arguments = llama.Llama(Path("python"), has_rpc=True).command("--ctx", 5)
    assert interpreter == Path("python")
    assert Path(str(script)).is_file()
    assert arguments == ["--ctx", 5]


BENCH = """
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert options["-t"] == "1" and options["-m"] == "m.gguf"
kind = (options["-p"], options["-n"], options.get("-d"))
rates = {("512", "0", None): 256.0, ("0", "64", "128"): 32.0}
print(json.dumps([{"avg_ts": rates[kind]}]))
"""


def test_llama_bench_is_run_once_for_each_job(tmp_path: Path) -> None:
    subject = llama.llama_bench(program(tmp_path, BENCH), Path("m.gguf"))
    assert subject.run(TimedJob("prefill", 512)) == 2.0
    assert subject.run(TimedJob("decode", 64)) == 2.0


@pytest.mark.parametrize("text", ["print('usage: ...')", "print('[]')", "print('[{}]')"])
def test_other_programs_are_no_llama_bench(tmp_path: Path, text: str) -> None:
    subject = llama.llama_bench(program(tmp_path, text), Path("m.gguf"))
    with pytest.raises(ClusterError, match="unexpected output"):
        subject.run(TimedJob("prefill", 512))
