"""Mailbox: order, many writers and readers, waits that end."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from ds4py.stage.mailbox import Mailbox
from tests.support.sockets import Background


def test_items_leave_in_the_order_in_which_they_came() -> None:
    box: Mailbox[int] = Mailbox()
    for number in range(5):
        box.put(number)
    assert len(box) == 5
    assert [box.get(0.0) for _ in range(5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("timeout", [0.0, -1.0, 1e-9, 0.01])
def test_an_empty_box_says_so_in_time(timeout: float) -> None:
    box: Mailbox[int] = Mailbox()
    for _ in range(3):
        box.put(1)
        assert box.get(timeout) == 1  # a bell that still rings is no item
        started = time.monotonic()
        with pytest.raises(queue.Empty):
            box.get(timeout)
        assert time.monotonic() - started < 1


def test_whoever_waits_gets_what_comes() -> None:
    box: Mailbox[str] = Mailbox()
    waiting = [Background(box.get), Background(lambda: box.get(20.0))]
    box.put("one")
    box.put("two")
    assert sorted(one.result() for one in waiting) == ["one", "two"]


def test_one_ring_for_two_items_wakes_both_readers() -> None:
    """The second item is put before the first reader has woken up."""
    for _ in range(200):
        box: Mailbox[int] = Mailbox()
        readers = [Background(lambda box=box: box.get(20.0)) for _ in range(2)]
        box.put(1)
        box.put(2)
        assert {reader.result() for reader in readers} == {1, 2}


def test_nothing_is_lost_and_nothing_twice_among_many_writers_and_readers() -> None:
    box: Mailbox[tuple[int, int]] = Mailbox()
    n_writers, n_readers, n_items = 6, 5, 2000
    found: list[list[tuple[int, int]]] = [[] for _ in range(n_readers)]
    left = threading.Semaphore(n_writers * n_items)

    def write(writer: int) -> None:
        for number in range(n_items):
            box.put((writer, number))

    def read(own: list[tuple[int, int]]) -> None:
        while left.acquire(blocking=False):
            own.append(box.get(20.0))

    threads = [Background(lambda own=own: read(own)) for own in found]
    threads += [Background(lambda writer=writer: write(writer)) for writer in range(n_writers)]
    for thread in threads:
        thread.result()
    everything = [item for own in found for item in own]
    assert sorted(everything) == [(w, n) for w in range(n_writers) for n in range(n_items)]
    for own in found:  # each reader sees each writer's items in order
        for writer in range(n_writers):
            numbers = [number for who, number in own if who == writer]
            assert numbers == sorted(numbers)
    assert not len(box)
