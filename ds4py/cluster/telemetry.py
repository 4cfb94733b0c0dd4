"""How fast each stage of a route has been, from the records that travel with results.

Owns: the running sums per stage. Refuses to know: how they are shown. Invariant: numbers come from
the stages' own clocks only; nothing is measured by reading logs.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ds4py.cluster.chunking import StageCosts
from ds4py.cluster.trace import Recorder
from ds4py.contracts import StageStatus
from ds4py.spans import LayerSpan
from ds4py.wire.messages import Telemetry


@dataclass(slots=True)
class _Sums:
    prefill_tokens: int = 0
    prefill_usec: int = 0
    decode_tokens: int = 0
    decode_usec: int = 0
    decode_hop_usec: int = 0


class RouteTelemetry:
    """Sums per layer range; safe to use from several threads.

    Args:
        trace: Where whoever measures leaves single intervals; None keeps none.
    """

    def __init__(self, trace: Recorder | None = None) -> None:
        self.trace = trace
        self.costs = StageCosts()
        self._lock = threading.Lock()
        self._sums: dict[tuple[int, int], _Sums] = {}

    def record_local(self, span: LayerSpan, n_tokens: int, eval_usec: int) -> None:
        """Add one span that the coordinator evaluated itself."""
        with self._lock:
            self._add((span.start, span.end), n_tokens, eval_usec, 0)

    def record(
        self,
        records: Sequence[Telemetry],
        *,
        stages: Collection[tuple[int, int]],
        first_wait_usec: int,
    ) -> None:
        """Add the records of one RESULT, final hop first.

        Args:
            records: As received.
            stages: First and last layer of each hop of the route; a peer that reports about others
                is not believed, or it could fill the memory.
            first_wait_usec: From sending the span to hop 0 until its RESULT was read.
        """
        with self._lock:
            below = 0  # time that everything after the current stage took by its own account
            for index, item in enumerate(records[: len(stages)]):
                above = records[index + 1] if index + 1 < len(records) else None
                waited = first_wait_usec if above is None else above.downstream_wait_usec
                own = item.eval_usec + below
                hop = max(0, waited - own)
                key = (item.layer_start, item.layer_end)
                if key in stages:
                    self._add(key, item.n_tokens, item.eval_usec, hop)
                    self.costs.add(
                        key, item.pos0, item.n_tokens, eval_usec=item.eval_usec, hop_usec=hop
                    )
                below = own + hop

    def _add(self, key: tuple[int, int], n_tokens: int, eval_usec: int, hop_usec: int) -> None:
        sums = self._sums.setdefault(key, _Sums())
        if n_tokens == 1:
            sums.decode_tokens += 1
            sums.decode_usec += eval_usec
            sums.decode_hop_usec += hop_usec
        else:
            sums.prefill_tokens += n_tokens
            sums.prefill_usec += eval_usec

    def status(self, name: str, span: LayerSpan | None, weight_bytes: int | None) -> StageStatus:
        """Return what is known of one stage."""
        key = (-1, -1) if span is None else (span.start, span.end)
        with self._lock:
            sums = self._sums.get(key, _Sums())
            return StageStatus(
                name=name,
                span=span,
                weight_bytes=weight_bytes,
                prefill_tokens=sums.prefill_tokens,
                prefill_usec=sums.prefill_usec,
                decode_tokens=sums.decode_tokens,
                decode_usec=sums.decode_usec,
                decode_hop_usec=sums.decode_hop_usec,
            )
