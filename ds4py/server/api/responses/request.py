"""Bodies of `/v1/responses` (docs/spec/server-and-cli.md#request-fields, #responses).

Owns: their members and items. Refuses to know: tokens, templates, replies, kinds of tools
(`tools`). Invariant: as in `api.json_body`; unlike in other APIs, contents are strict: what is
no text is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from ds4py.config import ServerConfig
from ds4py.errors import RequestError
from ds4py.server.api.json_body import (
    MAX_MESSAGES,
    Number,
    count,
    decode,
    is_absent,
    last_given,
    source,
    wrong,
)
from ds4py.server.api.options import (
    ResponseFormat,
    Sampled,
    effort_word,
    model_name,
    output_format_of,
    sampling_of,
    thinking_word,
)
from ds4py.server.api.responses.tools import full_name, read_tools
from ds4py.server.history.pending_tools import PendingTools
from ds4py.server.requests.request import ChatMessage, Conversation, GenerationRequest, PastCall

_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
_SUMMARIES: Final = frozenset({"auto", "concise", "detailed"})
_TEXTS: Final = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_CALLS: Final = {
    "function_call": None,
    "custom_tool_call": None,
    "local_shell_call": "local_shell",
    "web_search_call": "web_search_call",
    "tool_search_call": "tool_search",
    "image_generation_call": "image_generation_call",
}
_RESULTS: Final = frozenset(
    name.removesuffix("_call") + suffix for name in _CALLS for suffix in ("_call_output", "_output")
)
_SKIPPED: Final = frozenset({"compaction", "context_compaction"})


class _Block(msgspec.Struct):
    type: str | None = None
    text: str | None = None


class _Item(msgspec.Struct):
    type: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | list[_Block | str] | None = None
    summary: str | list[_Block | str] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    action: msgspec.Raw = msgspec.Raw(b"")
    output: msgspec.Raw = msgspec.Raw(b"")
    tools: list[msgspec.Raw] | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class _Text(msgspec.Struct):
    format: ResponseFormat | None = None


class _Body(Sampled):
    input: str | list[_Item] | None = None
    instructions: str | None = None
    max_output_tokens: Number | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: Any = None
    reasoning: _Reasoning | None = None
    text: _Text | None = None
    previous_response_id: Any = None
    conversation: Any = None


def read_responses(
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
    _check_stateless(parsed)
    if parsed.input is None:
        raise RequestError("missing input", param="input")
    items = [_Item(content=parsed.input)] if isinstance(parsed.input, str) else parsed.input
    if not items or len(items) > MAX_MESSAGES:
        raise wrong("input", f"{len(items)} items", f"1 to {MAX_MESSAGES}")
    _check_tool_choice(parsed.tool_choice)
    system = [ChatMessage("system", parsed.instructions)] if parsed.instructions else []
    messages = (*system, *_turns(items))
    name, budget = last_given(
        body, max_tokens=parsed.max_tokens, max_output_tokens=parsed.max_output_tokens
    )
    effort = parsed.reasoning.effort if parsed.reasoning else None
    word = effort_word("reasoning.effort", effort)
    model, max_tokens = model_name(parsed.model), count(name, budget)
    return GenerationRequest(
        model=model,
        max_tokens=config.max_tokens if max_tokens is None else max_tokens,
        sampling=sampling_of(config.sampling, temperature=parsed.temperature, top_p=parsed.top_p),
        stream=bool(parsed.stream),
        think=word or thinking_word(parsed.model, None, on=None) or config.think,
        output_format=output_format_of(parsed.text.format if parsed.text else None, "text.format"),
        show_reasoning=bool(parsed.reasoning and parsed.reasoning.summary in _SUMMARIES),
        prompt=_conversation(parsed, items, messages, pending),
    )


def _conversation(
    parsed: _Body,
    items: Sequence[_Item],
    messages: tuple[ChatMessage, ...],
    pending: PendingTools | None,
) -> Conversation:
    """Return the whole conversation, of which a client may send the results of tools alone.

    Args:
        parsed: The body, with the tools that it offers.
        items: Its input, which may have found further tools.
        messages: The same as messages.
        pending: See `read_responses`.
    """
    searches = (item for item in items if item.type == "tool_search_output")
    found = [tool for item in searches for tool in item.tools or ()]
    refuses = parsed.tool_choice == "none"
    tools = read_tools([] if refuses else [*(parsed.tools or ()), *found])
    kept = None
    if pending is not None:
        kept = pending.resumed(messages, id_name="call_id", history="input history")
    if kept is None:
        return Conversation(messages, tools, member="input")
    if not (refuses or parsed.tools is not None):  # those of the conversation before stay on offer
        tools = read_tools([msgspec.Raw(text.encode()) for text in kept.tools.sources])
    return Conversation(kept.messages, tools, member="input")


def _check_stateless(parsed: _Body) -> None:
    for name in ("previous_response_id", "conversation"):
        if getattr(parsed, name) is not None:
            raise RequestError(
                f"{name} is not supported: this server keeps no responses; "
                "replay the full input history",
                param=name,
            )


def _check_tool_choice(choice: Any) -> None:
    if choice is None or choice in ("none", "auto"):
        return
    if isinstance(choice, str):
        raise RequestError(
            f"tool_choice={ascii(choice)[1:-1]:.40} not supported", param="tool_choice"
        )
    raise RequestError("forced tool_choice not supported", param="tool_choice")


def _turns(items: Sequence[_Item]) -> Iterator[ChatMessage]:
    """Read items; calls join the assistant's message before them, reasoning the one behind it."""
    pending: ChatMessage | None = None  # the assistant's turn as far as it was read
    for n, item in enumerate(items):
        part = _assistants_part(item, n)
        if part is not None:
            if pending is not None and not _joins(pending, part):
                yield pending
                pending = None
            pending = part if pending is None else _joined(pending, part)
            continue
        if pending is not None:
            yield pending
            pending = None
        yield from _other(item, n)
    if pending is not None:
        yield pending


