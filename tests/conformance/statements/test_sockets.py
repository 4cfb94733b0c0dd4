"""Statements 95 to 100: options, retries, environment, and how frames are put on the wire."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import psutil
import pytest

from ds4py.activations import HiddenBatch
from ds4py.config import (
    Address,
    Environment,
    PrefillTuning,
    SocketConfig,
    read_environment,
)
from ds4py.contracts import ForwardOutput, ForwardRequest, SessionId
from ds4py.errors import ConfigError, ConnectError
from ds4py.transport import sockets
from ds4py.transport.sockets import connect
from ds4py.worker import registration
from tests.by_hand import PROMPT
from tests.clusters import cluster, span, start_worker, wait_until
from tests.conformance.statements.coordinators import coordinator_of
from tests.conformance.statements.peer import (
    ACK,
    ACK_ONLY,
    HASTY,
    HELLO,
    N_CTX,
    RESULT,
    WORK,
    Hop,
    Peer,
    dial,
    door,
    driven,
    driving,
    enlisted,
    result,
    work,
    worker,
    workers,
)
from tests.fake_runner import FakeRunner, card
from tests.sockets import Background

TRACED = SocketConfig(buffer_mb=0, send_timeout=10, connect_trace=True)

# --- 95: options ----------------------------------------------------------------------------------


def options_of_all_sockets() -> dict[int, tuple[int, int]]:
    """Return TCP_NODELAY and SO_KEEPALIVE of every open TCP socket of this process, by inode."""
    options = {}
    for connection in psutil.Process().net_connections("tcp"):
        with (
            contextlib.suppress(OSError),  # closed meanwhile
            socket.socket(fileno=os.dup(connection.fd)) as sock,
        ):
            nodelay = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            keepalive = sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            options[os.fstat(sock.fileno()).st_ino] = (nodelay, keepalive)
    return options


@pytest.mark.parametrize("dials_in", [False, True])
def test_statement_095_options(dials_in: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection has TCP_NODELAY and SO_KEEPALIVE: control, data, forwarding, snapshots."""
    strangers = options_of_all_sockets().keys()
    seen: dict[str, list[tuple[int, int]]] = {}
    save_cache = FakeRunner.save_cache

    def look(moment: str) -> None:
        found = options_of_all_sockets()
        seen[moment] = [found[inode] for inode in found.keys() - strangers]

    def watched(runner: FakeRunner, session: SessionId) -> list[memoryview]:
        look("saving")
        return save_cache(runner, session)

    monkeypatch.setattr(FakeRunner, "save_cache", watched)
    with cluster(["0-2", "3-5"], dial_in=dials_in, before=lambda _: look("evaluating")) as c:
        c.wait_ready()
        with c.backend.lease(PROMPT) as session:
            session.sync(PROMPT)
            session.save()
    # three listeners, and both ends of: two control connections, one between the workers, one to
    # save; what the last worker has seen is kept
    assert len(seen["evaluating"]) >= 3 + 6
    assert len(seen["saving"]) >= 3 + 8
    assert all(all(options) for moment in seen.values() for options in moment)


# --- 96 and 97: trying again ----------------------------------------------------------------------


