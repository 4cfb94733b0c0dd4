"""The target that speaks HTTP: a server on loopback, and clients that do so badly.

Owns: hostile requests as bytes, what may be answered to them, and the honest requests between.
Refuses to know: budgets, files. Invariant: as in `live`; a request that a server must understand is
answered, and never with a failure of the server's own.

The model is a fake that always says the same; the server, its threads and its sockets are real.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from random import Random
from typing import Final

import h11
import msgspec

from ds4py.config import Address
from ds4py.server.http.server import MAX_HEADER_BYTES
from interop.fuzz import http_corpus as corpus
from interop.fuzz.damage import damage_bytes, damage_json
from interop.fuzz.hostile import call, soon
from interop.fuzz.live import Live
from tests.support.sockets import read_to_end
from tests.unit.server.support import backend, server

_Head = list[bytes]
"""The lines of a head: request line, fields."""


class LiveHttp(Live):
    """A server with four dialects and pages: whatever a client sends."""

    name = "http"
    _MAX_BODY: Final = 1 << 20
    _STATUSES: Final = frozenset({200, 204, 304, 400, 401, 404, 413, 429})

    def _make(self, rng: Random) -> bytes:
        if rng.random() < 0.15:
            data = corpus.request(rng.choice(corpus.PAGES))
        else:
            path = rng.choice((*corpus.BODIES, *corpus.BODIES, corpus.COUNTER))
            bodies = corpus.BODIES.get(path, corpus.BODIES["/v1/messages"])
            stranger = rng.choice(corpus.BODIES[rng.choice([*corpus.BODIES])])
            data = corpus.request(path, rng.choice(bodies))
            if rng.random() < 0.5:
                data = _with_body(data, damage_json(rng, rng.choice(bodies), stranger))
        for _ in range(rng.choice((0, 1, 1, 2))):
            data = _damaged(rng, data)
        return damage_bytes(rng, data) if rng.random() < 0.2 else data

    def _start(self, stack: ExitStack) -> None:
        self._fake = backend("Hello", n_sessions=2, n_ctx=512)
        serving = server(
            self._fake, n_sessions=2, max_body_bytes=self._MAX_BODY, cors=True, max_tokens=8
        )
        _, port = stack.enter_context(serving)
        self._address = Address("127.0.0.1", port)

    def _feed(self, data: bytes) -> Sequence[str]:
        method, complete = _asked(data)
        if zlib.crc32(data) % 16 == 0:
            _exchange(self._address, data, listen=False)
            return ["left"]
        answer = _exchange(self._address, data, more=not complete)
        status, body, ended = _answered(answer, method)
        if not status:  # one that hangs up in the middle may be told nothing
            assert not complete or len(data) > MAX_HEADER_BYTES, "a whole request got no answer"
            return ["silence"]
        assert status in self._STATUSES, f"status {status}: {body[:200]!r}"
        assert ended or not complete, f"the answer breaks off: {answer[-200:]!r}"
        if status >= 400 and method != b"HEAD":
            error = msgspec.json.decode(body)["error"]
            assert error["message"].isprintable(), f"not one sentence: {error['message']!r}"
        return [f"status {status}"]

    def _ask(self) -> None:
        soon(lambda: self._fake.n_free == 2, "clients that are gone are forgotten")
        for path, bodies in corpus.BODIES.items():
            request = corpus.request(path, bodies[0])
            status, body, _ = _answered(_exchange(self._address, request), b"POST")
            assert status == 200, f"{path}: status {status}: {body[:200]!r}"


def _asked(data: bytes) -> tuple[bytes, bool]:
    """Return a request's method, and whether the server may not wait for more of it.

    A request that is no HTTP is complete: it can be refused.
    """
    reading = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
    method = b"GET"
    with suppress(h11.RemoteProtocolError):
        if data:  # nothing would mean the end
            reading.receive_data(data)
        while (event := reading.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Request):
                method = event.method
            if isinstance(event, h11.EndOfMessage):
                return method, True
        return method, False
    return method, True


def _exchange(address: Address, data: bytes, *, more: bool = False, listen: bool = True) -> bytes:
    """Send a request in pieces and return the answer.

    Args:
        address: Of the server.
        data: The request.
        more: The server may wait for the rest: say that there is none.
        listen: Otherwise hang up when all is sent, and return nothing.
    """
    step = len(data) // (1 + zlib.crc32(data) % 4) + 1
    with call(address) as sock:
        try:
            for start in range(0, len(data), step):
                sock.sendall(data[start : start + step])
            if more:
                sock.shutdown(socket.SHUT_WR)
        except TimeoutError:
            raise
        except OSError:
            pass  # it has answered and hung up before all was said
        return read_to_end(sock) if listen else b""


def _answered(answer: bytes, method: bytes) -> tuple[int, bytes, bool]:
    """Return status and body of an answer, and whether it is whole."""
    reading = h11.Connection(h11.CLIENT)
    known = method if method in (b"HEAD", b"CONNECT") else b"GET"
    reading.send(h11.Request(method=known, target="/", headers=[("Host", "toy")]))
    reading.send(h11.EndOfMessage())
    reading.receive_data(answer)
    reading.receive_data(b"")
    status, body = 0, b""
    with suppress(h11.RemoteProtocolError):  # it broke off
        while True:
            match reading.next_event():
                case h11.Response(status_code=code):
                    status = code
                case h11.Data(data=part):
                    body += part
                case h11.EndOfMessage():
                    return status, body, True
                case h11.InformationalResponse():
                    continue
                case _:
                    break
    return status, body, False


# --- damage ----------------------------------------------------------------------------------


def _with_body(data: bytes, body: bytes) -> bytes:
    """Put another body into a request, with its length."""
    lines = _lines(data)
    kept = [line for line in lines if not line.lower().startswith(b"content-length")]
    return _joined([*kept, b"Content-Length: %d" % len(body)], body)


def _lines(data: bytes) -> _Head:
    return data.partition(b"\r\n\r\n")[0].split(b"\r\n")


def _joined(lines: _Head, body: bytes, end: bytes = b"\r\n") -> bytes:
    return end.join([*lines, b"", b""]) + body


def _damaged(rng: Random, data: bytes) -> bytes:
    """Change one thing about a request's head, or how its body is sent."""
    head, _, body = data.partition(b"\r\n\r\n")
    return rng.choice(_WAYS)(rng, head.split(b"\r\n"), body)


