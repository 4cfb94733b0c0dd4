"""The client of a server: what is asked, what comes back, and every way in which it can fail."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ds4py.cli import remote
from ds4py.cli.answer import Figures, Piece, Prefill, Question
from ds4py.cli.remote import ask
from ds4py.config import Address
from ds4py.errors import ConnectError, PeerClosedError, RequestError, TransportTimeoutError

QUESTION = Question(text="Hi", ids=None, system="", raw=False, max_tokens=None, sampling={})


class Server:
    """Answers one request with prepared bytes and remembers what was asked."""

    def __init__(self, answer: bytes, *, hold: bool = False):
        self._answer, self._hold = answer, hold
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self.path, self.body = "", {}
        self.left = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        sock.settimeout(20)
        with sock, sock.makefile("rb") as file:
            self.path = file.readline().split()[1].decode()
            length = 0
            while (line := file.readline().strip()) != b"":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            self.body = json.loads(file.read(length))
            with contextlib.suppress(OSError):  # a client that has had enough
                sock.sendall(self._answer)
                while self._hold and sock.recv(1024):
                    pass
            self.left.set()

    def close(self) -> None:
        self._listener.close()
        self._thread.join(20)


def http(status: str, body: bytes, kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode() + body


def stream(*chunks: object, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    text = ": keepalive\n\n" + "".join(lines) + ("data: [DONE]\n\n" if done else "")
    return http("200 OK", text.encode(), "text/event-stream")


def delta(content: str, finish: str | None = None, **more: object) -> dict:
    return {"choices": [{"delta": {"content": content}, "finish_reason": finish, **more}]}


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 3},
    },
    "timings": {"prompt_per_second": 10.0, "predicted_per_second": 4.0},
}


@contextmanager
def serving(answer: bytes, *, hold: bool = False) -> Iterator[Server]:
    server = Server(answer, hold=hold)
    try:
        yield server
    finally:
        server.close()


def answer_to(question: Question, answer: bytes, *, want_ids: bool = False):
    with serving(answer) as server:
        events = list(ask(server.address, question, want_ids=want_ids))
        return events, server


def test_comments_tell_how_far_the_prompt_is_and_others_are_ignored() -> None:
    comments = b": prefill\n\n: prefill 8/20\n\n: prefill 20/20\n\n: prefill x/20\n\n"
    head, body = stream(delta("a"), USAGE).split(b"\r\n\r\n", 1)
    answer = head + b"\r\n\r\n" + comments + body
    with serving(answer) as server:
        events = list(ask(server.address, QUESTION, want_ids=False, want_progress=True))
    assert events[:3] == [Prefill(8, 20), Prefill(20, 20), Piece("a")]
    assert server.body["return_progress"] is True


def test_an_answer_streams_as_pieces_and_figures() -> None:
    events, server = answer_to(
        QUESTION,
        stream(
            delta("Hel") | {"usage": None},  # as some servers write in every chunk but the last
            delta("lo", token_ids=[7, 8]),
            delta("", "stop"),
            USAGE,
        ),
    )
    assert events[:-1] == [Piece("Hel"), Piece("lo", (7, 8))]
    assert events[-1] == Figures(
        n_prompt=5,
        n_cached=3,
        n_generated=2,
        prefill_per_second=10.0,
        decode_per_second=4.0,
        finish="stop",
    )
    assert server.path == "/v1/chat/completions"
    assert server.body == {
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "Hi"}],
    }


@pytest.mark.parametrize(
    ("question", "want_ids", "path", "fields"),
    [
        (
            {"system": "Be brief.", "max_tokens": 7, "sampling": {"temperature": 0.0}},
            False,
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "Hi"},
                ],
                "max_tokens": 7,
                "temperature": 0.0,
            },
        ),
        ({"raw": True}, False, "/v1/completions", {"prompt": "Hi"}),
        (
            {"text": None, "ids": (1, 2)},
            True,
            "/v1/completions",
            {"prompt": [1, 2], "return_token_ids": True},
        ),
    ],
)
def test_what_is_asked(question, want_ids, path, fields) -> None:
    from dataclasses import replace

    _, server = answer_to(replace(QUESTION, **question), stream(), want_ids=want_ids)
    assert server.path == path
    for name, value in fields.items():
        assert server.body[name] == value


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (
            http("400 Bad Request", b'{"error": {"message": "too long", "code": "ctx"}}'),
            RequestError,
            "too long",
        ),
        (http("503 Service Unavailable", b"<html>"), RequestError, "status 503"),
        (http("404 Not Found", b'{"detail": 1}'), RequestError, "status 404"),
        (http("500 Oops", b"[]"), RequestError, "status 500"),
        (
            stream(delta("a"), {"error": {"message": "a stage was lost"}}),
            RequestError,
            "a stage was lost",
        ),
        (
            http("200 OK", b'event: error\ndata: {"error": {"message": "died"}}\n\n'),
            RequestError,
            "died",
        ),
        (stream(delta("a"), done=False), PeerClosedError, "without its end mark"),
        (http("200 OK", b"data: {broken\n\n"), PeerClosedError, "no JSON object"),
        (http("200 OK", b"data: [1]\n\n"), PeerClosedError, "no JSON object"),
        (http("200 OK", b"data: " + b"x" * (1 << 21)), PeerClosedError, "a line without end"),
        (http("500 Oops", b"x" * (1 << 22)), RequestError, "status 500"),
        (http("200 OK", b"data: \xff\n\n"), PeerClosedError, "no JSON object"),
        (stream({"choices": [1]}), PeerClosedError, "no known form"),
        (stream({"choices": 7}), PeerClosedError, "no known form"),
        (stream({"usage": [1]}), PeerClosedError, "no known form"),
        (b"DS4D\x00\x00\x00\x01", PeerClosedError, "broke off"),
        (b"", PeerClosedError, "broke off"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\ndata: ",
            PeerClosedError,
            "broke off",
        ),
    ],
)
def test_every_failure_of_the_other_side_is_one_sentence(answer, error, words) -> None:
    with pytest.raises(error, match=words):
        answer_to(QUESTION, answer)


def test_no_server_is_explained() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = Address("127.0.0.1", free.getsockname()[1])
    with pytest.raises(ConnectError, match="start ds4py-server, or check --host"):
        list(ask(address, QUESTION, want_ids=False))


def test_a_silent_server_times_out(monkeypatch) -> None:
    monkeypatch.setattr(remote, "_SILENCE_SECONDS", 0.1)
    with (
        serving(stream(delta("a"), done=False), hold=True) as server,
        pytest.raises(TransportTimeoutError, match="said nothing"),
    ):
        list(ask(server.address, QUESTION, want_ids=False))


def test_leaving_the_stream_closes_the_connection() -> None:
    with serving(stream(delta("a"), done=False), hold=True) as server:
        events = ask(server.address, QUESTION, want_ids=False)
        assert next(events) == Piece("a")
        events.close()
        assert server.left.wait(20)
