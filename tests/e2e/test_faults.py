"""Workers that die and peers that lie: one defined outcome each."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openai
import pytest

from ds4py.config import Address, SocketConfig
from ds4py.contracts import ForwardRequest
from ds4py.errors import Ds4Error, ModelError
from ds4py.layer_range import LayerSpec
from ds4py.transport.sockets import listen
from ds4py.wire.extensions import EXT_HELLO
from ds4py.wire.frames import FrameType
from ds4py.wire.messages import ErrorText, WorkHeader, encode
from ds4py.wire.route import HopEntry, decode_route
from tests.e2e.support import (
    LONG_IDS,
    Alone,
    LocalServer,
    client,
    complete,
    coordinator,
    endless_toy,
    evaluated,
    route,
    wait_idle,
    worker,
)
from tests.support.clusters import cluster, span, start_worker
from tests.support.fake_runner import FakeRunner, reference_logits
from tests.support.processes import Launcher, Server, WorkerProgram, free_port, running, wait_for

N_TOKENS = 12
PHASES = ["prefill", "decode"]


def prompt(number: int, n_tokens: int = 1500) -> list[int]:
    """A long prompt that shares no prefix with those of other numbers."""
    return [3 + (token + 7 * number) % 250 for token in LONG_IDS[:n_tokens]]


# --- workers that die ----------------------------------------------------------------------------


@dataclass
class Arena:
    """Two worker processes that may be killed, and a coordinator that waits for them."""

    launch: Launcher
    model: Path
    workers: list[WorkerProgram]
    server: Server

    def kill(self, index: int) -> None:
        self.workers[index].program.kill()

    def restart(self, index: int) -> None:
        """Start a killed worker again on its port."""
        self.workers[index] = start(self.launch, self.model, index, self.workers[index].port)


def start(launch: Launcher, model: Path, index: int, port: int = 0) -> WorkerProgram:
    return launch.worker(
        *("--dist-role", "worker", "--dist-listen", f"127.0.0.1:{port}", "-m", model),
        *("--dist-layers", ("0-2", "3-5")[index], "--precision", "f32", "--sessions", 16),
    )


@pytest.fixture(scope="module")
def arena(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with Launcher(tmp_path_factory.mktemp("faults")) as launch:
        workers = [start(launch, toy, index) for index in (0, 1)]
        server = launch.server(
            *("--dist-role", "coordinator", "--dist-listen", "127.0.0.1:0", "-m", toy),
            *("--dist-route", ",".join(w.address for w in workers), "--dist-prefill-chunk", 2),
            *("--precision", "f32", "--dist-rejoin-timeout", 80),
        )
        server.wait_ready()
        yield Arena(launch, toy, workers, server)


class Asked:
    """A streaming request on a thread of its own.

    Args:
        server: Whom to ask.
        ids: The prompt.
        n_tokens: Output budget.
    """

    def __init__(self, server: Server | LocalServer, ids: list[int], n_tokens: int):
        self.text = ""
        self.error: openai.OpenAIError | None = None
        self._server, self._ids, self._n_tokens = server, ids, n_tokens
        self._base = evaluated(server.health())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with client(self._server) as api:
                for chunk in api.completions.create(
                    model="toy",
                    prompt=self._ids,
                    max_tokens=self._n_tokens,
                    temperature=0,
                    stream=True,
                ):
                    self.text += chunk.choices[0].text
        except openai.OpenAIError as error:
            self.error = error

    def wait_under_way(self, phase: str) -> None:
        """Wait until the prompt, or the answer, has begun and is far from its end."""
        if phase == "decode":
            wait_for(lambda: len(self.text) > 20, "the answer has begun")
        else:
            begun = self._base + 40
            wait_for(lambda: evaluated(self._server.health()) > begun, "the prompt has begun")
        assert self._thread.is_alive()

    def wait_end(self) -> None:
        self._thread.join(90)
        assert not self._thread.is_alive(), "the request never ended"


def work_for(phase: str, number: int) -> tuple[list[int], int]:
    """A prompt and a budget of which one takes long."""
    return (prompt(number), N_TOKENS) if phase == "prefill" else (prompt(number, 9), 800)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_worker_that_comes_back_continues_the_request_exactly(
    arena: Arena, alone: Alone, phase: str, index: int
) -> None:
    ids, n_tokens = work_for(phase, 1 + index)
    asked = Asked(arena.server, ids, n_tokens)
    asked.wait_under_way(phase)
    arena.kill(index)
    arena.restart(index)
    asked.wait_end()
    assert asked.error is None, arena.server.program.log[-2000:]
    assert asked.text == alone.text(ids, n_tokens)
    assert complete(arena.server, prompt(3, 20), N_TOKENS) == alone.text(prompt(3, 20), N_TOKENS)


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_worker_that_stays_away_is_one_clear_error(
    arena: Arena, alone: Alone, phase: str
) -> None:
    ids, n_tokens = work_for(phase, 5)
    with coordinator(
        arena.model, chunk=2, route=route(*arena.workers), rejoin_timeout=0.5
    ) as impatient:
        impatient.wait_ready()
        asked = Asked(impatient, ids, n_tokens)
        asked.wait_under_way(phase)
        arena.kill(1)
        asked.wait_end()
        assert isinstance(asked.error, openai.APIError)
        assert "no worker serves layers 3-5 and the output head" in asked.error.message
        assert alone.text(ids, n_tokens).startswith(asked.text)
        health = wait_idle(impatient)
        assert health["missing"] == "layers 3-5 and the output head"
        arena.restart(1)
        impatient.wait_ready()
        assert complete(impatient, ids, N_TOKENS) == alone.text(ids, N_TOKENS)
    arena.server.wait_ready()


def test_a_refusal_is_not_final_while_news_of_a_loss_may_come() -> None:
    """A hop reports its dead next hop, and only then breaks our own connection to that one."""
    tokens = list(range(30))
    failures: list[int] = []

    def refuse_twice(work: ForwardRequest) -> None:
        if work.pos0 == 0 and work.hidden is None and len(failures) < 2:
            failures.append(work.pos0)
            if len(failures) == 2:
                threading.Timer(0.2, built.workers[1].close).start()
            raise ModelError("next hop", got="silence", expected="a result")

    with (
        cluster(["0-2", "3-5"], before=refuse_twice, chunk=30) as built,
        ThreadPoolExecutor(1) as one,
    ):
        built.wait_ready()
        port = built.workers[1].address
        with built.backend.lease(tokens) as session:
            answer = one.submit(session.sync, tokens)
            wait_for(lambda: not built.coordinator.health().ready, "the worker is gone")
            built.workers.append(start_worker(FakeRunner(span("3-5")), listen=port))
            np.testing.assert_array_equal(answer.result(60).logits, reference_logits(tokens))


def test_a_worker_that_dies_while_a_large_frame_is_under_way_is_replaced_exactly(
    tmp_path: Path,
) -> None:
    """The worker is held, so that most of seven megabytes cannot have arrived."""
    wide = endless_toy(tmp_path / "wide.gguf", n_layers=4, n_embd=512, n_ff=64)
    ids = prompt(0) + prompt(1) + prompt(2, 500)
    reference = Alone(wide)
    small = {"DS4_DIST_SOCKET_BUFFER_MB": "1"}
    tail = ("--dist-role", "worker", "-m", wide, "--dist-layers", "2-3", "--precision", "f32")
    with Launcher(tmp_path) as launch, ThreadPoolExecutor(1) as pool:
        held = launch.worker(*tail, "--dist-listen", "127.0.0.1:0", env=small)
        with coordinator(
            wide,
            chunk=len(ids),  # one frame for all of it
            layers=LayerSpec.parse("0-1"),
            route=route(held),
            sockets=SocketConfig(buffer_mb=1),
            rejoin_timeout=80,
        ) as server:
            server.wait_ready()
            held.program.pause()
            answer = pool.submit(complete, server, ids, N_TOKENS)
            wait_for(lambda: evaluated(server.health()) == len(ids), "our own layers are done")
            held.program.kill()
            launch.worker(*tail, "--dist-listen", held.address, env=small)
            assert answer.result(90) == reference.text(ids, N_TOKENS)
    reference.close()


def test_a_worker_whose_port_is_free_again_is_found(toy: Path, alone: Alone) -> None:
    """A worker in this process is closed and another one takes its port: the dialer goes on."""
    port = free_port()
    with coordinator(toy, route=route(f"127.0.0.1:{port}")) as server:
        for _ in range(2):
            with worker(toy, "0-5", listen=Address("127.0.0.1", port)):
                server.wait_ready()
                text = complete(server, prompt(0, 20), N_TOKENS)
                assert text == alone.text(prompt(0, 20), N_TOKENS)
            wait_for(lambda: server.health()["http_status"] == 503, "the loss is noticed")


# --- peers that lie ------------------------------------------------------------------------------


def frame(frame_type: int, size: int, body: bytes = b"") -> bytes:
    return b"DS4D" + struct.pack(">II", frame_type, size) + body


LIES = {
    "HTTP": b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64)),
    "garbage": bytes((7 * k * k + 13) % 256 for k in range(5000)),
    "a size that nobody accepts": frame(FrameType.WORK, 2**32 - 1, b"x" * 100),
    "a HELLO of four gigabytes": frame(FrameType.HELLO, 2**32 - 1, b"x" * 100),
    "half a frame": frame(FrameType.WORK, 1000, b"\0" * 500),
    "half a header": b"DS4D\0\0",
    "a foreign frame": frame(FrameType.RESULT, 40, b"\0" * 40),
    "an unreadable handshake": frame(EXT_HELLO, 10, b"[[[[[[[[[["),
    "nothing": b"",
}


@pytest.mark.parametrize("abrupt", [False, True], ids=["closed", "reset"])
def test_lies_on_every_port_disturb_nobody(arena: Arena, alone: Alone, abrupt: bool) -> None:
    arena.server.wait_ready()
    ids = prompt(7 + abrupt, 9)
    asked = Asked(arena.server, ids, 1200)
    asked.wait_under_way("decode")
    host, port = arena.server.address.split(":")
    for door in (arena.workers[0].port, arena.workers[1].port, int(port)):
        for lie in LIES.values():
            tell((host, door), lie, abrupt=abrupt)
    assert running(arena.server.health()) == 1
    asked.wait_end()
    assert (asked.error, asked.text) == (None, alone.text(ids, 1200))
    for worker_ in arena.workers:
        assert "Traceback" not in worker_.program.log
    assert "Traceback" not in arena.server.program.log


def tell(address: tuple[str, int], lie: bytes, *, abrupt: bool) -> None:
    """Say something and go, properly or by a reset."""
    with socket.create_connection(address, timeout=20) as sock, suppress(ConnectionError):
        if abrupt:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(lie)


@pytest.mark.parametrize("lie", ["HTTP", "TLS", "garbage", "a size that nobody accepts"])
def test_a_worker_hangs_up_on_lies_and_says_why(arena: Arena, lie: str) -> None:
    with socket.create_connection(("127.0.0.1", arena.workers[0].port), timeout=20) as sock:
        sock.sendall(LIES[lie])
        with suppress(ConnectionResetError):
            assert sock.recv(4096) == b""
    words = "at most" if "size" in lie else "expected b'DS4D'"
    arena.workers[0].program.wait_log(words)


@contextmanager
def fake_hop(answer: Callable[[socket.socket], None]) -> Iterator[tuple[int, list[bytes]]]:
    """A peer without extensions that takes one WORK and then does as it likes; its port, and the
    bodies of the WORKs that it got."""
    listener = listen(Address("127.0.0.1", 0))
    bodies: list[bytes] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock, suppress(ConnectionError, AssertionError):
                    sock.settimeout(30)
                    kind, body = read_frame(sock)
                    if kind == EXT_HELLO:
                        sock.sendall(b"".join(map(bytes, encode(ErrorText.of("what is that?")))))
                    else:
                        bodies.append(body)
                        answer(sock)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], bodies
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(30)
        assert not thread.is_alive()


def read_frame(sock: socket.socket) -> tuple[int, bytes]:
    kind, size = struct.unpack(">II", read_exactly(sock, 12)[4:])
    return kind, read_exactly(sock, size)


def read_exactly(sock: socket.socket, n_bytes: int) -> bytes:
    got = b""
    while len(got) < n_bytes:
        part = sock.recv(n_bytes - len(got))
        assert part, "the coordinator hung up"
        got += part
    return got


def half_a_result(sock: socket.socket) -> None:
    sock.sendall(frame(FrameType.RESULT, 1000, b"\0" * 300))


def test_a_worker_that_dies_in_the_middle_of_its_answer_is_one_clear_error(
    toy: Path, alone: Alone
) -> None:
    ids = prompt(0, 20)
    with ExitStack() as stack:
        with fake_hop(half_a_result) as (port, bodies):
            entry = f"127.0.0.1:{port}=0:output"
            server = stack.enter_context(coordinator(toy, route=route(entry), rejoin_timeout=0.1))
            server.wait_ready()
            with pytest.raises(openai.InternalServerError) as caught:
                complete(server, ids, N_TOKENS)
            assert len(bodies) in {1, 2}  # it may have come back in time to do it once more
        words = caught.value.message
        assert "layers 0-5 and the output head" in words or "middle of a frame" in words
        stack.enter_context(worker(toy, "0-5", listen=Address("127.0.0.1", port)))
        wait_for(lambda: server.health()["status"] == "ok", "a true worker took its place")
        assert complete(server, ids, N_TOKENS) == alone.text(ids, N_TOKENS)


def test_a_wildcard_address_is_never_advertised(toy: Path) -> None:
    """Both workers listen on every interface; the route that the first hop reads is recorded."""
    everywhere = Address("0.0.0.0", 0)
    with (
        fake_hop(half_a_result) as (port, bodies),
        worker(toy, "2-3", listen=everywhere) as dialled,
        coordinator(
            toy,
            route=route(f"127.0.0.1:{port}=0:1", f"localhost:{dialled.address.port}"),
            rejoin_timeout=0.1,
        ) as server,
        worker(toy, "4-5", listen=everywhere, coordinator=server.address) as dialling,
    ):
        server.wait_ready()
        node = server.node
        with node.backend.lease([5, 6]) as session, pytest.raises(Ds4Error):
            session.sync([5, 6])
        header = WorkHeader.decode(memoryview(bodies[0]))
        blob = memoryview(bodies[0])[-header.route_bytes :]
        assert decode_route(blob, header.route_count, 6) == (
            HopEntry("127.0.0.1", port, 0, 1, False),
            HopEntry("127.0.0.1", dialled.address.port, 2, 3, False),
            HopEntry("127.0.0.1", dialling.address.port, 4, 5, True),
        )
