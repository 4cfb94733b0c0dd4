"""A conversation as the token ids that the model saw and said.

Owns: what a question appends to a conversation, `TokenTranscript`, `ChatSession`. Refuses to know:
how tokens are evaluated. Invariant: an answer enters the next prompt as the very tokens that were
sampled, so that a session's cache serves every turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds4py.api.generation import Generation
from ds4py.text.chat_formats.template import ChatFormat
from ds4py.text.reasoning import THINK_END

if TYPE_CHECKING:
    from ds4py.server.requests.prompts import TextStack

Message = dict[str, str]
"""One turn in the form of OpenAI's API: `role`, `content` and maybe `reasoning_content`."""


def system_messages(chat: ChatFormat, system: str | None) -> list[Message]:
    """Return the system message of a conversation, if it has one; None takes the format's own."""
    text = chat.default_system if system is None else system
    return [{"role": "system", "content": text}] if text else []


def next_turn_ids(
    chat: ChatFormat, system: str | None, question: str, think: str | None
) -> list[int]:
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
        return chat.render_ids([*system_messages(chat, system), *said], think=think)

    one, other = written("1"), written("2")
    same = 0
    while one[-same - 1] == other[-same - 1] and same + 1 < min(len(one), len(other)):
        same += 1
    return one[len(one) - same :]


class TokenTranscript:
    """The tokens of a conversation: prompts, and answers as they were sampled.

    Args:
        text: Tokenizer and chat format of the model.
    """

    def __init__(self, text: TextStack):
        self._text = text
        self._ids: list[int] = []
        self._n_asked = 0  # tokens before the last answer

    @property
    def ids(self) -> Sequence[int]:
        """All tokens up to the last answer's end; empty before the first answer."""
        return self._ids

    def prompt(
        self,
        question: str,
        *,
        system: str | None,
        think: str | None,
        turns: Sequence[Message] = (),
    ) -> list[int]:
        """Return the ids of the conversation with one more question.

        Args:
            question: What the user says.
            system: System text; None is the format's own, empty is none.
            think: How much to reason: "none", "high" or "max"; None leaves it to the model.
            turns: What was said before the first answer that this transcript knows.

        Raises:
            RequestError: The format refuses such a conversation.
        """
        chat, tokenizer = self._text.chat, self._text.tokenizer
        if not self._ids:
            asked = {"role": "user", "content": question}
            messages = [*system_messages(chat, system), *turns, asked]
            return chat.render_ids(messages, think=think)
        ids = list(self._ids)
        answer = tokenizer.decode(ids[self._n_asked :], special=True)
        if chat.opens_reasoning(ids[: self._n_asked]) and THINK_END.encode() not in answer:
            ids += tokenizer.encode(THINK_END, special=True)  # it was stopped before it answered
        return ids + next_turn_ids(chat, system, question, think)

    def take(self, prompt: Sequence[int], ids: Sequence[int]) -> None:
        """Add sampled tokens to the conversation, and before the first of them its question."""
        if len(self._ids) < len(prompt):
            self._ids, self._n_asked = list(prompt), len(prompt)
        self._ids += ids

    def clear(self) -> None:
        """Forget what was said."""
        self._ids = []


Reply = Callable[[Sequence[int], Callable[[Sequence[int]], None]], Generation]
"""Begins a reply to token ids that tells the ids it samples."""


@dataclass
class ChatSession:
    """A conversation with a model; made by `LLM.session`.

    Each question goes on from the exact tokens of what was said, so only what is new is evaluated.

    Args:
        text: Tokenizer and chat format of the model.
        reply: Of the model.
        system: System text; None is the format's own, empty is none.
        think: How much to reason: "none", "high" or "max"; None leaves it to the model.
    """

    text: TextStack
    reply: Reply
    system: str | None = None
    think: str | None = None

    def __post_init__(self) -> None:
        self._said = TokenTranscript(self.text)

    @property
    def n_tokens(self) -> int:
        """Tokens of the conversation so far."""
        return len(self._said.ids)

    def ask(self, question: str) -> Generation:
        """Ask a question behind all that was said; read the reply before you ask the next.

        A reply that is closed early counts as said up to there, if it has at least one token.

        Raises:
            RequestError: The model's chat format refuses the conversation.
        """
        prompt = self._said.prompt(question, system=self.system, think=self.think)
        return self.reply(prompt, lambda ids: self._said.take(prompt, ids))

    def clear(self) -> None:
        """Forget what was said; the next question begins a new conversation."""
        self._said.clear()
