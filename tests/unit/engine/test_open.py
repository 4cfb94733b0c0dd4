"""Identity of a model, and what a config means."""

import zlib

import pytest

from ds4py.config import EngineConfig
from ds4py.engine import open_runner
from ds4py.engine.loader import read_shape
from ds4py.engine.open import cut_utf8, model_card
from ds4py.errors import ConfigError
from ds4py.gguf.file import GgufFile
from ds4py.layer_range import LayerSpec
from tests.support.toys import toy_llama
from tests.unit.models.llama_reference import rewritten


def card(path):
    with GgufFile.open(path) as file:
        return model_card(file, read_shape(file))


def test_the_id_is_the_checksum_of_the_canonical_text(tmp_path):
    path = toy_llama(tmp_path / "m.gguf")
    with GgufFile.open(path) as file:
        text = read_shape(file).canonical()
    assert card(path).model_id == 0x80000000 | zlib.crc32(text.encode())


def test_quantization_and_name_do_not_change_the_id_but_a_constant_does(tmp_path):
    plain = card(toy_llama(tmp_path / "a.gguf"))
    other_bytes = card(toy_llama(tmp_path / "b.gguf", quant="Q4_1", name="other", seed=1))
    base = toy_llama(tmp_path / "c.gguf")
    other_base = card(rewritten(base, keys={"llama.rope.freq_base": 10001.0}))
    assert plain.model_id == other_bytes.model_id
    assert plain.model_id != other_base.model_id


def test_the_card_tells_the_shape(tmp_path):
    found = card(toy_llama(tmp_path / "m.gguf", name="Toy"))
    assert (found.name, found.architecture) == ("Toy", "llama")
    assert (found.n_layers, found.n_vocab, found.hidden_width) == (4, 279, 64)
    assert (found.n_ctx_train, found.quant_bits) == (256, 4)


def test_a_model_of_2_bit_weights_says_so(tmp_path):
    path = toy_llama(tmp_path / "m.gguf", n_embd=256, n_ff=256, quant="TQ2_0", n_layers=1)
    assert card(path).quant_bits == 2


@pytest.mark.parametrize("name", ["", None])
def test_a_nameless_model_is_called_by_its_architecture(tmp_path, name):
    path = rewritten(toy_llama(tmp_path / "m.gguf"), keys={"general.name": name})
    assert card(path).name == "llama"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a" * 200, "a" * 127), ("é" * 100, "é" * 63), ("abc", "abc"), ("x" * 125 + "€", "x" * 125)],
)
def test_a_long_name_is_cut_between_characters(text, expected):
    assert cut_utf8(text, 127) == expected


def test_broken_bytes_of_a_name_become_marks():
    assert cut_utf8("a\udcff", 127) == "a\ufffd"


def test_the_context_is_the_models_own_unless_named(tmp_path):
    path = toy_llama(tmp_path / "m.gguf", n_ctx=256)
    assert open_runner(EngineConfig(threads=1, model=path)).n_ctx == 256
    assert open_runner(EngineConfig(threads=1, model=path, n_ctx=100)).n_ctx == 100
    with pytest.raises(ConfigError, match="context 257: the model was trained for 256"):
        open_runner(EngineConfig(threads=1, model=path, n_ctx=257))


def test_a_very_long_context_is_not_taken_unasked(tmp_path):
    path = toy_llama(tmp_path / "m.gguf", n_ctx=1 << 20, n_layers=1)
    assert open_runner(EngineConfig(threads=1, model=path)).n_ctx == 32768


def test_the_layers_written_decide_about_the_head(tmp_path):
    path = toy_llama(tmp_path / "m.gguf")
    config = EngineConfig(threads=1, model=path)
    assert open_runner(config, LayerSpec.parse("2-3")).has_head
    assert not open_runner(config, LayerSpec.parse("2:3")).has_head
    assert open_runner(config, LayerSpec.parse("2:output")).has_head
    with pytest.raises(ConfigError, match="the model has layers 0-3"):
        open_runner(config, LayerSpec.parse("0-4"))
