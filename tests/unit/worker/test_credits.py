"""Places: bounded, waited for, given back by anybody."""

from __future__ import annotations

import threading

from ds4py.stage.mailbox import Credits
from tests.sockets import Background


def test_there_are_as_many_places_as_were_made() -> None:
    places = Credits(2)
    assert [places.acquire(timeout=0.0) for _ in range(3)] == [True, True, False]
    places.release()
    assert [places.acquire(timeout=0.0) for _ in range(2)] == [True, False]


def test_whoever_waits_gets_the_next_free_place() -> None:
    places = Credits(0)
    waiting = Background(lambda: places.acquire(timeout=20.0))
    places.release()
    assert waiting.result()


def test_never_more_than_all_places_are_taken_whoever_takes_them() -> None:
    places, inside, most, lock = Credits(3), 0, 0, threading.Lock()

    def use() -> None:
        nonlocal inside, most
        for _ in range(50):
            assert places.acquire(timeout=20.0)
            with lock:
                inside += 1
                most = max(most, inside)
            with lock:
                inside -= 1
            places.release()

    for thread in [Background(use) for _ in range(8)]:
        thread.result()
    assert most <= 3
    assert [places.acquire(timeout=0.0) for _ in range(4)] == [True, True, True, False]
