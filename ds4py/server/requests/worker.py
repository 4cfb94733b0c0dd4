"""What a generation thread does for one request.

Owns: the meeting of session, sampler and reply; which of several prompts of one meaning is
evaluated; the request's tally, and the one hidden retry of a call that cannot be read. Refuses to
know: the event loop, HTTP, JSON, what a token means (`output`). Invariant: the session is
given back before `perform` returns or raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Final

from ds4py.contracts import Backend, Cancelled, Session
from ds4py.errors import CancelledError, Ds4Error, LocalProtocolError, RequestError
from ds4py.generation.logits_processors import SamplingController
from ds4py.generation.loop import Finished, FinishReason, GenerationStep, Prefilled, Token, generate
from ds4py.generation.sampling import Sampler
from ds4py.server.history.disk_prefix_cache import DiskPrefixCache
from ds4py.server.history.exact_tokens import ExactTokens
from ds4py.server.history.tool_calls import ToolCallMemory
from ds4py.server.requests.events import Done, Finish, Prefilling, Started, Tally
from ds4py.server.requests.output import OutputProcessor
from ds4py.server.requests.prompts import TextStack
from ds4py.server.requests.request import Emit, GenerationRequest
from ds4py.snapshot.kvc import Reason
from ds4py.text.tokenizer.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_SAVE_SECONDS: Final = 5.0
"""Time that the end of a server waits for sessions that are still in use."""


class GenerationWorker:
    """Performs orders; any number of threads may do so at once.

    Args:
        backend: Sessions of the model.
        text: Tokenizer of the same model.
        tools: Where the words of calls are remembered.
        exact_tokens: Where conversations are remembered.
        disk_prefixes: Sessions on disk; None keeps none.
    """

    def __init__(
        self,
        backend: Backend,
        text: TextStack,
        tools: ToolCallMemory,
        exact_tokens: ExactTokens,
        disk_prefixes: DiskPrefixCache | None = None,
    ):
        self._backend = backend
        self._tokenizer = text.tokenizer
        self._tools = tools
        self._exact_tokens = exact_tokens
        self._disk_prefixes = disk_prefixes

    def perform(self, request: GenerationRequest, emit: Emit, cancelled: Cancelled) -> Done:
        """Generate one answer.

        Args:
            request: What to generate.
            emit: Takes events in order; raises `CancelledError` when nobody wants them any more.
            cancelled: Polled while waiting and between chunks and tokens.

        Returns:
            The end, also of a generation that broke off after the prompt was evaluated.

        Raises:
            Ds4Error: The prompt could not be evaluated; nothing of the reply was emitted.
        """

        def given_up() -> bool:
            return cancelled() or request.late

        run = GenerationTask(request, emit, self._tokenizer, self._tools, self._disk_prefixes)
        prompt = self._best_path(request.prompt)
        try:
            lease = self._backend.lease(prompt, cancelled=given_up)
            with lease as session, request.meter.leased():
                return run.drive(session, prompt, given_up)
        except CancelledError as error:
            if request.late and not cancelled():
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
        paths = [path for path in self._exact_tokens.paths(prompt) if len(path) < n_ctx]
        if not paths:
            return prompt
        return min((prompt, *paths), key=lambda path: len(path) - self._backend.n_cached(path))

    def save_all(self, n_sessions: int) -> None:
        """Save every session that nobody uses any more; for the end of a server."""
        if self._disk_prefixes is None:
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
                self._disk_prefixes.save(session, Reason.SHUTDOWN)


class GenerationTask:
    """The state of one order while it runs."""

    def __init__(
        self,
        request: GenerationRequest,
        emit: Emit,
        tokenizer: Tokenizer,
        tools: ToolCallMemory,
        disk_prefixes: DiskPrefixCache | None,
    ):
        self._request = request
        self._emit = emit
        self._tokenizer = tokenizer
        self._tools = tools
        self._disk_prefixes = disk_prefixes
        self._prompt = request.prompt
        self._began = time.monotonic()
        self._n_prompt = len(request.prompt)
        self._prefilled: float | None = None
        self._n_cached: int | None = None
        self._n_spent = 0
        self._reply = OutputProcessor(request, emit, tokenizer)

    def drive(self, session: Session, prompt: tuple[int, ...], cancelled: Cancelled) -> Done:
        """Generate on a leased session; see `GenerationWorker.perform`."""
        self._prompt = prompt
        try:
            if self._disk_prefixes is not None:
                self._resume(self._disk_prefixes, session, cancelled)
            finish = self._attempt(session, self._prompt, cancelled)
            if self._may_retry(session):
                finish = self._attempt(session, self._prompt, cancelled)
            finish = self._conclude(finish)
        except Exception as error:
            if self._prefilled is None:
                raise
            if not isinstance(error, Ds4Error):
                _log.exception("generation failed")
            return Done(finish="error", error=error, tally=self._tally())
        return Done(finish=finish, stop=self._reply.stop, tally=self._tally())

    def _resume(
        self, disk_prefixes: DiskPrefixCache, session: Session, cancelled: Cancelled
    ) -> None:
        """Bring the session nearer to the prompt, by a file or by saving on the way."""
        self._prompt = disk_prefixes.resume(session, self._prompt)
        n_loaded = session.reusable(self._prompt)
        n_cached = disk_prefixes.prefill(
            session,
            self._prompt,
            self._request.prefix_length,
            progress=self._report,
            cancelled=cancelled,
        )
        self._n_cached = max(n_loaded, n_cached) if n_cached is not None else None

    def _may_retry(self, session: Session) -> bool:
        """Prepare another attempt, if the reply has calls that cannot be read."""
        ask = self._request.retry() if self._reply.malformed and self._request.retry else ()
        prompt = (*self._prompt, *self._reply.tokens, *ask)
        if not ask or len(prompt) >= session.n_ctx:
            return False
        _log.info("a call of a tool cannot be read: asking the model for another one")
        self._n_spent = self._reply.n_tokens
        self._reply = OutputProcessor(self._request, self._emit, self._tokenizer)
        self._prompt = prompt
        return True

    def _attempt(self, session: Session, prompt: Sequence[int], cancelled: Cancelled) -> Finish:
        """Generate behind a prompt; what cannot be read is not emitted."""
        events = generate(
            session,
            prompt,
            sampler=SamplingController(
                Sampler(self._request.options.sampling), self._reply.controls()
            ),
            eos_ids=self._tokenizer.eos_ids,
            max_tokens=self._request.max_tokens - self._n_spent,
            cancelled=cancelled,
            progress=self._report,
        )
        return self._consume(session, events)

    def _consume(self, session: Session, events: Iterable[GenerationStep]) -> Finish:
        for event in events:
            match event:
                case Prefilled():
                    self._start(event.n_cached)
                case Token():
                    if self._disk_prefixes is not None and not self._reply.in_block:
                        self._disk_prefixes.grown(session)
                    self._reply.take(event)
                    if self._reply.complete:
                        self._reply.end(by_model=False)
                        return "stop"
                case Finished(reason=FinishReason.CANCELLED):
                    if self._request.late and self._prefilled is not None:
                        self._reply.end(by_model=False)
                        return "length"
                    raise CancelledError("the request was cancelled")
                case Finished(reason=reason):
                    by_model = reason is FinishReason.STOP
                    return "stop" if self._reply.end(by_model=by_model) else "length"
        raise LocalProtocolError("a generation ended without saying why")

    def _start(self, n_cached: int) -> None:
        """Tell that the reply begins; of a second attempt, what the first one found counts."""
        if self._prefilled is None:
            self._prefilled = time.monotonic()
            self._n_prompt = len(self._prompt)
            self._n_cached = n_cached if self._n_cached is None else self._n_cached
            self._request.meter.prefilled(self._n_prompt, self._n_cached)
        self._emit(Started(self._n_prompt, self._n_cached or 0))

    def _conclude(self, finish: Finish) -> Finish:
        """Emit what is left of the reply, and take note of it."""
        ids = self._reply.close(streamed=self._request.options.stream)
        if ids:
            self._tools.remember(ids, self._reply.block)
            finish = "tool_calls"
        if self._request.conclude is not None:
            said = (*self._prompt, *self._reply.tokens) if self._reply.says_all else ()
            self._request.conclude(self._reply.answer, said)
        return finish

    def _report(self, n_done: int, n_prompt: int) -> None:
        self._emit(Prefilling(n_done, n_prompt))

    def _tally(self) -> Tally:
        now = time.monotonic()
        prefilled = now if self._prefilled is None else self._prefilled
        return Tally(
            n_prompt=self._n_prompt,
            n_cached=self._n_cached or 0,
            n_completion=self._reply.n_tokens,
            n_reasoning=self._reply.n_reasoning,
            prefill_seconds=prefilled - self._began,
            decode_seconds=now - prefilled,
        )
