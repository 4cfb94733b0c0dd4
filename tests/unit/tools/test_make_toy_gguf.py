"""Toy models: the same bytes again, in little memory, and they compute and talk."""

import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from ds4py.config import EngineConfig
from ds4py.contracts import ForwardOutput, ForwardRequest, OutputKind, SessionId
from ds4py.engine import open_runner
from ds4py.errors import ConfigError
from ds4py.gguf import kinds
from ds4py.gguf.file import GgufFile
from ds4py.text.tokenizer.tokenizer import load_tokenizer
from ds4py.text.tokenizer.vocabulary import TokenType
from tools import toy_llama
from tools.gguf_writer import save_gguf
from tools.run_make_toy_gguf import PRESETS, main
from tools.toy_deepseek4 import (
    BACK,
    BENCH,
    FRONT,
    MIXED,
    MIXES,
    Sizes,
    expert_kinds,
    metadata,
    tensors,
    toy_deepseek4,
)
from tools.toy_vocabulary import vocabulary
from tools.toy_weights import Weights

WIDE = {"n_embd": 320, "n_head": 6, "d_head": 96, "out_groups": 3, "n_expert": 5, "n_used": 3}
SMALL = {"n_layers": 4, "n_expert": 2, "n_used": 1, "n_vocab": 300}


def values(source) -> np.ndarray:
    """What a tensor's bytes mean, row-major, decoded by the `gguf` package."""
    raw = np.frombuffer(b"".join(source.pieces()), np.uint8)
    name = kinds.type_name(source.type_id)
    if name == "I32":
        return raw.view("<i4").reshape(source.dims[::-1])
    decoded = dequantize(raw.reshape(-1, kinds.block_bytes(source.type_id)), kind_of(name))
    return decoded.astype(np.float64).reshape(source.dims[::-1])


