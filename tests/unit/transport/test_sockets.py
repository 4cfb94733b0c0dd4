"""Options, the retry policy of connects, listeners."""

from __future__ import annotations

import errno
import logging
import socket
import struct

import pytest

from ds4py.config import Address, SocketConfig
from ds4py.errors import ConfigError, ConnectError
from ds4py.transport import sockets
from ds4py.transport.sockets import Listener, connect, listen, local_address, peer_address
from tests.support.sockets import SOCKETS, Background, tcp_pair

LOOPBACK = Address("127.0.0.1", 0)


def seconds(sock: socket.socket, option: int) -> float:
    whole, micro = struct.unpack("ll", sock.getsockopt(socket.SOL_SOCKET, option, 16))
    return whole + micro / 1e6


def check_options(sock: socket.socket, send: float, receive: float) -> None:
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert seconds(sock, socket.SO_SNDTIMEO) == pytest.approx(send, abs=0.01)
    assert seconds(sock, socket.SO_RCVTIMEO) == pytest.approx(receive, abs=0.01)


@pytest.mark.parametrize(("receive", "expected"), [(None, 0.0), (2.5, 2.5)])
def test_every_connection_carries_the_options(receive, expected) -> None:
    config = SocketConfig(buffer_mb=1, send_timeout=7, recv_timeout=receive)
    listener = Listener(LOOPBACK, config)
    accepting = Background(listener.accept)
    dialled = connect(listener.address, config)
    accepted = accepting.result()
    assert accepted is not None
    with dialled, accepted:
        for sock in (dialled, accepted):
            check_options(sock, 7, expected)
            assert sock.getblocking()
    listener.close()


def test_buffer_sizes_are_set_only_if_asked_for() -> None:
    with socket.socket() as plain, socket.socket() as left, socket.socket() as tuned:
        sockets.set_options(left, SocketConfig(buffer_mb=0))
        sockets.set_options(tuned, SocketConfig(buffer_mb=1))
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            size = plain.getsockopt(socket.SOL_SOCKET, option)
            assert left.getsockopt(socket.SOL_SOCKET, option) == size
            assert tuned.getsockopt(socket.SOL_SOCKET, option) > size


def test_an_option_that_the_system_refuses_is_no_error() -> None:
    ours, theirs = socket.socketpair()  # no TCP: no TCP_NODELAY
    with ours, theirs:
        sockets.set_options(ours, SOCKETS)
        assert seconds(ours, socket.SO_SNDTIMEO) == pytest.approx(10, abs=0.01)


class Attempts:
    """Counts attempts of a connect that always fails with one error, without waiting."""

    def __init__(self, monkeypatch, code: int):
        self.pauses: list[float] = []
        self.made = 0
        self._code = code
        monkeypatch.setattr(sockets, "_connect_once", self._attempt)
        monkeypatch.setattr(sockets.time, "sleep", self.pauses.append)

    def _attempt(self, address, config):
        self.made += 1
        raise OSError(self._code, "the reason")


@pytest.mark.parametrize(
    "code",
    [
        errno.ECONNREFUSED,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.ETIMEDOUT,
        errno.EADDRNOTAVAIL,
    ],
)
def test_what_may_pass_is_tried_200_times_every_25_ms(monkeypatch, code) -> None:
    attempts = Attempts(monkeypatch, code)
    with pytest.raises(ConnectError, match=r"127.0.0.1:9: unable to connect: the reason"):
        connect(Address("127.0.0.1", 9), SOCKETS)
    assert (attempts.made, attempts.pauses) == (200, [0.025] * 199)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, -2])
def test_any_other_error_gives_up_at_once(monkeypatch, code) -> None:
    attempts = Attempts(monkeypatch, code)
    with pytest.raises(ConnectError, match="the reason"):
        connect(Address("127.0.0.1", 9), SOCKETS)
    assert attempts.made == 1


def test_a_connect_beyond_the_send_timeout_says_that_it_timed_out(monkeypatch) -> None:
    attempts = Attempts(monkeypatch, errno.EINPROGRESS)
    with pytest.raises(ConnectError, match="timed out"):
        connect(Address("192.0.2.1", 9), SOCKETS)
    assert attempts.made == 1


def test_stopping_ends_the_retries(monkeypatch) -> None:
    attempts = Attempts(monkeypatch, errno.ECONNREFUSED)
    with pytest.raises(ConnectError):
        connect(Address("127.0.0.1", 9), SOCKETS, stopped=lambda: attempts.made == 3)
    assert attempts.made == 3


def test_a_listener_that_comes_up_later_is_reached() -> None:
    free = listen(LOOPBACK)
    address = local_address(free)
    free.close()
    tries = 0

    def starts_after_three() -> bool:
        nonlocal tries
        tries += 1
        if tries == 4:
            started.append(listen(address))
        return False

    started: list[socket.socket] = []
    with connect(address, SOCKETS, stopped=starts_after_three) as sock:
        assert peer_address(sock) == address
    started[0].close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", ""])
def test_a_wildcard_can_not_be_dialled(host) -> None:
    with pytest.raises(ConnectError, match="cannot be dialled"):
        connect(Address(host, 8000), SOCKETS)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 300, "ÿþ"])
