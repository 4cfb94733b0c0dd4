"""What the section `start` compares with: bytes of a cache, one reading of a slice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ds4py.gguf.file import GgufFile
from ds4py.layer_range import LayerRange
from tests.toys import toy_llama
from tools.benchmarks.start import best, forget_cached, kv_bytes, read_once, tensor_places


def test_the_cache_of_a_slice_has_keys_and_values_of_two_bytes(tmp_path: Path) -> None:
    path = toy_llama(tmp_path / "toy.gguf", n_embd=64, n_head=4, n_head_kv=2)
    with GgufFile.open(path) as file:
        got = kv_bytes(file, LayerRange(1, 3, has_output=False), 100)
    assert got == 3 * 100 * 2 * (2 * 16) * 2


def test_the_places_of_layers_are_those_of_their_tensors(tmp_path: Path) -> None:
    path = toy_llama(tmp_path / "toy.gguf", n_layers=12)
    places = tensor_places(path, range(1, 3))
    assert len(places) == 2 * 9
    assert places == sorted(places)
    with GgufFile.open(path) as file:
        own = [name for name in file.tensors if name.startswith(("blk.1.", "blk.2."))]
        assert sum(size for _, size in places) == sum(file.info(name).n_bytes for name in own)
        assert {offset for offset, _ in places} == {file.info(name).offset for name in own}


def test_stretches_are_read_to_their_ends_and_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(np.zeros(100_000, np.uint8).tobytes())
    monkeypatch.setattr("tools.benchmarks.start._PIECE", 1000)
    read_once(path, [(0, 2500), (99_000, 1000), (5, 0)])
    with pytest.raises(EOFError):
        read_once(path, [(99_500, 1000)])


def test_forgetting_a_file_leaves_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"still here")
    forget_cached(path)
    assert path.read_bytes() == b"still here"


def test_the_best_of_some_rounds_is_the_fastest() -> None:
    done: list[int] = []
    assert 0 <= best(3, lambda: done.append(1)) < 1
    assert len(done) == 3
