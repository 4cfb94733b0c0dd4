"""The one body of all architectures that are plain blocks with options.

Owns: what such a model is (`shape`), its tensors by name (`tensors`), its weights (`weights`), and
how a slice of it runs (`slice`). Refuses to know: any architecture; those are short modules beside
this folder that make a `DecoderShape` of their metadata.
"""

from ds4py.models.base import Architecture, ReadShape
from ds4py.models.decoder.slice import DecoderSlice


def decoder(read_shape: ReadShape) -> Architecture:
    """Return an architecture that this body computes.

    Args:
        read_shape: Its `DecoderShape` from metadata.
    """
    return Architecture(read_shape, DecoderSlice.load, kv_is_free=True)
