"""What the console reads."""

import logging
from dataclasses import replace

import msgspec
import pytest

from ds4py import __version__
from ds4py.contracts import StageStatus
from ds4py.errors import CancelledError, ClusterError
from ds4py.server.observability.console_stats import ConsoleStats
from ds4py.server.observability.event_log import EventLog
from ds4py.server.observability.request_metrics import RequestMetrics
from tests.unit.server.observability.measured import (
    CHAT,
    STAGES,
    Backend,
    Clock,
    one_request,
    watched,
)


class Server:
    """Stats over a backend, a meter and one clock that a test moves."""

    def __init__(self, *stages: StageStatus, **options) -> None:
        self.clock = Clock()
        self.backend = Backend(stages or STAGES)
        self.meter = RequestMetrics(self.clock)
        self.events = EventLog()
        self.stats = ConsoleStats(
            watched(self.backend, self.meter, **options),
            self.events,
            clock=self.clock,
            wall=lambda: 1.8e9 + self.clock(),
        )

    def read(self, after: float = 0.0):
        self.clock.pass_(after)
        return self.stats.object()

    def change(self, index: int, **growth: int) -> None:
        """Let the sums of a stage grow."""
        stages = list(self.backend.state.stages)
        grown = {name: getattr(stages[index], name) + more for name, more in growth.items()}
        stages[index] = replace(stages[index], **grown)
        self.backend.state = replace(self.backend.state, stages=tuple(stages))


def test_the_whole_object():
    server = Server()
    with server.events.attached():
        logging.getLogger("ds4py.coordinator").warning("a worker left")
    one_request(server.meter)
    got = server.read(after=321.5)
    assert msgspec.json.decode(msgspec.json.encode(got)) == got
    assert got | {"events": None, "stages": None} == {
        "time": 1.8e9 + 321.5,
        "uptime": 321.5,
        "version": __version__,
        "model": {"name": "toy", "architecture": "fake", "layers": 4, "n_ctx": 256},
        "ready": True,
        "missing": "",
        "stages": None,
        "bubble": None,
        "requests": {"running": 1, "waiting": 2, "served": 1, "failed": 0, "cancelled": 0},
        "tokens": {
            "prompt": 100,
            "cached": 30,
            "completion": 3,
            "prefill_per_second": 0.0,
            "decode_per_second": 0.0,
        },
        "sessions": {"total": 4, "leased": 0},
        "events": None,
    }
    (event,) = got["events"]
    assert (event["level"], event["text"]) == ("warning", "a worker left")
    assert event["time"] > 1.5e9


def test_stages_stand_in_order_and_a_hop_leads_to_the_next():
    first, last = Server().read()["stages"]
    assert first == {
        "name": "coordinator",
        "layers": [0, 1],
        "has_output": False,
        "weight_bytes": 900,
        "kv_bytes": 300,
        "kv_budget_bytes": 1000,
        "prefill": {"tokens": 512, "per_second": 512.0},
        "decode": {"tokens": 10, "per_second": 20.0},
        "decode_usec": {"compute": 50_000.0, "hop": 1500.0},
        "busy": None,
    }
    assert (last["layers"], last["has_output"]) == ([2, 3], True)
    assert (last["weight_bytes"], last["kv_bytes"], last["kv_budget_bytes"]) == (None,) * 3
    assert last["decode_usec"] == {"compute": 2000.0, "hop": 0.0}


def test_a_coordinator_without_layers_has_none_and_is_never_busy():
    server = Server(StageStatus(name="coordinator", layers=None), STAGES[1])
    server.read()
    first, last = server.read(after=1.0)["stages"]
    assert (first["layers"], first["has_output"], first["busy"]) == (None, False, None)
    assert first["decode_usec"] == {"compute": 0.0, "hop": 1500.0}
    assert last["busy"] == 0.0


