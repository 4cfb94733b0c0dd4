"""Order, bound and end of the queue in front of a connection."""

from __future__ import annotations

import threading

import pytest

from ds4py.config import SocketConfig
from ds4py.errors import PeerClosedError, TransportError, TransportTimeoutError
from ds4py.transport.outbox import Outbox
from tests.support.clusters import wait_until
from tests.support.sockets import Background, connected, read_exactly, read_to_end

BIG = 1 << 25  # beyond all buffers of a connection whose buffers are small
SMALL_BUFFERS = 4096


def outbox(connection, *, depth: int = 4, timeout: float = 10.0) -> Outbox:
    return Outbox(connection, depth=depth, name="test send", timeout=timeout)


def waiting(box: Outbox) -> int:
    return len(box._waiting)


def test_a_small_frame_leaves_on_the_callers_thread() -> None:
    with connected({}) as (connection, peer):
        box, threads = outbox(connection), []
        box.put([b"ab", b"c"], lambda _: threads.append(threading.get_ident()))
        assert read_exactly(peer, 3) == b"abc"
        assert threads == [threading.get_ident()]
        box.close()


def test_a_large_frame_leaves_on_the_outboxs_thread() -> None:
    with connected({}) as (connection, peer):
        box, threads = outbox(connection), []
        box.put([bytes(1 << 20)], lambda _: threads.append(threading.get_ident()))
        assert read_exactly(peer, 1 << 20) == bytes(1 << 20)
        box.close()
        box.join(10)
        assert threads == [box._thread.ident]


def test_frames_leave_in_the_order_of_put_whatever_their_size() -> None:
    frames = [bytes([n]) * (1 if n % 3 else 200_000) for n in range(1, 40)]
    with connected({}, buffer_bytes=SMALL_BUFFERS) as (connection, peer):
        box = outbox(connection)
        putting = Background(lambda: [box.put([f]) for f in frames])
        expected = b"".join(frames)
        assert read_exactly(peer, len(expected)) == expected
        putting.result()
        box.close()


def test_a_small_frame_for_a_full_socket_does_not_hold_the_caller() -> None:
    """The caller may be the device thread: one stalled peer must not stop the others."""
    with connected({}, buffer_bytes=SMALL_BUFFERS) as (connection, peer):
        box, n = outbox(connection, depth=10_000), 600
        for k in range(n):  # far more than the kernel takes; nobody reads
            box.put([bytes([k % 256]) * 60_000])
        assert waiting(box) > 0
        reading = Background(lambda: read_exactly(peer, n * 60_000))
        assert reading.result() == b"".join(bytes([k % 256]) * 60_000 for k in range(n))
        box.close()


def test_a_full_queue_makes_put_wait_and_then_fail() -> None:
    with connected({}, buffer_bytes=SMALL_BUFFERS) as (connection, _):
        box = outbox(connection, depth=1, timeout=0.05)
        box.put([bytes(BIG)])
        wait_until(lambda: waiting(box) == 0, "the thread took the first")
        box.put([bytes(BIG)])
        with pytest.raises(TransportTimeoutError):
            box.put([b"x"])
        box.close(flush=False)


def test_close_ends_a_put_that_waits_for_room() -> None:
    with connected({}, buffer_bytes=SMALL_BUFFERS) as (connection, _):
        box = outbox(connection, depth=1)
        box.put([bytes(BIG)])
        wait_until(lambda: waiting(box) == 0, "the thread took the first")
        box.put([bytes(BIG)])
        third = Background(lambda: box.put([bytes(BIG)]))
        box.close(flush=False)
        with pytest.raises(PeerClosedError):
            third.result()


def test_close_returns_at_once_while_a_send_is_stuck() -> None:
    with connected({}, SocketConfig(buffer_mb=0, send_timeout=600), buffer_bytes=SMALL_BUFFERS) as (
        connection,
        _,
    ):
        box = outbox(connection)
        box.put([bytes(BIG)])
        wait_until(lambda: waiting(box) == 0, "the thread took it")
        Background(box.close).result()
        connection.close()
        box.join(10)
        assert not box._thread.is_alive()


