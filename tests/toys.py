"""Small GGUF files for tests: any tensors at all, or a llama that really runs and really talks.

Everything is deterministic: the same arguments make the same bytes.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from ds4py.gguf import kinds
from tools.gguf_writer import TensorSource, WriteValue, save_gguf, write_gguf

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (
    "h e", "l l", "he ll", "hell o", "Ġ t", "Ġt he", "i n", "Ġ a", "a n", "Ġa n", "Ġan d", "o r",
    "Ġ w", "Ġw or", "l d", "Ġwor ld", "e r", "r e", "o n", "Ġ Ġ",
)  # fmt: skip
NORMAL, CONTROL, UNUSED = 1, 3, 5


def tensor(name: str, dims: Sequence[int], kind: str | int = "F32", fill: int = 0) -> TensorSource:
    """A tensor of constant bytes; an `int` kind may be one that nobody knows (16 bytes then)."""
    type_id = kinds.type_id(kind) if isinstance(kind, str) else kind
    size = kinds.tensor_bytes(type_id, dims) if kinds.is_known(type_id) else 16
    return TensorSource(name, type_id, tuple(dims), bytes([fill]) * size)


def packed(name: str, values: np.ndarray, kind: str = "F32") -> TensorSource:
    """A tensor of real values `[rows..., columns]`, packed by the `gguf` package."""
    type_id = kinds.type_id(kind)
    blocks = quantize(np.ascontiguousarray(values, np.float32), GGMLQuantizationType(type_id))
    return TensorSource(name, type_id, tuple(reversed(values.shape)), blocks.tobytes())


def gguf_bytes(
    metadata: Mapping[str, WriteValue], tensors: Sequence[TensorSource] = (), alignment: int = 32
) -> bytes:
    """The bytes of a whole small file."""
    stream = io.BytesIO()
    write_gguf(stream, metadata, tensors, alignment=alignment)
    return stream.getvalue()


def build_gguf(
    path: Path,
    metadata: Mapping[str, WriteValue],
    tensors: Sequence[TensorSource] = (),
    *,
    alignment: int = 32,
    n_shards: int = 1,
) -> Path:
    """Write a small file, or several shards; return the path of the first."""
    return save_gguf(path, metadata, tensors, alignment=alignment, n_shards=n_shards)[0]


def byte_characters() -> list[str]:
    """The printable character that stands for each byte value in a byte-level vocabulary."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def bpe_metadata(n_vocab: int | None = None, pre: str = "gpt-2") -> dict[str, WriteValue]:
    """A working byte-level BPE tokenizer: 3 specials, 256 bytes, a few merges, unused fillers.

    Args:
        n_vocab: Size of the vocabulary; None takes what is needed (279).
        pre: Name of the pre-tokenizer.
    """
    tokens = [*SPECIALS, *byte_characters(), *(merge.replace(" ", "") for merge in MERGES)]
    types = [CONTROL] * len(SPECIALS) + [NORMAL] * (len(tokens) - len(SPECIALS))
    n_unused = 0 if n_vocab is None else n_vocab - len(tokens)
    assert n_unused >= 0, f"n_vocab {n_vocab}: the toy tokenizer needs at least {len(tokens)}"
    tokens += [f"[unused{k}]" for k in range(n_unused)]
    types += [UNUSED] * n_unused
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": CHATML,
    }


def toy_llama(
    path: Path,
    *,
    n_layers: int = 4,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 128,
    n_vocab: int | None = None,
    n_ctx: int = 256,
    quant: str = "F32",
    tied: bool = True,
    seed: int = 0,
    name: str = "toy llama",
    n_shards: int = 1,
    extra: Mapping[str, WriteValue] | None = None,
) -> Path:
    """Write a llama of random, well-scaled weights with a working tokenizer.

    Args:
        path: Where; for shards the name without number.
        quant: Type of every matrix, one that the `gguf` package can quantize to (F32 F16 BF16 Q4_0
            Q4_1 Q5_0 Q5_1 Q8_0 MXFP4, and TQ1_0 TQ2_0 with rows of 256). Norms are F32.
        tied: Without an `output.weight`: the embedding is the output head too.
        extra: More metadata, or other values for known keys.

    Returns:
        Path of the file, or of the first shard.
    """
    tokenizer = bpe_metadata(n_vocab)
    tokens = tokenizer["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    d_head = n_embd // n_head
    metadata: dict[str, WriteValue] = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": name,
        "llama.block_count": n_layers,
        "llama.context_length": n_ctx,
        "llama.embedding_length": n_embd,
        "llama.feed_forward_length": n_ff,
        "llama.attention.head_count": n_head,
        "llama.attention.head_count_kv": n_head_kv,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": d_head,
        "llama.vocab_size": len(tokens),
        **tokenizer,
        **(extra or {}),
    }
    rng = np.random.default_rng(seed)

    def matrix(label: str, n_out: int, n_in: int, scale: float) -> TensorSource:
        return packed(label, rng.normal(0, scale, (n_out, n_in)), quant)

    def norm(label: str, mean: float = 1.0) -> TensorSource:
        return packed(label, mean * (1 + 0.1 * rng.normal(size=n_embd)))

    # A small embedding lets the layers decide the answer; a large last norm keeps logits apart.
    tensors = [matrix("token_embd.weight", len(tokens), n_embd, 0.1)]
    into, out_of, d_kv = n_embd**-0.5, (2 * n_layers) ** -0.5, n_head_kv * d_head
    for layer in range(n_layers):
        blk = f"blk.{layer}"
        tensors += [
            norm(f"{blk}.attn_norm.weight"),
            matrix(f"{blk}.attn_q.weight", n_embd, n_embd, 2 * into),
            matrix(f"{blk}.attn_k.weight", d_kv, n_embd, 2 * into),
            matrix(f"{blk}.attn_v.weight", d_kv, n_embd, into),
            matrix(f"{blk}.attn_output.weight", n_embd, n_embd, 2 * out_of * into),
            norm(f"{blk}.ffn_norm.weight"),
            matrix(f"{blk}.ffn_gate.weight", n_ff, n_embd, into),
            matrix(f"{blk}.ffn_up.weight", n_ff, n_embd, into),
            matrix(f"{blk}.ffn_down.weight", n_embd, n_ff, 2 * out_of * n_ff**-0.5),
        ]
    tensors.append(norm("output_norm.weight", 4.0))
    if not tied:
        tensors.append(matrix("output.weight", len(tokens), n_embd, 0.1))
    return build_gguf(path, metadata, tensors, n_shards=n_shards)
