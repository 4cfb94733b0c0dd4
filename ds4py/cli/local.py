"""Ask a model whose coordinator is this very process.

Owns: the way of one question through text, session and sampler. Refuses to know: how a node is
opened, terminals. Invariant: leaving the events early gives the session back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ds4py.cli.answer import Event, Figures, Piece, Question
from ds4py.config import SamplingParams
from ds4py.generation.loop import Finished, Prefilled, Token, generate
from ds4py.generation.sampling import Sampler
from ds4py.text.reasoning import ReasoningSplitter
from ds4py.text.stream import TextStream

if TYPE_CHECKING:
    from ds4py.runtime import Node


def ask(
    node: Node,
    question: Question,
    sampling: SamplingParams,
    *,
    cancelled: Callable[[], bool],
    progress: Callable[[int, int], None],
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
    tokenizer, stream = node.text.tokenizer, TextStream()
    opened = question.ids is None and node.text.chat.opens_reasoning(prompt)
    parts = ReasoningSplitter(thinking=opened)
    prefilled = Prefilled(len(prompt), 0, 0.0)
    with node.backend.lease(prompt, cancelled=cancelled) as session:
        for step in generate(
            session,
            prompt,
            sampler=Sampler(sampling),
            eos_ids=tokenizer.eos_ids,
            max_tokens=question.max_tokens,
            progress=progress,
            cancelled=cancelled,
        ):
            match step:
                case Prefilled():
                    prefilled = step
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
    system = chat.default_system if question.system is None else question.system
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question.text})
    return tuple(chat.render_ids(messages, think=question.think))


def _figures(prefilled: Prefilled, finished: Finished) -> Figures:
    evaluated = prefilled.n_prompt - prefilled.n_cached
    return Figures(
        n_prompt=prefilled.n_prompt,
        n_cached=prefilled.n_cached,
        n_generated=finished.n_tokens,
        prefill_per_second=evaluated / prefilled.seconds if prefilled.seconds else 0.0,
        decode_per_second=finished.n_tokens / finished.seconds if finished.seconds else 0.0,
        finish=finished.reason.value,
    )
