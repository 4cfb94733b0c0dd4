"""Memory of the process that the system may have back while its addresses stay reserved.

Owns: the calls to the system, whole pages. Refuses to know: what lies in memory. Invariant: no byte
outside the given range changes. Where a system has no such call, nothing happens: only its
accountant knows that the memory is free.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Final

_DONT_NEED: Final = 4  # MADV_DONTNEED of Linux: pages read as zeros and cost nothing until written
_NO_HUGE_PAGES: Final = 15  # MADV_NOHUGEPAGE


def give_back(address: int, n_bytes: int) -> None:
    """Let the system have the whole pages of a private range; their content is lost."""
    _advise(address, n_bytes, _DONT_NEED)


def commit_in_small_pages(address: int, n_bytes: int) -> None:
    """Let writing a byte cost a page of some KiB, not one of 2 MiB, where the system chooses."""
    _advise(address, n_bytes, _NO_HUGE_PAGES)


def _advise(address: int, n_bytes: int, advice: int) -> None:
    page = mmap.PAGESIZE
    start, end = -(-address // page) * page, (address + n_bytes) // page * page
    if _madvise is not None and start < end:
        # advice: a system that declines leaves everything as it is
        _madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


_madvise: Final = ctypes.CDLL(None).madvise if sys.platform == "linux" else None
