"""From a request to the token ids of its prompt, and to other prompts of the same conversation.

Owns: how turns become messages of a chat format, which bare prompts are left as they are, where the
first question stands, and the refusal of prompts that do not fit. Refuses to know: JSON, sessions,
how formats write. Invariant: a prompt that `PromptWriter.write` returns has at least one token and
leaves room for one more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from ds4py.config import ServerConfig
from ds4py.contracts import Backend
from ds4py.errors import RequestError
from ds4py.server.history.conversations import ConversationMemory
from ds4py.server.history.exact_tokens import common_prefix
from ds4py.server.history.tool_calls import ToolCallMemory
from ds4py.server.requests.request import (
    ChatMessage,
    CompletionPrompt,
    Conversation,
    GenerationRequest,
    is_begun,
)
from ds4py.server.requests.state import TokenizedPrompt
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

_OTHER_QUESTIONS: Final = ("\u2042", "\u203d")
"""Questions that nobody asks, to see where questions begin."""


@dataclass(frozen=True, slots=True)
class TextStack:
    """Everything between text and token ids of one model.

    Args:
        tokenizer: Text to ids, ids to bytes.
        chat: Conversation to ids.
    """

    tokenizer: Tokenizer
    chat: ChatFormat


class PromptWriter:
    """Writes the prompts of one server; any number of threads may use it at once.

    Args:
        text: Tokenizer and chat format of the model.
        backend: Of the same model: how much fits, and which ids there are.
        config: How system messages and earlier calls are written.
        memory: Where the model's own words for earlier calls are found.

    Attributes:
        text: As given.
    """

    def __init__(
        self, text: TextStack, backend: Backend, config: ServerConfig, memory: ConversationMemory
    ):
        self.text = text
        self._backend = backend
        self._system_in_place = config.system_in_place
        self._tool_calls = memory.tool_calls if config.exact_replay else None
        self._disk_prefixes = memory.disk_prefixes

    def write(self, request: GenerationRequest) -> TokenizedPrompt:
        """Return the prompt of a request.

        Raises:
            RequestError: The model cannot do what is asked, its format refuses the conversation, an
                id is outside the vocabulary, or the prompt does not fit the context.
        """
        prompt, n_ctx = request.prompt, self._backend.n_ctx
        if isinstance(prompt, CompletionPrompt):
            ids = self._completion_ids(prompt, request.think)
            check_fits(ids, n_ctx, param="prompt")
            return TokenizedPrompt(ids)
        ids = self._conversation_ids(request, prompt)
        check_fits(ids, n_ctx, param=prompt.member)
        chat = self.text.chat
        return TokenizedPrompt(
            ids,
            thinking=chat.opens_reasoning(ids),
            may_think=chat.may_think and request.think != "none",
            calls=chat.call_format if prompt.tools.in_prompt else None,
        )

    def count(self, request: GenerationRequest) -> int:
        """Return the tokens of a conversation's prompt, however many.

        The number is rough where the prompt is so long that it was not written.

        Raises:
            RequestError: As `write`, except for prompts that do not fit.
        """
        conversation = _conversation_of(request)
        n_far_too_many = self._excess(conversation)
        if n_far_too_many is not None:
            return n_far_too_many
        return len(self._conversation_ids(request, conversation))

    def retry_ids(self, request: GenerationRequest) -> tuple[int, ...]:
        """Return what asks for another reply behind one whose calls cannot be read.

        Returns:
            Token ids; none if the format has no words for it.
        """
        conversation = _conversation_of(request)
        turns = [_turn(message, None) for message in conversation.messages]
        tools = conversation.tools.in_prompt
        return tuple(self.text.chat.retry_ids(turns, think=request.think, tools=tools))

    def prefix_length(self, request: GenerationRequest, ids: Sequence[int]) -> int:
        """Return how many tokens stand before the first question, whatever it is.

        That is the last turn of a user before any answer; what stands before it, system text and
        tools, is what other conversations begin with too.

        Args:
            request: A conversation.
            ids: Its prompt in tokens.

        Returns:
            Tokens; 0 without a question.
        """
        messages = _conversation_of(request).messages
        roles = [message.role for message in messages]
        end = roles.index("assistant") if "assistant" in roles else len(roles)
        asked = [n for n in range(end) if roles[n] == "user"]
        if not asked:
            return 0
        other = (*messages[: asked[-1]], ChatMessage("user", _OTHER_QUESTIONS[0]))
        return common_prefix(ids, self._chat_ids(request, other))

    def visible_ids(
        self, request: GenerationRequest, said: tuple[ChatMessage, ...]
    ) -> tuple[int, ...] | None:
        """Return what later prompts show of a conversation and its reply, without the reply's end.

        Formats write an answer otherwise when something follows it, without its reasoning for
        example; what follows is not known yet, so it is what all prompts that go on have in common.

        Args:
            request: A conversation.
            said: Its turns, and the reply at the end.

        Returns:
            Token ids; None if the end of the reply cannot be told in them.
        """
        calls = said[-1].calls
        role, call_id = ("tool", calls[0].id) if calls else ("user", "")
        try:
            written, other = (
                self._chat_ids(
                    request, (*said, ChatMessage(role, text, call_id=call_id)), answered=True
                )
                for text in _OTHER_QUESTIONS
            )
        except RequestError:  # the format refuses such a turn, which is no fault of who asks now
            return None
        ends = self.text.tokenizer.eos_ids
        shared = range(common_prefix(written, other) - 1, -1, -1)
        last = next((n for n in shared if written[n] in ends), None)
        return None if last is None else written[:last]

    def _conversation_ids(
        self, request: GenerationRequest, conversation: Conversation
    ) -> tuple[int, ...]:
        """Return the ids of a conversation's prompt, which may be too long by a little."""
        tools = conversation.tools.in_prompt
        if request.output_format is not None and tools:
            raise RequestError(
                "response_format: got it together with tools, expected one of them; drop the other",
                param="response_format",
            )
        if tools and self.text.chat.call_format is None:
            raise RequestError(
                "tools: got some, expected none: this model's chat format has no place for tools; "
                "serve a model that can call them, or leave them out",
                code="tools_not_supported",
                param="tools",
            )
        # before anything is written: that takes memory and minutes, only to be refused
        n_far_too_many = self._excess(conversation)
        if n_far_too_many is not None:
            raise too_long(n_far_too_many, self._backend.n_ctx, param=conversation.member)
        if self._disk_prefixes is not None:  # before writing, which finds calls in memory only
            calls = [call.id for turn in conversation.messages for call in turn.calls]
            self._disk_prefixes.recall_calls(calls)
        return self._chat_ids(request, conversation.messages)

    def _chat_ids(
        self, request: GenerationRequest, messages: Sequence[ChatMessage], *, answered: bool = False
    ) -> tuple[int, ...]:
        """Return the ids of some messages, by default with the assistant's turn opened.

        Those that end with an answer are a begun turn, which the model shall go on with.

        Args:
            request: A conversation; how it is written.
            messages: Those of the conversation, or others instead of them.
            answered: They end with an answer: open no further turn.

        Raises:
            RequestError: The model's format refuses them.
        """
        chat, conversation = self.text.chat, _conversation_of(request)
        turns = [_turn(message, self._tool_calls) for message in messages]
        has_system = any(message.role in ("system", "developer") for message in messages)
        if conversation.default_system and chat.default_system and not has_system:
            turns.insert(0, {"role": "system", "content": chat.default_system})

        def written(*, opened: bool) -> tuple[int, ...]:
            ids = chat.render_ids(
                turns,
                think=request.think,
                tools=conversation.tools.in_prompt,
                system_in_place=self._system_in_place,
                add_generation_prompt=opened,
            )
            return tuple(ids)

        if answered:
            return written(opened=False)
        if is_begun(messages):
            begun = written(opened=False)
            end = _end_of_turn(begun, self.text.tokenizer.eos_ids)
            if end is not None:
                return begun[:end]
        return written(opened=True)

    def _completion_ids(self, prompt: CompletionPrompt, think: str | None) -> tuple[int, ...]:
        """Return the ids of a bare prompt.

        Token ids are taken as they are. What becomes of a text is the model's chat format to say
        (docs/spec/server-and-cli.md#prompts, item 7), unless it is a whole prompt already.
        """
        content, n_ctx = prompt.content, self._backend.n_ctx
        if isinstance(content, str):
            n_far_too_many = excess(self.text, [ChatMessage("user", content)], (), n_ctx)
            if n_far_too_many is not None:
                raise too_long(n_far_too_many, n_ctx, param="prompt")
            if prompt.raw:
                return tuple(self.text.tokenizer.prompt_ids(content))
            return tuple(self.text.chat.completion_ids(content, think=think))
        n_vocab = self._backend.card.n_vocab
        for token in content:
            if not 0 <= token < n_vocab:
                raise RequestError(
                    f"prompt: got token id {token}, expected 0 to {n_vocab - 1}", param="prompt"
                )
        return content

    def _excess(self, conversation: Conversation) -> int | None:
        tools = conversation.tools.in_prompt
        return excess(self.text, conversation.messages, tools, self._backend.n_ctx)


def _conversation_of(request: GenerationRequest) -> Conversation:
    """Return the conversation of a request that cannot be anything else."""
    assert isinstance(request.prompt, Conversation)
    return request.prompt


def _end_of_turn(tokens: Sequence[int], eos_ids: Collection[int]) -> int | None:
    """Return where the end of the last turn stands, behind which there may be a line's end."""
    last = range(len(tokens) - 1, max(-1, len(tokens) - 1 - _BEHIND_END), -1)
    return next((n for n in last if tokens[n] in eos_ids), None)


def _turn(message: ChatMessage, said: ToolCallMemory | None) -> dict[str, object]:
    """Return a message as chat formats know it; what it does not have, they do not see.

    Args:
        message: Of a conversation.
        said: The words in which the model made its calls; None writes all calls again.
    """
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.calls
    ]
    block = (
        said.block_for([call.id for call in message.calls]) if said is not None and calls else ""
    )
    more = {
        "reasoning_content": message.reasoning,
        "tool_calls": calls,
        "tool_call_id": message.call_id,
        "continues": message.continues,
        "tool_block": block,
    }
    turn: dict[str, object] = {"role": message.role, "content": message.content}
    return turn | {name: value for name, value in more.items() if value}


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
