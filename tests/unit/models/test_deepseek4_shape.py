"""What a file says about a DeepSeek V4: sizes, tensors, identity, and what is refused."""

import math
import zlib
from dataclasses import asdict, fields, replace

import numpy as np
import pytest

from ds4py.engine.loader import read_shape
from ds4py.engine.open import model_card
from ds4py.errors import ModelError
from ds4py.gguf import kinds
from ds4py.gguf.file import GgufFile
from ds4py.gguf.metadata import Metadata
from ds4py.layer_range import LayerRange
from ds4py.models.deepseek4 import Shape
from tests import golden
from tools.gguf_writer import save_gguf
from tools.toy_deepseek4 import FLASH, PRO, Sizes, metadata, tensors

TINY = metadata(Sizes())
HEAD = (
    "output_hc_base.weight", "output_hc_fn.weight", "output_hc_scale.weight", "output_norm.weight",
    "output.weight",
)  # fmt: skip


def key(name: str) -> str:
    return f"deepseek4.{name}"


def read(**changes) -> Shape:
    """The shape of the tiny model with other values; None removes a key."""
    values = {**TINY, **changes}
    return Shape.from_metadata(Metadata({k: v for k, v in values.items() if v is not None}))


def changed(name: str, value) -> Shape:
    return read(**{key(name): value})


def shape_of(sizes: Sizes) -> Shape:
    return Shape.from_metadata(Metadata(metadata(sizes)))


def needs(shape: Shape, layers: LayerRange, *, head: bool = False):
    return shape.tensor_needs(layers, lambda _: True, head=head)


def whole(shape: Shape):
    return needs(shape, LayerRange(0, shape.n_layers - 1, has_output=True), head=True)


def card(path):
    with GgufFile.open(path) as file:
        return model_card(file, read_shape(file))


# --- identity


@pytest.mark.parametrize(("name", "bits"), [("tiny-a.gguf", 2), ("tiny-b.gguf", 4)])
def test_the_recorded_models_are_ds4s_tiny_one(name, bits):
    found = card(golden.path(name))
    assert (found.model_id, found.name, found.quant_bits) == (2, "DeepSeek V4 Tiny", bits)
    assert (found.n_layers, found.n_vocab, found.hidden_width) == (6, 768, 1024)


@pytest.mark.parametrize(
    ("sizes", "model_id", "name"),
    [
        (FLASH, 0, "DeepSeek V4 Flash"),
        (PRO, 1, "DeepSeek V4 Pro"),
        (Sizes(), 2, "DeepSeek V4 Tiny"),
    ],
)
def test_ds4s_models_keep_its_ids_and_names_whatever_the_file_calls_them(
    tmp_path, sizes, model_id, name
):
    (path,) = save_gguf(tmp_path / "m.gguf", metadata(sizes, name="something else"), [])
    found = card(path)
    assert (found.model_id, found.name, found.n_layers) == (model_id, name, sizes.n_layers)


@pytest.mark.parametrize("sizes", [FLASH, PRO], ids=["flash", "pro"])
def test_the_context_of_the_training_is_not_part_of_ds4s_models(sizes):
    shape = shape_of(replace(sizes, n_ctx=4096))
    assert shape.n_ctx_train == 4096
    assert shape.identity is not None


