"""Bodies of `/v1/messages` (server-and-cli.md#request-fields, #prompts, #thinking-controls).

Owns: their members. Refuses to know: tokens, templates, replies. Invariant: as in `api.json_body`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from ds4py.config import ServerConfig
from ds4py.errors import RequestError
from ds4py.server.api.json_body import (
    MAX_MESSAGES,
    Number,
    content_text,
    count,
    decode,
    is_absent,
    source,
    tool_texts,
    wrong,
)
from ds4py.server.api.options import (
    ResponseFormat,
    Sampled,
    Thinking,
    effort_word,
    model_name,
    output_format_of,
    sampling_of,
    stop_texts,
    thinking_word,
)
from ds4py.server.history.pending_tools import PendingTools
from ds4py.server.requests.request import (
    ChatMessage,
    Conversation,
    GenerationRequest,
    OutputFormat,
    PastCall,
    Toolbox,
)
from ds4py.text.raw_json import members

_log = logging.getLogger(__name__)

_ROLES: Final = frozenset({"system", "user", "assistant"})
_READ: Final = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result"})
_SERVED: Final = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_")
"""Begin the types of tools that only their maker's servers run."""
_BILLING: Final = "x-anthropic-"
"""Begins system texts that change with every request and would break every reuse of a prefix."""


class _Block(msgspec.Struct):
    type: str | None = None
    text: Any = None
    thinking: Any = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.Raw(b"")
    tool_use_id: str | None = None
    content: Any = None


class _Turn(msgspec.Struct):
    role: str | None = None
    content: str | list[_Block | str] | None = None


class _ToolChoice(msgspec.Struct):
    type: str | None = None


class _OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: ResponseFormat | None = None


class _Body(Sampled):
    messages: list[_Turn] | None = None
    system: Any = None
    top_k: Number | None = None
    stop_sequences: str | list[Any] | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: _ToolChoice | str | None = None
    thinking: bool | Thinking | None = None
    reasoning_effort: str | None = None
    output_config: _OutputConfig | None = None
    output_format: ResponseFormat | None = None  # an earlier place of the same


def read_messages(
    body: bytes, config: ServerConfig, pending: PendingTools | None = None
) -> GenerationRequest:
    """Check a body.

    Args:
        body: The bytes that came.
        config: What holds for requests that name no value.
        pending: Conversations that results of tools may go on with; None: they bring their own.

    Raises:
        RequestError: Status 400; the sentence says what was found and what was expected.
    """
    parsed = decode(body, _Body)
    if parsed.messages is None:
        raise RequestError("missing messages", param="messages")
    if len(parsed.messages) > MAX_MESSAGES:
        raise wrong("messages", len(parsed.messages), f"at most {MAX_MESSAGES}")
    turns = [turn for message in parsed.messages for turn in _turns(message)]
    if not turns:
        raise wrong("messages", "none with a known role", f"one of {', '.join(sorted(_ROLES))}")
    choice = parsed.tool_choice
    refuses = (choice if isinstance(choice, str) else choice and choice.type) == "none"
    tools = Toolbox(() if refuses else _tools(parsed.tools))
    messages = (*_system(parsed.system), *turns)
    think = _think(parsed)
    return GenerationRequest(
        model=model_name(parsed.model),
        max_tokens=_budget(parsed, config),
        sampling=sampling_of(
            config.sampling,
            temperature=parsed.temperature,
            top_p=parsed.top_p,
            top_k=parsed.top_k,
        ),
        stop=stop_texts("stop_sequences", parsed.stop_sequences),
        stream=bool(parsed.stream),
        think=think or config.think,
        # beside tools nothing can be enforced
        output_format=None if tools.sources else _output_format(parsed),
        call_id_prefix="toolu_",
        prompt=_conversation(
            messages, tools, names_tools=refuses or parsed.tools is not None, pending=pending
        ),
    )


