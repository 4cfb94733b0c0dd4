"""Honest requests of HTTP clients, and honest replies of models, to begin with.

Owns: one example of everything that a client may ask in any dialect, and of every way in which a
model writes calls. Refuses to know: damage, sockets. Invariant: everything here is the same in
every process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ds4py.text.tokenizer.deepseek4_tokens import Marker
from ds4py.text.tool_calls.formats import DSML, CallFormat, format_of

Json = dict[str, Any]

_SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "string"}}}
_PARAMETERS: Final = {"type": "object", "properties": {"city": {"type": "string"}}}
_FUNCTION: Final = {"name": "weather", "description": "Say it.", "parameters": _PARAMETERS}
_TOOL: Final = {"type": "function", "function": _FUNCTION}
_SAMPLED: Final = {"model": "toy", "temperature": 0, "top_p": 0.9, "stream": False}
_OPENAI: Final = {
    **_SAMPLED,
    "max_tokens": 4,
    "top_k": 40,
    "min_p": 0.05,
    "seed": 7,
    "stop": ["\n\n", "END"],
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"5": 1, "80": -100},
}
_PAST_CALL: Final = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Åre"}'},
}
_CHAT: Final[Sequence[Json]] = (
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True},
    {
        **_OPENAI,
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "the weather?"}]},
            {"role": "assistant", "content": None, "tool_calls": [_PAST_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "-3"},
        ],
        "tools": [_TOOL],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 3,
    },
    {
        **_OPENAI,
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 3,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True},
        },
        "reasoning_effort": "high",
        "thinking": {"type": "enabled"},
        "thinking_budget": 2,
        "chat_template_kwargs": {"enable_thinking": False},
        "default_system": True,
        "return_token_ids": True,
        "return_progress": True,
    },
)
_COMPLETIONS: Final[Sequence[Json]] = (
    {**_OPENAI, "prompt": "hello the world", "logprobs": 2, "raw": True},
    {
        "prompt": [5, 80, 3],
        "max_tokens": 3,
        "response_format": {"type": "regex", "regex": "[a-z]+"},
    },
)
_MESSAGES: Final[Sequence[Json]] = (
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True},
    {
        **_SAMPLED,
        "max_tokens": 4,
        "top_k": 3,
        "stop_sequences": ["END"],
        "system": [{"type": "text", "text": "Be kind."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "the weather?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Å"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "-3"}],
            },
        ],
        "tools": [{"name": "weather", "input_schema": _PARAMETERS}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
    },
)
_RESPONSES: Final[Sequence[Json]] = (
    {"input": "hi", "max_output_tokens": 4, "stream": True},
    {
        **_SAMPLED,
        "max_output_tokens": 4,
        "instructions": "Be kind.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "-3"},
            {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "a b"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": "done"},
        ],
        "tools": [
            {"type": "function", **_FUNCTION},
            {"type": "custom", "name": "patch", "description": "Patch."},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", **_FUNCTION}]},
            {"type": "tool_search", "parameters": _PARAMETERS},
        ],
        "tool_choice": "auto",
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}},
    },
)

BODIES: Final[Mapping[str, Sequence[Json]]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": _COMPLETIONS,
    "/v1/messages": _MESSAGES,
    "/v1/responses": _RESPONSES,
}
"""Bodies by path; together they have every member that a reader knows."""

COUNTER: Final = "/v1/messages/count_tokens"
PAGES: Final = ("/health", "/stats", "/metrics", "/v1/models", "/v1/models/toy", "/", "/no/such")


def request(path: str, body: Json | None = None) -> bytes:
    """Return a request as a client sends it; without a body it asks for a page."""
    if body is None:
        return f"GET {path} HTTP/1.1\r\nHost: toy\r\nAccept: */*\r\n\r\n".encode()
    text = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: toy:80\r\nUser-Agent: fuzz\r\n"
        f"Content-Type: application/json\r\nAuthorization: Bearer none\r\n"
        f"Content-Length: {len(text)}\r\n\r\n"
    )
    return head.encode() + text


_DSML: Final = Marker.DSML
FORMATS: Final[Sequence[CallFormat | None]] = (
    None,
    DSML,
    format_of("tools <tool_call>"),
    format_of("tools <tool_call> <function= <parameter="),
    format_of("tools [TOOL_CALLS]"),
    format_of('tools {"name": function name, "parameters": dictionary'),
)
"""Every way of writing calls, and none."""

REPLIES: Final = (
    "Hello <world>, é😀.",
    f'So.\n\n<{_DSML}tool_calls>\n<{_DSML}invoke name="weather">\n'
    f'<{_DSML}parameter name="city" string="true">Å &amp; &lt;b></{_DSML}parameter>\n'
    f'<{_DSML}parameter name="n" string="false">[1, {{"a": null}}]</{_DSML}parameter>\n'
    f"</{_DSML}invoke>\n</{_DSML}tool_calls>",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "\\u00c5\\n"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "<tool_call>\n<function=weather>\n<parameter=city>\nÅre\n</parameter>\n"
    "<parameter=n>\n[1]\n</parameter>\n</function>\n</tool_call>",
    '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Å"}}]',
    '[TOOL_CALLS]weather[ARGS]{"city": "Å"}[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}',
    '<|python_tag|>{"name": "say", "parameters": {"city": "Å"}}; {"name": "f", "parameters": {}}',
    '{"name": "weather", "parameters": {"city": ["Å", 1.5e3, true]}}',
    '{"answer": 42}',
)
"""Answers with calls and without, in each of the ways."""