def kind_of(name: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[name]


def next_logits(path: Path, tokens) -> np.ndarray:
    """What a whole model says after some tokens."""
    runner = open_runner(EngineConfig(model=path, threads=1, precision="f32", n_ctx=64))
    work = ForwardRequest(
        session=SessionId(1),
        tokens=tuple(tokens),
        pos0=0,
        hidden=None,
        output_kind=OutputKind.LOGITS,
    )
    (answer,) = runner.run([work])
    runner.close()
    assert isinstance(answer, ForwardOutput), answer
    return answer.logits


# --- weights


@pytest.mark.parametrize("kind", ["IQ2_XXS", "Q2_K", "Q4_K", "Q8_0", "F16", "F32", "Q5_1"])
def test_weights_have_the_spread_that_was_asked_for(kind):
    found = values(Weights(5).normal("x", kind, 4, 64, 512, std=0.03))
    assert found.std() == pytest.approx(0.03, rel=0.03)
    assert found.mean() == pytest.approx(0, abs=0.0005)
    by_row = found.reshape(256, 512).std(1)
    assert by_row.min() > 0.015
    assert by_row.max() < 0.06


def test_a_matrix_keeps_the_size_of_its_inputs_and_a_norm_is_about_one():
    matrix = values(Weights(0).matrix("m", "Q4_K", 200, 1024))
    product = matrix @ np.random.default_rng(1).standard_normal(1024)
    assert product.std() == pytest.approx(1, rel=0.2)
    norm = values(Weights(0).norm("n", 4096))
    assert norm.mean() == pytest.approx(1, abs=0.02)
    assert norm.std() == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize(("n_choices", "n_columns"), [(1, 1), (2, 2), (7, 7), (12, 5), (256, 6)])
def test_choices_are_in_range_and_do_not_repeat_inside_a_row(n_choices, n_columns):
    rows = values(Weights(3).choices("t", 2000, n_columns, n_choices))
    assert rows.shape == (2000, n_columns)
    assert all(len(set(row)) == n_columns for row in rows.tolist())
    assert set(rows.flat) == set(range(n_choices))


def test_rows_that_are_no_whole_blocks_are_refused():
    with pytest.raises(
        ConfigError, match=r"tensor a\.x: got rows of 100 .* multiple of 256 .*Q2_K"
    ):
        Weights(0).below("a.").matrix("x", "Q2_K", 3, 100)


@pytest.mark.parametrize("kind", ["IQ2_XXS", "F16"])
def test_a_big_tensor_is_never_in_memory_as_a_whole(kind):
    source = Weights(0).matrix("x", kind, 64, 1024, 2048 if kind == "IQ2_XXS" else 256)
    tracemalloc.start()
    total = sum(map(len, source.pieces()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == source.n_bytes > 30e6
    assert peak < 0.6 * total


# --- vocabulary


def test_every_word_of_a_vocabulary_is_what_its_own_spelling_is_cut_into():
    tokenizer = load_tokenizer(metadata(Sizes(n_vocab=6000)))
    words = range(len(FRONT) + 256, 6000 - len(BACK))
    for token in words:
        text = tokenizer.token_bytes(token).decode()
        assert tokenizer.encode(text, special=False) == [token]
    assert len(tokenizer.encode("bada kefo niru", special=False)) == 4  # ba, da, " kefo", " niru"


def test_the_seven_tokens_that_ds4_needs_are_found_by_their_spelling():
    tokenizer = load_tokenizer(metadata(Sizes(n_vocab=300)))
    spellings = [spelling for spelling, _ in (*FRONT[:2], *BACK)]
    ids = [0, 1, 295, 296, 297, 298, 299]
    assert [tokenizer.token_bytes(id_, special=True).decode() for id_ in ids] == spellings
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, {1})


def test_any_text_comes_back(tmp_path):
    tokenizer = load_tokenizer(metadata(Sizes()))
    text = "Über 12 Wörter,\n\tbada  kefo 你好 😀"
    assert tokenizer.decode(tokenizer.encode(text, special=False)).decode() == text


def test_a_vocabulary_without_room_for_all_bytes_is_refused():
    with pytest.raises(ConfigError, match="got 256 tokens, expected 257 or more"):
        vocabulary(256, "gpt-2", [("<s>", TokenType.CONTROL)])


# --- models


def test_the_same_arguments_make_the_same_bytes(tmp_path):
    one, two, other = (
        toy_deepseek4(tmp_path / f"{k}.gguf", seed=seed, **SMALL).read_bytes()
        for k, seed in enumerate((3, 3, 4))
    )
    assert one == two != other


def test_a_tensor_keeps_its_bytes_whatever_else_is_in_the_file():
    small, deep = ({t.name: t for t in tensors(Sizes(n_layers=n))} for n in (3, 6))
    for name in small:
        assert b"".join(small[name].pieces()) == b"".join(deep[name].pieces())


def test_no_two_tensors_have_the_same_bytes():
    alike = [t for t in tensors(Sizes()) if t.name.endswith(("ffn_gate_exps.weight", "q_b.weight"))]
    assert len({b"".join(t.pieces()) for t in alike}) == len(alike)


@pytest.mark.parametrize("mix", [*MIXES, MIXED])
def test_a_model_of_any_mix_computes_well_scaled_logits(tmp_path, mix):
    path = toy_deepseek4(tmp_path / "m.gguf", mix=mix, n_vocab=300)
    logits = next_logits(path, range(10, 60))
    assert np.isfinite(logits).all()
    assert 1.5 < logits.std() < 6


def test_a_model_need_not_have_every_kind_of_layer(tmp_path):
    path = toy_deepseek4(
        tmp_path / "m.gguf", mix="q8", n_layers=2, ratios=(4,), n_hash_layers=0, n_ff=96, **WIDE
    )
    assert np.isfinite(next_logits(path, range(20))).all()


def test_the_types_of_the_experts_follow_the_mix():
    for layer, kinds_ in enumerate([("IQ2_XXS", "Q2_K")] * 37 + [("Q4_K", "Q4_K")] * 6):
        assert expert_kinds(MIXED, layer, 43) == kinds_
    assert expert_kinds(MIXED, 0, 1) == expert_kinds("q4", 0, 1) == ("Q4_K", "Q4_K")


def test_ratios_go_on_by_turns():
    assert [Sizes().ratio(layer) for layer in range(7)] == [0, 0, 4, 128, 4, 128, 4]
    assert [Sizes(ratios=(128, 4)).ratio(layer) for layer in range(4)] == [128, 4, 128, 4]
    assert [Sizes(ratios=(4,)).ratio(layer) for layer in range(3)] == [4, 4, 4]


def test_most_bytes_of_the_bench_model_are_experts():
    sizes = {t.name: t.n_bytes for t in tensors(BENCH)}
    experts = sum(n for name, n in sizes.items() if name.endswith("_exps.weight"))
    assert 280e6 < sum(sizes.values()) < 330e6
    assert experts > 0.7 * sum(sizes.values())


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_a_llama_computes_too(tmp_path, kind):
    sizes = toy_llama.Sizes(n_layers=2, n_embd=256, n_vocab=300, n_head=4, n_head_kv=2, n_ff=512)
    keys = toy_llama.metadata(replace(sizes, n_ctx=64))
    (path,) = save_gguf(tmp_path / "m.gguf", keys, toy_llama.tensors(sizes, kind))
    logits = next_logits(path, range(5, 30))
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 5


# --- the command


def test_the_command_writes_what_the_library_writes(tmp_path, capsys):
    path = tmp_path / "out.gguf"
    options = [f"--set={key}={value}" for key, value in SMALL.items() if key != "n_layers"]
    main([*options, "--layers", "4", "--mix", "mixed", "--seed", "8", "-o", str(path)])
    said = capsys.readouterr().out
    same = toy_deepseek4(tmp_path / "same.gguf", mix="mixed", seed=8, **SMALL)
    assert path.read_bytes() == same.read_bytes()
    assert said == (
        f"{path}: {path.stat().st_size / 1e6:.1f} MB, 4 layers, "
        f"{len(tensors(Sizes(**SMALL)))} tensors, mix mixed, seed 8\n"
    )


def test_the_command_writes_a_llama_of_chosen_sizes(tmp_path, capsys):
    path = tmp_path / "out.gguf"
    changes = ("n_embd=256", "n_ff=256", "n_head=4", "n_head_kv=4", "n_vocab=300")
    main(
        ["--preset", "llama-1b", "--layers", "1", "-o", str(path)]
        + [f"--set={change}" for change in changes]
    )
    assert "1 layers, 11 tensors, mix Q4_K" in capsys.readouterr().out
    with GgufFile.open(path) as file:
        assert file.metadata["general.architecture"] == "llama"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mix", "Q4_K"], "--mix: got Q4_K, expected one of q2, q4, q8, f16, mixed"),
        (["--preset", "llama-1b", "--mix", "q2"], "--mix: got q2, expected one of Q4_K"),
        (["--set", "n_heads=3"], "--set: got n_heads, expected one of n_layers"),
        (["--layers", "0"], "n_layers: got 0, expected 1 or more"),
        (["--set", "n_ff=100"], "got rows of 100 values"),
    ],
)
def test_what_can_not_be_made_is_explained_and_leaves_nothing(tmp_path, options, message):
    with pytest.raises(SystemExit) as stopped:
        main([*options, "-o", str(tmp_path / "out.gguf")])
    assert message in str(stopped.value.code)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tools.toy_weights._random_blocks", stop)
    with pytest.raises(KeyboardInterrupt):
        main(["-o", str(tmp_path / "out.gguf")])
    assert list(tmp_path.iterdir()) == []


def test_presets_are_plans_of_what_they_say():
    assert PRESETS["tiny"] == Sizes()
    flash = asdict(PRESETS["flash-slice"])
    assert (flash["n_layers"], flash["n_embd"], flash["n_expert"]) == (4, 4096, 256)
