"""All cache memory of a process: room for some sessions, and a budget that they share.

Owns: slots, the account of which holds how many pages. Refuses to know: what a cache row means,
session ids. Invariant: a slot belongs to at most one owner, all of them together never hold more
than the budget, and what is refused changed nothing.

On the CPU a slot is address space for a whole context: the system commits memory when rows are
written, and gets it back when a session ends or is cut back. A GPU's memory is taken at the start,
so there the budget must hold every slot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import psutil  # type: ignore[import-untyped]  # the package has no annotations
import torch

from ds4py.engine import host_memory
from ds4py.engine.container_limits import ContainerLimits, read_limits
from ds4py.errors import CacheFullError, CapacityError
from ds4py.kernels.cache import CacheTensor
from ds4py.kernels.memory import KernelBuffer

PAGE_TOKENS: Final = 256
"""Tokens for which a session takes memory at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvUse:
    """The account of a pool at one moment.

    Args:
        budget: Bytes that all sessions may hold together.
        used: Bytes that they hold.
        tokens: How many tokens each session has memory for, in no order.
    """

    budget: int
    used: int
    tokens: tuple[int, ...]


class KvPool:
    """Caches for `n_slots` sessions.

    Args:
        layout: Tensors of one session's cache.
        n_slots: Sessions.
        device: Where the memory lives.
        n_ctx: Tokens that one session's cache has room for.
        budget: Bytes that all sessions may hold together; None takes `default_budget`.

    Raises:
        CapacityError: The device has not enough memory, or the budget is too small to begin.
    """

    def __init__(
        self,
        layout: Sequence[CacheTensor],
        n_slots: int,
        device: torch.device,
        *,
        n_ctx: int,
        budget: int | None = None,
    ):
        self._parts = [_Part.of(tensor, n_ctx) for tensor in layout]
        self._is_paged = device.type == "cpu"
        self.n_slots = n_slots
        self.slot_bytes = self._cost(n_ctx)
        whole = n_slots * self.slot_bytes
        self._budget = default_budget(whole, device) if budget is None else budget
        self._used = 0
        self._check_budget(n_ctx)
        self._caches = _reserved(layout, n_slots, device, whole)
        self._free = list(reversed(range(n_slots)))
        self._tokens: dict[int, int] = {}

    @property
    def n_free(self) -> int:
        """Slots that nobody owns."""
        return len(self._free)

    @property
    def use(self) -> KvUse:
        """The account; may be read on any thread."""
        return KvUse(budget=self._budget, used=self._used, tokens=tuple(self._tokens.values()))

    def acquire(self, n_tokens: int = 0) -> int:
        """Take a free slot, with memory for so many tokens, and return its number.

        Raises:
            CapacityError: All slots are taken, or the budget has not enough left.
        """
        if not self._free:
            raise CacheFullError(
                "every session slot is taken; end a session or raise --sessions",
                needed=self.n_slots + 1,
                available=self.n_slots,
            )
        self._charge(0, n_tokens)
        slot = self._free.pop()
        self._tokens[slot] = n_tokens
        return slot

    def resize(self, slot: int, n_tokens: int) -> None:
        """Let an owned slot have memory for so many tokens; keeps what of them is there.

        Raises:
            CapacityError: The budget has not enough left.
        """
        held = self._tokens[slot]
        self._charge(held, n_tokens)
        self._tokens[slot] = n_tokens
        if self._is_paged and _n_pages(n_tokens) < _n_pages(held):
            for part, tensor in zip(self._parts, self._caches[slot], strict=True):
                part.give_back(_address(tensor), held, n_tokens)

    def release(self, slot: int) -> None:
        """Give a slot back."""
        assert slot not in self._free, "a slot has one owner"
        self.resize(slot, 0)
        del self._tokens[slot]
        self._free.append(slot)

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        """Copy what the first tokens of a slot need to another one.

        Both must have memory for them. A tensor without a token axis is copied as a whole.
        """
        pairs = zip(self._caches[source], self._caches[target], strict=True)
        for part, (old, new) in zip(self._parts, pairs, strict=True):
            part.head(new, n_tokens).copy_(part.head(old, n_tokens))

    def cache(self, slot: int) -> list[torch.Tensor]:
        """Return a slot's tensors, as described by the layout; their content is arbitrary.

        Only rows of tokens that the slot has memory for may be written.
        """
        return self._caches[slot]

    def _cost(self, n_tokens: int) -> int:
        """Return the bytes that a session of so many tokens holds."""
        return sum(part.n_planes * part.rows(n_tokens) * part.row_bytes for part in self._parts)

    def _charge(self, held: int, wanted: int) -> None:
        """Change what one session holds, if the budget allows."""
        if _n_pages(held) == _n_pages(wanted):
            return
        more, left = self._cost(wanted) - self._cost(held), self._budget - self._used
        if more > left:
            raise CacheFullError(
                f"{len(self._tokens)} sessions hold {_size(self._used)} of the budget of "
                f"{_size(self._budget)}, and a session of {held} tokens would have {wanted}; end a "
                "session, shorten the prompt, or start with a larger --kv-budget; bytes",
                needed=more,
                available=left,
            )
        self._used += more

    def _check_budget(self, n_ctx: int) -> None:
        """Refuse a budget with which nothing could begin."""
        if self._is_paged:
            needed = self._cost(1)
            what = f"the first {min(PAGE_TOKENS, n_ctx)} tokens of a session take"
        else:
            needed = self.n_slots * self.slot_bytes
            what = f"{self.n_slots} sessions of {n_ctx} tokens take from the start"
        if needed > self._budget:
            raise CapacityError(
                f"--kv-budget of {_size(self._budget)}: {what} {_size(needed)}; give more, or "
                "choose fewer sessions, a shorter context or a smaller --kv-type; bytes",
                needed=needed,
                available=self._budget,
            )


