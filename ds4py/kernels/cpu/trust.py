"""Which kernels compute rightly on this very processor, found out before they are used.

Owns: the verdicts of this process, the warning about a kernel that is left out. Refuses to know:
kernels, how one is compared, where verdicts are remembered. Invariant: a kernel is compared once in
a process, and one that differs is used nowhere: anyone who would take it asks here first.

A kernel is compiled by LLVM for the processor at hand, which may be one that no test ever ran on.
So its results are compared with torch's before a model relies on them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch

log = logging.getLogger(__name__)

ROWS: Final = (1, 2, 5, 12)
"""Sizes of a batch that are compared: alone, and each way in which rows are taken together."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far a kernel is from torch.

    Args:
        error: Largest relative RMS of the difference over the sizes of a batch; NaN if a result is
            not a number.
        limit: What rounding explains.
    """

    error: float
    limit: float

    @property
    def is_right(self) -> bool:
        """Whether rounding explains the difference; NaN is explained by nothing."""
        return self.error <= self.limit


Check = Callable[[], Comparison]


class Memory(Protocol):
    """Verdicts of earlier processes on this processor, with these versions."""

    def get(self, kernel: str) -> bool | None:
        """Return a verdict, None if there is none."""

    def put(self, kernel: str, *, is_right: bool) -> None:
        """Remember a verdict; may fail in silence."""


@dataclass(slots=True)
class Trust:
    """Verdicts by kernel.

    Args:
        memory: Of earlier processes; None remembers nothing.
    """

    memory: Memory | None = None
    _verdicts: dict[str, bool] = field(default_factory=dict)

    def in_kernel(self, kernel: str, check: Check) -> bool:
        """Say whether a kernel may be used, comparing it first if nothing is known.

        Args:
            kernel: Its name, for the warning and for memory.
            check: Compares it with torch.
        """
        if kernel not in self._verdicts:
            self._verdicts[kernel] = self._found_out(kernel, check)
        return self._verdicts[kernel]

    def forget(self) -> None:
        """Forget the verdicts of this process; what is remembered elsewhere stays."""
        self._verdicts.clear()

    def _found_out(self, kernel: str, check: Check) -> bool:
        known = None if self.memory is None else self.memory.get(kernel)
        found = None if known is not None else _compared(check)
        is_right = known if found is None else found.is_right
        if found is not None and self.memory is not None:
            self.memory.put(kernel, is_right=bool(is_right))
        if not is_right:
            log.warning(
                "kernel %r gives other results than torch on this processor%s and is left out: "
                "torch computes instead, more slowly; run ds4py selftest and report what it prints",
                kernel,
                "" if found is None else f" (off by {found.error:.1g}, expected {found.limit:.1g})",
            )
        return bool(is_right)


def _compared(check: Check) -> Comparison:
    """Run a comparison; a kernel that cannot be compiled here is as far off as can be."""
    try:
        return check()
    except RuntimeError as e:  # LLVM's
        log.debug("a kernel cannot be compiled: %s", e)
        return Comparison(error=math.inf, limit=0.0)


TRUST: Final = Trust()
"""Of this process."""


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the RMS of the difference as a part of the RMS of `expected`; NaN spreads."""
    exact = expected.double()
    error = (got.double() - exact).square().mean() / exact.square().mean()
    return float(error.sqrt())
