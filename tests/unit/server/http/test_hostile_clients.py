"""Clients that lie about who they are, or make the server work for nothing."""

import contextlib
import json
import threading

import httpx
import pytest

from ds4py.server.api.reply import data
from ds4py.server.http import server as serve_module
from tests.support.fakes import Gate
from tests.unit.server.http.test_server import connect, post, read_all, until_gone
from tests.unit.server.support import DEADLINE, USER, backend, server

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "host", ["toy", "toy/console/", "toy/console/?", "toy/health#", "toy/health?x"]
)
def test_no_host_opens_a_path_that_needs_a_key(host):
    with server(backend(), api_key="secret") as (_, port), connect(port) as sock:
        sock.sendall(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        reply = read_all(sock)
    assert reply.startswith(b"HTTP/1.1 401")
    assert b"secret" not in reply


@pytest.mark.parametrize(
    "path", ["/console/../v1/models", "/console/%2e%2e/v1/models", "//v1/models"]
)
def test_no_spelling_of_a_path_leads_around_the_key(path):
    with server(backend(), api_key="secret") as (_, port), connect(port) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: toy\r\n\r\n".encode())
        assert read_all(sock)[:12] in (b"HTTP/1.1 401", b"HTTP/1.1 404")


CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: toy\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunks(body, size):
    cut = (body[n : n + size] for n in range(0, len(body), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in cut) + b"0\r\n\r\n"


def test_a_body_in_small_chunks_is_read():
    body = json.dumps({"messages": USER}).encode()
    with server(backend()) as (_, port), connect(port) as sock:
        sock.sendall(CHUNKED + chunks(body, 1))
        assert read_all(sock).startswith(b"HTTP/1.1 200")


def test_a_body_that_never_stops_to_crumble_is_refused(monkeypatch):
    monkeypatch.setattr(serve_module, "MAX_CRUMBS", 50)
    body = json.dumps({"messages": USER}).encode() + b" " * 100
    with server(backend()) as (_, port), connect(port) as sock:
        sock.sendall(CHUNKED + chunks(body, 1))
        assert read_all(sock).startswith(b"HTTP/1.1 400")


def test_a_large_body_in_large_chunks_has_no_limit_of_pieces(monkeypatch):
    monkeypatch.setattr(serve_module, "MAX_CRUMBS", 5)
    body = json.dumps({"messages": USER}).encode() + b" " * 50_000
    with server(backend()) as (_, port), connect(port) as sock:
        sock.sendall(CHUNKED + chunks(body, 1000))
        assert read_all(sock).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "behind", [b"", b"\r\n", b"GET /health HTTP/1.1\r\nHost: toy\r\n\r\n" * 50]
)
@pytest.mark.parametrize("at_once", [True, False])
def test_what_comes_behind_a_request_does_not_hide_that_its_client_left(behind, at_once):
    gate = Gate()
    with server(backend(gate=gate)) as (http, port):
        sock = connect(port)
        request = post(CHAT, {"messages": USER})
        sock.sendall(request + behind if at_once else request)
        gate.wait_reached(1)
        sock.sendall(b"" if at_once else behind)
        sock.close()
        until_gone(http)
        assert http._jobs.load[0] == 1, "still in its chunk"
        gate.open()


def test_what_comes_behind_a_request_is_no_second_one():
    with server(backend()) as (_, port), connect(port) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: toy\r\n\r\n" * 3)
        assert read_all(sock).count(b"HTTP/1.1 200") == 1


def test_bodies_share_a_limit_and_free_it_when_their_requests_end():
    gate = Gate()
    large = {"messages": USER, "user": "x" * 900}
    with server(backend(gate=gate), max_body_bytes=1000) as (_, port):
        socks = [connect(port) for _ in range(17)]
        for sock in socks[:16]:
            sock.sendall(post(CHAT, large))
        gate.wait_reached(1)
        replies = []
        reading = threading.Thread(target=lambda: replies.extend(map(read_all, socks[:16])))
        reading.start()
        refused = b""
        for _ in range(50):  # the others may not have arrived yet
            with connect(port) as sock, contextlib.suppress(TimeoutError):
                sock.sendall(post(CHAT, large))
                sock.settimeout(0.1)
                refused = read_all(sock)
            if refused:
                break
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in refused.lower()
        gate.open()
        reading.join(DEADLINE)
        assert all(reply.startswith(b"HTTP/1.1 200") for reply in replies)
        socks[16].sendall(post(CHAT, large))
        assert read_all(socks[16]).startswith(b"HTTP/1.1 200")
        for sock in socks:
            sock.close()


@pytest.mark.parametrize(
    "end", ["\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
)
def test_no_text_ends_the_line_of_an_event(end):
    event = data({"text": f"a{end}b"}).decode()
    assert event.endswith("\n\n")
    assert len(event.splitlines()) == 2, "the event and the line that ends it"
    assert json.loads(event.removeprefix("data: ")) == {"text": f"a{end}b"}


def test_clients_that_cut_lines_by_unicode_get_whole_events():
    says = "one\u2028two\x85three\u2029four"
    with server(backend(says)) as (_, port):
        body = {"messages": USER, "stream": True}
        url = f"http://127.0.0.1:{port}{CHAT}"
        with httpx.stream("POST", url, json=body) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content", "") for delta in deltas) == says
