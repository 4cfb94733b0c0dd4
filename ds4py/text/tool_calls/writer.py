"""The calls of a block as parts of a reply, while a grammar finds them.

Owns: the order of a call's parts, and their text as JSON. Refuses to know: markup, what is still
to come. Invariant: a call that began is ended before the next one begins, as whole only if its
arguments are the text of an object.
"""

from __future__ import annotations

import json
import re
from typing import Final

from ds4py.text.parts import CallArguments, CallBegun, CallEnded, ReplyPart

_ENTITY: Final = re.compile("&(amp|lt|gt|quot|apos);")
_BEGUN_ENTITY: Final = re.compile("&[a-z]{0,4}$")
_QUOTE: Final = re.compile(r'"|\\(?:.|$)', re.DOTALL)
_CHARACTERS: Final = {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'"}


class CallWriter:
    """The calls of one block.

    Attributes:
        n_calls: Calls that began.
        n_whole: Calls that ended as whole.
    """

    def __init__(self) -> None:
        self.n_calls = 0
        self.n_whole = 0
        self._parts: list[ReplyPart] = []
        self._open = False

    def begin(self, name: str) -> None:
        """Begin a call."""
        self._open = True
        self._parts.append(CallBegun(self.n_calls, name))
        self.n_calls += 1

    def write(self, text: str) -> None:
        """Continue the arguments of the call."""
        self._parts.append(CallArguments(self.n_calls - 1, text))

    def end(self, *, whole: bool = True) -> None:
        """End the call, if one is open."""
        if self._open:
            self._open = False
            self.n_whole += whole
            self._parts.append(CallEnded(self.n_calls - 1, whole))

    def drain(self) -> list[ReplyPart]:
        """Return the parts since the last time."""
        parts, self._parts = self._parts, []
        return parts


class StringBody:
    """The text of a string argument, written as the inside of a JSON string as it comes.

    Entities are decoded once; half of one is held back.
    """

    free: Final = True

    def __init__(self, calls: CallWriter) -> None:
        self._calls = calls
        self._held = ""
        calls.write('"')

    def add(self, text: str) -> None:
        """See `scanner.Body.add`."""
        text = self._held + text
        begun = _BEGUN_ENTITY.search(text, max(0, len(text) - 5))
        end = len(text) if begun is None else begun.start()
        self._held = text[end:]
        self._write(text[:end])

    def close(self) -> None:
        """Write what was held back, and the end of the string."""
        self._write(self._held)
        self._calls.write('"')

    def _write(self, text: str) -> None:
        if text:
            self._calls.write(json_text(decoded(text))[1:-1])


class JsonBody:
    """A JSON text, which is kept until it is complete.

    Attributes:
        free: What comes next is inside a string.
    """

    def __init__(self) -> None:
        self.free = False
        self._pieces: list[str] = []
        self._escape = ""

    def add(self, text: str) -> None:
        """See `scanner.Body.add`."""
        self._pieces.append(text)
        found = _QUOTE.findall(self._escape + text)
        self._escape = "\\" if found[-1:] == ["\\"] else ""
        self.free ^= found.count('"') % 2 == 1

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self._pieces)


def decoded(text: str) -> str:
    """Return a text with its five XML entities decoded, once."""
    return _ENTITY.sub(lambda found: _CHARACTERS[found[1]], text)


def json_text(text: str) -> str:
    """Return the JSON string of a text."""
    return json.dumps(text, ensure_ascii=False)
