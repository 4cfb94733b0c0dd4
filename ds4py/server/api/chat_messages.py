"""Turns of a conversation and tools, as any dialect hands them on.

Owns: `ChatMessage`, `PastCall`, the texts of contents and tools
(docs/spec/server-and-cli.md#prompts). Refuses to know: members of one dialect, templates.
Invariant: schemas of tools and arguments of past calls are the client's own JSON texts, byte for
byte, since they enter the prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ds4py.server.api.json_body import source, wrong
from ds4py.text.raw_json import members

_log = logging.getLogger(__name__)

MAX_MESSAGES: Final = 100_000
_MAX_TOOLS: Final = 10_000


@dataclass(frozen=True, slots=True)
class PastCall:
    """A call of a tool in an earlier turn; `arguments` is the client's own JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    Args:
        role: One of the five that templates know.
        content: Its text.
        reasoning: What an assistant thought before.
        calls: What an assistant asked for.
        call_id: The call that a tool answers.
        continues: It belongs to one turn with the message before, where the model's format can say
            so.
    """

    role: str
    content: str
    reasoning: str = ""
    calls: tuple[PastCall, ...] = ()
    call_id: str = ""
    continues: bool = False


def content_text(content: Any) -> str:
    """Join the text of a message; images, numbers and unknown parts are empty, as in ds4."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = [_part_text(part) for part in content]
    if any(text is None for text in texts):
        _log.warning("a message has parts that are no text (images, audio, files): ignored")
    return "".join(text for text in texts if text)


def _part_text(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else None


def tool_texts(tools: Sequence[msgspec.Raw] | None, param: str = "tools") -> tuple[str, ...]:
    """Return the client's own texts of tools.

    Raises:
        RequestError: There are absurdly many, or one is no JSON object.
    """
    if tools is not None and len(tools) > _MAX_TOOLS:
        raise wrong(param, f"{len(tools)} tools", f"at most {_MAX_TOOLS}")
    texts = tuple(source(tool, param) for tool in tools or ())
    for number, text in enumerate(texts):
        if members(text) is None:
            raise wrong(f"{param}[{number}]", f"{text!a:.80}", "a JSON object")
    return texts
