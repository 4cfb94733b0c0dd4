"""A worker between hand-driven neighbours: wire-protocol.md#routes, #checklist 53 to 61."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from ds4py.activations import HiddenBatch
from ds4py.config import Address, WorkerTuning
from ds4py.errors import ConnectError
from ds4py.transport.connector import Connector
from ds4py.transport.sockets import listen, local_address
from ds4py.wire.frames import FrameType, encode_frame
from ds4py.wire.messages import Telemetry, WorkFlags, encode, error_result
from ds4py.wire.route import HopEntry
from ds4py.worker import worker as worker_module
from ds4py.worker.forwarder import _MAX_NEXT_HOPS, Forwarder
from tests.clusters import span, start_worker, wait_until
from tests.fake_runner import FakeRunner, embed, fake_layer, reference_logits
from tests.peers import Driver, NextHop, driver, entry, logits_for, make_work, next_hop, take_work
from tests.sockets import Background

FIRST, LAST = span("0-2"), span("3-5")


@contextmanager
def middle(hop: Address, tuning: WorkerTuning | None = None, **fields: object) -> Iterator[Driver]:
    """A driver of layers 0-2, whose route goes on to layers 3-5 at `hop`."""
    runner = FakeRunner(FIRST, **fields)  # type: ignore[arg-type]
    started = start_worker(runner, tuning=tuning)
    try:
        with driver(started.address, entry(FIRST), entry(LAST, hop)) as d:
            d.worker = started  # type: ignore[attr-defined]
            yield d
    finally:
        started.close()


@contextmanager
def scene(**fields: object) -> Iterator[tuple[Driver, NextHop]]:
    with next_hop() as hop, middle(hop.address, **fields) as d:  # type: ignore[arg-type]
        yield d, hop


def first_half(tokens) -> np.ndarray:
    x = embed(tokens)
    for layer in FIRST.indices:
        x = fake_layer(layer, np.zeros((0, 8), np.float32), x)
    return x


@pytest.mark.parametrize(("asked", "bits"), [(32, 32), (16, 16), (8, 8), (0, 32)])
@pytest.mark.parametrize("extra", [0, WorkFlags.ACK_ONLY])
def test_forwarding_rewrites_exactly_what_the_table_says(asked, bits, extra) -> None:
    with scene() as (d, hop):
        sent = d.ask([], [5, 6, 7], session=77, extra_flags=extra, input_hc_bits=asked)
        got = take_work(hop.accept())
        assert (got.layer_start, got.layer_end, got.route_index) == (3, 5, 1)
        kept = WorkFlags.RESET_SESSION | extra
        assert got.flags == WorkFlags.INPUT_HC | WorkFlags.OUTPUT_LOGITS | kept
        assert got.input_hc_bits == bits
        hidden = HiddenBatch(3, 8, bits, got.input)
        expected = HiddenBatch.pack(first_half([5, 6, 7]), bits)
        assert bytes(hidden.data) == bytes(expected.data)
        same = (
            *("model_id", "session_id", "request_id", "prefix_hash", "result_hash", "pos0"),
            *("tokens", "route_count"),
        )
        for name in same:
            assert getattr(got, name) == getattr(sent, name), name
        assert bytes(got.route_blob) == bytes(sent.route_blob)


def test_a_next_hop_without_the_output_flag_is_not_asked_for_logits() -> None:
    with next_hop() as hop:
        started = start_worker(FakeRunner(FIRST))
        with driver(started.address, entry(FIRST), entry(span("3:5"), hop.address)) as d:
            d.ask([], [5])
            assert not take_work(hop.accept()).flags & WorkFlags.OUTPUT_LOGITS
        started.close()


def test_the_relay_appends_its_record_and_leaves_the_rest_alone() -> None:
    theirs = Telemetry(
        layer_start=3,
        layer_end=5,
        route_index=1,
        pos0=0,
        n_tokens=2,
        eval_usec=123,
        input_bytes=4,
        output_bytes=5,
    )
    with scene() as (d, hop):
        d.ask([], [5, 6])
        connection = hop.accept()
        answer = logits_for(take_work(connection)).relayed(theirs)
        connection.send(encode(answer))
        got = d.answer()
        assert got.telemetry[0] == theirs
        (ours,) = got.telemetry[1:]
        assert (ours.layer_start, ours.layer_end, ours.route_index) == (0, 2, 0)
        assert (ours.n_tokens, ours.eval_usec, ours.input_bytes) == (2, 1, 8)
        assert ours.output_bytes == 2 * 8 * 4
        assert bytes(got.payload) == bytes(answer.payload)
        assert (got.request_id, got.result_hash) == (answer.request_id, answer.result_hash)


def test_an_error_of_the_next_hop_is_relayed_with_its_words() -> None:
    with scene() as (d, hop):
        d.ask([], [5])
        connection = hop.accept()
        work = take_work(connection)
        connection.send(encode(error_result(work.request_id, "no memory")))
        got = d.answer()
        assert (got.request_id, got.status, got.text) == (work.request_id, 1, "no memory")
        assert len(got.telemetry) == 1


def test_results_may_come_in_another_order() -> None:
    with scene() as (d, hop):
        works = []
        for n in range(3):
            d.ask([0] * n, [0])
        connection = hop.accept()
        works = [take_work(connection) for _ in range(3)]
        for work in (works[2], works[0], works[1]):
            connection.send(encode(logits_for(work)))
        assert [d.answer().request_id for _ in range(3)] == [3, 1, 2]


def test_two_real_workers_answer_like_one_process() -> None:
    second = start_worker(FakeRunner(LAST))
    with middle(second.address) as d:
        line: list[int] = []
        for token in [[5, 6, 7], [8], [9]]:
            got = d.check(line, token)
            line += token
            np.testing.assert_array_equal(np.frombuffer(got.payload, "<f4"), reference_logits(line))
    second.close()


@pytest.mark.parametrize("window", [1, 2, 4])
def test_no_more_requests_are_outstanding_than_the_window_allows(window) -> None:
    n = window + 3
    with scene(tuning=WorkerTuning(forward_window=window, prefetch_depth=8)) as (d, hop):
        for k in range(n):
            d.ask([0] * 2 * k, [0, 0])
        connection = hop.accept()
        works = [take_work(connection) for _ in range(window)]
        runner = d.worker.stage.device.runner  # type: ignore[attr-defined]
        wait_until(lambda: len(runner.evaluated) == n, "the device went on meanwhile")
        with pytest.raises(Exception, match="sent nothing"):
            connection.receive(timeout=0.05)
        for k in range(n):
            connection.send(encode(logits_for(works[k])))
            assert d.answer().request_id == k + 1
            if len(works) < n:
                works.append(take_work(connection))


def test_a_next_hop_that_stalls_stops_neither_the_device_nor_other_drivers() -> None:
    """Spans that cannot leave hold back their own driver only."""
    with next_hop() as stalled, next_hop() as lively:
        tuning = WorkerTuning(forward_window=1, prefetch_depth=1)
        with middle(stalled.address, tuning) as d:
            for k in range(8):
                d.ask([0] * 2 * k, [0, 0])
            stalled.accept()
            runner = d.worker.stage.device.runner  # type: ignore[attr-defined]
            wait_until(lambda: len(runner.evaluated) == 3, "window and queue are full")
            address = d.worker.address  # type: ignore[attr-defined]
            with driver(address, entry(FIRST), entry(LAST, lively.address)) as other:
                other.ask([], [5], session=2)
                connection = lively.accept()
                connection.send(encode(logits_for(take_work(connection))))
                assert other.answer().status == 0
            assert len(runner.evaluated) == 4  # and the stalled driver was not read any further


def test_when_the_next_hop_dies_every_pending_request_gets_an_error() -> None:
    with scene() as (d, hop):
        for n in range(3):
            d.ask([0] * n, [0])
        connection = hop.accept()
        take_work(connection)
        wait_until(lambda: _pending(d) == 3, "three are pending")
        connection.close()
        got = [d.answer() for _ in range(3)]
        assert [(r.request_id, r.status) for r in got] == [(1, 1), (2, 1), (3, 1)]
        assert "closed the connection" in got[0].text
        d.ask([], [5])  # the upstream connection stands, and the next hop is dialled again
        again = hop.accept()
        again.send(encode(logits_for(take_work(again))))
        assert d.answer().status == 0


def _pending(d: Driver) -> int:
    (upstream,) = d.worker._upstreams  # type: ignore[attr-defined]
    return sum(len(f._pending) for f in upstream._forwarders._by_address.values())


def test_an_idle_close_of_the_next_hop_leaves_upstream_alone_and_is_dialled_on_demand() -> None:
    with scene() as (d, hop):
        for n in range(3):
            d.ask([0] * n, [0])
            connection = hop.accept()
            connection.send(encode(logits_for(take_work(connection))))
            assert d.answer().status == 0
            connection.close()
            wait_until(lambda: not _connected(d), "the loss was seen")


def _connected(d: Driver) -> bool:
    (upstream,) = d.worker._upstreams  # type: ignore[attr-defined]
    return any(f._downstream for f in upstream._forwarders._by_address.values())


def test_an_unreachable_next_hop_is_an_error_and_upstream_lives(monkeypatch) -> None:
    monkeypatch.setattr(worker_module, "NEXT_HOP_ROUNDS", 2)
    free = listen(Address("127.0.0.1", 0))
    address = local_address(free)
    free.close()
    with middle(address) as d:
        for n in range(3):
            text = d.refused([], [n], reset=True)
            assert f"{address}: unable to connect: Connection refused" in text


@pytest.mark.parametrize("host", ["a..b", "x" * 1000, "\xff\xfe", "0.0.0.0"])
def test_a_route_with_a_nonsense_host_is_an_error_and_upstream_lives(host) -> None:
    with middle(Address("127.0.0.1", 9)) as d:
        d.hops = (d.hops[0], HopEntry(host, 7000, 3, 5, has_output=True))
        assert d.refused([], [5])
        assert d.refused([], [5])


def test_a_dial_that_fails_in_a_way_that_nobody_foresaw_is_an_error_too(monkeypatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    with middle(Address("127.0.0.1", 9)) as d:
        monkeypatch.setattr(Connector, "connect", broken)
        assert "internal error" in d.refused([], [5])


@pytest.mark.parametrize(
    "nonsense",
    [
        encode_frame(FrameType.RESULT, bytes(39)),
        encode_frame(FrameType.ERROR, b"go away"),
        encode_frame(77, b"x"),
        [b"HTTP/1.1 400 Bad Request\r\n\r\n"],
        encode(error_result(999, "nobody asked for this")),
    ],
    ids=["short", "error", "unknown", "http", "unasked"],
)
def test_nonsense_from_the_next_hop_is_an_error_and_upstream_lives(nonsense) -> None:
    with scene() as (d, hop):
        d.ask([], [5])
        connection = hop.accept()
        take_work(connection)
        connection.send(nonsense)
        got = d.answer()
        assert (got.request_id, got.status) == (1, 1)
        assert "next hop" in got.text
        d.ask([], [5])
        again = hop.accept()
        again.send(encode(logits_for(take_work(again))))
        assert d.answer().status == 0


def test_a_request_id_that_is_in_flight_already_is_refused() -> None:
    with scene() as (d, hop):
        d.ask([], [5], request_id=7)
        d.ask([5], [6], request_id=7)
        got = d.answer()
        assert (got.request_id, got.status) == (7, 1)
        assert "already in flight" in got.text
        connection = hop.accept()
        connection.send(encode(logits_for(take_work(connection))))
        assert d.answer().status == 0


def test_spans_of_different_sessions_share_the_connection_to_the_next_hop() -> None:
    with scene() as (d, hop):
        d.ask([], [5], session=1)
        d.ask([], [6], session=2)
        connection = hop.accept()
        assert [take_work(connection).session_id for _ in range(2)] == [1, 2]


def test_an_orderly_end_upstream_waits_for_forwarded_spans() -> None:
    with scene() as (d, hop):
        d.ask([], [5])
        connection = hop.accept()
        work = take_work(connection)
        d.connection.stream.sock.shutdown(1)  # we say no more, but listen
        connection.send(encode(logits_for(work)))
        assert d.answer().status == 0
        assert Background(d.connection.receive).result() is None
        assert Background(connection.receive).result() is None


def test_upstreams_end_is_not_blamed_on_the_next_hop(caplog) -> None:
    with caplog.at_level(logging.INFO), scene() as (d, hop):
        d.ask([], [5])
        connection = hop.accept()
        work = take_work(connection)
        d.connection.close()
        connection.send(encode(logits_for(work)))
        assert Background(connection.receive).result() is None
    assert "next hop" not in caplog.text


def test_closing_answers_what_waits_for_a_connection() -> None:
    """A hop that gives way to others must not leave requests without their RESULT."""
    replies, departed, dialling = [], [], threading.Event()

    def dial(address, stopped):
        dialling.set()
        wait_until(stopped, "the forwarder is closed")
        raise ConnectError("gave up", peer=str(address))

    forwarder = Forwarder(Address("127.0.0.1", 9), window=2, dial=dial, reply=replies.append)
    work = make_work([entry(FIRST), entry(LAST)], [], [5], request_id=3)
    record = Telemetry(
        layer_start=0,
        layer_end=2,
        route_index=0,
        pos0=0,
        n_tokens=1,
        eval_usec=1,
        input_bytes=4,
        output_bytes=4,
    )
    forwarder.forward(work, record, lambda: departed.append(1))
    assert dialling.wait(20)
    forwarder.close()
    forwarder.close()
    assert [(r.request_id, r.status) for r in replies] == [(3, 1)]
    assert departed == [1]
    forwarder.forward(work, record, lambda: departed.append(2))  # it was chosen a moment before
    assert [(r.request_id, r.status) for r in replies] == [(3, 1), (3, 1)]
    assert departed == [1, 2]


def test_a_driver_that_names_ever_new_hops_keeps_few_forwarders(monkeypatch) -> None:
    monkeypatch.setattr(worker_module, "NEXT_HOP_ROUNDS", 1)
    with middle(Address("127.0.0.1", 9)) as d:
        for n in range(_MAX_NEXT_HOPS + 5):
            d.hops = (d.hops[0], HopEntry(f"127.0.0.{n + 1}", 9, 3, 5, has_output=True))
            assert "unable to connect" in d.refused([], [5])
        (upstream,) = d.worker._upstreams  # type: ignore[attr-defined]
        assert len(upstream._forwarders._by_address) == _MAX_NEXT_HOPS
        assert Address("127.0.0.1", 9) not in upstream._forwarders._by_address
