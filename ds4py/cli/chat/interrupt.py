"""Ctrl+C while a chat answers: it stops the answer, not the program.

Owns: the handler during an answer. Refuses to know: answers. Invariant: a second Ctrl+C ends the
process at once; every other signal means what it meant before.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ds4py.cli.signals import stop_signal

if TYPE_CHECKING:
    from threading import Event


@contextmanager
def interrupted() -> Iterator[Event]:
    """Yield an event that the first SIGINT sets."""
    terminate = signal.getsignal(signal.SIGTERM)
    with stop_signal() as stopping:
        signal.signal(signal.SIGTERM, terminate)
        yield stopping
