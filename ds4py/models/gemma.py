"""The Gemma families of plain blocks: gemma2, gemma3.

Owns: what of the metadata makes which block. Refuses to know: tensors, computation.

Norms stand before and after each half; the gate is a GELU; what the embedding gives is multiplied
by the square root of the width. Most layers see a window only: all but every sixth of gemma3, which
also turn by a base of their own, and every second of gemma2. The norms' weights in the file have
the 1 added already that the original adds.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from ds4py.gguf.metadata import Metadata
from ds4py.layers.block_spec import BlockSpec
from ds4py.layers.rope import RopeParams
from ds4py.models.decoder import decoder
from ds4py.models.decoder.shape import DecoderShape
from ds4py.models.decoder.sizes import DecoderSizes

_PERIOD: Final = {"gemma2": 2, "gemma3": 6}
"""One layer of so many, the last, sees everything."""

_BY_WIDTH: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose scores are scaled by `W / H` instead of the width of a head; the
files do not say so."""


def read_shape(metadata: Metadata) -> DecoderShape:
    """Read the shape.

    Raises:
        ModelError: A key is missing, of another type, or impossible.
    """
    name = metadata.require_str("general.architecture")
    sizes = DecoderSizes.read(metadata, name)
    keys, is_old = sizes.keys, name == "gemma2"
    by_width = sizes.n_layers == _BY_WIDTH[name]
    full = sizes.attention(
        halves=True,
        qk_norm="none" if is_old else "head",
        soft_cap=keys.not_negative("attn_logit_softcapping", 50.0 if is_old else 0.0),
        **({"scale": math.sqrt(sizes.n_head / sizes.n_embd)} if by_width else {}),
    )
    window = keys.count("attention.sliding_window", 1 << 31, 4096 if is_old else 0)
    local = replace(full, window=window)
    if not is_old:
        # the scaling of long contexts is for layers that see long contexts
        base = keys.above_zero("rope.freq_base_swa", 10000.0)
        local = replace(local, rope=RopeParams(n_dims=full.rope.n_dims, base=base))
    is_windowed = sizes.windowed(_PERIOD[name]) if window else [False] * sizes.n_layers
    forward = sizes.dense(activation="gelu")
    blocks = [
        BlockSpec(attention=local if narrow else full, feed_forward=forward, norm_after=True)
        for narrow in is_windowed
    ]
    return sizes.shape(
        blocks,
        embedding_scale=math.sqrt(sizes.n_embd),
        logit_soft_cap=keys.not_negative("final_logit_softcapping", 30.0 if is_old else 0.0),
    )


ARCHITECTURE = decoder(read_shape)
