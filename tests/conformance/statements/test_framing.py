"""Statements 1 to 8: headers, fragments, ends of streams, unexpected frames, limits."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from ds4py.coordinator.relay.workers import listener as port_module
from ds4py.worker import worker as worker_module
from tests.clusters import cluster
from tests.conformance.statements.peer import (
    ERROR,
    HELLO,
    N_CTX,
    RESET,
    RESULT,
    SOME_LOGITS,
    WHOLE,
    WORK,
    dial,
    door,
    driven,
    driving,
    enlisted,
    frame,
    hello,
    result,
    work,
    worker,
)
from tests.fake_runner import N_VOCAB, WIDTH, reference_logits
from tests.sockets import Background, read_exactly, read_to_end

PROMPT = [5, 80, 3, 3, 41]
GOOD = frame(WORK, work(WHOLE, PROMPT))
LOGITS_BODY = 40 + 40 + 4 * N_VOCAB
UNEXPECTED = [HELLO, RESULT, 6, 7, 8, 10, 77, 255, 2**32 - 1]


def test_statement_001_the_header_of_a_worker() -> None:
    """A frame starts with the bytes 44 53 34 44, its type and its length, each big-endian."""
    with driving() as peer:
        peer.say(GOOD)
        head = read_exactly(peer.sock, 12)
        assert head == bytes.fromhex("44533444 00000004") + LOGITS_BODY.to_bytes(4, "big")


def test_statement_001_the_header_of_a_coordinator() -> None:
    """A frame starts with the bytes 44 53 34 44, its type and its length, each big-endian."""
    with driven() as (_, peer, session):
        asking = Background(lambda: session.sync(PROMPT))
        length = len(work(WHOLE, PROMPT))
        head = read_exactly(peer.sock, 12)
        assert head == bytes.fromhex("44533444 00000003") + length.to_bytes(4, "big")
        peer.sock.close()
        with pytest.raises(Exception, match="layers 0-5"):
            asking.result()


def test_statement_002_lengths_leave_the_header_out() -> None:
    """The length of a frame counts its body only: the next header stands right behind that."""
    with driving() as peer:
        peer.say(GOOD + frame(WORK, work(WHOLE, [7], PROMPT)))
        peer.finish()
        stream = read_to_end(peer.sock)
        for at in (0, 12 + LOGITS_BODY):
            assert stream[at : at + 12] == b"DS4D" + struct.pack(">II", RESULT, LOGITS_BODY)
        assert len(stream) == 2 * (12 + LOGITS_BODY)


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 12, 13, 80])
def test_statement_003_a_worker_reassembles(piece: int) -> None:
    """Frames may be cut anywhere: a worker answers a WORK that comes in pieces."""
    with driving() as peer:
        for tokens, after in ((PROMPT, []), ([7], PROMPT)):
            peer.say(frame(WORK, work(WHOLE, tokens, after)), piece)
            logits = np.frombuffer(peer.answer().payload, "<f4")
            np.testing.assert_array_equal(logits, reference_logits([*after, *tokens]))


@pytest.mark.parametrize("piece", [1, 3, 12, 13])
def test_statement_003_a_coordinator_reassembles(piece: int) -> None:
    """Frames may be cut anywhere: a coordinator takes a HELLO and a RESULT in pieces."""
    with cluster([]) as c, dial(c.port.address) as peer:
        peer.say(frame(HELLO, hello()), piece)
        c.wait_ready()
        with c.backend.lease(PROMPT) as session:
            asking = Background(lambda: session.sync(PROMPT))
            peer.say(frame(RESULT, result(peer.asked())), piece)
            np.testing.assert_array_equal(asking.result().logits, np.arange(N_VOCAB))


def no_crash(caplog) -> bool:
    return not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("cut", [0, 1, 11, 12, 13, 91, 92, len(GOOD) - 1])
def test_statement_004_a_worker_takes_any_end_for_a_close(cut: int, caplog) -> None:
    """A stream that ends inside a header or a body ends the connection, and nothing else."""
    with worker() as w:
        with dial(w.address) as peer:
            peer.say(GOOD[:cut])
            peer.finish()
            assert peer.ended()
        with dial(w.address) as peer:
            peer.check(work(WHOLE, PROMPT))
    assert no_crash(caplog)


@pytest.mark.parametrize("cut", [0, 1, 4, 11, 12, 51, 55])
def test_statement_004_a_coordinator_takes_any_end_for_a_close(
    cut: int, caplog, monkeypatch
) -> None:
    """A HELLO that ends early is a close for the coordinator, and other workers do not notice.

    Differs from C: anyone who leaves after one to three bytes of the magic is let go after ten
    seconds only, because the port is shared with HTTP and both look alike until then.
    """
    monkeypatch.setattr(port_module, "_FIRST_WORD_SECONDS", 0.1)
    with driven() as (c, good, session):
        with dial(c.port.address) as peer:
            peer.say(frame(HELLO, hello())[:cut])
            peer.finish()
            assert peer.ended()
        asking = Background(lambda: session.sync(PROMPT))
        good.send(RESULT, result(good.asked()))
        asking.result()
    assert no_crash(caplog)


@pytest.mark.parametrize("start", [b"DS4E", b"ds4d", b"\0\0\0\0"])
def test_statement_005_a_worker_closes_on_a_wrong_magic(start: bytes) -> None:
    """A wrong magic is answered with nothing but a close, at any time."""
    with worker() as w, dial(w.address) as at_once, dial(w.address) as later:
        at_once.say(start + bytes(8))
        assert at_once.ended()
        later.check(work(WHOLE, PROMPT))
        later.say(start + GOOD[4:])
        assert later.ended()


@pytest.mark.parametrize("start", [b"DS4E", b"ds4d", b"\0\0\0\0"])
def test_statement_005_a_coordinator_closes_on_a_wrong_magic(start: bytes) -> None:
    """A coordinator that waits for a HELLO closes on a wrong magic without a word.

    Differs from C: where the port is shared with HTTP, anyone who does not begin with the magic is
    an HTTP client and may read an HTTP error.
    """
    with cluster([]) as c, dial(c.port.address) as peer:
        peer.say(start + bytes(8))
        assert peer.ended()


def test_statement_005_a_control_connection_is_dialled_again(monkeypatch) -> None:
    """A worker whose coordinator sends a wrong magic closes and comes back."""
    monkeypatch.setattr(worker_module, "RECONNECT_PAUSE", 0.01)
    with door() as coordinator, worker(coordinator=coordinator.address, plain=True):
        first = coordinator.accept()
        introduction = first.expect(HELLO)
        first.say(b"DS4E" + bytes(8))
        assert first.ended()
        assert coordinator.accept().expect(HELLO) == introduction


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind", UNEXPECTED)
def test_statement_006_unexpected_types(kind: int, plain: bool) -> None:
    """A worker answers a type that it does not serve with ERROR, and closes."""
    with driving(plain=plain) as peer:
        peer.check(work(WHOLE, PROMPT))
        peer.send(kind, bytes(100))
        assert peer.expect(ERROR)
        assert peer.ended()


def test_statement_006_the_body_is_read_first() -> None:
    """The ERROR for an unknown type comes when its whole body has been read, however long."""
    unwanted = frame(77, bytes(300_000))
    with driving() as peer:
        peer.say(unwanted[:-1])
        assert peer.hears_nothing()
        peer.say(unwanted[-1:])
        assert peer.expect(ERROR)
        assert peer.ended()


def test_statement_006_extension_types_are_unknown_to_a_plain_worker() -> None:
    """A worker told to speak ds4's protocol only answers ERROR to the types of ds4py as well.

    Differs from C: without that setting a worker answers a handshake of type 256, which no C peer
    sends.
    """
    for kind in range(256, 261):
        with driving(plain=True) as peer:
            peer.send(kind, b"{}")
            assert peer.expect(ERROR)
            assert peer.ended()


@pytest.mark.parametrize("size", [0, 1, 40, 79])
def test_statement_007_a_short_work(size: int) -> None:
    """A WORK shorter than its fixed record gets an error for request 0; the connection goes on."""
    with driving() as peer:
        peer.check(work(WHOLE, PROMPT))
        assert peer.refused(work(WHOLE, PROMPT)[:size], request_id=0)
        peer.check(work(WHOLE, [7], PROMPT))


def header(kind: int, size: int) -> bytes:
    return struct.pack(">4sII", b"DS4D", kind, size)


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_statement_008_a_worker_limits_work() -> None:
    """A worker closes on the header of a WORK beyond the recommended size, taking no memory.

    Differs from C, as recommended: a C worker allocates what the header says, up to 4 GiB.
    """
    limit = 80 + 4 * N_CTX + N_CTX * WIDTH * 4 + 65_536
    with worker() as w:
        with dial(w.address) as peer:
            peer.say(header(WORK, limit))
            assert peer.hears_nothing()
        for size in (limit + 1, 1 << 24, 1 << 30, 2**32 - 1):
            with little_memory(), dial(w.address) as peer:
                peer.say(header(WORK, size))
                assert peer.ended()


@pytest.mark.parametrize(("kind", "size"), [(HELLO, 168), (HELLO, 2**32 - 1), (ERROR, 2**32 - 1)])
def test_statement_008_a_coordinator_limits_introductions(kind: int, size: int) -> None:
    """A coordinator keeps nothing of a HELLO or an unexpected frame beyond the legal size."""
    with cluster([]) as c, dial(c.port.address) as peer, little_memory():
        peer.say(header(kind, size) + bytes(4096))
        peer.finish()
        assert peer.ended()


def test_statement_008_a_coordinator_limits_results() -> None:
    """A RESULT that claims to be larger than any answer loses its connection at the header."""
    with driven() as (c, peer, session):
        asking = Background(lambda: session.sync(PROMPT))
        assert peer.asked().flags & RESET
        with little_memory():
            peer.say(header(RESULT, 1 << 30))
            assert peer.ended()
        with pytest.raises(Exception, match="layers 0-5"):
            asking.result()
        with enlisted(c) as other:
            asking = Background(lambda: session.sync(PROMPT))
            other.send(RESULT, result(other.asked(), payload=SOME_LOGITS))
            asking.result()
