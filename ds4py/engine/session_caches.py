"""Which sessions have caches on this device: slot, length, and how far they can be cut back.

Owns: the one place where a session's name meets a slot of the pool, and what of the slot's rows is
valid. Refuses to know: tokens and their hashes (`stage.session_table`), tensors' contents.
Invariant: `length` counts the rows that are valid, or will be when what is queued on the device has
run; a session that is refused memory is as before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ds4py.contracts import SessionId
from ds4py.engine.kv_pool import KvPool
from ds4py.errors import ModelError


@dataclass(slots=True)
class SessionCache:
    """A session of this device.

    Args:
        slot: Its place in the pool.
        length: Tokens that the cache holds.
        floor: Shortest length that it can be cut back to, except for 0.
    """

    slot: int
    length: int = 0
    floor: int = 0


class SessionCaches:
    """The sessions of one device; for one thread.

    Args:
        pool: Their memory.
        rewind_floor: As `models.base.Slice.rewind_floor`.
    """

    def __init__(self, pool: KvPool, rewind_floor: Callable[[int], int]):
        self.pool = pool
        self._rewind_floor = rewind_floor
        self._sessions: dict[SessionId, SessionCache] = {}

    def get(self, session: SessionId) -> SessionCache | None:
        """Return a session's cache without making one."""
        return self._sessions.get(session)

    def hold(self, session: SessionId, n_tokens: int) -> SessionCache:
        """Return a session's cache with memory for so many tokens; a new one takes a slot.

        Raises:
            CapacityError: Every slot is taken, or the budget has not enough left.
        """
        cache = self._sessions.get(session)
        if cache is None:
            cache = self._sessions[session] = SessionCache(self.pool.acquire(n_tokens))
        else:
            self.pool.resize(cache.slot, n_tokens)
        return cache

    def reserve(self, session: SessionId, n_tokens: int) -> None:
        """Take memory ahead of spans; what a session has is never cut.

        Raises:
            CapacityError: As in `hold`.
        """
        cache = self._sessions.get(session)
        if cache is None or n_tokens > cache.length:
            self.hold(session, n_tokens)

    def begin(self, session: SessionId, end: int, *, reset: bool) -> SessionCache:
        """Return a session's cache with memory for a span that ends there, emptied if asked for."""
        cache = self.hold(session, end)
        if reset:
            cache.length = 0
        if not cache.length:
            cache.floor = 0
        return cache

    def extend(self, cache: SessionCache, end: int) -> None:
        """Count the tokens of a span that was queued."""
        cache.length = end
        cache.floor = max(cache.floor, self._rewind_floor(end))

    def rewind(self, session: SessionId, n_tokens: int) -> None:
        """Keep the first tokens of a session.

        Raises:
            ModelError: As in `cuttable`.
        """
        cache = self.cuttable("rewind", session, n_tokens)
        cache.length = n_tokens
        self.pool.resize(cache.slot, n_tokens)

    def fork(self, source: SessionId, target: SessionId, n_tokens: int) -> None:
        """Copy the first tokens of a session to another.

        Raises:
            ModelError: As in `cuttable`, of the source.
            CapacityError: As in `hold`, of the target.
        """
        origin = self.cuttable("fork", source, n_tokens)
        copy = self.hold(target, n_tokens)
        self.pool.copy(origin.slot, copy.slot, n_tokens)
        copy.length, copy.floor = n_tokens, origin.floor

    def cuttable(self, why: str, session: SessionId, n_tokens: int) -> SessionCache:
        """Return a session's cache if it could be cut to so many tokens.

        Raises:
            ModelError: The session is unknown or shorter, or its cache no longer holds what a
                timeline of that length needs.
        """
        cache = self._sessions.get(session)
        held = "an unknown session" if cache is None else f"{cache.length} tokens"
        if cache is None or not 0 <= n_tokens <= cache.length:
            raise ModelError(f"{why} of session {session}", got=held, expected=f">= {n_tokens}")
        if n_tokens and n_tokens < cache.floor:
            raise ModelError(
                f"{why} of session {session} with {held}",
                got=f"a cut at {n_tokens}",
                expected=f"0, or {cache.floor} to {cache.length}: older rows are gone",
            )
        return cache

    def drop(self, session: SessionId) -> None:
        """Free a session's slot; an unknown session is no error."""
        cache = self._sessions.pop(session, None)
        if cache is not None:
            self.pool.release(cache.slot)
