"""Which tensors a described model has in its file, under which names and of which shapes.

Owns: names and shapes. Refuses to know: architectures, bytes, what is computed. Invariant: a slice
is built from no name that is not here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ds4py.layers.block_spec import AttentionSpec, BlockSpec, ExpertsSpec, FeedForwardSpec
from ds4py.models.base import TensorNeed

EMBEDDING: Final = "token_embd.weight"
NORM: Final = "output_norm.weight"
HEAD: Final = "output.weight"
ROPE_FACTORS: Final = "rope_freqs.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What families call differently; the rest has one name in all files.

    Args:
        ffn_norm: The norm before the feed-forward half.
    """

    ffn_norm: str = "ffn_norm"


def model_needs(
    n_vocab: int,
    n_embd: int,
    may_have: Callable[[str], bool],
    *,
    n_rotated: int,
    embeds: bool,
    head: bool,
) -> dict[str, TensorNeed]:
    """Name the tensors that belong to no layer.

    Args:
        n_vocab: Rows of embedding and head.
        n_embd: Width of the model.
        may_have: Whether a tensor is or could be in the file; decides whether the head is tied.
        n_rotated: Values of a head that turn, if they are as many in all layers.
        embeds: Whether the embedding is wanted.
        head: Whether final norm and output head are wanted.
    """
    # image tokens and padding have rows, too, but no text is made of them
    vocabulary = TensorNeed((n_vocab, n_embd), more_rows=True)
    needs = {}
    if n_rotated:
        needs[ROPE_FACTORS] = TensorNeed((n_rotated // 2,), optional=True)
    if embeds:
        needs[EMBEDDING] = vocabulary
    if head:
        needs[NORM] = TensorNeed((n_embd,))
        needs[HEAD if may_have(HEAD) else EMBEDDING] = vocabulary
    return needs


def block_needs(
    block: BlockSpec,
    n_embd: int,
    names: Names,
    prefix: str,
    may_have: Callable[[str], bool],
) -> dict[str, TensorNeed]:
    """Name the tensors of one layer, without its prefix.

    Args:
        block: The layer.
        n_embd: Width of the model.
        names: What the family calls differently.
        prefix: Of the layer's tensors.
        may_have: Whether a tensor is or could be in the file; decides between old and new names.
    """
    needs = _attention_needs(block.attention, n_embd)
    half = block.feed_forward
    if isinstance(half, ExpertsSpec):
        old_bias = "exp_probs_b"  # of older files, which have no suffix there
        bias = old_bias if may_have(prefix + old_bias) else "exp_probs_b.bias"
        needs |= _experts_needs(half, n_embd, bias)
    else:
        needs |= _dense_needs(half, n_embd)
    norms = ["attn_norm", names.ffn_norm] if block.norm_before else []
    norms += ["post_attention_norm", "post_ffw_norm"] if block.norm_after else []
    return needs | {f"{name}.weight": TensorNeed((n_embd,)) for name in norms}


def _attention_needs(spec: AttentionSpec, n_embd: int) -> dict[str, TensorNeed]:
    q, kv = spec.n_head * spec.d_head, spec.n_head_kv * spec.d_head
    sizes = {"attn_q": q, "attn_k": kv, "attn_v": kv}
    needs = {}
    for name, n_rows in sizes.items():
        needs[f"{name}.weight"] = TensorNeed((n_rows, n_embd))
        needs[f"{name}.bias"] = TensorNeed((n_rows,), optional=not spec.biases)
    needs |= _matrix("attn_output", n_embd, q)
    if spec.qk_norm != "none":
        whole = spec.qk_norm == "whole"
        needs["attn_q_norm.weight"] = TensorNeed((q if whole else spec.d_head,))
        needs["attn_k_norm.weight"] = TensorNeed((kv if whole else spec.d_head,))
    if spec.sinks:
        needs["attn_sinks.weight"] = TensorNeed((spec.n_head,))
    return needs


def _dense_needs(spec: FeedForwardSpec, n_embd: int) -> dict[str, TensorNeed]:
    return {
        **_matrix("ffn_gate", spec.n_ff, n_embd),
        **_matrix("ffn_up", spec.n_ff, n_embd),
        **_matrix("ffn_down", n_embd, spec.n_ff),
    }


def _experts_needs(spec: ExpertsSpec, n_embd: int, bias: str) -> dict[str, TensorNeed]:
    E, F = spec.n_expert, spec.n_ff
    needs = {
        "ffn_gate_inp.weight": TensorNeed((E, n_embd)),
        bias: TensorNeed((E,), optional=True),
        "ffn_gate_exps.weight": TensorNeed((E, F, n_embd)),
        "ffn_up_exps.weight": TensorNeed((E, F, n_embd)),
        "ffn_down_exps.weight": TensorNeed((E, n_embd, F)),
    }
    if spec.n_ff_shared:
        needs |= {
            "ffn_gate_shexp.weight": TensorNeed((spec.n_ff_shared, n_embd)),
            "ffn_up_shexp.weight": TensorNeed((spec.n_ff_shared, n_embd)),
            "ffn_down_shexp.weight": TensorNeed((n_embd, spec.n_ff_shared)),
        }
    if spec.shared_gate:
        needs["ffn_gate_inp_shexp.weight"] = TensorNeed((n_embd,))
    return needs


def _matrix(name: str, n_rows: int, n_columns: int) -> dict[str, TensorNeed]:
    """Return a matrix and the bias that it may have."""
    return {
        f"{name}.weight": TensorNeed((n_rows, n_columns)),
        f"{name}.bias": TensorNeed((n_rows,), optional=True),
    }
