"""JSON texts that are passed on as they were written.

Owns: taking an object apart, and removing white space, without touching numbers, escapes or order.
Refuses to know: what the texts mean. Invariant: what comes out is valid JSON.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

_STRING_OR_BLANK: Final = re.compile(r'("[^"\\]*+(?:\\.[^"\\]*+)*+")|[ \t\r\n]+')
_INVALID: Final = (msgspec.DecodeError, RecursionError, UnicodeError)


def members(text: str) -> dict[str, str] | None:
    """Return an object's members in their order, values as JSON texts; None: it is no object."""
    try:
        found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except _INVALID:
        return None
    return {name: bytes(value).decode() for name, value in found.items()}


def minified(text: str) -> str | None:
    """Return a JSON text without white space between its tokens; None: it is no JSON."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except _INVALID:
        return None
    return _STRING_OR_BLANK.sub(lambda found: found[1] or "", text)
