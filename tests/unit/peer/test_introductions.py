"""Workers that dial in and tell more than the stock protocol: who is let in, who is told, and how a
plain peer is told from one that has died."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from ds4py import __version__
from ds4py.config import Address, RouteEntry
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.relay.workers.listener import coordinator_port
from ds4py.layer_range import LayerSpec
from ds4py.peer import handshake as handshake_module
from ds4py.peer.handshake import PLAIN_SECONDS, PlainMemory
from ds4py.peer.hello import build_id
from ds4py.transport.connection import Connection
from ds4py.transport.connector import Connector
from ds4py.transport.sockets import Listener
from ds4py.wire.extensions import CANCEL, DROP, FORK, HOP_LOST, REWIND, encode_peer_hello
from ds4py.wire.frames import EXT_HELLO, FrameType, encode_frame, worker_limits
from ds4py.wire.messages import ErrorText
from ds4py.worker import worker as worker_module
from tests.by_hand import PROMPT, QUICK, WHOLE, dialling, n_workers
from tests.clusters import ANY_PORT, SOCKETS, cluster, registered, span, start_worker, wait_until
from tests.fake_runner import WIDTH, FakeRunner, card
from tests.peers import N_CTX
from tests.sockets import Background, frames_over
from tests.unit.peer.extended import calling, exchange, extended_worker, worker_hello

FEATURES = {CANCEL, DROP, FORK, HOP_LOST, REWIND}


@pytest.fixture
def quick(monkeypatch) -> None:
    monkeypatch.setattr(worker_module, "RECONNECT_PAUSE", 0.01)


@pytest.mark.parametrize("dial_in", [False, True])
def test_a_coordinator_learns_the_same_of_a_worker_whoever_dials(dial_in) -> None:
    with cluster(["0-5"], dial_in=dial_in) as c:
        c.wait_ready()
        (record,) = registered(c.coordinator)
        assert record.features == FEATURES
        assert (record.alive_timeout, record.weight_bytes, record.n_ctx) == (10, 6000, 64)
        assert record.address.port == c.workers[0].address.port
        assert c.coordinator.ensure_pipeline(after_loss=False, cancelled=None).can_rewind


def test_a_dialling_worker_is_answered_and_serves() -> None:
    with cluster([]) as c, calling(c.port.address) as peer:
        theirs = exchange(peer, worker_hello(WHOLE, alive_timeout=3.5))
        assert (theirs.role, theirs.build) == ("coordinator", build_id())
        c.wait_ready()
        (record,) = registered(c.coordinator)
        assert (record.address, record.alive_timeout) == (Address("127.0.0.1", 7009), 3.5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"listen_port": None}, "names no data port"),
        ({"role": "coordinator"}, "is no worker"),
        ({"model_id": 1}, "model id mismatch"),
        ({"layer_end": 9}, "layer range"),
    ],
)
def test_a_dialling_worker_that_does_not_fit_is_told_why(change, words, caplog) -> None:
    with cluster([]) as c, calling(c.port.address) as peer:
        peer.send(encode_peer_hello(worker_hello(WHOLE, **change)))
        frame = Background(peer.receive).result()
        assert frame is not None
        assert frame.type == FrameType.ERROR
        assert words in ErrorText(bytes(frame.body)).text
        assert Background(peer.receive).result() is None
        assert n_workers(c) == 0
    assert words in caplog.text


@pytest.mark.parametrize("body", [b"{}", b"[[[[", b""])
def test_an_unreadable_handshake_is_closed_in_silence(body) -> None:
    with cluster([]) as c, calling(c.port.address) as peer:
        peer.send(encode_frame(EXT_HELLO, body))
        assert Background(peer.receive).result() is None
        assert n_workers(c) == 0


def test_who_a_peer_is_stands_in_both_logs_once(caplog, quick) -> None:
    caplog.set_level(logging.INFO)
    with cluster(["0-5"], dial_in=True) as c:
        c.wait_ready()
        for _ in range(2):
            (link,) = c.coordinator.workers.links.values()
            link.close("to see it come back")
            wait_until(lambda: link.link_id not in c.coordinator.workers.links, "it is gone")  # noqa: B023
            c.wait_ready()
        (worker,) = c.workers
        words = f"is ds4py {__version__} (build {build_id()})"
        name = f"worker 127.0.0.1:{worker.address.port} (layers 0-5 and the output head)"
    assert caplog.text.count(f"{name} {words}") == 1
    assert caplog.text.count(f"coordinator 127.0.0.1 {words}") == 1


@pytest.mark.parametrize("dial_in", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs", "warned"),
    [("aaaa", "bbbb", True), ("aaaa", "aaaa", False), ("", "bbbb", False), ("aaaa", "", False)],
)
def test_another_file_of_the_same_model_is_a_warning_with_both_fingerprints(
    ours, theirs, warned, dial_in, caplog
) -> None:
    runner = FakeRunner(WHOLE, identity=replace(card(), fingerprint=theirs))
    dialled = None if dial_in else start_worker(runner)
    route = () if dialled is None else (RouteEntry(dialled.address),)
    config = replace(QUICK, route=route)
    coordinator = Coordinator(replace(card(), fingerprint=ours), 64, config, SOCKETS)
    port = coordinator_port(Listener(ANY_PORT, SOCKETS), coordinator)
    port.start()
    coordinator.start()
    worker = dialled or start_worker(runner, coordinator=port.address)
    wait_until(lambda: coordinator.health().ready, "it is let in all the same")
    port.close()
    coordinator.close()
    worker.close()
    texts = [r.getMessage() for r in caplog.records if "fingerprint" in r.getMessage()]
    assert len(texts) == (2 if warned else 0)  # one of each side
    for text in texts:
        assert ours in text
        assert theirs in text


# --- plain, or dead? ----------------------------------------------------------------------------


def test_a_plain_peer_is_remembered_for_a_while() -> None:
    now = [0.0]
    memory = PlainMemory(lambda: now[0])
    assert not memory.is_plain
    memory.remember()
    now[0] = PLAIN_SECONDS - 1
    assert memory.is_plain
    now[0] = PLAIN_SECONDS
    assert not memory.is_plain


class Door:
    """Somebody's port, answered by hand."""

    def __init__(self, address: Address = ANY_PORT):
        self.listener = Listener(address, SOCKETS)
        self.address = self.listener.address

    def next_type(self, *, close: bool = True) -> tuple[int, Connection]:
        """Accept, read one frame, and perhaps hang up without a word."""
        sock = Background(self.listener.accept).result()
        assert sock is not None
        limits = worker_limits(N_CTX, WIDTH) | {FrameType.HELLO: 167}
        connection = frames_over(sock, limits)
        frame = Background(connection.receive).result()
        assert frame is not None
        if close:
            connection.close()
        return frame.type, connection


