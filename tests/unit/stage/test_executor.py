"""The one device thread: batches, failures, and nobody left waiting when it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ds4py.contracts import ForwardOutput, ForwardRequest, ModelRunner, OutputKind, SessionId
from ds4py.errors import CapacityError, ClusterError, Ds4Error, ModelError
from ds4py.stage import executor as device_module
from ds4py.stage import scheduler as scheduler_module
from ds4py.stage.executor import DeviceThread, wait_for
from tests.clusters import span, wait_until
from tests.fake_runner import FakeRunner
from tests.sockets import Background


def work(session: int, pos0: int = 0, n: int = 1) -> ForwardRequest:
    return ForwardRequest(
        session=SessionId(session),
        tokens=(1,) * n,
        pos0=pos0,
        hidden=None,
        reset=pos0 == 0,
        output_kind=OutputKind.NOTHING,
    )


class Job:
    """An `executor.DeviceJob` with its outcome."""

    def __init__(self, session: int, pos0: int = 0, n: int = 1, *, error: Exception | None = None):
        self.outcomes: list[ForwardOutput | Ds4Error] = []
        self.session, self.is_decode = SessionId(session), n == 1
        self._work, self._error = work(session, pos0, n), error

    def admit(self) -> ForwardRequest:
        if self._error is not None:
            raise self._error
        return self._work

    def started(self) -> None:
        pass

    def finish(self, result: ForwardOutput | Ds4Error) -> None:
        self.outcomes.append(result)

    @property
    def outcome(self) -> ForwardOutput | Ds4Error:
        wait_until(lambda: bool(self.outcomes), "the job is finished")
        (outcome,) = self.outcomes
        return outcome


class Gate:
    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()

    def __call__(self, _: ForwardRequest) -> None:
        self.entered.set()
        assert self.open.wait(20)


@contextmanager
def gated(*, batching: bool = True) -> Iterator[tuple[DeviceThread, Gate]]:
    """A device that is busy with session 99 until the gate opens."""
    gate = Gate()
    runner = FakeRunner(span("0-5"), n_slots=100, before=gate)
    device = DeviceThread(runner, batching=batching)
    device.submit(Job(99, n=2))
    assert gate.entered.wait(20)
    try:
        yield device, gate
    finally:
        gate.open.set()
        device.close()


def test_all_single_tokens_that_wait_are_one_batch_and_a_chunk_runs_alone() -> None:
    with gated() as (device, gate):
        jobs = [Job(1), Job(2), Job(3), Job(2, pos0=1), Job(4), Job(5, n=3), Job(6)]
        for job in jobs:
            device.submit(job)
        gate.open.set()
        assert all(isinstance(job.outcome, ForwardOutput) for job in jobs)
        # 1 2 3 4 6, the chunk of 5, and 2 again
        assert device.runner.batches == [1, 5, 1, 1]


def test_without_batching_each_token_runs_alone_and_still_before_the_next_chunk() -> None:
    with gated(batching=False) as (device, gate):
        jobs = [Job(1), Job(5, n=3), Job(2), Job(6, n=2), Job(3)]
        for job in jobs:
            device.submit(job)
        gate.open.set()
        assert all(isinstance(job.outcome, ForwardOutput) for job in jobs)
        assert device.runner.batches == [1] * 6
        assert device.runner.evaluated == [(0, 2), (0, 1), (0, 1), (0, 1), (0, 3), (0, 2)]


@pytest.mark.parametrize("batching", [True, False])
def test_a_token_waits_a_moment_for_those_that_came_with_it_before(batching, monkeypatch) -> None:
    monkeypatch.setattr(scheduler_module, "MAX_WAIT_SECONDS", 20.0)
    monkeypatch.setattr(scheduler_module, "_WAIT_PART_OF_BATCH", 1e9)
    with gated(batching=batching) as (device, gate):
        together = [Job(1), Job(2)]
        for job in together:
            device.submit(job)
        gate.open.set()
        assert all(isinstance(job.outcome, ForwardOutput) for job in together)
        first = Job(1, pos0=1)
        device.submit(first)
        if batching:
            wait_until(lambda: len(device._scheduler) == 1, "it is taken in")
            assert not first.outcomes
        else:
            assert isinstance(first.outcome, ForwardOutput)
        second = Job(2, pos0=1)
        device.submit(second)
        assert isinstance(second.outcome, ForwardOutput)
        assert device.runner.batches == ([1, 2, 2] if batching else [1] * 5)
        device.submit(Job(1, pos0=2))  # a chunk is not kept waiting, nor is who waits with it
        chunk = Job(3, n=2)
        device.submit(chunk)
        assert isinstance(chunk.outcome, ForwardOutput)


def test_a_call_about_a_session_runs_behind_its_spans_and_before_those_that_follow() -> None:
    seen: list[tuple[str, int | None]] = []

    def look(word: str) -> Callable[[ModelRunner], None]:
        return lambda runner: seen.append((word, runner.length(SessionId(1))))

    with gated() as (device, gate):
        first, second = Job(1, n=3), Job(1, pos0=3, n=2)
        device.submit(Job(7, n=2))
        device.submit(first)
        device.ask(look("behind the first"), session=SessionId(1))
        device.submit(second)
        device.ask(look("of no session"))
        gate.open.set()
        assert isinstance(second.outcome, ForwardOutput)
    assert seen == [("of no session", None), ("behind the first", 3)]


def test_one_refused_span_does_not_disturb_the_others_of_its_batch() -> None:
    with gated() as (device, gate):
        refused = Job(2, error=ModelError("session", got=1, expected=2))
        good = Job(1)
        broken = Job(3, error=ZeroDivisionError())
        for job in (refused, good, broken):
            device.submit(job)
        gate.open.set()
        assert isinstance(good.outcome, ForwardOutput)
        assert isinstance(refused.outcome, ModelError)
        assert "ZeroDivisionError" in str(broken.outcome)


def test_a_receiver_that_fails_does_not_end_the_device() -> None:
    device = DeviceThread(FakeRunner(span("0-5")))

    class Failing(Job):
        def finish(self, result: ForwardOutput | Ds4Error) -> None:
            raise ZeroDivisionError

    device.submit(Failing(1))
    after = Job(2)
    device.submit(after)
    assert isinstance(after.outcome, ForwardOutput)
    device.close()


def test_a_full_queue_refuses_at_once(monkeypatch) -> None:
    monkeypatch.setattr(device_module, "_QUEUE_DEPTH", 2)
    with gated() as (device, _):
        kept = [Job(1), Job(2)]
        for job in kept:
            device.submit(job)
        assert isinstance(device.submit(Job(3)), CapacityError)
        with pytest.raises(CapacityError):
            wait_for(device.ask(lambda runner: None), 1)
        assert not any(job.outcomes for job in kept)


def test_close_finishes_what_runs_and_refuses_what_waits() -> None:
    with gated() as (device, gate):
        jobs = [Job(n) for n in range(1, 5)]
        for job in jobs:
            device.submit(job)
        calling = Background(lambda: wait_for(device.ask(lambda runner: 1), 20))
        wait_until(lambda: len(device._queue) == 5, "all wait")
        closing = Background(device.close)
        wait_until(lambda: device._closed, "close has begun")
        assert "shutting down" in str(device.submit(Job(9)))
        gate.open.set()
        closing.result()
        for job in jobs:
            assert "shutting down" in str(job.outcome)
        with pytest.raises(ClusterError, match="shutting down"):
            calling.result()
        assert device.runner.closed
        assert device.runner.batches == [1]


def test_jobs_that_race_with_close_are_all_finished_once() -> None:
    for _ in range(20):
        device = DeviceThread(FakeRunner(span("0-5"), n_slots=100))
        barrier = threading.Barrier(2)
        jobs = [Job(n) for n in range(30)]

        def submit(jobs=jobs, device=device, barrier=barrier) -> None:
            barrier.wait()
            for job in jobs:
                refusal = device.submit(job)
                if refusal is not None:
                    job.outcomes.append(refusal)

        submitting = Background(submit)
        barrier.wait()
        device.close()
        submitting.result()
        assert all(len(job.outcomes) == 1 for job in jobs)


def test_waiting_for_a_device_that_hangs_ends() -> None:
    with gated() as (device, _), pytest.raises(ClusterError, match=r"no answer within 0.05 s"):
        wait_for(device.ask(lambda runner: None), 0.05)


def test_a_call_returns_its_value_or_raises_its_error() -> None:
    device = DeviceThread(FakeRunner(span("0-5")))
    assert wait_for(device.ask(lambda runner: runner.n_ctx), 10) == 64

    def broken(_: object) -> None:
        raise ZeroDivisionError("oops")

    def refusing(_: object) -> None:
        raise CapacityError("rows", needed=2, available=1)

    with pytest.raises(ClusterError, match="ZeroDivisionError: oops"):
        wait_for(device.ask(broken), 10)
    with pytest.raises(CapacityError):
        wait_for(device.ask(refusing), 10)
    device.close()


def test_a_posted_function_runs_in_its_turn_and_disturbs_nobody() -> None:
    calls: list[str] = []

    def broken(_: object) -> None:
        raise ZeroDivisionError("oops")

    with gated() as (device, gate):
        job = Job(1)
        device.submit(job)
        device.ask(broken, session=SessionId(1))
        device.ask(
            lambda runner: calls.append(f"{len(runner.batches)} batches before"),
            session=SessionId(1),
        )
        assert not calls
        gate.open.set()
        assert isinstance(job.outcome, ForwardOutput)
        wait_until(lambda: calls == ["2 batches before"], "it ran behind both spans")
    device.ask(lambda runner: calls.append("too late"))
    assert len(calls) == 1
