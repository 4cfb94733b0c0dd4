"""Models of the plain-block families with random weights, of any size.

Owns: which keys and tensors each family's files have. Refuses to know: what the tensors are for.
Invariant: the same arguments make the same bytes, and memory does not grow with the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tools.gguf_writer import TensorSource, WriteValue
from tools.toy_llama import FRONT
from tools.toy_vocabulary import vocabulary
from tools.toy_weights import Weights

FAMILIES = ("llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma2", "gemma3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a file's metadata says; the defaults make a qwen3 of 1.1 billion weights.

    Args:
        architecture: One of `FAMILIES`.
        d_head: Width of a head, which need not be `n_embd / n_head`.
        window: Of gemma's windowed layers; other families have none.
        period: One of so many of its layers sees everything; 0 leaves that to the family.
        n_expert: Experts; 0 for a dense model.
        n_used: Experts of a token.
        n_ff_expert: Width of an expert.
        n_ff_shared: Width of the shared expert of a qwen2moe.
    """

    architecture: str = "qwen3"
    n_layers: int = 16
    n_embd: int = 2048
    n_vocab: int = 151936
    n_head: int = 16
    n_head_kv: int = 8
    d_head: int = 128
    n_ff: int = 6144
    n_ctx: int = 40960
    window: int = 1024
    period: int = 0
    n_expert: int = 0
    n_used: int = 0
    n_ff_expert: int = 768
    n_ff_shared: int = 1024

    @property
    def is_gemma(self) -> bool:
        """Whether norms stand on both sides of a half, and layers have windows."""
        return self.architecture.startswith("gemma")


QWEN3_MOE = Sizes(
    architecture="qwen3moe", n_layers=12, n_expert=64, n_used=8, n_ff_expert=256, n_embd=1536
)
"""A model of a billion weights of which a token takes an eighth."""

GEMMA3 = Sizes(
    architecture="gemma3", n_layers=26, n_embd=1280, n_head=4, n_head_kv=1, d_head=256, n_ff=6912,
    window=512,
)  # fmt: skip
"""About gemma-3-1b with another vocabulary and rows that super-blocks fit."""


def metadata(sizes: Sizes) -> dict[str, WriteValue]:
    """Return all keys of a file: model and tokenizer."""
    name = sizes.architecture
    numbers: dict[str, WriteValue] = {
        "block_count": sizes.n_layers,
        "context_length": sizes.n_ctx,
        "embedding_length": sizes.n_embd,
        "feed_forward_length": sizes.n_ff,
        "attention.head_count": sizes.n_head,
        "attention.head_count_kv": sizes.n_head_kv,
        "attention.key_length": sizes.d_head,
        "attention.value_length": sizes.d_head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1000000.0,
        "vocab_size": sizes.n_vocab,
    }
    if sizes.n_expert:
        numbers |= {"expert_count": sizes.n_expert, "expert_used_count": sizes.n_used}
        if name == "llama":
            numbers["feed_forward_length"] = sizes.n_ff_expert
        else:
            numbers["expert_feed_forward_length"] = sizes.n_ff_expert
    if name == "qwen2moe":
        numbers["expert_shared_feed_forward_length"] = sizes.n_ff_shared
    if sizes.is_gemma:
        numbers["attention.sliding_window"] = sizes.window
        if sizes.period:
            numbers["attention.sliding_window_pattern"] = sizes.period
    if name == "gemma2":
        numbers |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return {
        "general.architecture": name,
        "general.name": f"toy {name}",
        **{f"{name}.{key}": value for key, value in numbers.items()},
        **vocabulary(sizes.n_vocab, "qwen2", FRONT),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def tensors(
    sizes: Sizes, kind: str, seed: int = 0, embedding: float | None = None
) -> list[TensorSource]:
    """Return all tensors, every matrix of one type, the embedding tied to the output head.

    Args:
        sizes: Of the model.
        kind: A tensor type that `toy_weights` can make.
        seed: Of the weights.
        embedding: Spread of the embedding; None makes states that are neither tiny nor large.
    """
    weights = Weights(seed)
    spread = embedding or (0.1 if not sizes.is_gemma else sizes.n_embd**-0.5)
    found = [
        weights.normal("token_embd.weight", kind, sizes.n_vocab, sizes.n_embd, std=spread),
        weights.norm("output_norm.weight", sizes.n_embd),
    ]
    for layer in range(sizes.n_layers):
        own = weights.below(f"blk.{layer}.")
        found += [*_attention(sizes, own, kind), *_feed_forward(sizes, own, kind)]
    return found


def _attention(sizes: Sizes, own: Weights, kind: str) -> Iterator[TensorSource]:
    n_embd, q, kv = (
        sizes.n_embd,
        sizes.n_head * sizes.d_head,
        sizes.n_head_kv * sizes.d_head,
    )
    yield own.norm("attn_norm.weight", n_embd)
    for name, n_rows in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
        yield own.matrix(f"{name}.weight", kind, n_rows, n_embd)
        if sizes.architecture.startswith("qwen2"):
            yield own.normal(f"{name}.bias", "F32", n_rows, std=0.5)
    if sizes.architecture in {"qwen3", "qwen3moe", "gemma3"}:
        yield own.norm("attn_q_norm.weight", sizes.d_head)
        yield own.norm("attn_k_norm.weight", sizes.d_head)
    yield own.matrix("attn_output.weight", kind, n_embd, q)
    if sizes.is_gemma:
        yield own.norm("post_attention_norm.weight", n_embd)


def _feed_forward(sizes: Sizes, own: Weights, kind: str) -> Iterator[TensorSource]:
    n_embd, E = sizes.n_embd, sizes.n_expert  # noqa: N806 - as in the layers
    yield own.norm("ffn_norm.weight", n_embd)
    if not E:
        yield from _gated(own, kind, "", sizes.n_ff, n_embd)
    else:
        yield own.matrix("ffn_gate_inp.weight", "F32", E, n_embd, gain=2.0)
        for name in ("gate", "up"):
            yield own.matrix(f"ffn_{name}_exps.weight", kind, E, sizes.n_ff_expert, n_embd)
        yield own.matrix("ffn_down_exps.weight", kind, E, n_embd, sizes.n_ff_expert)
    if sizes.architecture == "qwen2moe":
        yield from _gated(own, kind, "_shexp", sizes.n_ff_shared, n_embd)
        yield own.matrix("ffn_gate_inp_shexp.weight", "F32", n_embd)
    if sizes.is_gemma:
        yield own.norm("post_ffw_norm.weight", n_embd)


def _gated(own: Weights, kind: str, suffix: str, n_ff: int, n_embd: int) -> Iterator[TensorSource]:
    yield own.matrix(f"ffn_gate{suffix}.weight", kind, n_ff, n_embd)
    yield own.matrix(f"ffn_up{suffix}.weight", kind, n_ff, n_embd)
    yield own.matrix(f"ffn_down{suffix}.weight", kind, n_embd, n_ff)
