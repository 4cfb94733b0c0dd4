"""Bodies of `/v1/chat/completions` (docs/spec/server-and-cli.md#request-fields, #prompts).

Owns: their members. Refuses to know: tokens, templates, replies. Invariant: as in `api.json_body`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ds4py.config import ServerConfig
from ds4py.errors import RequestError
from ds4py.server.api.json_body import (
    MAX_MESSAGES,
    content_text,
    count,
    decode,
    is_absent,
    last_given,
    source,
    tool_texts,
    wrong,
)
from ds4py.server.api.options import OpenAi, openai_request
from ds4py.server.requests.request import (
    ChatMessage,
    Conversation,
    GenerationRequest,
    PastCall,
    Toolbox,
)

_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: msgspec.Raw = msgspec.Raw(b"null")


class _PastCall(msgspec.Struct):
    id: str | None = None
    function: _Function | None = None


class _ChatMessage(msgspec.Struct):
    role: str | None = None
    content: Any = None  # text, parts, or something that ds4 reads as empty
    reasoning_content: Any = None
    tool_calls: list[_PastCall] | None = None
    tool_call_id: str | None = None


class _ChatBody(OpenAi):
    messages: list[_ChatMessage] | None = None
    max_completion_tokens: int | float | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: Any = None
    default_system: bool | None = None


def read_chat(body: bytes, config: ServerConfig) -> GenerationRequest:
    """Check a body.

    Args:
        body: The bytes that came.
        config: What holds for requests that name no value.

    Raises:
        RequestError: Status 400; the sentence says what was found and what was expected.
    """
    parsed = decode(body, _ChatBody)
    if parsed.messages is None:
        raise RequestError("missing messages", param="messages")
    if not parsed.messages:
        raise wrong("messages", "an empty list", "at least one message")
    if len(parsed.messages) > MAX_MESSAGES:
        raise wrong("messages", len(parsed.messages), f"at most {MAX_MESSAGES}")
    turns = tuple(turn for turn in map(_message, parsed.messages) if turn)
    if not turns:
        raise wrong("messages", "no known role", f"one of {', '.join(sorted(_ROLES))}")
    name, value = last_given(
        body, max_tokens=parsed.max_tokens, max_completion_tokens=parsed.max_completion_tokens
    )

    def conversation() -> Conversation:
        tools = () if parsed.tool_choice == "none" else tool_texts(parsed.tools)
        return Conversation(turns, Toolbox(tools), default_system=bool(parsed.default_system))

    return openai_request(parsed, body, count(name, value), config, conversation)


def _message(message: _ChatMessage) -> ChatMessage | None:
    """Read one turn; a role that ds4 does not know drops it, a missing one means the user."""
    role = message.role or "user"
    if role == "function":
        role = "tool"
    if role not in _ROLES:
        return None
    calls = tuple(call for call in map(_past_call, message.tool_calls or ()) if call)
    return ChatMessage(
        role,
        content_text(message.content),
        reasoning=content_text(message.reasoning_content),
        calls=calls,
        call_id=message.tool_call_id or "",
    )


def _past_call(call: _PastCall) -> PastCall | None:
    """Read a call of an earlier turn; one without a name or arguments is dropped, as in ds4."""
    function = call.function
    if function is None or function.name is None or is_absent(function.arguments):
        return None
    arguments = source(function.arguments, "messages")
    if arguments.startswith('"'):
        arguments = msgspec.json.decode(arguments, type=str)
    return PastCall(call.id or "", function.name, arguments)
