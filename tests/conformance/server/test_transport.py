"""C01 to C10: addresses, connections, limits, CORS, paths."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from ds4py.cli.flags.shared import take
from ds4py.cli.server import HttpFlags
from ds4py.cli.server import server as command
from ds4py.config import Address, CoordinatorConfig, SamplingParams, ServerConfig
from ds4py.runtime import open_listeners
from ds4py.server.http import server as serve_module
from tests.conformance.server.peer import (
    CHAT,
    MESSAGES,
    POSTS,
    asking,
    connect,
    exchange,
    get,
    parse,
    post,
    posting,
    read_all,
    request,
    saying,
)
from tests.e2e.support import SOCKETS

MIB = 1 << 20
CORS = {
    "access-control-allow-origin": "*",
    "access-control-allow-methods": "GET, POST, OPTIONS",
    "access-control-allow-headers": "*",
}
REQUESTS = {
    "200": request("GET", "/v1/models"),
    "whole": posting(CHAT, asking(CHAT)),
    "400": posting(CHAT, {}),
    "404": request("GET", "/nope"),
    "sse": posting(CHAT, asking(CHAT, stream=True)),
    "sse of messages": posting(MESSAGES, asking(MESSAGES, stream=True)),
    "options": request("OPTIONS", "/v1/models"),
}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server for tests that leave it as it was."""
    with saying("Hi") as shared:
        yield shared


def test_c01_the_address_without_options() -> None:
    params = command.make_context("ds4py-server", ["-m", "x.gguf"]).params
    flags = HttpFlags(**take(params, HttpFlags))
    assert flags.config(False, SamplingParams()).address == Address("127.0.0.1", 8000)


def test_c01_no_other_address_is_served() -> None:
    front = ServerConfig(address=Address("127.0.0.1", 0))
    with open_listeners(CoordinatorConfig(), front, SOCKETS) as listeners:
        assert listeners.shared is None
        (address,) = listeners.http_addresses
        assert address.host == "127.0.0.1"
        connect(address.port).close()
        for host in ("127.0.0.2", "::1"):
            with pytest.raises(OSError, match=r"refused|not available|unreachable"):
                socket.create_connection((host, address.port), timeout=1)


@pytest.mark.parametrize("kind", REQUESTS)
def test_c02_one_request_per_connection(port: int, kind: str) -> None:
    """Every reply says `Connection: close`, and nothing follows it.

    Differs from ds4: a stream is chunked, so that its client can tell an end from a broken line.
    """
    answer = exchange(port, REQUESTS[kind] + REQUESTS["200"])  # the second is never answered
    assert answer.headers["connection"] == "close"
    assert b"HTTP/1.1" not in answer.body


def test_c03_the_largest_body(port: int) -> None:
    body = b'{"messages":[{"role":"user","content":"hi"}]}'.ljust(64 * MIB)
    assert post(port, CHAT, body).json["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_c03_one_byte_more(port: int, path: str) -> None:
    """One byte more than 64 MiB is refused.

    Differs from ds4: the status is 413, and the sentence says both numbers, where ds4 answers 400
    `bad HTTP request`.
    """
    body = b'{"messages":[{"role":"user","content":"hi"}]}'.ljust(64 * MIB + 1)
    answer = post(port, path, body)
    assert answer.status == 413
    assert (
        f"got {64 * MIB + 1} bytes, expected at most {64 * MIB}" in answer.json["error"]["message"]
    )


def test_c04_headers_above_64_kib() -> None:
    with saying("Hi") as port, connect(port) as sock:
        sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: toy\r\nX-Long: " + b"x" * (65 << 10))
        answer = parse(read_all(sock))
    assert (answer.status, answer.json["error"]["message"]) == (400, "bad HTTP request")


@pytest.mark.parametrize("sent", [b"", b"POST /v1/messages HTTP/1.1\r\nHo"])
def test_c05_a_client_that_says_nothing(
    port: int, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert serve_module.HEADER_SECONDS == 10
    monkeypatch.setattr(serve_module, "HEADER_SECONDS", 0.05)
    answer = exchange(port, sent)
    assert (answer.status, answer.json["error"]["message"]) == (400, "bad HTTP request")


@pytest.mark.parametrize("cors", [False, True])
@pytest.mark.parametrize("path", ["/anything", "/v1/chat/completions", "/v1/messages?x=1"])
def test_c06_options(path: str, cors: bool) -> None:
    with saying("Hi", cors=cors) as port:
        answer = exchange(port, request("OPTIONS", path))
    assert (answer.status, answer.body) == (204, b"")
    assert "content-type" not in answer.headers
    assert {name for name in answer.headers if name in CORS} == (CORS.keys() if cors else set())


@pytest.mark.parametrize("kind", REQUESTS)
def test_c07_cors_on_every_reply(kind: str) -> None:
    with saying("Hi", cors=True) as port:
        answer = exchange(port, REQUESTS[kind])
    assert {name: answer.headers.get(name) for name in CORS} == CORS


@pytest.mark.parametrize("kind", REQUESTS)
def test_c07_no_cors_without_being_told(port: int, kind: str) -> None:
    assert not CORS.keys() & exchange(port, REQUESTS[kind]).headers.keys()


def test_c08_queries_are_no_part_of_the_path(port: int) -> None:
    answer = post(port, f"{MESSAGES}?beta=true", asking(MESSAGES))
    assert answer.json["type"] == "message"
    assert get(port, "/v1/models?x").json["object"] == "list"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/chat/completions"),
        ("GET", "/nope"),
        ("GET", "/v1/models/gpt-4"),
        ("GET", "/v1/models/"),
        ("POST", "/v1/models"),
        ("POST", "/v1/chat/completions/"),
        ("PUT", "/v1/completions"),
        ("DELETE", "/v1/responses/resp_1"),
        ("GET", "/v1/responses/resp_1"),
    ],
)
def test_c09_what_does_not_exist(port: int, method: str, path: str) -> None:
    answer = exchange(port, request(method, path))
    assert answer.status == 404
    error = answer.json["error"]
    assert (error["message"], error["type"]) == ("unknown endpoint", "invalid_request_error")


def test_c09_head_has_no_body(port: int) -> None:
    answer = exchange(port, request("HEAD", "/v1/models"))
    assert (answer.status, answer.body) == (404, b"")


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer anything"},
        {"Authorization": "Basic \xff:"},
        {"x-api-key": ""},
        {"x-api-key": "sk-ant-1", "Authorization": "Bearer \"'"},
    ],
)
def test_c10_any_key_is_good_if_none_is_configured(
    port: int, path: str, headers: dict[str, str]
) -> None:
    assert post(port, path, asking(path), headers).status == 200
