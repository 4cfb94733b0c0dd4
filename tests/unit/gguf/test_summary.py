"""Counting bytes and suggesting cuts."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.errors import ConfigError, ModelError
from ds4py.gguf.file import GgufFile
from ds4py.gguf.summary import ModelSummary, suggest_cuts, summarize
from ds4py.layer_range import LayerRange
from tests.support.toys import build_gguf, tensor, toy_llama


def summary_of(path: Path) -> ModelSummary:
    with GgufFile.open(path) as file:
        return summarize(file)


def test_shape_and_name_come_from_the_metadata(tmp_path: Path):
    found = summary_of(toy_llama(tmp_path / "m.gguf", n_layers=3, n_ctx=128))
    assert (found.name, found.architecture, found.n_layers) == ("toy llama", "llama", 3)
    assert (found.n_ctx_train, found.n_vocab, found.n_embd) == (128, 279, 64)


def test_every_byte_has_its_place(tmp_path: Path):
    found = summary_of(toy_llama(tmp_path / "m.gguf", quant="Q8_0", tied=False))
    parts = [*found.layer_bytes, found.embedding_bytes, found.head_bytes, found.other_bytes]
    assert sum(parts) == found.total_bytes
    assert sum(share.n_bytes for share in found.quants) == found.total_bytes
    assert sum(share.n_tensors for share in found.quants) == found.n_tensors
    assert [share.type_name for share in found.quants] == ["Q8_0", "F32"]


def test_a_tied_embedding_counts_for_the_last_slice_too(tmp_path: Path):
    found = summary_of(toy_llama(tmp_path / "m.gguf"))
    norm = 64 * 4
    assert found.tied
    assert found.embedding_bytes == 279 * 64 * 4
    assert found.head_bytes == found.embedding_bytes + norm
    assert found.total_bytes == sum(found.layer_bytes) + found.embedding_bytes + norm


def test_a_slice_holds_its_layers_and_its_end_of_the_model(tmp_path: Path):
    found = summary_of(toy_llama(tmp_path / "m.gguf"))
    layer = found.layer_bytes[0]
    assert found.range_bytes(LayerRange(1, 2)) == 2 * layer
    assert found.range_bytes(LayerRange(0, 0)) == layer + found.embedding_bytes
    assert found.range_bytes(LayerRange(3, 3, has_output=True)) == layer + found.head_bytes
    assert found.range_bytes(LayerRange(0, 3, has_output=True)) == found.total_bytes


def test_cuts_cover_the_model_and_weigh_both_ends(tmp_path: Path):
    found = summary_of(toy_llama(tmp_path / "m.gguf", n_layers=8, n_embd=32, n_ff=32))
    ranges = suggest_cuts(found, 3)
    assert [layer for layers in ranges for layer in layers.indices] == list(range(8))
    assert [layers.has_output for layers in ranges] == [False, False, True]
    assert len(ranges[1]) > len(ranges[0]) == len(ranges[2])


@pytest.mark.parametrize("n", [0, 5])
def test_an_impossible_number_of_machines_is_refused(tmp_path: Path, n: int):
    found = summary_of(toy_llama(tmp_path / "m.gguf"))
    with pytest.raises(ConfigError, match="choose 1 to 4"):
        suggest_cuts(found, n)


def test_a_file_without_layers_has_nothing_to_cut(tmp_path: Path):
    found = summary_of(build_gguf(tmp_path / "v.gguf", {}))
    assert (found.name, found.n_layers, found.n_ctx_train, found.n_vocab) == ("", 0, None, None)
    with pytest.raises(ConfigError, match="nothing to cut"):
        suggest_cuts(found, 2)


def test_layers_are_counted_by_name_where_the_metadata_is_silent(tmp_path: Path):
    tensors = [tensor(f"blk.{k}.w", (8,)) for k in range(3)]
    assert summary_of(build_gguf(tmp_path / "m.gguf", {}, tensors)).layer_bytes == (32, 32, 32)


def test_tensors_beyond_the_layers_and_the_ends_are_other_bytes(tmp_path: Path):
    tensors = [tensor("blk.0.w", (8,)), tensor("blk.7.w", (8,)), tensor("rope_freqs", (8,))]
    keys = {"general.architecture": "a", "a.block_count": 1}
    found = summary_of(build_gguf(tmp_path / "m.gguf", keys, tensors))
    assert (found.layer_bytes, found.other_bytes) == ((32,), 64)


@pytest.mark.parametrize("count", [-1, 1 << 31])
def test_an_impossible_number_of_layers_is_refused(tmp_path: Path, count: int):
    keys = {"general.architecture": "a", "a.block_count": count}
    with pytest.raises(ModelError, match=f"a.block_count: got {count}"):
        summary_of(build_gguf(tmp_path / "m.gguf", keys))


def test_missing_shards_are_told(tmp_path: Path):
    first = toy_llama(tmp_path / "m.gguf", n_shards=3)
    os.unlink(first.with_name("m-00003-of-00003.gguf"))
    found = summary_of(first)
    assert found.missing_shards == ("m-00003-of-00003.gguf",)
    assert not found.tied
    assert found.n_layers == 4


@given(n_layers=st.integers(1, 6), n_machines=st.integers(1, 6), tied=st.booleans())
def test_slices_hold_the_whole_model(tmp_path_factory, n_layers: int, n_machines: int, tied: bool):
    path = tmp_path_factory.mktemp("toy") / "m.gguf"
    found = summary_of(toy_llama(path, n_layers=n_layers, n_embd=32, n_ff=32, tied=tied))
    n_machines = min(n_machines, n_layers)
    held = sum(found.range_bytes(layers) for layers in suggest_cuts(found, n_machines))
    twice = found.embedding_bytes if tied and n_machines > 1 else 0
    assert held == found.total_bytes + twice
