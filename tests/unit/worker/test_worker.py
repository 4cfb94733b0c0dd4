"""One worker and a hand-driven peer: refusals, queues, sessions, the end of a connection."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest

from ds4py.config import WorkerTuning
from ds4py.errors import ClusterError
from ds4py.wire.extensions import (
    CANCEL,
    DROP,
    FORK,
    HOP_LOST,
    REWIND,
    PeerHello,
    decode_peer_hello,
    encode_peer_hello,
)
from ds4py.wire.frames import EXT_HELLO, FrameType, encode_frame
from ds4py.wire.messages import ErrorText, ResultKind, encode
from ds4py.worker import worker as worker_module
from ds4py.worker.worker import Worker
from tests.clusters import span, start_worker, wait_until
from tests.fake_runner import FakeRunner, card, reference_logits
from tests.peers import N_CTX, Driver, driver, entry, hello
from tests.sockets import Background

PROMPT = [5, 80, 3, 41, 9]
INTRODUCTION = PeerHello(
    role="coordinator",
    version="1",
    model_id=card().model_id,
    model_name="fake",
    n_layers=6,
    quant_bits=4,
    ctx_size=64,
)


@contextmanager
def worker(
    layers: str = "0-5", tuning: WorkerTuning | None = None, **fields: object
) -> Iterator[Worker]:
    started = start_worker(FakeRunner(span(layers), **fields), tuning=tuning)  # type: ignore[arg-type]
    try:
        yield started
    finally:
        started.close()


@contextmanager
def driven(layers: str = "0-5", **fields: object) -> Iterator[tuple[Worker, Driver]]:
    with worker(layers, **fields) as w, driver(w.address, entry(span(layers))) as d:  # type: ignore[arg-type]
        yield w, d


def logits(result) -> np.ndarray:
    assert result.result_kind == ResultKind.LOGITS
    return np.frombuffer(result.payload, "<f4")


def test_a_data_connection_starts_with_work_and_continues_with_it() -> None:
    with driven() as (_, d):
        np.testing.assert_array_equal(logits(d.check([], PROMPT)), reference_logits(PROMPT))
        np.testing.assert_array_equal(logits(d.check(PROMPT, [7])), reference_logits([*PROMPT, 7]))


@pytest.mark.parametrize(
    "broken",
    [
        {"model_id": 1},
        {"layer_start": 1},
        {"flags": 0x16},
        {"flags": 0x4},
        {"tokens": ()},
        {"tokens": (97,)},
        {"result_hash": 1},
        {"prefix_hash": 1},
        {"pos0": N_CTX},
        {"route_count": 0},
        {"route_index": 1},
        {"input": memoryview(b"1234")},
        {"route_blob": memoryview(b"")},
    ],
    ids=lambda broken: next(iter(broken)),
)
def test_after_any_refusal_the_next_span_succeeds(broken) -> None:
    with driven() as (_, d):
        d.check([], PROMPT)
        assert d.refused([], [1], **broken)
        np.testing.assert_array_equal(logits(d.check(PROMPT, [7])), reference_logits([*PROMPT, 7]))


def test_a_body_that_is_too_short_is_refused_with_request_zero() -> None:
    with driven() as (_, d):
        d.connection.send(encode_frame(FrameType.WORK, b"short"))
        result = d.answer()
        assert (result.request_id, result.status) == (0, 1)
        d.check([], PROMPT)


@pytest.mark.parametrize("frame_type", [1, 4, 6, 7, 8, 77])
def test_an_unexpected_frame_is_answered_with_an_error_and_a_close(frame_type: int, caplog) -> None:
    with driven() as (_, d):
        d.connection.send(encode_frame(frame_type, b"x" * 100))
        frame = Background(d.connection.receive).result()
        assert frame is not None
        assert frame.type == FrameType.ERROR
        assert Background(d.connection.receive).result() is None
    assert "Traceback" not in caplog.text


def test_a_frame_out_of_turn_is_answered_with_an_error_and_a_close() -> None:
    """The handshake of another ds4py comes first or not at all."""
    with driven() as (_, d):
        d.check([], PROMPT)
        d.connection.send(encode_peer_hello(INTRODUCTION))
        frame = Background(d.connection.receive).result()
        assert frame is not None
        assert frame.type == FrameType.ERROR
        assert Background(d.connection.receive).result() is None


def test_connections_are_bounded_and_one_that_ends_makes_room(monkeypatch) -> None:
    monkeypatch.setattr(worker_module, "MAX_CONNECTIONS", 2)
    with worker() as w:
        at_work = entry(span("0-5"))
        with driver(w.address, at_work) as first:
            first.check([], PROMPT)
            with driver(w.address, at_work) as second:
                second.check([], PROMPT)
                with driver(w.address, at_work) as third:
                    assert Background(third.connection.receive).result() is None
            wait_until(lambda: w.n_callers == 1, "the second one has ended")
            with driver(w.address, at_work) as fourth:
                fourth.check([], PROMPT)


def test_an_error_frame_ends_the_connection_and_is_logged_once(caplog) -> None:
    with worker() as w:
        for _ in range(3):
            with driver(w.address, entry(span("0-5"))) as d:
                d.connection.send(encode(ErrorText.of("no room for you")))
                assert Background(d.connection.receive).result() is None
        wait_until(lambda: w.n_callers == 0, "the connections ended")
    assert caplog.text.count("no room for you") == 1


def test_the_extension_hello_is_answered() -> None:
    with driven("2:3") as (w, d):
        d.connection.send(encode_peer_hello(INTRODUCTION))
        frame = Background(d.connection.receive).result()
        assert frame is not None
        assert frame.type == EXT_HELLO
        got = decode_peer_hello(frame.body)
        assert (got.role, got.layer_start, got.layer_end, got.has_output) == ("worker", 2, 3, False)
        assert got.listen_port == w.address.port
        assert set(got.features) == {CANCEL, DROP, FORK, HOP_LOST, REWIND}
        assert got.weight_bytes == 2000
        d.check([], PROMPT)


def test_the_final_hop_acknowledges_without_a_payload() -> None:
    with driven() as (_, d):
        result = d.check([], PROMPT, extra_flags=8)
        assert (result.result_kind, result.payload.nbytes, result.payload_bits) == (0, 0, 0)
        assert result.telemetry[0].n_tokens == len(PROMPT)


@pytest.mark.parametrize(("bits", "said"), [(32, 32), (16, 16), (8, 8), (0, 32)])
def test_a_final_hop_without_head_returns_all_rows_in_the_width_of_the_work(bits, said) -> None:
    with driven("0:5") as (_, d):
        result = d.check([], [1, 2, 3], input_hc_bits=bits)
        assert (result.result_kind, result.payload_bits) == (ResultKind.HIDDEN_STATE, said)
        assert result.payload.nbytes == 3 * 8 * said // 8


def test_sessions_outlive_their_connection() -> None:
    with worker() as w:
        hop = entry(span("0-5"))
        with driver(w.address, hop) as first:
            first.check([], PROMPT)
        with driver(w.address, hop) as second:
            second.check(PROMPT, [7])


def test_a_full_stage_refuses_a_new_session_and_gives_up_those_of_closed_connections() -> None:
    with worker(n_slots=1) as w:
        hop = entry(span("0-5"))
        with driver(w.address, hop) as first, driver(w.address, hop) as second:
            first.check([], PROMPT, session=1)
            assert "session slots" in second.refused([], PROMPT, session=2)
            first.check(PROMPT, [7], session=1)
            first.connection.close()
            wait_until(lambda: len(w._upstreams) == 1, "the connection ended")
            second.check([], PROMPT, session=2)


def test_a_device_that_fails_is_an_error_and_a_reset_heals_the_session(caplog) -> None:
    def fail(work) -> None:
        if 13 in work.tokens:
            raise RuntimeError("out of memory")

    with driven(before=fail) as (_, d):
        d.check([], PROMPT)
        text = d.refused(PROMPT, [13])
        assert "the device failed: RuntimeError: out of memory" in text
        assert "reset" in d.refused(PROMPT, [7])
        d.check([], [1, 2])
    assert "the device failed" in caplog.text


def test_a_runner_with_too_few_answers_does_not_stop_the_device() -> None:
    class Forgetful(FakeRunner):
        def run(self, batch):
            return super().run(batch)[: 0 if 13 in batch[0].tokens else None]

    started = start_worker(Forgetful(span("0-5")))
    with driver(started.address, entry(span("0-5"))) as d:
        assert "0 answers to 1 spans" in d.refused([], [13])
        d.check([], [1])
    started.close()


class Gate:
    """Holds the device until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()

    def __call__(self, work) -> None:
        self.entered.set()
        assert self.open.wait(20)


