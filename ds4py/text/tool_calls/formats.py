"""How models write tool calls: what begins a block, and which grammar reads it.

Owns: the formats that are known, as data, and the choice by the text of a chat template. Refuses to
know: the grammars, where in a reply a block may stand, who executes calls. Invariant: a model whose
calls cannot be read has no format, and then nothing that it writes is a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from ds4py.text.tool_calls.json import json_calls
from ds4py.text.tool_calls.scanner import Scanner, Steps
from ds4py.text.tool_calls.tagged import STYLES, dsml_calls, function_calls
from ds4py.text.tool_calls.writer import CallWriter

Grammar = Callable[[Scanner, CallWriter, str, str], Steps[None]]
"""Reads a block whose opening was read; gets what it opened with and what it closes with."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How one model writes calls.

    Args:
        tags: What a block opens and closes with; an empty closing: its last call ends it.
        grammar: Reads a block.
        control_tokens: Spellings of tokens that other replies leave out although the grammar needs
            them; not every vocabulary has them all.
        bare: A reply that begins with an object may be a block without any opening.
    """

    tags: tuple[tuple[str, str], ...]
    grammar: Grammar
    control_tokens: tuple[str, ...] = ()
    bare: bool = False


DSML: Final = CallFormat(
    tuple((f"<{style}tool_calls>", f"</{style}tool_calls>") for style in STYLES), dsml_calls
)
"""DeepSeek V4's."""

_HERMES_TAGS: Final = (("<tool_call>", "</tool_call>"),)
_HERMES: Final = CallFormat(_HERMES_TAGS, json_calls, _HERMES_TAGS[0])
_FUNCTIONS: Final = CallFormat(_HERMES_TAGS, function_calls, _HERMES_TAGS[0])
_MISTRAL: Final = CallFormat(
    (("[TOOL_CALLS]", ""),),
    partial(json_calls, named=True),
    ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
)
_LLAMA: Final = CallFormat(
    (("<|python_tag|>", ""),),
    partial(json_calls, joints=(";", "{")),
    ("<|python_tag|>",),
    bare=True,
)

# The first row whose texts are all in the template counts.
_BY_TEMPLATE: Final[tuple[tuple[tuple[str, ...], CallFormat | None], ...]] = (
    (("<arg_key>",), None),  # GLM's; it opens with Hermes's tag
    (("<tool_call>", "<function=", "<parameter="), _FUNCTIONS),
    (("<tool_call>",), _HERMES),
    (("[TOOL_CALLS]",), _MISTRAL),
    (('{"name": function name, "parameters": dictionary',), _LLAMA),
)


def format_of(template: str) -> CallFormat | None:
    """Return how the model of a chat template writes calls; None: not at all, or unknown to us.

    Args:
        template: Jinja source.
    """
    if "tools" not in template:
        return None
    rows = (found for texts, found in _BY_TEMPLATE if all(text in template for text in texts))
    return next(rows, None)
