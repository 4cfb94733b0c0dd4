"""The one thread that owns a device.

Owns: the queue in front of a `SliceRunner`, and which waiting spans run together. Refuses to know:
where spans come from, where results go, tensors. Invariant: every call into the runner happens on
this thread; what waits when the device becomes free is the next batch.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, TypeVar

from ds4py.contracts import SessionId, SliceOutput, SliceRunner, SliceWork
from ds4py.errors import CapacityError, ClusterError, Ds4Error

log = logging.getLogger(__name__)
T = TypeVar("T")

_QUEUE_DEPTH: Final = 256
_MAX_BATCH: Final = 32
_CLOSING: Final = "this stage is shutting down"


@dataclass(frozen=True, slots=True)
class DeviceJob:
    """One span on its way through the device.

    Args:
        admit: Called on the device thread right before evaluation; returns the work or raises a
            `Ds4Error` to refuse it.
        finish: Called on the device thread with the output or the error; on the submitting thread
            if the job is refused at the door.
        session: The timeline that the span continues; appears once in a batch.
        is_decode: One token: may share a batch with other sessions' single tokens.
    """

    session: SessionId
    admit: Callable[[], SliceWork]
    finish: Callable[[SliceOutput | Ds4Error], None]
    is_decode: bool = False

    def joins(self, batch: list[DeviceJob]) -> bool:
        """Whether this span may run together with a batch of single tokens."""
        return self.is_decode and all(job.session != self.session for job in batch)


Item = DeviceJob | Callable[[], None] | None
"""What waits for the device; None ends its thread."""


class DeviceThread:
    """Runs jobs and calls in order on one thread.

    Args:
        runner: The slice; closed by `close`.
        name: Thread name.
    """

    def __init__(self, runner: SliceRunner, *, name: str = "device"):
        self.runner = runner
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._held: deque[Item] = deque()
        self._lock = threading.Lock()  # nothing enters the queue behind the None that ends it
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
            if self._queue.qsize() >= _QUEUE_DEPTH:
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

    def call(self, function: Callable[[SliceRunner], T], *, timeout: float) -> T:
        """Run a function on the device thread and wait for its result; raises what it raises."""
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

        refusal = self._enqueue(run)
        if refusal is not None:
            raise refusal
        return _wait(done, timeout)

    def post(self, function: Callable[[SliceRunner], None]) -> None:
        """Run a function on the device thread, after what waits already and with nobody waiting."""

        def run() -> None:
            try:
                function(self.runner)
            except Exception:  # the device must go on
                log.exception("the device failed")

        refusal = self._enqueue(run)
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
        while (item := self._held.popleft() if self._held else self._queue.get()) is not None:
            if isinstance(item, DeviceJob):
                self._run_batch(self._gather(item))
            else:
                item()
        self.runner.close()

    def _gather(self, first: DeviceJob) -> list[DeviceJob]:
        """Take the single tokens of other sessions that wait right behind a single token."""
        batch = [first]
        while first.is_decode and len(batch) < _MAX_BATCH:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if not (isinstance(item, DeviceJob) and item.joins(batch)):
                self._held.append(item)
                break
            batch.append(item)
        return batch

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
