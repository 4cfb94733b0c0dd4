"""The client of a server: what is asked, what comes back, and every way in which it can fail."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from ds4py.api.events import Figures, Piece
from ds4py.cli import exits
from ds4py.cli.chat import remote
from ds4py.cli.chat.conversation import ChatHistory, StageFigures
from ds4py.cli.chat.printing import Prefill, Question
from ds4py.cli.chat.remote import RemotePartner, ask
from ds4py.cli.client import client
from ds4py.config import Address
from ds4py.errors import (
    ConfigError,
    ConnectError,
    PeerClosedError,
    RequestError,
    TransportTimeoutError,
)
from ds4py.text.tokenizer.deepseek4_tokens import Marker

QUESTION = Question(text="Hi", ids=None, system="", raw=False, max_tokens=None, sampling={})


class Server:
    """Answers one request with prepared bytes and remembers what was asked."""

    def __init__(self, answer: bytes, *, hold: bool = False):
        self._answer, self._hold = answer, hold
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self.path, self.body, self.headers = "", {}, b""
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
                self.headers += line.lower() + b"\n"
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            self.body = json.loads(file.read(length) or b"null")
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
        ({"raw": True}, False, "/v1/completions", {"prompt": "Hi", "raw": True}),
        ({"system": None}, False, "/v1/chat/completions", {"default_system": True}),
        ({"think": "max"}, False, "/v1/chat/completions", {"reasoning_effort": "max"}),
        (
            {"text": None, "ids": (1, 2)},
            True,
            "/v1/completions",
            {"prompt": [1, 2], "return_token_ids": True},
        ),
    ],
)
def test_what_is_asked(question, want_ids, path, fields) -> None:
    _, server = answer_to(replace(QUESTION, **question), stream(), want_ids=want_ids)
    assert server.path == path
    for name, value in fields.items():
        assert server.body[name] == value


def test_reasoning_comes_apart_from_the_text() -> None:
    thinking = {"choices": [{"delta": {"reasoning_content": "hm"}, "token_ids": [3]}]}
    events, _ = answer_to(QUESTION, stream(thinking, delta("</think>yes", "stop"), USAGE))
    assert events[:-1] == [Piece("", (3,), "hm"), Piece("</think>yes")]


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [("<think>", "hm", "yes"), ("<think>\n", "hm", "yes"), ("x", "", "hm</think>yes")],
)
def test_the_text_of_a_whole_prompt_is_taken_apart_here(text, reasoning, answer) -> None:
    chunks = [{"choices": [{"text": piece}]} for piece in ("hm</th", "ink>", "yes")]
    end = {"choices": [{"text": "", "finish_reason": "stop"}]}
    question = replace(QUESTION, text=text, raw=True)
    events, _ = answer_to(question, stream(*chunks, end, USAGE))
    pieces = [event for event in events if isinstance(event, Piece)]
    assert "".join(piece.reasoning for piece in pieces) == reasoning
    assert "".join(piece.text for piece in pieces) == answer


def test_reasoning_without_an_end_is_shown_to_its_last_character() -> None:
    end = {"choices": [{"text": "hm</thi", "finish_reason": "length"}]}
    events, _ = answer_to(replace(QUESTION, text="<think>", raw=True), stream(end, USAGE))
    assert events[0] == Piece("", (), "hm</thi")


@pytest.mark.parametrize(
    ("flags", "path", "fields"),
    [
        ("", "/v1/chat/completions", {"default_system": True}),
        ("--system=", "/v1/chat/completions", {}),
        ("--system=s --think", "/v1/chat/completions", {"reasoning_effort": "high"}),
        ("--system=s --think-max --nothink", "/v1/chat/completions", {"reasoning_effort": "none"}),
        ("--system=s --nothink --think-max", "/v1/chat/completions", {"reasoning_effort": "max"}),
        ("--raw --think", "/v1/completions", {"raw": True}),
    ],
)
def test_flags_of_the_program_become_fields(flags, path, fields) -> None:
    with serving(stream(delta("a"), USAGE)) as server:
        args = ["--host", str(server.address), "-p", "Hi", *flags.split()]
        assert exits.exit_status(client, "ds4py-cli", args) == exits.OK
    assert server.path == path
    told = {"default_system", "reasoning_effort", "raw"} & server.body.keys()
    assert {name: server.body[name] for name in told} == fields


def test_a_prompt_that_begins_with_the_first_token_is_a_whole_one() -> None:
    text = f"{Marker.BOS}{Marker.USER}Hi"
    with serving(stream(delta("a"), USAGE)) as server:
        args = ["--host", str(server.address), "-p", text]
        assert exits.exit_status(client, "ds4py-cli", args) == exits.OK
    assert server.path == "/v1/completions"
    assert (server.body["prompt"], server.body["raw"]) == (text, True)


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


# --- conversations --------------------------------------------------------------------------------


def quiet(_: int, __: int) -> None: ...


def test_a_conversation_is_sent_whole_and_thoughts_go_back_where_they_came_from() -> None:
    talk = ChatHistory("s", "none")
    talk.add("a", "b", "hm")
    told: list[tuple[int, int]] = []
    head, body = stream(delta("yes", "stop"), USAGE).split(b"\r\n\r\n", 1)
    with serving(head + b"\r\n\r\n: prefill 8/20\n\n" + body) as server:
        partner = RemotePartner(server.address, {"temperature": 0.0}, 7, want_ids=True)
        events = list(partner.reply(talk, "c", lambda *done: told.append(done)))
    assert events[0] == Piece("yes")
    assert isinstance(events[-1], Figures)
    assert told == [(8, 20), (20, 20)]
    assert server.path == "/v1/chat/completions"
    assert server.body == {
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
        "return_token_ids": True,
        "temperature": 0.0,
        "max_tokens": 7,
        "reasoning_effort": "none",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": "hm"},
            {"role": "user", "content": "c"},
        ],
    }
    assert b"authorization" not in server.headers


def test_without_a_system_text_the_models_own_is_asked_for() -> None:
    with serving(stream(delta("yes"), USAGE)) as server:
        list(RemotePartner(server.address, {}, None).reply(ChatHistory(), "c", quiet))
    assert server.body["default_system"] is True
    assert {"max_tokens", "reasoning_effort", "return_token_ids"}.isdisjoint(server.body)


def test_stopping_an_answer_closes_the_connection() -> None:
    with serving(stream(delta("a"), done=False), hold=True) as server:
        events = RemotePartner(server.address, {}, None).reply(ChatHistory(), "c", quiet)
        assert next(events) == Piece("a")
        events.close()
        assert server.left.wait(20)


def test_a_key_is_told_to_the_server_that_wants_one(monkeypatch) -> None:
    with serving(stream(delta("a"), USAGE)) as server:
        partner = RemotePartner(server.address, {}, None, api_key="sesame")
        list(partner.reply(ChatHistory(), "c", quiet))
    assert b"\nauthorization: bearer sesame\n" in server.headers
    monkeypatch.setenv("DS4PY_API_KEY", "sesame")
    with serving(stream(delta("a"), USAGE)) as server:
        args = ["--host", str(server.address), "-p", "Hi"]
        assert exits.exit_status(client, "ds4py-cli", args) == exits.OK
    assert b"\nauthorization: bearer sesame\n" in server.headers


def test_the_context_is_the_servers() -> None:
    with pytest.raises(ConfigError, match="that of h:1 is the server's; start it with --ctx 4096"):
        RemotePartner(Address("h", 1), {}, None).resize(4096)


HEALTH = {
    "status": "route incomplete",
    "missing": "layers 3-5",
    "model": "toy",
    "n_ctx": 64,
    "stages": [
        {
            "name": "coordinator",
            "layers": None,
            "has_output": False,
            "prefill_per_second": 0,
            "decode_per_second": 0,
        },
        {
            "name": "w:1",
            "layers": "0-2",
            "has_output": True,
            "prefill_per_second": 12.5,
            "decode_per_second": 3,
        },
    ],
}


def test_the_status_is_the_servers_health() -> None:
    with serving(http("503 Service Unavailable", json.dumps(HEALTH).encode())) as server:
        status = RemotePartner(server.address, {}, None).status()
    assert server.path == "/health"
    assert (status.model, status.where) == ("toy", f"at {server.address}")
    assert (status.n_ctx, status.missing) == (64, "layers 3-5")
    assert status.stages == (
        StageFigures("coordinator", "no layers", 0.0, 0.0),
        StageFigures("w:1", "layers 0-2 + head", 12.5, 3.0),
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"model": "a", "n_ctx": "x", "stages": []}',
        b'{"model": "a", "n_ctx": 1, "stages": [7]}',
        b'{"model": "a", "n_ctx": 1, "stages": 7}',
    ],
)
def test_a_server_that_does_not_tell_its_state_is_named(body: bytes) -> None:
    with (
        serving(http("404 Not Found", body)) as server,
        pytest.raises(PeerClosedError, match="does not tell its state"),
    ):
        RemotePartner(server.address, {}, None).status()
