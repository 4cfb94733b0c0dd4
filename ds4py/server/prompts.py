"""From a checked request to the token ids of its prompt.

Owns: the meeting of chat template and tokenizer, the decision what a bare completion prompt
becomes, and the refusal of prompts that do not fit. Refuses to know: JSON, sessions. Invariant: a
prompt that passed `check_fits` has at least one token and leaves room for one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds4py.contracts import ModelCard
from ds4py.errors import RequestError
from ds4py.server.schema import Message
from ds4py.text.chat import ChatTemplate
from ds4py.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextStack:
    """Everything between text and token ids of one model.

    Args:
        tokenizer: Text to ids, ids to bytes.
        chat: Conversation to ids.
    """

    tokenizer: Tokenizer
    chat: ChatTemplate


def chat_prompt(text: TextStack, messages: Sequence[Message]) -> tuple[int, ...]:
    """Return the ids of a conversation with the assistant's turn opened.

    Raises:
        RequestError: The model's template refuses the conversation.
    """
    turns = [{"role": message.role, "content": message.content} for message in messages]
    return tuple(text.chat.render_ids(turns))


def completion_prompt(
    text: TextStack, card: ModelCard, prompt: str | Sequence[int]
) -> tuple[int, ...]:
    """Return the ids of a bare prompt.

    Token ids are taken as they are. Text is continued raw, with BOS where the model wants one, and
    its control tokens are recognised: that is what users of the OpenAI endpoint expect of a base
    model. ds4 wraps it as a chat turn instead (docs/spec/server-and-cli.md 1.8.7); a family that
    needs this decides it here.

    Raises:
        RequestError: An id is outside the vocabulary.
    """
    if isinstance(prompt, str):
        return tuple(text.tokenizer.prompt_ids(prompt, special=True))
    for token in prompt:
        if not 0 <= token < card.n_vocab:
            raise RequestError(
                f"prompt: got token id {token}, expected 0 to {card.n_vocab - 1}", param="prompt"
            )
    return tuple(prompt)


def check_fits(prompt: Sequence[int], n_ctx: int, *, param: str) -> None:
    """Refuse a prompt that is empty or leaves no room (docs/spec/server-and-cli.md 1.9).

    Clients compact their conversation on this very wording and these fields.

    Raises:
        RequestError: Status 400.
    """
    n_prompt = len(prompt)
    if n_prompt == 0:
        raise RequestError(f"{param}: got no tokens, expected at least one", param=param)
    if n_prompt >= n_ctx:
        raise RequestError(
            f"Prompt has {n_prompt} tokens, but the configured context size is {n_ctx} tokens",
            code="context_length_exceeded",
            param=param,
            extra={"n_prompt_tokens": n_prompt, "n_ctx": n_ctx},
        )
