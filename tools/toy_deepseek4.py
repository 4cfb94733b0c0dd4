"""DeepSeek V4 models of any size with random weights that run and talk nonsense.

Owns: metadata keys and tensor table of the architecture as a file has them
(docs/spec/deepseek4-model.md#keys, #tensors, #test-model), written down a second time on purpose:
what reads such files is tested against it. Refuses to know: what the tensors are for. Invariant:
the same arguments make the same bytes, and memory does not grow with the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ds4py.text.tokenizer.vocabulary import TokenType
from tools.gguf_writer import TensorSource, WriteValue, save_gguf
from tools.toy_vocabulary import vocabulary
from tools.toy_weights import Weights

S: Final = 4
"""Hyper-connection streams."""

MIXES: Final = {
    "q2": ("IQ2_XXS", "Q2_K"),
    "q4": ("Q4_K", "Q4_K"),
    "q8": ("Q8_0", "Q8_0"),
    "f16": ("F16", "F16"),
}
"""Types of the routed experts: (gate and up, down)."""

MIXED: Final = "mixed"
"""The mix whose last layers are q4, the others q2, as in one of the published files."""

FRONT: Final = (
    ("<｜begin▁of▁sentence｜>", TokenType.CONTROL),  # noqa: RUF001  (its spelling)
    ("<｜end▁of▁sentence｜>", TokenType.CONTROL),  # noqa: RUF001
    ("<｜▁pad▁｜>", TokenType.CONTROL),  # noqa: RUF001
)
BACK: Final = (
    ("<｜User｜>", TokenType.CONTROL),  # noqa: RUF001
    ("<｜Assistant｜>", TokenType.CONTROL),  # noqa: RUF001
    ("<think>", TokenType.USER_DEFINED),
    ("</think>", TokenType.USER_DEFINED),
    ("｜DSML｜", TokenType.USER_DEFINED),  # noqa: RUF001
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a file's metadata says; the defaults are ds4's tiny test model.

    The names are those of `ds4py.models.deepseek4.Shape`.

    Args:
        ratios: Compression ratios of the first layers; the last two of them alternate after that.
        n_hash_layers: Layers routed by token id, at most; a smaller model has fewer.
    """

    n_layers: int = 6
    n_embd: int = 256
    n_vocab: int = 768
    n_head: int = 4
    d_head: int = 160
    n_rot: int = 32
    q_rank: int = 64
    out_groups: int = 2
    out_rank: int = 32
    n_expert: int = 8
    n_used: int = 2
    n_ff: int = 256
    n_hash_layers: int = 3
    window: int = 16
    index_heads: int = 4
    index_width: int = 128
    index_top_k: int = 8
    ratios: tuple[int, ...] = (0, 0, 4, 128)
    expert_scale: float = 1.5
    n_ctx: int = 1 << 20

    def ratio(self, layer: int) -> int:
        """Return the compression ratio of a layer."""
        if layer < len(self.ratios):
            return self.ratios[layer]
        turns = self.ratios[-2:]
        return turns[(layer - len(self.ratios)) % len(turns)]


FLASH: Final = Sizes(
    n_layers=43,
    n_embd=4096,
    n_vocab=129280,
    n_head=64,
    d_head=512,
    n_rot=64,
    q_rank=1024,
    out_groups=8,
    out_rank=1024,
    n_expert=256,
    n_used=6,
    n_ff=2048,
    window=128,
    index_heads=64,
    index_top_k=512,
)
PRO: Final = Sizes(
    n_layers=61,
    n_embd=7168,
    n_vocab=129280,
    n_head=128,
    d_head=512,
    n_rot=64,
    q_rank=1536,
    out_groups=16,
    out_rank=1024,
    n_expert=384,
    n_used=6,
    n_ff=3072,
    window=128,
    index_heads=64,
    index_top_k=1024,
    ratios=(128, 128, 4, 128),
    expert_scale=2.5,
)
BENCH: Final = Sizes(
    n_layers=8,
    n_embd=1024,
    n_vocab=4096,
    n_head=16,
    d_head=512,
    n_rot=64,
    q_rank=256,
    out_groups=4,
    out_rank=128,
    n_expert=64,
    n_used=6,
    n_ff=512,
    window=128,
    index_heads=8,
    index_top_k=64,
)
"""The proportions of Flash in about 300 MB of the q2 mix."""