def _assistants_part(item: _Item, n: int) -> ChatMessage | None:
    """Return what an item adds to an assistant's turn; None if it is no part of one."""
    _check_whole(item, n)
    if item.type in _CALLS:
        return ChatMessage("assistant", "", calls=(_call(item, n),))
    if item.type == "reasoning":
        texts = [_text(item.summary, n), _text(item.content, n)]
        return ChatMessage("assistant", "", reasoning="\n".join(filter(None, texts)))
    if item.type in (None, "message") and item.role == "assistant":
        return ChatMessage("assistant", _text(item.content, n))
    return None


def _joins(before: ChatMessage, part: ChatMessage) -> bool:
    """Tell whether a part belongs to the same turn as those before it."""
    if part.calls:
        return True
    return not (before.content or before.calls)


def _joined(before: ChatMessage, part: ChatMessage) -> ChatMessage:
    return replace(
        before,
        content=before.content + part.content,
        reasoning="\n".join(filter(None, (before.reasoning, part.reasoning))),
        calls=before.calls + part.calls,
    )


def _other(item: _Item, n: int) -> Iterator[ChatMessage]:
    if item.type in _SKIPPED:
        return
    if item.type in _RESULTS:
        yield ChatMessage("tool", _output(item, n), call_id=item.call_id or "")
    elif item.type in (None, "message"):
        role = item.role or "user"
        if role in _ROLES:
            yield ChatMessage(role, _text(item.content, n))
    else:
        known = ", ".join(["message", "reasoning", *_CALLS, "and their outputs"])
        raise RequestError(
            f"invalid JSON request: input[{n}].type: got {item.type!a:.40}, expected {known}",
            param=f"input[{n}]",
        )


def _check_whole(item: _Item, n: int) -> None:
    if item.status not in (None, "completed"):
        raise RequestError(
            f"invalid JSON request: input[{n}].status: got {item.status!a:.40}, expected completed;"
            " leave half-finished items out",
            param=f"input[{n}]",
        )


def _call(item: _Item, n: int) -> PastCall:
    name = _CALLS[item.type or ""] or full_name(item.namespace, item.name or "")
    given = [raw for raw in (item.arguments, item.input, item.action) if not is_absent(raw)]
    text = source(given[0], f"input[{n}]") if given else "{}"
    if text.startswith('"'):
        plain = msgspec.json.decode(text, type=str)
        custom = item.type == "custom_tool_call"
        text = msgspec.json.encode({"input": plain}).decode() if custom else plain
    return PastCall(item.call_id or "", name, text)


def _output(item: _Item, n: int) -> str:
    """Return the text of a result: a string, blocks of text, or any other value as its JSON."""
    if is_absent(item.output):
        return "" if item.tools is None else "tools were found"
    text = source(item.output, f"input[{n}]")
    if text.startswith('"'):
        return msgspec.json.decode(text, type=str)
    if text.startswith("["):
        return _text(_blocks(item.output, n), n)
    return text


def _blocks(raw: msgspec.Raw, n: int) -> list[_Block | str]:
    try:
        return msgspec.json.decode(raw, type=list[_Block | str])
    except msgspec.ValidationError as error:
        raise wrong(f"input[{n}].output", "a list of other things", "blocks of text") from error


def _text(content: str | list[_Block | str] | None, n: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_block_text(block, n) for block in content)


def _block_text(block: _Block | str, n: int) -> str:
    if isinstance(block, str):
        return block
    if block.type not in _TEXTS:
        raise RequestError(
            f"invalid JSON request: input[{n}]: got a block of type {block.type!a:.40}, "
            f"expected one of {', '.join(sorted(_TEXTS))}",
            param=f"input[{n}]",
        )
    return block.text or ""
