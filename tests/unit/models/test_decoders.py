"""Every family of plain blocks: equal to the readable reference, however it is cut and batched."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from ds4py.config import EngineConfig
from ds4py.contracts import ForwardRequest, OutputKind, SessionId
from ds4py.engine import LocalRunner, open_runner
from ds4py.engine.loader import read_shape
from ds4py.errors import ModelError
from ds4py.gguf.file import GgufFile
from ds4py.layer_range import LayerSpec
from ds4py.layers.cpu_steps import CpuLayers
from tests.unit.models.decoder_reference import ReferenceDecoder
from tests.unit.models.llama_reference import rewritten
from tools import toy_decoder
from tools.gguf_writer import save_gguf
from tools.toy_decoder import Sizes

SMALL = Sizes(
    n_layers=3, n_embd=64, n_vocab=400, n_head=4, n_head_kv=2, d_head=32, n_ff=96, n_ctx=256,
    window=9, period=2, n_ff_expert=64, n_ff_shared=32,
)  # fmt: skip
"""Heads that are wider than `n_embd / n_head`, a window shorter than the prompt."""

EXPERTS = {"n_expert": 6, "n_used": 2}
FAMILIES = {
    name: replace(SMALL, architecture=name, **(EXPERTS if name.endswith("moe") else {}))
    for name in toy_decoder.FAMILIES
} | {"mixtral": replace(SMALL, architecture="llama", **EXPERTS)}
DENSE = [name for name, sizes in FAMILIES.items() if not sizes.n_expert]
TOKENS = tuple(int(token) for token in np.random.default_rng(2).integers(3, 390, 40))
CHUNKS = {"whole": (40,), "one by one": (1,) * 40, "any": (1, 8, 9, 1, 1, 10, 3, 7)}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("toys")


def made(folder: Path, family: str, kind: str = "Q8_0", **changes: object) -> Path:
    sizes = replace(FAMILIES[family], **changes)
    path = folder / f"{family}-{kind}-{len(changes)}.gguf"
    if not path.exists():
        save_gguf(path, toy_decoder.metadata(sizes), toy_decoder.tensors(sizes, kind))
    return path


@pytest.fixture(params=FAMILIES)
def toy(folder, request) -> Path:
    return made(folder, request.param)


REFERENCES: dict[Path, np.ndarray] = {}


def reference(path: Path) -> np.ndarray:
    """Logits after every token, `[40, V]`, computed once."""
    if path not in REFERENCES:
        REFERENCES[path] = ReferenceDecoder.of(path).logits(TOKENS)
    return REFERENCES[path]


def opened(path: Path, precision: str = "f32", layers: str | None = None) -> LocalRunner:
    config = EngineConfig(
        model=path, precision=precision, device="cpu", threads=1, n_slots=4, n_ctx=64
    )
    return open_runner(config, LayerSpec.parse(layers) if layers else None)


def run(stages: Sequence[LocalRunner], session: int, start: int, end: int) -> np.ndarray:
    """Evaluate some of the tokens on a chain of stages; return the last one's logits."""
    hidden = None
    for stage in stages:
        work = ForwardRequest(
            session=SessionId(session),
            tokens=TOKENS[start:end],
            pos0=start,
            hidden=hidden,
            reset=start == 0,
            output_kind=OutputKind.LOGITS if stage is stages[-1] else OutputKind.HIDDEN,
        )
        (answer,) = stage.run([work])
        assert not isinstance(answer, Exception), answer
        hidden = answer.hidden
    assert answer.logits is not None
    return answer.logits


def in_chunks(stages: Sequence[LocalRunner], lengths: Sequence[int], session: int = 1):
    """Yield (tokens so far, logits) after every chunk."""
    for start, end in pairwise(np.cumsum((0, *lengths)).tolist()):
        yield end, run(stages, session, start, end)


def distance(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.ptp(expected))


