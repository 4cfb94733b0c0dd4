"""How fast each stage of a route has been, from the records that travel with results.

Owns: the running sums per stage, and how often a route had to change or to start over. Refuses to
know: how they are shown. Invariant: durations come from the stages' own clocks only; nothing is
measured by reading logs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from ds4py.contracts import StageStatus
from ds4py.coordinator.chunk_size import StageCosts
from ds4py.layer_range import LayerRange
from ds4py.tracing.events import TraceRecorder, now_usec
from ds4py.wire.messages import Telemetry

_NO_LAYERS: Final = (-1, -1)


@dataclass(slots=True)
class _Phase:
    """Spans of one kind: many tokens, or one."""

    tokens: int = 0
    eval_usec: int = 0
    hop_usec: int = 0
    wait_usec: int = 0


@dataclass(slots=True)
class _Sums:
    prefill: _Phase = field(default_factory=_Phase)
    decode: _Phase = field(default_factory=_Phase)
    input_bytes: int = 0
    output_bytes: int = 0
    busy_usec: int = 0
    _busy_until: int = 0

    def phase(self, n_tokens: int) -> _Phase:
        """Return the sums that a span belongs to."""
        return self.decode if n_tokens == 1 else self.prefill

    def evaluated(self, n_tokens: int, eval_usec: int, now: int) -> _Phase:
        """Add a span that was evaluated not long before `now`, and return its phase.

        A batch tells its time once for each of its spans. They come at nearly the same moment, so
        what they are busy for is at most the time that has passed since the one before.
        """
        phase = self.phase(n_tokens)
        phase.tokens += n_tokens
        phase.eval_usec += eval_usec
        self.busy_usec += min(eval_usec, now - self._busy_until)
        self._busy_until = now
        return phase


class RouteTelemetry:
    """Sums per layer range; safe to use from several threads.

    Args:
        trace: Where measuring code leaves single intervals; None keeps none.
        clock: Microseconds, never less than before; only tells spans of one batch from spans one
            after the other.
    """

    def __init__(
        self, trace: TraceRecorder | None = None, *, clock: Callable[[], int] = now_usec
    ) -> None:
        self.trace = trace
        self.costs = StageCosts()
        self._clock = clock
        self._lock = threading.Lock()
        self._sums: dict[tuple[int, int], _Sums] = {}
        self._own = _NO_LAYERS
        self._replays = 0
        self._route_changes = 0
        self._links: Sequence[int] | None = None

    @property
    def replays(self) -> int:
        """How often `count_replay` was called."""
        return self._replays

    @property
    def route_changes(self) -> int:
        """How often `took_route` was told of another route than before."""
        return self._route_changes

    def count_replay(self) -> None:
        """Take note that a timeline is evaluated from its start once more."""
        with self._lock:
            self._replays += 1

    def took_route(self, links: Sequence[int]) -> None:
        """Take note of the route that is in use.

        Args:
            links: Names its connections; a worker that has come back has another one.
        """
        with self._lock:
            self._route_changes += links != self._links
            self._links = links

    def record_local(self, layers: LayerRange, n_tokens: int, eval_usec: int) -> None:
        """Add one span that the coordinator evaluated itself."""
        with self._lock:
            self._own = (layers.start, layers.end)
            self._sums_of(self._own).evaluated(n_tokens, eval_usec, self._clock())

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
            now = self._clock()
            below = 0  # time that everything after the current stage took by its own account
            for index, item in enumerate(records[: len(stages)]):
                above = records[index + 1] if index + 1 < len(records) else None
                waited = first_wait_usec if above is None else above.downstream_wait_usec
                own = item.eval_usec + below
                hop = max(0, waited - own)
                key = (item.layer_start, item.layer_end)
                if key in stages:
                    self._add(self._sums_of(key), item, hop, now)
                    self.costs.add(
                        key, item.pos0, item.n_tokens, eval_usec=item.eval_usec, hop_usec=hop
                    )
                below = own + hop
            if records:
                phase = self._sums_of(self._own).phase(records[-1].n_tokens)
                phase.wait_usec += first_wait_usec

    def _sums_of(self, key: tuple[int, int]) -> _Sums:
        return self._sums.setdefault(key, _Sums())

    @staticmethod
    def _add(sums: _Sums, item: Telemetry, hop_usec: int, now: int) -> None:
        phase = sums.evaluated(item.n_tokens, item.eval_usec, now)
        phase.hop_usec += hop_usec
        phase.wait_usec += item.downstream_wait_usec
        sums.input_bytes += item.input_bytes
        sums.output_bytes += item.output_bytes

    def status(self, name: str, layers: LayerRange | None, weight_bytes: int | None) -> StageStatus:
        """Return what is known of one stage."""
        key = _NO_LAYERS if layers is None else (layers.start, layers.end)
        with self._lock:
            sums = self._sums.get(key, _Sums())
            prefill, decode = sums.prefill, sums.decode
            return StageStatus(
                name=name,
                layers=layers,
                weight_bytes=weight_bytes,
                prefill_tokens=prefill.tokens,
                prefill_usec=prefill.eval_usec,
                prefill_hop_usec=prefill.hop_usec,
                prefill_wait_usec=prefill.wait_usec,
                decode_tokens=decode.tokens,
                decode_usec=decode.eval_usec,
                decode_hop_usec=decode.hop_usec,
                decode_wait_usec=decode.wait_usec,
                busy_usec=sums.busy_usec,
                input_bytes=sums.input_bytes,
                output_bytes=sums.output_bytes,
            )
