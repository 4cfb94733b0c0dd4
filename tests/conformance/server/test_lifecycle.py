"""C63 to C65: several requests at once, what a waiting client hears, clients that go."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from ds4py.config import ServerConfig
from ds4py.server.http.server import HttpServer
from tests.conformance.server.peer import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    POSTS,
    RESPONSES,
    asking,
    connect,
    exchange,
    get,
    model,
    parse,
    post,
    posting,
    read_all,
    read_until,
    request,
    reset,
    served,
    until,
)
from tests.support.fakes import FakeBackend, Gate
from tests.unit.server.support import DEADLINE

LONG = "word " * 60
CHUNK = 8


def gated(says: str = LONG) -> tuple[FakeBackend, Gate]:
    gate = Gate()
    return model(says, gate=gate, chunk=CHUNK), gate


def load(port: int) -> tuple[int, int]:
    requests = get(port, "/health").json["requests"]
    return requests["running"], requests["waiting"]


# --- several at once ------------------------------------------------------------------------------


def test_c63_others_are_answered_while_one_decodes() -> None:
    fake, gate = gated()
    with served(fake) as (_, port), connect(port) as running:
        running.sendall(posting(CHAT, asking(CHAT, stream=True)))
        gate.let(20)
        read_until(running, b"reasoning_content")
        # the model stands still: whatever is answered now does not wait for it
        assert get(port, "/v1/models").status == 200
        assert exchange(port, request("OPTIONS", CHAT)).status == 204
        assert post(port, CHAT, {}).status == 400
        assert get(port, "/nope").status == 404
        assert post(port, f"{MESSAGES}/count_tokens", asking(MESSAGES)).status == 200
        assert load(port) == (1, 0)
        gate.open()
        assert b"[DONE]" in read_all(running)


def test_c63_requests_are_served_in_the_order_of_arrival() -> None:
    fake, gate = gated("Hi")
    names = [300, 301, 302, 303]  # tokens that nothing else says
    with served(fake) as (_, port):
        socks = []
        for n, name in enumerate(names):
            socks.append(connect(port))
            socks[-1].sendall(posting(COMPLETIONS, {"prompt": [name, 7]}))
            until(lambda n=n: load(port) == (1, n))  # type: ignore[misc]
        gate.open()
        answers = [parse(read_all(sock)).json for sock in socks]
        for sock in socks:
            sock.close()
    assert [answer["choices"][0]["text"] for answer in answers] == ["Hi"] * len(names)
    assert [token for token in fake.sessions[0].evaluated if token in names] == names


# --- keepalive ------------------------------------------------------------------------------------


def sign(path: str) -> bytes:
    """What a waiting client hears again and again."""
    return b"event: ping" if path == MESSAGES else b"\r\n: "


def test_c64_the_longest_silence() -> None:
    assert ServerConfig().keepalive_seconds == 5


@pytest.mark.parametrize("path", POSTS)
def test_c64_signs_of_life_in_every_phase(path: str) -> None:
    """A stream that stands still says so, while queued, in prefill and between tokens.

    Differs from ds4: it says something between chunks of the prompt only; clients of Anthropic hear
    `ping` events, and those of Responses `response.in_progress`, since comments do not calm their
    watchdogs.
    """
    fake, gate = gated()
    sent = posting(path, asking(path, stream=True))
    with (
        served(fake, keepalive_seconds=0.01) as (_, port),
        connect(port) as running,
        connect(port) as queued,
    ):
        running.sendall(sent)
        gate.wait_reached(1)
        queued.sendall(sent)
        received = read_until(running, sign(path), times=4)  # in prefill
        waited = read_until(queued, sign(path), times=4)  # in the queue
        gate.let(12)
        gate.wait_reached(13)
        received += read_until(running, sign(path), times=4)  # between two tokens
        gate.open()
        answers = [parse(received + read_all(running)), parse(waited + read_all(queued))]
    for answer in answers:
        names = {event.name for event in answer.events}
        assert ("ping" in names) == (path == MESSAGES)
        assert any(event.comment for event in answer.events) == (path != MESSAGES)
        told = [event for event in answer.events if event.comment is None and event.name != "ping"]
        kinds = [event.data.get("type") for event in told if event.data != "[DONE]"]
        if path == RESPONSES:
            assert kinds[0] == "response.created"
            assert kinds.count("response.created") == 1
            assert "response.in_progress" in kinds
        said = [kind for kind in kinds if kind != "response.in_progress"]
        assert len(said) > 1  # and the reply is whole
        assert told[-1].name != "error"


def test_c64_a_client_that_does_not_stream_hears_nothing_before_its_reply() -> None:
    fake, gate = gated("Hi")
    with served(fake, keepalive_seconds=0.001) as (_, port), connect(port) as sock:
        sock.sendall(posting(CHAT, asking(CHAT)))
        gate.wait_reached(1)
        gate.open()
        assert parse(read_all(sock)).json["object"] == "chat.completion"


@pytest.mark.parametrize("path", POSTS)
def test_c64_refusals_come_before_the_stream(path: str) -> None:
    fake, gate = gated("Hi")
    with served(fake, keepalive_seconds=0.001) as (_, port), connect(port) as running:
        running.sendall(posting(path, asking(path, stream=True)))
        gate.wait_reached(1)
        answer = post(port, path, asking(path, "word " * 9000, stream=True))
        assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
        gate.open()
        read_all(running)


# --- clients that go ------------------------------------------------------------------------------

Leave = Callable[[socket.socket], None]
LEAVES: list[Leave] = [socket.socket.close, reset]


def until_told(http: HttpServer, n_connections: int = 0) -> None:
    """Wait until the server has seen its clients go and its loop has told the jobs."""
    until(lambda: http.connections == n_connections)
    loop: Any = http._loop
    for _ in range(10):
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(DEADLINE)


def says_the_same(fake: FakeBackend, port: int, path: str) -> None:
    """The next request must get what a fresh server says."""
    answer = post(port, path, asking(path)).json
    with served(model(LONG, chunk=CHUNK)) as (_, fresh):
        other = post(fresh, path, asking(path)).json
    for name in ("choices", "content"):
        assert _unsigned(answer.get(name)) == _unsigned(other.get(name))
    assert fake.n_free == 1


def _unsigned(found: Any) -> Any:
    return [{k: v for k, v in one.items() if k != "signature"} for one in found or ()]


@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_c65_a_client_that_goes_frees_the_model(
    path: str, stream: bool, leave: Leave, phase: str
) -> None:
    """Anyone who goes costs at most the chunk or the token that had begun.

    Differs from ds4: it notices when a write fails, and not at all while it sends nothing.
    """
    fake, gate = gated()
    with served(fake) as (http, port):
        sock = connect(port)
        sock.sendall(posting(path, asking(path, stream=stream)))
        if phase == "decode":
            gate.let(20)
            gate.wait_reached(21)
        else:
            gate.wait_reached(1)
        begun = fake.sessions[0].n_evaluations
        leave(sock)
        until_told(http)
        gate.open()
        until(lambda: load(port) == (0, 0))
        assert fake.sessions[0].n_evaluations == begun
        if path != RESPONSES:
            says_the_same(fake, port, path)


@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("path", POSTS)
def test_c65_a_client_that_goes_leaves_the_queue(path: str, leave: Leave) -> None:
    fake, gate = gated("Hi")
    with served(fake) as (http, port), connect(port) as running:
        running.sendall(posting(path, asking(path)))
        gate.wait_reached(1)
        queued = connect(port)
        queued.sendall(posting(path, asking(path)))
        until(lambda: load(port) == (1, 1))
        leave(queued)
        until_told(http, 1)
        assert load(port) == (1, 0)
        gate.open()
        assert parse(read_all(running)).status == 200
        n_tokens = len(fake.sessions[0].tokens)
    assert len(fake.sessions[0].evaluated) == n_tokens  # one request's work


def test_c65_a_client_that_goes_in_its_body() -> None:
    with served(model("Hi")) as (_, port):
        for n_sent in (30, -5):
            with connect(port) as sock:
                sock.sendall(posting(CHAT, asking(CHAT))[:n_sent])
        assert post(port, CHAT, asking(CHAT)).status == 200
