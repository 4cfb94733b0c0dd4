"""`ds4py inspect`: tables, JSON, errors, and what it never imports."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds4py import __version__
from ds4py.cli import exits
from ds4py.cli.main import ds4py
from ds4py.layer_range import LayerSpec
from tests.support.toys import build_gguf, tensor, toy_llama


@pytest.fixture
def inspect(capsys):
    """Run `ds4py inspect` with arguments; return status, stdout, stderr."""

    def run(*args: object) -> tuple[int, str, str]:
        status = exits.exit_status(ds4py, "ds4py", ["inspect", *map(str, args)])
        return status, *capsys.readouterr()

    return run


def test_the_tables_show_the_model_and_its_bytes(inspect, tmp_path: Path):
    path = toy_llama(tmp_path / "m.gguf", quant="Q8_0", n_layers=6)
    status, out, err = inspect(path)
    assert (status, err) == (0, "")
    lines = [re.sub(r"\s+", " ", line).strip() for line in out.splitlines()]
    for expected in (
        "model toy llama",
        "architecture llama",
        "layers 6",
        "context 256 tokens",
        "vocabulary 279 tokens",
        "embedding 19.0 kB",
        "output head (the embedding again) 19.2 kB",
        "layers 0-5 39.7 kB 238.1 kB",
    ):
        assert expected in lines, expected
    assert any(line.startswith("Q8_0 43 ") for line in lines)


def test_suggested_cuts_are_flags_that_can_be_copied(inspect, tmp_path: Path):
    _, out, _ = inspect(toy_llama(tmp_path / "m.gguf", n_layers=3))
    flags = re.findall(r"^ +--dist-layers (\S+) +\S+ \S*B$", out, re.MULTILINE)
    assert flags == ["0-1", "2-2", "0-0", "1-1", "2-2"]
    assert LayerSpec.parse(flags[-1]).resolve(3).has_output
    assert "2 machines" in out
    assert "4 machines" not in out


def test_cuts_are_made_for_the_numbers_that_were_asked_for(inspect, tmp_path: Path):
    path = toy_llama(tmp_path / "m.gguf")
    _, out, _ = inspect(path, "--cuts", 4, "--cuts", 1)
    assert re.findall(r"(\d) machine", out) == ["4", "1"]
    assert "--dist-layers 0-3 " in out


def test_json_is_one_object_with_everything(inspect, tmp_path: Path):
    path = toy_llama(tmp_path / "m.gguf", quant="Q4_1")
    status, out, _ = inspect(path, "--json", "--cuts", 2)
    found = json.loads(out)
    assert status == 0
    assert out.count("\n") == 1
    assert (found["file"], found["architecture"], found["n_layers"]) == (str(path), "llama", 4)
    assert found["tied"] is True
    assert len(found["layer_bytes"]) == 4
    assert found["quants"][0]["type_name"] == "Q4_1"
    [cut] = found["cuts"]
    assert cut["machines"] == 2
    assert [piece["layers"] for piece in cut["slices"]] == ["0-1", "2-3"]
    assert [piece["has_output"] for piece in cut["slices"]] == [False, True]
    assert all(piece["n_bytes"] > sum(found["layer_bytes"][:2]) for piece in cut["slices"])


def test_neighbouring_layers_of_one_size_share_a_row(inspect, tmp_path: Path):
    sizes = [8, 8, 16, 8]
    tensors = [tensor(f"blk.{k}.w", (n,)) for k, n in enumerate(sizes)]
    _, out, _ = inspect(build_gguf(tmp_path / "m.gguf", {}, tensors))
    assert re.findall(r"^layers? (\S+)", out, re.MULTILINE) == ["0-1", "2", "3"]


def test_a_missing_shard_is_told(inspect, tmp_path: Path):
    path = toy_llama(tmp_path / "m.gguf", n_shards=2)
    path.with_name("m-00002-of-00002.gguf").unlink()
    status, out, _ = inspect(path)
    assert status == 0
    assert "Not counted, missing: m-00002-of-00002.gguf" in out


def test_a_file_without_a_model_is_shown_without_cuts(inspect, tmp_path: Path):
    tensors = [tensor("misc", (8,), 250)]
    status, out, _ = inspect(build_gguf(tmp_path / "m.gguf", {}, tensors))
    assert status == 0
    assert re.search(r"^context +unknown", out, re.MULTILINE)
    assert re.search(r"^other +32 bytes", out, re.MULTILINE)
    assert re.search(r"^type 250 +1 +32 bytes", out, re.MULTILINE)
    assert "--dist-layers" not in out


def test_text_from_the_file_can_not_steer_the_terminal(inspect, tmp_path: Path):
    name = "\x1b]0;owned\x07[bold]x[/bold]\udcff\n"
    status, out, _ = inspect(build_gguf(tmp_path / "m.gguf", {"general.name": name}))
    assert status == 0
    assert "\x1b" not in out
    assert r"\x1b]0;owned\x07[bold]x[/bold]\udcff\n" in out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"<html>", "HTML page"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (b"GGUF\0\0\0\3" + bytes(16), "big-endian"),
        (b"GGUF\3\0\0\0", "cut off"),
    ],
)
def test_a_bad_file_is_one_line_on_stderr_and_status_1(
    inspect, tmp_path, content: bytes, words: str
):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    status, out, err = inspect(path)
    assert (status, out) == (1, "")
    assert err.startswith(f"ds4py: {path}: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "Missing argument 'FILE'"),
        (["--cuts", "0", "FILE"], "--cuts"),
        (["--cuts", "x", "FILE"], "--cuts"),
        (["--cuts", "5", "FILE"], "5 machines for 4 layers: choose 1 to 4"),
        (["--nonsense", "FILE"], "No such option"),
    ],
)
def test_bad_usage_is_one_line_on_stderr_and_status_2(
    inspect, tmp_path, args: list[str], words: str
):
    path = toy_llama(tmp_path / "m.gguf")
    status, out, err = inspect(*(path if arg == "FILE" else arg for arg in args))
    assert (status, out) == (2, "")
    assert err.startswith("ds4py: ")
    assert words in err
    assert err.count("\n") == 1


def modules_after(*args: object) -> set[str]:
    """Run `ds4py` in a fresh process and return the modules that it has imported."""
    code = (
        "import sys\n"
        "from ds4py.cli.exits import exit_status\n"
        "from ds4py.cli.main import ds4py\n"
        f"assert exit_status(ds4py, 'ds4py', {[str(arg) for arg in args]!r}) == 0\n"
        "print('MODULES', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    return set(done.stdout.split("MODULES ")[1].split())


def test_inspect_never_imports_torch(tmp_path: Path):
    modules = modules_after("inspect", toy_llama(tmp_path / "m.gguf"))
    assert "ds4py.gguf.file" in modules
    assert not modules & {"torch", "tokenizers", "starlette"}


def test_help_imports_nothing_heavy():
    modules = modules_after("inspect", "--help")
    assert not modules & {"torch", "numpy", "gguf", "rich", "tokenizers", "starlette"}


def test_the_version_is_told(capsys):
    assert exits.exit_status(ds4py, "ds4py", ["--version"]) == 0
    assert capsys.readouterr().out == f"ds4py, version {__version__}\n"


def test_the_group_lists_its_commands(capsys):
    assert exits.exit_status(ds4py, "ds4py", ["--help"]) == 0
    assert "inspect" in capsys.readouterr().out
