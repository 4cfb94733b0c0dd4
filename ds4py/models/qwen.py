"""The Qwen families of plain blocks: qwen2, qwen2moe, qwen3, qwen3moe.

Owns: what of the metadata makes which block. Refuses to know: tensors, computation.

Halves of a head are the pairs that turn. Qwen2 has biases on queries, keys and values; Qwen3 has
norms of their heads instead. Qwen2's experts have a shared one besides, and weights that are not
made to add up to 1.
"""

from __future__ import annotations

from ds4py.gguf.metadata import Metadata
from ds4py.layers.block_spec import AttentionSpec, BlockSpec, ExpertsSpec, FeedForwardSpec
from ds4py.models.decoder import decoder
from ds4py.models.decoder.shape import DecoderShape
from ds4py.models.decoder.sizes import DecoderSizes


def read_shape(metadata: Metadata) -> DecoderShape:
    """Read the shape.

    Raises:
        ModelError: A key is missing, of another type, or impossible.
    """
    name = metadata.require_str("general.architecture")
    sizes = DecoderSizes.read(metadata, name)
    block = BlockSpec(attention=_attention(sizes), feed_forward=_feed_forward(sizes))
    return sizes.shape([block] * sizes.n_layers)


def _attention(sizes: DecoderSizes) -> AttentionSpec:
    if sizes.architecture.startswith("qwen2"):
        return sizes.attention(halves=True, biases=True)
    return sizes.attention(halves=True, qk_norm="head")


def _feed_forward(sizes: DecoderSizes) -> FeedForwardSpec | ExpertsSpec:
    width = "expert_feed_forward_length"
    if sizes.architecture == "qwen2moe":
        shared = sizes.keys.size("expert_shared_feed_forward_length")
        return sizes.experts(width, normalise=False, n_ff_shared=shared, shared_gate=True)
    return sizes.experts(width) if sizes.architecture == "qwen3moe" else sizes.dense()


ARCHITECTURE = decoder(read_shape)
