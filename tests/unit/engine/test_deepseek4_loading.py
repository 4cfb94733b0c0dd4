"""Loading a slice of a DeepSeek V4: what must be right, what is none of its business, how much."""

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ds4py.engine.loader import LoadedSlice, load_slice, read_shape
from ds4py.errors import FormatError, GgufError, ModelError
from ds4py.gguf import kinds
from ds4py.gguf.file import GgufFile
from ds4py.layer_range import LayerRange, whole_model
from tools.gguf_writer import TensorSource, save_gguf
from tools.toy_deepseek4 import Sizes, metadata, tensors, toy_deepseek4
from tools.toy_weights import Weights

CPU = torch.device("cpu")
SIZES = Sizes(n_layers=4, n_expert=2, n_used=1, n_vocab=300)  # ratios 0, 0, 4, 128
KEYS = metadata(SIZES)
TABLE = {t.name: replace(t, packed=b"".join(t.pieces())) for t in tensors(SIZES)}
WHOLE = LayerRange(0, 3, has_output=True)
HEAD = [name for name in TABLE if name.startswith("output")]
INSIDE = ["token_embd.weight", *HEAD, *(n for n in TABLE if n.startswith(("blk.2.", "blk.3.")))]
BIAS = "blk.3.exp_probs_b.bias"


def write(folder: Path, *changes: TensorSource, drop=(), **keys) -> Path:
    """A file with some tensors in place of those of the same name, and without others."""
    table = {**TABLE, **{tensor.name: tensor for tensor in changes}}
    kept = [tensor for name, tensor in table.items() if name not in drop]
    more = {f"deepseek4.{key}": value for key, value in keys.items()}
    return save_gguf(folder / "m.gguf", {**KEYS, **more}, kept)[0]


def load(path: Path, layers: LayerRange = WHOLE, **options) -> LoadedSlice:
    with GgufFile.open(path) as file:
        return load_slice(file, layers, CPU, "f32", n_ctx=64, **options)


def taller(name: str) -> TensorSource:
    """The tensor with one row more than it should have."""
    tensor = TABLE[name]
    dims = (*tensor.dims[:-1], tensor.dims[-1] + 1)
    if len(dims) == 1:
        return Weights(0).norm(name, dims[0])
    return blank(name, tensor.type_id, dims)


def retyped(name: str) -> TensorSource:
    """The tensor in a type that is never right for it."""
    tensor = TABLE[name]
    wrong = "F32" if kinds.type_name(tensor.type_id) == "I32" else "I32"
    return blank(name, kinds.type_id(wrong), tensor.dims)


def blank(name: str, type_id: int, dims: tuple[int, ...]) -> TensorSource:
    return TensorSource(name, type_id, dims, bytes(kinds.tensor_bytes(type_id, dims)))


# --- inside the slice


def test_the_toy_loads_as_it_is(tmp_path):
    assert load(write(tmp_path)).slice.has_head


@pytest.mark.parametrize("name", [name for name in INSIDE if name != BIAS])
def test_a_missing_tensor_is_named(tmp_path, name):
    with pytest.raises(GgufError, match=f"the file has no tensor {name};"):
        load(write(tmp_path, drop=[name]))


@pytest.mark.parametrize("name", INSIDE)
def test_a_tensor_of_another_shape_is_named(tmp_path, name):
    tensor = taller(name)
    with pytest.raises(ModelError) as caught:
        load(write(tmp_path, tensor))
    assert caught.value.tensor == f"tensor {name}"
    assert caught.value.got == f"shape {tensor.dims[::-1]}"
    assert caught.value.expected == TABLE[name].dims[::-1]


@pytest.mark.parametrize("name", INSIDE)
def test_a_tensor_of_another_type_is_named(tmp_path, name):
    tensor = retyped(name)
    with pytest.raises(ModelError) as caught:
        load(write(tmp_path, tensor))
    assert caught.value.tensor == f"tensor {name}"
    assert caught.value.got == f"type {kinds.type_name(tensor.type_id)}"
    assert kinds.type_name(TABLE[name].type_id) in str(caught.value.expected).split(" or ")


