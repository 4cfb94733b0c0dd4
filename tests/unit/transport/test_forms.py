"""Every form of stream carries frames alike: the bare socket's, and an encrypted one.

Connections are made by `Connector` and `Acceptor` only, as in the programs; the encrypted form is
`tests.tls`, which stands for any that comes later.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4py.config import Address, SocketConfig
from ds4py.errors import PeerClosedError, TransportError, TransportTimeoutError
from ds4py.transport.acceptor import Acceptor, CallerLimits
from ds4py.transport.connection import Connection
from ds4py.transport.connector import Connector
from ds4py.transport.outbox import Outbox
from ds4py.transport.security import PLAIN, Security
from ds4py.transport.sockets import Listener, connect
from ds4py.transport.stream import PlainStream, Stream, after
from ds4py.wire.frames import encode_frame
from tests.by_hand import PROMPT
from tests.clusters import cluster, wait_until
from tests.fake_runner import reference_logits
from tests.sockets import DEADLINE, SOCKETS, Background, read_exactly, read_to_end, tcp_pair
from tests.tls import Chopper, Recorder, TlsSecurity, TlsStream

LOOPBACK = Address("127.0.0.1", 0)
LIMITS = {3: 1 << 25}
TIGHT = SocketConfig(buffer_mb=0, send_timeout=0.2)

ENCRYPTED = TlsSecurity()
FORMS: dict[str, Security] = {"plain": PLAIN, "encrypted": ENCRYPTED}
every_form = pytest.mark.parametrize("security", FORMS.values(), ids=FORMS)


@contextmanager
def accepting(
    security: Security = PLAIN,
    limits: CallerLimits | None = None,
    config: SocketConfig = SOCKETS,
    **more: object,
) -> Iterator[tuple[Acceptor, queue.Queue[Connection]]]:
    """An acceptor, and the connections that it makes, each served until it is closed here."""
    made: queue.Queue[Connection] = queue.Queue()
    ended = threading.Event()

    def serve(connection: Connection) -> None:
        made.put(connection)
        while not (connection.closed or ended.wait(0.005)):
            pass
        connection.close()

    acceptor = Acceptor(
        Listener(LOOPBACK, config),
        serve,
        frames=LIMITS,
        limits=limits or CallerLimits(),
        security=security,
        **more,  # type: ignore[arg-type]
    )
    acceptor.start()
    try:
        yield acceptor, made
    finally:
        ended.set()
        acceptor.close()
        acceptor.join(time.monotonic() + DEADLINE)
        assert acceptor.n_callers == 0


@contextmanager
def pair(security: Security, config: SocketConfig = SOCKETS) -> Iterator[tuple[Connection, ...]]:
    """Both ends of one connection: the dialled one, and the accepted one."""
    with accepting(security, config=config) as (acceptor, made):
        dialled = Connector(config, security).connect(acceptor.address, LIMITS)
        try:
            yield dialled, made.get(timeout=DEADLINE)
        finally:
            dialled.close()


def narrow(*connections: Connection) -> None:
    """Let the kernel take a few bytes at a time only."""
    for connection in connections:
        sock = socket_of(connection.stream)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def socket_of(stream: Stream) -> socket.socket:
    while not isinstance(stream, PlainStream):
        stream = stream.below  # type: ignore[attr-defined]
    return stream.sock


def body_of(connection: Connection) -> bytes:
    frame = connection.receive(timeout=DEADLINE)
    assert frame is not None
    return bytes(frame.body)


# --- connections ----------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("n_bytes", [0, 1, 16_383, 16_384, 16_385, 1 << 20, (1 << 24) + 7])
def test_frames_of_every_size_arrive_in_both_directions(security, n_bytes) -> None:
    body = np.random.default_rng(n_bytes).bytes(n_bytes)
    with pair(security) as ends:
        for ours, theirs in (ends, ends[::-1]):
            sending = Background(lambda ours=ours: ours.send(encode_frame(3, body[:5], body[5:])))
            assert body_of(theirs) == body
            sending.result()


@every_form
def test_both_directions_are_used_at_once(security) -> None:
    """A reader that waits never keeps a sender out, nor a sender that waits a reader."""
    n_frames, body = 8, bytes(range(256)) * 8192
    with pair(security) as ends:
        narrow(*ends)
        senders = [
            Background(lambda c=c: [c.send(encode_frame(3, b"", body)) for _ in range(n_frames)])
            for c in ends
        ]
        readers = [
            Background(lambda c=c: [body_of(c) == body for _ in range(n_frames)]) for c in ends
        ]
        for reader in readers:
            assert all(reader.result())
        for sender in senders:
            sender.result()


@every_form
def test_close_wakes_a_blocked_reader_at_either_end(security) -> None:
    with pair(security) as (dialled, accepted):
        readers = [Background(dialled.receive), Background(accepted.receive)]
        wait_until(lambda: dialled.receiving and accepted.receiving, "both wait")
        time.sleep(0.05)  # and are inside the system
        dialled.close()
        assert [reader.result() for reader in readers] == [None, None]


@every_form
def test_close_wakes_a_blocked_sender(security) -> None:
    with pair(security) as (dialled, accepted):
        narrow(dialled, accepted)
        sender = Background(lambda: dialled.send([bytes(1 << 25)]))
        time.sleep(0.1)
        assert not sender.done
        dialled.close()
        with pytest.raises(PeerClosedError):
            sender.result()


@every_form
def test_silence_ends_a_timed_receive_and_the_connection_lives_on(security) -> None:
    with pair(security) as (dialled, accepted):
        for _ in range(2):
            with pytest.raises(TransportTimeoutError, match="sent nothing"):
                dialled.receive(timeout=0.05)
        waiting = Background(dialled.receive)  # without a deadline again
        assert not waiting.done
        accepted.send(encode_frame(3, b"late"))
        frame = waiting.result()
        assert frame is not None
        assert bytes(frame.body) == b"late"


@every_form
def test_the_configured_receive_timeout_comes_back_after_a_deadline(security) -> None:
    with pair(security, replace(SOCKETS, recv_timeout=0.1)) as (dialled, accepted):
        accepted.send(encode_frame(3, b"x"))
        assert body_of(dialled) == b"x"  # with a deadline of many seconds
        started = time.monotonic()
        with pytest.raises(TransportTimeoutError, match="sent nothing"):
            dialled.receive()
        assert time.monotonic() - started < 5


@every_form
def test_a_peer_that_takes_nothing_ends_the_send_and_the_connection(security) -> None:
    with pair(security, TIGHT) as (dialled, accepted):
        narrow(dialled, accepted)
        with pytest.raises(TransportTimeoutError, match="took no data"):
            dialled.send([bytes(1 << 24)])
        assert dialled.closed


@every_form
def test_an_end_inside_a_frame_is_a_lost_peer(security) -> None:
    with pair(security) as (dialled, accepted):
        accepted.send([encode_frame(3, bytes(100))[0][:20]])
        accepted.close()
        with pytest.raises(PeerClosedError, match="in the middle of a frame"):
            dialled.receive()


@every_form
def test_what_is_sent_at_once_and_without_a_rest_has_left(security) -> None:
    """A stream that holds bytes back says so, or they would wait for the next frame."""
    frame = encode_frame(3, bytes(10_000))
    with pair(security) as (dialled, accepted):
        narrow(dialled)
        n_left = 0
        while not (rest := dialled.send_now(frame)):
            n_left += 1
        for _ in range(n_left):
            got = accepted.receive(timeout=2)
            assert got is not None
            assert len(got.body) == 10_000
        dialled.send(rest)
        assert len(body_of(accepted)) == 10_000


@every_form
def test_frames_leave_an_outbox_in_order_whatever_the_stream_takes(security) -> None:
    """Frames of any size go in without waiting; some leave in part, the rest on the thread."""
    sizes = [1, 70_000, 5, 300_000, 16_384, 0, 700_000, 3] * 4
    with pair(security) as (dialled, accepted):
        narrow(dialled, accepted)
        box = Outbox(dialled, depth=len(sizes), name="test send", timeout=DEADLINE)
        seconds: list[float] = []
        for n, size in enumerate(sizes):
            box.put(encode_frame(3, bytes([n]), bytes([n]) * size), seconds.append)
        for n, size in enumerate(sizes):
            assert body_of(accepted) == bytes([n]) * (size + 1)
        wait_until(lambda: len(seconds) == len(sizes), "each was told that it has left")
        box.close()
        box.join(DEADLINE)


@every_form
def test_threads_of_a_connection_are_kept_on_the_configured_cores(security) -> None:
    with pair(security, replace(SOCKETS, cores=(0,))) as (dialled, accepted):
        assert (dialled.cores, accepted.cores) == ((0,), (0,))
        assert (dialled.peer, accepted.peer) == (accepted.local, dialled.local)


# --- any cut --------------------------------------------------------------------------------------


@pytest.mark.parametrize("encrypted", [False, True])
@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.binary(max_size=300), max_size=6),
    st.lists(st.integers(1, 60), min_size=1, max_size=20),
    st.lists(st.integers(1, 60), min_size=1, max_size=20),
)
def test_any_cut_of_the_bytes_gives_the_same_frames(encrypted, bodies, ours, theirs) -> None:
    """The stream below gives and takes a few bytes at a time, in the middle of anything."""

    def formed(sock: socket.socket, sizes: list[int], context: ssl.SSLContext) -> Stream:
        cut = Chopper(PlainStream(sock, SOCKETS), sizes)
        return TlsStream(cut, context) if encrypted else cut

    with tcp_pair() as (near, far):
        far.setblocking(True)
        ends = (
            formed(near, ours, ENCRYPTED.client),
            formed(far, theirs, ENCRYPTED.server),
        )
        if encrypted:
            greeting = Background(lambda: ends[0].shake_hands(time.monotonic() + DEADLINE))
            ends[1].shake_hands(time.monotonic() + DEADLINE)
            greeting.result()
        sender, reader = (Connection(end, LIMITS) for end in ends)

        def send() -> None:
            for n, body in enumerate(bodies):
                pieces = encode_frame(3, body[:7], body[7:])
                if n % 2:
                    pieces = sender.send_now(pieces)
                sender.send(pieces)
            sender.close()

        sending = Background(send)
        assert [body_of(reader) for _ in bodies] == bodies
        assert reader.receive(timeout=DEADLINE) is None
        sending.result()
        reader.close()


@given(st.lists(st.binary(max_size=9)), st.integers(0, 60))
def test_what_follows_the_first_bytes_of_pieces(pieces, n_bytes) -> None:
    rest = after(pieces, n_bytes)
    assert b"".join(rest) == b"".join(pieces)[n_bytes:]
    assert not rest or len(rest[0]), "nothing in front of what must leave"


# --- callers --------------------------------------------------------------------------------------


def test_callers_beyond_the_limit_are_turned_away_and_one_that_ends_makes_room() -> None:
    with accepting(limits=CallerLimits(served=1)) as (acceptor, made):
        connector = Connector(SOCKETS)
        callers = [connector.connect(acceptor.address, LIMITS)]
        served = made.get(timeout=DEADLINE)
        callers.append(connector.connect(acceptor.address, LIMITS))
        assert callers[1].receive(timeout=DEADLINE) is None
        served.close()
        wait_until(lambda: acceptor.n_callers == 0, "the first one has ended")
        callers.append(connector.connect(acceptor.address, LIMITS))
        made.get(timeout=DEADLINE)
        for caller in callers:
            caller.close()


def test_silent_callers_are_bounded_in_number_and_in_time(caplog) -> None:
    patient = CallerLimits(word_seconds=0.3, unknown=2)
    with accepting(limits=patient) as (acceptor, made):
        silent = [connect(acceptor.address, SOCKETS) for _ in range(2)]
        wait_until(lambda: acceptor.n_callers == 2, "they are there")
        with connect(acceptor.address, SOCKETS) as third:
            assert read_to_end(third) == b""
        assert "too many connections that say nothing" in caplog.text
        for sock in silent:
            with sock:
                assert read_to_end(sock) == b""  # turned away when its time is up
        wait_until(lambda: acceptor.n_callers == 0, "they are forgotten")
        good = Connector(SOCKETS).connect(acceptor.address, LIMITS)
        good.send(encode_frame(3, b"x"))
        assert body_of(made.get(timeout=DEADLINE)) == b"x"
        good.close()


@every_form
def test_closing_turns_unknown_callers_away_and_lets_known_ones_go_on(security) -> None:
    limits = CallerLimits(word_seconds=600.0)
    with accepting(security, limits) as (acceptor, made):
        known = Connector(SOCKETS, security).connect(acceptor.address, LIMITS)
        known.send(encode_frame(3, b"a"))
        other = made.get(timeout=DEADLINE)
        silent = connect(acceptor.address, SOCKETS)
        wait_until(lambda: acceptor.n_callers == 2, "both are there")
        acceptor.close()
        with silent:
            assert read_to_end(silent) == b""
        assert body_of(other) == b"a"
        known.close()


@every_form
def test_another_protocol_is_given_away_unread_or_turned_away(security, caplog) -> None:
    limits, request = CallerLimits(word_seconds=DEADLINE), b"GET / HTTP/1.1\r\n\r\n"
    taken: queue.Queue[socket.socket] = queue.Queue()
    with (
        accepting(security, limits, on_other=taken.put) as (acceptor, _),
        connect(acceptor.address, SOCKETS) as caller,
    ):
        caller.sendall(request)
        with taken.get(timeout=DEADLINE) as sock:
            assert read_exactly(sock, len(request)) == request
    with accepting(security, limits) as (acceptor, _), connect(acceptor.address, SOCKETS) as caller:
        caller.sendall(request)
        assert read_to_end(caller) == b""
    assert "speaks no DS4D" in caplog.text


def test_where_peers_are_of_several_kinds_a_caller_is_looked_at_in_any_case() -> None:
    taken: queue.Queue[socket.socket] = queue.Queue()
    with (
        accepting(ENCRYPTED, CallerLimits(), on_other=taken.put) as (acceptor, _),
        connect(acceptor.address, SOCKETS) as caller,
    ):
        caller.sendall(b"GET /")
        taken.get(timeout=DEADLINE).close()


@every_form
@pytest.mark.parametrize("error", [PeerClosedError("it left"), ZeroDivisionError()])
def test_a_caller_whose_service_fails_is_closed_and_the_next_one_is_served(
    security, error, caplog
) -> None:
    kept: list[Connection] = []

    def serve(connection: Connection) -> None:
        kept.append(connection)
        raise error

    acceptor = Acceptor(
        Listener(LOOPBACK, SOCKETS), serve, frames=LIMITS, limits=CallerLimits(), security=security
    )
    acceptor.start()
    for _ in range(2):
        caller = Connector(SOCKETS, security).connect(acceptor.address, LIMITS)
        assert caller.receive(timeout=DEADLINE) is None
        caller.close()
    acceptor.close()
    acceptor.join(time.monotonic() + DEADLINE)
    assert all(connection.closed for connection in kept)
    assert ("could not be served" in caplog.text) == isinstance(error, ZeroDivisionError)


@pytest.mark.parametrize("said", [b"DS4T" + bytes(100), b"DS4T\x16\x03\x01", b"DS4D", b"DS4T"])
def test_a_caller_that_cannot_prove_itself_is_never_served(said) -> None:
    with accepting(ENCRYPTED) as (acceptor, made):
        with connect(acceptor.address, SOCKETS) as stranger:
            stranger.sendall(said)
            with contextlib.suppress(OSError):  # turned away already
                stranger.shutdown(socket.SHUT_WR)
            read_to_end(stranger)
        wait_until(lambda: acceptor.n_callers == 0, "it is forgotten")
        assert made.empty()
        good = Connector(SOCKETS, ENCRYPTED).connect(acceptor.address, LIMITS)
        good.send(encode_frame(3, b"x"))
        assert body_of(made.get(timeout=DEADLINE)) == b"x"
        good.close()


def test_who_cannot_prove_itself_to_us_is_an_error_that_leaves_no_socket() -> None:
    made: list[Stream] = []

    def watched(below: Stream) -> Stream:
        made.append(below)
        return below

    with accepting() as (acceptor, served):
        closer = Background(lambda: served.get(timeout=DEADLINE).close())
        with pytest.raises(TransportError, match=str(acceptor.address)):
            Connector(SOCKETS, TlsSecurity(watched)).connect(acceptor.address, LIMITS)
        closer.result()
    assert socket_of(made[0]).fileno() == -1


# --- whole routes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dial_in", [False, True])
def test_a_whole_route_is_encrypted_and_no_caller_knows(dial_in) -> None:
    """Registration, chunks, links between workers, a second lane, saving: one parameter."""
    heard: list[bytes] = []
    security = TlsSecurity(lambda below: Recorder(below, heard))
    with cluster(["0-2", "3-5"], dial_in=dial_in, chunk=2, security=security) as c:
        c.wait_ready()
        with c.backend.lease(PROMPT) as session:
            np.testing.assert_array_equal(session.sync(PROMPT).logits, reference_logits(PROMPT))
            saved = b"".join(session.save())
            for token in (7, 8):
                session.eval(token)
            session.load(saved)
            line = [*PROMPT, 9]
            np.testing.assert_array_equal(session.eval(9), reference_logits(line))
    assert heard.count(b"DS4T") >= 3 + 2  # two links, one between workers; saving, loading
    assert not [part for part in heard if b"DS4D" in part]
