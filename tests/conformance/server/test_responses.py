"""C37 to C42: replies and events of `/v1/responses`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from ds4py.errors import RemoteWorkError
from tests.conformance.server.peer import (
    ARGUMENTS,
    RESPONSES,
    THINK_END,
    WEATHER,
    asking,
    in_bytes,
    model,
    post,
    saying,
    served,
    tokens,
)
from tests.fakes import FakeBackend

SAID = f"Need weather.{THINK_END}Checking é." + WEATHER
SHOWN: Any = {"reasoning": {"summary": "auto"}}
GONE = RemoteWorkError("out of memory", hop="worker1")


def whole(says: str | Sequence[int] | FakeBackend, **members: Any) -> Any:
    fake = says if isinstance(says, FakeBackend) else model(says)
    with served(fake) as (_, port):
        return post(port, RESPONSES, asking(RESPONSES, **members)).json


def stream(says: str | Sequence[int] | FakeBackend, **members: Any) -> list[Any]:
    """The payloads of a stream, after a look at what all have in common."""
    fake = says if isinstance(says, FakeBackend) else model(says)
    with served(fake) as (_, port):
        answer = post(port, RESPONSES, asking(RESPONSES, stream=True, **members))
    assert all(event.name is None and event.comment is None for event in answer.events)
    payloads = answer.payloads
    assert [payload["sequence_number"] for payload in payloads] == list(range(len(payloads)))
    assert all(next(iter(payload)) == "type" for payload in payloads)
    return payloads


def kinds(payloads: Sequence[Any]) -> list[str]:
    """The types in order, repetitions left out."""
    found = [payload["type"].removeprefix("response.") for payload in payloads]
    return [kind for n, kind in enumerate(found) if n == 0 or found[n - 1] != kind]


def timeless(response: Any) -> Any:
    """A response without names and times that differ from request to request."""
    text = json.dumps({**response, "id": "", "created_at": 0, "timings": {}, "usage": {}})
    for item in response["output"]:
        for name in ("id", "call_id"):
            text = text.replace(item.get(name, "\0"), name)
    return json.loads(text)


def test_c37_only_data_with_numbers_in_a_row() -> None:
    payloads = stream(SAID, tools=True)
    assert len(payloads) > 10
    assert "[DONE]" not in payloads


ENDS = [
    ("Hi", {}, "completed"),
    (SAID, {"tools": True}, "completed"),
    (SAID, {"tools": True, **SHOWN}, "completed"),
    ("think of it and never end", {"max_output_tokens": 5, **SHOWN}, "incomplete"),
    (f"Hm{THINK_END}" + "go on " * 50, {"max_output_tokens": 9}, "incomplete"),
    ("Hi", {"max_output_tokens": 0}, "incomplete"),
]


@pytest.mark.parametrize(("says", "members", "status"), ENDS)
def test_c38_the_first_and_the_last_event(says: str, members: Any, status: str) -> None:
    first, *between, last = stream(says, **members)
    assert first["type"] == "response.created"
    assert (first["response"]["status"], first["response"]["output"]) == ("in_progress", [])
    terminal = {f"response.{end}" for end in ("created", "completed", "incomplete", "failed")}
    assert not terminal & {payload["type"] for payload in between}
    assert last["type"] == f"response.{status}"
    assert last["response"]["status"] == status
    assert last["response"]["id"] == first["response"]["id"]
    assert timeless(last["response"]) == timeless(whole(says, **members))


def test_c38_why_it_is_incomplete() -> None:
    """A reply that the limit cut off says `max_output_tokens`.

    Differs from ds4: it says `max_tokens`, which is not the dialect's word.
    """
    reply = whole("a b c d e f", max_output_tokens=3)
    assert reply["status"] == "incomplete"
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize("streamed", [False, True])
def test_c38_a_reply_that_fails(streamed: bool) -> None:
    fake = model(in_bytes(f"Hm{THINK_END}Hello"), failures={14: GONE})
    if streamed:
        last = stream(fake)[-1]
        assert last["type"] == "response.failed"
        response = last["response"]
    else:
        response = whole(fake)
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "generation failed"}
    (message,) = response["output"]
    assert message["content"][0]["text"] == "Hello"[: len(message["content"][0]["text"])] != ""
    assert message["status"] == "incomplete"


def test_c38_usage_and_identity() -> None:
    """The response has the members of docs/spec/server-and-cli.md#responses.

    Differs from ds4: it has `timings`, counts reasoning tokens, and repeats what typed clients
    require (`tools`, `tool_choice`, `parallel_tool_calls`).
    """
    reply = whole(SAID, tools=True, model="m", **SHOWN)
    assert (reply["object"], reply["status"], reply["model"]) == ("response", "completed", "m")
    assert reply["id"].startswith("resp_")
    assert isinstance(reply["created_at"], int)
    usage = reply["usage"]
    assert usage["input_tokens_details"] == {
        "cached_tokens": 0,
        "cache_write_tokens": usage["input_tokens"],
    }
    reasoned = usage["output_tokens_details"]["reasoning_tokens"]
    assert len(tokens("Need weather.", end=False)) <= reasoned < usage["output_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


@pytest.mark.parametrize(
    ("reasoning", "shown"),
    [
        ({"summary": "auto"}, True),
        ({"summary": "concise"}, True),
        ({"summary": "detailed", "effort": "low"}, True),
        ({"summary": "none"}, False),
        ({"summary": None}, False),
        ({"effort": "high"}, False),
        (None, False),
    ],
)
def test_c39_reasoning_is_shown_to_who_asks(reasoning: Any, shown: bool) -> None:
    text = f"Because.{THINK_END}Hi"
    items = whole(text, reasoning=reasoning)["output"]
    payloads = stream(text, reasoning=reasoning)
    assert [item["type"] for item in items] == ["reasoning"] * shown + ["message"]
    assert any("reasoning" in payload["type"] for payload in payloads) == shown
    if shown:
        assert items[0]["summary"] == [{"type": "summary_text", "text": "Because."}]
        assert items[0]["id"].startswith("rs_")


@pytest.mark.parametrize(("says", "members", "status"), ENDS)
def test_c40_every_item_is_ended(says: str, members: Any, status: str) -> None:
    """Every item that was opened is ended, under one id, as it stands in the terminal event.

    Differs from ds4: the reasoning is ended when the answer begins, not at the end of everything.
    """
    payloads = stream(says, **members)
    final = payloads[-1]["response"]["output"]
    added = [p for p in payloads if p["type"] == "response.output_item.added"]
    done = [p for p in payloads if p["type"] == "response.output_item.done"]
    numbers = list(range(len(final)))
    assert [p["output_index"] for p in added] == [p["output_index"] for p in done] == numbers
    assert [p["item"] for p in done] == final
    for opened, item in zip(added, final, strict=True):
        assert opened["item"]["id"] == item["id"]
        assert opened["item"]["type"] == item["type"]
        assert opened["item"]["status"] == "in_progress"
    for payload in payloads[1:-1]:
        assert payload.get("item_id") in {item["id"] for item in final} | {None}
        if "item_id" in payload:
            assert final[payload["output_index"]]["id"] == payload["item_id"]
    assert final == [] or final[-1]["status"] == status


@pytest.mark.parametrize("shown", [False, True])
def test_c40_the_order_of_events(shown: bool) -> None:
    reasoning = [
        *("output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
    ]
    message = [
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
    ]
    payloads = stream(f"Because.{THINK_END}Hi", **(SHOWN if shown else {}))
    assert kinds(payloads) == ["created", *reasoning * shown, *message, "completed"]
    for name, text in (("reasoning_summary_text", "Because." * shown), ("output_text", "Hi")):
        of_kind = [p for p in payloads if p["type"].startswith(f"response.{name}.")]
        assert "".join(p.get("delta", "") for p in of_kind) == text
        assert not of_kind or of_kind[-1]["text"] == text


def test_c41_the_events_of_a_call() -> None:
    """A call is opened without arguments, which follow and are JSON.

    Differs from ds4: they come in pieces, as they are written, not all at once.
    """
    payloads = stream(f"Hm{THINK_END}" + WEATHER, tools=True)
    assert kinds(payloads) == [
        "created",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    added, *deltas, arguments, done = payloads[1:-1]
    assert (added["item"]["arguments"], added["item"]["name"]) == ("", "weather")
    assert "".join(delta["delta"] for delta in deltas) == arguments["arguments"] == ARGUMENTS
    assert arguments["name"] == "weather"
    item = done["item"]
    assert json.loads(item["arguments"]) == {"city": "Oslo", "days": 3}
    assert item["id"].startswith("fc_")
    assert len(item["call_id"]) == len("call_") + 32
    assert (item["type"], item["status"]) == ("function_call", "completed")


INNER = {"type": "function", "name": "weather", "description": "d"}


def test_c41_a_tool_of_a_namespace() -> None:
    group = {"type": "namespace", "name": "mcp__sky__", "tools": [INNER]}
    text = f"Hm{THINK_END}" + WEATHER.replace('"weather"', '"mcp__sky__weather"')
    (item,) = whole(text, tools=[group])["output"]
    assert (item["namespace"], item["name"]) == ("mcp__sky__", "weather")


def test_c41_a_search_for_tools() -> None:
    text = f"Hm{THINK_END}" + WEATHER.replace('"weather"', '"tool_search"')
    payloads = stream(text, tools=[{"type": "tool_search"}])
    (item,) = payloads[-1]["response"]["output"]
    assert (item["type"], item["execution"]) == ("tool_search_call", "client")
    assert item["arguments"] == {"city": "Oslo", "days": 3}
    assert not [payload for payload in payloads if "arguments" in payload["type"]]


def test_c41_a_custom_tool() -> None:
    """A call of a custom tool is a `custom_tool_call` with its text.

    Differs from ds4: it answers a `function_call`, which Codex refuses for its `apply_patch`.
    """
    text = f"Hm{THINK_END}" + WEATHER.replace('"weather"', '"apply_patch"').replace("city", "input")
    payloads = stream(text, tools=[{"type": "custom", "name": "apply_patch"}])
    (item,) = payloads[-1]["response"]["output"]
    assert (item["type"], item["name"], item["input"]) == (
        "custom_tool_call",
        "apply_patch",
        "Oslo",
    )


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]},
        {"role": "user", "content": [{"type": "input_file", "file_id": "f"}]},
        {"role": "user", "content": [{"type": "input_text", "text": 7}]},
        {"type": "computer_call", "id": "x"},
        {"type": "item_reference", "id": "x"},
        {"type": "message", "role": "assistant", "status": "in_progress", "content": "half"},
        {"type": "function_call", "name": "f", "arguments": "{}", "status": "incomplete"},
        {"type": "reasoning", "summary": [], "status": "in_progress"},
    ],
)
def test_c42_items_that_are_refused(item: Any) -> None:
    with saying("Hi") as port:
        answer = post(port, RESPONSES, {"input": [{"role": "user", "content": "x"}, item]})
    assert answer.status == 400
    assert answer.json["error"]["message"].startswith("invalid JSON request")


@pytest.mark.parametrize(
    "item",
    [
        {"type": "message", "role": "assistant", "status": "completed", "content": "whole"},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        {"role": "developer", "content": [{"type": "text", "text": None}, "bare"]},
        {"type": "web_search_call", "call_id": "a", "action": {"query": "q"}},
        {
            "type": "custom_tool_call_output",
            "call_id": "a",
            "output": [{"type": "text", "text": "t"}],
        },
        {"type": "local_shell_call_output", "call_id": "a", "output": "{}"},
    ],
)
def test_c42_items_that_are_known(item: Any) -> None:
    with saying("Hi") as port:
        answer = post(port, RESPONSES, {"input": [{"role": "user", "content": "x"}, item]})
    assert answer.status == 200, answer.body
