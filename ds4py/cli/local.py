"""Ask a model whose coordinator is this very process.

Owns: the way of a question through text, session and sampler, and a conversation as the token ids
that the model saw. Refuses to know: how a node is opened, terminals. Invariant: leaving the events
early gives the session back; an answer enters the next prompt as the very tokens that were sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING

from ds4py.cli.answer import Event, Figures, Piece, Question
from ds4py.cli.conversation import Conversation, Message, Progress, Stage, Status
from ds4py.cli.interrupt import interrupted
from ds4py.config import SamplingParams
from ds4py.errors import ConfigError, Ds4Error
from ds4py.generation.loop import Finished, Prefilled, Token, generate
from ds4py.generation.sampling import Sampler
from ds4py.text.chat import Chat
from ds4py.text.reasoning import THINK_END, ReasoningSplitter
from ds4py.text.stream import TextStream

if TYPE_CHECKING:
    from ds4py.contracts import StageStatus
    from ds4py.runtime import Node

OpenNode = Callable[[int | None], AbstractContextManager["Node"]]
"""Opens a node whose sessions have so many tokens; None takes what the user's flags say."""


def ask(
    node: Node,
    question: Question,
    sampling: SamplingParams,
    *,
    cancelled: Callable[[], bool],
    progress: Progress,
) -> Iterator[Event]:
    """Yield the answer of a node.

    Args:
        node: Ready to serve.
        question: What is asked.
        sampling: How tokens are chosen.
        cancelled: Polled between chunks and tokens.
        progress: Told (prompt tokens done, prompt tokens).

    Raises:
        Ds4Error: The answer failed.
    """
    prompt = prompt_ids(node, question)
    return _answer(
        node,
        prompt,
        Sampler(sampling),
        thinking=question.ids is None and node.text.chat.opens_reasoning(prompt),
        max_tokens=question.max_tokens,
        cancelled=cancelled,
        progress=progress,
    )


def _answer(
    node: Node,
    prompt: Sequence[int],
    sampler: Sampler,
    *,
    thinking: bool,
    max_tokens: int | None,
    cancelled: Callable[[], bool],
    progress: Progress,
) -> Generator[Event, None, None]:
    """Yield the answer to token ids; a piece for each token, and one for what was held back."""
    tokenizer, stream = node.text.tokenizer, TextStream()
    parts = ReasoningSplitter(thinking=thinking)
    prefilled = Prefilled(len(prompt), 0, 0.0)
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
                    progress(len(prompt), len(prompt))
                case Token(token):
                    reasoning, text = parts.push(stream.push(tokenizer.token_bytes(token)))
                    yield Piece(text, (token,), reasoning)
                case Finished():
                    reasoning, text = parts.push(stream.finish())
                    yield Piece(text, (), reasoning + parts.finish().reasoning)
                    yield _figures(prefilled, step)


def prompt_ids(node: Node, question: Question) -> tuple[int, ...]:
    """Return the prompt's token ids."""
    if question.ids is not None:
        return question.ids
    assert question.text is not None
    if question.raw:
        return tuple(node.text.tokenizer.prompt_ids(question.text))
    chat = node.text.chat
    messages = [*_system(chat, question.system), {"role": "user", "content": question.text}]
    return tuple(chat.render_ids(messages, think=question.think))


def _system(chat: Chat, given: str | None) -> list[Message]:
    """Return the system message of a conversation, if it has one."""
    system = chat.default_system if given is None else given
    return [{"role": "system", "content": system}] if system else []


def next_turn_ids(chat: Chat, system: str | None, question: str, think: str | None) -> list[int]:
    """Return what a question appends to a conversation, from the mark that ends the answer before.

    No format tells that by itself. So two conversations are written that differ in the answer
    alone: what they have in common behind it is what is looked for. That the end of an answer of
    one character is no part of a longer token is true for every format that ends turns with a
    control token or a line break.

    Args:
        chat: The model's format.
        system: System text; None is the format's own.
        question: What the user says next.
        think: How much to reason about it.

    Raises:
        RequestError: The format refuses such a conversation.
    """

    def written(answer: str) -> list[int]:
        turns = [("user", "0"), ("assistant", answer), ("user", question)]
        said = [{"role": role, "content": content} for role, content in turns]
        return chat.render_ids([*_system(chat, system), *said], think=think)

    one, other = written("1"), written("2")
    same = 0
    while one[-same - 1] == other[-same - 1] and same + 1 < min(len(one), len(other)):
        same += 1
    return one[len(one) - same :]


