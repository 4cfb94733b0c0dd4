"""What one decode step of several sessions reads, all of it on the device.

Owns: the order of the numbers in the one tensor that is uploaded for a step. Refuses to know: who
computes the step. Invariant: a step's tensors may be overwritten in place and the step run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ds4py.kernels.cache import Segment
from ds4py.kernels.memory import cache_address, check_launch


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One token of each of `B` sessions.

    Args:
        numbers: int64 `[2 + n, B]`: token ids, positions, and for each of the `n` tensors of a
            session's cache (see `Slice.cache_layout`) its address in every session.
        hidden: float32 `[B, W]`, the output of the layer before; None if the slice starts at 0.
    """

    numbers: torch.Tensor
    hidden: torch.Tensor | None

    @property
    def tokens(self) -> torch.Tensor:
        """Token ids, int64 `[B]`."""
        return self.numbers[0]

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the tokens, int64 `[B]`."""
        return self.numbers[1]

    @property
    def addresses(self) -> torch.Tensor:
        """Where every tensor of every session's cache begins, int64 `[n, B]`."""
        return self.numbers[2:]


def step_numbers(tokens: Sequence[int], segments: Sequence[Segment]) -> list[list[int]]:
    """Return the content of `DecodeStep.numbers` for segments of one token each.

    The caches must stay where they are until the step has run.

    Raises:
        KernelError: A cache is not contiguous or not aligned.
    """
    assert all(segment.n_tokens == 1 for segment in segments), "one token a session"
    addresses = [[cache_address(part) for part in segment.cache] for segment in segments]
    positions = [segment.pos0 for segment in segments]
    return [list(tokens), positions, *map(list, zip(*addresses, strict=True))]


def check_step(
    values: torch.Tensor,
    addresses: torch.Tensor,
    positions: torch.Tensor,
    row: tuple[int, ...],
    *,
    rows_apart: bool = False,
) -> None:
    """Check what a kernel over all sessions of a step gets.

    Args:
        values: float32, one row for each of `B` sessions.
        addresses: int64 `[B]`.
        positions: int64 `[B]`.
        row: Shape of a row of `values`.
        rows_apart: The kernel is told how far the rows of `values` are apart.

    Raises:
        KernelError: Something is of another type or size, elsewhere, or lies otherwise.
    """
    device, n_sessions = values.device, values.shape[0]
    check_launch(
        values,
        "values of a step",
        dtypes=(torch.float32,),
        shape=(n_sessions, *row),
        device=device,
        rows_apart=rows_apart,
    )
    for name, numbers in (("addresses", addresses), ("positions", positions)):
        check_launch(numbers, name, dtypes=(torch.int64,), shape=(n_sessions,), device=device)


class DecodesSteps(Protocol):
    """What runs a slice's step without asking the host anything; see `models.base.Slice`."""

    def decode_step(self, step: DecodeStep) -> torch.Tensor:
        """Run the layers over one token of each session and write their cache rows.

        Embeds the tokens first if `step.hidden` is None. May run while the device records it: no
        copies to or from the host, no shapes that depend on values, and no tensor of `step` or of
        the weights is changed.

        Returns:
            Hidden states float32 `[B, W]`.
        """