@pytest.mark.parametrize("way", CHUNKS)
def test_logits_equal_the_plain_reference_whatever_the_chunks(toy, way):
    runner = opened(toy)
    for end, logits in in_chunks([runner], CHUNKS[way]):
        assert distance(logits, reference(toy)[end - 1]) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_super_blocks_change_places_as_a_whole(folder, family):
    """Q4_K, whose blocks span several heads' worth of columns."""
    path = made(folder, family, "Q4_K", n_embd=256, n_ff=256, n_ff_expert=256, d_head=64,
                n_ff_shared=256)  # fmt: skip
    (logits,) = (run([opened(path)], 1, 0, 40),)
    assert distance(logits, reference(path)[-1]) < 1e-5


@pytest.mark.parametrize("way", CHUNKS)
@pytest.mark.parametrize("family", DENSE)
def test_fast_products_are_close_to_the_reference(folder, family, way):
    path = made(folder, family)
    for end, logits in in_chunks([opened(path, "bf16")], CHUNKS[way]):
        assert distance(logits, reference(path)[end - 1]) < 0.03


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_every_cut_gives_the_same_bits(toy, precision):
    whole = [logits for _, logits in in_chunks([opened(toy, precision)], CHUNKS["any"])]
    for cut in ("0:0 1:output", "0:1 2:output", "0:0 1:1 2:output"):
        stages = [opened(toy, precision, layers) for layers in cut.split()]
        for (_, got), want in zip(in_chunks(stages, CHUNKS["any"]), whole, strict=True):
            assert np.array_equal(got, want)


def steps_of(runner: LocalRunner, works: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """Evaluate one token of each of some sessions as one batch: (session, position)."""
    batch = [
        ForwardRequest(
            session=SessionId(session), tokens=TOKENS[at : at + 1], pos0=at, hidden=None,
            output_kind=OutputKind.LOGITS,
        )
        for session, at in works
    ]  # fmt: skip
    return [answer.logits for answer in runner.run(batch)]


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_session_in_a_batch_is_as_near_as_alone(toy, precision):
    together, alone = opened(toy, precision), opened(toy, precision)
    places = [(1, 20), (2, 1), (3, 33)]
    for runner in (together, alone):
        for session, at in places:
            run([runner], session, 0, at)
    for (session, at), got in zip(places, steps_of(together, places), strict=True):
        want = run([alone], session, at, at + 1)
        if precision == "bf16" and "moe" not in toy.name and "mixtral" not in toy.name:
            assert np.array_equal(got, want)
        else:  # torch's product of a router rounds otherwise for several rows
            assert distance(got, want) < (1e-5 if precision == "f32" else 1e-3)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_rewound_session_goes_on_as_if_the_rest_had_never_been(toy, precision):
    runner = opened(toy, precision)
    run([runner], 1, 0, 20)
    want = run([runner], 1, 20, 21)
    run([runner], 1, 21, 40)
    runner.rewind(SessionId(1), 20)
    assert np.array_equal(run([runner], 1, 20, 21), want)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_saved_session_goes_on_elsewhere(toy, precision):
    here, there = opened(toy, precision), opened(toy, precision)
    run([here], 1, 0, 30)
    payload = memoryview(b"".join(bytes(part) for part in here.save_cache(SessionId(1))))
    there.load_cache(SessionId(3), 30, payload)
    assert np.array_equal(run([there], 3, 30, 31), run([here], 1, 30, 31))


def test_single_tokens_run_on_the_kernels_of_the_cpu(toy, monkeypatch):
    """Nothing in these families is left to torch, or the model would be several times slower."""
    rows = []
    real = CpuLayers.run

    def counted(self, hidden, segments) -> None:
        rows.append(hidden.shape[0])
        real(self, hidden, segments)

    monkeypatch.setattr(CpuLayers, "run", counted)
    for _ in in_chunks([opened(toy, "bf16")], (5, 1, 1)):
        pass
    assert rows == [1, 1]


# --- what files say


def shape_of(path: Path):
    with GgufFile.open(path) as file:
        return read_shape(file)


def test_every_family_has_an_identity_of_its_own(folder):
    texts = {name: shape_of(made(folder, name)).canonical() for name in FAMILIES}
    assert len(set(texts.values())) == len(texts)
    assert "attention.halves=True" in texts["qwen2"]
    assert "attention.qk_norm=head" in texts["qwen3"]
    assert "attention.window=9,0,9" in texts["gemma3"]
    assert "feed_forward.n_expert=6" in texts["qwen3moe"]


def test_rows_of_the_embedding_for_no_token_are_never_an_answer(folder):
    path = made(folder, "gemma3")
    (want,) = (run([opened(path)], 1, 0, 40),)
    fewer = rewritten(path, keys={"gemma3.vocab_size": 390})
    assert np.array_equal(run([opened(fewer)], 1, 0, 40), want[:390])
    more = rewritten(path, keys={"gemma3.vocab_size": 410})
    with pytest.raises(ModelError, match=r"token_embd.weight: got shape \(400, 64\)"):
        opened(more)


def test_layers_that_predict_further_tokens_are_none_of_the_model(folder):
    path = rewritten(made(folder, "qwen3"), keys={"qwen3.nextn_predict_layers": 1})
    assert shape_of(path).n_layers == 2


def test_gemma_without_a_window_sees_everything(folder):
    path = rewritten(made(folder, "gemma3"), keys={"gemma3.attention.sliding_window": None})
    assert {block.attention.window for block in shape_of(path).blocks} == {0}
    assert (
        distance(run([opened(path)], 1, 0, 40), ReferenceDecoder.of(path).logits(TOKENS)[-1]) < 1e-5
    )


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [(3, [9, 9, 0]), (0, [9, 9, 9]), (np.array([False, True, False]), [0, 9, 0])],
    ids=str,
)
def test_the_file_may_say_which_layers_have_a_window(folder, pattern, windows):
    keys = {"gemma3.attention.sliding_window_pattern": pattern}
    path = rewritten(made(folder, "gemma3"), keys=keys)
    assert [block.attention.window for block in shape_of(path).blocks] == windows