def toy_deepseek4(
    path: Path,
    *,
    mix: str = "q2",
    seed: int = 0,
    n_shards: int = 1,
    extra: Mapping[str, WriteValue] | None = None,
    **sizes: Any,
) -> Path:
    """Write a model.

    Args:
        path: Where; for shards the name without number.
        mix: A key of `MIXES`, or `MIXED`.
        seed: Of the weights.
        n_shards: 1 writes one plain file.
        extra: More metadata, or other values for known keys.
        sizes: Fields of `Sizes`.

    Returns:
        Path of the file, or of the first shard.

    Raises:
        ConfigError: The sizes do not make whole blocks, or too few tokens.
    """
    chosen = Sizes(**sizes)
    keys = {**metadata(chosen), **(extra or {})}
    return save_gguf(path, keys, tensors(chosen, mix, seed), n_shards=n_shards)[0]


def metadata(sizes: Sizes, name: str = "toy deepseek4") -> dict[str, WriteValue]:
    """Return all keys of a file: model and tokenizer."""
    numbers: dict[str, WriteValue] = {
        "context_length": sizes.n_ctx,
        "block_count": sizes.n_layers,
        "embedding_length": sizes.n_embd,
        "vocab_size": sizes.n_vocab,
        "attention.head_count": sizes.n_head,
        "attention.head_count_kv": 1,
        "attention.key_length": sizes.d_head,
        "attention.value_length": sizes.d_head,
        "attention.q_lora_rank": sizes.q_rank,
        "attention.output_lora_rank": sizes.out_rank,
        "attention.output_group_count": sizes.out_groups,
        "attention.sliding_window": sizes.window,
        "attention.indexer.head_count": sizes.index_heads,
        "attention.indexer.key_length": sizes.index_width,
        "attention.indexer.top_k": sizes.index_top_k,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.compress_rope_freq_base": 160000.0,
        "attention.compress_ratios": np.array(
            [sizes.ratio(layer) for layer in range(sizes.n_layers)], np.int32
        ),
        "rope.dimension_count": sizes.n_rot,
        "rope.freq_base": 10000.0,
        "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 65536,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "expert_count": sizes.n_expert,
        "expert_used_count": sizes.n_used,
        "expert_shared_count": 1,
        "expert_feed_forward_length": sizes.n_ff,
        "expert_weights_scale": sizes.expert_scale,
        "expert_weights_norm": True,
        "hash_layer_count": min(sizes.n_hash_layers, sizes.n_layers),
        "swiglu_clamp_exp": np.full(sizes.n_layers, 10.0, np.float32),
        "hyper_connection.count": S,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
    }
    return {
        "general.architecture": "deepseek4",
        "general.name": name,
        **{f"deepseek4.{key}": value for key, value in numbers.items()},
        **vocabulary(sizes.n_vocab, "joyai-llm", FRONT, BACK),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 2,
    }


def tensors(sizes: Sizes, mix: str = "q2", seed: int = 0) -> list[TensorSource]:
    """Return all tensors of a file; their bytes are made when they are written."""
    weights = Weights(seed)
    n_embd, n_vocab = sizes.n_embd, sizes.n_vocab
    found = [
        weights.normal("token_embd.weight", "F16", n_vocab, n_embd, std=1.0),
        *_hyper(weights, "output_hc", n_embd, n_scales=1, n_mixes=S),
        weights.norm("output_norm.weight", n_embd),
        weights.matrix("output.weight", "Q8_0", n_vocab, n_embd, gain=3.0),
    ]
    for layer in range(sizes.n_layers):
        own = weights.below(f"blk.{layer}.")
        found += _attention(own, sizes)
        found += _compressors(own, sizes, sizes.ratio(layer))
        found += _feed_forward(own, sizes, layer, expert_kinds(mix, layer, sizes.n_layers))
    return found


