"""From a checked request to the token ids of its prompt.

Owns: how turns of a request become messages, which bare prompts are left as they are, and the
refusal of prompts that do not fit. Refuses to know: JSON, sessions, chat formats. Invariant: a
prompt that passed `check_fits` has at least one token and leaves room for one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds4py.contracts import ModelCard
from ds4py.errors import RequestError
from ds4py.server.schema import Message
from ds4py.text.chat import Chat
from ds4py.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextStack:
    """Everything between text and token ids of one model.

    Args:
        tokenizer: Text to ids, ids to bytes.
        chat: Conversation to ids.
    """

    tokenizer: Tokenizer
    chat: Chat


def chat_prompt(
    text: TextStack,
    messages: Sequence[Message],
    *,
    think: str | None = None,
    tools: Sequence[str] = (),
    default_system: bool = False,
) -> tuple[int, ...]:
    """Return the ids of a conversation with the assistant's turn opened.

    Args:
        text: Of the model.
        messages: The conversation.
        think: How much to reason; None leaves it to the model's format.
        tools: JSON texts of those on offer.
        default_system: Begin with the format's own system text if no message has one.

    Raises:
        RequestError: The model's format refuses the conversation.
    """
    turns = [_turn(message) for message in messages]
    has_system = any(message.role in ("system", "developer") for message in messages)
    if default_system and text.chat.default_system and not has_system:
        turns.insert(0, {"role": "system", "content": text.chat.default_system})
    return tuple(text.chat.render_ids(turns, think=think, tools=tools))


def _turn(message: Message) -> dict[str, object]:
    """Return a message as chat formats know it; what it does not have, they do not see."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.calls
    ]
    more = {
        "reasoning_content": message.reasoning,
        "tool_calls": calls,
        "tool_call_id": message.call_id,
    }
    turn: dict[str, object] = {"role": message.role, "content": message.content}
    return turn | {name: value for name, value in more.items() if value}


def completion_prompt(
    text: TextStack,
    card: ModelCard,
    prompt: str | Sequence[int],
    *,
    think: str | None = None,
    raw: bool = False,
) -> tuple[int, ...]:
    """Return the ids of a bare prompt.

    Token ids are taken as they are. What becomes of a text is the model's chat format to say
    (docs/spec/server-and-cli.md 1.8.7), unless it is a whole prompt already.

    Args:
        text: Of the model.
        card: Of the same model.
        prompt: Text or ids.
        think: How much to reason; None leaves it to the model's format.
        raw: The text is a prompt as the model reads it: its control tokens are recognised.

    Raises:
        RequestError: An id is outside the vocabulary.
    """
    if isinstance(prompt, str) and raw:
        return tuple(text.tokenizer.prompt_ids(prompt))
    if isinstance(prompt, str):
        return tuple(text.chat.completion_ids(prompt, think=think))
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
