"""Flags of the disk cache, ds4's own (server-and-cli.md#disk-cache-options, #one-shot)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from ds4py.cli.exits import BAD_USAGE, OK, exit_status
from ds4py.cli.flags.disk_cache import KvDiskFlags, kv_disk_options
from ds4py.cli.flags.shared import take
from ds4py.snapshot.disk_cache import DiskCacheOptions

got: list[KvDiskFlags] = []


@click.command()
@kv_disk_options
def command(**flags) -> None:
    flags_of_ours = KvDiskFlags(**take(flags, KvDiskFlags))
    flags_of_ours.options()
    got.append(flags_of_ours)


def read(*args: str) -> KvDiskFlags:
    """Read a command line as the server does."""
    assert exit_status(command, "ds4py-server", args) == OK
    return got.pop()


def test_off_unless_a_folder_is_named() -> None:
    flags = read()
    assert (flags.kv_disk_dir, flags.options()) == (None, None)


def test_defaults_are_ds4s_and_the_caches() -> None:
    flags = read("--kv-disk-dir", "cache")
    assert flags.kv_disk_dir == Path("cache")
    assert flags.options() == DiskCacheOptions()


def test_every_flag_arrives() -> None:
    args = "--kv-disk-dir d --kv-disk-space-mb 7 --kv-cache-min-tokens 8"
    args += " --kv-cache-cold-max-tokens 9 --kv-cache-continued-interval-tokens 10"
    args += " --kv-cache-boundary-trim-tokens 11 --kv-cache-boundary-align-tokens 12"
    assert read(*args.split(), "--kv-cache-reject-different-quant").options() == DiskCacheOptions(
        space_bytes=7 << 20,
        min_tokens=8,
        cold_max_tokens=9,
        continued_interval_tokens=10,
        boundary_trim_tokens=11,
        boundary_align_tokens=12,
        reject_different_quant=True,
    )


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--kv-disk-space-mb", "0"),
        ("--kv-disk-space-mb", "lots"),
        ("--kv-cache-min-tokens", "0"),
        ("--kv-cache-cold-max-tokens", "-1"),
        ("--kv-cache-continued-interval-tokens", "-1"),
        ("--kv-cache-boundary-trim-tokens", "-1"),
        ("--kv-cache-boundary-align-tokens", "0"),
    ],
)
def test_values_out_of_range_name_the_flag(flag: str, value: str, capsys) -> None:
    assert exit_status(command, "ds4py-server", [flag, value]) == BAD_USAGE
    assert f"Invalid value for '{flag}': " in capsys.readouterr().err


@pytest.mark.parametrize("folder", [(), ("--kv-disk-dir", "d")])
@pytest.mark.parametrize("value", ["1", "511"])
def test_cold_saves_shorter_than_the_minimum(folder, value: str, capsys) -> None:
    args = [*folder, "--kv-cache-cold-max-tokens", value]
    assert exit_status(command, "ds4py-server", args) == BAD_USAGE
    assert f"cold_max_tokens {value}: expected at least the minimum of 512" in (
        capsys.readouterr().err
    )


def test_zero_turns_saves_off() -> None:
    flags = read("--kv-disk-dir", "d", "--kv-cache-cold-max-tokens", "0")
    assert flags.options() == DiskCacheOptions(cold_max_tokens=0)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    args = ["--kv-disk-dir", str(tmp_path / "file")]
    assert exit_status(command, "ds4py-server", args) == BAD_USAGE


def test_the_flags_import_nothing_heavy() -> None:
    code = "import sys, ds4py.cli.flags.disk_cache; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