def expert_kinds(mix: str, layer: int, n_layers: int) -> tuple[str, str]:
    """Return the types of a layer's experts: (gate and up, down)."""
    if mix == MIXED:
        return MIXES["q4" if layer >= n_layers - max(1, n_layers // 7) else "q2"]
    return MIXES[mix]


def _hyper(
    w: Weights, prefix: str, n_embd: int, *, n_scales: int = 3, n_mixes: int = S * (2 + S)
) -> list[TensorSource]:
    return [
        w.matrix(f"{prefix}_fn.weight", "F16", n_mixes, S * n_embd),
        w.normal(f"{prefix}_scale.weight", "F32", n_scales, std=0.15, mean=1.0),
        w.normal(f"{prefix}_base.weight", "F32", n_mixes, std=0.5),
    ]


def _attention(w: Weights, sizes: Sizes) -> list[TensorSource]:
    n_embd, heads = sizes.n_embd, sizes.n_head * sizes.d_head
    out = sizes.out_groups * sizes.out_rank
    return [
        *_hyper(w, "hc_attn", n_embd),
        w.norm("attn_norm.weight", n_embd),
        w.matrix("attn_q_a.weight", "Q8_0", sizes.q_rank, n_embd),
        w.norm("attn_q_a_norm.weight", sizes.q_rank),
        w.matrix("attn_q_b.weight", "Q8_0", heads, sizes.q_rank),
        w.matrix("attn_kv.weight", "Q8_0", sizes.d_head, n_embd),
        w.norm("attn_kv_a_norm.weight", sizes.d_head),
        w.normal("attn_sinks.weight", "F32", sizes.n_head, std=1.0),
        w.matrix("attn_output_a.weight", "Q8_0", out, heads // sizes.out_groups),
        w.matrix("attn_output_b.weight", "Q8_0", n_embd, out),
    ]


def _compressors(w: Weights, sizes: Sizes, ratio: int) -> list[TensorSource]:
    """Make the compressor of a layer that has one, and the indexer of a layer with ratio 4."""
    n_embd, index = sizes.n_embd, sizes.index_heads * sizes.index_width
    found: list[TensorSource] = []
    if ratio:
        found += _compressor(w, "attn_compressor", n_embd, ratio, sizes.d_head)
    if ratio == 4:
        found += _compressor(w, "indexer_compressor", n_embd, ratio, sizes.index_width)
        found.append(w.matrix("indexer.attn_q_b.weight", "F16", index, sizes.q_rank))
        found.append(w.matrix("indexer.proj.weight", "F16", sizes.index_heads, n_embd))
    return found


def _compressor(w: Weights, prefix: str, n_embd: int, ratio: int, width: int) -> list[TensorSource]:
    wide = 2 * width if ratio == 4 else width
    return [
        w.normal(f"{prefix}_ape.weight", "F16", ratio, wide, std=0.5),
        w.matrix(f"{prefix}_kv.weight", "F16", wide, n_embd),
        w.matrix(f"{prefix}_gate.weight", "F16", wide, n_embd),
        w.norm(f"{prefix}_norm.weight", width),
    ]


def _feed_forward(
    w: Weights, sizes: Sizes, layer: int, expert_types: tuple[str, str]
) -> list[TensorSource]:
    n_embd, n_ff, n_expert = sizes.n_embd, sizes.n_ff, sizes.n_expert
    into, out_of = expert_types
    if layer < sizes.n_hash_layers:
        route = w.choices("ffn_gate_tid2eid.weight", sizes.n_vocab, sizes.n_used, n_expert)
    else:
        route = w.normal("exp_probs_b.bias", "F32", n_expert, std=0.3)
    return [
        *_hyper(w, "hc_ffn", n_embd),
        w.norm("ffn_norm.weight", n_embd),
        w.matrix("ffn_gate_inp.weight", "F16", n_expert, n_embd),
        route,
        w.matrix("ffn_gate_exps.weight", into, n_expert, n_ff, n_embd),
        w.matrix("ffn_up_exps.weight", into, n_expert, n_ff, n_embd),
        w.matrix("ffn_down_exps.weight", out_of, n_expert, n_embd, n_ff),
        w.matrix("ffn_gate_shexp.weight", "Q8_0", n_ff, n_embd),
        w.matrix("ffn_up_shexp.weight", "Q8_0", n_ff, n_embd),
        w.matrix("ffn_down_shexp.weight", "Q8_0", n_embd, n_ff),
    ]
