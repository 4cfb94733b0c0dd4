"""Blocks of 32 values with one scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

Owns: their layouts. A 4-bit code array holds value `i` in the low and value `i + 16` in the high
nibble of byte `i`; the fifth bit of value `i` is bit `i` of a 32-bit word.

| format | scale | offset     | fifth bits | codes | value         |
|--------|-------|------------|------------|-------|---------------|
| Q4_0   | 0-1   |            |            | 2-17  | d * (q - 8)   |
| Q4_1   | 0-1   | 2-3        |            | 4-19  | d * q + m     |
| Q5_0   | 0-1   |            | 2-5        | 6-21  | d * (q - 16)  |
| Q5_1   | 0-1   | 2-3        | 4-7        | 8-23  | d * q + m     |
| Q8_0   | 0-1   |            |            | 2-33  | d * q, signed |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from ds4py.quant.bits import fields, halves, planes


def _codes4(blocks: torch.Tensor, start: int) -> torch.Tensor:
    return planes(blocks[:, start : start + 16], 4).flatten(1)


def _codes5(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Fifth bits at `start`, nibbles right after them."""
    fifth = fields(blocks[:, start : start + 4], 1)
    return _codes4(blocks, start + 4).bitwise_or_(fifth << 4)


def q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """Decode Q4_0: uint8 `[N, 18]` -> float32 `[N, 32]`."""
    return _codes4(blocks, 2).to(torch.float32).sub_(8).mul_(halves(blocks, 0))


def q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """Decode Q4_1: uint8 `[N, 20]` -> float32 `[N, 32]`."""
    values = _codes4(blocks, 4).to(torch.float32)
    return values.mul_(halves(blocks, 0)).add_(halves(blocks, 2))


def q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """Decode Q5_0: uint8 `[N, 22]` -> float32 `[N, 32]`."""
    return _codes5(blocks, 2).to(torch.float32).sub_(16).mul_(halves(blocks, 0))


def q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """Decode Q5_1: uint8 `[N, 24]` -> float32 `[N, 32]`."""
    values = _codes5(blocks, 4).to(torch.float32)
    return values.mul_(halves(blocks, 0)).add_(halves(blocks, 2))


def q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """Decode Q8_0: uint8 `[N, 34]` -> float32 `[N, 32]`."""
    return blocks[:, 2:].view(torch.int8).to(torch.float32).mul_(halves(blocks, 0))


DECODERS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
}
