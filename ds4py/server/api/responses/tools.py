"""Kinds of tools that `/v1/responses` knows, as functions that any model can call.

Owns: how each kind is offered to the model, and what its calls look like to the client
(docs/spec/server-and-cli.md#responses, #tools-to-prompt). Refuses to know: items, templates.
Invariant: a plain function is offered in the client's own words.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from ds4py.server.api.json_body import is_absent, tool_texts, wrong
from ds4py.server.requests.request import Toolbox, ToolName

_log = logging.getLogger(__name__)

TOOL_SEARCH: Final = "tool_search"
_ANY_OBJECT: Final = msgspec.Raw(b'{"type":"object","properties":{}}')
_ONE_TEXT: Final = msgspec.Raw(
    b'{"type":"object","properties":{"input":{"type":"string"}},"required":["input"]}'
)


class _Tool(msgspec.Struct):
    type: str | None = None
    name: str | None = None
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"")
    tools: list[msgspec.Raw] | None = None


def full_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a tool."""
    return (namespace or "") + name


def read_tools(tools: Sequence[msgspec.Raw]) -> Toolbox:
    """Read what is on offer; kinds that only their maker's servers run are left out.

    Raises:
        RequestError: A tool is no JSON object, or a group holds something that is none.
    """
    texts: list[str] = []
    names: dict[str, ToolName] = {}
    sources = tool_texts(tools)
    for n, source in enumerate(sources):
        tool = _decoded(source, f"tools[{n}]")
        match tool.type:
            case "function" | None:
                texts.append(source)
            case "namespace":
                for member in tool_texts(tool.tools, f"tools[{n}].tools"):
                    inner = _decoded(member, f"tools[{n}].tools")
                    full = full_name(tool.name, inner.name or "")
                    names[full] = ToolName("function", inner.name or "", tool.name)
                    texts.append(_function(full, inner.description, inner.parameters))
            case "custom":
                name = tool.name or ""
                names[name] = ToolName("custom", name)
                texts.append(_function(name, tool.description, _ONE_TEXT))
            case "tool_search":
                names[TOOL_SEARCH] = ToolName("tool_search", TOOL_SEARCH)
                said = tool.description or "Search for further tools by what they do."
                texts.append(_function(TOOL_SEARCH, said, tool.parameters))
            case other:
                _log.warning("a tool of type %a runs on no machine of ours: left out", other)
    return Toolbox(sources, tuple(texts), names)


def _decoded(text: str, param: str) -> _Tool:
    try:
        return msgspec.json.decode(text, type=_Tool)
    except msgspec.ValidationError as error:
        raise wrong(param, str(error)[:80], "a tool") from error


def _function(name: str, description: str | None, parameters: msgspec.Raw) -> str:
    tool = {
        "type": "function",
        "name": name,
        "description": description or "",
        "parameters": _ANY_OBJECT if is_absent(parameters) else parameters,
    }
    return msgspec.json.encode(tool).decode()
