"""What a generation thread does for one request.

Owns: the meeting of session, sampler and reply; which of several prompts of one meaning is
evaluated, and the one hidden retry of a call that cannot be read. Refuses to know: the event loop,
HTTP, JSON, what a token means (`output`). Invariant: the session is given back before `perform`
returns or raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Final

from ds4py.config import SamplingParams
from ds4py.contracts import Backend, Cancelled, Session
from ds4py.errors import CancelledError, Ds4Error, LocalProtocolError, RequestError
from ds4py.generation.logits_processors import SamplingController
from ds4py.generation.loop import Finished, FinishReason, GenerationStep, Prefilled, Token, generate
from ds4py.generation.sampling import Sampler
from ds4py.server.history.conversations import ConversationMemory
from ds4py.server.history.disk_prefix_cache import DiskPrefixCache
from ds4py.server.requests.events import Done, Emit, Finish, Prefilling, Started, Tally
from ds4py.server.requests.output import OutputProcessor
from ds4py.server.requests.prompts import PromptWriter
from ds4py.server.requests.request import Conversation
from ds4py.server.requests.state import RequestState
from ds4py.snapshot.kvc import Reason

_log = logging.getLogger(__name__)

_DS4_SAMPLING: Final = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.05)
"""Of ds4 while its model reasons, whatever a request says (server-and-cli.md#sampling)."""

_SAVE_SECONDS: Final = 5.0
"""Time that the end of a server waits for sessions that are still in use."""


class GenerationWorker:
    """Performs requests; any number of threads may do so at once.

    Args:
        backend: Sessions of the model.
        prompts: Writes for the same model.
        memory: Of conversations.
        compat_sampling: Ignore the sampling of requests whose model reasons, as ds4 does.
    """

    def __init__(
        self,
        backend: Backend,
        prompts: PromptWriter,
        memory: ConversationMemory,
        *,
        compat_sampling: bool = False,
    ):
        self._backend = backend
        self._prompts = prompts
        self._memory = memory
        self._compat_sampling = compat_sampling

    def perform(self, state: RequestState, emit: Emit, cancelled: Cancelled) -> Done:
        """Generate one answer.

        Args:
            state: Of the request; nobody else touches it meanwhile.
            emit: Takes events in order; raises `CancelledError` when nobody wants them any more.
            cancelled: Polled while waiting and between chunks and tokens.

        Returns:
            The end, also of a generation that broke off after the prompt was evaluated.

        Raises:
            Ds4Error: The prompt could not be evaluated; nothing of the reply was emitted.
        """

        def given_up() -> bool:
            return cancelled() or state.is_late

        state.begin()
        task = GenerationTask(state, emit, self._prompts, self._memory, self._sampling(state))
        state.evaluated = self._best_path(state.prompt.ids)
        try:
            lease = self._backend.lease(state.evaluated, cancelled=given_up)
            with lease as session, state.meter.leased():
                return task.drive(session, given_up)
        except CancelledError as error:
            if state.is_late and not cancelled():
                raise RequestError(
                    "the time limit of the request passed before its prompt was evaluated; "
                    "try again later, or with a shorter prompt",
                    status=503,
                    code="time_limit",
                ) from error
            raise

    def _best_path(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """Return the prompt of the same meaning that costs least to evaluate now."""
        n_ctx = self._backend.n_ctx
        paths = [path for path in self._memory.exact_tokens.paths(prompt) if len(path) < n_ctx]
        if not paths:
            return prompt
        return min((prompt, *paths), key=lambda path: len(path) - self._backend.n_cached(path))

    def _sampling(self, state: RequestState) -> SamplingParams:
        """Return how the reply's tokens are chosen, seed included."""
        sampling = state.request.sampling
        if self._compat_sampling and self._prompts.text.chat.opens_reasoning(state.prompt.ids):
            return replace(_DS4_SAMPLING, seed=sampling.seed)
        return sampling

    def save_all(self, n_sessions: int) -> None:
        """Save every session that nobody uses any more; for the end of a server."""
        if self._memory.disk_prefixes is None:
            return
        health = self._backend.health()
        if not health.ready:  # saving would wait for it in vain
            _log.warning("sessions are not saved: nobody serves %s", health.missing)
            return
        end = time.monotonic() + _SAVE_SECONDS
        with ExitStack() as stack:  # all at once, or one would be saved again and again
            for _ in range(n_sessions):
                lease = self._backend.lease((), cancelled=lambda: time.monotonic() > end)
                try:
                    session = stack.enter_context(lease)
                except CancelledError:
                    _log.warning("a session is still in use and is not saved")
                    return
                self._memory.disk_prefixes.save(session, Reason.SHUTDOWN)


class GenerationTask:
    """One request on a leased session; used once, by one thread.

    Args:
        state: Of the request, begun.
        emit: See `GenerationWorker.perform`.
        prompts: Writes for the model.
        memory: Of conversations.
        sampling: How tokens are chosen; the second attempt begins with the same seed.
    """

    def __init__(
        self,
        state: RequestState,
        emit: Emit,
        prompts: PromptWriter,
        memory: ConversationMemory,
        sampling: SamplingParams,
    ):
        self._request = state.request
        self._state = state
        self._emit = emit
        self._prompts = prompts
        self._memory = memory
        self._sampling = sampling
        self._reply = OutputProcessor(state, emit, prompts.text.tokenizer)

    def drive(self, session: Session, cancelled: Cancelled) -> Done:
        """Generate on a session; see `GenerationWorker.perform`."""
        try:
            if self._memory.disk_prefixes is not None:
                self._resume(self._memory.disk_prefixes, session, cancelled)
            finish = self._attempt(session, cancelled)
            if self._may_retry(session):
                finish = self._attempt(session, cancelled)
            finish = self._conclude(finish)
        except Exception as error:
            # before the first logits an error is the client's HTTP status, afterwards an event
            if self._state.prefilled is None:
                raise
            if not isinstance(error, Ds4Error):
                _log.exception("generation failed")
            return Done(finish="error", error=error, tally=self._tally())
        return Done(finish=finish, stop=self._reply.stop, tally=self._tally())

    def _resume(
        self, disk_prefixes: DiskPrefixCache, session: Session, cancelled: Cancelled
    ) -> None:
        """Bring the session nearer to the prompt, by a file or by saving on the way."""
        state, prefix_length = self._state, None
        if isinstance(self._request.prompt, Conversation):
            prefix_length = partial(self._prompts.prefix_length, self._request, state.prompt.ids)
        state.evaluated = disk_prefixes.resume(session, state.evaluated)
        # before `prefill`, which evaluates: what is cached then is no longer what was found
        n_loaded = session.reusable(state.evaluated)
        n_cached = disk_prefixes.prefill(
            session,
            state.evaluated,
            prefix_length,
            progress=self._report,
            cancelled=cancelled,
        )
        state.n_cached = max(n_loaded, n_cached) if n_cached is not None else None

    def _may_retry(self, session: Session) -> bool:
        """Prepare another attempt, if the reply has calls that cannot be read.

        A stream has shown the first attempt already, so it has no other one.
        """
        state, reply = self._state, self._reply
        if self._request.stream or not reply.malformed:
            return False
        ask = self._prompts.retry_ids(self._request)
        prompt = (*state.evaluated, *reply.tokens, *ask)
        if not ask or len(prompt) >= session.n_ctx:
            return False
        _log.info("a call of a tool cannot be read: asking the model for another one")
        state.n_spent = reply.n_tokens
        state.evaluated = prompt
        self._reply = OutputProcessor(state, self._emit, self._prompts.text.tokenizer)
        return True

    def _attempt(self, session: Session, cancelled: Cancelled) -> Finish:
        """Generate behind the prompt; what cannot be read is not emitted."""
        state = self._state
        budget = min(self._request.max_tokens, session.n_ctx - len(state.prompt.ids))
        events = generate(
            session,
            state.evaluated,
            sampler=SamplingController(Sampler(self._sampling), self._reply.controls()),
            eos_ids=self._prompts.text.tokenizer.eos_ids,
            max_tokens=budget - state.n_spent,
            cancelled=cancelled,
            progress=self._report,
        )
        return self._consume(session, events)

    def _consume(self, session: Session, events: Iterable[GenerationStep]) -> Finish:
        disk_prefixes = self._memory.disk_prefixes
        for event in events:
            match event:
                case Prefilled():
                    self._state.note_prefilled(event.n_cached)
                    self._emit(Started(self._state.n_prompt, self._state.n_cached or 0))
                case Token():
                    # between two tokens, never inside of calls
                    # (docs/spec/server-and-cli.md#disk-cache): half a block is in no later prompt
                    if disk_prefixes is not None and not self._reply.in_block:
                        disk_prefixes.grown(session)
                    self._reply.take(event)
                    if self._reply.complete:
                        self._reply.end(by_model=False)
                        return "stop"
                case Finished(reason=FinishReason.CANCELLED):
                    # time is a budget like any other once the prompt is evaluated
                    if self._state.is_late and self._state.prefilled is not None:
                        self._reply.end(by_model=False)
                        return "length"
                    raise CancelledError("the request was cancelled")
                case Finished(reason=reason):
                    by_model = reason is FinishReason.STOP
                    return "stop" if self._reply.end(by_model=by_model) else "length"
        raise LocalProtocolError("a generation ended without saying why")

    def _conclude(self, finish: Finish) -> Finish:
        """Emit what is left of the reply, and take note of it.

        All of that before the client hears of the end: it may send its next request at once.
        """
        ids = self._reply.close()
        if ids:
            self._memory.tool_calls.remember(ids, self._reply.block)
            finish = "tool_calls"
        if isinstance(self._request.prompt, Conversation):
            said = (*self._state.evaluated, *self._reply.tokens) if self._reply.says_all else ()
            self._memory.keep(
                self._request.prompt,
                self._reply.answer,
                said,
                n_prompt=len(self._state.prompt.ids),
                visible=partial(self._prompts.visible_ids, self._request),
            )
        return finish

    def _report(self, n_done: int, n_prompt: int) -> None:
        self._emit(Prefilling(n_done, n_prompt))

    def _tally(self) -> Tally:
        return self._state.tally(self._reply.n_tokens, self._reply.n_reasoning)
