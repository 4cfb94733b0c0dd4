"""What a generation tells about itself, event by event, and the whole that the events add up to.

Owns: the events between a generation thread and a client's connection, `Answer`. Refuses to know:
APIs, JSON, how events are made. Invariant: frozen values; an event is about one thing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Finish = Literal["stop", "length", "tool_calls", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What a request cost.

    Args:
        n_prompt: Tokens of the prompt.
        n_cached: Leading prompt tokens that were not evaluated again.
        n_completion: Sampled tokens, shown or not, without the end token.
        n_reasoning: Those of them before the answer, except for a few that stop texts held back.
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
class Queued:
    """The request waits for a session; `queue_position` is 1 for the next one."""

    queue_position: int


@dataclass(frozen=True, slots=True)
class Prefilling:
    """Some of the prompt is evaluated.

    Args:
        n_done: Tokens that are cached now.
        n_prompt: Tokens of the prompt.
    """

    n_done: int
    n_prompt: int


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is evaluated; the reply follows.

    Coming a second time, it takes back whatever followed the first: the reply begins again.

    Args:
        n_prompt: Tokens of the prompt.
        n_cached: Leading ones that needed no evaluation.
    """

    n_prompt: int
    n_cached: int


@dataclass(frozen=True, slots=True)
class Ranked:
    """A token and its probability, as clients see them.

    Args:
        text: Its bytes as UTF-8, damaged ones replaced.
        data: Its bytes.
        logprob: Natural logarithm of its probability.
    """

    text: str
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class LogProb:
    """A sampled token and what could have stood in its place, most probable first."""

    chosen: Ranked
    top: tuple[Ranked, ...]


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Some of the reply's text: answer or reasoning, never both.

    Texts are never half a character and never part of a stop string.

    Args:
        text: Of the answer. May be empty if there are tokens.
        tokens: Ids sampled since the last piece, if the request asks for them.
        reasoning: Text of the reasoning.
        logprobs: Of the tokens sampled since the last piece, if the request asks for them.
    """

    text: str
    tokens: tuple[int, ...] = ()
    reasoning: str = ""
    logprobs: tuple[LogProb, ...] = ()


@dataclass(frozen=True, slots=True)
class CallOpened:
    """A call of a tool begins.

    Args:
        index: Place among the calls of the reply.
        id: What the client names when it returns the result.
        name: The tool.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallFragment:
    """Some of the JSON text of the open call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallClosed:
    """Nothing more of this call follows; one that is not whole may be half a command."""

    index: int
    whole: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of a request, always its last event.

    Args:
        finish: The reason, in the words of the OpenAI API.
        stop: The stop text that ended the reply.
        error: Why it failed; exactly when `finish` is "error".
        tally: What it cost.
    """

    finish: Finish
    stop: str | None = None
    error: Exception | None = None
    tally: Tally = Tally()


Written = TextPiece | CallOpened | CallFragment | CallClosed
"""What a reply consists of."""

Early = Queued | Prefilling | Started | Written
ReplyEvent = Early | Done

Emit = Callable[[Early], None]
"""Takes one event on its way to the client."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool that the model asks its client to call; `arguments` is the JSON text of an object."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Answer:
    """A reply while it is put together from events; used by one task at a time."""

    _texts: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[tuple[CallOpened, list[str]]] = field(default_factory=list)
    _broken: set[int] = field(default_factory=set)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[LogProb] = field(default_factory=list)

    def add(self, event: Written) -> None:
        """Take the next event of the reply."""
        match event:
            case TextPiece():
                self._texts.append(event.text)
                self._reasoning.append(event.reasoning)
                self.tokens += event.tokens
                self.logprobs += event.logprobs
            case CallOpened():
                self._calls.append((event, []))
            case CallFragment():
                self._calls[event.index][1].append(event.text)
            case CallClosed(index=index, whole=False):
                self._broken.add(index)
            case CallClosed():
                pass

    def drop_calls(self) -> None:
        """Leave the calls out: the reply ended in the middle of them."""
        self._calls.clear()

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasoning)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls, without those that broke off."""
        return tuple(
            Call(opened.index, opened.id, opened.name, "".join(parts))
            for opened, parts in self._calls
            if opened.index not in self._broken
        )