def unused_address() -> Address:
    """An address where connections are refused."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Address(*server.getsockname())


@contextmanager
def listening_later(address: Address, seconds: float) -> Iterator[list[float]]:
    """Listen there after a while; holds the time of that, once it has come."""
    opened: list[float] = []
    servers: list[socket.socket] = []

    def listen() -> None:
        servers.append(socket.create_server((address.host, address.port)))
        opened.append(time.monotonic())

    timer = threading.Timer(seconds, listen)
    timer.start()
    try:
        yield opened
    finally:
        timer.join()
        servers[0].close()


def attempts(caplog: pytest.LogCaptureFixture) -> list[float]:
    """Return when the attempts failed that a traced connect has logged."""
    return [r.created for r in caplog.records if "attempt" in r.getMessage()]


def test_statement_096_a_listener_that_comes_up(caplog: pytest.LogCaptureFixture) -> None:
    """A connection that is refused is tried again every 25 ms, until somebody listens."""
    address = unused_address()
    with caplog.at_level(logging.INFO), listening_later(address, 0.25) as opened:
        with connect(address, TRACED):
            late = time.monotonic() - opened[0]
        failed = attempts(caplog)
    pauses = np.diff(failed)
    assert 3 <= len(failed) <= 11
    assert pauses.min() >= 0.025
    assert statistics.median(pauses) < 0.06
    assert late < 1


def test_statement_096_a_coordinator_that_comes_up() -> None:
    """A worker that was started before its coordinator is there a moment after it."""
    address = unused_address()
    with worker(coordinator=address, plain=True), cluster([]):
        time.sleep(0.1)
        with socket.create_server((address.host, address.port)) as server:
            opened = time.monotonic()
            server.settimeout(20)
            peer = Peer(server.accept()[0])
            assert time.monotonic() - opened < 0.9  # given up, it would pause for a second
            peer.expect(HELLO)
            peer.sock.close()


def test_statement_096_200_times(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is always refused is tried 200 times."""
    pauses: list[float] = []
    address = unused_address()
    with monkeypatch.context() as patched, caplog.at_level(logging.INFO):
        patched.setattr(sockets.time, "sleep", pauses.append)
        with pytest.raises(ConnectError, match="refused"):
            connect(address, TRACED)
    assert (len(attempts(caplog)), pauses) == (200, [0.025] * 199)
    assert registration.RETRY_ROUNDS == sockets.RETRY_ROUNDS == 200


def test_statement_096_other_errors(caplog: pytest.LogCaptureFixture) -> None:
    """A connect that fails for another reason is not tried again."""
    config = replace(TRACED, bind_interface="nosuchif0")
    with caplog.at_level(logging.INFO), pytest.raises(ConnectError):
        connect(unused_address(), config)
    assert len(attempts(caplog)) == 1


def test_statement_096_a_data_port() -> None:
    """A coordinator that saves tries the data port of a hop again, too.

    Differs from C: 8 times, not 200, since that hop is connected at this moment.
    """
    port = unused_address().port
    with driven(introduction={"listen_port": port}) as (_, peer, session):
        running = Background(lambda: session.sync(PROMPT))
        peer.send(RESULT, result(peer.asked()))
        running.result()
        start = time.monotonic()
        with pytest.raises(ConnectError, match="refused"):
            session.save()
        assert 7 * 0.025 <= time.monotonic() - start < 2


def test_statement_097_the_pause() -> None:
    """A worker whose coordinator closes introduces itself again after one second."""
    with door() as coordinator, worker(coordinator=coordinator.address, plain=True):
        first = coordinator.accept()
        introduction = first.expect(HELLO)
        closed = time.monotonic()
        first.sock.close()
        again = coordinator.accept()
        assert 0.99 < time.monotonic() - closed < 3
        assert again.expect(HELLO) == introduction


# --- 98: the environment --------------------------------------------------------------------------

Reader = Callable[[Environment], object]
# table docs/spec/wire-protocol.md#environment: name -> (lowest, highest, default, reader)
RANGED: dict[str, tuple[int, int, object, Reader]] = {
    "DS4_DIST_SOCKET_BUFFER_MB": (0, 512, 128, lambda e: e.socket.buffer_mb),
    "DS4_DIST_SOCKET_TIMEOUT_SEC": (1, 3600, 60, lambda e: e.socket.send_timeout),
    "DS4_DIST_SOCKET_RECV_TIMEOUT_SEC": (1, 3600, None, lambda e: e.socket.recv_timeout),
    "DS4_DIST_WORKER_PREFETCH_DEPTH": (1, 8, 2, lambda e: e.worker.prefetch_depth),
    "DS4_DIST_WORKER_FORWARD_WINDOW": (1, 64, 4, lambda e: e.worker.forward_window),
    "DS4_DIST_PREFILL_SEND_DEPTH": (1, 8, 2, lambda e: e.prefill.send_depth),
    "DS4_METAL_GRAPH_RAW_CAP": (1, 2**32 - 1, None, lambda e: e.raw_cap),
}
FATAL: dict[str, tuple[int, int, object, Reader]] = {
    "DS4_DIST_PREFILL_CHUNK": (1, 2**32 - 1, None, lambda e: e.prefill.chunk),
    "DS4_DIST_PREFILL_WINDOW": (1, 64, None, lambda e: e.prefill.window),
}


