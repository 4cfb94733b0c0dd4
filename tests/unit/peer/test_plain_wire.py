"""With a peer of the stock protocol, nothing of ours is on the wire: against recorded C programs.

One side is played by hand from a recording, byte for byte; what our side says is compared with what
the C program said there. Only what is free to differ does: session ids, data ports, hidden states,
logits, times.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest

from ds4py.activations import HiddenBatch
from ds4py.config import Address, CoordinatorConfig, PrefillTuning, RouteEntry, WorkerConfig
from ds4py.contracts import ForwardOutput, ModelCard, SessionId
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.relay.workers.listener import coordinator_port
from ds4py.coordinator.session_pool import SessionPool
from ds4py.errors import Ds4Error
from ds4py.layer_range import LayerRange, LayerSpec
from ds4py.transport.connection import Connection
from ds4py.transport.connector import Connector
from ds4py.transport.sockets import Listener, connect
from ds4py.wire.frames import (
    EXT_HELLO,
    FrameType,
    coordinator_limits,
    encode_frame,
    hello_limits,
    plain_limits,
    worker_limits,
)
from ds4py.wire.messages import ErrorText, Hello, Work, decode, encode
from ds4py.worker.worker import Worker
from tests import golden
from tests.clusters import SOCKETS, registered, wait_until
from tests.fake_runner import FakeRunner
from tests.sockets import Background, frames_over
from tests.strategies import read_frames

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
LIMITS = worker_limits(N_CTX, 1024) | coordinator_limits(768, 1024, N_CTX) | hello_limits()
BEAT = 0.2
"""Seconds of silence that ds4py peers would not tolerate here: three times they must be quiet."""

LOOPBACK = Address("127.0.0.1", 0)


def recorded(scenario: str, direction: str):
    """Frames of one direction of the first worker's control connection."""
    return read_frames(golden.load_bytes(f"wire/{scenario}.ctlA-0.{direction}.bin"), LIMITS)


def told(scenario: str) -> dict:
    return golden.load_json(f"wire/{scenario}.json")


def next_frame(connection: Connection):
    return Background(connection.receive).result()


def assert_quiet(connection: Connection) -> None:
    with pytest.raises(Ds4Error, match="sent nothing"):
        connection.receive(timeout=3 * BEAT)


# --- our worker, and a coordinator by hand ------------------------------------------------------


class PlainCoordinator:
    """Closes without a word on a first frame that is no HELLO, as the C one does."""

    def __init__(self) -> None:
        self.listener = Listener(LOOPBACK, SOCKETS)
        self.first_types: list[int] = []

    def accept(self) -> Connection:
        """The next connection that stays, its HELLO unread in `hello`."""
        while True:
            sock = Background(self.listener.accept).result()
            assert sock is not None
            connection = frames_over(sock, LIMITS)
            frame = next_frame(connection)
            assert frame is not None
            self.first_types.append(frame.type)
            if frame.type == FrameType.HELLO:
                self.hello = frame
                return connection
            connection.close()


@contextmanager
def enlisting(layers: LayerRange, *, plain: bool) -> Iterator[tuple[PlainCoordinator, Worker]]:
    coordinator = PlainCoordinator()
    config = WorkerConfig(
        layers=LayerSpec(layers.start, layers.end),
        listen=LOOPBACK,
        coordinator=coordinator.listener.address,
        alive_timeout=BEAT,
        plain=plain,
    )
    worker = Worker(FakeRunner(layers, n_ctx=N_CTX, identity=MODEL), config, SOCKETS)
    worker.start()
    try:
        yield coordinator, worker
    finally:
        coordinator.listener.close()
        worker.close()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("scenario", "layers"),
    [
        ("register", LayerRange(2, 3)),
        ("decode_1hop", LayerRange(2, 5, has_output=True)),
        ("hidden_return_16", LayerRange(2, 5, has_output=False)),
    ],
)
def test_our_worker_says_what_the_recorded_one_said(scenario, layers, plain) -> None:
    theirs = recorded(scenario, "c2s")
    hello = decode(theirs[0])
    layers = LayerRange(hello.layer_start, hello.layer_end, bool(hello.has_output))
    with enlisting(layers, plain=plain) as (coordinator, worker):
        connection = coordinator.accept()
        assert coordinator.first_types == ([FrameType.HELLO] if plain else [EXT_HELLO, 1])
        ours = decode(coordinator.hello)
        assert isinstance(ours, Hello)
        assert replace(ours, listen_port=hello.listen_port) == hello
        assert ours.listen_port == worker.address.port
        for work, answer in zip(recorded(scenario, "s2c"), theirs[1:], strict=True):
            connection.send(encode_frame(work.type, bytes(work.body)))
            got = next_frame(connection)
            assert got is not None
            assert (got.type, len(got.body)) == (answer.type, len(answer.body))
            same = ("request_id", "result_hash", "status", "result_kind", "payload_bits")
            result, expected = decode(got), decode(answer)
            assert [getattr(result, f) for f in same] == [getattr(expected, f) for f in same]
            assert len(result.telemetry) == len(expected.telemetry)
        assert_quiet(connection)
        connection.close()


