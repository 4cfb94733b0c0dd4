"""The bridge between the event loop and the generation threads."""

import asyncio
import threading
import time

import pytest

from ds4py.errors import CancelledError, Ds4Error, RequestError
from ds4py.server.requests import queue as jobs_module
from ds4py.server.requests.events import Done, Queued, Started, TextPiece
from ds4py.server.requests.queue import RequestQueue
from ds4py.server.requests.request import CompletionPrompt, GenerationRequest
from ds4py.server.requests.state import RequestState, TokenizedPrompt
from tests.unit.server.support import DEADLINE, GREEDY

FINISHED = Done(finish="stop")


def order(name=1):
    prompt = CompletionPrompt((name,))
    asked = GenerationRequest(prompt=prompt, max_tokens=1, sampling=GREEDY)
    return RequestState(request=asked, prompt=TokenizedPrompt((name,)))


class Work:
    """A function for `RequestQueue` that waits at a door; remembers what ran."""

    def __init__(self, *, n_pieces=1, error=None, until_cancelled=False):
        self.door = threading.Event()
        self.entered = threading.Semaphore(0)
        self.ran = []
        self.threads = set()
        self._n_pieces = n_pieces
        self._error = error
        self._until_cancelled = until_cancelled

    def __call__(self, state, emit, cancelled):
        self.ran.append(state.prompt.ids[0])
        self.threads.add(threading.current_thread().name)
        self.entered.release()
        assert self.door.wait(DEADLINE)
        if self._error:
            raise self._error
        end = time.monotonic() + DEADLINE
        while self._until_cancelled and not cancelled() and time.monotonic() < end:
            time.sleep(0.001)
        if cancelled():
            raise CancelledError("noticed")
        emit(Started(1, 0))
        for number in range(self._n_pieces):
            emit(TextPiece(str(number)))
        return FINISHED

    def wait_entered(self):
        assert self.entered.acquire(timeout=DEADLINE)


def run(scenario, work, *, n_threads=1, max_queue=8):
    """Run an async scenario against fresh jobs and end their threads."""
    queue = RequestQueue(work, n_threads=n_threads, max_queue=max_queue)

    async def bounded():
        async with asyncio.timeout(DEADLINE):
            return await scenario(queue)

    try:
        return asyncio.run(bounded())
    finally:
        work.door.set()
        queue.close(DEADLINE)


async def everything(job):
    events = []
    while not events or not isinstance(events[-1], Done):
        events.append(await job.next())
    return events


def test_events_arrive_in_order_and_end_with_done():
    work = Work(n_pieces=3)
    work.door.set()

    async def scenario(jobs):
        return await everything(jobs.submit(order()))

    assert run(scenario, work) == [
        Started(1, 0),
        TextPiece("0"),
        TextPiece("1"),
        TextPiece("2"),
        FINISHED,
    ]
    assert work.threads == {"ds4-generate-0"}


@pytest.mark.parametrize("error", [Ds4Error("broken"), ZeroDivisionError("a bug")])
def test_whatever_is_raised_becomes_the_end(error):
    work = Work(error=error)
    work.door.set()

    async def scenario(jobs):
        return await everything(jobs.submit(order()))

    assert run(scenario, work) == [Done(finish="error", error=error)]


def test_a_thread_survives_its_failures():
    work = Work(error=ZeroDivisionError())
    work.door.set()

    async def scenario(jobs):
        for _ in range(3):
            await everything(jobs.submit(order()))

    run(scenario, work)
    assert work.threads == {"ds4-generate-0"}


def test_orders_run_first_come_first_served():
    work = Work()

    async def scenario(jobs):
        queued = [jobs.submit(order(name)) for name in range(5)]
        work.door.set()
        for job in queued:
            await everything(job)

    run(scenario, work)
    assert work.ran == [0, 1, 2, 3, 4]


def test_as_many_orders_run_as_there_are_threads():
    work = Work()

    async def scenario(jobs):
        for name in range(3):
            jobs.submit(order(name))
        for _ in range(2):
            await asyncio.to_thread(work.wait_entered)
        return jobs.load

    assert run(scenario, work, n_threads=2) == (2, 1)
    assert work.threads == {"ds4-generate-0", "ds4-generate-1"}


def test_a_full_queue_refuses_with_429():
    work = Work()

    async def scenario(jobs):
        for name in range(3):
            jobs.submit(order(name))
        with pytest.raises(RequestError) as caught:
            jobs.submit(order())
        return caught.value

    error = run(scenario, work, n_threads=1, max_queue=2)
    assert (error.status, error.code) == (429, "queue_full")


def test_a_finished_order_makes_room_at_once():
    work = Work()
    work.door.set()

    async def scenario(jobs):
        for _ in range(50):
            await everything(jobs.submit(order()))

    run(scenario, work, n_threads=1, max_queue=0)


def test_silence_is_reported():
    work = Work()

    async def scenario(jobs):
        return await jobs.submit(order()).next(timeout=0.01)

    assert run(scenario, work) is None