def test_rates_compare_with_what_was_seen_before():
    server = Server()
    server.read()
    one_request(server.meter, n_tokens=8)
    server.change(0, prefill_tokens=300)
    server.change(1, prefill_tokens=200)
    tokens = server.read(after=4.0)["tokens"]
    assert (tokens["decode_per_second"], tokens["prefill_per_second"]) == (2.0, 75.0)


def test_rates_look_ten_seconds_back():
    server = Server()
    server.read()
    one_request(server.meter, n_tokens=50)
    for _ in range(5):
        server.read(after=2.0)
    assert server.read()["tokens"]["decode_per_second"] == 5.0  # 50 in the last 10 s
    assert server.read(after=2.0)["tokens"]["decode_per_second"] == 0.0


def test_after_a_pause_rates_are_of_the_pause_and_then_of_the_present():
    server = Server()
    server.read()
    one_request(server.meter, n_tokens=100)
    assert server.read(after=1000.0)["tokens"]["decode_per_second"] == 0.1
    one_request(server.meter, n_tokens=6)
    assert server.read(after=2.0)["tokens"]["decode_per_second"] == 3.0


def test_many_who_ask_at_once_all_get_rates_and_fill_no_memory():
    server = Server()
    server.read()
    one_request(server.meter, n_tokens=4)
    server.clock.pass_(2.0)
    rates = {server.read(after=0.0)["tokens"]["decode_per_second"] for _ in range(50)}
    assert rates == {2.0}
    for _ in range(10_000):
        server.read(after=0.01)
    assert len(server.stats._samples) < 25


def test_a_stage_is_busy_for_the_share_of_the_time_that_it_evaluated():
    server = Server()
    server.read()
    server.change(0, busy_usec=500_000)
    server.change(1, busy_usec=2_000_100)  # clocks differ: never more than all of it
    first, last = server.read(after=2.0)["stages"]
    assert (first["busy"], last["busy"]) == (0.25, 1.0)


def test_a_stage_that_was_not_there_before_is_not_judged():
    server = Server(STAGES[0])
    server.read()
    server.backend.state = replace(server.backend.state, stages=STAGES)
    got = server.read(after=1.0)
    assert [stage["busy"] for stage in got["stages"]] == [0.0, None]
    assert got["tokens"]["prefill_per_second"] == 0.0


def test_the_bubble_is_of_the_time_with_requests():
    server = Server()
    server.read()
    server.clock.pass_(3.0)  # nobody asks for anything: no bubble comes of it
    with server.meter.accepted(CHAT).leased():
        server.change(0, busy_usec=1_500_000)
        server.change(1, busy_usec=500_000)
        assert server.read(after=2.0)["bubble"] == pytest.approx(0.5)
        assert server.read()["stages"][0]["busy"] == 0.3
    assert server.read()["bubble"] is None


def test_there_is_no_bubble_before_anything_is_known():
    server = Server()
    with server.meter.accepted(CHAT).leased():
        assert server.read()["bubble"] is None
        server.backend.state = replace(server.backend.state, stages=())
        assert server.read(after=1.0)["bubble"] is None


def test_what_is_missing_is_said():
    server = Server()
    server.backend.state = replace(server.backend.state, ready=False, missing="layers 2-3")
    got = server.read()
    assert (got["ready"], got["missing"]) == (False, "layers 2-3")


def test_requests_are_told_apart_by_their_end():
    server = Server(load=(0, 0), n_sessions=2)
    for finish in ("stop", "length", "tool_calls"):
        server.meter.accepted(CHAT).finished(finish)
    server.meter.accepted(CHAT).failed(ClusterError("no"))
    for _ in range(2):
        server.meter.accepted(CHAT).failed(CancelledError("gone"))
    got = server.read()
    assert got["requests"] == {
        "running": 0,
        "waiting": 0,
        "served": 3,
        "failed": 1,
        "cancelled": 2,
    }
    assert got["sessions"] == {"total": 2, "leased": 0}
