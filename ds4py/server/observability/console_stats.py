"""`GET /stats`: what the console shows of a running server.

Owns: the JSON, the short memory from which rates are made. Refuses to know: HTTP, who measures.
Invariant: nothing runs between two questions; anyone who asks takes the sample that the next answer
is compared with.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from ds4py import __version__
from ds4py.contracts import Backend, Health, StageStatus
from ds4py.server.api.reply import Json
from ds4py.server.observability.event_log import EventLog, LogEvent
from ds4py.server.observability.request_metrics import Clock, Counts, RequestMetrics

RATE_SECONDS: Final = 10.0
"""How far back rates look."""

_SPACING_SECONDS: Final = 0.5
"""Shortest distance of two samples, so that many who ask fill no memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The parts of a server that are measured.

    Args:
        backend: The served model and its stages.
        meter: Of the requests.
        load: Tells how many requests run and how many wait.
        n_sessions: Requests that can run at once.
        name: The model's, as clients see it.
    """

    backend: Backend
    meter: RequestMetrics
    load: Callable[[], tuple[int, int]]
    n_sessions: int
    name: str


class ConsoleStats:
    """Answers `/stats`; used by one thread.

    Args:
        watched: What is measured.
        events: The latest lines of the log.
        clock: Seconds since any moment; of all rates.
        wall: Unix seconds.
    """

    def __init__(
        self,
        watched: Watched,
        events: EventLog,
        *,
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
    ):
        self._watched = watched
        self._events = events
        self._clock = clock
        self._wall = wall
        self._started = clock()
        self._samples: deque[_Sample] = deque()

    def object(self) -> Json:
        """Return the body of `/stats`; the first one has no rates yet."""
        watched, now = self._watched, self._clock()
        counts, health = watched.meter.read(), watched.backend.health()
        sample = _Sample(now, counts, {_key(stage): stage for stage in health.stages})
        recent = _Recent(self._remember(sample), sample)
        return {
            "time": round(self._wall(), 3),
            "uptime": round(now - self._started, 3),
            "version": __version__,
            "model": _model(watched),
            "ready": health.ready,
            "missing": health.missing,
            "stages": _stages(health, recent),
            "bubble": recent.bubble(),
            "requests": _requests(counts, watched.load()),
            "tokens": _tokens(counts, recent),
            "sessions": {"total": watched.n_sessions, "leased": counts.leased},
            "events": [_event(event) for event in self._events.recent()],
        }

    def _remember(self, new: _Sample) -> _Sample:
        """Keep a sample and return the one to compare it with.

        That is the oldest of the last seconds, or after a pause the last one before it.
        """
        kept = self._samples
        while len(kept) > 1 and new.time - kept[0].time > RATE_SECONDS:
            kept.popleft()
        if not kept or new.time - kept[-1].time >= _SPACING_SECONDS:
            kept.append(new)
        return kept[0]


Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Sample:
    """Everything that rates are made of, at one moment."""

    time: float
    counts: Counts
    stages: Mapping[Key, StageStatus]


class _Recent:
    """What happened between two samples."""

    def __init__(self, old: _Sample, new: _Sample):
        self._old = old
        self._new = new
        self._seconds = new.time - old.time

    def decode_rate(self) -> float:
        """Return sampled tokens per second."""
        n_tokens = self._new.counts.completion_tokens - self._old.counts.completion_tokens
        return _ratio(n_tokens, self._seconds)

    def prefill_rate(self) -> float:
        """Return tokens of prompts per second, of the stage that had most of them."""
        return max(
            (
                _ratio(stage.prefill_tokens - self._old.stages[key].prefill_tokens, self._seconds)
                for key, stage in self._new.stages.items()
                if key in self._old.stages
            ),
            default=0.0,
        )

    def busy(self, key: Key) -> float | None:
        """Return the share of the time that a stage spent in evaluation; None if not known."""
        return self._share(key, self._seconds)

    def bubble(self) -> float | None:
        """Return the share of the time with requests in which the mean stage evaluated nothing.

        None while no request runs, and if no stage was known before.
        """
        if not self._new.counts.leased:
            return None
        active = self._new.counts.active_seconds - self._old.counts.active_seconds
        shares = [self._share(key, active) for key in self._new.stages]
        known = [share for share in shares if share is not None]
        return round(1.0 - sum(known) / len(known), 4) if known else None

    def _share(self, key: Key, seconds: float) -> float | None:
        old, new = self._old.stages.get(key), self._new.stages[key]
        if old is None or new.layers is None or seconds <= 0:
            return None
        return round(min(1.0, (new.busy_usec - old.busy_usec) / 1e6 / seconds), 4)


def _key(stage: StageStatus) -> Key:
    return stage.name, str(stage.layers)


def _ratio(amount: float, per: float) -> float:
    """Return a mean, 0 where nothing was measured."""
    return round(amount / per, 3) if per > 0 else 0.0


def _model(watched: Watched) -> Json:
    card = watched.backend.card
    return {
        "name": watched.name,
        "architecture": card.architecture,
        "layers": card.n_layers,
        "n_ctx": watched.backend.n_ctx,
    }


def _stages(health: Health, recent: _Recent) -> list[Json]:
    onward = [*health.stages[1:], None]
    return [
        _stage(stage, following, recent.busy(_key(stage)))
        for stage, following in zip(health.stages, onward, strict=False)
    ]


def _stage(stage: StageStatus, following: StageStatus | None, busy: float | None) -> Json:
    layers = stage.layers
    hop = 0.0 if following is None else _ratio(following.decode_hop_usec, following.decode_tokens)
    return {
        "name": stage.name,
        "layers": None if layers is None else [layers.start, layers.end],
        "has_output": layers is not None and layers.has_output,
        "weight_bytes": stage.weight_bytes,
        "kv_bytes": stage.kv_bytes,
        "kv_budget_bytes": stage.kv_budget_bytes,
        "prefill": _speed(stage.prefill_tokens, stage.prefill_usec),
        "decode": _speed(stage.decode_tokens, stage.decode_usec),
        "decode_usec": {"compute": _ratio(stage.decode_usec, stage.decode_tokens), "hop": hop},
        "busy": busy,
    }


def _speed(n_tokens: int, usec: int) -> Json:
    return {"tokens": n_tokens, "per_second": _ratio(n_tokens, usec / 1e6)}


def _requests(counts: Counts, load: tuple[int, int]) -> Json:
    running, waiting = load
    return {
        "running": running,
        "waiting": waiting,
        "served": counts.ended("stop", "length", "tool_calls"),
        "failed": counts.ended("error"),
        "cancelled": counts.ended("cancelled"),
    }


def _tokens(counts: Counts, recent: _Recent) -> Json:
    return {
        "prompt": counts.prompt_tokens,
        "cached": counts.cached_tokens,
        "completion": counts.completion_tokens,
        "prefill_per_second": recent.prefill_rate(),
        "decode_per_second": recent.decode_rate(),
    }


def _event(event: LogEvent) -> Json:
    return {"time": round(event.time, 3), "level": event.level, "text": event.text}
