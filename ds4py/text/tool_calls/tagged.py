"""Tool calls written as tags, read while they arrive: DeepSeek V4's and Qwen3-Coder's.

Owns: the grammars of both (docs/spec/deepseek4-model.md#parsing-calls) and what a value of them is
as JSON. Refuses to know: how past calls are written (`chat_formats.dsml`), where a block begins,
who executes calls.
Invariant: any text gives calls or an `UnreadableError`; arguments of a call that ended are always
the JSON text of an object.
"""

from __future__ import annotations

import re
from typing import Final

from ds4py.text.raw_json import minified
from ds4py.text.tokenizer.deepseek4_tokens import Marker
from ds4py.text.tool_calls.scanner import Scanner, Steps, UnreadableError
from ds4py.text.tool_calls.writer import CallWriter, JsonBody, StringBody, decoded, json_text

STYLES: Final = (Marker.DSML.value, Marker.DSML.value[1:], "")
"""What stands before the name in each tag of a DeepSeek V4; the first tag decides for all."""

_MAX_DEPTH: Final = 32
_ATTRIBUTE: Final = re.compile(r'([\w-]+)="([^"]*)"')
_CLOSING: Final = re.compile(f"</({'|'.join(STYLES)})tool_calls>")
_FUNCTION: Final = re.compile(r"<function=([^>]+)>")
_VALUE: Final = re.compile(r"<parameter=([^>]+)>")


def dsml_calls(text: Scanner, calls: CallWriter, opening: str, closing: str) -> Steps[None]:
    """Read a DeepSeek V4's block behind its opening tag; see `scanner`.

    Raises:
        UnreadableError: It does not follow the markup, or has no call.
    """
    grammar = _Dsml(text, calls, opening.removeprefix("<").removesuffix("tool_calls>"))
    yield from grammar.block(closing)


def function_calls(text: Scanner, calls: CallWriter, opening: str, closing: str) -> Steps[None]:
    """Read Qwen3-Coder's blocks, of one call each, behind the first opening tag; see `scanner`.

    Its values do not tell their type: what is JSON but no string is that value, the rest is text.

    Raises:
        UnreadableError: It does not follow the markup.
    """
    more = True
    while more:
        function = _FUNCTION.fullmatch((yield from text.tag("")))
        if function is None:
            raise UnreadableError
        calls.begin(function[1].strip())
        calls.write("{")
        separator = ""
        tag = yield from text.tag("</function>")
        while value := _VALUE.fullmatch(tag):
            body = JsonBody()
            yield from text.until("</parameter>", body)
            written = body.text.removeprefix("\n").removesuffix("\n")
            calls.write(f"{separator}{json_text(value[1].strip())}:{_guessed(written)}")
            separator = ","
            tag = yield from text.tag("</function>")
        if tag != "</function>":
            raise UnreadableError
        calls.write("}")
        calls.end()
        yield from text.expect(closing)
        if more := (yield from text.another(opening)):
            text.take(len(opening))


def blocks_in(prompt: str) -> list[str]:
    """Return the blocks of calls in a DeepSeek V4's prompt, with the white space before each."""
    blocks, at = [], 0
    for closing in _CLOSING.finditer(prompt):
        begin = prompt.rfind(f"<{closing[1]}tool_calls>", at, closing.start())
        if begin >= 0:
            n_before = len(prompt[at:begin].rstrip())
            blocks.append(prompt[at + n_before : closing.end()])
        at = closing.end()
    return blocks


class _Dsml:
    """The grammar of one style."""

    def __init__(self, text: Scanner, calls: CallWriter, style: str) -> None:
        self._text = text
        self._calls = calls
        self._style = style

    def block(self, closing: str) -> Steps[None]:
        tag = yield from self._text.tag(closing)
        while (attributes := self._attributes("invoke", tag)) is not None:
            self._calls.begin(_name(attributes))
            yield from self._members(self._closing("invoke"), 0)
            self._calls.end()
            tag = yield from self._text.tag(closing)
        if tag != closing or not self._calls.n_calls:
            raise UnreadableError
        self._text.rest()

    def _members(self, closing: str, depth: int) -> Steps[None]:
        if depth > _MAX_DEPTH:
            raise UnreadableError
        separator = "{"
        tag = yield from self._text.tag(closing)
        while (attributes := self._attributes("parameter", tag)) is not None:
            self._calls.write(f"{separator}{json_text(_name(attributes))}:")
            yield from self._value(attributes.get("string"), depth)
            separator = ","
            tag = yield from self._text.tag(closing)
        if tag != closing:
            raise UnreadableError
        self._calls.write("{}" if separator == "{" else "}")

    def _value(self, string: str | None, depth: int) -> Steps[None]:
        closing = self._closing("parameter")
        spaces = ""
        if string != "true":
            spaces = yield from self._text.spaces(free=string != "false")
            nested = [f"<{self._style}parameter{character}" for character in " \n>"]
            if (yield from self._text.begins(*nested, free=string != "false")):
                yield from self._members(closing, depth + 1)
                return
        if string != "false":
            body = StringBody(self._calls)
            body.add(spaces)
            yield from self._text.until(closing, body)
            body.close()
            return
        kept = JsonBody()
        yield from self._text.until(closing, kept)
        self._calls.write(_stated(spaces, kept.text))

    def _attributes(self, kind: str, tag: str) -> dict[str, str] | None:
        """Return the attributes of an opening tag; None: it is another one."""
        pattern = rf'<{self._style}{kind}((?:\s+[\w-]+="[^"]*")*)\s*>'
        found = re.fullmatch(pattern, tag)
        if found is None:
            return None
        return {name: decoded(value) for name, value in _ATTRIBUTE.findall(found[1])}

    def _closing(self, kind: str) -> str:
        return f"</{self._style}{kind}>"


def _stated(spaces: str, body: str) -> str:
    """Return a value that is said to be JSON; one that is none is passed on as text."""
    if not body.strip():
        return "null"
    return minified(body) or json_text(decoded(spaces + body))


def _guessed(written: str) -> str:
    found = minified(written)
    return json_text(written) if found is None or found.startswith('"') else found


def _name(attributes: dict[str, str]) -> str:
    if "name" not in attributes:
        raise UnreadableError
    return attributes["name"]
