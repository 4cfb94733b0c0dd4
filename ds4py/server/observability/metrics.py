"""`GET /metrics`: the sums of a server in the text format of Prometheus (docs/metrics.md).

Owns: names, labels and units of the metrics. Refuses to know: HTTP except for the reply, who
measures.
Invariant: every metric stands in the table of docs/metrics.md; labels have few values, which no
client chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import psutil  # type: ignore[import-untyped]  # the package has no annotations
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.responses import Response

from ds4py import __version__
from ds4py.contracts import Health, StageStatus
from ds4py.server.observability.console_stats import Watched
from ds4py.server.observability.request_metrics import Counts, Distribution

_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_STAGE: Final = ("stage", "layers")
_PHASES: Final = ("prefill", "decode")

PerPhase = Callable[[StageStatus], tuple[float, float]]
PerStage = Callable[[StageStatus], float | None]

_BY_PHASE: Final[Sequence[tuple[str, str, PerPhase]]] = (
    (
        "ds4_stage_tokens",
        "Tokens that a stage has evaluated.",
        lambda s: (s.prefill_tokens, s.decode_tokens),
    ),
    (
        "ds4_stage_compute_seconds",
        "Time that spans spent in evaluation.",
        lambda s: (s.prefill_usec / 1e6, s.decode_usec / 1e6),
    ),
    (
        "ds4_stage_wire_seconds",
        "Time that spans spent on the way from the stage before and back, in queues too.",
        lambda s: (s.prefill_hop_usec / 1e6, s.decode_hop_usec / 1e6),
    ),
    (
        "ds4_stage_wait_seconds",
        "Time that spans waited for the stages behind.",
        lambda s: (s.prefill_wait_usec / 1e6, s.decode_wait_usec / 1e6),
    ),
)

_SUMS: Final[Sequence[tuple[str, str, PerStage]]] = (
    (
        "ds4_stage_busy_seconds",
        "Time with at least one span in evaluation.",
        lambda s: s.busy_usec / 1e6,
    ),
    (
        "ds4_stage_received_bytes",
        "Token ids and hidden states that a stage was sent.",
        lambda s: s.input_bytes,
    ),
    (
        "ds4_stage_sent_bytes",
        "Hidden states and logits that a stage has made.",
        lambda s: s.output_bytes,
    ),
)

_LEVELS: Final[Sequence[tuple[str, str, PerStage]]] = (
    ("ds4_stage_weight_bytes", "Packed weights in a stage's memory.", lambda s: s.weight_bytes),
    ("ds4_kv_used_bytes", "Cache memory that sessions hold.", lambda s: s.kv_bytes),
    (
        "ds4_kv_budget_bytes",
        "Cache memory that sessions may hold together.",
        lambda s: s.kv_budget_bytes,
    ),
)


class Metrics(Collector):
    """Collects the metrics of one server when it is asked.

    Args:
        watched: What is measured.
    """

    def __init__(self, watched: Watched):
        self._watched = watched
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; called by the registry."""
        counts, health = self._watched.meter.read(), self._watched.backend.health()
        yield _build(self._watched)
        yield from _requests(counts, self._watched.load())
        yield from _tokens(counts)
        yield from _times(counts)
        yield from _stages(health.stages)
        yield from _route(health, self._watched.backend.card.n_layers)
        yield _gauge("ds4_sessions", "Sessions of the server.", self._watched.n_sessions)
        yield _gauge("ds4_sessions_leased", "Sessions that requests hold.", counts.leased)
        yield from _process()

    def text(self) -> bytes:
        """Return all metrics in the text format."""
        return generate_latest(self._registry)


def metrics_response(metrics: Metrics) -> Response:
    """Return the reply of `/metrics`."""
    return Response(metrics.text(), headers={"content-type": _CONTENT_TYPE})


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(name, meaning, value=value)


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(name, meaning, value=value)


def _histogram(name: str, meaning: str, seen: Distribution) -> Metric:
    bounds = [*(f"{bound:g}" for bound in seen.bounds), "+Inf"]
    buckets = list(zip(bounds, map(float, seen.counts), strict=True))
    return HistogramMetricFamily(name, meaning, buckets=buckets, sum_value=seen.total)


