"""Requests that are being read and prepared: how much of the machine they may take together.

Owns: the bytes of all bodies in the server, the number of requests in it, and how many bodies are
read at once. Refuses to know: HTTP, what a body says. Invariant: what is held never exceeds the
limits, and is given back when its request ends, however that is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Final, TypeVar, TypeVarTuple

from ds4py.errors import RequestError

_READ_AT_ONCE: Final = 4
"""Bodies: more would only keep each other and the generation waiting."""

_BODIES: Final = 16
"""Bodies of the largest size that fit into the server."""

_MORE: Final = 64
"""Requests beyond those that may run or wait: they are being read, and may yet be refused."""

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class AdmissionControl:
    """The gate before the queue; used on the event loop only.

    Args:
        max_requests: That may run or wait in the queue.
        max_body_bytes: Of one body.
    """

    def __init__(self, *, max_requests: int, max_body_bytes: int) -> None:
        self._max_requests = max_requests + _MORE
        self._max_bytes = max_body_bytes * _BODIES
        self._n_requests = 0
        self._n_bytes = 0
        self._turns = asyncio.Semaphore(_READ_AT_ONCE)

    @contextlib.contextmanager
    def admitted(self) -> Iterator[Callable[[int], None]]:
        """Count a request while it is in the server.

        Yields:
            What takes note of further bytes of its body; raises as `admitted`.

        Raises:
            RequestError: Status 503: there are too many requests, or bytes.
        """
        if self._n_requests >= self._max_requests:
            raise _busy(f"{self._n_requests} requests")
        held = 0

        def take(n_bytes: int) -> None:
            nonlocal held
            if self._n_bytes + n_bytes > self._max_bytes:
                raise _busy(f"requests of {self._n_bytes >> 20} MiB")
            held += n_bytes
            self._n_bytes += n_bytes

        self._n_requests += 1
        try:
            yield take
        finally:
            self._n_requests -= 1
            self._n_bytes -= held

    async def helped(self, work: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
        """Run something slow on a helper thread, after what came before; raises what it raises."""
        async with self._turns:
            return await asyncio.to_thread(work, *args)


def _busy(with_what: str) -> RequestError:
    return RequestError(
        f"the server is busy with {with_what}; try again later", status=503, code="server_busy"
    )
