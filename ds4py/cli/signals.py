"""Ctrl+C, SIGTERM and a hang-up: the first asks, the second insists.

Owns: the handlers while a program runs. Refuses to know: what stops. Invariant: a second signal
ends the process at once with status 130.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_INTERRUPTED: Final = 130


@contextmanager
def stop_signal() -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT, SIGTERM or SIGHUP sets.

    A hang-up that is ignored stays so: `nohup` has a program outlive its terminal.
    """
    stopping = threading.Event()

    def handle(_: int, __: FrameType | None) -> None:
        if stopping.is_set():
            os._exit(_INTERRUPTED)
        stopping.set()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stopping
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
