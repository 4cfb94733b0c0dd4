"""Flags of ds4: translated, accepted without effect, or refused in one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest

from ds4py.cli import exits
from ds4py.cli.client import client
from ds4py.cli.flags.ds4 import Ds4Flags, ds4_options
from ds4py.cli.flags.shared import ModelFlags, model_options, take
from ds4py.errors import ConfigError


def parse(*args: str) -> tuple[Ds4Flags, ModelFlags]:
    got: list = []

    @click.command()
    @model_options
    @ds4_options
    def command(**flags) -> None:
        got.append(Ds4Flags(**take(flags, Ds4Flags)))
        got.append(ModelFlags(**take(flags, ModelFlags)))
        assert not flags

    command.main(list(args), standalone_mode=False)
    return got[0], got[1]


def model(*args: str) -> ModelFlags:
    inherited, flags = parse(*args)
    return inherited.model(flags)


@pytest.mark.parametrize(
    ("args", "device", "precision"),
    [
        ("", "auto", "auto"),
        ("--cpu", "cpu", "auto"),
        ("--cuda", "cuda", "auto"),
        ("--backend cuda", "cuda", "auto"),
        ("--cuda --device cuda:1", "cuda:1", "auto"),
        ("--cuda --cpu", "cpu", "auto"),
        ("--quality", "auto", "f32"),
        ("--quality --precision bf16", "auto", "bf16"),
    ],
)
def test_what_means_the_same_is_translated(args: str, device: str, precision: str) -> None:
    flags = model(*args.split())
    assert (flags.device, flags.precision) == (device, precision)


@pytest.mark.parametrize("args", ["--metal", "--backend metal", "--cpu --device cuda"])
def test_a_backend_that_can_not_be_had_is_refused(args: str) -> None:
    with pytest.raises(ConfigError, match=r"no Metal backend|contradict"):
        model(*args.split())


def test_without_a_model_ds4s_own_file_is_taken_if_it_is_there(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert model().model is None
    (tmp_path / "ds4flash.gguf").touch()
    assert model().model == Path("ds4flash.gguf")
    assert model("-m", "m.gguf").model == Path("m.gguf")


def test_files_are_read_from_the_folder_that_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    parse("--chdir", "folder")[0].enter()
    assert Path.cwd() == tmp_path / "folder"
    with pytest.raises(ConfigError, match="--chdir nowhere: No such file"):
        parse("--chdir", "nowhere")[0].enter()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("", []),
        ("--power 100", []),
        ("--power 50", ["--power has no effect"]),
        ("--warm-weights", ["--warm-weights has no effect"]),
        ("--mtp f --mtp-draft 99 --mtp-margin 3.5", ["--mtp has no effect"]),
        ("--mtp-draft 2 --power 1", ["--power has no effect", "--mtp has no effect"]),
    ],
)
def test_what_has_no_effect_is_said_once(args: str, words: list[str]) -> None:
    told = parse(*args.split())[0].without_effect()
    assert len(told) == len(words)
    for sentence, word in zip(told, words, strict=True):
        assert sentence.startswith(word)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--server", "serve with ds4py-server"),
        ("--imatrix-dataset d --imatrix-out o", "calibration is not built"),
        ("--imatrix-max-prompts 3", "calibration is not built"),
        ("--head-test", "checks of ds4 are not built"),
        ("--first-token-test", "checks of ds4 are not built"),
        ("--metal-graph-test", "checks of ds4 are not built"),
        ("--dir-steering-file f", "directional steering is not built"),
        ("--dir-steering-ffn 1", "directional steering is not built"),
        ("--power 0", "0 is not in the range"),
        ("--power 101", "101 is not in the range"),
        ("--mtp-draft 0", "0 is not in the range"),
        ("--mtp-margin 2000", "2000.0 is not in the range"),
        ("--logprobs-top-k 0", "0 is not in the range"),
        ("--backend vulkan", "'vulkan' is not one of"),
        ("--dump-tokens --inspect", "exclude each other"),
        ("--perplexity-file f -p x", "drop the prompt"),
        ("--perplexity-file /no/such", "--perplexity-file /no/such: No such file"),
        ("--dump-tokens", "the question is empty"),
        ("--dump-logits /no/such/file -p x", "/no/such/file: No such file"),
        ("--inspect", "no model"),
        ("--host h:1 --inspect", "diagnostics"),
        ("-i -p x", "--interactive reads its questions itself"),
        ("-i --raw", "--interactive reads its questions itself"),
        ("-i --host h", "expected HOST:PORT"),
        ("--temp abc -p x", "'abc' is not a valid float"),
        ("-n 0 -p x", "--max-tokens 0: expected at least 1"),
    ],
)
def test_bad_usage_is_status_2_and_one_sentence(
    args: str, words: str, capsys, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with open(os.devnull, encoding="utf-8") as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert exits.exit_status(client, "prog", args.split()) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
