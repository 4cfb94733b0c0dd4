"""What the readable references compute for one long text, kept for all rows of the matrix.

Owns: the files of the matrix, the text, states and logits at every position, and which positions
decide something by a hair. Refuses to know: ds4py's models. Invariant: nothing of the product's
arithmetic is used; a reference knows one token at a time and no batches.

Experts, and DeepSeek V4's index rows, are chosen by score. Where the last that is chosen and the
first that is not are nearly equal, another rounding chooses otherwise, and the state differs as a
whole. Such positions are marked, and what they give is not judged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests import golden
from tests.unit.models.decoder_reference import ReferenceDecoder
from tests.unit.models.deepseek4_reference import Reference
from tests.unit.models.llama_reference import ReferenceLlama
from tools import toy_decoder, toy_llama
from tools.gguf_writer import TensorSource, save_gguf
from tools.toy_weights import Weights

F32 = npt.NDArray[np.float32]

N_TOKENS = 300
FOLDER = Path(__file__).parents[2] / "build" / "numerics"


@dataclass(frozen=True)
class Truth:
    """One text through one file.

    Args:
        tokens: Its ids, `N`.
        before: State before every layer, `[L, N, W]`.
        after: State after it.
        logits: `[N, V]`.
        gaps: By how much the nearest choice of a layer was decided, as a part of the spread of its
            scores, `[L, N]`; infinity where nothing is chosen.
    """

    tokens: Sequence[int]
    before: F32
    after: F32
    logits: F32
    gaps: npt.NDArray[np.float64]

    @property
    def n_layers(self) -> int:
        """Layers of the file."""
        return len(self.before)


SIZES = toy_llama.Sizes(
    n_layers=3, n_embd=256, n_vocab=512, n_head=4, n_head_kv=2, n_ff=512, n_ctx=512
)
"""Of the llamas of the matrix. Their matrices have the format that names the file; of two formats
the first is that of the gated layers."""

FAMILIES = {
    name: toy_decoder.Sizes(
        architecture=name, n_layers=3, n_embd=256, n_vocab=512, n_head=4, n_head_kv=2, d_head=32,
        n_ff=512, n_ctx=512, window=40, period=2, n_ff_expert=128, n_ff_shared=128,
        **({"n_expert": 16, "n_used": 4} if name.endswith("moe") else {}),
    )
    for name in toy_decoder.FAMILIES if name != "llama"
}  # fmt: skip
"""Of the other plain blocks: heads that are not as wide as the model makes them, windows."""

FILES = {
    "deepseek4": ("tiny-b", "tiny-a"),
    "llama": ("Q4_1", "Q4_K+Q6_K", "F16"),
    **{name: (f"{name}-Q4_1",) for name in FAMILIES},
}
"""Of each architecture: the first for every row of the matrix, the others for some."""


def path_of(file: str) -> Path:
    """Return a file of the matrix, made if need be."""
    if file.startswith("tiny"):
        return golden.path(f"{file}.gguf")
    path = FOLDER / f"{file}.gguf"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        family, _, kind = file.rpartition("-")
        if family:
            sizes = FAMILIES[family]
            keys = toy_decoder.metadata(sizes)
            spread = sizes.n_embd**-0.5 if sizes.is_gemma else 1.0  # gemma multiplies by sqrt(W)
            save_gguf(fresh, keys, toy_decoder.tensors(sizes, kind, embedding=spread))
        else:
            save_gguf(fresh, toy_llama.metadata(SIZES), _tensors(file))
        fresh.rename(path)  # another process may make it too
    return path


def _tensors(file: str) -> list[TensorSource]:
    """Return the tensors of a llama, of the format that names it, or of two."""
    main, _, other = file.partition("+")
    kinds = {True: toy_llama.tensors(SIZES, main), False: toy_llama.tensors(SIZES, other or main)}
    found = [kinds["ffn_" in one.name or not other][at] for at, one in enumerate(kinds[True])]
    # an embedding as large as what a layer adds, so that no state is the result of one layer alone
    embedding = Weights(0).normal(
        found[0].name, other or main, SIZES.n_vocab, SIZES.n_embd, std=1.0
    )
    return [embedding, *found[1:]]


@cache
def truth(file: str, *, rounds: bool) -> Truth:
    """Return the reference's run, computed once per process."""
    if file.startswith("tiny"):
        return _deepseek4(path_of(file), rounds=rounds)
    return _decoder(path_of(file)) if "-" in file else _llama(path_of(file))


