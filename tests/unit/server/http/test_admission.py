"""The gate before the queue: limits on what may be in the server at once."""

import asyncio
import threading
from contextlib import ExitStack

import pytest

from ds4py.errors import RequestError
from ds4py.server.http.admission import AdmissionControl
from tests.unit.server.support import DEADLINE


def intake(**limits):
    return AdmissionControl(**{"max_requests": 2, "max_body_bytes": 100, **limits})


def test_bytes_of_all_requests_count_together_and_are_given_back():
    gate = intake()
    with gate.admitted() as take, gate.admitted() as other:
        take(1500)
        other(100)
        with pytest.raises(RequestError) as refused:
            other(1)
        assert (refused.value.status, refused.value.code) == (503, "server_busy")
    with gate.admitted() as take:
        take(1600)


def fail_with(gate, n_bytes):
    with gate.admitted() as take:
        take(n_bytes)
        raise KeyError


def test_a_request_that_fails_gives_back_what_it_held():
    gate = intake()
    with pytest.raises(KeyError):
        fail_with(gate, 1600)
    with gate.admitted() as take:
        take(1600)


def test_requests_beyond_all_that_could_ever_run_are_refused():
    gate = intake()
    with ExitStack() as inside:
        for _ in range(66):
            inside.enter_context(gate.admitted())
        with pytest.raises(RequestError, match="busy with 66 requests"):
            gate.admitted().__enter__()
    with gate.admitted():
        pass


def test_few_bodies_are_read_at_once_and_all_in_the_end():
    entered, release = [], threading.Event()

    def work(number):
        entered.append(number)
        assert release.wait(DEADLINE)
        return number

    async def go():
        gate = intake()
        async with asyncio.timeout(DEADLINE):
            tasks = [asyncio.create_task(gate.helped(work, n)) for n in range(12)]
            while len(entered) < 4:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(int)  # there are more helpers, and they are free
            inside = list(entered)
            release.set()
            return inside, await asyncio.gather(*tasks)

    inside, results = asyncio.run(go())
    assert inside == [0, 1, 2, 3]
    assert results == list(range(12))


def test_what_the_work_raises_comes_out():
    def work():
        raise RequestError("no", status=400)

    async def go():
        await intake().helped(work)

    with pytest.raises(RequestError, match="no"):
        asyncio.run(go())
