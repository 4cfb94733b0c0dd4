"""Random packed blocks of every tensor type, with scales that mean something."""

import numpy as np
import numpy.typing as npt

from ds4py.quant.formats import QuantFormat

U8 = npt.NDArray[np.uint8]

HALF_OFFSETS: dict[str, tuple[int, ...]] = {
    "F16": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ1_S": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Where the binary16 numbers of a block stand; other types have none, or scattered ones."""

EDGES = (0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF)
"""Zeros, subnormals, the smallest normal, ones, the largest, as binary16 patterns."""


def any_blocks(kind: QuantFormat, seed: int, n_blocks: int) -> U8:
    """Bytes without any restraint: scales may be infinite or NaN."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n_blocks, kind.block_bytes), dtype=np.uint8)


def finite_blocks(kind: QuantFormat, seed: int, n_blocks: int) -> U8:
    """Random codes with finite scales of any size and sign; the first blocks have edge scales."""
    blocks = any_blocks(kind, seed, n_blocks)
    rng = np.random.default_rng(seed + 1)
    for offset in HALF_OFFSETS.get(kind.name, ()):
        scales = _finite_halves(rng, n_blocks)
        n_edges = min(n_blocks, len(EDGES))
        scales[:n_edges] = rng.permutation(np.array(EDGES, "<u2"))[:n_edges]
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind.name == "IQ1_M":
        _scatter(blocks, _finite_halves(rng, n_blocks))
    if kind.name in {"F32", "F64", "BF16"}:
        _plain(blocks, kind.name, rng)
    return blocks


def _finite_halves(rng: np.random.Generator, count: int) -> npt.NDArray[np.uint16]:
    sign = rng.integers(0, 2, count, dtype=np.uint16) << 15
    return sign | rng.integers(0, 0x7C00, count, dtype=np.uint16)


def _scatter(blocks: U8, scales: npt.NDArray[np.uint16]) -> None:
    """Put the scale of IQ1_M where it belongs: a nibble in the top of each of the four words."""
    for i in range(4):
        nibble = (scales >> (4 * i)) & 15
        top = blocks[:, 49 + 2 * i]
        top[:] = (top & 15) | (nibble.astype(np.uint8) << 4)


def _plain(blocks: U8, name: str, rng: np.random.Generator) -> None:
    values = rng.standard_normal(len(blocks)) * 10.0 ** rng.integers(-30, 30, len(blocks))
    if name == "F64":
        blocks[:] = values.astype("<f8").view(np.uint8).reshape(-1, 8)
        return
    packed = values.astype("<f4").view(np.uint8).reshape(-1, 4)
    blocks[:] = packed if name == "F32" else packed[:, 2:]
