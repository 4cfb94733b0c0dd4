"""What a DeepSeek V4's answer says, by looking at all of it at once: what streams must give."""

from __future__ import annotations

import html
import json
import re

from ds4py.text.tokenizer.deepseek4_tokens import Marker

STYLES = (Marker.DSML.value, Marker.DSML.value[1:], "")
_BEGINNING = re.compile(f"<({'|'.join(STYLES)})tool_calls>")


class OracleError(Exception):
    """There is a block that cannot be read, or that is not closed."""


def content_and_calls(answer: str) -> tuple[str, list[tuple[str, str]], str]:
    """Return content, calls and the block with the white space before it."""
    begin = _BEGINNING.search(answer)
    if begin is None:
        return answer, [], ""
    content = answer[: begin.start()].rstrip()
    reader = _Reader(answer, begin[1], begin.end())
    calls = reader.calls()
    return content, calls, answer[len(content) : reader.at]


class _Reader:
    def __init__(self, text: str, style: str, at: int) -> None:
        self.text, self.style, self.at = text, style, at

    def calls(self) -> list[tuple[str, str]]:
        calls = []
        while (attributes := self.opened("invoke")) is not None:
            arguments = self.members()
            self.closed("invoke")
            calls.append((name(attributes), arguments))
        self.closed("tool_calls")
        if not calls:
            raise OracleError
        return calls

    def members(self) -> str:
        found = []
        while (attributes := self.opened("parameter")) is not None:
            value = self.value(attributes.get("string"))
            found.append(f"{json.dumps(name(attributes), ensure_ascii=False)}:{value}")
        return "{" + ",".join(found) + "}"

    def value(self, string: str | None) -> str:
        nested = re.compile(rf"\s*<{self.style}parameter[ \n>]").match(self.text, self.at)
        if string != "true" and nested:
            value = self.members()
            self.closed("parameter")
            return value
        end = self.text.find(f"</{self.style}parameter>", self.at)
        if end < 0:
            raise OracleError
        body, self.at = self.text[self.at : end], end
        self.closed("parameter")
        if string == "false":
            if not body.strip():
                return "null"
            try:
                value = json.loads(body, parse_constant=refused)
                return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            except ValueError:
                pass
        return json.dumps(decoded(body), ensure_ascii=False)

    def opened(self, kind: str) -> dict[str, str] | None:
        tag = re.compile(rf'\s*<{self.style}{kind}((?:\s+[\w-]+="[^"]*")*)\s*>')
        found = tag.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return {key: decoded(value) for key, value in re.findall(r'([\w-]+)="([^"]*)"', found[1])}

    def closed(self, kind: str) -> None:
        found = re.compile(rf"\s*</{self.style}{kind}>").match(self.text, self.at)
        if found is None:
            raise OracleError
        self.at = found.end()


def decoded(text: str) -> str:
    return re.sub("&(?:amp|lt|gt|quot|apos);", lambda found: html.unescape(found[0]), text)


def name(attributes: dict[str, str]) -> str:
    if "name" not in attributes:
        raise OracleError
    return attributes["name"]


def refused(constant: str) -> None:
    raise ValueError(constant)
