"""What all routes of one coordinator share.

Owns: nothing but the values and the two counters. Refuses to know: workers, sessions. Invariant:
request ids only grow, and those of saved sessions never disturb those of chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ds4py.config import CoordinatorConfig
from ds4py.contracts import ModelCard
from ds4py.transport.connector import Connector

FIRST_TRANSFER: Final = 1 << 63
"""Request ids of saved sessions count from here (docs/spec/wire-protocol.md#ids)."""


def _counter(first: int) -> Callable[[], int]:
    return itertools.count(first).__next__


@dataclass(frozen=True, slots=True)
class RelayContext:
    """What a route needs besides its stages.

    Args:
        card: The model.
        n_ctx: Tokens that one session can hold.
        config: Widths, deadlines, pipelining.
        connector: Opens connections to hops.
        next_request_id: 1, 2, 3 ...; never reused, whatever the session or the connection.
        next_transfer_id: The same for saved sessions, from `FIRST_TRANSFER` on.
    """

    card: ModelCard
    n_ctx: int
    config: CoordinatorConfig
    connector: Connector
    next_request_id: Callable[[], int] = field(default_factory=lambda: _counter(1))
    next_transfer_id: Callable[[], int] = field(default_factory=lambda: _counter(FIRST_TRANSFER))
