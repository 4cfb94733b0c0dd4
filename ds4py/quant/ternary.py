"""Super-blocks of 256 values that are -1, 0 or 1 times one scale: TQ1_0, TQ2_0.

Owns: their layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from ds4py.quant.bits import halves, planes, table


def tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    """Decode TQ1_0: uint8 `[N, 54]` -> float32 `[N, 256]`.

    0-47 five values a byte, 48-51 four values a byte, 52-53 d. A byte is a fraction of 256 whose
    ternary digits are the codes plus 1: digit `n` of byte `b` is `((b * 3**n mod 256) * 3) >> 8`.
    Bytes 0-31, 32-47 and 48-51 form three runs; in a run, all first digits come first.
    """
    runs = (blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)
    digits = torch.cat([_digits(run, count) for run, count in runs], 1)
    return digits.to(torch.float32).sub_(1).mul_(halves(blocks, 52))


def _digits(run: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first `count` ternary digits of bytes: uint8 `[N, L]` -> `[N, count * L]`."""
    powers = table(_powers_of_3, run.device)[:count].view(-1, 1)
    shifted = run.unsqueeze(1) * powers  # uint8 on purpose: it wraps at 256
    return ((shifted.to(torch.int16) * 3) >> 8).flatten(1)


def _powers_of_3() -> torch.Tensor:
    return torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)


def tq2_0(blocks: torch.Tensor) -> torch.Tensor:
    """Decode TQ2_0: uint8 `[N, 66]` -> float32 `[N, 256]`.

    0-63 codes of 2 bits, stored plus 1 (32 bytes per half; field `f` of byte `i` belongs to value
    `32 f + i`), 64-65 d.
    """
    codes = planes(blocks[:, :64].reshape(-1, 2, 32), 2).flatten(1)
    return codes.to(torch.float32).sub_(1).mul_(halves(blocks, 64))


DECODERS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "TQ1_0": tq1_0,
    "TQ2_0": tq2_0,
}
