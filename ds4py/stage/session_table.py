"""Which tokens each session of a stage has cached, and whether a span may continue them.

Owns: the hash validation of docs/spec/wire-protocol.md#kv-sessions, #hash-checks,
#evaluation-checks, that of #save-request which looks at a session, and the choice of a session to
give up when the cache pool is full. Refuses to know: connections (an owner is an opaque object),
caches, threads. Invariant: a span is admitted only if the session holds exactly the tokens that its
prefix hash stands for, or will hold them when what the device was given before is evaluated.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, NoReturn

from ds4py.activations import HiddenBatch
from ds4py.contracts import OutputKind, SessionId
from ds4py.errors import (
    CacheFullError,
    CancelledError,
    CapacityError,
    Ds4Error,
    ModelError,
    PrefixMismatchError,
    RemoteProtocolError,
)
from ds4py.wire.prefix_hash import INIT, extend

_REFUSALS: Final = (CancelledError, CapacityError, ModelError, PrefixMismatchError)


@dataclass(slots=True)
class CachedSession:
    """Tokens of one session, since it was last emptied.

    Args:
        owners: Connections that stand and have carried it: a coordinator may use several at once.
        tokens: Ids, oldest first.
        hash: Prefix hash of them.
        valid: False after an evaluation failed half-way, for good: a session that begins again has
            another timeline, which is no business of spans that were given to the device before.
        last_used: Grows with every admitted span of the stage.
    """

    owners: set[Hashable]
    tokens: list[int] = field(default_factory=list)
    hash: int = INIT
    valid: bool = True
    last_used: int = 0


class StageRequest(NamedTuple):
    """One chunk or token that a stage is asked to evaluate, and what it claims of its session.

    Args:
        session: The timeline that it continues.
        tokens: Token ids `[T]`, at least one.
        pos0: Absolute position of the first one, 0-based.
        prefix_hash: Of the tokens that the session must hold before.
        result_hash: Of the tokens that it holds afterwards.
        reset: Empty the session first.
        hidden: Output of the layer before `[T, W]`; None exactly when the slice starts at layer 0.
        output_kind: What to hand back.
        reply_bits: Packing of hidden states that are handed back: 32, 16 or 8.
        request_id: By which it may be aborted; grows within a session.
        n_logits: Rows at its end of which logits are wanted, if logits are.
    """

    session: SessionId
    tokens: tuple[int, ...]
    pos0: int
    prefix_hash: int
    result_hash: int
    reset: bool
    hidden: HiddenBatch | None = None
    output_kind: OutputKind = OutputKind.HIDDEN
    reply_bits: int = 32
    request_id: int = 0
    n_logits: int = 1

    @property
    def end(self) -> int:
        """Length of the timeline afterwards."""
        return self.pos0 + len(self.tokens)

    @property
    def is_decode(self) -> bool:
        """Whether it is a single token, which may share a batch with other sessions' ones."""
        return len(self.tokens) == 1


class Admission(NamedTuple):
    """What to do with the caches before evaluating an admitted span.

    Args:
        reset: Empty the session first.
        rewind_to: Keep only this many tokens first.
        evict: Another session to drop first, to make room.
    """

    reset: bool = False
    rewind_to: int | None = None
    evict: SessionId | None = None


