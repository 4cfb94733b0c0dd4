"""The recorded requests of errors.json against live processes of ours: same class of answer, same
status, same request id, and the connection survives exactly where the C programs kept it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ds4py.config import Address, CoordinatorConfig
from ds4py.contracts import ModelCard
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.relay.workers.listener import coordinator_port
from ds4py.layer_range import LayerRange
from ds4py.transport.sockets import Listener, connect
from ds4py.wire.frames import (
    FrameReader,
    FrameType,
    coordinator_limits,
    encode_frame,
)
from ds4py.wire.messages import ErrorText, Result, decode
from ds4py.worker import worker as worker_module
from tests import golden
from tests.clusters import SOCKETS, registered, start_worker, wait_until
from tests.fake_runner import FakeRunner
from tests.sockets import read_to_end

MODEL = ModelCard(
    model_id=2,
    name="DeepSeek V4 Tiny",
    architecture="deepseek4",
    n_layers=6,
    n_vocab=768,
    hidden_width=1024,
    n_ctx_train=512,
    quant_bits=2,
)
N_CTX = 512
CASES = golden.load_json("wire/errors.json")["cases"]
WORKER_CASES = [
    case
    for case in CASES
    if case["target"].startswith("worker") and not case["name"].startswith("snapshot")
]
COORDINATOR_CASES = [case for case in CASES if case["target"].startswith("coordinator")]


def request_of(case) -> bytes:
    if case["sent_hex"] is not None:
        return bytes.fromhex(case["sent_hex"])
    return b"".join(
        bytes.fromhex(part["hex"]) if "hex" in part else bytes(part["zeros"])
        for part in case["sent_parts"]
    )


@contextmanager
def live_worker(case, monkeypatch) -> Iterator[Address]:
    monkeypatch.setattr(worker_module, "NEXT_HOP_ROUNDS", 2)
    last = case["target"].startswith("worker B")
    layers = LayerRange(4, 5, has_output=True) if last else LayerRange(2, 3)
    worker = start_worker(FakeRunner(layers, n_ctx=N_CTX, identity=MODEL))
    try:
        yield worker.address
    finally:
        worker.close()


@contextmanager
def live_coordinator() -> Iterator[tuple[Coordinator, Address]]:
    local = FakeRunner(LayerRange(0, 1), n_ctx=N_CTX, identity=MODEL)
    coordinator = Coordinator(MODEL, N_CTX, CoordinatorConfig(), SOCKETS, local=local)
    port = coordinator_port(Listener(Address("127.0.0.1", 0), SOCKETS), coordinator)
    port.start()
    try:
        yield coordinator, port.address
    finally:
        port.close()
        coordinator.close()


def read_frame(sock: socket.socket):
    """The next frame, or None at the end of the stream."""
    reader = FrameReader(coordinator_limits(MODEL.n_vocab, MODEL.hidden_width, N_CTX))
    while True:
        try:
            n = sock.recv_into(reader.writable())
        except ConnectionResetError:
            return None
        if n == 0:
            assert not reader.mid_frame
            return None
        frame = reader.filled(n)
        if frame is not None:
            return frame


def survives(sock: socket.socket) -> bool:
    """Whether a worker still answers: a short WORK gets an error for request 0."""
    try:
        sock.sendall(b"".join(encode_frame(FrameType.WORK, b"short")))
    except OSError:
        return False
    frame = read_frame(sock)
    return frame is not None and decode(frame).request_id == 0


@pytest.mark.parametrize("case", WORKER_CASES, ids=lambda case: case["name"])
def test_a_live_worker_answers_like_the_recorded_one(case, monkeypatch) -> None:
    with live_worker(case, monkeypatch) as address, connect(address, SOCKETS) as sock:
        sock.settimeout(20)
        sock.sendall(request_of(case))
        for recorded in case["reply_frames"]:
            frame = read_frame(sock)
            assert frame is not None
            assert FrameType(frame.type).name == recorded["name"]
            message = decode(frame)
            if isinstance(message, ErrorText):
                assert message.text == recorded["message"]
                continue
            assert isinstance(message, Result)
            assert message.request_id == int(recorded["request"], 16)
            assert message.status == recorded["status"]
            assert message.result_hash == int(recorded["result_hash"], 16)
            assert message.result_kind == recorded["result_kind"]
            assert message.payload_bits == recorded["payload_bits"]
            assert len(message.telemetry) == recorded["telemetry_count"]
            if message.status == 0:
                assert message.payload.nbytes == recorded["payload_bytes"]
        assert survives(sock) == (not case["closed_by_peer"])


@pytest.mark.parametrize("case", COORDINATOR_CASES, ids=lambda case: case["name"])
def test_a_live_coordinator_answers_like_the_recorded_one(case) -> None:
    with live_coordinator() as (coordinator, address), connect(address, SOCKETS) as sock:
        sock.settimeout(20)
        sock.sendall(request_of(case))
        for recorded in case["reply_frames"]:
            frame = read_frame(sock)
            assert frame is not None
            assert frame.type == FrameType.ERROR
            # the same words, and perhaps what to do about it
            assert decode(frame).text.startswith(recorded["message"])
        if case["closed_by_peer"]:
            assert read_to_end(sock) == b""
            assert not registered(coordinator)
        else:
            wait_until(lambda: len(registered(coordinator)) == 1, "it is registered")
            sock.settimeout(0.05)
            with pytest.raises(TimeoutError):
                sock.recv(1)


def test_every_recorded_request_but_the_snapshots_is_replayed() -> None:
    snapshots = [case for case in CASES if case["name"].startswith("snapshot")]
    assert len(snapshots) + len(WORKER_CASES) + len(COORDINATOR_CASES) == len(CASES) == 73
