"""Tool calls written as JSON objects, read while they arrive: Hermes, Qwen, Llama 3, Mistral.

Owns: the grammar that these share, and which of an object's members are what. Refuses to know: tags
(the caller's), models, where a block begins. Invariant: arguments are passed on as the model wrote
them, without white space, and a call ends as whole only if they are the text of an object.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import msgspec

from ds4py.text.raw_json import members, minified
from ds4py.text.tool_calls.scanner import Scanner, Steps, UnreadableError
from ds4py.text.tool_calls.writer import CallWriter, json_text

Sink = Callable[[str], object]

_ARGUMENTS: Final = ("arguments", "parameters")
_OF_CALLS: Final = ("name", "type", "id", *_ARGUMENTS)
_IN_STRING: Final = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*+', re.DOTALL)
_ESCAPE: Final = len(r"\u0000")
_LITERAL: Final = re.compile(r'[^\s{}\[\]:,"]*+')
_NAME: Final = re.compile(r"[^{]*+")
_AFTER_NAME: Final = re.compile(r"\[(?:ARGS|CALL_ID)\]")
_CONTROL: Final = re.compile(r"[\x00-\x1f]")
_MAX_NAME: Final = 256


def json_calls(
    text: Scanner,
    calls: CallWriter,
    opening: str,
    closing: str,
    *,
    named: bool = False,
    joints: tuple[str, ...] = (),
) -> Steps[None]:
    """Read blocks behind the first opening: each one object, or an array of several.

    Args:
        text: What arrives; see `scanner`.
        calls: Takes the calls.
        opening: What was read; empty if the reply begins with an object, which then has to have a
            call's members and no others.
        closing: What ends each block, if anything.
        named: A name may stand before an object that is just the arguments.
        joints: What another block may begin with: by default the opening; otherwise this separator,
            or a brace.

    Raises:
        UnreadableError: This is no call.
    """
    more = True
    while more:
        yield from text.spaces()
        if text.peek() == "[":
            yield from _array(text, calls)
        elif named and text.peek() != "{":
            yield from _named(text, calls)
        else:
            yield from _object(text, calls, bare=not opening)
        if closing:
            yield from text.expect(closing)
        starts = joints or (opening,)
        more = yield from text.another(*starts)
        if more and text.peek() != "{":
            text.take(len(starts[0]))


def _array(text: Scanner, calls: CallWriter) -> Steps[None]:
    mark = text.take(1)
    while mark != "]":
        yield from _object(text, calls, bare=False)
        mark = yield from _mark(text, ",]")


def _named(text: Scanner, calls: CallWriter) -> Steps[None]:
    head = text.run(_NAME)
    while not text.peek():
        if len(head) > _MAX_NAME:
            raise UnreadableError
        yield from text.wait()
        head += text.run(_NAME)
    name = _AFTER_NAME.split(head, maxsplit=1)[0].strip()
    if not name or len(head) > _MAX_NAME:
        raise UnreadableError
    calls.begin(name)
    yield from _arguments(text, calls)


def _object(text: Scanner, calls: CallWriter, *, bare: bool) -> Steps[None]:
    """Read a call; it begins as soon as its name and arguments are both in sight."""
    name, arguments = None, None
    n_before = calls.n_calls
    mark = yield from _mark(text, "{")
    while mark != "}":
        key = yield from _string(text)
        yield from _mark(text, ":")
        if key == "name":
            name = yield from _string(text)
        elif key in _ARGUMENTS and name is not None and calls.n_calls == n_before:
            calls.begin(name)
            yield from _arguments(text, calls)
        elif bare and key not in _OF_CALLS:
            raise UnreadableError
        else:
            value = yield from _value(text)
            arguments = value if key in _ARGUMENTS else arguments
        mark = yield from _mark(text, ",}")
    if calls.n_calls == n_before:
        if name is None or (bare and arguments is None):
            raise UnreadableError
        written = _object_text(arguments or "{}")
        calls.begin(name)
        calls.write(written)
        calls.end()


def _arguments(text: Scanner, calls: CallWriter) -> Steps[None]:
    yield from text.spaces()
    if text.peek() == "{":
        value = yield from _value(text, calls.write)
        if members(value) is None:
            raise UnreadableError
    else:
        calls.write(_object_text((yield from _value(text))))
    calls.end()


def _object_text(value: str) -> str:
    """Return arguments as the text of an object: some models write it into a string, or null."""
    if value == "null":
        return "{}"
    if value.startswith('"'):
        value = minified(_decoded(value)) or ""
    if members(value) is None:
        raise UnreadableError
    return value


def _value(text: Scanner, sink: Sink | None = None) -> Steps[str]:
    """Read up to the end of a value, which need not be valid; return it without white space.

    Args:
        text: What arrives.
        sink: Also gets the value, as it comes.
    """
    pieces: list[str] = []

    def add(piece: str) -> None:
        pieces.append(piece)
        if sink is not None and piece:
            sink(piece)

    depth, in_literal = 0, False
    while True:
        yield from text.spaces()
        follows, in_literal = in_literal, False
        character = text.peek()
        if character == '"':
            yield from _quoted(text, add, free=True)
        elif character and character in "{}[],:":
            depth += (character in "{[") - (character in "}]")
            add(text.take(1))
        elif follows:
            raise UnreadableError  # two without a mark between them would become one
        else:
            in_literal = True
            yield from _literal(text, add)
        if depth <= 0:
            return "".join(pieces)


def _literal(text: Scanner, add: Sink) -> Steps[None]:
    """Read a number or a word up to the mark or white space that ends it."""
    add(text.run(_LITERAL))
    while not text.peek():
        yield from text.wait()
        add(text.run(_LITERAL))


def _string(text: Scanner) -> Steps[str]:
    """Read a string that is syntax: a key, or the name of a tool."""
    yield from text.spaces()
    if text.peek() != '"':
        raise UnreadableError
    pieces: list[str] = []
    yield from _quoted(text, pieces.append, free=False)
    return _decoded("".join(pieces))


def _quoted(text: Scanner, add: Sink, *, free: bool) -> Steps[None]:
    """Read a string; line ends and the like, which JSON does not allow there, are escaped."""
    add(text.take(1))
    while True:
        add(_CONTROL.sub(lambda found: json_text(found[0])[1:-1], text.run(_IN_STRING)))
        if text.peek() == '"':
            add(text.take(1))
            return
        if len(text.unread) >= _ESCAPE:
            raise UnreadableError
        yield from text.wait(free=free)


def _decoded(value: str) -> str:
    try:
        return msgspec.json.decode(value, type=str)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise UnreadableError from error


def _mark(text: Scanner, marks: str) -> Steps[str]:
    """Read one of some characters behind white space."""
    yield from text.spaces()
    if not text.peek() or text.peek() not in marks:
        raise UnreadableError
    return text.take(1)
