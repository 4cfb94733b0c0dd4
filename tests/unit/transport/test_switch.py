"""One port, several protocols: told apart by the first bytes, and none of them consumed."""

from __future__ import annotations

import socket
import time

import pytest

from ds4py.transport.stream import PlainStream
from ds4py.transport.switch import first_word
from tests.clusters import wait_until
from tests.sockets import SOCKETS, Background, read_exactly, tcp_pair

WORDS = (b"DS4D", b"DS4T")


def heard(sock: socket.socket, timeout: float = 10.0) -> bytes | None:
    return first_word(PlainStream(sock, SOCKETS), WORDS, deadline=time.monotonic() + timeout)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (b"DS4D", b"DS4D"),
        (b"DS4D\x00\x00\x00\x01", b"DS4D"),
        (b"DS4T\x16\x03\x01", b"DS4T"),
        (b"GET / HTTP/1.1\r\n", b""),
        (b"DELETE /", b""),
        (b"DS4H", b""),
        (b"\x16\x03\x01", b""),
        (b"x", b""),
    ],
)
def test_the_first_bytes_decide_and_stay_unread(words, expected) -> None:
    with tcp_pair() as (ours, theirs):
        theirs.sendall(words)
        assert heard(ours) == expected
        ours.settimeout(10)
        assert read_exactly(ours, len(words)) == words


def test_a_word_that_nobody_knows_here_is_another_protocol() -> None:
    with tcp_pair() as (ours, theirs):
        theirs.sendall(b"DS4T")
        stream = PlainStream(ours, SOCKETS)
        assert first_word(stream, (b"DS4D",), deadline=time.monotonic() + 10) == b""


def test_a_word_may_come_byte_by_byte() -> None:
    with tcp_pair() as (ours, theirs):
        deciding = Background(lambda: heard(ours))
        for n, byte in enumerate(b"DS4D", start=1):
            theirs.sendall(bytes([byte]))
            if n < 4:
                wait_until(lambda n=n: _there(ours) == n, "the byte arrived")  # type: ignore[misc]
                assert not deciding.done
        assert deciding.result() == b"DS4D"


def _there(sock: socket.socket) -> int:
    try:
        return len(sock.recv(16, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return 0


@pytest.mark.parametrize("words", [b"", b"DS4"])
def test_too_little_is_nothing_after_the_timeout(words) -> None:
    with tcp_pair() as (ours, theirs):
        theirs.sendall(words)
        assert heard(ours, timeout=0.05) is None


@pytest.mark.parametrize("words", [b"", b"D", b"DS4"])
def test_a_caller_that_hangs_up_said_nothing(words) -> None:
    with tcp_pair() as (ours, theirs):
        theirs.sendall(words)
        theirs.close()
        started = time.monotonic()
        assert heard(ours) is None
        assert time.monotonic() - started < 5  # it does not wait for the rest
