"""The llama architecture: equal to a plain reference in every variant; strict about its file."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ds4py.config import EngineConfig
from ds4py.contracts import ForwardRequest, OutputKind, SessionId
from ds4py.engine import open_runner
from ds4py.errors import GgufError, ModelError
from ds4py.gguf.file import GgufFile
from ds4py.layer_range import LayerSpec
from ds4py.models.llama import read_shape
from tests.support.toys import packed, toy_llama
from tests.unit.models.llama_reference import ReferenceLlama, rewritten

TOKENS = (5, 80, 7, 7, 200, 31, 100)
SESSION = SessionId(1)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def logits(path: Path, precision: str = "f32", tokens: tuple[int, ...] = TOKENS) -> np.ndarray:
    runner = open_runner(
        EngineConfig(model=path, precision=precision, device="cpu", threads=1, n_slots=1)
    )
    work = ForwardRequest(
        session=SESSION, tokens=tokens, pos0=0, hidden=None, output_kind=OutputKind.LOGITS
    )
    (output,) = runner.run([work])
    return output.logits


def assert_equals_reference(path: Path) -> None:
    got, expected = logits(path), ReferenceLlama(path).logits(TOKENS)
    assert np.abs(got - expected).max() < 2e-5 * np.ptp(expected)


def biases(rng: np.random.Generator, layer: int, *names: tuple[str, int]):
    return [packed(f"blk.{layer}.{name}.bias", rng.normal(0, 1, n)) for name, n in names]


ALL_BIASES = (
    ("attn_q", 64), ("attn_k", 32), ("attn_v", 32), ("attn_output", 64),
    ("ffn_gate", 128), ("ffn_up", 128), ("ffn_down", 64),
)  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": False},
        {"quant": "Q4_1"},
        {"quant": "Q8_0", "tied": False},
        {"quant": "F16", "n_head_kv": 4},
        {"n_head_kv": 1},
    ],
    ids=str,
)
def test_logits_equal_the_plain_reference(tmp_path, options):
    assert_equals_reference(toy_llama(tmp_path / "m.gguf", n_layers=2, **options))


@pytest.mark.parametrize(
    "keys",
    [
        {"llama.rope.freq_base": 500.0},
        {"llama.rope.dimension_count": 8},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0},
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 64,
        },
        {"llama.rope.dimension_count": None},
        {"llama.vocab_size": None},
    ],
    ids=str,
)
def test_rotary_variants_equal_the_plain_reference(tmp_path, keys):
    path = toy_llama(tmp_path / "m.gguf", n_layers=2)
    assert_equals_reference(rewritten(path, keys=keys))


def test_old_linear_scaling_means_the_same_as_the_new_key(tmp_path):
    path = toy_llama(tmp_path / "m.gguf", n_layers=1)
    old = logits(rewritten(path, keys={"llama.rope.scale_linear": 4.0}))
    new_keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    new = logits(rewritten(path, keys=new_keys))
    assert np.array_equal(old, new)
    assert not np.array_equal(old, logits(path))


def test_rope_factors_from_the_file_divide_the_frequencies(tmp_path):
    path = toy_llama(tmp_path / "m.gguf", n_layers=2)
    factors = packed("rope_freqs.weight", np.linspace(1, 8, 8))
    assert_equals_reference(rewritten(path, add=[factors]))


def test_every_bias_is_added(tmp_path):
    path = toy_llama(tmp_path / "m.gguf", n_layers=2)
    rng = np.random.default_rng(3)
    assert_equals_reference(rewritten(path, add=biases(rng, 1, *ALL_BIASES)))


def test_a_bias_of_one_of_the_fused_matrices_leaves_the_others_alone(tmp_path):
    path = toy_llama(tmp_path / "m.gguf", n_layers=2)
    rng = np.random.default_rng(3)
    some = biases(rng, 0, ("attn_k", 32), ("ffn_up", 128))
    assert_equals_reference(rewritten(path, add=some))


def test_matrices_of_one_layer_may_have_different_formats(tmp_path):
    path = toy_llama(tmp_path / "m.gguf", n_layers=2, quant="Q4_1")
    rng = np.random.default_rng(4)
    others = [
        packed("blk.0.attn_v.weight", rng.normal(0, 0.1, (32, 64)), "Q8_0"),
        packed("blk.1.ffn_up.weight", rng.normal(0, 0.1, (128, 64)), "F16"),
    ]
    assert_equals_reference(rewritten(path, add=others))


def test_head_width_may_differ_from_width_by_heads(tmp_path):
    path = toy_llama(tmp_path / "m.gguf", n_layers=1, n_embd=64, n_head=2, n_head_kv=2)
    rng = np.random.default_rng(5)
    narrow = [
        packed(f"blk.0.{name}.weight", rng.normal(0, 0.2, shape))
        for name, shape in {
            "attn_q": (32, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 32),
        }.items()
    ]  # fmt: skip
    keys = {
        "llama.attention.key_length": 16,
        "llama.attention.value_length": 16,
        "llama.rope.dimension_count": 16,
    }
    assert_equals_reference(rewritten(path, keys=keys, add=narrow))


@pytest.mark.parametrize("quant", ["F32", "Q4_1", "Q8_0", "Q5_0", "Q5_1"])
def test_bf16_logits_are_close_to_the_f32_ones(tmp_path, quant):
    path = toy_llama(tmp_path / "m.gguf", quant=quant)
    exact, fast = logits(path), logits(path, "bf16")
    # random weights amplify: real models stay within 2 % (tests/conformance/test_smollm2.py)
    assert np.abs(exact - fast).max() < 0.04 * np.ptp(exact)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_many_tokens_at_once_equal_one_by_one(tmp_path, precision):
    """More than one block of queries: masks, blocks and the one-token path all take part."""
    path = toy_llama(tmp_path / "m.gguf", n_ctx=600, quant="Q4_1")
    config = EngineConfig(model=path, precision=precision, device="cpu", threads=1, n_slots=2)
    runner = open_runner(config)
    tokens = tuple(int(t) for t in np.random.default_rng(0).integers(0, 279, 300))
    spans = [tokens, *[(t,) for t in tokens[:20]], tokens[20:27], tokens[27:]]
    at, results = 0, []
    for number, span in enumerate(spans):
        session = SessionId(1 if number == 0 else 2)
        work = ForwardRequest(
            session=session,
            tokens=span,
            pos0=0 if number <= 1 else at,
            hidden=None,
            output_kind=OutputKind.LOGITS,
        )
        at = work.pos0 + len(span)
        results.append(runner.run([work])[0].logits)
    tolerance = 2e-5 if precision == "f32" else 0.03
    assert np.abs(results[0] - results[-1]).max() < tolerance * np.ptp(results[0])


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("llama.block_count", None, "expected an integer"),
        ("llama.block_count", 0, "expected 1 to 1024"),
        ("llama.embedding_length", "64", "expected an integer"),
        ("llama.attention.head_count", 5, "expected a divisor of 64"),
        ("llama.attention.head_count_kv", 3, "expected a divisor of 4"),
        ("llama.attention.head_count_kv", 0, "expected a divisor of 4"),
        ("llama.attention.layer_norm_rms_epsilon", None, "expected a number"),
        ("llama.expert_count", -8, "expected 1 to 65536"),
        ("llama.attention.value_length", 8, "expected 16"),
        ("llama.attention.key_length", 15, "expected an even number"),
        ("llama.rope.dimension_count", 18, "expected an even number from 2 to 16"),
        ("llama.rope.dimension_count", 7, "expected an even number from 2 to 16"),
        ("llama.rope.scaling.type", "longrope", "expected none or linear or yarn"),
        ("llama.rope.freq_base", -1.0, "expected a positive number"),
        ("llama.rope.scaling.factor", 0.0, "expected a positive number"),
    ],
)
def test_impossible_metadata_is_refused_by_key_got_and_expected(tmp_path, key, value, expected):
    path = rewritten(toy_llama(tmp_path / "m.gguf", n_layers=1), keys={key: value})
    with GgufFile.open(path) as file, pytest.raises(ModelError) as caught:
        read_shape(file.metadata)
    assert key in str(caught.value)
    assert expected in str(caught.value)


def test_a_missing_tensor_is_named_before_anything_is_loaded(tmp_path):
    path = toy_llama(tmp_path / "m.gguf")
    path = rewritten(path, drop=["blk.2.ffn_up.weight", "output_norm.weight"])
    loaded = []
    with pytest.raises(GgufError, match=r"blk\.2\.ffn_up\.weight") as caught:
        open_runner(
            EngineConfig(threads=1, model=path), progress=lambda done, total: loaded.append(done)
        )
    assert "output_norm.weight" in str(caught.value)
    assert loaded == []


def test_a_missing_tensor_outside_the_slice_does_not_matter(tmp_path):
    path = toy_llama(tmp_path / "m.gguf")
    path = rewritten(path, drop=["blk.2.ffn_up.weight", "token_embd.weight"])
    runner = open_runner(EngineConfig(threads=1, model=path), LayerSpec.parse("1:1"))
    assert str(runner.layers) == "1-1"


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    wrong = packed("blk.1.attn_k.weight", np.zeros((64, 64)))
    path = rewritten(toy_llama(tmp_path / "m.gguf"), add=[wrong])
    with pytest.raises(ModelError) as caught:
        open_runner(EngineConfig(threads=1, model=path))
    assert str(caught.value) == (
        "tensor blk.1.attn_k.weight: got shape (64, 64), expected (32, 64)"
    )


@pytest.mark.parametrize("name", ["blk.1.attn_q_norm.weight", "blk.1.ffn_up.scale"])
def test_a_surplus_tensor_inside_the_slice_is_refused_by_name(tmp_path, name):
    path = rewritten(toy_llama(tmp_path / "m.gguf"), add=[packed(name, np.ones(16))])
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        open_runner(EngineConfig(threads=1, model=path))
    open_runner(EngineConfig(threads=1, model=path), LayerSpec.parse("2:3"))


def test_the_canonical_text_names_every_constant(tmp_path):
    with GgufFile.open(toy_llama(tmp_path / "m.gguf")) as file:
        text = read_shape(file.metadata).canonical()
    assert text.startswith("architecture=llama n_layers=4 n_vocab=279 n_embd=64 n_head=4 ")
    assert "rope.base=10000.0" in text
