"""Frames over real sockets: however the bytes come, whichever side ends the connection."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.config import SocketConfig
from ds4py.errors import (
    ConnectError,
    PeerClosedError,
    RemoteProtocolError,
    TransportTimeoutError,
)
from ds4py.wire.frames import encode_frame
from tests.clusters import wait_until
from tests.sockets import (
    Background,
    connected,
    frames_over,
    read_exactly,
    read_to_end,
    tcp_pair,
)

LIMITS = {3: 1 << 20, 4: 1 << 24}


def frame(frame_type: int, body: bytes) -> bytes:
    return b"".join(encode_frame(frame_type, body))


def abort(sock: socket.socket) -> None:
    """Close with a reset instead of an orderly end."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@given(
    st.lists(st.tuples(st.sampled_from([3, 4, 77]), st.binary(max_size=300)), max_size=4),
    st.lists(st.integers(1, 60), min_size=1, max_size=20),
)
def test_frames_come_out_as_they_went_in_however_the_stream_is_split(frames, sizes) -> None:
    stream = b"".join(frame(t, body) for t, body in frames)

    def send(sock: socket.socket) -> None:
        at, turn = 0, 0
        while at < len(stream):
            step = sizes[turn % len(sizes)]
            sock.sendall(stream[at : at + step])
            at, turn = at + step, turn + 1
        sock.shutdown(socket.SHUT_WR)

    with connected(LIMITS) as (connection, peer):
        sender = Background(lambda: send(peer))
        for frame_type, body in frames:
            got = connection.receive()
            assert got is not None
            assert got.type == frame_type
            assert got.discarded == (frame_type not in LIMITS)
            assert bytes(got.body) == (b"" if got.discarded else body)
        assert connection.receive() is None
        sender.result()


@pytest.mark.parametrize("kept", [1, 4, 11, 12, 13, 19])
def test_an_end_inside_a_frame_is_a_lost_peer(kept: int) -> None:
    with connected(LIMITS) as (connection, peer):
        peer.sendall(frame(3, b"12345678")[:kept])
        peer.close()
        with pytest.raises(PeerClosedError, match="in the middle of a frame"):
            connection.receive()


def test_a_reset_is_a_lost_peer() -> None:
    with connected(LIMITS) as (connection, peer):
        peer.sendall(frame(3, b"12345678")[:10])
        abort(peer)
        with pytest.raises(PeerClosedError, match="connection lost"):
            connection.receive()


def test_a_frame_beyond_its_limit_is_refused_before_memory_is_taken(monkeypatch) -> None:
    taken: list[int] = []
    from ds4py.transport import connection as module

    monkeypatch.setattr(module, "_allocate", lambda n: taken.append(n) or memoryview(bytearray(n)))
    with connected({3: 100}) as (connection, peer):
        peer.sendall(struct.pack(">4sII", b"DS4D", 3, 101))
        with pytest.raises(RemoteProtocolError, match="101 bytes, at most 100"):
            connection.receive()
    assert not taken


def test_expect_changes_the_limits_between_frames() -> None:
    with connected({3: 10}) as (connection, peer):
        peer.sendall(frame(3, b"a") + frame(4, b"b"))
        assert connection.receive() is not None
        connection.expect({4: 10})
        second = connection.receive()
        assert second is not None
        assert (second.type, second.discarded, bytes(second.body)) == (4, False, b"b")


def test_silence_ends_a_timed_receive_and_the_connection_lives_on() -> None:
    with connected(LIMITS) as (connection, peer):
        with pytest.raises(TransportTimeoutError, match="sent nothing"):
            connection.receive(timeout=0.05)
        peer.sendall(frame(3, b"late"))
        got = connection.receive()
        assert got is not None
        assert bytes(got.body) == b"late"


def test_a_byte_now_and_then_does_not_stretch_a_timed_receive() -> None:
    with connected(LIMITS) as (connection, peer):
        stop = threading.Event()

        def drip() -> None:
            for byte in frame(3, bytes(1000)):
                if stop.wait(0.02):
                    return
                peer.sendall(bytes([byte]))

        dripping = threading.Thread(target=drip)
        dripping.start()
        with pytest.raises(TransportTimeoutError, match=r"in time|too long"):
            connection.receive(timeout=0.1)
        stop.set()
        dripping.join()


def test_the_configured_receive_timeout_holds_without_another() -> None:
    with (
        connected(LIMITS, SocketConfig(buffer_mb=0, recv_timeout=0.05)) as (connection, _),
        pytest.raises(TransportTimeoutError),
    ):
        connection.receive()


def test_a_peer_that_takes_nothing_ends_the_send_and_the_connection() -> None:
    config = SocketConfig(buffer_mb=0, send_timeout=0.1)
    with connected(LIMITS, config, buffer_bytes=4096) as (connection, _):
        with pytest.raises(TransportTimeoutError, match="took no data"):
            connection.send([bytes(1 << 24)])
        assert connection.closed
        with pytest.raises(PeerClosedError):
            connection.send([b"more"])
        assert connection.receive() is None


