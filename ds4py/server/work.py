"""What a generation thread does for one request.

Owns: `Order` in, `Started`, `Piece` and `Done` out; the meeting of session, sampler and text; the
ids of calls; the request's tally. Refuses to know: the event loop, HTTP, JSON. Invariant: the
session is given back before `perform` returns or raises, and text after a stop string or after a
block of calls is never emitted.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from ds4py.config import SamplingParams
from ds4py.contracts import Backend, Cancelled, Session
from ds4py.errors import CancelledError, Ds4Error, LocalProtocolError
from ds4py.generation.loop import Finished, FinishReason, Prefilled, Step, Token, generate
from ds4py.generation.sampling import Sampler
from ds4py.server.prompts import TextStack
from ds4py.text.reasoning import Delta
from ds4py.text.reply import ReplySplitter
from ds4py.text.stream import TextStream
from ds4py.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

Finish = Literal["stop", "length", "tool_calls", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a request asks of the model.

    Args:
        prompt: Token ids, at least one, fewer than the context holds.
        sampling: How tokens are chosen.
        stop: Texts that end the answer.
        max_tokens: Most tokens to generate; 0 only evaluates the prompt.
        thinking: The prompt opened the reasoning, which is to be told apart from the answer.
        calls: The answer ends with its first block of calls, which is to be read.
        token_ids: Report every sampled token id, also of tokens that show no text yet.
        progress: Report how much of the prompt is evaluated.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...]
    max_tokens: int
    thinking: bool = False
    calls: bool = False
    token_ids: bool = False
    progress: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What a request cost.

    Args:
        n_prompt: Tokens of the prompt.
        n_cached: Leading prompt tokens that were not evaluated again.
        n_completion: Sampled tokens, shown or not, without the end token.
        n_reasoning: Those of them before the answer, but for a few that stop texts held back.
        prefill_seconds: From the lease of a session to the first logits.
        decode_seconds: From there to the end.
    """

    n_prompt: int = 0
    n_cached: int = 0
    n_completion: int = 0
    n_reasoning: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Prefilling:
    """Some of the prompt is evaluated; only if the order asks for it.

    Args:
        n_done: Tokens that are cached now.
        n_prompt: Tokens of the prompt.
    """

    n_done: int
    n_prompt: int


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is evaluated; text follows."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool that the model asks its client to call.

    Args:
        index: Place among the calls of the reply.
        id: What the client names when it returns the result.
        name: The tool.
        arguments: JSON text of an object.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of the reply; an event carries answer, reasoning or calls, never two of them.

    Texts are never half a character and never part of a stop string.

    Args:
        text: Of the answer. May be empty if there are tokens.
        tokens: Ids sampled since the last piece, if the order asks for them.
        reasoning: Text of the reasoning.
        calls: Whole calls, behind all text.
    """

    text: str
    tokens: tuple[int, ...] = ()
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of a request, always its last event.

    Args:
        finish: The reason, in the words of the OpenAI dialect.
        error: Why it failed; exactly when `finish` is "error".
        tally: What it cost.
    """

    finish: Finish
    error: Exception | None = None
    tally: Tally = Tally()


Early = Prefilling | Started | Piece
Event = Early | Done
Emit = Callable[[Early], None]


class Performer:
    """Performs orders; any number of threads may do so at once.

    Args:
        backend: Sessions of the model.
        text: Tokenizer of the same model.
    """

    def __init__(self, backend: Backend, text: TextStack):
        self._backend = backend
        self._tokenizer = text.tokenizer

    def perform(self, order: Order, emit: Emit, cancelled: Cancelled) -> Done:
        """Generate one answer.

        Args:
            order: What to generate.
            emit: Takes events in order; raises `CancelledError` when nobody wants them any more.
            cancelled: Polled while waiting and between chunks and tokens.

        Returns:
            The end, also of a generation that broke off after the prompt was evaluated.

        Raises:
            Ds4Error: The prompt could not be evaluated; nothing was emitted.
        """
        with self._backend.lease(order.prompt, cancelled=cancelled) as session:
            return _Run(order, emit, self._tokenizer).drive(session, cancelled)


class _Run:
    """The state of one order while it runs."""

    def __init__(self, order: Order, emit: Emit, tokenizer: Tokenizer):
        self._order = order
        self._emit = emit
        self._tokenizer = tokenizer
        self._text = TextStream(order.stop)
        self._parts = ReplySplitter(thinking=order.thinking, calls=order.calls)
        self._began = time.monotonic()
        self._prefilled: float | None = None
        self._n_cached = 0
        self._n_completion = 0
        self._n_reasoning = 0

    def drive(self, session: Session, cancelled: Cancelled) -> Done:
        """Generate on a leased session; see `Performer.perform`."""
        events = generate(
            session,
            self._order.prompt,
            sampler=Sampler(self._order.sampling),
            eos_ids=self._tokenizer.eos_ids,
            max_tokens=self._order.max_tokens,
            cancelled=cancelled,
            progress=self._report if self._order.progress else None,
        )
        try:
            finish = self._consume(events)
        except Exception as error:
            if self._prefilled is None:
                raise
            if not isinstance(error, Ds4Error):
                _log.exception("generation failed")
            return Done(finish="error", error=error, tally=self._tally())
        return Done(finish=finish, tally=self._tally())

    def _consume(self, events: Iterable[Step]) -> Finish:
        for event in events:
            match event:
                case Prefilled():
                    self._prefilled = time.monotonic()
                    self._n_cached = event.n_cached
                    self._emit(Started())
                case Token():
                    self._take(event.id)
                    if self._text.stopped or self._parts.complete:
                        return self._end("stop")
                case Finished(reason=FinishReason.CANCELLED):
                    raise CancelledError("the request was cancelled")
                case Finished(reason=reason):
                    self._show(self._parts.push(self._text.finish()))
                    ended = reason is FinishReason.STOP and not self._text.stopped
                    stopped = self._text.stopped or ended
                    return self._end("stop" if stopped else "length", ended=ended)
        raise LocalProtocolError("a generation ended without saying why")

    def _report(self, n_done: int, n_prompt: int) -> None:
        self._emit(Prefilling(n_done, n_prompt))

    def _take(self, token: int) -> None:
        """Count a sampled token and show what it makes certain."""
        self._n_completion += 1
        self._n_reasoning += self._parts.thinking
        text = self._text.push(self._tokenizer.token_bytes(token))
        self._show(self._parts.push(text), (token,) if self._order.token_ids else ())

    def _show(self, delta: Delta, tokens: tuple[int, ...] = ()) -> None:
        if delta.reasoning:
            self._emit(Piece("", tokens, reasoning=delta.reasoning))
            tokens = ()
        if delta.content or tokens:
            self._emit(Piece(delta.content, tokens))

    def _end(self, finish: Finish, *, ended: bool = False) -> Finish:
        """Show what was held back, and the calls; `ended` tells that the model itself stopped."""
        delta, calls = self._parts.finish(ended=ended)
        self._show(delta)
        for index, call in enumerate(calls):
            name = f"call_{secrets.token_hex(16)}"
            self._emit(Piece("", calls=(Call(index, name, call.name, call.arguments),)))
        return "tool_calls" if calls else finish

    def _tally(self) -> Tally:
        now = time.monotonic()
        prefilled = now if self._prefilled is None else self._prefilled
        return Tally(
            n_prompt=len(self._order.prompt),
            n_cached=self._n_cached,
            n_completion=self._n_completion,
            n_reasoning=self._n_reasoning,
            prefill_seconds=prefilled - self._began,
            decode_seconds=now - prefilled,
        )
