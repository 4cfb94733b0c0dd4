"""The server on a loopback port: connections, disconnects, adopted sockets, the official client."""

import asyncio
import json
import socket
import struct
import threading
import time

import httpx
import openai
import pytest

from ds4py.errors import RemoteWorkError, TransportError
from ds4py.server.http import server as serve_module
from ds4py.server.requests.queue import RequestHandle
from tests.fakes import Gate
from tests.unit.server.support import DEADLINE, USER, backend, server, sse

CHAT = "/v1/chat/completions"


def until(condition):
    """Wait for a condition that another thread brings about."""
    for _ in range(int(DEADLINE / 0.005)):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("the condition never came true")


def until_gone(http):
    """Wait until the server has noticed that its clients are gone and has told the jobs."""
    until(lambda: http.connections == 0)
    for _ in range(10):
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), http._loop).result(DEADLINE)


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE)


def post(path, body):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: toy\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def read_all(sock):
    received = bytearray()
    while part := sock.recv(65536):
        received += part
    return bytes(received)


def read_until(sock, mark):
    received = bytearray()
    while mark not in received:
        part = sock.recv(65536)
        assert part, f"closed after {bytes(received)!r}"
        received += part
    return bytes(received)


def reset(sock):
    """Close with a reset, as a killed client does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def open_client(port):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)


# --- plain HTTP -----------------------------------------------------------------------------------


def test_each_reply_closes_its_connection():
    with server(backend()) as (_, port), connect(port) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: toy\r\n\r\n")
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert b"server:" not in head.lower()
    assert json.loads(body)["status"] == "ok"


def test_garbage_is_a_400_in_json(caplog):
    with server(backend()) as (_, port), connect(port) as sock:
        sock.sendall(b"DS4D\x00\x00\x00\x01" + bytes(100) + b"\r\n\r\n")
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["message"] == "bad HTTP request"


def test_headers_above_64_kib_are_refused():
    with server(backend()) as (_, port), connect(port) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: toy\r\n")
        sock.sendall(b"X-Long: " + b"x" * (66 << 10) + b"\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 400")


def test_headers_of_60_kib_are_fine():
    with server(backend()) as (_, port):
        headers = {"x-long": "x" * (60 << 10)}
        response = httpx.get(f"http://127.0.0.1:{port}/health", headers=headers)
    assert response.status_code == 200


def test_a_client_that_says_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(serve_module, "HEADER_SECONDS", 0.02)
    with server(backend()) as (_, port), connect(port) as sock:
        assert read_all(sock).startswith(b"HTTP/1.1 400")


def test_a_client_that_drips_its_headers_is_closed(monkeypatch):
    monkeypatch.setattr(serve_module, "HEADER_SECONDS", 0.05)
    with server(backend()) as (_, port), connect(port) as sock:
        sock.sendall(b"GET /health HT")
        assert read_all(sock).startswith(b"HTTP/1.1 400")


def test_a_body_that_stalls_is_a_400(monkeypatch):
    monkeypatch.setattr("ds4py.server.http.endpoint.READ_SECONDS", 0.02)
    with server(backend()) as (_, port), connect(port) as sock:
        sock.sendall(post(CHAT, {"messages": USER})[:-5])
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert "bad HTTP request" in json.loads(body)["error"]["message"]


def test_a_broken_chunk_is_a_400(caplog):
    with server(backend()) as (_, port), connect(port) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: toy\r\n"
            b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"
        )
        assert read_all(sock).startswith(b"HTTP/1.1 400")
    assert "Traceback" not in caplog.text


def test_a_refused_body_is_read_on_for_a_bounded_time(monkeypatch):
    monkeypatch.setattr("ds4py.server.http.endpoint.DISCARD_SECONDS", 0.02)
    with server(backend(), max_body_bytes=10) as (_, port), connect(port) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: toy\r\nContent-Length: 9999\r\n\r\nx")
        assert read_all(sock).startswith(b"HTTP/1.1 413")


def test_a_body_that_is_too_large_gets_its_reply():
    with server(backend(), max_body_bytes=100_000) as (_, port):
        response = httpx.post(f"http://127.0.0.1:{port}{CHAT}", content=b" " * 5_000_000)
    assert response.status_code == 413


def test_a_client_that_asks_before_sending_too_much_is_answered_at_once():
    with server(backend(), max_body_bytes=1000) as (_, port), connect(port) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: toy\r\nContent-Length: 99999999999999\r\n"
            b"Expect: 100-continue\r\n\r\n"
        )
        assert read_all(sock).startswith(b"HTTP/1.1 413")


def test_a_client_that_leaves_in_its_body_harms_nobody():
    with server(backend("Hi")) as (_, port):
        with connect(port) as sock:
            sock.sendall(post(CHAT, {"messages": USER})[:-5])
        assert open_client(port).chat.completions.create(model="m", messages=USER).choices


# --- the official client --------------------------------------------------------------------------


def test_the_openai_client_chats():
    with server(backend("Hello")) as (_, port):
        reply = open_client(port).chat.completions.create(model="m", messages=USER)
    assert reply.choices[0].message.content == "Hello"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens == 5
    assert reply.usage.prompt_tokens_details.cached_tokens == 0


def test_the_openai_client_streams():
    with server(backend("Hello")) as (_, port):
        stream = open_client(port).chat.completions.create(
            model="m", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "Hello"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 5


def test_the_openai_client_completes():
    with server(backend("Hello")) as (_, port):
        client = open_client(port)
        whole = client.completions.create(model="m", prompt="x", max_tokens=3)
        parts = list(client.completions.create(model="m", prompt="x", stream=True))
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("Hel", "length")
    assert "".join(part.choices[0].text for part in parts) == "Hello"


def test_the_openai_client_lists_models():
    with server(backend()) as (_, port):
        (model,) = open_client(port).models.list().data
        assert open_client(port).models.retrieve(model.id).id == "Fake Model"


def test_the_openai_client_understands_an_overflow():
    with server(backend(n_ctx=8)) as (_, port), pytest.raises(openai.BadRequestError) as caught:
        open_client(port).chat.completions.create(model="m", messages=USER)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"
    assert caught.value.body["n_ctx"] == 8


def test_the_openai_client_understands_other_errors():
    with server(backend(failures={0: RemoteWorkError("no", hop="worker1")})) as (_, port):
        client = open_client(port)
        with pytest.raises(openai.InternalServerError, match="worker1 refused the work"):
            client.chat.completions.create(model="m", messages=USER)
        with pytest.raises(openai.NotFoundError, match="unknown endpoint"):
            client.models.retrieve("nope")
        with pytest.raises(openai.BadRequestError, match="missing messages"):
            client.chat.completions.create(model="m", messages=None)


def test_the_openai_client_raises_when_a_stream_breaks_off():
    failures = {3: RemoteWorkError("no", hop="worker1")}
    with server(backend("Hello", failures=failures, chunk=100)) as (_, port):
        stream = open_client(port).chat.completions.create(model="m", messages=USER, stream=True)
        said = [next(stream).choices[0].delta.content or "" for _ in range(4)]
        with pytest.raises(openai.APIError, match="worker1 refused the work"):
            next(stream)
    assert "".join(said) == "Hel"


# --- disconnects ----------------------------------------------------------------------------------


@pytest.mark.parametrize("leave", [socket.socket.close, reset])
def test_a_client_gone_mid_stream_stops_within_one_token(leave):
    gate = Gate()
    fake = backend("x" * 200, gate=gate, chunk=100)
    with server(fake) as (http, port):
        sock = connect(port)
        sock.sendall(post(CHAT, {"messages": USER, "stream": True}))
        gate.let(4)  # the prompt and three tokens
        read_until(sock, b"assistant")
        gate.wait_reached(5)
        leave(sock)
        until_gone(http)
        gate.open()
        until(lambda: fake.n_free == 1)
        assert fake.sessions[0].n_evaluations == 5  # the one that had begun
    assert fake.sessions[0].n_evaluations == 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_gone_while_the_prompt_is_evaluated_stops_within_one_chunk(stream):
    gate = Gate()
    fake = backend("Hello", gate=gate, chunk=2)
    with server(fake) as (http, port):
        sock = connect(port)
        sock.sendall(post(CHAT, {"messages": USER, "stream": stream}))
        gate.wait_reached(1)
        sock.close()
        until_gone(http)
        gate.open()
        until(lambda: fake.n_free == 1)
        assert fake.sessions[0].n_evaluations == 1


def test_a_client_gone_without_streaming_stops_within_one_token():
    gate = Gate()
    fake = backend("x" * 200, gate=gate, chunk=100)
    with server(fake) as (http, port):
        sock = connect(port)
        sock.sendall(post(CHAT, {"messages": USER}))
        gate.let(3)
        gate.wait_reached(4)
        sock.close()
        until_gone(http)
        gate.open()
        until(lambda: fake.n_free == 1)
        assert fake.sessions[0].n_evaluations == 4


def test_a_client_gone_while_queued_leaves_the_queue():
    gate = Gate()
    fake = backend("Hi", gate=gate, chunk=100)
    with server(fake) as (_, port):
        url = f"http://127.0.0.1:{port}/health"
        running, queued = connect(port), connect(port)
        running.sendall(post(CHAT, {"messages": USER}))
        gate.wait_reached(1)
        queued.sendall(post(CHAT, {"messages": USER}))
        until(lambda: httpx.get(url).json()["requests"]["waiting"] == 1)
        queued.close()
        until(lambda: httpx.get(url).json()["requests"]["waiting"] == 0)
        gate.open()
        assert b"200 OK" in read_all(running)
        running.close()
    assert fake.sessions[0].n_evaluations == 3  # one prompt and two tokens: one request's work


def test_the_next_request_after_a_disconnect_is_exact():
    gate = Gate()
    fake = backend(None, gate=gate)
    with server(fake) as (http, port):
        sock = connect(port)
        sock.sendall(post(CHAT, {"messages": USER, "stream": True}))
        gate.let(8)
        gate.wait_reached(9)
        reset(sock)
        until_gone(http)
        gate.open()
        client = open_client(port)
        after = client.chat.completions.create(model="m", messages=USER, max_tokens=9)
    with server(backend(None)) as (_, port):
        fresh = open_client(port).chat.completions.create(model="m", messages=USER, max_tokens=9)
    assert after.choices[0].message.content == fresh.choices[0].message.content


# --- adopted connections --------------------------------------------------------------------------


def accepted_pair(receive_buffer=None):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.socket()
        if receive_buffer:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        ours.settimeout(DEADLINE)
        ours.connect(listener.getsockname())
        return ours, listener.accept()[0]


def test_an_adopted_connection_is_served_from_its_first_byte():
    with server(backend("Hello"), listen=False) as (http, _):
        ours, theirs = accepted_pair()
        ours.sendall(post(CHAT, {"messages": USER, "stream": True}))
        assert theirs.recv(4, socket.MSG_PEEK) == b"POST"
        http.adopt(theirs)
        received = read_all(ours)
        ours.close()
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"200 OK" in head
    assert b"connection: close" in head.lower()
    assert body.count(b'"content"') == 5


def test_connections_are_adopted_from_many_threads():
    with server(backend("Hi"), listen=False) as (http, _):
        pairs = [accepted_pair() for _ in range(8)]
        threads = [threading.Thread(target=http.adopt, args=(theirs,)) for _, theirs in pairs]
        for thread in threads:
            thread.start()
        for (ours, _), thread in zip(pairs, threads, strict=True):
            thread.join(DEADLINE)
            ours.sendall(b"GET /health HTTP/1.1\r\nHost: toy\r\n\r\n")
            assert b'"status":"ok"' in read_all(ours)
            ours.close()


def test_an_adopted_client_that_is_gone_stops_its_work():
    gate = Gate()
    fake = backend("x" * 100, gate=gate, chunk=100)
    with server(fake, listen=False) as (http, _):
        ours, theirs = accepted_pair()
        http.adopt(theirs)
        ours.sendall(post(CHAT, {"messages": USER, "stream": True}))
        gate.let(2)
        gate.wait_reached(3)
        ours.close()
        until_gone(http)
        gate.open()
        until(lambda: fake.n_free == 1)
        assert fake.sessions[0].n_evaluations == 3


def test_an_adopted_client_that_left_before_is_no_problem(caplog):
    with server(backend("Hi"), listen=False) as (http, _):
        ours, theirs = accepted_pair()
        reset(ours)
        http.adopt(theirs)
        until(lambda: theirs.fileno() == -1)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_client_that_takes_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(serve_module, "STALL_SECONDS", 0.02)
    fake = backend([70], n_ctx=20_000)  # never ends by itself
    with server(fake, listen=False) as (http, _):
        ours, theirs = accepted_pair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        ours.sendall(post(CHAT, {"messages": USER, "stream": True}))
        http.adopt(theirs)
        until(lambda: fake.sessions[0].n_evaluations > 0)
        until_gone(http)
        until(lambda: fake.n_free == 1)
        assert fake.sessions[0].n_evaluations < 15_000
        ours.close()


def test_a_client_that_does_not_take_the_end_is_cut_off(monkeypatch):
    monkeypatch.setattr(serve_module, "STALL_SECONDS", 0.02)
    with server(backend(), listen=False, model_alias="m" * 60_000) as (http, _):
        ours, theirs = accepted_pair(receive_buffer=4096)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        http.adopt(theirs)
        until(lambda: http.connections == 1)
        ours.sendall(b"GET /v1/models HTTP/1.1\r\nHost: toy\r\n\r\n")
        until_gone(http)
        assert len(read_all(ours)) < 60_000  # what the system had taken already
        ours.close()


def test_a_server_that_does_not_run_closes_what_it_is_given():
    with server(backend(), listen=False) as (http, _):
        pass
    ours, theirs = accepted_pair()
    http.adopt(theirs)
    assert read_all(ours) == b""
    ours.close()


# --- shutdown -------------------------------------------------------------------------------------


def test_closing_ends_a_running_stream_with_an_error():
    gate = Gate()
    fake = backend("x" * 200, gate=gate, chunk=100)
    with server(fake) as (http, port):
        sock = connect(port)
        sock.sendall(post(CHAT, {"messages": USER, "stream": True}))
        gate.let(3)
        gate.wait_reached(4)
        closing = threading.Thread(target=http.close, args=(DEADLINE,))
        closing.start()
        until(lambda: http.closing)
        gate.open()
        received = read_all(sock).decode()
        closing.join(DEADLINE)
        sock.close()
    assert '"finish_reason":"error"' in received
    assert "server shutting down" in received
    assert "data: [DONE]" in received
    assert fake.sessions[0].n_evaluations < 100  # it did not run to its end


def test_closing_answers_what_is_queued(monkeypatch):
    gate, cancelled, cancel = Gate(), threading.Semaphore(0), RequestHandle.cancel

    def told(handle, reason=None):
        cancel(handle, reason)
        if reason is not None:
            cancelled.release()

    monkeypatch.setattr(RequestHandle, "cancel", told)
    with server(backend("Hi", gate=gate)) as (http, port):
        running, queued = connect(port), connect(port)
        running.sendall(post(CHAT, {"messages": USER}))
        gate.wait_reached(1)
        queued.sendall(post(CHAT, {"messages": USER}))
        url = f"http://127.0.0.1:{port}/health"
        until(lambda: httpx.get(url).json()["requests"]["waiting"] == 1)
        closing = threading.Thread(target=http.close, args=(DEADLINE,))
        closing.start()
        received = read_all(queued)
        for _ in range(2):  # the running one comes last, and may not end by itself before
            assert cancelled.acquire(timeout=DEADLINE)
        gate.open()
        closing.join(DEADLINE)
        assert b"503" in read_all(running)
        running.close()
        queued.close()
    assert received.startswith(b"HTTP/1.1 503")
    assert b"server shutting down" in received


def test_closing_leaves_no_thread_and_no_connection():
    before = set(threading.enumerate())
    with server(backend("Hi")) as (_, port):
        idle = connect(port)
        assert open_client(port).chat.completions.create(model="m", messages=USER).choices
    assert read_all(idle) == b""
    idle.close()
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert [name for name in left if name.startswith("ds4-")] == []


def test_what_does_not_stop_in_time_is_cut_off(caplog):
    gate = Gate()
    with server(backend("Hi", gate=gate)) as (http, port):
        sock = connect(port)
        sock.sendall(post(CHAT, {"messages": USER}))
        gate.wait_reached(1)
        http.close(0.05)
        assert read_all(sock) == b""
        sock.close()
        gate.open()
    assert "ds4-generate-0 did not stop" in caplog.text
    assert "cut off" in caplog.text


def test_closing_is_idempotent():
    with server(backend()) as (http, _):
        http.close(DEADLINE)
        http.close(DEADLINE)


def test_a_server_that_can_not_listen_says_so(caplog):
    from ds4py.config import ServerConfig
    from ds4py.server.http.app import create_app
    from ds4py.server.http.server import HttpServer
    from tests.unit.server.support import text_stack

    closed = socket.socket()
    closed.close()
    http = HttpServer(create_app(backend(), text_stack(), ServerConfig()))
    with pytest.raises(TransportError):
        http.start([closed])
    http.close(DEADLINE)
    assert "the HTTP server failed" in caplog.text


def test_a_stream_over_the_wire_is_the_stream_of_the_application():
    with server(backend("Hé")) as (_, port):
        body = {"messages": USER, "stream": True}
        response = httpx.post(f"http://127.0.0.1:{port}{CHAT}", json=body)
    assert [
        part["choices"][0]["delta"] for part in sse(response.text) if isinstance(part, dict)
    ] == [{"role": "assistant"}, {"content": "H"}, {"content": "é"}, {}]
