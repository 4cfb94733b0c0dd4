"""Llamas of any size with random weights, for speed and memory rather than for answers.

Owns: metadata keys and tensor table of the architecture. Refuses to know: what the tensors are for.
Invariant: the same arguments make the same bytes, and memory does not grow with the file.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds4py.text.tokenizer.vocabulary import TokenType
from tools.gguf_writer import TensorSource, WriteValue
from tools.toy_vocabulary import vocabulary
from tools.toy_weights import Weights

FRONT = tuple(
    (spelling, TokenType.CONTROL) for spelling in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a file's metadata says; the defaults make a model of 1.2 billion weights."""

    n_layers: int = 16
    n_embd: int = 2048
    n_vocab: int = 128256
    n_head: int = 32
    n_head_kv: int = 8
    n_ff: int = 8192
    n_ctx: int = 131072


def metadata(sizes: Sizes, name: str = "toy llama") -> dict[str, WriteValue]:
    """Return all keys of a file: model and tokenizer."""
    numbers: dict[str, WriteValue] = {
        "block_count": sizes.n_layers,
        "context_length": sizes.n_ctx,
        "embedding_length": sizes.n_embd,
        "feed_forward_length": sizes.n_ff,
        "attention.head_count": sizes.n_head,
        "attention.head_count_kv": sizes.n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500000.0,
        "rope.dimension_count": sizes.n_embd // sizes.n_head,
        "vocab_size": sizes.n_vocab,
    }
    return {
        "general.architecture": "llama",
        "general.name": name,
        **{f"llama.{key}": value for key, value in numbers.items()},
        **vocabulary(sizes.n_vocab, "llama-bpe", FRONT),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }


def tensors(sizes: Sizes, kind: str, seed: int = 0) -> list[TensorSource]:
    """Return all tensors, every matrix of one type, the embedding tied to the output head.

    Args:
        sizes: Of the model.
        kind: A tensor type that `toy_weights` can make.
        seed: Of the weights.
    """
    weights = Weights(seed)
    n_embd, n_ff = sizes.n_embd, sizes.n_ff
    d_kv = n_embd // sizes.n_head * sizes.n_head_kv
    found = [
        weights.normal("token_embd.weight", kind, sizes.n_vocab, n_embd, std=0.1),
        weights.norm("output_norm.weight", n_embd),
    ]
    for layer in range(sizes.n_layers):
        own = weights.below(f"blk.{layer}.")
        found += [
            own.norm("attn_norm.weight", n_embd),
            own.matrix("attn_q.weight", kind, n_embd, n_embd),
            own.matrix("attn_k.weight", kind, d_kv, n_embd),
            own.matrix("attn_v.weight", kind, d_kv, n_embd),
            own.matrix("attn_output.weight", kind, n_embd, n_embd),
            own.norm("ffn_norm.weight", n_embd),
            own.matrix("ffn_gate.weight", kind, n_ff, n_embd),
            own.matrix("ffn_up.weight", kind, n_ff, n_embd),
            own.matrix("ffn_down.weight", kind, n_embd, n_ff),
        ]
    return found
