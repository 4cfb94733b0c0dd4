"""How the kernels walk through the blocks of a format.

Owns: which formats have kernels, and how their bytes fall into tiles. Refuses to know: Triton, and
what the bits mean (`blocks.py`). Invariant: `Layout.column` numbers every value of a row once.

The kernels take a block apart into *parts*: runs of `lanes` bytes whose values share a scale. Every
byte holds `planes` values, and field `p` of byte `i` belongs to value `width * p + i`, so that one
plane of a part is a run of `lanes` consecutive columns, which loads and stores can follow. Where
the two halves of a field of 32 bytes have a scale each, they are two parts of 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Layout:
    """One format as the kernels see it.

    Args:
        block_bytes: Bytes of a block.
        parts: Parts of a block.
        lanes: Bytes of codes (IQ2_XXS: values of one code) in a part; a power of two.
        planes: Values per byte.
        width: Columns from one plane to the next.
        grain: Bytes that one thread takes at once: more where scales are dear to unpack.
    """

    block_bytes: int
    parts: int
    lanes: int
    planes: int
    width: int
    grain: int = 8

    @property
    def constants(self) -> dict[str, int]:
        """The kernels' compile-time arguments."""
        return {
            "BLOCK_BYTES": self.block_bytes,
            "PARTS": self.parts,
            "LANES": self.lanes,
            "PLANES": self.planes,
            "WIDTH": self.width,
        }


LAYOUTS: Final[dict[str, Layout]] = {
    "Q8_0": Layout(34, parts=1, lanes=32, planes=1, width=32),
    "Q4_0": Layout(18, parts=1, lanes=16, planes=2, width=16),
    "Q4_1": Layout(20, parts=1, lanes=16, planes=2, width=16),
    "Q2_K": Layout(84, parts=4, lanes=16, planes=4, width=32),
    "Q3_K": Layout(110, parts=4, lanes=16, planes=4, width=32),
    "Q4_K": Layout(144, parts=4, lanes=32, planes=2, width=32, grain=16),
    "Q5_K": Layout(176, parts=4, lanes=32, planes=2, width=32, grain=16),
    "Q6_K": Layout(210, parts=4, lanes=16, planes=4, width=32),
    "IQ2_XXS": Layout(66, parts=32, lanes=8, planes=1, width=8),
}
"""By GGML's name. All block sizes are even, so 16-bit fields are aligned wherever a row is."""