@pytest.mark.parametrize(
    ("tuning", "read"),
    [
        (WorkerTuning(prefetch_depth=1), 2),
        (WorkerTuning(prefetch_depth=3), 4),
        (WorkerTuning(prefetch=False), 1),
    ],
)
def test_reading_stops_while_enough_spans_wait(tuning, read) -> None:
    gate = Gate()
    with driven(tuning=tuning, before=gate) as (w, d):
        for n in range(8):
            d.ask([0] * 2 * n, [0, 0])
        wait_until(lambda: bool(w._upstreams), "the worker serves us")
        (upstream,) = w._upstreams
        wait_until(lambda: upstream._unfinished == read, "spans wait")
        assert gate.entered.wait(20)
        assert upstream._unfinished == read
        gate.open.set()
        assert [d.answer().request_id for _ in range(8)] == list(range(1, 9))


def test_an_orderly_end_finishes_what_was_read() -> None:
    gate = Gate()
    with driven(before=gate) as (_, d):
        for n in range(3):
            d.ask([0] * n, [0])
        d.connection.stream.sock.shutdown(1)  # we say no more, but listen
        gate.open.set()
        assert [d.answer().status for _ in range(3)] == [0, 0, 0]
        assert Background(d.connection.receive).result() is None


def test_a_protocol_error_drops_what_waits() -> None:
    gate = Gate()
    with worker(before=gate) as w:
        with driver(w.address, entry(span("0-5"))) as d:
            for n in range(3):
                d.ask([0] * n, [0])
            assert gate.entered.wait(20)
            d.connection.send([b"nonsense here"])
            wait_until(lambda: not w._upstreams, "the connection ended")
            gate.open.set()
            assert Background(lambda: _end(d.connection)).result()
        with driver(w.address, entry(span("0-5"))) as d:
            d.check([], [1])
        runner = w.stage.device.runner
        assert runner.evaluated == [(0, 1), (0, 1)]  # the one on the device, and the new one


