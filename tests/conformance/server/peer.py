"""What the tests of the server's checklist share: a client made of bytes, and a model to script.

The client knows nothing of HTTP but what it checks: it sends a request, reads to the end of the
connection, and cuts what came at the places where the protocol says. The model is DeepSeek V4's
text over a fake session that says what a test wants; requests come to a real server on loopback.
"""

from __future__ import annotations

import functools
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ds4py.server.http.server import HttpServer
from ds4py.server.requests.prompts import TextStack
from ds4py.text.tokenizer.deepseek4_tokens import Marker
from tests.support.fakes import FakeBackend, Script
from tests.unit.server.support import DEADLINE
from tests.unit.server.support import server as serve
from tests.unit.text import tiny_deepseek4 as tiny

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
POSTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
CHAT_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
RESPONSES_TOOLS = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
MESSAGES_TOOLS = [{"name": "weather", "input_schema": SCHEMA}]
TOOLS: dict[str, Any] = {CHAT: CHAT_TOOLS, RESPONSES: RESPONSES_TOOLS, MESSAGES: MESSAGES_TOOLS}


def asking(
    path: str, question: str = "Oslo?", /, *, tools: bool | list[Any] = False, **members: Any
) -> Any:
    """A body for one of the four routes that asks one question; `tools`: one, or these."""
    said = [{"role": "user", "content": question}]
    body: Any = {
        CHAT: {"messages": said},
        COMPLETIONS: {"prompt": question},
        RESPONSES: {"input": question},
        MESSAGES: {"messages": said, "max_tokens": 1000},
    }[path]
    if tools:
        body["tools"] = TOOLS[path] if tools is True else tools
    return body | members


# --- the model ------------------------------------------------------------------------------------

D = Marker.DSML.value
THINK_END = Marker.THINK_END.value


def block(*calls: str, style: str = D) -> str:
    """A block of calls in one of the three styles."""
    return f"<{style}tool_calls>\n{''.join(calls)}</{style}tool_calls>"


def call(name: str, style: str = D, /, **parameters: str | tuple[str]) -> str:
    """A call; a value in a tuple is JSON, any other is text."""
    lines = [f'<{style}invoke name="{name}">\n']
    for key, value in parameters.items():
        is_text = isinstance(value, str)
        body = value if isinstance(value, str) else value[0]
        lines.append(
            f'<{style}parameter name="{key}" string="{str(is_text).lower()}">{body}'
            f"</{style}parameter>\n"
        )
    return "".join([*lines, f"</{style}invoke>\n"])


WEATHER = "\n\n" + block(call("weather", city="Oslo", days=("3",)))
ARGUMENTS = '{"city":"Oslo","days":3}'
EOS = next(iter(tiny.tokenizer().eos_ids))


@functools.cache
def text_stack(n_ctx: int) -> TextStack:
    return TextStack(tiny.tokenizer(), tiny.chat(n_ctx=n_ctx))


def tokens(text: str, *, end: bool = True) -> list[int]:
    """A reply as the model's tokens, its markers whole, and by default its end."""
    return [*tiny.tokenizer().encode(text, special=True), *[EOS] * end]


@functools.cache
def _by_byte() -> dict[bytes, int]:
    tokenizer = tiny.tokenizer()
    return {tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.n_vocab))}


def in_bytes(text: str, *, end: bool = True) -> list[int]:
    """The same, every byte a token: characters and markers are split."""
    return [*(_by_byte()[bytes([byte])] for byte in text.encode()), *[EOS] * end]


def turns(*texts: str) -> Callable[[Sequence[int]], list[int]]:
    """Another reply for every turn of the assistant in a prompt; the last one is repeated."""
    (marker,) = tiny.tokenizer().encode(Marker.ASSISTANT, special=True)
    scripts = [tokens(text) for text in texts]
    return lambda prompt: scripts[min(max(list(prompt).count(marker), 1), len(scripts)) - 1]


def model(says: str | Script | None, *, n_ctx: int = 8192, **options: Any) -> FakeBackend:
    """A fake that always says this; None: whatever its prompt makes of it, without an end."""
    script = tokens(says) if isinstance(says, str) else says
    n_vocab = tiny.tokenizer().n_vocab
    return FakeBackend(
        n_vocab=n_vocab, n_ctx=n_ctx, script=script, **{"chunk": 512, "model_id": 0, **options}
    )


@contextmanager
def served(fake: FakeBackend, **config: Any) -> Iterator[tuple[HttpServer, int]]:
    """A real server for it, and its port on loopback."""
    with serve(fake, text=text_stack(fake.n_ctx), **config) as (http, port):
        yield http, port