def _other_line(rng: Random, lines: _Head, body: bytes) -> bytes:
    word, _, rest = lines[0].partition(b" ")
    path, _, version = rest.partition(b" ")
    place = rng.randrange(3)
    if place == 0:
        word = rng.choice((b"GET", b"HEAD", b"OPTIONS", b"PUT", b"CONNECT", b"post", b"P\0ST", b""))
    elif place == 1:
        others = (b"/", b"*", b"//v1", b"/%zz", b"/\xff", b"/v1/chat/completions/", b"x" * 70_000)
        path = rng.choice((*others, b"http://toy" + path, path + b"?a=%00", path.upper()))
    else:
        version = rng.choice((b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"ICY", b""))
    return _joined([b" ".join((word, path, version)), *lines[1:]], body)


def _other_field(rng: Random, lines: _Head, body: bytes) -> bytes:
    field = rng.choice(_FIELDS)
    if rng.random() < 0.5:
        name = field.partition(b":")[0].lower() + b":"
        lines = lines[:1] + [line for line in lines[1:] if not line.lower().startswith(name)]
    at = rng.randrange(1, len(lines) + 1)
    return _joined([*lines[:at], field, *lines[at:]], body)


def _without_field(rng: Random, lines: _Head, body: bytes) -> bytes:
    if len(lines) > 1:
        del lines[rng.randrange(1, len(lines))]
    return _joined(lines, body)


def _other_ends(rng: Random, lines: _Head, body: bytes) -> bytes:
    return _joined(lines, body, rng.choice((b"\n", b"\r", b"\r\n ", b"\r\r\n")))


def _in_chunks(rng: Random, lines: _Head, body: bytes) -> bytes:
    """Send the body in chunks, of which one may lie about its size."""
    lines = [line for line in lines if not line.lower().startswith(b"content-length")]
    step, sent = rng.randrange(1, 100), b""
    lie = rng.choice((0, 0, 0, -1, 1, 1 << 40))
    for start in range(0, len(body), step):
        part = body[start : start + step]
        size = b"%x" % max(0, len(part) + (lie if rng.random() < 0.2 else 0))
        sent += size + rng.choice((b"", b"", b";a=b")) + b"\r\n" + part + b"\r\n"
    end = rng.choice((b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nTrailer: x\r\n\r\n", b"", b"zz\r\n"))
    return _joined([*lines, b"Transfer-Encoding: chunked"], sent + end)


def _twice(_: Random, lines: _Head, body: bytes) -> bytes:
    return _joined(lines, body) * 2


_FIELDS: Final = (
    *(b"Content-Length: %d" % n for n in (0, 1, 50, 1 << 20, (1 << 20) + 1, 10**30)),
    *(b"Content-Length: " + odd for odd in (b"-1", b"+5", b"0x10", b"1, 1", b"\xb2", b"")),
    *(b"Transfer-Encoding: " + odd for odd in (b"chunked", b"gzip", b"chunked, chunked")),
    *(b"Expect: 100-continue", b"Connection: keep-alive", b"Upgrade: websocket", b"Host: a"),
    *(b"Connection: Upgrade, HTTP2-Settings", b"Accept-Encoding: gzip", b"If-None-Match: *"),
    *(b"Authorization: Basic \xff", b"Origin: http://evil", b"x-api-key: " + b"k" * 5000),
    *(b"X: " + b"x" * 70_000, b": no name", b"no colon", b"A\0: b", b"A: b\0c", b" folded"),
    *(b"Range: bytes=0-1", b"Content-Type: text/plain; charset=utf-16", b"Content-Encoding: br"),
)
_Way = Callable[[Random, _Head, bytes], bytes]
_WAYS: Final[Sequence[_Way]] = (
    *(_other_line, _other_field, _other_field, _without_field, _other_ends, _in_chunks, _twice),
)