OTHERS = {
    "block_count": 5, "embedding_length": 512, "attention.head_count": 8,
    "attention.q_lora_rank": 96, "attention.output_lora_rank": 64,
    "attention.output_group_count": 4, "attention.sliding_window": 17,
    "attention.indexer.head_count": 5, "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 9, "rope.dimension_count": 96, "expert_count": 9,
    "expert_used_count": 3, "expert_feed_forward_length": 512, "hash_layer_count": 2,
    "hyper_connection.count": 3, "hyper_connection.sinkhorn_iterations": 19,
    "rope.freq_base": 10001.0, "attention.compress_rope_freq_base": 160001.0,
    "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 65535,
    "rope.scaling.yarn_beta_fast": 31.0, "rope.scaling.yarn_beta_slow": 1.5,
    "expert_weights_scale": 2.5, "attention.layer_norm_rms_epsilon": 1e-5,
    "hyper_connection.epsilon": 1e-5,
    "attention.compress_ratios": np.array([0, 0, 4, 128, 4, 4]),
    "swiglu_clamp_exp": np.array([10, 10, 10, 10, 10, 9.5], np.float32),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_another_constant_makes_another_model(name):
    shape = changed(name, OTHERS[name])
    assert shape.identity is None
    assert shape.canonical() != read().canonical()


@pytest.mark.parametrize("value", [1.5e-6, 1e-7])
def test_a_constant_that_ds4_takes_for_its_own_becomes_its_own(value):
    assert changed("hyper_connection.epsilon", value) == read()


def test_a_tokenizer_of_another_size_is_refused():
    expected = "769, the vocabulary size of the model"
    with pytest.raises(ModelError, match=f"tokenizer.ggml.tokens: got 768 tokens, .*{expected}"):
        changed("vocab_size", 769)


def test_a_model_that_ds4_does_not_know_is_called_by_the_checksum_of_its_shape(tmp_path):
    keys = metadata(Sizes(n_expert=9), name="Mine")
    (path,) = save_gguf(tmp_path / "m.gguf", keys, [])
    text = Shape.from_metadata(Metadata(keys)).canonical()
    assert card(path).model_id == 0x80000000 | zlib.crc32(text.encode())
    assert card(path).name == "Mine"


def test_the_canonical_text_names_every_field():
    text = read().canonical()
    names = {field.name for field in fields(Shape)} - {"yarn", "n_ctx_train"}
    names |= {f"yarn.{name}" for name in asdict(read().yarn)}
    assert {part.partition("=")[0] for part in text.split(" ") if "=" in part} == names


def test_the_shape_says_what_the_file_said():
    shape = shape_of(FLASH)
    for name in ("n_layers", "n_embd", "n_vocab", "n_head", "d_head", "n_rot", "q_rank", "n_ff"):
        assert getattr(shape, name) == getattr(FLASH, name)
    assert shape.hidden_width == 4 * 4096
    assert shape.n_ctx_train == FLASH.n_ctx
    assert [shape.ratios.count(ratio) for ratio in (0, 4, 128)] == [2, 21, 20]
    assert shape.norm_eps == shape.hc_eps == float(np.float32(1e-6))


# --- tensors (docs/spec/deepseek4-model.md#tensors, #weights)


@pytest.mark.parametrize("sizes", [FLASH, PRO, Sizes()], ids=["flash", "pro", "tiny"])
def test_a_whole_model_needs_the_tensors_of_the_specification(sizes):
    shape = shape_of(sizes)
    table = {tensor.name: tensor for tensor in tensors(sizes)}
    found = whole(shape)
    biases = {f"blk.{layer}.exp_probs_b.bias" for layer in range(sizes.n_layers)}
    assert {name for name, need in found.items() if need.optional} == biases
    assert found.keys() - table.keys() == {f"blk.{layer}.exp_probs_b.bias" for layer in range(3)}
    assert table.keys() <= found.keys()
    for name, tensor in table.items():
        assert found[name].shape == tensor.dims[::-1], name
        assert kinds.type_name(tensor.type_id) in found[name].types, name


@pytest.mark.parametrize(("sizes", "count"), [(FLASH, 1328), (PRO, 1894)], ids=["flash", "pro"])
def test_a_published_file_has_so_many_tensors(sizes, count):
    shape = shape_of(sizes)
    hash_layers = range(shape.n_hash_layers)
    unused = {f"blk.{layer}.exp_probs_b.bias" for layer in hash_layers}
    assert len(whole(shape).keys() - unused) == count


@pytest.mark.parametrize(
    ("sizes", "mix", "expected"),
    [
        (FLASH, "q2", 86_714_775_900),
        (FLASH, "q4", 164_628_167_004),
        (FLASH, "mixed", 97_586_411_868),
        (PRO, "q2", 464_621_966_732),
        (PRO, "q4", 899_827_144_076),
    ],
)
def test_a_published_file_has_so_many_bytes(sizes, mix, expected):
    assert sum(needed_bytes(sizes, mix).values()) == expected


@pytest.mark.parametrize(
    ("sizes", "mix", "expected"),
    [
        (FLASH, "q2", {1: 1_959_129_560, 2: 1_997_415_384, 3: 1_964_549_592, 42: 1_994_313_688}),
        (FLASH, "q4", {0: 3_771_068_888, 2: 3_809_354_712, 41: 3_776_488_920, 4: 3_806_253_016}),
        (PRO, "q2", {0: 7_549_575_896, 2: 7_597_559_000, 59: 7_546_474_712, 60: 7_594_457_816}),
        (PRO, "q4", {1: 14_684_087_000, 2: 14_732_070_104, 3: 14_680_985_816, 4: 14_728_968_920}),
    ],
)
def test_a_layer_of_a_published_file_has_so_many_bytes(sizes, mix, expected):
    sizes_by_name = needed_bytes(sizes, mix)
    for layer, n_bytes in expected.items():
        own = (n for name, n in sizes_by_name.items() if name.startswith(f"blk.{layer}."))
        assert sum(own) == n_bytes, layer


@pytest.mark.parametrize(
    ("sizes", "embedding", "head"),
    [(FLASH, 1_059_061_760, 562_774_036), (PRO, 1_853_358_080, 984_854_548)],
)
def test_the_ends_of_a_published_file_have_so_many_bytes(sizes, embedding, head):
    n_bytes = needed_bytes(sizes, "q2")
    assert n_bytes["token_embd.weight"] == embedding
    assert sum(n_bytes[name] for name in HEAD) == head


def needed_bytes(sizes: Sizes, mix: str) -> dict[str, int]:
    """Packed bytes of what a whole model needs, in the types of a published file."""
    found = whole(shape_of(sizes))
    return {
        tensor.name: kinds.tensor_bytes(tensor.type_id, found[tensor.name].shape[::-1])
        for tensor in tensors(sizes, mix)
    }


def test_a_slice_needs_its_layers_and_the_ends_that_it_has():
    shape = read()
    middle, first = needs(shape, LayerRange(2, 3)), needs(shape, LayerRange(0, 0))
    assert {name.split(".")[1] for name in middle} == {"2", "3"}
    assert {name for name in first if not name.startswith("blk.0.")} == {"token_embd.weight"}
    last = needs(shape, LayerRange(5, 5, has_output=True), head=True)
    assert {name for name in last if not name.startswith("blk.5.")} == set(HEAD)


def test_saved_caches_follow_the_ratios():
    saved = read().saved_layers
    assert [layer.ratio for layer in saved] == [0, 0, 4, 128, 4, 128]
    assert [layer.index_width for layer in saved] == [0, 0, 128, 0, 128, 0]
    assert {(layer.width, layer.window) for layer in saved} == {(160, 16)}


# --- keys (docs/spec/deepseek4-model.md#keys)

DEFAULTS = {
    "context_length": ("n_ctx_train", 16 * 65536),
    "rope.scaling.factor": ("yarn.factor", 16.0),
    "rope.scaling.original_context_length": ("yarn.n_ctx_original", 65536),
    "rope.scaling.yarn_beta_fast": ("yarn.beta_fast", 32.0),
    "rope.scaling.yarn_beta_slow": ("yarn.beta_slow", 1.0),
}
ARRAYS = ("attention.compress_ratios", "swiglu_clamp_exp")
MODEL_KEYS = [name.removeprefix("deepseek4.") for name in TINY if name.startswith("deepseek4.")]
REQUIRED = [name for name in MODEL_KEYS if name not in DEFAULTS]
GROUPS = ("expert_group_count", "expert_group_used_count", "nextn_predict_layers")
NUMBERS = [name for name in MODEL_KEYS if isinstance(TINY[key(name)], float)]
INTEGERS = [name for name in MODEL_KEYS if type(TINY[key(name)]) is int]


def refusal(name: str, value) -> ModelError:
    """The error of a value, which must name the key, what was found and what was expected."""
    with pytest.raises(ModelError) as caught:
        changed(name, value)
    error = caught.value
    assert error.tensor == f"metadata key {key(name)}"
    assert str(error) == f"{error.tensor}: got {error.got}, expected {error.expected}"
    assert str(error.got) not in {"", "None"}
    assert error.expected
    return error


def test_the_lists_of_keys_cover_the_specification():
    assert len(REQUIRED) == 30
    assert len(INTEGERS) == 24
    assert len(NUMBERS) == 8


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_key_is_named(name):
    assert "nothing" in str(refusal(name, None).got)


@pytest.mark.parametrize("name", DEFAULTS)
def test_an_optional_key_has_the_value_that_ds4_assumes(name):
    field, value = DEFAULTS[name]
    found = shape = changed(name, None)
    for part in field.split("."):
        found = getattr(found, part)
    assert found == value
    assert shape.identity is not None


@pytest.mark.parametrize("name", [*MODEL_KEYS, *GROUPS])
@pytest.mark.parametrize("value", ["ten", np.array([True]), ["1"]])
def test_a_value_of_another_type_is_named(name, value):
    refusal(name, value)


@pytest.mark.parametrize("name", [*INTEGERS, *GROUPS])
@pytest.mark.parametrize("value", [4.0, True, np.array([4])])
def test_a_size_must_be_an_integer(name, value):
    refusal(name, value)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, 0.0, -1.0, math.nan, math.inf, np.ones(1)])
