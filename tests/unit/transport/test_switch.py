"""One port, two protocols: told apart by the first bytes, and none of them consumed."""

from __future__ import annotations

import socket
import time

import pytest

from ds4py.transport.switch import Spoken, first_words
from tests.support.clusters import wait_until
from tests.support.sockets import Background, read_exactly, tcp_pair


def classify(sock: socket.socket, timeout: float = 10.0) -> Spoken:
    return first_words(sock, timeout=timeout)


@pytest.mark.parametrize(
    ("words", "spoken"),
    [
        (b"DS4D", Spoken.DS4D),
        (b"DS4D\x00\x00\x00\x01", Spoken.DS4D),
        (b"GET / HTTP/1.1\r\n", Spoken.OTHER),
        (b"DELETE /", Spoken.OTHER),
        (b"DS4H", Spoken.OTHER),
        (b"\x16\x03\x01", Spoken.OTHER),
        (b"x", Spoken.OTHER),
    ],
)
def test_the_first_bytes_decide_and_stay_unread(words, spoken) -> None:
    with tcp_pair() as (ours, theirs):
        theirs.sendall(words)
        assert classify(ours) is spoken
        ours.settimeout(10)
        assert read_exactly(ours, len(words)) == words


def test_the_magic_may_come_byte_by_byte() -> None:
    with tcp_pair() as (ours, theirs):
        deciding = Background(lambda: classify(ours))
        for n, byte in enumerate(b"DS4D", start=1):
            theirs.sendall(bytes([byte]))
            if n < 4:
                wait_until(lambda n=n: _there(ours) == n, "the byte arrived")  # type: ignore[misc]
                assert not deciding.done
        assert deciding.result() is Spoken.DS4D


def _there(sock: socket.socket) -> int:
    try:
        return len(sock.recv(16, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return 0


@pytest.mark.parametrize("words", [b"", b"DS4"])
def test_too_few_words_are_nothing_after_the_timeout(words) -> None:
    with tcp_pair() as (ours, theirs):
        theirs.sendall(words)
        assert classify(ours, timeout=0.05) is Spoken.NOTHING


@pytest.mark.parametrize("words", [b"", b"D", b"DS4"])
def test_a_caller_that_hangs_up_said_nothing(words) -> None:
    with tcp_pair() as (ours, theirs):
        theirs.sendall(words)
        theirs.close()
        started = time.monotonic()
        assert classify(ours) is Spoken.NOTHING
        assert time.monotonic() - started < 5  # it does not wait for the rest
