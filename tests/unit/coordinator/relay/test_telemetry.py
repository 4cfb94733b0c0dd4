"""Sums of what each stage reports, and the time between stages."""

from __future__ import annotations

from ds4py.coordinator.relay.telemetry import RouteTelemetry
from ds4py.layer_range import LayerRange
from ds4py.wire.messages import Telemetry

STAGES = [(0, 1), (2, 3), (4, 5)]


class Clock:
    """Microseconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000_000

    def __call__(self) -> int:
        return self.now


def item(
    start: int,
    end: int,
    *,
    n: int = 1,
    evaluated: int = 0,
    waited: int = 0,
    sizes: tuple[int, int] = (0, 0),
) -> Telemetry:
    return Telemetry(
        layer_start=start,
        layer_end=end,
        route_index=0,
        pos0=0,
        n_tokens=n,
        eval_usec=evaluated,
        downstream_wait_usec=waited,
        input_bytes=sizes[0],
        output_bytes=sizes[1],
    )


def status(telemetry: RouteTelemetry, start: int, end: int):
    return telemetry.status("w", LayerRange(start, end), None)


def test_the_hop_time_is_what_a_wait_has_beyond_the_stages_behind() -> None:
    """Each stage waits for everything behind it; only the difference is wire and queues."""
    telemetry = RouteTelemetry()
    records = [
        item(4, 5, evaluated=100),
        item(2, 3, evaluated=50, waited=130),  # 30 between the second and the third
        item(0, 1, evaluated=20, waited=190),  # 10 between the first and the second
    ]
    telemetry.record(records, stages=STAGES, first_wait_usec=217)  # 7 between us and the first
    assert [status(telemetry, *s).decode_hop_usec for s in STAGES] == [7, 10, 30]
    assert [status(telemetry, *s).decode_usec for s in STAGES] == [20, 50, 100]
    assert [status(telemetry, *s).decode_tokens for s in STAGES] == [1, 1, 1]


def test_prefill_and_decode_are_told_apart() -> None:
    telemetry = RouteTelemetry()
    layers = LayerRange(0, 1)
    telemetry.record_local(layers, 7, 700)
    telemetry.record_local(layers, 1, 11)
    telemetry.record([item(0, 1, n=3, evaluated=30)], stages=STAGES, first_wait_usec=40)
    got = telemetry.status("coordinator", layers, 5)
    assert (got.prefill_tokens, got.prefill_usec) == (10, 730)
    assert (got.decode_tokens, got.decode_usec, got.decode_hop_usec) == (1, 11, 0)
    assert (got.name, got.weight_bytes) == ("coordinator", 5)


def test_clocks_that_disagree_never_give_negative_times() -> None:
    telemetry = RouteTelemetry()
    records = [item(2, 3, evaluated=1000), item(0, 1, evaluated=5, waited=10)]
    telemetry.record(records, stages=STAGES, first_wait_usec=3)
    assert [status(telemetry, *s).decode_hop_usec for s in STAGES[:2]] == [0, 0]


def test_a_peer_that_reports_about_strangers_fills_no_memory() -> None:
    telemetry = RouteTelemetry()
    for n in range(100):
        lies = [item(n * 10 + k, n * 10 + k + 9) for k in range(1, 9)]
        telemetry.record(lies, stages=STAGES, first_wait_usec=1)
    telemetry.record([item(0, 1)] * 100, stages=STAGES, first_wait_usec=1)
    assert len(telemetry._sums) <= len(STAGES) + 1  # and the coordinator's own
    assert status(telemetry, 0, 1).decode_tokens <= len(STAGES)


def test_a_stage_without_records_has_zeros() -> None:
    telemetry = RouteTelemetry()
    telemetry.record([], stages=STAGES, first_wait_usec=1)
    assert status(telemetry, 2, 3).decode_tokens == 0
    assert telemetry.status("coordinator", None, 0).layers is None


def test_prefill_has_its_own_hop_and_waiting_times() -> None:
    telemetry = RouteTelemetry()
    records = [item(2, 3, n=8, evaluated=50), item(0, 1, n=8, evaluated=20, waited=61)]
    telemetry.record(records, stages=STAGES, first_wait_usec=90)
    first, second = (status(telemetry, *s) for s in STAGES[:2])
    assert (first.prefill_hop_usec, first.prefill_wait_usec) == (9, 61)
    assert (second.prefill_hop_usec, second.prefill_wait_usec) == (11, 0)
    assert (first.decode_hop_usec, first.decode_wait_usec) == (0, 0)


def test_the_coordinator_waits_for_all_that_its_first_hop_took() -> None:
    telemetry = RouteTelemetry()
    for _ in range(2):
        telemetry.record([item(0, 1, evaluated=20)], stages=STAGES, first_wait_usec=90)
    assert telemetry.status("coordinator", None, 0).decode_wait_usec == 180

    own, telemetry = LayerRange(0, 1), RouteTelemetry()
    telemetry.record_local(own, 1, 11)
    telemetry.record([item(2, 3, evaluated=20)], stages=STAGES, first_wait_usec=90)
    assert telemetry.status("coordinator", own, 5).decode_wait_usec == 90


def test_bytes_are_what_the_stages_say() -> None:
    telemetry = RouteTelemetry()
    for n in (1, 4):
        records = [item(0, 1, n=n, sizes=(10 * n, 300))]
        telemetry.record(records, stages=STAGES, first_wait_usec=1)
    got = status(telemetry, 0, 1)
    assert (got.input_bytes, got.output_bytes) == (50, 600)


def test_spans_of_one_batch_are_busy_once_and_spans_in_a_row_each_for_itself() -> None:
    clock = Clock()
    telemetry = RouteTelemetry(clock=clock)
    for later in (0, 3, 2):  # one batch: 100 microseconds, told three times within five
        clock.now += later
        telemetry.record([item(0, 1, evaluated=100)], stages=STAGES, first_wait_usec=120)
    assert status(telemetry, 0, 1).busy_usec == 105
    assert status(telemetry, 0, 1).decode_usec == 300
    for _ in range(2):  # one after the other, with pauses
        clock.now += 150
        telemetry.record([item(0, 1, evaluated=100)], stages=STAGES, first_wait_usec=120)
    assert status(telemetry, 0, 1).busy_usec == 305


def test_a_route_changes_when_one_of_its_connections_does() -> None:
    telemetry = RouteTelemetry()
    assert telemetry.route_changes == 0
    for links in ([], [], [1, 2], [1, 2], [1, 3], [1, 2]):
        telemetry.took_route(links)
    assert telemetry.route_changes == 4