def test_a_host_that_is_no_host_is_a_connect_error(host) -> None:
    """Such names may stand in a route that a peer sends."""
    with pytest.raises(ConnectError, match="unable to connect"):
        connect(Address(host, 8000), SOCKETS)


def test_the_source_address_is_bound() -> None:
    with ListenerHere() as listener:
        config = SocketConfig(buffer_mb=0, bind_host="127.0.0.2")
        with connect(listener.address, config) as sock:
            assert local_address(sock).host == "127.0.0.2"


def test_a_source_address_that_is_not_ours_is_a_connect_error() -> None:
    with ListenerHere() as listener:
        config = SocketConfig(buffer_mb=0, bind_host="192.0.2.1")
        with pytest.raises(ConnectError, match="unable to connect"):
            connect(listener.address, config, rounds=1)


def test_an_interface_that_does_not_exist_is_a_connect_error() -> None:
    with ListenerHere() as listener:
        config = SocketConfig(buffer_mb=0, bind_interface="nosuchif0")
        with pytest.raises(ConnectError, match="unable to connect"):
            connect(listener.address, config, rounds=1)


def test_the_trace_tells_every_attempt(monkeypatch, caplog) -> None:
    Attempts(monkeypatch, errno.ECONNREFUSED)
    config = SocketConfig(buffer_mb=0, connect_trace=True)
    with caplog.at_level(logging.INFO), pytest.raises(ConnectError):
        connect(Address("127.0.0.1", 9), config, rounds=3)
    assert [r.message.partition(", ")[2][:9] for r in caplog.records] == [
        f"attempt {n}" for n in (1, 2, 3)
    ]


class ListenerHere:
    """A listener on loopback, closed at the end."""

    def __enter__(self) -> Listener:
        self._listener = Listener(LOOPBACK, SOCKETS)
        return self._listener

    def __exit__(self, *_) -> None:
        self._listener.close()


def test_close_wakes_accept() -> None:
    listener = Listener(LOOPBACK, SOCKETS)
    accepting = Background(listener.accept)
    listener.close()
    listener.close()
    assert accepting.result() is None
    assert listener.accept() is None


def test_a_caller_that_is_gone_again_does_not_end_the_listener() -> None:
    with ListenerHere() as listener:
        gone = socket.create_connection((listener.address.host, listener.address.port))
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()
        with connect(listener.address, SOCKETS) as dialled:
            name = dialled.getsockname()
            while (sock := Background(listener.accept).result()) is not None:
                with sock:
                    if _peer(sock) == name:
                        return


def _peer(sock: socket.socket) -> object:
    try:
        return sock.getpeername()
    except OSError:
        return None


def test_failing_accepts_are_logged_once_and_end_with_the_trouble(monkeypatch, caplog) -> None:
    """Out of descriptors, accept fails many times a second."""
    with ListenerHere() as listener:
        failures = 5

        class Failing:
            def accept(self):
                nonlocal failures
                if failures:
                    failures -= 1
                    raise OSError(errno.EMFILE, "Too many open files")
                return listener_socket.accept()

            def __getattr__(self, name):
                return getattr(listener_socket, name)

        listener_socket = listener._sock
        monkeypatch.setattr(listener, "_sock", Failing())
        monkeypatch.setattr(sockets, "RETRY_PAUSE", 0.0)
        with connect(listener.address, SOCKETS):
            accepted = Background(listener.accept).result()
            assert accepted is not None
            accepted.close()
    assert failures == 0
    assert len([r for r in caplog.records if "Too many open files" in r.message]) == 1


def test_a_port_in_use_is_explained() -> None:
    with (
        ListenerHere() as listener,
        pytest.raises(ConfigError, match=r"127.0.0.1:\d+: Address already in use; choose another"),
    ):
        Listener(listener.address, SOCKETS)


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("192.0.2.1", "Cannot assign requested address"),
        ("no-such-host.invalid", "use another host"),
        ("a..b", "no name and no address"),
    ],
)
def test_an_address_that_is_not_ours_is_explained(host, reason) -> None:
    with pytest.raises(ConfigError, match=reason):
        listen(Address(host, 0))


@pytest.mark.parametrize("host", ["", "*"])
def test_no_host_listens_on_all_addresses(host) -> None:
    with listen(Address(host, 0)) as sock:
        port = local_address(sock).port
        with connect(Address("127.0.0.1", port), SOCKETS, rounds=1) as dialled:
            assert peer_address(dialled).port == port


def test_ipv6_works_like_ipv4() -> None:
    try:
        listener = Listener(Address("::1", 0), SOCKETS)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    accepting = Background(listener.accept)
    with connect(listener.address, SOCKETS, rounds=1) as dialled:
        assert str(peer_address(dialled)) == f"[::1]:{listener.address.port}"
        accepted = accepting.result()
        assert accepted is not None
        accepted.close()
    listener.close()


def test_shutting_down_wakes_whoever_waits_and_twice_is_no_error() -> None:
    with tcp_pair() as (ours, _):
        reading = Background(lambda: ours.recv(1))
        sockets.shut_down(ours)
        sockets.shut_down(ours)
        assert reading.result() == b""
