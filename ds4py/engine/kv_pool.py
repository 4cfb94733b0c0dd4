"""All cache memory of a process: a fixed number of sessions, taken at start.

Owns: slots. Refuses to know: what a cache row means, session ids. Invariant: a slot belongs to at
most one owner, and taking one never allocates.

On the CPU the memory is reserved, not cleared: the system commits a page when it is first written,
so a long context costs only what it really holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds4py.errors import CapacityError
from ds4py.models.base import CacheTensor


class KvPool:
    """Caches for `n_slots` sessions.

    Args:
        layout: Tensors of one session's cache.
        n_slots: Sessions.
        device: Where the memory lives.

    Raises:
        CapacityError: The device has not enough memory.
    """

    def __init__(self, layout: Sequence[CacheTensor], n_slots: int, device: torch.device):
        self.slot_bytes = sum(_n_bytes(part) for part in layout)
        try:
            self._caches = [
                [torch.empty(part.shape, dtype=part.dtype, device=device) for part in layout]
                for _ in range(n_slots)
            ]
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"memory on {device} for the caches of {n_slots} sessions; "
                "choose a shorter context or fewer sessions",
                needed=self.slot_bytes * n_slots,
                available=_free_bytes(device),
            ) from error
        self._free = list(reversed(range(n_slots)))
        self.n_slots = n_slots

    @property
    def n_free(self) -> int:
        """Slots that nobody owns."""
        return len(self._free)

    def acquire(self) -> int:
        """Take a free slot and return its number.

        Raises:
            CapacityError: All slots are taken.
        """
        if not self._free:
            raise CapacityError(
                "sessions: every cache slot is taken; end a session or start with more",
                needed=self.n_slots + 1,
                available=self.n_slots,
            )
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Give a slot back."""
        assert slot not in self._free, "a slot has one owner"
        self._free.append(slot)

    def cache(self, slot: int) -> list[torch.Tensor]:
        """Return a slot's tensors, as described by the layout; their content is arbitrary."""
        return self._caches[slot]


def _n_bytes(part: CacheTensor) -> int:
    n = part.dtype.itemsize
    for size in part.shape:
        n *= size
    return n


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