def test_a_factor_must_be_a_positive_number(name, value):
    refusal(name, value)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_factor_may_be_stored_as_an_integer(name):
    assert changed(name, 2) == changed(name, 2.0)


@pytest.mark.parametrize("name", [name for name in INTEGERS if name != "hash_layer_count"])
@pytest.mark.parametrize("value", [0, -1, 1 << 31 | 1, 1 << 40])
def test_a_size_must_be_possible(name, value):
    refusal(name, value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("attention.head_count_kv", 2, "1"),
        ("expert_shared_count", 2, "1"),
        ("expert_group_count", 1, "0"),
        ("expert_group_used_count", -1, "0"),
        ("expert_weights_norm", False, "true"),
        ("attention.value_length", 128, "160"),
        ("attention.output_group_count", 3, "divisor of 4"),
        ("expert_used_count", 9, "1 to 8"),
        ("hash_layer_count", 7, "0 to 6"),
        ("hash_layer_count", -1, "0 to 6"),
        ("nextn_predict_layers", 6, "0 to 5"),
        ("rope.dimension_count", 31, "even"),
        ("rope.dimension_count", 64, "multiple of 64"),
        ("rope.dimension_count", 162, "1 to 160"),
        ("attention.indexer.key_length", 96, "power of two"),
        ("attention.indexer.key_length", 16, "at least 32"),
        ("attention.compress_ratios", np.array([0, 0, 4, 128, 4, 8]), "0 or 4 or 128"),
        ("attention.compress_ratios", np.array([0, 0, -4, 128, 4, 8]), "0 or 4 or 128"),
        ("attention.compress_ratios", np.array([0, 0, 4, 128, 4]), "each of 6 layers"),
        ("attention.compress_ratios", np.zeros(6, np.float32), "integers"),
        ("swiglu_clamp_exp", np.full(5, 10, np.float32), "each of 6 layers"),
        ("swiglu_clamp_exp", np.full(6, 10, np.int32), "floats"),
        ("swiglu_clamp_exp", np.array([10, 10, 10, 10, 10, 0], np.float32), "positive"),
        ("swiglu_clamp_exp", np.array([10, 10, 10, 10, 10, -1], np.float32), "positive"),
        ("swiglu_clamp_exp", np.array([10, 10, np.nan, 10, 10, 10], np.float32), "positive"),
        ("swiglu_clamp_exp", np.array([10, np.inf, 10, 10, 10, 10], np.float32), "positive"),
    ],
)
def test_a_value_that_the_architecture_does_not_define_is_explained(name, value, expected):
    assert expected in str(refusal(name, value).expected)


@pytest.mark.parametrize("name", ["expert_group_count", "expert_group_used_count"])
def test_no_groups_may_be_said_or_left_out(name):
    assert changed(name, 0) == read()


@pytest.mark.parametrize("code", ["i4", "u4", "i8", "i2"])
def test_ratios_may_have_any_integer_type(code):
    assert changed("attention.compress_ratios", np.array([0, 0, 4, 128, 4, 128], code)) == read()


def test_clamps_may_be_doubles():
    assert changed("swiglu_clamp_exp", np.full(6, 10.0)) == read()


def test_entries_beyond_the_last_layer_are_ignored():
    more = {
        key("attention.compress_ratios"): np.array([0, 0, 4, 128, 4, 128, 77], np.int32),
        key("swiglu_clamp_exp"): np.array([10] * 6 + [np.nan], np.float32),
    }
    assert read(**more) == read()


def test_layers_that_predict_further_tokens_are_not_counted():
    more = {
        key("block_count"): 8,
        key("nextn_predict_layers"): 2,
        key("attention.compress_ratios"): np.array([0, 0, 4, 128, 4, 128, 0, 0], np.int32),
        key("swiglu_clamp_exp"): np.full(8, 10.0, np.float32),
    }
    assert read(**more) == read()