@pytest.mark.parametrize(
    ("family", "key", "value", "expected"),
    [
        ("qwen3moe", "expert_used_count", 7, "1 to 6"),
        ("qwen3moe", "expert_used_count", None, "an integer"),
        ("qwen3moe", "expert_feed_forward_length", None, "an integer"),
        ("qwen2moe", "expert_shared_feed_forward_length", None, "an integer"),
        ("gemma2", "attn_logit_softcapping", -1.0, "at least 0"),
        ("gemma3", "rope.freq_base_swa", 0.0, "a positive number"),
        ("gemma3", "attention.sliding_window_pattern", np.array([True]), "3 booleans"),
        ("qwen3", "nextn_predict_layers", 3, "0 to 2"),
    ],
)
def test_impossible_metadata_is_refused_by_key(folder, family, key, value, expected):
    path = rewritten(made(folder, family), keys={f"{family}.{key}": value})
    with pytest.raises(ModelError) as caught:
        shape_of(path)
    assert f"{family}.{key}" in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2", "blk.1.attn_k.bias"),
        ("qwen3", "blk.1.attn_q_norm.weight"),
        ("gemma3", "blk.1.post_ffw_norm.weight"),
        ("qwen3moe", "blk.1.ffn_gate_inp.weight"),
        ("qwen2moe", "blk.1.ffn_gate_inp_shexp.weight"),
    ],
)
def test_a_tensor_that_the_family_needs_is_missed_by_name(folder, family, name):
    path = rewritten(made(folder, family), drop=[name])
    with pytest.raises(Exception, match=name.replace(".", r"\.")):
        opened(path)
