"""Only the slice is touched, and it is counted."""

from pathlib import Path

import pytest
import torch

from ds4py.config import EngineConfig
from ds4py.engine import open_runner
from ds4py.engine.loader import load_slice
from ds4py.errors import GgufError, ModelError, UnsupportedQuantError
from ds4py.gguf.file import GgufFile
from ds4py.layer_range import LayerRange, LayerSpec
from tests.toys import toy_llama
from tests.unit.models.llama_reference import rewritten
from tools.gguf_writer import TensorSource

CPU = torch.device("cpu")


class Touched(GgufFile):
    """Remembers what was read and given back."""

    def raw(self, name: str) -> memoryview:
        vars(self).setdefault("reads", []).append(name)
        return super().raw(name)

    def release(self, name: str) -> None:
        vars(self).setdefault("releases", []).append(name)
        super().release(name)


def touched(path: Path, layers: LayerRange, *, want_head: bool = False) -> list[str]:
    with Touched.open(path) as file:
        load_slice(file, layers, CPU, "f32", n_ctx=16, want_head=want_head)
        assert vars(file)["reads"] == vars(file)["releases"]
        return sorted(vars(file)["reads"])


def layers_of(names: list[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("blk.")}


def test_a_middle_slice_touches_its_layers_and_nothing_else(tmp_path):
    names = touched(toy_llama(tmp_path / "m.gguf"), LayerRange(1, 2))
    assert layers_of(names) == {"1", "2"}
    assert len(names) == 2 * 9


def test_the_first_slice_takes_the_embedding_too(tmp_path):
    names = touched(toy_llama(tmp_path / "m.gguf", tied=False), LayerRange(0, 0))
    assert [name for name in names if not name.startswith("blk.")] == ["token_embd.weight"]


@pytest.mark.parametrize(("tied", "head"), [(True, "token_embd.weight"), (False, "output.weight")])
def test_the_last_slice_takes_norm_and_head(tmp_path, tied, head):
    path = toy_llama(tmp_path / "m.gguf", tied=tied)
    names = touched(path, LayerRange(3, 3, has_output=True))
    ends = [name for name in names if not name.startswith("blk.")]
    assert ends == sorted([head, "output_norm.weight"])


def test_the_embedding_of_a_whole_tied_model_is_read_once(tmp_path):
    names = touched(toy_llama(tmp_path / "m.gguf"), LayerRange(0, 3, has_output=True))
    assert names.count("token_embd.weight") == 1


def test_a_wanted_head_is_loaded_without_being_owned(tmp_path):
    path = toy_llama(tmp_path / "m.gguf", tied=False)
    names = touched(path, LayerRange(0, 1), want_head=True)
    assert {"output.weight", "output_norm.weight"} <= set(names)


def test_a_wanted_head_that_the_file_has_not_is_no_error(tmp_path):
    path = rewritten(toy_llama(tmp_path / "m.gguf"), drop=["output_norm.weight"])
    runner = open_runner(
        EngineConfig(threads=1, model=path), LayerSpec.parse("0:1"), want_head=True
    )
    assert not runner.has_head


def test_progress_ends_at_the_bytes_of_the_slice(tmp_path):
    path = toy_llama(tmp_path / "m.gguf", quant="Q8_0")
    calls: list[tuple[int, int]] = []
    runner = open_runner(
        EngineConfig(threads=1, model=path),
        LayerSpec.parse("1:1"),
        progress=lambda done, total: calls.append((done, total)),
    )
    with GgufFile.open(path) as file:
        expected = sum(t.n_bytes for n, t in file.tensors.items() if n.startswith("blk.1."))
    assert runner.weight_bytes == expected
    assert calls[-1] == (expected, expected)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_a_shard_outside_the_slice_is_not_needed(tmp_path):
    first = toy_llama(tmp_path / "m.gguf", n_shards=3)
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    open_runner(EngineConfig(threads=1, model=first), LayerSpec.parse("0:0"))
    with pytest.raises(GgufError, match="m-00003-of-00003"):
        open_runner(EngineConfig(threads=1, model=first))


def test_an_unknown_quant_type_matters_inside_the_slice_only(tmp_path):
    path = toy_llama(tmp_path / "m.gguf")
    strange = TensorSource("blk.2.attn_v.weight", 99, (64, 32), bytes(4096))
    path = rewritten(path, add=[strange])
    open_runner(EngineConfig(threads=1, model=path), LayerSpec.parse("0:1"))
    with pytest.raises(UnsupportedQuantError, match=r"blk\.2\.attn_v\.weight"):
        open_runner(EngineConfig(threads=1, model=path), LayerSpec.parse("2:2"))


def test_an_unknown_architecture_is_refused(tmp_path):
    path = rewritten(toy_llama(tmp_path / "m.gguf"), keys={"general.architecture": "mamba"})
    with pytest.raises(ModelError, match="got 'mamba'"):
        open_runner(EngineConfig(threads=1, model=path))
