"""The one thread that owns a device.

Owns: the queue in front of a `ModelRunner`, and the calls into it. Refuses to know: where spans
come from, where results go, whose turn it is (`scheduler`), tensors. Invariant: every call into the
runner happens on this thread; what waits when the device becomes free is considered as a whole.

Where the runner allows it, a chunk is started while the one before it is computed: its input is on
the device when that one is done, and that one's output leaves meanwhile. One is ahead at most, and
results are delivered in the order of the starts. Tokens and calls find nothing on its way.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar

from ds4py.contracts import ForwardOutput, ForwardRequest, ModelRunner, PendingForward, SessionId
from ds4py.errors import CapacityError, ClusterError, Ds4Error
from ds4py.stage.mailbox import Mailbox
from ds4py.stage.scheduler import MAX_BATCH, Scheduler, WorkKind, stages_alike

log = logging.getLogger(__name__)
T = TypeVar("T")

_QUEUE_DEPTH: Final = 256
_CLOSING: Final = "this stage is shutting down"
_LOOK_SECONDS: Final = 5e-4  # between two looks at a chunk that is computed: it takes much longer


class DeviceJob(Protocol):
    """One chunk or token on its way through the device; all methods run on the device thread.

    Jobs of one session run in the order of submission; single tokens may share a batch.
    """

    @property
    def session(self) -> SessionId:
        """Its timeline."""

    @property
    def is_decode(self) -> bool:
        """Whether it is a single token."""

    def admit(self) -> ForwardRequest:
        """Return what to evaluate, right before that; raise a `Ds4Error` to refuse."""

    def started(self) -> None:
        """Take note that the runner has accepted it: from now on its tokens count.

        An error that `finish` is told afterwards is the device's.
        """

    def finish(self, result: ForwardOutput | Ds4Error) -> None:
        """Take the output or the error, exactly once."""


@dataclass(frozen=True, slots=True)
class _ControlCall:
    """A function that waits for the device, behind the spans of a session if it is about one."""

    run: Callable[[], None]
    session: SessionId | None


@dataclass(frozen=True, slots=True)
class _StartedJob:
    """A chunk that was started."""

    job: DeviceJob
    started: PendingForward

    @property
    def is_done(self) -> bool:
        """Whether its answer is there, be it that the device is broken."""
        try:
            return self.started.ready()
        except Exception:  # noqa: BLE001 - whatever it is, `complete` will tell
            return True


Item = DeviceJob | _ControlCall
"""What waits for the device."""


class DeviceThread:
    """Runs jobs and calls on one thread, in turns (see `Scheduler`).

    Args:
        runner: The slice; closed by `close`.
        name: Thread name.
        batching: Whether single tokens of different sessions run together.
    """

    def __init__(self, runner: ModelRunner, *, name: str = "device", batching: bool = True):
        self.runner = runner
        self._batch_size = MAX_BATCH if batching else 1
        self._queue: Mailbox[Item | None] = Mailbox()  # None ends the thread
        # touched on the device thread only, except for its length
        self._scheduler: Scheduler[Item] = Scheduler(
            stages_alike(runner.card.n_layers, len(runner.layers))
        )
        self._overlaps = runner.overlaps
        self._ahead: _StartedJob | None = None  # what was started and not yet delivered
        self._lock = threading.Lock()  # nothing enters the queue behind the None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: DeviceJob) -> Ds4Error | None:
        """Queue a job; a refusal is all that becomes of it."""
        return self._enqueue(job)

    def _enqueue(self, item: Item) -> Ds4Error | None:
        """Queue something, or say why not."""
        with self._lock:
            if self._closed:
                return ClusterError(_CLOSING)
            if len(self._queue) + len(self._scheduler) >= _QUEUE_DEPTH:
                return CapacityError(
                    "device queue", needed=_QUEUE_DEPTH + 1, available=_QUEUE_DEPTH
                )
            self._queue.put(item)
        return None

    def ask(
        self, function: Callable[[ModelRunner], T], *, session: SessionId | None = None
    ) -> Future[T]:
        """Run a function on the device thread.

        Args:
            function: Called with the runner.
            session: What was submitted for this session before is evaluated first. Other sessions'
                chunks are not waited for.

        Returns:
            What becomes of it; cancelled before it has begun, it is left out.
        """
        done: Future[T] = Future()
        refusal = self._enqueue(_ControlCall(partial(self._call, function, done), session))
        if refusal is not None:
            done.set_exception(refusal)
        return done

    def _call(self, function: Callable[[ModelRunner], T], done: Future[T]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        if self._closed:
            done.set_exception(ClusterError(_CLOSING))
            return
        try:
            done.set_result(function(self.runner))
        except Ds4Error as e:
            done.set_exception(e)
        except Exception as e:  # a broken device must not end the process silently
            log.exception("the device failed")
            done.set_exception(_broken(e))

    def close(self, *, timeout: float = 30.0) -> None:
        """Finish what is running, refuse the rest, free the device; idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        while self._run_next():
            pass
        for item in self._scheduler.drain():  # none is evaluated any more, but each is told
            self._run_item(item)
        self.runner.close()

    def _run_next(self) -> bool:
        """Run one turn, waiting for it if need be; False at the end."""
        if self._ahead is not None:
            return self._run_behind(self._ahead)
        if not len(self._scheduler):
            item = self._queue.get()
            if item is None:
                return False
            if not len(self._queue) and self._scheduler.target_batch <= 1:
                self._run_lone(item)
                return True
            self._schedule(item)
        if not self._take_in(self._scheduler.max_wait):
            return False
        self._run_scheduled()
        return True

    def _run_behind(self, ahead: _StartedJob) -> bool:
        """Run a turn behind a chunk that was started, or deliver that; False at the end."""
        goes_on = self._await_more(ahead)
        # tokens of another session are to wait for one chunk only
        alone = not self._scheduler.expects_decodes_beside(ahead.job.session, time.monotonic())
        if goes_on and len(self._scheduler) and alone:
            self._run_scheduled()
        else:
            self._settle()
        return goes_on

    def _await_more(self, ahead: _StartedJob) -> bool:
        """Take in what arrives while a chunk is computed; False at the end."""
        while self._take_in(0.0):
            if len(self._scheduler) or ahead.is_done:
                return True
            with suppress(queue.Empty):
                if not self._take_one(_LOOK_SECONDS):
                    return False
        return False

    def _run_lone(self, item: Item) -> None:
        """Run what waits alone, as all do that one session sends: nothing is to be chosen."""
        if not isinstance(item, _ControlCall):
            self._scheduler.went_alone(_kind(item))
            self._run_jobs([item])
        else:
            self._run_item(item)

    def _take_in(self, patience: float) -> bool:
        """Let all that has arrived, or may in so many seconds, take its place; False at the end."""
        deadline = time.monotonic() + patience
        try:
            while self._take_one(self._time_to_wait(deadline)):
                pass
        except queue.Empty:
            return True
        return False

    def _take_one(self, timeout: float) -> bool:
        item = self._queue.get(timeout)
        if item is None:
            return False
        self._schedule(item)
        return True

    def _schedule(self, item: Item) -> None:
        self._scheduler.add(item.session, _kind(item), item)

    def _time_to_wait(self, deadline: float) -> float:
        """Return the seconds that what waits may wait for company."""
        if self._batch_size == 1 or not self._scheduler.wants_more:
            return 0.0
        return max(0.0, deadline - time.monotonic())

    def _run_scheduled(self) -> None:
        scheduled = self._scheduler.next()
        assert scheduled is not None, "something waits, or nothing was taken in"
        for call in scheduled.calls:
            self._run_item(call)
        jobs = [item for item in scheduled.batch if not isinstance(item, _ControlCall)]
        for start in range(0, len(jobs), self._batch_size):
            self._run_jobs(jobs[start : start + self._batch_size])

    def _run_jobs(self, batch: list[DeviceJob]) -> None:
        if not batch[0].is_decode:
            self._run_chunk(batch[0])
            return
        self._settle()
        began = time.monotonic()
        self._run_batch(batch)
        now = time.monotonic()
        self._scheduler.decoded({job.session for job in batch}, now - began, now)

    def _run_chunk(self, chunk: DeviceJob) -> None:
        if not self._overlaps:
            self._run_batch([chunk])
            return
        begun = self._start(chunk)
        self._settle()
        if isinstance(begun, _StartedJob):
            self._ahead = begun
        else:
            _finish(chunk, begun)

    def _run_item(self, item: Item) -> None:
        if not isinstance(item, _ControlCall):
            self._run_batch([item])
        else:
            self._settle()
            item.run()

    def _settle(self) -> None:
        """Wait for what was started, and deliver it."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            (result,) = _answers(ahead.started.complete, 1)
            _finish(ahead.job, result)

    def _run_batch(self, batch: list[DeviceJob]) -> None:
        jobs: list[DeviceJob] = []
        works: list[ForwardRequest] = []
        for job in batch:
            admitted = self._admit(job)
            if isinstance(admitted, ForwardRequest):
                jobs.append(job)
                works.append(admitted)
            else:
                _finish(job, admitted)
        if not works:
            return
        results = _answers(lambda: self.runner.run(works), len(works))
        for job, result in zip(jobs, results, strict=True):
            if isinstance(result, ForwardOutput):
                _started(job)
            _finish(job, result)

    def _admit(self, job: DeviceJob) -> ForwardRequest | Ds4Error:
        if self._closed:
            return ClusterError(_CLOSING)
        try:
            return job.admit()
        except Ds4Error as e:
            return e
        except Exception as e:  # a bug in one span must not stop the others
            log.exception("admission of a span failed")
            return ClusterError(f"internal error: {type(e).__name__}: {e}")

    def _start(self, job: DeviceJob) -> _StartedJob | Ds4Error:
        """Have the device evaluate a span without waiting for it."""
        admitted = self._admit(job)
        if isinstance(admitted, Ds4Error):
            return admitted
        try:
            started = self.runner.forward_async([admitted])
        except Exception as e:  # a broken device must not end the process silently
            log.exception("the device failed")
            return _broken(e)
        if started.refused:
            return started.refused[0]
        _started(job)
        return _StartedJob(job, started)


def _kind(item: Item) -> WorkKind:
    if isinstance(item, _ControlCall):
        return WorkKind.CONTROL
    return WorkKind.DECODE if item.is_decode else WorkKind.PREFILL


def _answers(
    ask: Callable[[], list[ForwardOutput | Ds4Error]], n_spans: int
) -> list[ForwardOutput | Ds4Error]:
    """Return what the device says to so many spans, be it that it is broken."""
    error: Ds4Error
    try:
        results = list(ask())
    except Exception as e:  # a broken device must not end the process silently
        log.exception("the device failed")
        error = _broken(e)
    else:
        if len(results) == n_spans:
            return results
        error = ClusterError(f"the device gave {len(results)} answers to {n_spans} spans")
    return [error] * n_spans


def _broken(error: Exception) -> ClusterError:
    return ClusterError(f"the device failed: {type(error).__name__}: {error}")


def wait_for(done: Future[T], timeout: float) -> T:
    """Return what a device has made of something, or raise its error.

    Args:
        done: What a stage or its device returned.
        timeout: Seconds; afterwards what has not begun is left out.
    """
    try:
        return done.result(timeout)
    except TimeoutError:
        done.cancel()
        raise ClusterError(f"the device gave no answer within {timeout:g} s") from None


def _started(job: DeviceJob) -> None:
    try:
        job.started()
    except Exception:  # the span that follows will be refused
        log.exception("taking note of a span failed")


def _finish(job: DeviceJob, result: ForwardOutput | Ds4Error) -> None:
    try:
        job.finish(result)
    except Exception:  # anyone who waits has its own deadline
        log.exception("delivering the result of a span failed")
