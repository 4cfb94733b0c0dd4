"""Real models: our directory and metadata equal those of the `gguf` package's reader."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.constants import GGUFValueType

from ds4py.gguf.file import GgufFile
from ds4py.gguf.summary import summarize
from tests.support.models import gemma3_path, smollm2_path


class ShortReader(GGUFReader):
    """The package's reader without the items of long string arrays, which take it ten seconds."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY:
            item = int(self._get(orig_offs, np.uint32)[0])
            count = int(self._get(orig_offs + 4, np.uint64)[0])
            if count > 1000:
                width = (
                    np.dtype(self.gguf_scalar_to_np[GGUFValueType(item)]).itemsize
                    if item != 8
                    else 0
                )
                end = orig_offs + 12 + count * width
                for _ in range(count if item == 8 else 0):
                    end += 8 + int.from_bytes(self.data[end : end + 8], "little")
                return end - orig_offs, [], [], [GGUFValueType.ARRAY]
        return super()._get_field_parts(orig_offs, raw_type)


@pytest.mark.parametrize("path", [smollm2_path, gemma3_path])
def test_the_directory_equals_the_package_readers(path):
    reader = ShortReader(path())
    with GgufFile.open(path()) as file:
        assert list(file.tensors) == [t.name for t in reader.tensors]
        for theirs in reader.tensors:
            ours = file.info(theirs.name)
            assert ours.offset == theirs.data_offset
            assert ours.n_bytes == theirs.n_bytes == theirs.data.nbytes
            assert ours.type_id == theirs.tensor_type
            assert ours.dims == tuple(theirs.shape.tolist())
            assert ours.type_name == theirs.tensor_type.name
        last = reader.tensors[-1]
        assert np.array_equal(
            np.frombuffer(file.raw(last.name), np.uint8), last.data.view(np.uint8)
        )


@pytest.mark.parametrize("path", [smollm2_path, gemma3_path])
def test_short_metadata_equals_the_package_readers(path):
    reader = ShortReader(path())
    with GgufFile.open(path()) as file:
        fields = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
        assert set(file.metadata) == set(fields)
        for key, field in fields.items():
            if field.data:
                assert file.metadata[key] == field.contents(), key


def test_vocabulary_and_merges_equal_the_package_readers():
    reader = GGUFReader(smollm2_path())
    with GgufFile.open(smollm2_path()) as file:
        for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
            assert file.metadata.require_strings(key) == reader.fields[key].contents()
        kinds = file.metadata.get_ints("tokenizer.ggml.token_type", None)
        assert kinds is not None
        assert kinds.tolist() == reader.fields["tokenizer.ggml.token_type"].contents()


def test_a_vocabulary_of_262144_tokens_is_whole():
    with GgufFile.open(gemma3_path()) as file:
        tokens = file.metadata.require_strings("tokenizer.ggml.tokens")
        scores = file.metadata.get_floats("tokenizer.ggml.scores", None)
        assert scores is not None
        assert len(tokens) == scores.size == 262_144
        assert tokens[:4] == ["<pad>", "<eos>", "<bos>", "<unk>"]
        assert file.metadata.require_int("gemma3.block_count") == 18
        assert file.metadata.require_float("gemma3.rope.freq_base") == 1e6


@pytest.mark.parametrize(
    ("path", "n_layers", "n_vocab", "types"),
    [
        (smollm2_path, 30, 49_152, {"Q4_1": 210, "F32": 61, "Q8_0": 1}),
        (gemma3_path, 18, 262_144, {"F32": 109, "Q5_0": 81, "Q4_K": 27, "Q8_0": 10, "Q6_K": 9}),
    ],
)
def test_the_summary_of_a_real_model(path, n_layers: int, n_vocab: int, types: dict[str, int]):
    with GgufFile.open(path()) as file:
        found = summarize(file)
    assert (found.n_layers, found.n_vocab, found.tied) == (n_layers, n_vocab, True)
    assert {share.type_name: share.n_tensors for share in found.quants} == types
    assert found.total_bytes <= Path(path()).stat().st_size
    assert sum(found.layer_bytes) + found.head_bytes == found.total_bytes