def _build(watched: Watched) -> Metric:
    labels = {
        "version": __version__,
        "model": watched.name,
        "architecture": watched.backend.card.architecture,
    }
    family = GaugeMetricFamily("ds4_build_info", "What is running; always 1.", labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family


def _requests(counts: Counts, load: tuple[int, int]) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        "ds4_requests", "Requests that have ended.", labels=("endpoint", "finish", "status")
    )
    for ending, n in counts.requests.items():
        ended.add_metric([ending.endpoint, ending.finish, str(ending.status)], n)
    yield ended
    running, waiting = load
    yield _gauge("ds4_requests_running", "Requests that run.", running)
    yield _gauge("ds4_requests_waiting", "Requests in the queue.", waiting)
    yield _counter(
        "ds4_requests_rejected",
        "Requests that were sent away for want of room or time: queue full, waited too long, "
        "server stopping.",
        counts.rejected,
    )
    yield _counter(
        "ds4_requests_active_seconds",
        "Time in which at least one request held a session.",
        counts.active_seconds,
    )


def _tokens(counts: Counts) -> Iterator[Metric]:
    yield _counter(
        "ds4_prompt_tokens",
        "Tokens of prompts, reused or evaluated.",
        counts.prompt_tokens,
    )
    yield _counter(
        "ds4_cached_tokens",
        "Tokens of prompts that were reused from a session.",
        counts.cached_tokens,
    )
    yield _counter("ds4_completion_tokens", "Tokens sampled.", counts.completion_tokens)
    yield _counter(
        "ds4_reasoning_tokens",
        "Tokens sampled before the answer itself.",
        counts.reasoning_tokens,
    )


def _times(counts: Counts) -> Iterator[Metric]:
    yield _histogram(
        "ds4_time_to_first_token_seconds",
        "From the arrival of a request to its first token.",
        counts.first_token,
    )
    yield _histogram(
        "ds4_inter_token_seconds",
        "From a token to the next one of the same request.",
        counts.inter_token,
    )
    yield _histogram(
        "ds4_queue_wait_seconds",
        "From entering the queue to getting a session.",
        counts.queue_wait,
    )
    yield _histogram(
        "ds4_request_duration_seconds",
        "From the arrival of a request to its end.",
        counts.duration,
    )


def _stages(stages: Sequence[StageStatus]) -> Iterator[Metric]:
    for name, meaning, both in _BY_PHASE:
        family = CounterMetricFamily(name, meaning, labels=(*_STAGE, "phase"))
        for stage in stages:
            for phase, value in zip(_PHASES, both(stage), strict=True):
                family.add_metric([*_names(stage), phase], value)
        yield family
    for name, meaning, read in _SUMS:
        yield _filled(CounterMetricFamily(name, meaning, labels=_STAGE), stages, read)
    for name, meaning, read in _LEVELS:
        yield _filled(GaugeMetricFamily(name, meaning, labels=_STAGE), stages, read)


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily,
    stages: Sequence[StageStatus],
    read: PerStage,
) -> Metric:
    for stage in stages:
        value = read(stage)
        if value is not None:
            family.add_metric(_names(stage), value)
    return family


def _names(stage: StageStatus) -> list[str]:
    layers = stage.layers
    return [stage.name, "" if layers is None else f"{layers.start}-{layers.end}"]


def _route(health: Health, n_layers: int) -> Iterator[Metric]:
    served = {
        layer
        for stage in health.stages
        if stage.layers is not None
        for layer in range(stage.layers.start, stage.layers.end + 1)
    }
    yield _gauge("ds4_route_ready", "1 if the whole model can be reached, else 0.", health.ready)
    yield _gauge("ds4_route_missing_layers", "Layers that nobody serves.", n_layers - len(served))
    yield _counter(
        "ds4_route_changes",
        "How often another route was taken, the first one included.",
        health.route_changes,
    )
    yield _counter(
        "ds4_replays",
        "How often a timeline was evaluated again because a stage refused or was lost.",
        health.replays,
    )


def _process() -> Iterator[Metric]:
    process = psutil.Process()
    times = process.cpu_times()
    yield _gauge(
        "process_resident_memory_bytes",
        "Memory of the server's process.",
        process.memory_info().rss,
    )
    yield _counter(
        "process_cpu_seconds",
        "Processor time of the server's process.",
        times.user + times.system,
    )