def _conversation(
    messages: tuple[ChatMessage, ...],
    tools: Toolbox,
    *,
    names_tools: bool,
    pending: PendingTools | None,
) -> Conversation:
    """Return the whole conversation, of which a client may send the results of tools alone.

    Args:
        messages: Those of the body.
        tools: The same.
        names_tools: The body says something about tools, if only that there are none; else those of
            the conversation before stay on offer.
        pending: See `read_messages`.
    """
    kept = None
    if pending is not None:
        kept = pending.resumed(messages, id_name="tool_use_id", history="messages history")
    if kept is None:
        return Conversation(messages, tools)
    return Conversation(kept.messages, tools if names_tools else Toolbox(kept.tools.sources))


def _budget(parsed: _Body, config: ServerConfig) -> int:
    budget = count("max_tokens", parsed.max_tokens)
    return config.max_tokens if budget is None else budget


def _think(parsed: _Body) -> str | None:
    thinking, output = parsed.thinking, parsed.output_config
    on = thinking.type != "disabled" if isinstance(thinking, Thinking) else thinking
    effort = effort_word("output_config.effort", output.effort if output else None)
    if effort is None:
        effort = effort_word("reasoning_effort", parsed.reasoning_effort)
    return thinking_word(parsed.model, effort, on=on)


def _output_format(parsed: _Body) -> OutputFormat | None:
    config = parsed.output_config
    asked = config.format if config and config.format else parsed.output_format
    return output_format_of(asked, "output_config.format")


def _tools(tools: Sequence[msgspec.Raw] | None) -> tuple[str, ...]:
    """Return the client's own texts of the tools that it can run itself."""
    own = []
    for text in tool_texts(tools):
        kind = (members(text) or {}).get("type", "").strip('"')
        if kind.startswith(_SERVED):
            _log.warning("a tool of type %a runs on no machine of ours: left out", kind)
        else:
            own.append(text)
    return tuple(own)


def _system(system: Any) -> Iterator[ChatMessage]:
    if isinstance(system, list):
        texts = (content_text([block]) for block in system)
        system = "\n".join(text for text in texts if text and not text.startswith(_BILLING))
    if isinstance(system, str) and system:
        yield ChatMessage("system", system)


def _turns(turn: _Turn) -> Iterator[ChatMessage]:
    """Read one turn; a user's becomes several, because results of tools are turns elsewhere."""
    role = turn.role or "user"
    if role not in _ROLES:
        return
    blocks = _blocks(turn.content)
    if role == "assistant":
        yield _assistant(blocks)
        return
    texts: list[str] = []
    yielded = False
    for block in blocks:
        if block.type == "tool_result":
            if texts:
                yield ChatMessage(role, "".join(texts), continues=yielded)
                texts, yielded = [], True
            yield ChatMessage(
                "tool",
                content_text(block.content),
                call_id=block.tool_use_id or "",
                continues=yielded,
            )
            yielded = True
        elif isinstance(block.text, str):
            texts.append(block.text)
    if texts or not yielded:
        yield ChatMessage(role, "".join(texts), continues=yielded)


def _blocks(content: str | list[_Block | str] | None) -> Sequence[_Block]:
    listed = [content] if isinstance(content, str) else content or []
    blocks = [_Block("text", one) if isinstance(one, str) else one for one in listed]
    if any(block.type not in _READ and not isinstance(block.text, str) for block in blocks):
        _log.warning("a message has blocks that are no text (images, documents): ignored")
    return blocks


def _assistant(blocks: Sequence[_Block]) -> ChatMessage:
    return ChatMessage(
        "assistant",
        "".join(block.text for block in blocks if isinstance(block.text, str)),
        reasoning="".join(block.thinking for block in blocks if isinstance(block.thinking, str)),
        calls=tuple(call for block in blocks if (call := _call(block)) is not None),
    )


def _call(block: _Block) -> PastCall | None:
    if block.type != "tool_use" or block.name is None:
        return None
    arguments = "{}" if is_absent(block.input) else source(block.input, "messages")
    return PastCall(block.id or "", block.name, arguments)
