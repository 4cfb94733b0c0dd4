"""`DS4_LOCK_FILE`: one process per file, and a clear word to the second."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds4py.cli.lock import exclusive
from ds4py.config import read_environment
from ds4py.errors import ConfigError


def test_without_a_file_nothing_is_locked() -> None:
    with exclusive(None), exclusive(None):
        pass


def test_a_second_holder_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "ds4.lock"
    refused = pytest.raises(ConfigError, match="another process holds it")
    with exclusive(path), refused, exclusive(path):
        pytest.fail("locked twice")
    with exclusive(path):
        pass


def test_a_file_that_can_not_be_opened_is_named(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match=r"DS4_LOCK_FILE=.*No such file")
    with refused, exclusive(tmp_path / "missing" / "ds4.lock"):
        pytest.fail("locked a file that is not there")


def test_the_variable_names_the_file_and_empty_means_none() -> None:
    assert read_environment({"DS4_LOCK_FILE": "/a/b"}).lock_file == Path("/a/b")
    assert read_environment({"DS4_LOCK_FILE": ""}).lock_file is None
    assert read_environment({}).lock_file is None