def _end(connection) -> bool:
    while True:
        try:
            if connection.receive() is None:
                return True
        except Exception:  # noqa: BLE001 - a reset, perhaps
            return True


def test_a_peer_that_never_reads_does_not_stop_the_device_for_others() -> None:
    """Its results fill the socket's buffers; the device goes on at once."""
    identity = replace(card(), n_vocab=200_000)
    hop = entry(span("0-5"))
    started = start_worker(FakeRunner(span("0-5"), identity=identity, n_ctx=4096))
    with driver(started.address, hop) as deaf, driver(started.address, hop) as other:
        other.connection.expect({FrameType.RESULT: 1 << 24})
        asking = Background(lambda: [deaf.ask([0] * n, [0], session=1) for n in range(60)])
        wait_until(
            lambda: any(u._outbox._waiting for u in started._upstreams), "the socket is full"
        )
        other.check([], [5], session=2)
        assert len(started._upstreams) == 2  # not by giving up the deaf one
        deaf.connection.close()
        asking.result()
    started.close()


def test_the_decode_batch_holds_a_session_once() -> None:
    """What waits while the device works is one batch; two spans of one session never share it."""
    gate, hop = Gate(), entry(span("0-5"))
    hold = lambda work: gate(work) if work.session == 9 else None  # noqa: E731
    with worker(before=hold) as w, ExitStack() as stack:
        *drivers, blocker = [stack.enter_context(driver(w.address, hop)) for _ in range(4)]
        for n, d in enumerate(drivers):
            d.check([], [1, 2], session=n + 1)
        device = w.stage.device
        del device.runner.batches[:]
        blocker.ask([], [0], session=9)
        assert gate.entered.wait(20)
        for n, d in enumerate(drivers):
            d.ask([1, 2], [5], session=n + 1)
        wait_until(lambda: len(device._queue) == 3, "three spans wait")
        drivers[0].ask([1, 2, 5], [6], session=1)
        wait_until(lambda: len(device._queue) == 4, "four spans wait")
        gate.open.set()
        assert [d.answer().status for d in (blocker, *drivers, drivers[0])] == [0] * 5
        assert device.runner.batches == [1, 3, 1]


def test_every_call_of_the_runner_happens_on_one_thread() -> None:
    with worker() as w:
        with driver(w.address, entry(span("0-5"))) as d:
            d.check([], [1])
        with driver(w.address, entry(span("0-5"))) as d:
            d.check([1], [2])
        assert w.stage.device.runner.threads == {w.stage.device._thread.ident}


def test_closing_a_worker_ends_its_connections_threads_and_runner() -> None:
    gate = Gate()
    before = set(threading.enumerate())
    with worker(before=gate) as w, driver(w.address, entry(span("0-5"))) as d:
        for n in range(3):
            d.ask([0] * n, [0])
        assert gate.entered.wait(20)
        closing = Background(w.close)
        gate.open.set()
        closing.result()
        assert w.stage.device.runner.closed
        assert _end(d.connection)
    ours = [t.name for t in threading.enumerate() if t not in before]
    assert not [name for name in ours if not name.startswith("Thread-")]  # those of the test


def test_a_closed_device_refuses_at_once() -> None:
    from ds4py.stage.executor import DeviceThread, wait_for

    device = DeviceThread(FakeRunner(span("0-5")))
    device.close()
    device.close()
    with pytest.raises(ClusterError, match="shutting down"):
        wait_for(device.ask(lambda runner: None), 1)


def test_a_hello_on_a_data_port_is_unexpected(caplog) -> None:
    with caplog.at_level(logging.WARNING), driven() as (_, d):
        d.connection.send(encode(hello(span("0-5"))))
        frame = Background(d.connection.receive).result()
        assert frame is not None
        assert frame.type == FrameType.ERROR