@dataclass(frozen=True, slots=True)
class _Part:
    """How one tensor of a cache fills.

    Args:
        n_planes: Times that the tokens' rows lie in it.
        n_rows: Rows of a plane. A tensor without a token axis is one row, of the first token.
        row_bytes: Of one row.
        n_ctx: Tokens whose rows fill a plane.
    """

    n_planes: int
    n_rows: int
    row_bytes: int
    n_ctx: int

    @classmethod
    def of(cls, tensor: CacheTensor, n_ctx: int) -> _Part:
        size, axis = tensor.dtype.itemsize, tensor.token_axis
        if axis is None:
            return cls(1, 1, size * math.prod(tensor.shape), n_ctx)
        planes, rows = math.prod(tensor.shape[:axis]), tensor.shape[axis]
        return cls(planes, rows, size * math.prod(tensor.shape[axis + 1 :]), n_ctx)

    def rows(self, n_tokens: int) -> int:
        """Return how many rows of each plane a session of so many tokens holds."""
        return self._rows_of(min(_n_pages(n_tokens) * PAGE_TOKENS, self.n_ctx))

    def head(self, tensor: torch.Tensor, n_tokens: int) -> torch.Tensor:
        """Return the rows of the first tokens in every plane, as a view."""
        planes = tensor.view(self.n_planes, self.n_rows, -1)
        return planes[:, : self._rows_of(n_tokens)]

    def _rows_of(self, n_tokens: int) -> int:
        return -(-n_tokens * self.n_rows // self.n_ctx)

    def give_back(self, address: int, held: int, kept: int) -> None:
        """Let the system have what a session of `held` tokens holds more than one of `kept`."""
        first, end = self.rows(kept), self.rows(held)
        if first == 0:  # all of it, and the seams between the planes
            host_memory.give_back(address, self.n_planes * self.n_rows * self.row_bytes)
            return
        for plane in range(self.n_planes):
            start = address + (plane * self.n_rows + first) * self.row_bytes
            host_memory.give_back(start, (end - first) * self.row_bytes)


def default_budget(whole: int, device: torch.device, limits: ContainerLimits | None = None) -> int:
    """Return what sessions may hold if the user does not say.

    Args:
        whole: Bytes of all of them, if every one used its whole context.
        device: Where they live.
        limits: Of the container; None reads them.

    Returns:
        All that they could need, but on the CPU at most half of the memory that is free now, for
        the machine and for the container.
    """
    if device.type != "cpu":
        return whole
    free: int = psutil.virtual_memory().available
    left = (limits or read_limits()).memory_left
    return min(whole, (free if left is None else min(free, left)) // 2)


def _reserved(
    layout: Sequence[CacheTensor], n_slots: int, device: torch.device, whole: int
) -> list[list[torch.Tensor]]:
    """Return the tensors of every slot."""
    try:
        slots = [
            [torch.empty(part.shape, dtype=part.dtype, device=device) for part in layout]
            for _ in range(n_slots)
        ]
    except (RuntimeError, MemoryError) as error:
        raise CapacityError(
            f"memory on {device} for the caches of {n_slots} sessions; "
            "choose a shorter context or fewer sessions",
            needed=whole,
            available=_free_bytes(device),
        ) from error
    if device.type == "cpu":  # or the first row of each plane would cost 2 MiB on some systems
        for tensor in (tensor for slot in slots for tensor in slot):
            host_memory.commit_in_small_pages(_address(tensor), tensor.nbytes)
    return slots


def _address(tensor: torch.Tensor) -> int:
    """Return where a cache tensor begins in the memory of the process."""
    return KernelBuffer(tensor, tensor.dtype, "cache").address


def _n_pages(n_tokens: int) -> int:
    return -(-n_tokens // PAGE_TOKENS)


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB"


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
