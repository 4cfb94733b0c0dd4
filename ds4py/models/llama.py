"""The llama architecture: the plain block, its rotated pairs side by side in the file.

Owns: what of the metadata makes which block. Refuses to know: tensors, computation.

Llama 1 to 3, older Mistral, SmolLM, Yi, TinyLlama, DeepSeek-R1-Distill-Llama and others, and with
experts Mixtral. Converters permuted the rows of Q and K, so that neighbours are the pairs that
turn.
"""

from __future__ import annotations

from ds4py.gguf.metadata import Metadata
from ds4py.layers.block_spec import BlockSpec
from ds4py.models.decoder import decoder
from ds4py.models.decoder.shape import DecoderShape
from ds4py.models.decoder.sizes import DecoderSizes


def read_shape(metadata: Metadata) -> DecoderShape:
    """Read the shape.

    Raises:
        ModelError: A key is missing, of another type, or impossible.
    """
    sizes = DecoderSizes.read(metadata, "llama")
    has_experts = metadata.get_int("llama.expert_count", 0) != 0
    forward = sizes.experts("feed_forward_length") if has_experts else sizes.dense()
    block = BlockSpec(attention=sizes.attention(), feed_forward=forward)
    return sizes.shape([block] * sizes.n_layers)


ARCHITECTURE = decoder(read_shape)
