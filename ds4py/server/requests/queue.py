"""The one bridge between the event loop and the threads that generate.

Owns: a fixed number of generation threads, the queue before them, and the crossing of events back
to the loop. Refuses to know: HTTP, models, what a request means; it runs one function.
Invariant: each submitted request ends with exactly one `Done`, whether it ran, failed, or never
started; and after `cancel` its function is asked to stop at its next look.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ds4py.contracts import Cancelled
from ds4py.errors import CancelledError, Ds4Error, RequestError
from ds4py.server.errors import shutting_down
from ds4py.server.requests.events import Done, Early, Emit, Queued, ReplyEvent
from ds4py.server.requests.state import RequestState

_log = logging.getLogger(__name__)

EVENTS_AHEAD: Final = 256
"""Events that may wait for a slow client before its generation pauses."""

STALL_SECONDS: Final = 60.0
"""Pause after which a client that takes nothing counts as gone."""

RunRequest = Callable[[RequestState, Emit, Cancelled], Done]
"""Performs a request on a generation thread; returns its end, or raises to fail it."""


class RequestHandle:
    """One request between its HTTP handler (event loop) and a generation thread.

    Args:
        state: Of the request; the generation thread's alone once it takes the handle.
        forget: Takes the handle out of the queue if it still waits there; tells whether it did.
    """

    def __init__(self, state: RequestState, forget: Callable[[RequestHandle], bool]):
        self.state = state
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[ReplyEvent] = asyncio.Queue()
        self._room = threading.Semaphore(EVENTS_AHEAD)
        self._cancelled = threading.Event()
        self._queue_position = 0
        self._reason: Ds4Error = CancelledError("the client is gone")

    async def next(self, timeout: float | None = None) -> ReplyEvent | None:
        """Return the next event, or None after `timeout` seconds of silence (event loop only)."""
        try:
            async with asyncio.timeout(timeout):
                event = await self._events.get()
        except TimeoutError:
            return None
        self._room.release()
        return event

    def cancel(self, reason: Ds4Error | None = None) -> None:
        """Ask the work to stop; from any thread, any number of times.

        Args:
            reason: What the request's `Done` reports; None says that the client is gone.
        """
        if self._cancelled.is_set():
            return
        if reason is not None:
            self._reason = reason
        # in this order: a thread that the release wakes must find it cancelled
        self._cancelled.set()
        self._room.release()  # wakes a thread that waits for a slow client
        # one that runs already ends with the `Done` of its own thread: there is only ever one
        if self._forget(self):
            self._push(Done(finish="error", error=self._reason))

    def is_cancelled(self) -> bool:
        """Tell whether `cancel` was called."""
        return self._cancelled.is_set()

    def emit(self, event: Early) -> None:
        """Hand one event to the loop (generation thread only).

        Raises:
            CancelledError: The request was cancelled, or the client takes nothing any more.
        """
        # waited for on the generation thread, so a slow client holds its own session up, and no
        # memory grows; the loop cannot wait here, and `Done` never does
        if not self._room.acquire(timeout=STALL_SECONDS):
            self.cancel()
        if self.is_cancelled():
            raise CancelledError("the client is gone")
        self._push(event)

    def tell_position(self, position: int) -> None:
        """Tell the client how many requests are served before its own, itself included."""
        if position != self._queue_position:
            self._queue_position = position
            self._room.acquire(blocking=False)  # what nobody takes is not worth a pause
            self._push(Queued(position))

    def finish(self, done: Done) -> None:
        """Hand over the last event; never waits for the client (generation thread only)."""
        if isinstance(done.error, CancelledError):
            done = replace(done, error=self._reason)
        self._push(done)

    def _push(self, event: ReplyEvent) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop is closed: nobody reads
            self._cancelled.set()


class RequestQueue:
    """Bounded queue and generation threads, first come first served.

    Args:
        run: What a thread does for a request.
        n_threads: Requests that run at once: as many as the backend has sessions.
        max_queue: Requests that may wait beyond these.
    """

    def __init__(self, run: RunRequest, *, n_threads: int, max_queue: int):
        self._run = run
        self._n_threads = n_threads
        self._max_queue = max_queue
        self._changed = threading.Condition()
        self._waiting: deque[RequestHandle] = deque()
        self._running: set[RequestHandle] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False

    @property
    def load(self) -> tuple[int, int]:
        """Requests that run and requests that wait."""
        with self._changed:
            return len(self._running), len(self._waiting)

    def submit(self, state: RequestState) -> RequestHandle:
        """Queue a request (event loop only).

        Raises:
            RequestError: Status 429: the queue is full; 503: the server is shutting down.
        """
        handle = RequestHandle(state, self._forget)
        with self._changed:
            if self._closed:
                raise shutting_down()
            busy = len(self._running) + len(self._waiting)
            if busy >= self._n_threads + self._max_queue:
                raise RequestError(
                    f"too many requests: {len(self._running)} are running and "
                    f"{len(self._waiting)} are waiting; try again later",
                    status=429,
                    code="queue_full",
                )
            if len(self._threads) < min(self._n_threads, busy + 1):
                self._start_thread()  # first: if it fails, nobody takes a request without a client
            self._waiting.append(handle)
            # with the lock held, or a later position could come first; telling never waits
            if len(self._running) + len(self._waiting) > self._n_threads:
                handle.tell_position(len(self._waiting))
            self._changed.notify()
        return handle

    def close(self, deadline: float, *, grace: float = 0.0) -> None:
        """Answer what waits, let what runs end or cancel it, and join the threads; idempotent.

        Args:
            deadline: Seconds that the threads may take together once they are cancelled.
            grace: Seconds before they are.
        """
        with self._changed:
            self._closed = True
            waiting = list(self._waiting)
            self._changed.notify_all()
        for handle in waiting:  # without the lock, which `cancel` takes to forget them
            handle.cancel(shutting_down())
        with self._changed:
            self._changed.wait_for(lambda: not self._running, grace)
            running = list(self._running)
        for handle in running:
            handle.cancel(shutting_down())
        end = time.monotonic() + deadline
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                _log.warning("%s did not stop within %.1f s", thread.name, deadline)

    def _start_thread(self) -> None:
        name = f"ds4-generate-{len(self._threads)}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _forget(self, handle: RequestHandle) -> bool:
        with self._changed:
            if handle not in self._waiting:
                return False
            self._waiting.remove(handle)
            self._tell_positions()
            return True

    def _tell_positions(self) -> None:
        for position, handle in enumerate(self._waiting, 1):
            handle.tell_position(position)

    def _take(self) -> RequestHandle | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            handle = self._waiting.popleft()
            self._running.add(handle)
            self._tell_positions()
            return handle

    def _serve(self) -> None:
        while (handle := self._take()) is not None:
            try:
                done = self._run(handle.state, handle.emit, handle.is_cancelled)
            except Exception as error:  # noqa: BLE001 - a thread body: the client must get an end
                if not isinstance(error, Ds4Error):
                    _log.exception("a generation thread failed")
                done = Done(finish="error", error=error)
            with self._changed:
                self._running.discard(handle)  # first: the client may send its next request at once
                self._changed.notify_all()
            handle.finish(done)