class SessionTable:
    """The sessions of one stage.

    Args:
        n_slots: Sessions that the cache pool can hold.
        can_rewind: Whether a cached timeline can be cut at any position.
    """

    def __init__(self, n_slots: int, *, can_rewind: bool):
        self._n_slots = n_slots
        self._can_rewind = can_rewind
        self._sessions: dict[SessionId, CachedSession] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session: SessionId) -> CachedSession | None:
        """Return a session's timeline without creating one."""
        return self._sessions.get(session)

    def admit(self, asked: StageRequest, owner: Hashable) -> Admission:
        """Check a span against its session, creating the session if it is new.

        A reset takes effect even if the span is then refused
        (docs/spec/wire-protocol.md#hash-checks).

        Raises:
            PrefixMismatchError: The session holds other tokens.
            ModelError: The span does not start where the session ends.
            CapacityError: The session is new and every slot belongs to a connection that stands.
        """
        evict = self._make_room(asked.session)
        cached = known = self._sessions.get(asked.session) or CachedSession(set())
        if asked.reset:
            cached = CachedSession(known.owners, last_used=known.last_used)
            if asked.session in self._sessions:
                self._sessions[asked.session] = cached
        rewind_to = self._match(cached, asked)
        if not cached.valid:  # so it is empty, or it had not matched
            cached = CachedSession(known.owners)
        # only an admitted span takes a slot: a stream of unknown ids costs nothing
        self._sessions[asked.session] = cached
        if evict is not None:
            del self._sessions[evict]
        self._clock += 1
        cached.owners.add(owner)
        cached.last_used = self._clock
        return Admission(reset=asked.reset or asked.pos0 == 0, rewind_to=rewind_to, evict=evict)

    def _match(self, cached: CachedSession, asked: StageRequest) -> int | None:
        """Return where to cut the timeline, None if it already ends where the span starts."""
        if cached.hash == asked.prefix_hash:
            # at position 0 the caches are emptied anyway, whatever a failure left in them
            usable = cached.valid or asked.pos0 == 0
            if not usable or len(cached.tokens) != asked.pos0:
                raise ModelError(
                    "session",
                    got=f"a span at position {asked.pos0}",
                    expected=f"a reset, or position {len(cached.tokens)} of a valid timeline",
                )
            return None
        shorter = self._can_rewind and cached.valid and asked.pos0 < len(cached.tokens)
        if shorter and extend(INIT, cached.tokens[: asked.pos0]) == asked.prefix_hash:
            del cached.tokens[asked.pos0 :]
            cached.hash = asked.prefix_hash
            return asked.pos0
        raise PrefixMismatchError("worker KV prefix hash mismatch")

    def commit(self, asked: StageRequest) -> CachedSession | None:
        """Record that the device was given an admitted span.

        Returns:
            The timeline that it continues; None if its session was given up meanwhile.
        """
        cached = self._sessions.get(asked.session)
        if cached is None or cached.hash != asked.prefix_hash:
            return None
        cached.tokens.extend(asked.tokens)
        cached.hash = asked.result_hash
        return cached

    def prefix(self, session: SessionId, n_tokens: int, token_hash: int) -> list[int]:
        """Return the first tokens of a session, all of them evaluated.

        Raises:
            PrefixMismatchError: It does not hold so many, or others.
        """
        cached = self._sessions.get(session)
        if cached is not None and cached.valid and n_tokens <= len(cached.tokens):
            tokens = cached.tokens[:n_tokens]
            if extend(INIT, tokens) == token_hash:
                return tokens
        raise PrefixMismatchError("this stage does not hold the tokens that are to be copied")

    def check_saveable(self, session: SessionId, n_tokens: int, token_hash: int) -> None:
        """Compare a session with what it is to be saved as (wire-protocol.md#save-request).

        Raises:
            RemoteProtocolError: It is unknown, or holds other tokens; the first row that fails.
        """
        cached = self._sessions.get(session)
        if cached is None:
            _refuse_save("S-NOSESSION", "worker has no distributed session to snapshot")
        if len(cached.tokens) != n_tokens:
            both = f"worker={len(cached.tokens)} request={n_tokens}"
            _refuse_save("S-COUNT", f"snapshot token count mismatch: {both}")
        # the rolling hash of a timeline is always that of its tokens
        if not cached.valid or cached.hash != token_hash:
            _refuse_save("S-HASH", "snapshot token hash mismatch")
        if not cached.tokens:  # the caches may still hold what was there before a reset
            _refuse_save("S-IO", "worker session has no tokens to snapshot")

    def reserve_slot(
        self, session: SessionId, spare: Collection[SessionId] = ()
    ) -> list[SessionId]:
        """Forget a session whose cache is to be replaced, and another one if no slot is free.

        Args:
            session: Known or not.
            spare: Not to be forgotten for it.

        Returns:
            The sessions whose caches must be dropped first.

        Raises:
            CapacityError: As in `admit`; nothing is forgotten.
        """
        gone = [session] if self._sessions.pop(session, None) is not None else []
        evict = self._make_room(session, spare)
        if evict is not None:
            del self._sessions[evict]
            gone.append(evict)
        return gone

    def evict(self, spare: Collection[SessionId]) -> SessionId | None:
        """Forget the longest unused session that no connection stands for; None if there is none.

        Args:
            spare: Not to be forgotten.
        """
        unowned = self._oldest_unowned(spare)
        if unowned is not None:
            del self._sessions[unowned]
        return unowned

    def insert(
        self, session: SessionId, tokens: Sequence[int], token_hash: int, owner: Hashable
    ) -> None:
        """Record that the cache of a vacated session was loaded."""
        self._clock += 1
        self._sessions[session] = CachedSession(
            {owner}, list(tokens), token_hash, last_used=self._clock
        )

    def evaluation_failed(
        self, asked: StageRequest, error: Ds4Error, cached: CachedSession | None = None
    ) -> None:
        """Record that a span was not evaluated.

        A refusal before evaluation leaves the timeline usable; a failure of the device itself does
        not: then only a reset makes the session usable again
            (docs/spec/wire-protocol.md#evaluation-checks).

        Args:
            asked: The span.
            error: What became of it.
            cached: What `commit` returned, if the device had been given the span. The timeline then
                ends where the span began, whatever else the device was given meanwhile.
        """
        if cached is not None:
            cached.valid = False
            del cached.tokens[asked.pos0 :]
            # of other tokens, if it was cut back meanwhile
            cached.hash = extend(INIT, cached.tokens)
            return
        present = self._sessions.get(asked.session)
        if present is not None and not isinstance(error, _REFUSALS):
            present.valid = False

    def forget(self, session: SessionId) -> None:
        """Forget a session that has ended for good."""
        self._sessions.pop(session, None)

    def disown(self, owner: Hashable) -> None:
        """Take a closed connection from the owners of its sessions.

        Those that have no other are the first to go when room is needed. They stay usable: the hash
        makes continuing them over another connection safe.
        """
        for cached in list(self._sessions.values()):  # called while the device thread goes on
            cached.owners.discard(owner)

    def _make_room(self, session: SessionId, spare: Collection[SessionId] = ()) -> SessionId | None:
        if session in self._sessions or len(self._sessions) < self._n_slots:
            return None
        unowned = self._oldest_unowned(spare)
        if unowned is None:
            raise CacheFullError(
                "session slots of this stage (raise --sessions, or close other sessions)",
                needed=len(self._sessions) + 1,
                available=self._n_slots,
            )
        return unowned

    def _oldest_unowned(self, spare: Collection[SessionId]) -> SessionId | None:
        found = [
            (cached.last_used, session)
            for session, cached in self._sessions.items()
            if not cached.owners and session not in spare
        ]
        return min(found)[1] if found else None


def _refuse_save(kind: str, text: str) -> NoReturn:
    raise RemoteProtocolError(text, kind=kind)
