"""Sizes and types of caches as a user writes them."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from ds4py.cli.flags.shared import ModelFlags, model_options, take
from ds4py.config import EngineConfig, parse_size, read_environment
from ds4py.errors import ConfigError


def engine(*args: str) -> EngineConfig:
    """Read a command line as the programs do."""
    got: list[ModelFlags] = []

    @click.command()
    @model_options
    def command(**flags) -> None:
        got.append(ModelFlags(**take(flags, ModelFlags)))

    command.main(["-m", "m.gguf", *args], standalone_mode=False)
    return got[0].engine(read_environment({}))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *[("1", 1), ("4096", 4096), ("100B", 100), ("3k", 3 << 10), ("512M", 512 << 20)],
        *[("8G", 8 << 30), ("8GB", 8 << 30), ("8GiB", 8 << 30), (" 1.5 g ", 3 << 29)],
        *[("2T", 2 << 40), ("0.001k", 1), ("999999999999999", 999999999999999)],
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "G", "0", "0G", "-1G", "1,5G", "8GG", "8 G B", "8X", "1e9", "0x10", "٣G"),
        *("9" * 16, "0.0001k", "1.G", ".5G", "nan", "inf"),
    ],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match=r"size .*: expected a number .*8G"):
        parse_size(text)


def test_flags_become_the_engines_config() -> None:
    config = engine("--kv-type", "q8_0", "--kv-budget", "1.5G")
    assert (config.kv_type, config.kv_budget) == ("q8_0", 3 << 29)
    assert (engine().kv_type, engine().kv_budget) == ("auto", None)


def test_a_size_that_is_none_and_an_unknown_type_are_refused() -> None:
    with pytest.raises(ConfigError, match="size 'lots'"):
        engine("--kv-budget", "lots")
    with pytest.raises(click.BadParameter, match="q4_0"):
        engine("--kv-type", "q4_0")
    with pytest.raises(ConfigError, match="KV budget 0"):
        EngineConfig(model=Path("m.gguf"), kv_budget=0)
