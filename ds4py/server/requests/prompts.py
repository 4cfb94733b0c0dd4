"""From a checked request to the token ids of its prompt.

Owns: how turns of a request become messages, which bare prompts are left as they are, and the
refusal of prompts that do not fit. Refuses to know: JSON, sessions, chat formats. Invariant: a
prompt that passed `check_fits` has at least one token and leaves room for one more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from ds4py.contracts import ModelCard
from ds4py.errors import RequestError
from ds4py.server.api.chat_messages import ChatMessage
from ds4py.text.chat_formats.template import ChatFormat
from ds4py.text.tokenizer.tokenizer import Tokenizer

_ALWAYS_EXACT: Final = 1 << 18
"""Characters that are always tokenized: so few cost little, whatever the context holds."""

_PLAUSIBLE: Final = 8
"""Characters for each token of the context, beyond which texts are weighed first."""

_SLICE: Final = 1 << 15
"""Characters that are weighed at once; a cut adds a token or two."""

_BEHIND_END: Final = 4
"""Tokens among which the end of a turn is searched."""

BlockFor = Callable[[Sequence[str]], str | None]
"""Returns the model's own words for calls with these ids, if they are known."""


@dataclass(frozen=True, slots=True)
class TextStack:
    """Everything between text and token ids of one model.

    Args:
        tokenizer: Text to ids, ids to bytes.
        chat: Conversation to ids.
    """

    tokenizer: Tokenizer
    chat: ChatFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How conversations are written.

    Args:
        think: How much to reason; None leaves it to the model's format.
        tools: JSON texts of those on offer.
        default_system: Begin with the format's own system text if no message has one.
        system_in_place: Leave system messages where they are.
        block_for: Finds the words in which the model made calls; None writes all calls again.
    """

    think: str | None = None
    tools: Sequence[str] = ()
    default_system: bool = False
    system_in_place: bool = False
    block_for: BlockFor | None = None


def chat_prompt(
    text: TextStack, messages: Sequence[ChatMessage], manner: Manner, *, answered: bool = False
) -> tuple[int, ...]:
    """Return the ids of a conversation, by default with the assistant's turn opened.

    One that ends with an answer is a begun turn, which the model shall go on with.

    Args:
        text: Of the model.
        messages: The conversation.
        manner: How it is written.
        answered: It ends with an answer: open no further turn.

    Raises:
        RequestError: The model's format refuses the conversation.
    """
    turns = [_turn(message, manner.block_for) for message in messages]
    has_system = any(message.role in ("system", "developer") for message in messages)
    if manner.default_system and text.chat.default_system and not has_system:
        turns.insert(0, {"role": "system", "content": text.chat.default_system})
    write = functools.partial(
        text.chat.render_ids,
        turns,
        think=manner.think,
        tools=manner.tools,
        system_in_place=manner.system_in_place,
    )
    if answered:
        return tuple(write(add_generation_prompt=False))
    if is_begun(messages):
        begun = write(add_generation_prompt=False)
        end = _end_of_turn(begun, text.tokenizer.eos_ids)
        if end is not None:
            return tuple(begun[:end])
    return tuple(write(add_generation_prompt=True))


def is_begun(messages: Sequence[ChatMessage]) -> bool:
    """Tell whether a conversation ends with an answer that the model shall go on with."""
    return bool(messages) and messages[-1].role == "assistant" and not messages[-1].calls


def _end_of_turn(tokens: Sequence[int], eos_ids: Collection[int]) -> int | None:
    """Return where the end of the last turn stands, behind which there may be a line's end."""
    last = range(len(tokens) - 1, max(-1, len(tokens) - 1 - _BEHIND_END), -1)
    return next((n for n in last if tokens[n] in eos_ids), None)


def retry_prompt(
    text: TextStack, messages: Sequence[ChatMessage], manner: Manner
) -> tuple[int, ...]:
    """Return the ids that ask for another reply behind one whose calls cannot be read.

    Args:
        text: Of the model.
        messages: The conversation before that reply.
        manner: How it is written.
    """
    turns = [_turn(message, None) for message in messages]
    return tuple(text.chat.retry_ids(turns, think=manner.think, tools=manner.tools))


def _turn(message: ChatMessage, block_for: BlockFor | None) -> dict[str, object]:
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
        "continues": message.continues,
        "tool_block": block_for([call.id for call in message.calls]) if block_for and calls else "",
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
    (docs/spec/server-and-cli.md#prompts, item 7), unless it is a whole prompt already.

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
    """Refuse a prompt that is empty or leaves no room (docs/spec/server-and-cli.md#overflow).

    Clients compact their conversation on this very wording and these fields.

    Raises:
        RequestError: Status 400.
    """
    n_prompt = len(prompt)
    if n_prompt == 0:
        raise RequestError(f"{param}: got no tokens, expected at least one", param=param)
    if n_prompt >= n_ctx:
        raise too_long(n_prompt, n_ctx, param=param)


def too_long(n_prompt: int, n_ctx: int, *, param: str) -> RequestError:
    """Return the refusal of a prompt that leaves no room in the context."""
    return RequestError(
        f"Prompt has {n_prompt} tokens, but the configured context size is {n_ctx} tokens",
        code="context_length_exceeded",
        param=param,
        extra={"n_prompt_tokens": n_prompt, "n_ctx": n_ctx},
    )


def excess(
    text: TextStack, messages: Sequence[ChatMessage], tools: Sequence[str], n_ctx: int
) -> int | None:
    """Find conversations that are far too long, without writing or tokenizing them as a whole.

    That takes a hundred times their size in memory, and minutes, for the largest body.

    Args:
        text: Of the model.
        messages: The conversation.
        tools: JSON texts of those on offer.
        n_ctx: Tokens that fit.

    Returns:
        Roughly the tokens of one that cannot fit; None if only its prompt can tell.
    """
    contents = [message.content for message in messages]
    others = [*tools, *(message.reasoning for message in messages)]
    others += [call.arguments for message in messages for call in message.calls]
    if sum(map(len, contents)) + sum(map(len, others)) <= max(_ALWAYS_EXACT, _PLAUSIBLE * n_ctx):
        return None
    n_said = _weighed(text.tokenizer, contents, n_ctx)
    if n_said > n_ctx + n_ctx // 16:
        return n_said
    # formats may leave reasoning out, but nobody has so much of it
    n_all = n_said + _weighed(text.tokenizer, others, 4 * n_ctx)
    return n_all if n_all > 4 * n_ctx else None


def _weighed(tokenizer: Tokenizer, texts: Sequence[str], limit: int) -> int:
    """Return roughly how many tokens some texts have; beyond a limit the rest is like the start."""
    whole = "".join(texts)
    n_read = n_tokens = 0
    while n_read < len(whole) and n_tokens <= 2 * limit:
        piece = whole[n_read : n_read + _SLICE]
        n_tokens += len(tokenizer.encode(piece, special=False))
        n_read += len(piece)
    return n_tokens * len(whole) // max(1, n_read)
