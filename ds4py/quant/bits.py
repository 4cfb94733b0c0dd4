"""Pulling numbers out of packed blocks: halves, words, bit fields, lookup tables.

Owns: the few primitives that all block families share. Refuses to know: any block layout.
Invariant: nothing here waits for the device, except that a table is uploaded the first time a
device needs it; multi-byte numbers are little-endian, as on every host that torch runs on.

`N` is the number of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Final

import torch


def _copied(blocks: torch.Tensor, start: int, size: int) -> torch.Tensor:
    # a fresh copy: a view with a wider dtype needs aligned offsets and strides, which the
    # fields of 18- or 66-byte blocks do not have
    return blocks[:, start : start + size].clone(memory_format=torch.contiguous_format)


def halves(blocks: torch.Tensor, start: int, count: int = 1) -> torch.Tensor:
    """Return `count` binary16 numbers from byte `start` of each block as float32 `[N, count]`."""
    return _copied(blocks, start, 2 * count).view(torch.float16).to(torch.float32)


def words16(blocks: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Return `count` unsigned 16-bit words from byte `start` as int32 `[N, count]`."""
    return _copied(blocks, start, 2 * count).view(torch.int16).to(torch.int32) & 0xFFFF


def words32(blocks: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Return `count` 32-bit words from byte `start` as int32 `[N, count]` (bit 31 is the sign)."""
    return _copied(blocks, start, 4 * count).view(torch.int32)


def planes(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Split bytes into fields, all lowest fields first: `[..., L]` -> `[..., 8 / width, L]`.

    `L` must be a multiple of four.
    """
    n_bytes = packed.shape[-1]
    word = torch.int32 if n_bytes % 8 else torch.int64
    words = packed.clone(memory_format=torch.contiguous_format).view(word)
    # whole words are shifted, and what comes in from the byte above is masked out afterwards
    parts = [words >> shift if shift else words for shift in range(0, 8, width)]
    if packed.device.type == "cpu" and n_bytes % 16 == 0:
        # short runs are joined fastest as the largest elements there are
        parts = [part.view(torch.complex128) for part in parts]
    joined = torch.cat(parts, -1).view(word).bitwise_and_(_in_every_byte((1 << width) - 1, word))
    return joined.view(torch.uint8).view(*packed.shape[:-1], 8 // width, n_bytes)


def _in_every_byte(value: int, word: torch.dtype) -> int:
    """Return a word whose bytes all have a value below 128."""
    return int.from_bytes(bytes([value]) * word.itemsize, "little")


def fields(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Split bytes into fields, byte by byte, lowest first: `[..., L]` -> `[..., L * 8 / width]`."""
    return lookup(table(_spread, packed.device, width), packed).view(torch.uint8).flatten(-2)


def _spread(width: int) -> torch.Tensor:
    """Return the fields of every byte, int8 `[256, 8 / width]`."""
    codes = torch.arange(256).unsqueeze(-1) >> torch.arange(0, 8, width)
    return (codes & ((1 << width) - 1)).to(torch.int8)


def steps(words: torch.Tensor, width: int) -> torch.Tensor:
    """Split int32 words into their four lowest fields, lowest first: `[...]` -> `[..., 4]`."""
    shifts = table(_multiples, words.device, width)
    return (words.unsqueeze(-1) >> shifts) & ((1 << width) - 1)


def septets(words: torch.Tensor) -> torch.Tensor:
    """Give each of the four lowest 7-bit fields of int32 words a byte of its own."""
    pairs = torch.add(words & 0x3FFF, words & 0x0FFFC000, alpha=4)
    return torch.add(pairs & 0x7F007F, pairs & 0x3F803F80, alpha=2)


def _multiples(width: int) -> torch.Tensor:
    return torch.arange(0, 4 * width, width, dtype=torch.int32)


@cache
def table(make: Callable[..., torch.Tensor], device: torch.device, *args: Hashable) -> torch.Tensor:
    """Return `make(*args)` on `device`, made once; callers must not change it."""
    return make(*args).to(device)


def lookup(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return `rows[index]`.

    Args:
        rows: int8 `[K, W]` with `W` 1, 2, 4 or 8.
        index: Any integer type, any shape `[...]`, values below `K`.

    Returns:
        int8 `[..., W]` in new memory.
    """
    # a row is moved as one integer: several times as fast as element by element
    packed = rows.view(_WIDE[rows.shape[1]]).view(-1)
    picked = packed.index_select(0, index.reshape(-1).to(torch.int32))
    return picked.view(torch.int8).view(*index.shape, rows.shape[1])


_WIDE: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def lookup16(values: Callable[[], torch.Tensor], codes: torch.Tensor) -> torch.Tensor:
    """Return `values()[codes]`: int8 `[16]`, uint8 codes below 16 `[...]` -> int8 `[...]`.

    The last axis of `codes` must be even.
    """
    # two codes at a time, read as one 16-bit number: the lookups are what takes the time
    pairs = codes.contiguous().view(torch.int16)
    return lookup(table(_pairs, codes.device, values), pairs).flatten(-2)


def _pairs(values: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the values of both bytes of a 16-bit number, int8 `[0x0f10, 2]`."""
    numbers = torch.arange(0x0F10)
    return values()[torch.stack((numbers & 15, numbers >> 8), -1)]