@contextmanager
def saying(says: str | Script, **config: Any) -> Iterator[int]:
    """The port of a server whose model always says this."""
    with served(model(says), **config) as (_, port):
        yield port


def prompt_of(fake: FakeBackend) -> str:
    """The prompt that was evaluated last, as text with its markers."""
    session = fake.sessions[0]
    spelled = (
        tiny.tokenizer().token_bytes(token, special=True)
        for token in session.tokens[: session.n_prompt]
    )
    return b"".join(spelled).decode()


# --- the client -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """A server-sent event: its name if it has one, and its data, or a comment's text."""

    name: str | None
    data: Any
    comment: str | None = None


@dataclass(frozen=True)
class Answer:
    """All that came until the connection was closed."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body of a reply that is no stream: one line of JSON."""
        assert self.headers["content-type"] == "application/json"
        assert int(self.headers["content-length"]) == len(self.body)
        assert self.body.endswith(b"\n")
        assert self.body.count(b"\n") == 1
        return json.loads(self.body)

    @property
    def events(self) -> list[Event]:
        """The events of a stream, comments too."""
        assert self.status == 200
        assert self.headers["content-type"] == "text/event-stream"
        assert "content-length" not in self.headers
        return events(self.body)

    @property
    def payloads(self) -> list[Any]:
        """The data of all events; `[DONE]` as it is."""
        return [event.data for event in self.events if event.comment is None]


def events(body: bytes) -> list[Event]:
    """Cut a stream at the blank lines; what stands behind the last one must be nothing."""
    *blocks, rest = body.decode().split("\n\n")
    assert rest == ""
    return [_event(block) for block in blocks]


def _event(block: str) -> Event:
    name = data = comment = None
    for line in block.split("\n"):
        field, _, value = line.partition(": ")
        match field:
            case "event":
                name = value
            case "data":
                data = value if value == "[DONE]" else json.loads(value)
            case "":
                comment = value
            case _:
                raise AssertionError(f"no line of an event: {line!r}")
    return Event(name, data, comment)


def request(
    method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> bytes:
    """A request as bytes."""
    lines = [f"{method} {path} HTTP/1.1", "Host: toy"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    lines += [f"Content-Length: {len(body)}"] if body or method == "POST" else []
    return "\r\n".join([*lines, "", ""]).encode() + body


def posting(path: str, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
    """A POST as bytes; a body that is no bytes is made JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    return request("POST", path, data, headers)


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE)


def read_all(sock: socket.socket) -> bytes:
    """Read to the end of the connection."""
    received = bytearray()
    while part := sock.recv(1 << 16):
        received += part
    return bytes(received)


def read_until(sock: socket.socket, mark: bytes, *, times: int = 1) -> bytes:
    """Read until something came so often."""
    received = bytearray()
    while received.count(mark) < times:
        part = sock.recv(1 << 16)
        assert part, f"closed after {bytes(received)!r}"
        received += part
    return bytes(received)


def parse(received: bytes) -> Answer:
    """Cut a whole reply into its parts."""
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    version, status, _ = first.split(" ", 2)
    assert version == "HTTP/1.1"
    pairs = [line.partition(": ") for line in lines]
    headers = {name.lower(): value for name, _, value in pairs}
    assert len(headers) == len(lines), f"a header came twice: {lines}"
    chunked = headers.get("transfer-encoding") == "chunked"
    return Answer(int(status), headers, joined(body) if chunked else body)


def joined(chunks: bytes) -> bytes:
    """Put a chunked body together; its end must be there, and nothing behind it."""
    body = b""
    while True:
        size, _, rest = chunks.partition(b"\r\n")
        n = int(size, 16)
        assert rest[n : n + 2] == b"\r\n"
        if n == 0:
            assert rest == b"\r\n"
            return body
        body, chunks = body + rest[:n], rest[n + 2 :]


def exchange(port: int, sent: bytes) -> Answer:
    """Send bytes and read to the end of the connection."""
    with connect(port) as sock:
        sock.sendall(sent)
        return parse(read_all(sock))


def get(port: int, path: str, headers: Mapping[str, str] | None = None) -> Answer:
    return exchange(port, request("GET", path, headers=headers))


def post(port: int, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
    return exchange(port, posting(path, body, headers))


def reset(sock: socket.socket) -> None:
    """Close with a reset, as a killed client does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that another thread brings about."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        time.sleep(0.005)


def message_of(path: str, answer: Answer) -> str:
    """The sentence of an error, after a look at the shape that a route's clients know."""
    body = answer.json
    if path.startswith(MESSAGES):
        assert body.keys() == {"type", "error"}
        assert body["type"] == "error"
    else:
        assert body.keys() == {"error"}
    assert body["error"]["type"]
    return str(body["error"]["message"])
