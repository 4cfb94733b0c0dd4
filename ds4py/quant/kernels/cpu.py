"""Four-bit products on the CPU: weights in the layout of ATen's packed int4 kernel.

Owns: turning blocks into codes and scales, the packed form, both ways to multiply with it. Refuses
to know: biases, layers, float32 exactness. Invariant: the packed form is the only copy of the
weights, and both ways use the same numbers, `bf16(scale) * code + bf16(zero)`.

In a group of 32 values a weight is `code * scale + zero`. Formats of four bits fit one plane of
nibbles, other formats with one scale per 32 values fit two (`code = 16 * high + low`), both with
the codes of the file. All remaining block formats are rounded to the nearest of 255 levels between
the ends of their group. So a weight takes 0.625 bytes (one plane) or 1.25 bytes (two planes).

A small batch multiplies nibbles directly, which costs the same for every row; a large one decodes
pieces of the matrix to bfloat16 and multiplies those, which pays from about 32 rows on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Final

import torch

from ds4py.quant.bits import halves
from ds4py.quant.tensor import QuantTensor

GROUP: Final = 32
"""Weights of one row that share a scale."""

PACKED_MAX_ROWS: Final = 32
"""Largest batch that multiplies nibbles directly."""

_ROW_STEP: Final = 64
"""The largest tile of the kernel: rows are padded to a multiple of it."""

_DECODE_VALUES: Final = 1 << 22
"""Weights decoded at once for a large batch: 8 MiB of bfloat16, so that they stay in the cache."""

_PACK_VALUES: Final = 1 << 20
"""Weights packed at once; bounds the temporary memory, some 16 bytes a weight."""

_ONE_PLANE: Final = frozenset({"Q4_0", "Q4_1", "Q4_K"})


@dataclass(frozen=True, slots=True)
class Codes:
    """Groups of 32 weights taken apart.

    Args:
        codes: int8 `[G, 32]`; -8 to 7 for one plane of nibbles, -127 to 127 for two.
        scale: float32 `[G, 1]`.
        zero: float32 `[G, 1]`, the value of code 0.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor


class Int4Weights:
    """A matrix `[N, K]` that the CPU multiplies in packed form.

    Args:
        tensor: A two-dimensional block-quantized matrix on the CPU; only read.
    """

    def __init__(self, tensor: QuantTensor):
        self.n_rows, self.n_columns = tensor.shape
        self._two_planes = tensor.format.name not in _ONE_PLANE
        self._padded = -(-self.n_rows // _ROW_STEP) * _ROW_STEP
        width = self.n_columns * (2 if self._two_planes else 1)
        self._nibbles = torch.empty((self._padded, width // 2), dtype=torch.uint8)
        self._scale_zero = torch.empty((width // GROUP, self._padded, 2), dtype=torch.bfloat16)
        self._tile = tile_rows()
        step = max(_PACK_VALUES // self.n_columns // _ROW_STEP, 1) * _ROW_STEP
        for start in range(0, self._padded, step):
            self._pack(tensor, start, min(start + step, self._padded))

    @property
    def n_bytes(self) -> int:
        """Memory of the packed form."""
        return self._nibbles.nbytes + self._scale_zero.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return bfloat16 `[T, N]` for contiguous bfloat16 `[T, K]`."""
        return self.multiply_packed(x) if x.shape[0] <= PACKED_MAX_ROWS else self.multiply_large(x)

    def multiply_packed(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply nibbles directly; a row's result does not depend on its neighbours."""
        if self._two_planes:
            x = torch.cat((x, x), 1)
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu.default(
            x, self._nibbles, GROUP, self._scale_zero
        )
        return y if self._padded == self.n_rows else y[:, : self.n_rows]

    def multiply_large(self, x: torch.Tensor) -> torch.Tensor:
        """Decode pieces of the matrix and multiply those."""
        step = max(_DECODE_VALUES // self.n_columns // _ROW_STEP, 1) * _ROW_STEP
        ends = [*range(0, self._padded, step), self._padded]
        parts = [x @ self.decode(start, end) for start, end in pairwise(ends)]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return y if self._padded == self.n_rows else y[:, : self.n_rows]

    def decode(self, start: int, end: int) -> torch.Tensor:
        """Return rows `start` to `end`, multiples of 64, as the columns of bfloat16 `[K, rows]`."""
        K, half = self.n_columns, self._tile // 2
        tiles = self._nibbles[start:end].view(-1, self._nibbles.shape[1] * 2, half)
        values = torch.empty((K, end - start), dtype=torch.bfloat16)
        low, high = values.view(K, -1, 2, half).permute(2, 1, 0, 3)
        # copies, because strided factors would slow the last product down by six times
        scale, zero = self._scale_zero[-(K // GROUP) :, start:end].permute(2, 0, 1).contiguous()
        if self._two_planes:
            upper, lower = tiles[:, :K], tiles[:, K:]
            low.copy_(((upper << 4) ^ 0x80 | (lower & 15)).view(torch.int8))
            high.copy_(((upper & 0xF0) ^ 0x80 | (lower >> 4)).view(torch.int8))
            zero = zero - 8 * scale
        else:
            signed = (tiles ^ 0x88).view(torch.int8)
            low.copy_((signed << 4) >> 4)
            high.copy_(signed >> 4)
        grouped = values.view(K // GROUP, GROUP, -1)
        torch.addcmul(zero.unsqueeze(1), grouped, scale.unsqueeze(1), out=grouped)
        return values

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Return some rows of the matrix: int64 `[R]` to float32 `[R, K]`."""
        half, n_groups = self._tile // 2, self.n_columns // GROUP
        within = index % self._tile
        tiles = self._nibbles.view(-1, self._nibbles.shape[1] * 2, half)
        shift = (within // half * 4).to(torch.uint8).unsqueeze(1)
        codes = ((tiles[index // self._tile, :, within % half] >> shift) & 15).float()
        scale, zero = self._scale_zero[-n_groups:].index_select(1, index).float().permute(2, 1, 0)
        if self._two_planes:
            upper, lower = codes.chunk(2, 1)
            codes = upper * 16 + lower - 128
            zero = zero - 8 * scale
        else:
            codes -= 8
        grouped = codes.view(-1, n_groups, GROUP)
        return torch.addcmul(zero.unsqueeze(2), grouped, scale.unsqueeze(2)).flatten(1)

    def _pack(self, tensor: QuantTensor, start: int, end: int) -> None:
        n_real = min(end, self.n_rows) - start
        part = take_apart(tensor, start, start + n_real)
        codes, scale, zero = (
            torch.nn.functional.pad(values.reshape(n_real, -1), (0, 0, 0, end - start - n_real))
            for values in (part.codes, part.scale.bfloat16(), part.zero.bfloat16())
        )
        # the kernel's nibbles are unsigned, 8 is their middle and stands for `zero`
        if self._two_planes:
            codes = torch.cat(((codes >> 4) + 8, codes & 15), 1)
            scale, zero = (
                torch.cat((scale * 16, scale), 1),
                torch.cat((0 * zero, zero + 8 * scale), 1),
            )
        else:
            codes = codes + 8
        self._scale_zero[:, start:end] = torch.stack((scale.t(), zero.t()), 2)
        self._nibbles[start:end] = _convert(codes)


def take_apart(tensor: QuantTensor, start: int, end: int) -> Codes:
    """Return codes and scales of rows `start` to `end` in the order of the values."""
    blocks = tensor.raw[start:end].view(-1, tensor.format.block_bytes)
    values = tensor.format.decode(blocks).view(-1, GROUP)
    match tensor.format.name:
        case "Q4_0" | "Q5_0" | "Q8_0" | "IQ4_NL":
            scale = halves(blocks, 0)
            zero = torch.zeros_like(scale)
        case "Q4_1":
            scale = halves(blocks, 0)
            zero = halves(blocks, 2) + 8 * scale
        case "Q5_1":
            scale = halves(blocks, 0)
            zero = halves(blocks, 2) + 16 * scale
        case "Q4_K":
            scale, minimum = _probed(tensor, blocks, codes_at=16, nibbles_at=16)
            zero = minimum + 8 * scale
        case "Q5_K":
            scale, minimum = _probed(tensor, blocks, codes_at=16, nibbles_at=48)
            zero = minimum + 16 * scale
        case _:  # the product uses rounded factors, so the levels must be laid for those
            ends = torch.stack(values.aminmax(dim=1, keepdim=True))
            zero = ends.mean(0).bfloat16().float()
            scale = ((ends - zero).abs().amax(0) / 127).bfloat16().float()
    limits = (-8, 7) if tensor.format.name in _ONE_PLANE else (-127, 127)
    levels = (values - zero) / scale.where(scale != 0, 1)
    return Codes(levels.round_().clamp_(*limits).to(torch.int8), scale, zero)


def _probed(
    tensor: QuantTensor, blocks: torch.Tensor, *, codes_at: int, nibbles_at: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find scales and minima `[G, 1]` of a super-block by decoding blocks with chosen codes.

    Codes are the bytes from `codes_at`, their low nibbles those from `nibbles_at`; bytes 2-3 are
    the factor of the minima.
    """
    probe = blocks.clone()
    probe[:, codes_at:] = 0
    minimum = tensor.format.decode(probe).view(-1, GROUP)[:, :1]
    probe[:, nibbles_at:] = 0x11
    probe[:, 2:4] = 0
    return tensor.format.decode(probe).view(-1, GROUP)[:, :1], minimum


@cache
def tile_rows() -> int:
    """Return how many rows the kernel of this processor interleaves; 0 if we can not tell.

    In a tile of `2 n` rows, byte `i` of a column holds row `i` in its low and row `i + n` in its
    high nibble. ATen chooses the tile by the vector width, so a probe is packed to find it out.
    """
    if not hasattr(torch.ops.aten, "_convert_weight_to_int4pack_for_cpu"):
        return 0
    generator = torch.Generator().manual_seed(0)
    probe = torch.randint(0, 16, (_ROW_STEP, GROUP), generator=generator, dtype=torch.uint8)
    packed = _convert(probe)
    for tile in (64, 32):
        half = tile // 2
        tiles = packed.view(-1, GROUP, half)
        rows = torch.cat((tiles & 15, tiles >> 4), 2).transpose(1, 2).reshape(_ROW_STEP, GROUP)
        if torch.equal(rows, probe):
            return tile
    return 0


def _convert(nibbles: torch.Tensor) -> torch.Tensor:
    """Pack nibbles `[N, K]` of any integer type to uint8 `[N, K / 2]`."""
    packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles.int(), 1)
    return packed
