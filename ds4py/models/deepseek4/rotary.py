"""Rotary positions of DeepSeek V4: the last dimensions of a head, adjacent pairs, optional YaRN.

Owns: angles of any positions, and turning pairs by them (docs/spec/deepseek4-model.md#rope).
Refuses to know: which layer uses which base. Invariant: turned vectors keep their length; YaRN's
factor on it is divided out again by the model.

Angles are computed in float64 and rounded once, or, for comparisons with the C engine, by its
float32 recurrence, whose error grows with the position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Extension of a context that the frequencies were not made for.

    Args:
        factor: Slow pairs turn so many times more slowly.
        n_ctx_original: Context length before the extension.
        beta_fast: Turns over the original context above which a pair keeps its speed.
        beta_slow: Turns below which it is slowed down fully.
    """

    factor: float
    n_ctx_original: int
    beta_fast: float
    beta_slow: float


class Rotary:
    """Angles for one frequency base.

    Args:
        n_rot: Rotary dimensions `R` at the end of a head.
        base: Frequency base.
        yarn: Context extension, or None.
        device: Where rotations are wanted.
        engine_angles: Use the C engine's float32 recurrence.
    """

    def __init__(
        self,
        n_rot: int,
        base: float,
        yarn: Yarn | None,
        device: torch.device,
        *,
        engine_angles: bool = False,
    ):
        self._n_rot = n_rot
        self._base = base
        self._device = device
        self._engine_angles = engine_angles
        self._factor = 1.0 if yarn is None else yarn.factor
        kept = np.ones(n_rot // 2) if yarn is None else _kept_speed(n_rot, base, yarn)
        self._kept = kept

    def at(self, positions: Positions) -> torch.Tensor:
        """Return the rotations of positions `[T]`: complex64 `[T, 1, R / 2]` on the device."""
        angles = self._recurrence(positions) if self._engine_angles else self._angles(positions)
        turns = np.exp(1j * angles.astype(np.float64)).astype(np.complex64)
        return torch.from_numpy(turns).unsqueeze(1).to(self._device, non_blocking=True)

    def _angles(self, positions: Positions) -> npt.NDArray[np.float64]:
        pair = np.arange(self._n_rot // 2)
        plain = self._base ** (-2.0 * pair / self._n_rot)
        slowed = plain * (self._kept + (1 - self._kept) / self._factor)
        return np.multiply.outer(positions.astype(np.float64), slowed)

    def _recurrence(self, positions: Positions) -> npt.NDArray[np.float32]:
        """Multiply from pair to pair, rounding to float32 each time."""
        step = np.float32(self._base ** float(np.float32(-2) / np.float32(self._n_rot)))
        steps = np.full((len(positions), self._n_rot // 2), step, np.float32)
        steps[:, 0] = positions
        plain = np.multiply.accumulate(steps, axis=1)
        kept = self._kept.astype(np.float32)
        slowed = np.float32(1 / self._factor) * plain
        mixed = slowed * (1 - kept) + plain * kept
        return np.asarray(mixed, np.float32)


def rotate_(heads: torch.Tensor, rotation: torch.Tensor) -> None:
    """Turn the last pairs of each head in place.

    Args:
        heads: float32 `[T, heads, HD]`, last axis contiguous, `HD` even.
        rotation: complex64 `[T, 1, R / 2]`; its conjugate turns back.
    """
    n_tokens, n_heads, width = heads.shape
    pairs = torch.view_as_complex(heads.view(n_tokens, n_heads, width // 2, 2))
    pairs[..., width // 2 - rotation.shape[-1] :].mul_(rotation)


def _kept_speed(n_rot: int, base: float, yarn: Yarn) -> npt.NDArray[np.float64]:
    """Return how much of its speed each pair keeps: 1 for fast pairs, 0 for slow ones."""
    low = max(0, math.floor(_pair_turning(yarn.beta_fast, n_rot, base, yarn)))
    high = min(n_rot - 1, math.ceil(_pair_turning(yarn.beta_slow, n_rot, base, yarn)))
    pair = np.arange(n_rot // 2)
    return 1 - np.clip((pair - low) / max(high - low, 0.001), 0, 1)


def _pair_turning(turns: float, n_rot: int, base: float, yarn: Yarn) -> float:
    """Return the (fractional) pair that makes so many turns over the original context."""
    wave = yarn.n_ctx_original / (2 * math.pi * turns)
    return n_rot * math.log(wave) / (2 * math.log(base))