def test_close_sends_what_waits_and_refuses_more() -> None:
    with connected({}, buffer_bytes=SMALL_BUFFERS) as (connection, peer):
        box = outbox(connection)
        for n in range(3):
            box.put([bytes([n]) * 300_000])
        box.close()
        with pytest.raises(PeerClosedError):
            box.put([b"late"])
        reading = Background(lambda: read_exactly(peer, 900_000))
        assert reading.result() == b"".join(bytes([n]) * 300_000 for n in range(3))
        box.join(10)
        assert not box._thread.is_alive()


def test_a_failed_send_closes_the_outbox_and_the_connection() -> None:
    config = SocketConfig(buffer_mb=0, send_timeout=0.1)
    with connected({}, config, buffer_bytes=SMALL_BUFFERS) as (connection, peer):
        box = outbox(connection)
        box.put([bytes(BIG)])
        box.join(10)
        assert connection.closed
        with pytest.raises(PeerClosedError):
            box.put([b"x"])
        assert len(read_to_end(peer)) < BIG


def test_a_failed_inline_send_is_the_callers_error_and_ends_the_thread() -> None:
    with connected({}) as (connection, _):
        box = outbox(connection)
        connection.close()
        with pytest.raises(TransportError):
            box.put([b"x"])
        box.close()
        box.join(10)
        assert not box._thread.is_alive()


def test_a_callback_that_fails_ends_the_connection_instead_of_leaving_it_mute(caplog) -> None:
    def fail(_: float) -> None:
        raise ZeroDivisionError

    with connected({}) as (connection, peer):
        box = outbox(connection)
        box.put([bytes(1 << 20)], fail)
        assert len(read_to_end(peer)) == 1 << 20
        box.join(10)
        assert connection.closed
        with pytest.raises(PeerClosedError):
            box.put([b"x"])
    assert "test send failed" in caplog.text


def test_an_offered_frame_leaves_before_all_that_wait_but_never_inside_one() -> None:
    with connected({}, buffer_bytes=SMALL_BUFFERS) as (connection, peer):
        box = outbox(connection)
        box.put([b"a" * 200_000])  # the caller sends a part, the thread has the rest
        wait_until(lambda: waiting(box) == 0, "the thread sends it")
        box.put([b"b" * 300_000])
        assert box.offer([b"1"])
        assert box.offer([b"2"])
        expected = b"a" * 200_000 + b"21" + b"b" * 300_000
        assert read_exactly(peer, len(expected)) == expected
        box.close()


def test_an_offered_frame_never_stands_inside_one_that_was_begun() -> None:
    """The moment between the caller's part and the thread's rest, held by the lock."""
    with connected({}, buffer_bytes=SMALL_BUFFERS) as (connection, peer):
        box = outbox(connection)
        with box._changed:
            box.put([b"a" * 200_000])
            assert waiting(box) == 1
            assert box.offer([b"1"])
        expected = b"a" * 200_000 + b"1"
        assert read_exactly(peer, len(expected)) == expected
        box.close()


def test_an_offer_never_waits_and_is_left_out_if_there_is_no_end_of_them() -> None:
    with connected({}) as (connection, peer):
        box = outbox(connection, depth=2)
        box.put([bytes(BIG)])
        wait_until(lambda: not box.idle and waiting(box) == 0, "the socket is full")
        taken = 0
        while box.offer([b"x"]):
            taken += 1
        assert 2 < taken < 1000
        assert read_exactly(peer, BIG + taken)[-taken:] == b"x" * taken
        box.close()
        assert not box.offer([b"x"])


def test_an_idle_outbox_sends_an_offer_at_once() -> None:
    with connected({}) as (connection, peer):
        box = outbox(connection)
        assert box.idle
        assert box.offer([b"ab", b"c"])
        assert read_exactly(peer, 3) == b"abc"
        connection.close()
        with pytest.raises(PeerClosedError):
            box.offer([b"x"])
        box.close()
