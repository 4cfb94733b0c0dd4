"""Signs of life: sent when nothing else is, missed in time, and never asked of the wrong peer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from socket import socket

import pytest

from ds4py.config import Address, CoordinatorConfig, WorkerConfig
from ds4py.errors import ConfigError, TransportTimeoutError
from ds4py.layer_range import LayerSpec
from ds4py.peer.hello import coordinator_hello
from ds4py.peer.liveness import Heartbeat, agreed_timeout
from ds4py.transport.connection import Connection
from ds4py.transport.outbox import Outbox
from ds4py.wire.extensions import Alive
from tests.support.clusters import wait_until
from tests.support.fake_runner import card
from tests.support.sockets import Background, connected, read_exactly
from tests.support.strategies import joined

ALIVE = joined(Alive().encode())
TIMEOUT = 0.25


@dataclass
class Scene:
    """One end with a heartbeat, the other by hand."""

    connection: Connection
    peer: socket
    outbox: Outbox
    losses: list[TransportTimeoutError] = field(default_factory=list)

    def listen(self) -> Background[None]:
        def run() -> None:
            while self.connection.receive() is not None:
                pass

        return Background(run)


@contextmanager
def scene() -> Iterator[Scene]:
    with connected({257: 0, 3: 1 << 20}) as (connection, peer):
        outbox = Outbox(connection, depth=4, name="test send", timeout=10)
        s = Scene(connection, peer, outbox)
        heartbeat = Heartbeat(connection, outbox, TIMEOUT, s.losses.append)
        try:
            yield s
        finally:
            heartbeat.stop()
            connection.close()
            outbox.close(flush=False)


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"), [(10, 2, 2), (2, 10, 2), (None, 2, None), (2, None, None)]
)
def test_the_smaller_timeout_holds_and_one_side_may_stay_out(ours, theirs, agreed) -> None:
    assert agreed_timeout(ours, theirs) == agreed


def test_a_silent_peer_is_lost_once_and_in_time() -> None:
    with scene() as s:
        start = time.monotonic()
        listening = s.listen()
        wait_until(lambda: bool(s.losses), "the silence is noticed")
        took = time.monotonic() - start
        assert took < TIMEOUT + 1.0  # a busy machine may be late, but not by much
        assert took > TIMEOUT * 0.55
        assert "silent for 0.25 s" in s.losses[0].what
        time.sleep(2 * TIMEOUT)
        assert len(s.losses) == 1
        s.connection.close()
        listening.result()


def test_any_bytes_are_a_sign_of_life_even_a_part_of_a_frame() -> None:
    with scene() as s:
        s.listen()
        s.peer.sendall(b"DS4D" + (3).to_bytes(4, "big") + (1000).to_bytes(4, "big"))
        deadline = time.monotonic() + 3 * TIMEOUT
        while time.monotonic() < deadline:
            s.peer.sendall(b"x")
            time.sleep(TIMEOUT / 10)
        assert not s.losses


def test_whom_we_do_not_listen_to_can_not_be_silent() -> None:
    """A worker that holds back its driver reads nothing for as long as its device takes."""
    with scene() as s:
        time.sleep(3 * TIMEOUT)
        assert not s.losses


def test_it_is_said_again_and_again_when_nothing_else_is() -> None:
    with scene() as s:
        assert read_exactly(s.peer, 4 * len(ALIVE)) == 4 * ALIVE


def test_nothing_is_said_while_something_else_is_on_its_way() -> None:
    """Signs of life would only pile up before a peer that takes nothing."""
    with scene() as s:
        s.outbox.put([bytes(1 << 26)])
        wait_until(lambda: not s.outbox.idle, "the socket is full")
        time.sleep(2 * TIMEOUT)
        assert not s.outbox._waiting
        first = read_exactly(s.peer, len(ALIVE))
        while first == ALIVE:  # what was said before the large one came, on a busy machine
            first = read_exactly(s.peer, len(ALIVE))
        rest = read_exactly(s.peer, (1 << 26) - len(ALIVE))
        assert not any(first)
        assert rest.count(0) == len(rest), "nothing stands in the middle"
        assert read_exactly(s.peer, len(ALIVE)) == ALIVE


def test_a_closed_connection_ends_it() -> None:
    with scene() as s:
        listening = s.listen()
        s.connection.close()
        listening.result()
        time.sleep(2 * TIMEOUT)
        assert not s.losses


@pytest.mark.parametrize("seconds", [-1, 0.1, 86401, float("nan"), float("inf")])
def test_a_timeout_that_no_peer_would_accept_is_refused_at_the_start(seconds) -> None:
    with pytest.raises(ConfigError, match="alive timeout"):
        CoordinatorConfig(alive_timeout=seconds)
    with pytest.raises(ConfigError, match="alive timeout"):
        WorkerConfig(layers=LayerSpec(0, 1), listen=Address("", 0), alive_timeout=seconds)


def test_no_timeout_is_announced_as_none() -> None:
    config = CoordinatorConfig(alive_timeout=0)
    assert coordinator_hello(card(), 64, None, config).alive_timeout is None
