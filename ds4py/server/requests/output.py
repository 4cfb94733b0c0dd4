"""One reply of the model while it is sampled: tokens to events.

Owns: what of each token is certain and for whom; the ids of calls; when reasoning is cut short and
when a grammar begins. Refuses to know: sessions, logits, how events are sent. Invariant: text after
a stop string or after a block of calls is never emitted.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Final

from ds4py.generation.choice import TokenLogprobs
from ds4py.generation.logits_processors import SamplingControls
from ds4py.generation.loop import Token
from ds4py.server.requests.events import (
    Answer,
    CallClosed,
    CallFragment,
    CallOpened,
    Emit,
    LogProb,
    Ranked,
    TextPiece,
    Written,
)
from ds4py.server.requests.state import RequestState
from ds4py.text.parts import CallArguments, CallBegun, CallEnded, Content, Reasoning, ReplyPart
from ds4py.text.reasoning import THINK_END
from ds4py.text.reply import ReplySplitter
from ds4py.text.stream import TextStream
from ds4py.text.tokenizer.tokenizer import Tokenizer

_REPLACEMENT: Final = "\ufffd"
_IMPOSSIBLE: Final = -9999.0
"""What JSON says of a probability of zero, as OpenAI does."""


class OutputProcessor:
    """One reply; used by one thread.

    Args:
        state: Of the request; only read, except that its grammar begins with the answer.
        emit: Takes the events of the reply in order.
        tokenizer: Of the model.
    """

    def __init__(self, state: RequestState, emit: Emit, tokenizer: Tokenizer):
        prompt = state.prompt
        self._request = state.request
        self._meter = state.meter
        self._constraint = state.constraint
        self._reads_calls = prompt.calls is not None
        self._emit = emit
        self._tokenizer = tokenizer
        self._text = TextStream(state.request.stop)
        self._parts = ReplySplitter(
            thinking=prompt.thinking, calls=prompt.calls, may_think=prompt.may_think
        )
        self._shown = frozenset(
            tokenizer.special_ids[name]
            for name in (prompt.calls.control_tokens if prompt.calls else ())
            if name in tokenizer.special_ids
        )
        self._ids: list[str] = []
        self._unsent: list[int] = []
        self._logprobs: list[LogProb] = []
        self._cut_short = False
        if self._constraint is not None and not prompt.thinking:
            self._constraint.start()
        self.answer = Answer()
        self.tokens: list[int] = []
        self.n_reasoning = 0

    def controls(self) -> SamplingControls:
        """Return what steers the choice of the reply's tokens."""
        return SamplingControls(
            logit_bias=self._request.logit_bias,
            constraint=self._constraint,
            greedy_now=(lambda: self._parts.structural) if self._reads_calls else None,
            forced=None if self._request.thinking_budget is None else self._forced,
            n_logprobs=self._request.n_logprobs,
        )

    def _forced(self) -> Sequence[int]:
        """Return the end of reasoning that has used up its budget, once."""
        budget = self._request.thinking_budget
        if budget is None or not self._parts.thinking or self.n_reasoning < budget:
            return ()
        if self._cut_short:
            return ()
        self._cut_short = True
        return self._tokenizer.encode(THINK_END, special=True)

    @property
    def n_tokens(self) -> int:
        """Sampled tokens."""
        return len(self.tokens)

    @property
    def in_block(self) -> bool:
        """Whether calls have begun."""
        return self._parts.n_calls > 0 or self._parts.structural

    @property
    def complete(self) -> bool:
        """Whether nothing that follows counts."""
        return self._text.stopped or self._parts.complete

    @property
    def stop(self) -> str | None:
        """The stop text that ended it."""
        return self._text.matched

    @property
    def says_all(self) -> bool:
        """Whether what its client sees stands for all of its tokens.

        It does not if a stop text, or calls or reasoning that broke off, were left out, or if some
        of its bytes are no text.
        """
        parts = self._parts
        broken = parts.malformed or (self.in_block and not parts.called)
        unclear = _REPLACEMENT in self.answer.text or _REPLACEMENT in self.answer.reasoning
        return not (self._text.stopped or parts.thinking or broken or unclear)

    @property
    def malformed(self) -> bool:
        """Whether it has calls that cannot be read."""
        return self._parts.malformed

    @property
    def block(self) -> str:
        """The calls in the model's own words."""
        return self._parts.block

    def take(self, token: Token) -> None:
        """Count a sampled token and emit what it makes certain."""
        self.tokens.append(token.id)
        thinking = self._parts.thinking  # before the push: a tag that ends it is reasoning itself
        self.n_reasoning += thinking
        self._meter.token(reasoning=thinking)
        if token.logprobs is not None and not thinking:
            self._logprobs.append(self._logprob(token.id, token.logprobs))
        if self._request.token_ids:
            self._unsent.append(token.id)
        self._show(self._parts.push(self._text.push(self._bytes(token.id))))
        if self._unsent or self._logprobs:  # the token made no text certain, but is told at once
            self._say(self._piece(""))
        if thinking and not self._parts.thinking and self._constraint is not None:
            self._constraint.start()  # the grammar is the answer's: reasoning is free

    def _bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token, special=token in self._shown)

    def _logprob(self, token: int, found: TokenLogprobs) -> LogProb:
        top = tuple(self._ranked(one, logprob) for one, logprob in found.ranked)
        return LogProb(self._ranked(token, found.chosen), top)

    def _ranked(self, token: int, logprob: float) -> Ranked:
        data = self._tokenizer.token_bytes(token, special=True)
        known = logprob if math.isfinite(logprob) else _IMPOSSIBLE
        return Ranked(data.decode("utf-8", "replace"), data, known)

    def end(self, *, by_model: bool) -> bool:
        """Emit what was held back; tell whether the reply is at its own end."""
        # what waited for a stop text is text first; only then can the parts be told to end
        self._show(self._parts.push(self._text.finish()))
        self._show(self._parts.finish(ended=by_model and not self._text.stopped))
        return by_model or self._text.stopped

    def close(self) -> list[str]:
        """Emit the rest; return the ids of the calls, none if they do not count.

        Calls that cannot be read are text, unless their client was already told of one.
        """
        if self._parts.malformed and not (self._request.stream and self._parts.n_calls):
            self._say(TextPiece(self._parts.raw_block))
        if not self._parts.called:
            self.answer.drop_calls()
            return []
        return self._ids

    def _say(self, event: Written) -> None:
        self.answer.add(event)
        self._emit(event)

    def _piece(self, text: str, *, reasoning: str = "") -> TextPiece:
        """Return some text, with what is known of the tokens since the last one."""
        tokens, self._unsent = tuple(self._unsent), []
        logprobs, self._logprobs = tuple(self._logprobs), []
        return TextPiece(text, tokens, reasoning=reasoning, logprobs=logprobs)

    def _show(self, parts: Sequence[ReplyPart]) -> None:
        for part in parts:
            match part:
                case Reasoning(text=text):
                    self._say(self._piece("", reasoning=text))
                case Content(text=text):
                    self._say(self._piece(text))
                case CallBegun():
                    self._ids.append(f"{self._request.call_id_prefix}{secrets.token_hex(16)}")
                    self._say(CallOpened(part.index, self._ids[-1], part.name))
                case CallArguments():
                    self._say(CallFragment(part.index, part.text))
                case CallEnded():
                    self._say(CallClosed(part.index, part.whole))
