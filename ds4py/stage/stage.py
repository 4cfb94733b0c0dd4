"""A process's layers with everybody's sessions on them: the same on a worker and a coordinator.

Owns: the device thread, the table of sessions, the marks of aborted requests, and keeping the three
in step: admission, making room, commit and rollback, copies, saving. Refuses to know: frames,
sockets, routes. Invariant: table and caches are touched on the device thread only (except
by `release`), so that a session's entry always says what its cache holds.

A request passes here in three steps, all of them on the device thread:

1. `admit`, right before evaluation: the table compares the prefix hash, and the caches are emptied,
   cut back or given memory.
2. `started`, when the runner has accepted it: its tokens count from now on, so that the session's
   next chunk can be admitted while this one is still computed.
3. `finish`: a failure takes back what step 2 has noted, and the one who waits is told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

from ds4py.activations import F32, HiddenBatch
from ds4py.contracts import ForwardOutput, ForwardRequest, ModelCard, ModelRunner, SessionId
from ds4py.errors import CancelledError, CapacityError, ClusterError, Ds4Error
from ds4py.layer_range import LayerRange
from ds4py.stage.executor import DeviceThread
from ds4py.stage.session_table import CachedSession, SessionTable, StageRequest

T = TypeVar("T")

_MAX_MARKS: Final = 256


class SessionOwner:
    """What drives sessions: a connection of a worker, or the coordinator of this process.

    While one of a session's owners is there, its cache is never given up for another session.

    Args:
        lost: Whether it has gone without a word, such as a broken connection; on any thread.
    """

    def __init__(self, lost: Callable[[], bool] = lambda: False):
        self._lost = lost
        self._left = False

    @property
    def gone(self) -> bool:
        """Whether nothing is to be evaluated for it any more."""
        return self._left or self._lost()

    def leave(self) -> None:
        """Have nothing more evaluated; `Stage.release` comes next."""
        self._left = True


THIS_PROCESS: Final = SessionOwner()
"""Owns the sessions of a coordinator on its own layers."""


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


class Stage:
    """The layers that a process owns.

    Its methods may be called on any thread and never wait. Futures are done on the device thread,
    so what is called back there must return at once; `executor.wait_for` waits for one.

    Args:
        runner: The slice; owned and closed here.
        batching: Whether single tokens of different sessions run together.
    """

    def __init__(self, runner: ModelRunner, *, batching: bool = True):
        self.runner = runner
        self.device = DeviceThread(runner, batching=batching)
        self.sessions = SessionTable(runner.n_slots, can_rewind=runner.can_rewind)
        self.aborted = AbortedRequests()

    @property
    def card(self) -> ModelCard:
        """Identity of the whole model."""
        return self.runner.card

    @property
    def layers(self) -> LayerRange:
        """The owned layers."""
        return self.runner.layers

    def submit(
        self, request: StageRequest, owner: SessionOwner = THIS_PROCESS
    ) -> Future[ForwardOutput]:
        """Have a chunk or a token evaluated behind those of its session that came before.

        Returns:
            The output, or a `Ds4Error`: refused, aborted, or failed on the device. Cancelled before
            it has begun, the request is left out.
        """
        job = _Job(self, request, owner)
        refusal = self.device.submit(job)
        if refusal is not None:
            job.done.set_exception(refusal)
        return job.done

    def abort(self, session: SessionId, last_request: int) -> None:
        """Leave out what has not begun of a session, up to a request id."""
        self.aborted.mark(session, last_request)

    def end(self, session: SessionId) -> None:
        """Free a session's caches once what waits of it for the device is done."""

        def free(runner: ModelRunner) -> None:
            self.sessions.forget(session)
            runner.drop(session)

        self.device.ask(free, session=session)

    def release(self, owner: SessionOwner) -> None:
        """Let the sessions of an owner that goes away be given up when room is needed."""
        owner.leave()
        self.sessions.disown(owner)

    def copy_prefix(
        self,
        source: SessionId,
        target: SessionId,
        n_tokens: int,
        token_hash: int,
        owner: SessionOwner = THIS_PROCESS,
    ) -> Future[None]:
        """Let a session begin as another one did.

        Args:
            source: Goes on unchanged.
            target: What it holds is replaced.
            n_tokens: Tokens to copy.
            token_hash: Prefix hash of them.
            owner: Of the target.

        Returns:
            None, or a `PrefixMismatchError` if the source does not hold these tokens, or a
            `CapacityError` if there is no room.
        """

        def copy(runner: ModelRunner) -> None:
            spare = (source, target)
            tokens = self.sessions.prefix(source, n_tokens, token_hash)
            for gone in self.sessions.reserve_slot(target, spare):
                runner.drop(gone)
            self._with_room(lambda: runner.fork(source, target, n_tokens), spare)
            self.sessions.insert(target, tokens, token_hash, owner)
            self._disown_if_gone(owner)

        return self.device.ask(copy, session=target)

    def save(self, session: SessionId, n_tokens: int, token_hash: int) -> Future[list[memoryview]]:
        """Copy a session's cache.

        Args:
            session: Goes on unchanged.
            n_tokens: Tokens that it must hold.
            token_hash: Prefix hash of them.

        Returns:
            The pieces of a payload (`ModelRunner.save_cache`), or a `RemoteProtocolError` if the
            session holds other tokens.
        """

        def copy(runner: ModelRunner) -> list[memoryview]:
            self.sessions.check_saveable(session, n_tokens, token_hash)
            return runner.save_cache(session)

        return self.device.ask(copy, session=session)

    def load(
        self,
        session: SessionId,
        tokens: Sequence[int],
        token_hash: int,
        payload: memoryview,
        owner: SessionOwner = THIS_PROCESS,
    ) -> Future[None]:
        """Replace a session's cache by a saved one, or begin a session with it.

        Args:
            session: Its timeline.
            tokens: What the payload stands for.
            token_hash: Prefix hash of them.
            payload: As in `ModelRunner.load_cache`; not kept.
            owner: Of the session.

        Returns:
            None, or the runner's error: then the session is empty.
        """

        def replace(runner: ModelRunner) -> None:
            if owner.gone:
                raise CancelledError("the connection that sent the session is gone")
            for gone in self.sessions.reserve_slot(session):
                runner.drop(gone)
            self._with_room(lambda: runner.load_cache(session, len(tokens), payload), (session,))
            self.sessions.insert(session, tokens, token_hash, owner)
            self._disown_if_gone(owner)

        return self.device.ask(replace, session=session)

    def apply_head(self, hidden: HiddenBatch) -> Future[F32]:
        """Return logits `f32[V]` for the last row of a hidden batch."""
        return self.device.ask(lambda runner: runner.apply_head(hidden))

    def close(self, *, timeout: float = 30.0) -> None:
        """Finish what is running, refuse the rest, free the device; idempotent."""
        self.device.close(timeout=timeout)

    # --- on the device thread ----------------------------------------------------------------

    def admit(self, request: StageRequest, owner: SessionOwner) -> ForwardRequest:
        """Check a request against its session and prepare the caches, on the device thread."""
        if owner.gone:
            raise CancelledError("the connection that asked is gone")
        if self.aborted.covers(request.session, request.request_id):
            raise CancelledError("cancelled")
        admission = self.sessions.admit(request, owner)
        if admission.evict is not None:
            self.runner.drop(admission.evict)
        if admission.rewind_to is not None:
            self.runner.rewind(request.session, admission.rewind_to)
        self._with_room(
            lambda: self.runner.reserve(request.session, request.end), (request.session,)
        )
        return ForwardRequest(
            session=request.session,
            tokens=request.tokens,
            pos0=request.pos0,
            hidden=request.hidden,
            reset=admission.reset,
            output_kind=request.output_kind,
            reply_bits=request.reply_bits,
            n_logits=request.n_logits,
        )

    def commit(self, request: StageRequest) -> CachedSession | None:
        """Record that the device was given a request, on its thread: the next one may follow."""
        cached = self.sessions.commit(request)
        if self.sessions.get(request.session) is None:  # given up since it was admitted
            self.runner.drop(request.session)
        return cached

    def conclude(
        self,
        request: StageRequest,
        owner: SessionOwner,
        cached: CachedSession | None,
        output: ForwardOutput | Ds4Error,
    ) -> ForwardOutput | Ds4Error:
        """Record what the device did, on its thread, and say what that is worth."""
        if isinstance(output, ForwardOutput) and cached is not None and not cached.valid:
            output = ClusterError("an earlier span of the session failed")
        if isinstance(output, Ds4Error):
            self.sessions.evaluation_failed(request, output, cached)
        self._disown_if_gone(owner)
        return output

    def _disown_if_gone(self, owner: SessionOwner) -> None:
        """An owner may go between an admission and what follows it."""
        if owner.gone:
            self.sessions.disown(owner)

    def _with_room(self, step: Callable[[], T], spare: Collection[SessionId]) -> T:
        """Do what takes cache memory, giving up sessions without owners while it is short.

        Args:
            step: Changes nothing when it fails.
            spare: Sessions that it is about.

        Raises:
            CapacityError: There is too little even without those.
        """
        while True:
            try:
                return step()
            except CapacityError:
                unowned = self.sessions.evict(spare)
                if unowned is None:
                    raise
                self.runner.drop(unowned)


class _Job:
    """A request on its way through the device, as `executor.DeviceJob`."""

    def __init__(self, stage: Stage, request: StageRequest, owner: SessionOwner):
        self.session, self.is_decode = request.session, request.is_decode
        self.done: Future[ForwardOutput] = Future()
        self._stage, self._request, self._owner = stage, request, owner
        self._cached: CachedSession | None = None  # once the device was given the request

    def admit(self) -> ForwardRequest:
        if not self.done.set_running_or_notify_cancel():
            raise CancelledError("nobody waits for it any more")
        return self._stage.admit(self._request, self._owner)

    def started(self) -> None:
        self._cached = self._stage.commit(self._request)

    def finish(self, result: ForwardOutput | Ds4Error) -> None:
        output = self._stage.conclude(self._request, self._owner, self._cached, result)
        if self.done.cancelled():
            return
        if isinstance(output, Ds4Error):
            self.done.set_exception(output)
        else:
            self.done.set_result(output)