def test_a_plain_coordinator_that_gives_way_to_a_ds4py_is_found_again(monkeypatch, quick) -> None:
    monkeypatch.setattr(handshake_module, "PLAIN_SECONDS", 0.0)
    door = Door()
    worker = start_worker(FakeRunner(WHOLE), coordinator=door.address)
    for _ in range(2):
        assert door.next_type()[0] == EXT_HELLO
        assert door.next_type()[0] == FrameType.HELLO
    door.listener.close()
    coordinator = Coordinator(card(), 64, QUICK, SOCKETS)
    port = coordinator_port(Listener(door.address, SOCKETS), coordinator)
    port.start()
    wait_until(lambda: bool(registered(coordinator)), "it has come")
    assert registered(coordinator)[0].features == FEATURES
    port.close()
    coordinator.close()
    worker.close()


def test_a_coordinator_that_dies_during_the_handshake_is_not_taken_for_a_plain_one(
    monkeypatch, quick
) -> None:
    attempts: list[int] = []

    connect = Connector.connect

    def counted(*args, rounds: int, **more):
        attempts.append(rounds)
        return connect(*args, rounds=1, **more)

    monkeypatch.setattr(Connector, "connect", counted)
    door = Door()
    worker = start_worker(FakeRunner(WHOLE), coordinator=door.address)
    kind, connection = door.next_type(close=False)
    assert kind == EXT_HELLO
    door.listener.close()
    connection.close()
    wait_until(lambda: 1 in attempts, "the worker looks whether it is still there")
    again = Door(door.address)
    assert again.next_type()[0] == EXT_HELLO
    again.listener.close()
    worker.close()


def test_a_coordinator_that_never_answers_is_not_taken_for_a_plain_one(monkeypatch, quick) -> None:
    monkeypatch.setattr(handshake_module, "HANDSHAKE_SECONDS", 0.1)
    door = Door()
    worker = start_worker(FakeRunner(WHOLE), coordinator=door.address)
    kept = [door.next_type(close=False) for _ in range(3)]
    assert [kind for kind, _ in kept] == [EXT_HELLO] * 3
    for _, connection in kept:
        connection.close()
    door.listener.close()
    worker.close()


def test_a_plain_worker_that_gives_way_to_a_ds4py_is_found_again(monkeypatch) -> None:
    monkeypatch.setattr(handshake_module, "PLAIN_SECONDS", 0.0)
    monkeypatch.setattr("ds4py.coordinator.relay.workers.dialer.REDIAL_PAUSE", 0.01)
    plain = start_worker(FakeRunner(WHOLE), speaks_extensions=False)
    with dialling(RouteEntry(plain.address, LayerSpec.parse("0:output"))) as c:
        c.wait_ready()
        plain.close()
        wait_until(lambda: not c.coordinator.health().ready, "it is missed")
        worker = start_worker(FakeRunner(WHOLE), listen=plain.address)
        c.wait_ready()
        assert registered(c.coordinator)[0].features == FEATURES
        with c.backend.lease(PROMPT) as session:
            session.sync(PROMPT)
    worker.close()


def test_two_ds4py_workers_of_one_host_and_range_stand_side_by_side() -> None:
    """The stock protocol takes the second for the first one come back.

    See docs/spec/wire-protocol.md#registry.
    """
    with (
        cluster([]) as c,
        extended_worker(c.port.address, WHOLE, alive_timeout=5.0),
        extended_worker(c.port.address, WHOLE, alive_timeout=5.0, listen_port=7010),
    ):
        wait_until(lambda: n_workers(c) == 2, "both are registered")
        with extended_worker(c.port.address, span("0-5"), alive_timeout=5.0):
            wait_until(lambda: len(c.coordinator.workers.retired) == 1, "the first has come back")
            ports = [r.address.port for r in registered(c.coordinator)]
            assert ports == [7010, 7009]