def invalid(low: int, high: int) -> list[str]:
    """Texts that are no strict integer of a range."""
    return ["x", "4 ", "4x", "0x4", "1.5", "1e1", "--4", "٤", str(low - 1), str(high + 1), "9" * 50]


@pytest.mark.parametrize("name", RANGED)
def test_statement_098_invalid_values(name: str) -> None:
    """A value that is no integer of the range means the default; blanks before it are no fault."""
    low, high, default, read = RANGED[name]
    for text in ["", *invalid(low, high)]:
        assert read(read_environment({name: text})) == default, text
    for text, value in ((str(low), low or 0), (str(high), high), (" \t+4", 4)):
        assert read(read_environment({name: text})) == value, text
    assert read(read_environment({})) == default


@pytest.mark.parametrize("name", FATAL)
def test_statement_098_invalid_values_of_the_prefill(name: str) -> None:
    """An invalid chunk or window is kept as an error; an empty value is none."""
    low, high, default, read = FATAL[name]
    for text in invalid(low, high):
        assert isinstance(read(read_environment({name: text})), ConfigError), text
    assert read(read_environment({name: ""})) == default
    assert read(read_environment({name: " +4"})) == 4


@pytest.mark.parametrize(
    ("text", "cap"),
    [
        ("100", 100),
        ("100 tokens", 100),
        (" 7", 7),
        ("x", None),
        ("", None),
        ("0", None),
        ("-5", None),
    ],
)
def test_statement_098_the_prefill_cap(text: str, cap: int | None) -> None:
    """DS4_METAL_PREFILL_CHUNK tolerates what follows a number; no number means the context."""
    assert read_environment({"DS4_METAL_PREFILL_CHUNK": text}).prefill.prefill_cap == cap
    assert read_environment({}).prefill.prefill_cap == 4096


def environment_prefill(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> dict:
    """Read a variable of this process; return fields of `PrefillTuning`."""
    monkeypatch.setenv(name, text)
    tuning = read_environment().prefill
    return {field: getattr(tuning, field) for field in PrefillTuning.__slots__}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in FATAL for text in ("x", "0")])
