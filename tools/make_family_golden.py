"""Record what transformers computes for the toy files of every family, for tests/golden.

    pip install --target DIR transformers safetensors huggingface_hub
    PYTHONPATH=.:DIR python -m tools.make_family_golden tests/golden/families_logits.npz

Owns: the files' sizes, the way from a file's tensors to those of transformers. Refuses to know:
ds4py's models. The formulas are transformers' own; the names and the order of rows are this
module's reading of the published layout, which `tests/conformance/test_gemma3.py` proves for one
family. CI does not need it: the logits are kept.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds4py.gguf.file import GgufFile
from tools import toy_decoder
from tools.gguf_writer import save_gguf
from tools.toy_decoder import Sizes

_SMALL = Sizes(
    n_layers=3, n_embd=64, n_vocab=400, n_head=4, n_head_kv=2, d_head=32, n_ff=96, n_ctx=256,
    window=9, n_ff_expert=64, n_ff_shared=32,
)  # fmt: skip
_EXPERTS = {"n_expert": 6, "n_used": 2}
SIZES = {
    name: replace(_SMALL, architecture=name, **(_EXPERTS if name.endswith("moe") else {}))
    for name in toy_decoder.FAMILIES
} | {
    "mixtral": replace(_SMALL, architecture="llama", **_EXPERTS),
    "gemma3": replace(_SMALL, architecture="gemma3", n_layers=7),  # one layer sees everything
}
"""Heads wider than `n_embd / n_head`, windows shorter than the text."""

TOKENS = [int(token) for token in np.random.default_rng(5).integers(3, 390, 48)]


def write(path: Path, family: str) -> Path:
    """Write the file of a family, all in float32."""
    sizes = SIZES[family]
    save_gguf(path, toy_decoder.metadata(sizes), toy_decoder.tensors(sizes, "F32"))
    return path


def _config(family: str, sizes: Sizes) -> Any:
    import transformers as tf  # type: ignore[import-not-found]  # not among the dependencies

    rope = {"rope_type": "default", "rope_theta": 1e6}
    given: dict[str, Any] = {
        "vocab_size": sizes.n_vocab,
        "hidden_size": sizes.n_embd,
        "intermediate_size": sizes.n_ff,
        "num_hidden_layers": sizes.n_layers,
        "num_attention_heads": sizes.n_head,
        "num_key_value_heads": sizes.n_head_kv,
        "head_dim": sizes.d_head,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": sizes.n_ctx,
        "tie_word_embeddings": True,
        "rope_parameters": rope,
    }
    if family == "mixtral":
        given |= {"num_local_experts": sizes.n_expert, "num_experts_per_tok": sizes.n_used}
        given |= {"intermediate_size": sizes.n_ff_expert, "sliding_window": None}
    if family.endswith("moe"):
        given |= {"num_experts": sizes.n_expert, "num_experts_per_tok": sizes.n_used}
        given |= {"moe_intermediate_size": sizes.n_ff_expert, "mlp_only_layers": []}
        given |= {"norm_topk_prob": family == "qwen3moe", "decoder_sparse_step": 1}
        given["shared_expert_intermediate_size"] = sizes.n_ff_shared
    if sizes.is_gemma:
        given |= {"sliding_window": sizes.window, "query_pre_attn_scalar": sizes.d_head}
        given["hidden_activation"] = "gelu_pytorch_tanh"
    if family == "gemma2":
        given |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    if family == "gemma3":
        local = {"rope_type": "default", "rope_theta": 1e4}
        given["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    kinds = {
        "llama": tf.LlamaConfig, "mixtral": tf.MixtralConfig, "qwen2": tf.Qwen2Config,
        "qwen2moe": tf.Qwen2MoeConfig, "qwen3": tf.Qwen3Config, "qwen3moe": tf.Qwen3MoeConfig,
        "gemma2": tf.Gemma2Config, "gemma3": tf.Gemma3TextConfig,
    }  # fmt: skip
    return kinds[family](**given)


def renamed(weights: Mapping[str, np.ndarray], family: str) -> dict[str, np.ndarray]:
    """Return a file's tensors under transformers' names, in its order of rows."""
    sizes = SIZES[family]
    shift = 1 if sizes.is_gemma else 0  # which adds it to its norms itself
    found = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "lm_head.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"] - shift,
    }
    for layer in range(sizes.n_layers):
        prefix = f"blk.{layer}."
        own = {
            name.removeprefix(prefix): values
            for name, values in weights.items()
            if name.startswith(prefix)
        }
        for name, values in _layer(own, sizes, shift).items():
            found[f"model.layers.{layer}.{name}"] = values
    return found


def _layer(own: dict[str, np.ndarray], sizes: Sizes, shift: int) -> dict[str, np.ndarray]:
    found = {"input_layernorm.weight": own["attn_norm.weight"] - shift}
    heads = {"q": sizes.n_head, "k": sizes.n_head_kv, "v": 0, "output": 0}
    for short, n_heads in heads.items():
        name = f"self_attn.{'o' if short == 'output' else short}_proj"
        matrix = own[f"attn_{short}.weight"]
        if n_heads and sizes.architecture == "llama":  # neighbours in the file are halves there
            pairs = matrix.reshape(n_heads, sizes.d_head // 2, 2, -1)
            matrix = pairs.swapaxes(1, 2).reshape(matrix.shape)
        found[f"{name}.weight"] = matrix
        if f"attn_{short}.bias" in own:
            found[f"{name}.bias"] = own[f"attn_{short}.bias"]
        if f"attn_{short}_norm.weight" in own:
            found[f"self_attn.{short}_norm.weight"] = own[f"attn_{short}_norm.weight"] - shift
    before = "pre_feedforward_layernorm" if sizes.is_gemma else "post_attention_layernorm"
    found[f"{before}.weight"] = own["ffn_norm.weight"] - shift
    if sizes.is_gemma:
        found["post_attention_layernorm.weight"] = own["post_attention_norm.weight"] - shift
        found["post_feedforward_layernorm.weight"] = own["post_ffw_norm.weight"] - shift
    if sizes.n_expert:
        gate_up = [own[f"ffn_{name}_exps.weight"] for name in ("gate", "up")]
        found["mlp.gate.weight"] = own["ffn_gate_inp.weight"]
        found["mlp.experts.gate_up_proj"] = np.concatenate(gate_up, 1)
        found["mlp.experts.down_proj"] = own["ffn_down_exps.weight"]
    suffix, below = ("_shexp", "mlp.shared_expert") if sizes.n_expert else ("", "mlp")
    for name in ("gate", "up", "down"):
        if f"ffn_{name}{suffix}.weight" in own:
            found[f"{below}.{name}_proj.weight"] = own[f"ffn_{name}{suffix}.weight"]
    if "ffn_gate_inp_shexp.weight" in own:
        weigh = own["ffn_gate_inp_shexp.weight"].reshape(1, -1)
        found["mlp.shared_expert_gate.weight"] = weigh
    return found


def logits(family: str, folder: Path) -> np.ndarray:
    """Return transformers' logits after every token, float32 `[48, V]`."""
    from transformers import AutoModelForCausalLM  # type: ignore[import-not-found]

    path = write(folder / f"{family}.gguf", family)
    with GgufFile.open(path) as file:
        weights = {
            name: np.frombuffer(file.raw(name), "<f4").reshape(info.shape)
            for name, info in file.tensors.items()
        }
    config = _config(family, SIZES[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    tensors = {
        name: torch.from_numpy(np.array(values, np.float32))
        for name, values in renamed(weights, family).items()
    }
    model.load_state_dict(tensors)  # refuses a name or a shape that is missing or too many
    with torch.inference_mode():
        found: np.ndarray = model(torch.tensor([TOKENS])).logits[0].numpy()
    return found


def main(target: str) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = {family: logits(family, Path(folder)) for family in SIZES}
    np.savez(target, **{family: rows[::4] for family, rows in found.items()})


if __name__ == "__main__":
    main(sys.argv[1])
