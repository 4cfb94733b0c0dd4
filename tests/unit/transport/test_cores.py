"""Threads stay on the cores that they are given, and nobody else's thread is touched."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from ds4py.config import SocketConfig
from ds4py.transport.cores import keep_off, run_on
from ds4py.transport.outbox import Outbox
from tests.support.clusters import wait_until
from tests.support.sockets import SOCKETS, Background, connected

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs Linux and two cores",
)


def usable() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def on_a_thread(function: Callable[[], object]) -> set[int]:
    """The cores of a new thread after a call; ours must stay as they are."""
    before = os.sched_getaffinity(0)
    after = Background(lambda: (function(), os.sched_getaffinity(0))[1]).result()
    assert os.sched_getaffinity(0) == before
    return after


def test_a_thread_stays_on_its_cores() -> None:
    *_, last = usable()
    assert on_a_thread(lambda: run_on((last,))) == {last}


def test_no_cores_change_nothing() -> None:
    assert on_a_thread(lambda: run_on(())) == set(usable())
    assert on_a_thread(lambda: keep_off(())) == set(usable())


def test_a_thread_keeps_off_cores_and_so_do_those_that_it_starts() -> None:
    last = usable()[-1]
    rest = set(usable()) - {last}
    assert on_a_thread(lambda: keep_off((last,))) == rest

    def start_another() -> set[int]:
        keep_off((last,))
        return Background(lambda: os.sched_getaffinity(0)).result()

    assert Background(start_another).result() == rest


def test_something_is_always_left() -> None:
    assert on_a_thread(lambda: keep_off(usable())) == set(usable())


def test_cores_that_are_gone_are_a_warning(caplog) -> None:
    assert on_a_thread(lambda: run_on((1023,))) == set(usable())
    assert "[1023]" in caplog.text


@pytest.mark.parametrize("pinned", [True, False])
def test_the_sender_of_a_connection_stays_on_its_cores(pinned: bool) -> None:
    last = usable()[-1]
    config: SocketConfig = replace(SOCKETS, cores=(last,) if pinned else ())
    with connected({}, config) as (connection, _):
        box = Outbox(connection, depth=1, name="test send", timeout=10.0)
        (sender,) = (t.native_id for t in threading.enumerate() if t.name == "test send")
        assert sender is not None
        expected = {last} if pinned else set(usable())
        wait_until(lambda: os.sched_getaffinity(sender) == expected, "the sender has moved")
        box.close()
        box.join(10)
