"""The tool markup of DeepSeek V4: how offered tools and past calls are written into a prompt.

Owns: the tags, what is escaped inside them, and the words that explain them to the model
(docs/spec/deepseek4-model.md#tools-preamble, #calls). Refuses to know: messages, token ids, how
calls are parsed (`tool_calls.tagged`). Invariant: names, values and schemas are ordinary text,
whatever they spell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ds4py.errors import RequestError
from ds4py.text.raw_json import members, minified
from ds4py.text.tokenizer.deepseek4_tokens import Marker, PromptPart, marked

_PARAMETER_END: Final = f"</{Marker.DSML}parameter>"
_ATTRIBUTE: Final = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})

# The publisher's text, changed where ds4 changes it. The sentences about literal characters and
# about parameter names are our own words for what ds4 says there.
_BEFORE: Final = """\
## Tools

You have access to a set of tools to help answer the user question. You can invoke tools by \
writing a "<DSML:tool_calls>" block like the following:

<DSML:tool_calls>
<DSML:invoke name="$TOOL_NAME">
<DSML:parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</DSML:parameter>
...
</DSML:invoke>
<DSML:invoke name="$TOOL_NAME2">
...
</DSML:invoke>
</DSML:tool_calls>

String parameters should be specified as raw text and set `string="true"`. Write every character \
of them literally: `>`, `&` and `&&` never become XML or HTML entities. The only exception is a \
string that itself contains the exact text `</DSML:parameter>`: begin it with `&lt;` there. For \
all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set \
`string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
_AFTER: Final = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls. \
Name parameters exactly as their schema does."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool.

    Args:
        name: The tool.
        arguments: JSON text, meant to be an object.
    """

    name: str
    arguments: str

    @classmethod
    def from_message(cls, item: object) -> ToolCall | None:
        """Read an entry of a message's `tool_calls`; None if it lacks a name or arguments."""
        function = item.get("function") if isinstance(item, Mapping) else None
        if not isinstance(function, Mapping):
            return None
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or arguments is None:
            return None
        is_text = isinstance(arguments, str)
        return cls(name, arguments if is_text else json.dumps(arguments, ensure_ascii=False))


def preamble_parts(tools: Sequence[object]) -> list[PromptPart]:
    """Return the text that offers tools: the rules of the markup, and the schemas.

    Args:
        tools: At least one; each a JSON text, which is kept as it is, or a mapping. Of either the
            member `function` counts if there is one.

    Raises:
        RequestError: A tool is no JSON object.
    """
    schemas = "\n".join(_schema(tool, n) for n, tool in enumerate(tools))
    before, after = (text.replace("DSML:", Marker.DSML) for text in (_BEFORE, _AFTER))
    return [*marked(before), schemas, *marked(after)]


def call_parts(calls: Sequence[ToolCall]) -> list[PromptPart]:
    """Return the block of an assistant's calls, with the blank line before it."""
    parts: list[PromptPart] = ["\n\n<", Marker.DSML, "tool_calls>\n"]
    for call in calls:
        parts += _tag("invoke", call.name, ">\n")
        for name, value in _arguments(call).items():
            parts += _parameter(name, value)
        parts += ["</", Marker.DSML, "invoke>\n"]
    return [*parts, "</", Marker.DSML, "tool_calls>"]


def exact_parts(block: str) -> list[PromptPart]:
    """Return a block in the very words in which the model wrote it; only its tags are markers."""
    return marked(block, (Marker.DSML,))


def _schema(tool: object, n: int) -> str:
    if isinstance(tool, Mapping):
        return json.dumps(tool.get("function", tool), ensure_ascii=False)
    found = members(tool) if isinstance(tool, str) else None
    if found is None:
        raise RequestError(f"tools[{n}]: got {tool!a:.80}, expected a JSON object", param="tools")
    return found.get("function", str(tool))


def _arguments(call: ToolCall) -> dict[str, str]:
    found = members(call.arguments)
    return {"arguments": json.dumps(call.arguments)} if found is None else found


def _parameter(name: str, value: str) -> list[PromptPart]:
    is_text = value.startswith('"')
    if is_text:
        body = json.loads(value).replace(_PARAMETER_END, "&lt;" + _PARAMETER_END[1:])
    else:
        body = (minified(value) or value).replace(_PARAMETER_END, "\\u003c" + _PARAMETER_END[1:])
    opening = _tag("parameter", name, f' string="{str(is_text).lower()}">')
    return [*opening, body, "</", Marker.DSML, "parameter>\n"]


def _tag(kind: str, name: str, rest: str) -> list[PromptPart]:
    return ["<", Marker.DSML, f'{kind} name="{name.translate(_ATTRIBUTE)}"{rest}']
