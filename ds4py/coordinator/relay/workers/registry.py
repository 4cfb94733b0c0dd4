"""Which workers a coordinator can reach now.

Owns: the set of registered workers and its generation counter. Refuses to know: connections,
threads, how a route is chosen. Invariant: the generation grows with every change, so a plan made at
one generation is current exactly as long as the number stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from ds4py.config import Address
from ds4py.layer_range import LayerRange

LinkId = NewType("LinkId", int)
"""Names one connection of this coordinator; grows, never reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """One registered worker.

    Args:
        link: The connection that serves it.
        address: Data port, at the numeric host where other stages reach it.
        layers: Its layers.
        n_ctx: Its context in tokens; 0 if a plain peer did not tell.
        has_hidden: Whether it can return hidden states.
        dialled: We connected to it (it is named by the user), not it to us.
        features: Extensions that it speaks; empty for a plain peer.
        weight_bytes: Packed weights in its memory, if it told.
        alive_timeout: Seconds of silence after which it counts as lost; None if only a broken
            connection tells, as with a plain peer.
    """

    link: LinkId
    address: Address
    layers: LayerRange
    n_ctx: int
    has_hidden: bool = True
    dialled: bool = False
    features: frozenset[str] = frozenset()
    weight_bytes: int | None = None
    alive_timeout: float | None = None

    @property
    def name(self) -> str:
        """Short printable name for logs and errors."""
        return f"worker {self.address} (layers {self.layers})"


class Registry:
    """Workers in order of registration."""

    def __init__(self) -> None:
        self._records: list[WorkerRecord] = []
        self.generation = 0

    @property
    def records(self) -> tuple[WorkerRecord, ...]:
        """All registered workers, oldest first."""
        return tuple(self._records)

    def add(self, record: WorkerRecord) -> list[WorkerRecord]:
        """Register a worker and return the entries that it replaces.

        A worker that dialled us replaces earlier ones of the same host and slice whatever their
        port, since it is most likely the same one come back (docs/spec/wire-protocol.md#registry):
        unless the earlier one is known to be alive, then the newcomer stands by.
        """
        replaced = [old for old in self._records if _replaces(record, old)]
        self._records = [old for old in self._records if old not in replaced] + [record]
        self.generation += 1
        return replaced

    def remove(self, link: LinkId) -> WorkerRecord | None:
        """Forget the worker behind a connection; None if it was not registered any more."""
        for record in self._records:
            if record.link == link:
                self._records.remove(record)
                self.generation += 1
                return record
        return None


def _replaces(new: WorkerRecord, old: WorkerRecord) -> bool:
    if new.dialled or old.dialled or old.alive_timeout is not None:
        return new.address == old.address
    return new.address.host == old.address.host and new.layers == old.layers