@pytest.mark.parametrize(
    "name",
    [
        "blk.2.attn_q.weight",
        "blk.3.indexer.proj.weight",  # right in a layer of ratio 4, not in one of 128
        "blk.1.attn_compressor_kv.weight",
        "blk.3.ffn_gate_tid2eid.weight",  # right in a layer that is routed by token id
        "blk.3.attn_norm.bias",
    ],
)
def test_a_weight_that_would_be_ignored_is_named(tmp_path, name):
    with pytest.raises(ModelError, match=f"tensor {name}: got a weight that would be ignored"):
        load(write(tmp_path, Weights(0).norm(name, 32)))


def test_the_router_works_without_a_bias(tmp_path):
    assert load(write(tmp_path, drop=[BIAS])).slice.has_head


def test_a_layer_routed_by_token_id_may_have_a_bias_that_it_does_not_use(tmp_path):
    assert load(write(tmp_path, Weights(0).norm("blk.1.exp_probs_b.bias", 2))).slice.has_head


def test_a_type_that_nobody_can_decode_is_named(tmp_path):
    name = "blk.2.attn_kv.weight"
    strange = TensorSource(name, 99, TABLE[name].dims, bytes(64))
    with pytest.raises(FormatError, match=rf"{name} \(type 99\)"):
        load(write(tmp_path, strange))


def test_everything_is_checked_before_anything_is_loaded(tmp_path):
    calls = []
    with pytest.raises(ModelError, match=r"blk\.3\.ffn_down_exps"):
        load(
            write(tmp_path, retyped("blk.3.ffn_down_exps.weight")),
            progress=lambda *told: calls.append(told),
        )
    assert calls == []


# --- outside the slice

ELSEWHERE = ["token_embd.weight", *HEAD, *(n for n in TABLE if n.startswith("blk.1."))]


@pytest.mark.parametrize("damage", [taller, retyped], ids=["shape", "type"])
def test_damage_outside_the_slice_does_not_matter(tmp_path, damage):
    surplus = Weights(0).norm("blk.1.attn_q.weight", 8)
    path = write(tmp_path, *map(damage, ELSEWHERE), surplus)
    assert not load(path, LayerRange(2, 3)).slice.has_head
    with pytest.raises(ModelError):
        load(path, LayerRange(1, 3))


def test_a_file_may_hold_the_slice_only(tmp_path):
    path = write(tmp_path, drop=[name for name in TABLE if not name.startswith("blk.2.")])
    assert not load(path, LayerRange(2, 2)).slice.has_head
    with pytest.raises(GgufError, match=r"the file has no tensor .*blk\.1\.attn_kv\.weight"):
        load(path, LayerRange(1, 2))


def test_tensors_that_belong_to_no_layer_are_ignored(tmp_path):
    path = write(tmp_path, Weights(0).norm("mtp.0.norm.weight", 8), Weights(0).norm("extra", 8))
    assert load(path).slice.has_head


# --- the output head


@pytest.mark.parametrize("name", HEAD)
def test_a_partial_head_is_refused_where_it_is_owned_or_wanted(tmp_path, name):
    path = write(tmp_path, drop=[name])
    with pytest.raises(GgufError, match=f"the file has no tensor {name};"):
        load(path, LayerRange(3, 3, has_output=True))
    with pytest.raises(GgufError, match=f"the file has no tensor {name};"):
        load(path, LayerRange(0, 1), want_head=True)
    assert not load(path, LayerRange(3, 3)).slice.has_head


def test_a_wanted_head_that_is_not_there_at_all_is_left_out(tmp_path):
    path = write(tmp_path, drop=HEAD)
    assert not load(path, LayerRange(0, 1), want_head=True).slice.has_head


def test_a_wanted_head_is_counted(tmp_path):
    path = write(tmp_path)
    plain, wished = (load(path, LayerRange(1, 1), want_head=want) for want in (False, True))
    assert wished.slice.has_head
    head = sum(TABLE[name].n_bytes for name in HEAD)
    assert wished.weight_bytes == plain.weight_bytes + head