def test_a_waiting_order_that_is_cancelled_never_runs_and_frees_its_place():
    work = Work()

    async def scenario(jobs):
        jobs.submit(order(1))
        await asyncio.to_thread(work.wait_entered)
        waiting = jobs.submit(order(2))
        waiting.cancel()
        assert jobs.load == (1, 0)
        return await everything(waiting)

    place, done = run(scenario, work)
    assert place == Queued(1)
    assert isinstance(done.error, CancelledError)
    assert work.ran == [1]


def test_a_waiting_order_hears_of_its_place_whenever_it_changes():
    work = Work()

    async def scenario(jobs):
        jobs.submit(order(1))
        await asyncio.to_thread(work.wait_entered)
        waiting = [jobs.submit(order(n)) for n in (2, 3, 4)]
        waiting[1].cancel()
        work.door.set()
        return [await everything(job) for job in waiting]

    second, _, fourth = run(scenario, work)
    assert [event for event in second if isinstance(event, Queued)] == [Queued(1)]
    assert [event for event in fourth if isinstance(event, Queued)] == [
        *(Queued(place) for place in (3, 2, 1)),
    ]


def test_a_running_order_sees_its_cancelling():
    work = Work()

    async def scenario(jobs):
        job = jobs.submit(order())
        await asyncio.to_thread(work.wait_entered)
        job.cancel()
        work.door.set()
        return await everything(job)

    (done,) = run(scenario, work)
    assert isinstance(done.error, CancelledError)


def test_closing_answers_what_runs_and_what_waits():
    work = Work(until_cancelled=True)

    async def scenario(jobs):
        submitted = [jobs.submit(order(name)) for name in range(3)]
        await asyncio.to_thread(work.wait_entered)
        closing = asyncio.create_task(asyncio.to_thread(jobs.close, DEADLINE))
        await everything(submitted[2])
        work.door.set()
        ends = [(await everything(job))[-1] for job in submitted[:2]]
        await closing
        with pytest.raises(RequestError) as caught:
            jobs.submit(order())
        return [*(end.error for end in ends), caught.value]

    for error in run(scenario, work):
        assert (error.status, error.code) == (503, "shutting_down")
    assert work.ran == [0]


def test_a_client_that_does_not_read_pauses_the_generation(monkeypatch):
    monkeypatch.setattr(jobs_module, "EVENTS_AHEAD", 4)
    emitted = []
    finished = threading.Event()

    def work(asked, emit, cancelled):
        for number in range(10):
            emit(TextPiece(str(number)))
            emitted.append(number)
            if number == 3:
                finished.set()
        return FINISHED

    work.door = threading.Event()

    async def scenario(jobs):
        job = jobs.submit(order())
        assert await asyncio.to_thread(finished.wait, DEADLINE)
        assert len(emitted) == 4
        return len(await everything(job))

    assert run(scenario, work) == 11


def test_a_client_that_never_reads_counts_as_gone(monkeypatch):
    monkeypatch.setattr(jobs_module, "EVENTS_AHEAD", 2)
    monkeypatch.setattr(jobs_module, "STALL_SECONDS", 0.01)
    gone = threading.Event()

    def work(asked, emit, cancelled):
        try:
            for number in range(10):
                emit(TextPiece(str(number)))
        except CancelledError:
            gone.set()
            raise
        return FINISHED

    work.door = threading.Event()

    async def scenario(jobs):
        job = jobs.submit(order())
        assert await asyncio.to_thread(gone.wait, DEADLINE)
        return await everything(job)

    events = run(scenario, work)
    assert events[:2] == [TextPiece("0"), TextPiece("1")]
    assert isinstance(events[-1].error, CancelledError)


def test_a_generation_outlives_its_event_loop_without_harm():
    work = Work()
    queue = RequestQueue(work, n_threads=1, max_queue=1)

    async def leave():
        queue.submit(order())
        await asyncio.to_thread(work.wait_entered)

    asyncio.run(leave())
    work.door.set()
    queue.close(DEADLINE)
    assert queue.load == (0, 0)


def test_closing_twice_is_harmless():
    queue = RequestQueue(Work(), n_threads=1, max_queue=1)
    queue.close(DEADLINE)
    queue.close(DEADLINE)


def test_closing_with_grace_lets_what_runs_end_and_answers_what_waits():
    work = Work()

    async def scenario(jobs):
        running = jobs.submit(order(1))
        await asyncio.to_thread(work.wait_entered)
        waiting = jobs.submit(order(2))
        closing = asyncio.create_task(asyncio.to_thread(jobs.close, DEADLINE, grace=DEADLINE))
        refused = await everything(waiting)
        work.door.set()
        await closing
        return refused[-1], await everything(running)

    refused, events = run(scenario, work)
    assert refused.error.code == "shutting_down"
    assert events[-1] == FINISHED
    assert work.ran == [1]
