"""Which requests nobody waits for any more.

Owns: one mark for each session: spans up to this request id need not be evaluated. Refuses to know:
who said so, where the spans are. Invariant: the number of marks is bounded, whatever peers say.

A mark may come before the spans that it means, since those travel over other stages.
"""

from __future__ import annotations

import threading
from typing import Final

from ds4py.contracts import SessionId

_MAX_MARKS: Final = 256


class AbortedRequests:
    """The marks of one stage; request ids of a session only grow, so one number is enough."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[SessionId, int] = {}  # the latest mark stands last

    def mark(self, session: SessionId, last_request: int) -> None:
        """Call off every span of a session with a request id up to `last_request`."""
        with self._lock:
            before = self._last.pop(session, 0)
            self._last[session] = max(before, last_request)
            if len(self._last) > _MAX_MARKS:
                del self._last[next(iter(self._last))]

    def covers(self, session: SessionId, request_id: int) -> bool:
        """Whether a span need not be evaluated."""
        with self._lock:
            return request_id <= self._last.get(session, -1)
