"""What Prometheus reads, the page that explains it, and the dashboard that shows it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ds4py.contracts import StageStatus
from ds4py.errors import ClusterError, RequestError
from ds4py.server.observability.metrics import Metrics, metrics_response
from ds4py.server.observability.request_metrics import RequestMetrics
from tests.unit.server.observability.measured import (
    CHAT,
    STAGES,
    Backend,
    Clock,
    one_request,
    watched,
)

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((ROOT / "tools" / "grafana-dashboard.json").read_text(encoding="utf-8"))
NAME = re.compile(r"\b(?:ds4|process)_[a-z0-9_]+")


def busy_meter() -> RequestMetrics:
    clock = Clock()
    meter = RequestMetrics(clock)
    one_request(meter, clock=clock)
    meter.accepted(CHAT).failed(RequestError("full", status=429))
    return meter


def families(metrics: Metrics):
    return {family.name: family for family in text_string_to_metric_families(read(metrics))}


def read(metrics: Metrics) -> str:
    return metrics.text().decode()


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = [
        sample.value
        for family in families(metrics).values()
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    ]
    assert len(found) == 1, f"{name} {labels}: {found}"
    return found[0]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(watched(meter=busy_meter()))


# --- values ---------------------------------------------------------------------------------------


def test_the_reply_says_which_format_it_has(metrics):
    response = metrics_response(metrics)
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert response.body.endswith(b"\n")


def test_requests_and_tokens_are_counted(metrics):
    done = {"endpoint": CHAT, "finish": "stop", "status": "200"}
    assert value(metrics, "ds4_requests_total", **done) == 1
    refused = {"endpoint": CHAT, "finish": "refused", "status": "429"}
    assert value(metrics, "ds4_requests_total", **refused) == 1
    got = {
        name: value(metrics, f"ds4_{name}")
        for name in (
            *("requests_running", "requests_waiting", "requests_rejected_total"),
            *("prompt_tokens_total", "cached_tokens_total"),
            *("completion_tokens_total", "reasoning_tokens_total"),
            *("sessions", "sessions_leased"),
        )
    }
    assert list(got.values()) == [1, 2, 1, 100, 30, 3, 1, 4, 0]


def test_histograms_are_cumulative_in_seconds(metrics):
    name = "ds4_inter_token_seconds"  # two of 0.1 s, except for rounding
    buckets = {le: value(metrics, f"{name}_bucket", le=le) for le in ("0.075", "0.15", "+Inf")}
    assert buckets == {"0.075": 0, "0.15": 2, "+Inf": 2}
    assert value(metrics, f"{name}_count") == 2
    assert value(metrics, f"{name}_sum") == pytest.approx(0.2)
    assert value(metrics, "ds4_time_to_first_token_seconds_sum") == pytest.approx(0.1)
    assert value(metrics, "ds4_queue_wait_seconds_count") == 1
    assert value(metrics, "ds4_request_duration_seconds_count") == 2
    assert value(metrics, "ds4_requests_active_seconds_total") == pytest.approx(0.3)


def test_stages_have_their_phases_in_seconds(metrics):
    last = {"stage": "10.0.0.3:8002", "layers": "2-3"}
    decode, prefill = last | {"phase": "decode"}, last | {"phase": "prefill"}
    assert value(metrics, "ds4_stage_tokens_total", **decode) == 10
    assert value(metrics, "ds4_stage_tokens_total", **prefill) == 500
    assert value(metrics, "ds4_stage_compute_seconds_total", **decode) == 0.02
    assert value(metrics, "ds4_stage_compute_seconds_total", **prefill) == 0.25
    assert value(metrics, "ds4_stage_wire_seconds_total", **decode) == 0.015
    assert value(metrics, "ds4_stage_wire_seconds_total", **prefill) == 0.03
    assert value(metrics, "ds4_stage_wait_seconds_total", **decode) == 0
    assert value(metrics, "ds4_stage_busy_seconds_total", **last) == 0.27
    assert value(metrics, "ds4_stage_received_bytes_total", **last) == 7000
    assert value(metrics, "ds4_stage_sent_bytes_total", **last) == 3000
    own = {"stage": "coordinator", "layers": "0-1"}
    assert value(metrics, "ds4_stage_wait_seconds_total", phase="decode", **own) == 0.04
    assert value(metrics, "ds4_stage_wait_seconds_total", phase="prefill", **own) == 0.7


def test_what_is_not_known_of_a_stage_is_left_out(metrics):
    got = families(metrics)
    for name, known in (
        ("ds4_kv_used_bytes", 300),
        ("ds4_kv_budget_bytes", 1000),
        ("ds4_stage_weight_bytes", 900),
    ):
        (sample,) = got[name].samples
        assert (sample.labels, sample.value) == ({"stage": "coordinator", "layers": "0-1"}, known)


def test_the_route_tells_how_many_layers_are_missing():
    backend = Backend((StageStatus(name="coordinator", layers=None), STAGES[1]))
    metrics = Metrics(watched(backend))
    backend.state = replace(backend.state, ready=False, missing="layers 0-1")
    assert value(metrics, "ds4_route_ready") == 0
    assert value(metrics, "ds4_route_missing_layers") == 2
    assert value(metrics, "ds4_route_changes_total") == 3
    assert value(metrics, "ds4_replays_total") == 2
    assert value(metrics, "ds4_stage_busy_seconds_total", stage="coordinator", layers="") == 0
    backend.state = replace(backend.state, ready=True, stages=STAGES)
    assert value(metrics, "ds4_route_ready") == 1
    assert value(metrics, "ds4_route_missing_layers") == 0


def test_the_process_and_its_build_are_told(metrics):
    rss = value(metrics, "process_resident_memory_bytes")
    assert 10 << 20 < rss < psutil.virtual_memory().total
    assert value(metrics, "process_cpu_seconds_total") > 0
    (build,) = families(metrics)["ds4_build_info"].samples
    assert (build.labels["model"], build.labels["architecture"], build.value) == ("toy", "fake", 1)


def test_names_from_outside_can_not_break_the_format():
    hostile = 'a"b\\c\nds4_route_ready 7'
    metrics = Metrics(replace(watched(), name=hostile))
    (build,) = families(metrics)["ds4_build_info"].samples
    assert build.labels["model"] == hostile
    assert value(metrics, "ds4_route_ready") == 1


def test_servers_of_one_process_do_not_share_their_numbers():
    first, second = Metrics(watched(meter=busy_meter())), Metrics(watched())
    assert value(first, "ds4_completion_tokens_total") == 3
    assert value(second, "ds4_completion_tokens_total") == 0


def test_what_grows_between_two_questions_is_seen(metrics):
    meter = RequestMetrics(Clock())
    metrics = Metrics(watched(meter=meter))
    before = value(metrics, "ds4_completion_tokens_total")
    one_request(meter)
    meter.accepted(CHAT).failed(ClusterError("no"))
    assert value(metrics, "ds4_completion_tokens_total") - before == 3
    failed = {"endpoint": CHAT, "finish": "error", "status": "500"}
    assert value(metrics, "ds4_requests_total", **failed) == 1


# --- the page -------------------------------------------------------------------------------------


def table() -> dict[str, tuple[str, set[str], str]]:
    """The page's table: name -> type, labels, meaning."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|([^|]*)\| (.*) \|$", PAGE, re.MULTILINE)
    return {
        name: (kind, set(re.findall(r"`(\w+)`", labels)), meaning)
        for name, kind, labels, meaning in rows
    }