def test_sending_to_a_peer_that_is_gone_closes_the_connection() -> None:
    with connected(LIMITS) as (connection, peer):
        abort(peer)
        wait_until(lambda: _is_gone(connection.stream.sock), "the reset arrived")
        with pytest.raises(PeerClosedError, match="connection lost"):
            connection.send(encode_frame(3, b"x"))
        assert connection.closed


def test_frames_sent_from_several_threads_never_interleave() -> None:
    n_threads, n_frames = 4, 20
    with connected(LIMITS, buffer_bytes=8192) as (connection, peer):

        def send(letter: int) -> None:
            for n in range(n_frames):
                body = bytes([letter]) * (1 + 997 * n)
                connection.send(encode_frame(3, body[:7], body[7:]))

        senders = [Background(lambda k=k: send(k)) for k in range(n_threads)]
        seen: dict[int, list[int]] = {k: [] for k in range(n_threads)}
        for _ in range(n_threads * n_frames):
            magic, frame_type, size = struct.unpack(">4sII", read_exactly(peer, 12))
            body = read_exactly(peer, size)
            assert (magic, frame_type) == (b"DS4D", 3)
            assert len(set(body)) == 1
            seen[body[0]].append(len(body))
        for sender in senders:
            sender.result()
    assert all(sizes == [1 + 997 * n for n in range(n_frames)] for sizes in seen.values())


def test_many_pieces_and_empty_ones_leave_in_order() -> None:
    pieces = [bytes([n % 251]) * (n % 3) for n in range(3000)]
    with connected(LIMITS) as (connection, peer):
        connection.send(pieces)
        connection.close()
        assert read_to_end(peer) == b"".join(pieces)


def test_send_now_returns_what_the_socket_did_not_take_and_never_waits() -> None:
    body = bytes(range(256)) * 65536
    with connected(LIMITS, buffer_bytes=4096) as (connection, peer):
        rest = connection.send_now([body[:100], body[100:]])
        left = sum(len(piece) for piece in rest)
        assert 0 < left < len(body)
        sender = Background(lambda: connection.send(rest))
        assert read_exactly(peer, len(body)) == body
        sender.result()
        assert not connection.send_now([b"small"])
        assert read_exactly(peer, 5) == b"small"


def test_close_wakes_a_blocked_reader() -> None:
    with connected(LIMITS) as (connection, _):
        reader = Background(connection.receive)
        wait_until(lambda: connection.receiving, "the reader waits")
        connection.close()
        assert reader.result() is None


def test_close_wakes_a_blocked_sender() -> None:
    with connected(LIMITS, buffer_bytes=4096) as (connection, _):
        sender = Background(lambda: connection.send([bytes(1 << 25)]))
        wait_until(lambda: connection._sending, "the sender waits")
        connection.close()
        with pytest.raises(PeerClosedError):
            sender.result()


def test_the_descriptor_stays_open_while_a_thread_uses_it() -> None:
    """Closed at once, its number could be given to a new connection that the thread then robs."""
    with connected(LIMITS) as (connection, _):
        connection.receiving = connection._sending = True  # both have raised their flag already
        connection.close()
        assert connection.stream.sock.fileno() >= 0
        assert connection.receive() is None
        assert connection.stream.sock.fileno() >= 0
        with pytest.raises(PeerClosedError):
            connection.send([b"x"])
        assert connection.stream.sock.fileno() == -1


def test_a_descriptor_that_nobody_uses_is_given_back_by_close() -> None:
    with connected(LIMITS) as (connection, _):
        connection.close()
        assert connection.stream.sock.fileno() == -1


def test_close_from_many_threads_at_once_is_one_close() -> None:
    with connected(LIMITS) as (connection, peer):
        barrier = threading.Barrier(8)

        def close() -> None:
            barrier.wait()
            connection.close()

        for closer in [Background(close) for _ in range(8)]:
            closer.result()
        assert read_to_end(peer) == b""
        assert connection.receive() is None


def test_a_peer_that_left_before_we_looked_is_an_error_that_leaves_no_socket() -> None:
    with tcp_pair() as (ours, theirs):
        abort(theirs)
        wait_until(lambda: _is_gone(ours), "the reset arrived")
        with pytest.raises(ConnectError):
            frames_over(ours, LIMITS)
        assert ours.fileno() == -1


def _is_gone(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return True
    with contextlib.suppress(OSError):
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return False


def test_both_ends_are_named_by_numbers() -> None:
    with connected(LIMITS) as (connection, peer):
        assert str(connection.peer) == "{}:{}".format(*peer.getsockname())
        assert str(connection.local) == "{}:{}".format(*peer.getpeername())
