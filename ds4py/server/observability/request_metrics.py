"""What requests did and cost, counted while they run.

Owns: one request's moments (`RequestMeter`), the sums over all of them (`RequestMetrics`). Refuses
to know: HTTP, the formats of `/metrics` and `/stats`. Invariant: nothing waits and nothing is ever
taken back; every request that was accepted is counted once when it ends.
"""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from ds4py.errors import CancelledError, RequestError
from ds4py.server.errors import describe

Clock = Callable[[], float]
"""Returns seconds; never goes back."""

_CLIENT_GONE: Final = 499  # no reply was sent; the word that web servers use for it
_BUSY: Final = (429, 503)

_LONG: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_SHORT: Final = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10),
)


@dataclass(frozen=True, slots=True)
class Distribution:
    """How many values were how large.

    Args:
        bounds: Upper limits, inclusive, in growing order; above the last one there is no limit.
        counts: Values up to each limit, smaller ones included; one more for all of them.
        total: Sum of the values.
    """

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended: its path, the reason, the HTTP status that its client got."""

    endpoint: str
    finish: str
    status: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The sums at one moment.

    Args:
        requests: How many ended in which way.
        rejected: Those that were sent away because the queue was full, they waited in it for too
            long, or the server was stopping.
        prompt_tokens: Of prompts that were brought to a session.
        cached_tokens: Those of them that needed no evaluation.
        completion_tokens: Sampled tokens.
        reasoning_tokens: Those of them before the answer.
        leased: Requests that hold a session now.
        active_seconds: Time in which at least one did.
        first_token: Seconds from the arrival of a request to its first token.
        inter_token: Seconds from a token to the next one of the same request.
        queue_wait: Seconds from entering the queue to getting a session.
        duration: Seconds from the arrival of a request to its end.
    """

    requests: Mapping[Ending, int]
    rejected: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    leased: int
    active_seconds: float
    first_token: Distribution
    inter_token: Distribution
    queue_wait: Distribution
    duration: Distribution

    def ended(self, *finishes: str) -> int:
        """Return how many requests ended for one of some reasons."""
        return sum(n for ending, n in self.requests.items() if ending.finish in finishes)


class _Histogram:
    def __init__(self, bounds: Sequence[float]):
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> Distribution:
        return Distribution(self._bounds, list(accumulate(self._counts)), self._total)


@dataclass(slots=True)
class _Books:
    """What all requests of one server add to; every field is guarded by the lock."""

    clock: Clock
    lock: threading.Lock = field(default_factory=threading.Lock)
    requests: Counter[Ending] = field(default_factory=Counter)
    rejected: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    leased: int = 0
    active_seconds: float = 0.0
    settled_at: float = 0.0
    first_token: _Histogram = field(default_factory=lambda: _Histogram(_LONG))
    inter_token: _Histogram = field(default_factory=lambda: _Histogram(_SHORT))
    queue_wait: _Histogram = field(default_factory=lambda: _Histogram(_LONG))
    duration: _Histogram = field(default_factory=lambda: _Histogram(_LONG))

    def settle(self, now: float) -> None:
        """Count the time since the last call if sessions were held meanwhile."""
        if self.leased:
            self.active_seconds += now - self.settled_at
        self.settled_at = now


class RequestMeter:
    """Counts one request; its moments are told in the order of the methods.

    They may be told on different threads, one after the other.

    Args:
        endpoint: Path of a route; not whatever a client asks for.
        books: Where it is counted.
    """

    def __init__(self, endpoint: str, books: _Books):
        self._endpoint = endpoint
        self._books = books
        self._accepted_at = self._queued_at = books.clock()
        self._was_leased = False
        self._was_prefilled = False
        self._token_at: float | None = None
        self._ended = False

    def queued(self) -> None:
        """Take note that the request is about to enter the queue."""
        self._queued_at = self._books.clock()

    @contextmanager
    def leased(self) -> Iterator[None]:
        """Count the request as running while it holds a session."""
        books, self._was_leased = self._books, True
        with books.lock:
            now = books.clock()
            books.settle(now)
            books.leased += 1
            books.queue_wait.observe(now - self._queued_at)
        try:
            yield
        finally:
            with books.lock:
                books.settle(books.clock())
                books.leased -= 1

    def prefilled(self, n_prompt: int, n_cached: int) -> None:
        """Take note that the prompt is evaluated; a second attempt is not counted again."""
        if self._was_prefilled:
            return
        self._was_prefilled = True
        with self._books.lock:
            self._books.prompt_tokens += n_prompt
            self._books.cached_tokens += n_cached

    def token(self, *, reasoning: bool = False) -> None:
        """Take note of a token that was just sampled."""
        books = self._books
        with books.lock:
            now = books.clock()
            books.completion_tokens += 1
            books.reasoning_tokens += reasoning
            if self._token_at is None:
                books.first_token.observe(now - self._accepted_at)
            else:
                books.inter_token.observe(now - self._token_at)
        self._token_at = now

    def finished(self, finish: str, error: BaseException | None = None) -> None:
        """Take note of the end of a request whose reply was sent, at least its beginning.

        Args:
            finish: "stop", "length", "tool_calls" or "error".
            error: Why it failed; a client that left is told from other reasons by it.
        """
        self._end(finish if error is None else self._reason(error), 200)

    def failed(self, error: BaseException) -> None:
        """Take note of the end of a request that gets an error for a reply."""
        reason = self._reason(error)
        status = _CLIENT_GONE if reason == "cancelled" else describe(error).status
        self._end(reason, status)

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, CancelledError | asyncio.CancelledError):
            return "cancelled"
        if isinstance(error, RequestError) and not self._was_leased:
            return "refused"
        return "error"

    def _end(self, finish: str, status: int) -> None:
        if self._ended:
            return
        self._ended = True
        books = self._books
        with books.lock:
            books.requests[Ending(self._endpoint, finish, status)] += 1
            books.rejected += finish == "refused" and status in _BUSY
            books.duration.observe(books.clock() - self._accepted_at)


class RequestMetrics:
    """Sums over the requests of one server; safe to use from several threads.

    Args:
        clock: Of all durations.
    """

    def __init__(self, clock: Clock = time.monotonic):
        self._books = _Books(clock)

    def accepted(self, endpoint: str) -> RequestMeter:
        """Begin to count a request that has just arrived.

        Args:
            endpoint: Path of its route.
        """
        return RequestMeter(endpoint, self._books)

    def read(self) -> Counts:
        """Return the sums as they are now."""
        books = self._books
        with books.lock:
            books.settle(books.clock())
            return Counts(
                requests=dict(books.requests),
                rejected=books.rejected,
                prompt_tokens=books.prompt_tokens,
                cached_tokens=books.cached_tokens,
                completion_tokens=books.completion_tokens,
                reasoning_tokens=books.reasoning_tokens,
                leased=books.leased,
                active_seconds=books.active_seconds,
                first_token=books.first_token.read(),
                inter_token=books.inter_token.read(),
                queue_wait=books.queue_wait.read(),
                duration=books.duration.read(),
            )


def unmetered() -> RequestMeter:
    """Return a meter that nobody reads, for a request outside of a server."""
    return RequestMetrics().accepted("")
