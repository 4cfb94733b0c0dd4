"""What the layers of a slice share while one batch runs: where its tokens stand.

Owns: positions of the batch's tokens, and the rotations that follow from them. Refuses to know:
caches, weights. Invariant: everything is computed on the host from host integers, once per batch,
so that no layer waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from ds4py.models.base import DeviceSpec
from ds4py.models.deepseek4.rotary import Positions, Rotary
from ds4py.models.deepseek4.shape import Shape


class Rotaries:
    """The two sets of angles of a model.

    Args:
        shape: The model.
        spec: Device, and whether the C engine's angles are wanted.
    """

    def __init__(self, shape: Shape, spec: DeviceSpec):
        self.device = spec.device
        n_rot, exact = shape.n_rot, spec.act_quant
        self._plain = Rotary(n_rot, shape.rope_base, None, spec.device, engine_angles=exact)
        self._extended = Rotary(
            n_rot, shape.compressed_rope_base, shape.yarn, spec.device, engine_angles=exact
        )

    def at(self, positions: Positions, *, compressed: bool) -> torch.Tensor:
        """Return complex64 `[T, 1, R / 2]` for layers with or without compression."""
        return (self._extended if compressed else self._plain).at(positions)


class Step:
    """One batch: segments of several sessions, one after the other.

    Args:
        rotaries: Of the model.
        segments: First position and number of tokens of every segment.
    """

    def __init__(self, rotaries: Rotaries, segments: Sequence[tuple[int, int]]):
        self.segments = segments
        self._rotaries = rotaries
        self._positions = np.concatenate(
            [np.arange(pos0, pos0 + n_tokens) for pos0, n_tokens in segments]
        )
        self._memo: dict[tuple[int, int], torch.Tensor] = {}

    @cached_property
    def plain(self) -> torch.Tensor:
        """Rotations of the tokens in layers without compression, `[T, 1, R / 2]`."""
        return self._rotaries.at(self._positions, compressed=False)

    @cached_property
    def extended(self) -> torch.Tensor:
        """Rotations of the tokens in layers with compression, `[T, 1, R / 2]`."""
        return self._rotaries.at(self._positions, compressed=True)

    def phases(self, ratio: int) -> torch.Tensor:
        """Return every token's place inside its window: int64 `[T]`."""
        key = (ratio, -1)
        if key not in self._memo:
            phases = torch.from_numpy(self._positions % ratio)
            self._memo[key] = phases.to(self._rotaries.device, non_blocking=True)
        return self._memo[key]

    def window_starts(self, ratio: int, segment: int) -> torch.Tensor:
        """Return the rotations of the windows that end inside a segment, `[windows, 1, R / 2]`."""
        key = (ratio, segment)
        if key not in self._memo:
            pos0, n_tokens = self.segments[segment]
            starts = ratio * np.arange(pos0 // ratio, (pos0 + n_tokens) // ratio)
            self._memo[key] = self._rotaries.at(starts, compressed=True)
        return self._memo[key]
