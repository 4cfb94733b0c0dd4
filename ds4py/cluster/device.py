"""The one thread that owns a device.

Owns: the queue in front of a `SliceRunner`, and the calls into it. Refuses to know: where spans
come from, where results go, whose turn it is (`turns`), tensors. Invariant: every call into the
runner happens on this thread; what waits when the device becomes free is considered as a whole.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, TypeVar

from ds4py.cluster.gather import Gather, stages_alike
from ds4py.cluster.turns import MAX_BATCH, Kind, Turns
from ds4py.contracts import SessionId, SliceOutput, SliceRunner, SliceWork
from ds4py.errors import CapacityError, ClusterError, Ds4Error

log = logging.getLogger(__name__)
T = TypeVar("T")

_QUEUE_DEPTH: Final = 256
_CLOSING: Final = "this stage is shutting down"


@dataclass(frozen=True, slots=True)
class DeviceJob:
    """One span on its way through the device.

    Args:
        admit: Called on the device thread right before evaluation; returns the work or raises a
            `Ds4Error` to refuse it.
        finish: Called on the device thread with the output or the error; on the submitting thread
            if the job is refused at the door.
        session: The timeline that the span continues; its spans run in the order of submission.
        is_decode: One token: may share a batch with other sessions' single tokens.
    """

    session: SessionId
    admit: Callable[[], SliceWork]
    finish: Callable[[SliceOutput | Ds4Error], None]
    is_decode: bool = False


@dataclass(frozen=True, slots=True)
class _Call:
    """A function that waits for the device, behind the spans of a session if it is about one."""

    run: Callable[[], None]
    session: SessionId | None


Item = DeviceJob | _Call
"""What waits for the device."""


class DeviceThread:
    """Runs jobs and calls on one thread, in turns (see `Turns`).

    Args:
        runner: The slice; closed by `close`.
        name: Thread name.
        batching: Whether single tokens of different sessions run together.
    """

    def __init__(self, runner: SliceRunner, *, name: str = "device", batching: bool = True):
        self.runner = runner
        self._batch_size = MAX_BATCH if batching else 1
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()  # None ends the thread
        self._turns: Turns[Item] = Turns()  # touched on the device thread only, but for its length
        self._gather = Gather(stages_alike(runner.card.n_layers, len(runner.span)))
        self._lock = threading.Lock()  # nothing enters the queue behind the None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: DeviceJob) -> None:
        """Queue a job; `finish` is called exactly once, at once if the job is refused."""
        refusal = self._enqueue(job)
        if refusal is not None:
            _finish(job, refusal)

    def _enqueue(self, item: Item) -> Ds4Error | None:
        """Queue something, or say why not."""
        with self._lock:
            if self._closed:
                return ClusterError(_CLOSING)
            if self._queue.qsize() + len(self._turns) >= _QUEUE_DEPTH:
                return CapacityError(
                    "device queue", needed=_QUEUE_DEPTH + 1, available=_QUEUE_DEPTH
                )
            self._queue.put(item)
        return None

    def evaluate(
        self, work: SliceWork, *, timeout: float, prepare: Callable[[SliceRunner], None]
    ) -> SliceOutput:
        """Run one span and wait for it; raises what the runner reports.

        Args:
            work: The span.
            timeout: Seconds to wait.
            prepare: Called on the device thread right before evaluation; may refuse by raising.
        """
        done: Future[SliceOutput] = Future()

        def finish(result: SliceOutput | Ds4Error) -> None:
            if isinstance(result, Ds4Error):
                done.set_exception(result)
            else:
                done.set_result(result)

        def admit() -> SliceWork:
            prepare(self.runner)
            return work

        self.submit(DeviceJob(work.session, admit, finish, is_decode=len(work.tokens) == 1))
        return _wait(done, timeout)

    def call(
        self,
        function: Callable[[SliceRunner], T],
        *,
        timeout: float,
        session: SessionId | None = None,
    ) -> T:
        """Run a function on the device thread and wait for its result; raises what it raises.

        Args:
            function: Called with the runner.
            timeout: Seconds to wait.
            session: What was submitted for this session before is evaluated first. Other sessions'
                chunks are not waited for.
        """
        done: Future[T] = Future()

        def run() -> None:
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

        refusal = self._enqueue(_Call(run, session))
        if refusal is not None:
            raise refusal
        return _wait(done, timeout)

    def post(
        self, function: Callable[[SliceRunner], None], *, session: SessionId | None = None
    ) -> None:
        """Run a function on the device thread with nobody waiting; otherwise as `call`."""

        def run() -> None:
            try:
                function(self.runner)
            except Exception:  # the device must go on
                log.exception("the device failed")

        refusal = self._enqueue(_Call(run, session))
        if refusal is not None:
            log.debug("left out: %s", refusal)

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
        for item in self._turns.drain():  # none is evaluated any more, but each is told
            self._run_item(item)
        self.runner.close()

    def _run_next(self) -> bool:
        """Run one turn, waiting for it if need be; False at the end."""
        if not len(self._turns):
            item = self._queue.get()
            if item is None:
                return False
            if self._queue.empty() and self._gather.wanted <= 1:
                self._run_lone(item)
                return True
            self._place(item)
        if not self._take_in():
            return False
        self._run_turn()
        return True

    def _run_lone(self, item: Item) -> None:
        """Run what waits alone, as all do that one session sends: nothing is to be chosen."""
        if isinstance(item, DeviceJob):
            self._turns.went_alone(_kind(item))
            self._run_jobs([item])
        else:
            item.run()

    def _take_in(self) -> bool:
        """Let all that has arrived take its place; False at the end."""
        deadline = time.monotonic() + self._gather.patience
        try:
            while self._take_one(self._hope(deadline)):
                pass
        except queue.Empty:
            return True
        return False

    def _take_one(self, timeout: float) -> bool:
        item = self._queue.get(timeout=timeout)
        if item is None:
            return False
        self._place(item)
        return True

    def _place(self, item: Item) -> None:
        self._turns.add(item.session, _kind(item), item)

    def _hope(self, deadline: float) -> float:
        """Return the seconds that what waits may wait for company."""
        enough = len(self._turns) >= self._gather.wanted or self._batch_size == 1
        if enough or not self._turns.only_singles:
            return 0.0
        return max(0.0, deadline - time.monotonic())

    def _run_turn(self) -> None:
        turn = self._turns.next()
        assert turn is not None, "something waits, or nothing was taken in"
        for call in turn.calls:
            self._run_item(call)
        jobs = [item for item in turn.batch if isinstance(item, DeviceJob)]
        for start in range(0, len(jobs), self._batch_size):
            self._run_jobs(jobs[start : start + self._batch_size])

    def _run_jobs(self, batch: list[DeviceJob]) -> None:
        began = time.monotonic()
        self._run_batch(batch)
        if batch[0].is_decode:
            self._gather.ran([job.session for job in batch], time.monotonic() - began)

    def _run_item(self, item: Item) -> None:
        if isinstance(item, DeviceJob):
            self._run_batch([item])
        else:
            item.run()

    def _run_batch(self, batch: list[DeviceJob]) -> None:
        admitted: list[tuple[DeviceJob, SliceWork]] = []
        for job in batch:
            if self._closed:
                _finish(job, ClusterError(_CLOSING))
                continue
            try:
                admitted.append((job, job.admit()))
            except Ds4Error as e:
                _finish(job, e)
            except Exception as e:  # a bug in one span must not stop the others
                log.exception("admission of a span failed")
                _finish(job, ClusterError(f"internal error: {type(e).__name__}: {e}"))
        results = self._evaluate([work for _, work in admitted])
        for (job, _), result in zip(admitted, results, strict=True):
            _finish(job, result)

    def _evaluate(self, works: list[SliceWork]) -> list[SliceOutput | Ds4Error]:
        if not works:
            return []
        error: Ds4Error
        try:
            results = list(self.runner.run(works))
        except Exception as e:  # a broken device must not end the process silently
            log.exception("the device failed")
            error = _broken(e)
        else:
            if len(results) == len(works):
                return results
            error = ClusterError(f"the device gave {len(results)} answers to {len(works)} spans")
        return [error for _ in works]


def _kind(item: Item) -> Kind:
    if isinstance(item, _Call):
        return Kind.CALL
    return Kind.SINGLE if item.is_decode else Kind.CHUNK


def _broken(error: Exception) -> ClusterError:
    return ClusterError(f"the device failed: {type(error).__name__}: {error}")


def _wait(done: Future[T], timeout: float) -> T:
    try:
        return done.result(timeout)
    except TimeoutError:
        raise ClusterError(f"the device gave no answer within {timeout:g} s") from None


def _finish(job: DeviceJob, result: SliceOutput | Ds4Error) -> None:
    try:
        job.finish(result)
    except Exception:  # whoever waits has its own deadline
        log.exception("delivering the result of a span failed")
