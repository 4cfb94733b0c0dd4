"""Conversations that wait for the results of tools.

Owns: for each reply that called tools, the turns up to and with it, found again by the ids of its
calls. Refuses to know: dialects, tokens, sessions. Invariant: memory is bounded; the longest unused
conversation is forgotten first.

Some dialects let a client go on by results alone, without the turns before them. Keeping the turns
instead of a session's state means that nothing is lost when the session serves somebody else
meanwhile: the prompt is written again, and what a session still has of it is reused as ever.

Ids have 128 random bits and go to one client only: anyone who names one may go on with what it
ended.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from sys import getsizeof
from typing import Final

from ds4py.server.api.chat_messages import ChatMessage

_MAX_BYTES: Final = 256 << 20
_MAX_KEPT: Final = 1024
_OVERHEAD: Final = 256
"""Bytes that a turn costs beside its texts, roughly."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a conversation needs to go on.

    Args:
        messages: All turns, the last one with the calls.
        tools: Those on offer.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[str, ...]

    @property
    def n_bytes(self) -> int:
        """Roughly the memory that it takes."""
        return sum(map(_n_bytes, self.messages)) + sum(map(getsizeof, self.tools))


class PendingTools:
    """Finds conversations by the ids of the calls that end them; safe to use from several threads.

    Args:
        max_bytes: Most memory for their texts.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[frozenset[str], Kept] = OrderedDict()
        self._n_bytes = 0

    def keep(self, call_ids: Collection[str], kept: Kept) -> None:
        """Remember a conversation that ends with these calls."""
        key = frozenset(call_ids)
        with self._lock:
            self._drop(key)
            self._kept[key] = kept
            self._n_bytes += kept.n_bytes
            while self._kept and self._is_full():
                self._drop(next(iter(self._kept)))

    def find(self, call_ids: Collection[str]) -> Kept | None:
        """Return the conversation that ends with exactly these calls, in any order."""
        key = frozenset(call_ids)
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key]

    def _is_full(self) -> bool:
        return self._n_bytes > self._max_bytes or len(self._kept) > _MAX_KEPT

    def _drop(self, key: frozenset[str]) -> None:
        if key in self._kept:
            self._n_bytes -= self._kept.pop(key).n_bytes


def _n_bytes(turn: ChatMessage) -> int:
    texts = [turn.role, turn.content, turn.reasoning, turn.call_id]
    for call in turn.calls:
        texts += call.id, call.name, call.arguments
    return sum(map(getsizeof, texts)) + _OVERHEAD
