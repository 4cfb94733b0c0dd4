"""What a client takes from whole replies of the dialects that know calls, and how it goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.conformance.server.peer import CHAT, MESSAGES, RESPONSES, asking

DIALECTS = (CHAT, RESPONSES, MESSAGES)
Call = tuple[str, str, Any]
"""Id, name, arguments."""


def calls(path: str, reply: Any) -> list[Call]:
    """The calls of a whole reply of any dialect."""
    if path == CHAT:
        found = reply["choices"][0]["message"].get("tool_calls", ())
        return [
            (one["id"], one["function"]["name"], json.loads(one["function"]["arguments"]))
            for one in found
        ]
    if path == RESPONSES:
        items = [item for item in reply["output"] if item["type"] == "function_call"]
        return [(item["call_id"], item["name"], json.loads(item["arguments"])) for item in items]
    blocks = [one for one in reply["content"] if one["type"] == "tool_use"]
    return [(one["id"], one["name"], one["input"]) for one in blocks]


def texts(path: str, reply: Any) -> tuple[str, str]:
    """The reasoning and the answer of a whole reply."""
    if path == CHAT:
        message = reply["choices"][0]["message"]
        return message.get("reasoning_content", ""), message["content"]
    if path == RESPONSES:
        said = [item["content"][0]["text"] for item in reply["output"] if item["type"] == "message"]
        return "", "".join(said)
    thought = [one["thinking"] for one in reply["content"] if one["type"] == "thinking"]
    said = [one["text"] for one in reply["content"] if one["type"] == "text"]
    return "".join(thought), "".join(said)


def finish(path: str, reply: Any) -> str:
    """Why a whole reply ended, in the words of chat."""
    if path == CHAT:
        return str(reply["choices"][0]["finish_reason"])
    if path == RESPONSES:
        words = {"completed": "stop", "incomplete": "length", "failed": "error"}
        return "tool_calls" if calls(path, reply) else words[reply["status"]]
    words = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
    return words[reply["stop_reason"]]


def follow_up(path: str, reply: Any, results: Sequence[tuple[str, str]], **members: Any) -> Any:
    """A body with the whole history: question, reply as the client got it, results of its calls."""
    body = asking(path, **{"tools": True, **members})
    if path == CHAT:
        message = reply["choices"][0]["message"]
        body["messages"] += [message] + [
            {"role": "tool", "tool_call_id": name, "content": text} for name, text in results
        ]
    elif path == RESPONSES:
        question = [{"role": "user", "content": body["input"]}]
        body["input"] = (
            question
            + reply["output"]
            + [
                {"type": "function_call_output", "call_id": name, "output": text}
                for name, text in results
            ]
        )
    else:
        blocks = [
            {"type": "tool_result", "tool_use_id": name, "content": text} for name, text in results
        ]
        body["messages"] += [
            {"role": "assistant", "content": reply["content"]},
            {"role": "user", "content": blocks},
        ]
    return body


def usage(path: str, reply: Any) -> tuple[int, int, int]:
    """Prompt tokens, those of them that were cached, tokens of the reply."""
    used = reply["usage"]
    if path == CHAT:
        cached = used["prompt_tokens_details"]["cached_tokens"]
        return used["prompt_tokens"], cached, used["completion_tokens"]
    if path == RESPONSES:
        cached = used["input_tokens_details"]["cached_tokens"]
        return used["input_tokens"], cached, used["output_tokens"]
    cached = used["cache_read_input_tokens"]
    return cached + used["cache_creation_input_tokens"], cached, used["output_tokens"]