def test_the_page_lists_exactly_what_the_server_tells(metrics):
    told = re.findall(r"^# HELP (\S+) (.*)\n# TYPE \S+ (\S+)$", read(metrics), re.MULTILINE)
    listed = [(name, meaning, kind) for name, (kind, _, meaning) in table().items()]
    assert listed == told


def test_the_page_lists_the_labels_of_every_metric(metrics):
    listed = table()
    for name, family in families(metrics).items():
        labels = {key for sample in family.samples for key in sample.labels} - {"le"}
        full = f"{name}_total" if family.type == "counter" else name
        assert listed[full][1] == labels, full


def test_names_follow_the_conventions():
    for name, (kind, _, _) in table().items():
        assert name.endswith("_total") == (kind == "counter"), name
        assert not re.search(r"(usec|millisec|_ms\b|kilo|mega|count_total)", name), name


def exposed(metrics: Metrics) -> set[str]:
    return {sample.name for family in families(metrics).values() for sample in family.samples}


def test_the_page_asks_only_for_what_exists(metrics):
    histograms = {f"{n}_{end}" for n in families(metrics) for end in ("bucket", "sum", "count")}
    known = exposed(metrics) | families(metrics).keys() | histograms
    asked = {name for name in NAME.findall(PAGE) if not name.endswith("_")}
    assert asked <= known, asked - known


# --- the dashboard --------------------------------------------------------------------------------


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def test_the_dashboard_asks_only_for_what_exists(metrics):
    known = exposed(metrics)
    assert len(queries()) > 30
    for query in queries():
        asked = set(NAME.findall(query))
        assert asked, query
        assert asked <= known, asked - known


def test_the_dashboard_shows_every_metric(metrics):
    shown = {name for query in queries() for name in NAME.findall(query)}
    for name, (kind, _, _) in table().items():
        assert name in shown or (kind == "histogram" and f"{name}_bucket" in shown), name


def test_the_dashboard_takes_any_data_source_and_its_panels_do_not_overlap():
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        sources = [target["datasource"]["uid"] for target in panel.get("targets", [])]
        assert set(sources) <= {"${datasource}"}
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_queries_are_balanced_and_every_counter_is_asked_for_its_growth():
    for query in queries():
        for left, right in ("()", "[]", "{}"):
            assert query.count(left) == query.count(right), query
        for name in re.findall(r"ds4_\w+_total", query):
            assert re.search(rf"(rate|increase)\({name}\{{", query), query
