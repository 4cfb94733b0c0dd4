"""Conversations that wait for the results of tools.

Owns: for each reply that called tools, the turns up to and with it, found again by the ids of its
calls. Refuses to know: JSON, tokens, sessions. Invariant: memory is bounded; the longest unused
conversation is forgotten first.

Some APIs let a client go on by results alone, without the turns before them. Keeping the turns
instead of a session's state means that nothing is lost when the session serves somebody else
meanwhile: the prompt is written again, and what a session still has of it is reused as ever.

Ids have 128 random bits and go to one client only: anyone who names one may go on with what it
ended.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from ds4py.errors import RequestError
from ds4py.server.requests.request import ChatMessage, Conversation

_MAX_BYTES: Final = 256 << 20
_MAX_KEPT: Final = 1024


class PendingTools:
    """Finds conversations by the ids of the calls that end them; safe to use from several threads.

    Args:
        max_bytes: Most memory for their texts.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[frozenset[str], Conversation] = OrderedDict()
        self._n_bytes = 0

    def keep(self, call_ids: Collection[str], kept: Conversation) -> None:
        """Remember a conversation that ends with these calls."""
        key = frozenset(call_ids)
        with self._lock:
            self._drop(key)
            self._kept[key] = kept
            self._n_bytes += kept.n_bytes
            while self._kept and self._is_full():
                self._drop(next(iter(self._kept)))

    def find(self, call_ids: Collection[str]) -> Conversation | None:
        """Return the conversation that ends with exactly these calls, in any order."""
        key = frozenset(call_ids)
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key]

    def resumed(
        self, messages: Sequence[ChatMessage], *, id_name: str, history: str
    ) -> Conversation | None:
        """Return the whole conversation that results of tools end; None if they bring their own.

        Args:
            messages: Those of the request.
            id_name: The API's word for the id of a call.
            history: The API's words for all that a client should send instead.

        Returns:
            What was kept, the results behind it.

        Raises:
            RequestError: There are results only, and of calls that are not known.
        """
        results = [message for message in messages if message.role != "system"]
        if not results or any(message.role != "tool" for message in results):
            return None
        kept = self.find([message.call_id for message in results])
        if kept is None:
            raise RequestError(
                f"{id_name} {results[0].call_id!a:.80} is unknown to the live session; "
                f"replay the full {history}",
                param=id_name,
            )
        return replace(kept, messages=(*kept.messages, *results))

    def _is_full(self) -> bool:
        return self._n_bytes > self._max_bytes or len(self._kept) > _MAX_KEPT

    def _drop(self, key: frozenset[str]) -> None:
        if key in self._kept:
            self._n_bytes -= self._kept.pop(key).n_bytes