def _text(n_vocab: int, first: int) -> list[int]:
    rng = np.random.default_rng(11)
    return [first, *rng.integers(3, n_vocab, N_TOKENS - 1).tolist()]


def _deepseek4(path: Path, *, rounds: bool) -> Truth:
    model = Reference(path, act_quant=rounds)
    model.reset()
    tokens = _text(700, 0)
    before, after, logits, gaps = [], [], [], []
    for position, token in enumerate(tokens):
        streams = model.embed(token)
        states, decided = [streams], []
        for layer in range(model.n_layers):
            half = model.attention_half(layer, streams, position)
            rest = model.feed_forward_half(layer, half["after_attn_hc"], token)
            streams = rest["out_hc"]
            states.append(streams)
            decided.append(min(_index_gap(half), _expert_gap(model, layer, rest)))
        flat = np.stack(states).reshape(len(states), -1)
        before.append(flat[:-1])
        after.append(flat[1:])
        logits.append(model.head(streams)["logits"])
        gaps.append(decided)
    by_layer = (np.stack(part).swapaxes(0, 1).astype(np.float32) for part in (before, after))
    return Truth(tokens, *by_layer, np.stack(logits).astype(np.float32), np.array(gaps).T)


def _index_gap(trace: dict[str, npt.NDArray]) -> float:
    scores = trace.get("index_scores")
    if scores is None:
        return np.inf
    chosen = trace["index_allowed"].astype(bool)
    return _gap(scores, chosen)


def _expert_gap(model: Reference, layer: int, trace: dict[str, npt.NDArray]) -> float:
    bias = f"blk.{layer}.exp_probs_b.bias"
    scores = trace["router_probs"]
    if bias in model.weights:
        scores = scores + model.weights.tensor(bias)
    chosen = np.isin(np.arange(len(scores)), trace["experts"])
    # experts that the token's id chooses are no matter of scores
    return _gap(scores, chosen) if scores[chosen].min() >= scores[~chosen].max() else np.inf


def _gap(scores: npt.NDArray, chosen: npt.NDArray) -> float:
    return float((scores[chosen].min() - scores[~chosen].max()) / (np.ptp(scores) or 1.0))


def _llama(path: Path) -> Truth:
    model = ReferenceLlama(path)
    tokens = _text(SIZES.n_vocab, 1)
    caches: list[tuple[list, list]] = [([], []) for _ in range(model.n_layers)]
    states = []
    for position, token in enumerate(tokens):
        own = [model.weights["token_embd.weight"][token]]
        for layer, (keys, values) in enumerate(caches):
            own.append(model.layer(own[-1], f"blk.{layer}.", position, keys, values))
        states.append(own)
    whole = np.stack(states).swapaxes(0, 1)
    head = model.weights.get("output.weight", model.weights["token_embd.weight"])
    logits = np.stack([head @ model.norm(row, "output_norm.weight") for row in whole[-1]])
    f32 = whole.astype(np.float32)
    return Truth(
        tokens, f32[:-1], f32[1:], logits.astype(np.float32), np.full(whole[1:].shape[:2], np.inf)
    )


def _decoder(path: Path) -> Truth:
    model = ReferenceDecoder.of(path)
    tokens = _text(512, 1)
    caches: list[tuple[list, list]] = [([], []) for _ in model.layers]
    states, gaps = [], []
    for position, token in enumerate(tokens):
        own, decided = [model.embed(token)], []
        for layer, (keys, values) in enumerate(caches):
            own.append(model.layer(own[-1], layer, position, keys, values))
            decided.append(model.gap)
        states.append(own)
        gaps.append(decided)
    whole = np.stack(states).swapaxes(0, 1)
    logits = np.stack([model.head(row) for row in whole[-1]])
    f32 = whole.astype(np.float32)
    return Truth(tokens, f32[:-1], f32[1:], logits.astype(np.float32), np.array(gaps).T)