def test_a_coordinator_that_was_found_to_be_plain_is_not_asked_again_soon() -> None:
    with enlisting(LayerRange(2, 3), plain=False) as (coordinator, _):
        for _ in range(2):
            coordinator.accept().close()
        assert coordinator.first_types == [EXT_HELLO, FrameType.HELLO, FrameType.HELLO]


# --- our coordinator, and workers by hand -------------------------------------------------------


class FirstLayers(FakeRunner):
    """Our own layers, in the width of the recordings; what they compute is of no interest."""

    def __init__(self) -> None:
        super().__init__(LayerRange(0, 1), n_ctx=N_CTX, identity=MODEL)
        self._lengths: dict[SessionId, int] = {}

    def run(self, batch):
        for work in batch:
            self._lengths[work.session] = work.pos0 + len(work.tokens)
        rows = [np.zeros((len(work.tokens), 1024), np.float32) for work in batch]
        return [
            ForwardOutput(hidden=HiddenBatch.pack(x, work.reply_bits))
            for x, work in zip(rows, batch, strict=True)
        ]

    def length(self, session):
        return self._lengths.get(session)

    def rewind(self, session, n_tokens):
        self._lengths[session] = n_tokens


@contextmanager
def coordinating(scenario: str, *entries: RouteEntry, plain: bool = False) -> Iterator[tuple]:
    """Our coordinator as it was set up in a recording; yields it with its session and port."""
    setup = told(scenario)["setup"]
    config = CoordinatorConfig(
        activation_bits=setup["activation_bits"],
        prefill=PrefillTuning(chunk=setup["prefill_chunk"]),
        route=entries,
        alive_timeout=BEAT,
        plain=plain,
        rejoin_timeout=20,
        result_timeout=20,
    )
    coordinator = Coordinator(MODEL, N_CTX, config, SOCKETS, local=FirstLayers())
    port = coordinator_port(Listener(LOOPBACK, SOCKETS), coordinator)
    port.start()
    coordinator.start()
    try:
        yield coordinator, SessionPool(coordinator, 1), port.address
    finally:
        port.close()
        coordinator.close()


@contextmanager
def worker_by_hand(scenario: str, letter: str, address: Address) -> Iterator[Connection]:
    """Register as a recorded worker, from the address that it had."""
    host = {"A": "127.0.0.11", "B": "127.0.0.12"}[letter]
    sock = connect(address, replace(SOCKETS, bind_host=host))
    connection = frames_over(sock, LIMITS)
    hello = golden.load_bytes(f"wire/{scenario}.ctl{letter}-0.c2s.bin")
    (first, *_) = read_frames(hello, LIMITS)
    connection.send(encode_frame(first.type, bytes(first.body)))
    try:
        yield connection
    finally:
        connection.close()


def replay(connection: Connection, scenario: str) -> Background[list]:
    """Answer each WORK as the recorded worker did; returns every frame that came."""
    answers = [frame for frame in recorded(scenario, "c2s") if frame.type == FrameType.RESULT]

    def run() -> list:
        frames = []
        for answer in answers:
            frame = connection.receive()
            assert frame is not None
            frames.append(frame)
            connection.send(encode_frame(answer.type, bytes(answer.body)))
        return frames

    return Background(run)


def drive(session, results: dict) -> None:
    """Ask what was asked in the recording."""
    for name in ("prompt", "prompt_first", "prompt_second", "prompt_third"):
        if name in results:
            session.sync(results[name])
    for token in results.get("decode", []):
        session.eval(token)


