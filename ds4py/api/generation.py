"""One reply of a node: pieces of text as tokens are sampled, and all of it at the end.

Owns: the way from token ids through a session and the sampler to text. Refuses to know: how a node
is opened, what a prompt means. Invariant: nothing is evaluated before the first piece is asked for,
and leaving early gives the session back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from ds4py.api.events import Event, Figures, Piece
from ds4py.contracts import Progress
from ds4py.errors import Ds4Error
from ds4py.generation.loop import Finished, Prefilled, Token, generate
from ds4py.generation.sampling import Sampler
from ds4py.text.reasoning import ReasoningSplitter
from ds4py.text.stream import TextStream

if TYPE_CHECKING:
    from ds4py.runtime import Node


def _never() -> bool:
    return False


def stream_reply(
    node: Node,
    prompt: Sequence[int],
    sampler: Sampler,
    *,
    thinking: bool,
    max_tokens: int | None,
    stop: Sequence[str] = (),
    cancelled: Callable[[], bool] = _never,
    progress: Progress | None = None,
) -> Generator[Event, None, None]:
    """Yield the reply to token ids: a piece for each token, one for what was held back, figures.

    Args:
        node: Answers; its session is lent while the generator lives.
        prompt: At least one token, and fewer than the node's context.
        sampler: Chooses tokens; used by one reply at a time.
        thinking: Whether the prompt has opened the model's reasoning.
        max_tokens: Budget of the reply; None is what the context has left.
        stop: Strings that end the reply; they and what follows are left out.
        cancelled: Polled between chunks and tokens.
        progress: Told (prompt tokens evaluated, prompt tokens).

    Raises:
        CapacityError: The prompt leaves no room for a token.
        Ds4Error: A stage failed and could not be replaced in time.
    """
    tokenizer, stream = node.text.tokenizer, TextStream(stop)
    parts = ReasoningSplitter(thinking=thinking)
    prefilled = Prefilled(len(prompt), 0, 0.0)
    n_generated = 0
    with node.backend.lease(prompt, cancelled=cancelled) as session:
        for step in generate(
            session,
            prompt,
            sampler=sampler,
            eos_ids=tokenizer.eos_ids,
            max_tokens=max_tokens,
            progress=progress,
            cancelled=cancelled,
        ):
            match step:
                case Prefilled():
                    prefilled = step
                    if progress is not None:
                        progress(len(prompt), len(prompt))
                case Token(token):
                    n_generated += 1
                    reasoning, text = parts.push(stream.push(tokenizer.token_bytes(token)))
                    yield Piece(text, (token,), reasoning)
                    if stream.stopped:
                        yield _figures(prefilled, n_generated, 0.0, "stop")
                        return
                case Finished():
                    reasoning, text = parts.push(stream.finish())
                    yield Piece(text, (), reasoning + parts.finish().reasoning)
                    finish = "stop" if stream.stopped else step.reason.value
                    yield _figures(prefilled, step.n_tokens, step.seconds, finish)


def _figures(prefilled: Prefilled, n_tokens: int, seconds: float, finish: str) -> Figures:
    return Figures(
        n_prompt=prefilled.n_prompt,
        n_cached=prefilled.n_cached,
        n_generated=n_tokens,
        prefill_per_second=rate(prefilled.n_prompt - prefilled.n_cached, prefilled.seconds),
        decode_per_second=rate(n_tokens, seconds),
        finish=finish,
    )


def rate(count: int, seconds: float) -> float:
    """Return how many per second; 0 if no time was measured."""
    return count / seconds if seconds else 0.0


class Generation(Iterator[str]):
    """One reply. Iterate for its text as it is generated, or ask for all of it.

    Used by one thread at a time. Leaving it unfinished keeps its session busy: `close` it, or use
    it as a context manager.

        for text in llm.generate("Once upon a time"):
            print(text, end="", flush=True)

    Args:
        events: Of `stream_reply`; taken over.
        took: Told the token ids of every piece, in order.
    """

    def __init__(
        self,
        events: Generator[Event, None, None],
        took: Callable[[Sequence[int]], None] | None = None,
    ):
        self._events = events
        self._took = took
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._ids: list[int] = []
        self._figures: Figures | None = None

    def pieces(self) -> Iterator[Piece]:
        """Yield the rest of the reply with reasoning and token ids.

        Raises:
            Ds4Error: The reply failed; what was generated before stays readable.
        """
        for event in self._events:
            if isinstance(event, Figures):
                self._figures = event
                continue
            self._text.append(event.text)
            self._reasoning.append(event.reasoning)
            self._ids += event.ids
            if self._took is not None and event.ids:
                self._took(event.ids)
            yield event

    def __next__(self) -> str:
        for piece in self.pieces():
            if piece.text:
                return piece.text
        raise StopIteration

    @property
    def text(self) -> str:
        """The whole answer, without reasoning; waits for what is not generated yet."""
        self._finish()
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """The whole reasoning before the answer; waits as `text` does."""
        self._finish()
        return "".join(self._reasoning)

    @property
    def ids(self) -> tuple[int, ...]:
        """All sampled token ids, the end token not among them; waits as `text` does."""
        self._finish()
        return tuple(self._ids)

    @property
    def figures(self) -> Figures:
        """Counts, rates and why the reply ended; waits as `text` does.

        Raises:
            Ds4Error: The reply was closed or failed before its end.
        """
        self._finish()
        if self._figures is None:
            raise Ds4Error("the reply has no figures: it was closed, or failed, before its end")
        return self._figures

    def close(self) -> None:
        """Stop generating and give the session back; idempotent."""
        self._events.close()

    def _finish(self) -> None:
        for _ in self.pieces():
            pass

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