# --- layers that predict further tokens

COUNTED = {
    "block_count": 5,
    "attention.compress_ratios": np.array([0, 0, 4, 128, 0], np.int32),
    "swiglu_clamp_exp": np.full(5, 10.0, np.float32),
}


def test_a_layer_that_is_counted_but_not_stored_is_explained(tmp_path):
    path = write(tmp_path, **COUNTED)
    with pytest.raises(ModelError) as caught:
        load(path, LayerRange(0, 4, has_output=True))
    assert caught.value.tensor == "metadata key deepseek4.block_count"
    assert caught.value.got == "5 layers, but the file has no tensor of layer 4"
    assert "deepseek4.nextn_predict_layers" in caught.value.expected


@pytest.mark.parametrize("stored", [False, True])
def test_a_layer_that_is_said_to_predict_further_tokens_is_left_alone(tmp_path, stored):
    further = [Weights(0).norm("blk.4.nextn.norm.weight", 8)] if stored else []
    path = write(tmp_path, *further, nextn_predict_layers=1, **COUNTED)
    with GgufFile.open(path) as file:
        layers = whole_model(read_shape(file).n_layers)
    assert layers == WHOLE
    assert load(path, layers).weight_bytes == sum(tensor.n_bytes for tensor in TABLE.values())


# --- memory


@pytest.mark.parametrize(
    ("span", "ends"),
    [
        (LayerRange(2, 3), ()),
        (LayerRange(0, 0), ("token_embd",)),
        (LayerRange(3, 3, has_output=True), ("output",)),
        (WHOLE, ("token_embd", "output")),
    ],
    ids=str,
)
def test_the_bytes_of_a_slice_are_those_of_its_tensors(tmp_path, span, ends):
    path = write(tmp_path)
    told: list[tuple[int, int]] = []
    loaded = load(path, span, progress=lambda done, total: told.append((done, total)))
    prefixes = (*ends, *(f"blk.{layer}." for layer in span.indices))
    with GgufFile.open(path) as file:
        expected = sum(t.n_bytes for name, t in file.tensors.items() if name.startswith(prefixes))
    assert loaded.weight_bytes == expected
    assert told[-1] == (expected, expected)


def test_memory_follows_the_slice_and_not_the_file(tmp_path):
    path = toy_deepseek4(tmp_path / "big.gguf", n_layers=8, n_expert=32)
    before = storages()
    loaded = load(path, LayerRange(2, 3))
    held = sum(n for place, n in storages().items() if place not in before)
    assert loaded.weight_bytes < 0.3 * path.stat().st_size
    # more than the packed bytes by the small matrices that are kept in float32
    assert loaded.weight_bytes < held < 1.15 * loaded.weight_bytes


def storages() -> dict[int, int]:
    """Address and bytes of all memory that tensors hold in this process."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
    memory = [tensor.untyped_storage() for tensor in found]
    return {storage.data_ptr(): storage.nbytes() for storage in memory}


# --- what only the values tell


@pytest.mark.parametrize("expert", [-1, 2])
def test_a_token_that_is_sent_to_an_expert_that_does_not_exist_is_refused(tmp_path, expert):
    name = "blk.2.ffn_gate_tid2eid.weight"
    table = np.zeros((300, 1), np.int32)
    table[299] = expert
    path = write(tmp_path, replace(TABLE[name], packed=table.tobytes()))
    with pytest.raises(ModelError, match=f"tensor {name}: got expert {expert}, expected 0 to 1"):
        load(path, LayerRange(2, 2))
    assert load(path, LayerRange(1, 1)).weight_bytes


def test_gate_and_up_of_different_types_are_refused(tmp_path):
    name = "blk.2.ffn_up_exps.weight"
    path = write(tmp_path, blank(name, kinds.type_id("Q8_0"), TABLE[name].dims))
    with pytest.raises(ModelError, match=f"tensor {name}: got type Q8_0, expected IQ2_XXS, as"):
        load(path, LayerRange(2, 2))
    assert load(path, LayerRange(1, 1)).weight_bytes
