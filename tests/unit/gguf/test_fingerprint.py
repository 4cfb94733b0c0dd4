"""Which changes of a file its fingerprint tells, and which it does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ds4py.gguf.file import GgufFile
from ds4py.gguf.fingerprint import fingerprint
from tests.support.toys import build_gguf, tensor

META = {
    "general.architecture": "toy",
    "toy.count": 7,
    "toy.scale": 0.5,
    "toy.tokens": ["a", "bc", "d"],
    "toy.scores": np.array([1.0, 2.0], np.float32),
}
TENSORS = [tensor("a.weight", [32, 2], "Q4_0"), tensor("b.weight", [4])]


def of(folder: Path, meta=META, tensors=TENSORS, **more) -> str:
    folder.mkdir()
    with GgufFile.open(build_gguf(folder / "m.gguf", meta, tensors, **more)) as file:
        return fingerprint(file)


def test_it_is_short_and_the_same_for_the_same_contents(tmp_path: Path) -> None:
    first = of(tmp_path / "1")
    assert len(first) == 32
    assert int(first, 16) >= 0
    backwards = dict(reversed(META.items()))
    assert of(tmp_path / "2", backwards, TENSORS[::-1], alignment=256) == first


@pytest.mark.parametrize(
    "change",
    [
        {"toy.count": 8},
        {"toy.count": 7.0},
        {"toy.tokens": ["a", "b", "cd"]},
        {"toy.scores": np.array([1.0, 2.5], np.float32)},
        {"toy.more": 1},
    ],
    ids=str,
)
def test_it_tells_any_metadata(tmp_path: Path, change) -> None:
    assert of(tmp_path / "1", META | change) != of(tmp_path / "2")


@pytest.mark.parametrize(
    "tensors",
    [
        TENSORS[:1],
        [TENSORS[0], tensor("c.weight", [4])],
        [TENSORS[0], tensor("b.weight", [2, 2])],
        [tensor("a.weight", [32, 2], "Q4_1"), TENSORS[1]],
    ],
    ids=["fewer", "name", "shape", "type"],
)
def test_it_tells_the_directory_but_no_weights(tmp_path: Path, tensors) -> None:
    first = of(tmp_path / "1")
    assert of(tmp_path / "2", META, tensors) != first
    other_weights = [tensor("a.weight", [32, 2], "Q4_0", fill=3), TENSORS[1]]
    assert of(tmp_path / "3", META, other_weights) == first


def test_a_split_file_has_the_fingerprint_of_the_whole_one(tmp_path: Path) -> None:
    whole = of(tmp_path / "whole")
    folder = tmp_path / "split"
    folder.mkdir()
    build_gguf(folder / "m.gguf", META, TENSORS, n_shards=2)
    first, second = sorted(folder.iterdir())
    with GgufFile.open(second) as file:
        assert fingerprint(file) == whole
    second.unlink()
    with GgufFile.open(first) as file:
        assert fingerprint(file) == ""