def assert_like(scenario: str, frames: list, *, same_route: bool = True) -> None:
    """Compare with what the recorded coordinator sent."""
    theirs = recorded(scenario, "s2c")
    assert [frame.type for frame in frames] == [frame.type for frame in theirs]
    for frame, expected in zip(frames, theirs, strict=True):
        ours, other = decode(frame), decode(expected)
        assert isinstance(ours, Work)
        free = {"session_id": other.session_id, "input": other.input}
        if not same_route:
            free["route_blob"] = other.route_blob
        assert len(ours.input) == len(other.input)
        assert replace(ours, **free) == other


SCENARIOS = ["decode_1hop", "prefill_3hop_32", "prefill_3hop_16", "prefill_3hop_8", "resume"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_our_coordinator_says_what_the_recorded_one_said(scenario) -> None:
    """To workers that dial it; the second one hears nothing, as in the recording."""
    results = told(scenario)["results"]
    with coordinating(scenario) as (coordinator, backend, address), ExitStack() as stack:
        letters = "AB"[: len(told(scenario)["setup"]["worker_layers"])]
        peers = [stack.enter_context(worker_by_hand(scenario, x, address)) for x in letters]
        wait_until(lambda: coordinator.health().ready, "the workers are registered")
        answering = replay(peers[0], scenario)
        with backend.lease([]) as session:
            drive(session, results)
            frames = answering.result()
            assert_like(scenario, frames)
            assert len({decode(frame).session_id for frame in frames}) == 1
            session.close()
        for peer in peers:
            assert_quiet(peer)


@pytest.mark.parametrize("plain", [False, True])
def test_a_plain_worker_that_is_dialled_sees_the_same_after_one_closed_connection(plain) -> None:
    scenario = "decode_1hop"
    worker = Listener(LOOPBACK, SOCKETS)

    def accept() -> Connection:
        sock = Background(worker.accept).result()
        assert sock is not None
        return frames_over(sock, plain_limits(LIMITS))

    entry = RouteEntry(worker.address, LayerSpec.parse("2:output"))
    with coordinating(scenario, entry, plain=plain) as (coordinator, backend, _):
        connection = accept()
        if not plain:
            asked = next_frame(connection)
            assert asked is not None
            assert (asked.type, asked.discarded) == (EXT_HELLO, True)
            connection.send(encode(ErrorText.of("unsupported distributed worker frame")))
            connection.close()
            connection = accept()
        wait_until(lambda: coordinator.health().ready, "the worker is registered")
        answering = replay(connection, scenario)
        with backend.lease([]) as session:
            drive(session, told(scenario)["results"])
        assert_like(scenario, answering.result(), same_route=False)
        assert_quiet(connection)
        connection.close()
    worker.close()


def test_a_plain_coordinator_is_as_deaf_as_the_c_one() -> None:
    """It closes without a word, so that a ds4py worker falls back."""
    with coordinating("register", plain=True) as (coordinator, _, address):
        config = WorkerConfig(layers=LayerSpec(2, 5), listen=LOOPBACK, coordinator=address)
        layers = LayerRange(2, 5, has_output=True)
        worker = Worker(FakeRunner(layers, n_ctx=N_CTX, identity=MODEL), config, SOCKETS)
        worker.start()
        wait_until(lambda: coordinator.health().ready, "it is registered")
        (record,) = registered(coordinator)
        assert (record.features, record.alive_timeout) == (frozenset(), None)
        worker.close()


def test_a_plain_worker_is_as_deaf_as_the_c_one() -> None:
    config = WorkerConfig(layers=LayerSpec(2, 5), listen=LOOPBACK, plain=True)
    layers = LayerRange(2, 5, has_output=True)
    worker = Worker(FakeRunner(layers, n_ctx=N_CTX, identity=MODEL), config, SOCKETS)
    worker.start()
    for frame_type in itertools.chain(range(256, 262)):
        connection = Connector(SOCKETS).connect(worker.address, LIMITS)
        connection.send(encode_frame(frame_type, b"{}"))
        frame = next_frame(connection)
        assert frame is not None
        assert frame.type == FrameType.ERROR
        assert next_frame(connection) is None
        connection.close()
    worker.close()
