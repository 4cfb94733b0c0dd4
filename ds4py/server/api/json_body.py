"""How any body is read: JSON bytes to structs, and what is forgiven on the way.

Owns: the JSON reader, the sentence that a wrong body earns, ranges of numbers, the source text of a
value, the texts of contents and tools (docs/spec/server-and-cli.md#errors, #prompts). Refuses to
know: which members there are. Invariant: what does not fit is a `RequestError` with status 400,
whatever the bytes were; schemas of tools and arguments of past calls are the client's own JSON
texts, byte for byte, since they enter the prompt.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from ds4py.errors import RequestError
from ds4py.text.raw_json import members

_log = logging.getLogger(__name__)

MAX_COUNT: Final = 2**31 - 1

MAX_MESSAGES: Final = 100_000
_MAX_TOOLS: Final = 10_000

MAX_VALUES: Final = 2_000_000
"""Values of a body: each takes up to 200 bytes, and all are read without letting others run."""

_HIGH: Final = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW: Final = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE: Final = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!%b)|(?<!%b\\u[dD])[c-fC-F][0-9a-fA-F]{2})" % (_LOW, _HIGH)
)

Number = int | float
_Body = TypeVar("_Body", bound=msgspec.Struct)
_Value = TypeVar("_Value")


def decode(body: bytes, kind: type[_Body]) -> _Body:
    """Read a body as a struct; unknown members are ignored, of equal ones the last counts.

    Raises:
        RequestError: It is no JSON object, or a member has another type than it must have.
    """
    if not body.strip():
        raise RequestError("invalid JSON request: the body is empty; expected a JSON object")
    return _parsed(body, kind)


def wrong(param: str, got: object, expected: str) -> RequestError:
    """Return the refusal of a member whose value is not what it must be."""
    return RequestError(f"{param}: got {got}, expected {expected}", param=param)


def count(param: str, value: Number | None, *, most: int = MAX_COUNT) -> int | None:
    """Bring a count into range: negative is 0, too large is `most`; 3.0 is 3.

    Raises:
        RequestError: The value is no whole number.
    """
    if value is None:
        return None
    if isinstance(value, float) and not value.is_integer():
        raise wrong(param, value, "a whole number")
    return min(max(int(value), 0), most)


def last_given(body: bytes, **values: _Value | None) -> tuple[str, _Value | None]:
    """Choose among members that say the same: the last in the body that is not null wins.

    Raises:
        RequestError: The name of a member that nobody asks for is not UTF-8.
    """
    given = {name: value for name, value in values.items() if value is not None}
    if len(given) > 1:
        names = list(_parsed(body, dict[str, msgspec.Raw]))
        given = dict(sorted(given.items(), key=lambda member: names.index(member[0])))
    return ("", None) if not given else given.popitem()


def source(raw: msgspec.Raw, param: str) -> str:
    """Return the client's own text of a value, of which so far only the syntax was checked.

    Raises:
        RequestError: The text is not UTF-8.
    """
    try:
        return bytes(raw).decode()
    except UnicodeError as error:
        raise RequestError(f"invalid JSON request: {param}: not UTF-8", param=param) from error


def is_absent(raw: msgspec.Raw) -> bool:
    """Tell whether a member was left out or is null."""
    return bytes(raw) in (b"", b"null")


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


def _parsed(body: bytes, kind: type[_Value]) -> _Value:
    if body.count(b",") > MAX_VALUES and _n_commas(body) > MAX_VALUES:
        raise RequestError(f"invalid JSON request: expected at most {MAX_VALUES} values")
    try:
        return msgspec.json.decode(_mend_surrogates(body), type=kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        param = where.rstrip("`").lstrip(".") or None
        subject = f"{param}: " if param else ""
        raise RequestError(
            f"invalid JSON request: {subject}{_lower_first(what)}", param=param
        ) from error
    except msgspec.DecodeError as error:
        raise RequestError(f"invalid JSON request: {_lower_first(str(error))}") from error
    except RecursionError as error:
        raise RequestError("invalid JSON request: nested too deeply") from error


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:] if not text.startswith("JSON") else text


def _n_commas(body: bytes) -> int:
    """Count commas outside of strings: as many as there are values, except for a few brackets.

    Stops at strings that are too many to look between.
    """
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 2 * MAX_VALUES:
        return MAX_VALUES + 1
    return sum(piece.count(b",") for piece in bare.split(b'"')[::2])


def _mend_surrogates(body: bytes) -> bytes:
    """Replace escapes of lone surrogates, which strict JSON readers refuse, by U+FFFD.

    Escaped backslashes stand aside meanwhile, as bytes that no JSON text holds: what follows one is
    no escape.
    """
    if (b"\\ud" not in body and b"\\uD" not in body) or b"\0" in body:
        return body
    mended = _LONE.sub(rb"\\ufffd", body.replace(b"\\\\", b"\0\0"))
    return mended.replace(b"\0\0", b"\\\\")
