"""Ask a model whose coordinator is this very process.

Owns: questions of a terminal as prompts of a node, `LocalPartner`. Refuses to know: how a node is
opened, terminals, how tokens become text. Invariant: leaving the events
early gives the session back; an answer enters the next prompt as the very tokens that were sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING

from ds4py.api.chat import TokenTranscript, system_messages
from ds4py.api.events import Event, Piece
from ds4py.api.generation import rate, stream_reply
from ds4py.cli.chat.conversation import ChatHistory, Progress, StageFigures, Status
from ds4py.cli.chat.interrupt import interrupted
from ds4py.cli.chat.printing import Question
from ds4py.config import SamplingParams
from ds4py.errors import ConfigError, Ds4Error
from ds4py.generation.sampling import Sampler

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
    return stream_reply(
        node,
        prompt,
        Sampler(sampling),
        thinking=question.ids is None and node.text.chat.opens_reasoning(prompt),
        max_tokens=question.max_tokens,
        cancelled=cancelled,
        progress=progress,
    )


def prompt_ids(node: Node, question: Question) -> tuple[int, ...]:
    """Return the prompt's token ids."""
    if question.ids is not None:
        return question.ids
    assert question.text is not None
    if question.raw:
        return tuple(node.text.tokenizer.prompt_ids(question.text))
    chat = node.text.chat
    messages = [*system_messages(chat, question.system), {"role": "user", "content": question.text}]
    return tuple(chat.render_ids(messages, think=question.think))


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
        self._stack = ExitStack()
        self._node = self._stack.enter_context(open_node(None))
        self._said = TokenTranscript(self._node.text)

    def reply(
        self, talk: ChatHistory, question: str, progress: Progress
    ) -> Generator[Event, None, None]:
        """See `Partner.reply`."""
        prompt = self._said.prompt(question, system=talk.system, think=talk.think, turns=talk.turns)
        with interrupted() as stopping:
            for event in stream_reply(
                self._node,
                prompt,
                self._sampler,
                thinking=self._node.text.chat.opens_reasoning(prompt),
                max_tokens=self._max_tokens,
                cancelled=self._cancelled(stopping.is_set),
                progress=progress,
            ):
                if isinstance(event, Piece) and event.ids:
                    self._said.take(prompt, event.ids)
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

    def forget(self) -> None:
        """See `Partner.forget`."""
        self._said.clear()

    def resize(self, n_ctx: int) -> None:
        """See `Partner.resize`: the model is loaded again, for caches are taken when it is."""
        card, before = self._node.backend.card, self._node.backend.n_ctx
        if n_ctx > card.n_ctx_train:
            raise ConfigError(f"context {n_ctx}: expected at most the model's {card.n_ctx_train}")
        if n_ctx <= len(self._said.ids):
            said = f"the conversation has {len(self._said.ids)} tokens already"
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


def _stage(stage: StageStatus) -> StageFigures:
    layer_range = stage.layers
    layers = "no layers" if layer_range is None else f"layers {layer_range.start}-{layer_range.end}"
    return StageFigures(
        stage.name,
        f"{layers} + head" if layer_range is not None and layer_range.has_output else layers,
        rate(stage.prefill_tokens, stage.prefill_usec / 1e6),
        rate(stage.decode_tokens, stage.decode_usec / 1e6),
    )