def test_statement_098_the_prefill_fails(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An invalid chunk or window fails the prefill before anything is sent.

    Differs from C: the fault is taken for what it is, and the workers stay
    (docs/spec/wire-protocol.md#quirks Q38).
    """
    tuning = environment_prefill(monkeypatch, name, text)
    tuning["chunk"] = tuning["chunk"] or 2
    with driven(**tuning) as (c, peer, session):
        with pytest.raises(ConfigError, match=name):
            session.sync(PROMPT)
        assert peer.hears_nothing(0.02)
        assert len(workers(c)) == 1


def test_statement_098_an_invalid_window_matters_to_pipelines_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An invalid window is no fault of a prompt of one chunk, which needs no window."""
    with driven(**environment_prefill(monkeypatch, "DS4_DIST_PREFILL_WINDOW", "x")) as scene:
        running = Background(lambda: scene.session.sync(PROMPT))
        scene.peer.send(RESULT, result(scene.peer.asked()))
        running.result()


@pytest.mark.parametrize(("chunk", "cap", "fails"), [(32, 16, True), (N_CTX + 1, 4096, False)])
def test_statement_098_a_chunk_above_the_cap(chunk: int, cap: int, fails: bool) -> None:
    """A chunk that is larger than the prefill cap fails the prefill.

    Differs from C: one that is larger than the context as well is cut to the cap, since no prompt
    could ever need it.
    """
    with driven(chunk=chunk, prefill_cap=cap) as (_, peer, session):
        running = Background(lambda: session.sync(PROMPT))
        if fails:
            with pytest.raises(ConfigError, match=f"{chunk}"):
                running.result()
        else:
            peer.send(RESULT, result(peer.asked()))
            running.result()


# --- 99 and 100: how frames are written -----------------------------------------------------------

MIB = 1 << 20
WIDE = 2 * MIB
"""Values of a row: 8 MiB, more than all buffers between two ends hold."""
WIDE_MODEL = replace(card(), hidden_width=WIDE, cache_form=None)


class Blank(FakeRunner):
    """A slice of a wide model that computes nothing: its rows are zero."""

    def __init__(self, layers: str):
        super().__init__(span(layers), identity=WIDE_MODEL)
        self._n_tokens = 0

    def _run(self, work: ForwardRequest) -> ForwardOutput:
        self._n_tokens = work.pos0 + len(work.tokens)
        rows = memoryview(bytes(4 * WIDE * len(work.tokens)))
        return ForwardOutput(hidden=HiddenBatch(len(work.tokens), WIDE, 32, rows))

    def length(self, session: SessionId) -> int:
        return self._n_tokens


def narrow(peer: Peer) -> None:
    """Let little be on its way to a peer."""
    peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)


def test_statement_099_a_coordinator_reads_while_it_writes() -> None:
    """A RESULT counts while the WORK behind it is being written to a worker that does not read."""
    config = replace(HASTY, prefill=PrefillTuning(chunk=1))
    done: list[int] = []
    with (
        coordinator_of(WIDE_MODEL, config, Blank("0-2")) as c,
        enlisted(c, layer_start=3) as peer,
        c.backend.lease(PROMPT) as session,
    ):
        narrow(peer)
        running = Background(
            lambda: session.sync(PROMPT[:3], progress=lambda now, _: done.append(now))
        )
        asked = peer.asked()
        assert asked.flags & ACK_ONLY
        peer.send(RESULT, result(asked, ACK, b"", 0))
        wait_until(lambda: done == [1], "the answer counts")
        peer.send(RESULT, result(peer.asked(), ACK, b"", 0))
        peer.send(RESULT, result(peer.asked()))
        running.result()


def test_statement_099_a_worker_reads_while_it_writes() -> None:
    """A RESULT is relayed while the WORK behind it is being written to a hop that does not read."""
    started = start_worker(Blank("1-2"))
    rows = bytes(4 * WIDE)
    try:
        with door() as behind, dial(started.address) as peer:
            hops = [Hop(1, 2), Hop(3, 5, 1, port=behind.address.port)]
            for n, request_id in enumerate((41, 42)):
                body = work(hops, [7], [7] * n, hidden=rows, request_id=request_id)
                peer.send(WORK, body)
            hop = behind.accept()
            narrow(hop)
            hop.send(RESULT, result(hop.asked()))
            assert peer.answer().request_id == 41
            hop.send(RESULT, result(hop.asked()))
            assert peer.answer().request_id == 42
    finally:
        started.close()


@contextmanager
def writes_counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[str, int], list[str]]]:
    """Take note of every write of this process by the address that it goes to."""
    counted: dict[tuple[str, int], list[str]] = {}

    def watch(name: str) -> Callable:
        write = getattr(socket.socket, name)

        def watched(sock: socket.socket, *args: object) -> object:
            counted.setdefault(sock.getpeername(), []).append(name)
            return write(sock, *args)

        return watched

    with monkeypatch.context() as patched:
        for name in ("send", "sendall", "sendmsg"):
            patched.setattr(socket.socket, name, watch(name))
        yield counted


TOKENS = [3 + n for n in range(60)]


def test_statement_100_a_coordinator_writes_a_frame_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A WORK of 60 tokens leaves in one write, or in two if the socket takes no more.

    Differs from C, as recommended: C writes each part, and each token, on its own
    (docs/spec/wire-protocol.md#quirks Q15).
    """
    with driven(local="0-1", introduction={"layer_start": 2}) as (_, peer, session):
        with writes_counted(monkeypatch) as counted:
            running = Background(lambda: session.sync(TOKENS))
            asked = peer.asked()
            assert asked.n_tokens == len(TOKENS)
            peer.send(RESULT, result(asked))
            running.result()
        assert 1 <= len(counted[peer.sock.getsockname()]) <= 2


def test_statement_100_a_worker_forwards_a_frame_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A WORK that is forwarded leaves in few writes as well."""
    with door() as behind, driving("0-2") as peer:
        body = work([Hop(0, 2), Hop(3, 5, 1, port=behind.address.port)], TOKENS)
        with writes_counted(monkeypatch) as counted:
            peer.send(WORK, body)
            hop = behind.accept()
            asked = hop.asked()
            assert asked.n_tokens == len(TOKENS)
            hop.send(RESULT, result(asked))
            peer.answer()
        assert 1 <= len(counted[hop.sock.getsockname()]) <= 2