class LocalPartner:
    """A `Partner` whose coordinator is this process.

    Args:
        open_node: Called at once, and again for another context.
        sampling: How tokens are chosen; one generator of random numbers serves all answers.
        max_tokens: Output budget of an answer; None is the context.
        tell: Takes lines about what happens.
    """

    def __init__(
        self,
        open_node: OpenNode,
        sampling: SamplingParams,
        max_tokens: int | None,
        tell: Callable[[str], None],
    ) -> None:
        self._open_node = open_node
        self._sampler = Sampler(sampling)
        self._max_tokens = max_tokens
        self._tell = tell
        self._ids: list[int] = []  # of the conversation; none until it was asked about
        self._n_asked = 0  # those before the last answer
        self._stack = ExitStack()
        self._node = self._stack.enter_context(open_node(None))

    def reply(
        self, talk: Conversation, question: str, progress: Progress
    ) -> Generator[Event, None, None]:
        """See `Partner.reply`."""
        prompt = self._prompt(talk, question)
        with interrupted() as stopping:
            for event in _answer(
                self._node,
                prompt,
                self._sampler,
                thinking=self._node.text.chat.opens_reasoning(prompt),
                max_tokens=self._max_tokens,
                cancelled=self._cancelled(stopping.is_set),
                progress=progress,
            ):
                if isinstance(event, Piece) and event.ids:
                    self._take(prompt, event.ids)
                yield event

    def _cancelled(self, stopping: Callable[[], bool]) -> Callable[[], bool]:
        """Return what is polled; over workers it says once that their steps are waited for."""
        config = self._node.coordinator.config
        quiet = not config.route and config.listen is None

        def cancelled() -> bool:
            nonlocal quiet
            if stopping() and not quiet:
                quiet = True
                self._tell("stopping: steps that workers have begun are waited for")
            return stopping()

        return cancelled

    def _prompt(self, talk: Conversation, question: str) -> list[int]:
        """Return the ids of the conversation and a question."""
        chat, tokenizer = self._node.text.chat, self._node.text.tokenizer
        if not self._ids:
            asked = {"role": "user", "content": question}
            messages = [*_system(chat, talk.system), *talk.turns, asked]
            return chat.render_ids(messages, think=talk.think)
        ids = list(self._ids)
        answer = tokenizer.decode(ids[self._n_asked :], special=True)
        if chat.opens_reasoning(ids[: self._n_asked]) and THINK_END.encode() not in answer:
            ids += tokenizer.encode(THINK_END, special=True)  # it was stopped before it answered
        return ids + next_turn_ids(chat, talk.system, question, talk.think)

    def _take(self, prompt: Sequence[int], ids: Sequence[int]) -> None:
        """Add sampled tokens to the conversation, and before the first its question."""
        if len(self._ids) < len(prompt):
            self._ids, self._n_asked = list(prompt), len(prompt)
        self._ids += ids

    def forget(self) -> None:
        """See `Partner.forget`."""
        self._ids = []

    def resize(self, n_ctx: int) -> None:
        """See `Partner.resize`: the model is loaded anew, for caches are taken when it is."""
        card, before = self._node.backend.card, self._node.backend.n_ctx
        if n_ctx > card.n_ctx_train:
            raise ConfigError(f"context {n_ctx}: expected at most the model's {card.n_ctx_train}")
        if n_ctx <= len(self._ids):
            said = f"the conversation has {len(self._ids)} tokens already"
            raise ConfigError(f"context {n_ctx}: {said}; choose more, or /clear it")
        try:
            self._reopen(n_ctx)
        except Ds4Error:
            self._reopen(before)
            raise

    def _reopen(self, n_ctx: int) -> None:
        self._stack.close()
        self._node = self._stack.enter_context(self._open_node(n_ctx))

    def status(self) -> Status:
        """See `Partner.status`."""
        backend, health = self._node.backend, self._node.backend.health()
        return Status(
            model=backend.card.name,
            where="in this process",
            n_ctx=backend.n_ctx,
            missing=health.missing,
            stages=tuple(map(_stage, health.stages)),
        )

    def close(self) -> None:
        """See `Partner.close`."""
        self._stack.close()


def _stage(stage: StageStatus) -> Stage:
    span = stage.span
    layers = "no layers" if span is None else f"layers {span.start}-{span.end}"
    return Stage(
        stage.name,
        f"{layers} + head" if span is not None and span.has_output else layers,
        _rate(stage.prefill_tokens, stage.prefill_usec / 1e6),
        _rate(stage.decode_tokens, stage.decode_usec / 1e6),
    )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _figures(prefilled: Prefilled, finished: Finished) -> Figures:
    return Figures(
        n_prompt=prefilled.n_prompt,
        n_cached=prefilled.n_cached,
        n_generated=finished.n_tokens,
        prefill_per_second=_rate(prefilled.n_prompt - prefilled.n_cached, prefilled.seconds),
        decode_per_second=_rate(finished.n_tokens, finished.seconds),
        finish=finished.reason.value,
    )
