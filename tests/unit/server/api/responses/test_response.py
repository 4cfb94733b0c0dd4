"""Replies of `/v1/responses`: docs/spec/server-and-cli.md#responses, C37 to C41."""

import json

import pytest

from ds4py.server.api.responses.response import ResponsesReply
from ds4py.server.requests.events import (
    Answer,
    CallClosed,
    CallFragment,
    CallOpened,
    Done,
    Started,
    Tally,
    TextPiece,
)
from ds4py.server.requests.request import Toolbox, ToolName

TALLY = Tally(n_prompt=10, n_cached=4, n_completion=3, n_reasoning=2)
DONE = Done(finish="stop", tally=TALLY)
BOX = Toolbox(
    names={
        "ns__f": ToolName("function", "f", "ns__"),
        "patch": ToolName("custom", "patch"),
        "tool_search": ToolName("tool_search", "tool_search"),
    }
)


def call(name, arguments, index=0):
    half = len(arguments) // 2
    return [
        CallOpened(index, f"call_{index}", name),
        CallFragment(index, arguments[:half]),
        CallFragment(index, arguments[half:]),
        CallClosed(index),
    ]


def new(summary=True):
    return ResponsesReply(created=1780000000, model="m", toolbox=BOX, summary=summary)


def stream(*events, done=DONE, summary=True):
    reply = new(summary)
    frames = [*reply.started(Started(10, 4))]
    for event in events:
        frames += reply.written(event)
    frames += reply.closing(done)
    lines = b"".join(frames).decode().strip().split("\n\n")
    assert all(line.startswith("data: {") for line in lines), "nothing but data lines, no [DONE]"
    found = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def whole(*events, done=DONE, summary=True):
    answer = Answer()
    for event in events:
        answer.add(event)
    return new(summary).whole(answer, done)


def without_ids(items):
    return [{k: v for k, v in item.items() if k != "id"} for item in items]


EVERYTHING = (
    TextPiece("", reasoning="hm"),
    TextPiece("Yes"),
    TextPiece("!"),
    *call("f", '{"a":1}'),
)


def test_the_order_of_a_reply_with_everything():
    done = Done(finish="tool_calls", tally=TALLY)
    events = stream(*EVERYTHING, done=done)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        *("output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    final = events[-1]["response"]
    dones = [e for e in events if e["type"] == "response.output_item.done"]
    added = [e for e in events if e["type"] == "response.output_item.added"]
    assert final["output"] == [event["item"] for event in dones]
    assert [e["item"]["id"] for e in added] == [e["item"]["id"] for e in dones]
    assert [e["output_index"] for e in added] == [e["output_index"] for e in dones] == [0, 1, 2]
    assert {e["item"]["status"] for e in added} == {"in_progress"}
    assert final["output"][2]["arguments"] == '{"a":1}'
    assert added[2]["item"]["arguments"] == ""


def test_signs_of_life_are_events_and_the_first_one_creates_the_response():
    reply = new()
    before = [reply.keepalive("queued 1"), reply.keepalive("prefill")]
    assert [*reply.started(Started(10, 4))] == []
    frames = b"".join([*before, *reply.written(TextPiece("x")), reply.keepalive("decode")])
    blocks = frames.decode().strip().split("\n\n")
    assert [block for block in blocks if block.startswith(":")] == [
        ": queued 1",
        ": prefill",
        ": decode",
    ]
    events = [json.loads(block.removeprefix("data: ")) for block in blocks if block[0] == "d"]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == "in_progress"
    assert kinds.count("created") == 1
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert {e["response"]["status"] for e in events if "response" in e} == {"in_progress"}


@pytest.mark.parametrize("summary", [True, False])
def test_a_whole_reply_is_what_the_stream_ends_with(summary):
    done = Done(finish="tool_calls", tally=TALLY)
    streamed = stream(*EVERYTHING, done=done, summary=summary)[-1]["response"]
    reply = whole(*EVERYTHING, done=done, summary=summary)
    assert without_ids(reply["output"]) == without_ids(streamed["output"])
    same = ("object", "created_at", "status", "model", "usage")
    assert all(reply[name] == streamed[name] for name in same)
    assert [item["type"] for item in reply["output"]] == (
        (["reasoning"] if summary else []) + ["message", "function_call"]
    )


def test_usage():
    assert whole(TextPiece("x"))["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 6},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 13,
    }


def test_a_function_of_a_group_has_its_own_name_again():
    (item,) = whole(*call("ns__f", "{}"))["output"]
    assert (item["name"], item["namespace"], item["call_id"]) == ("f", "ns__", "call_0")


def test_a_freeform_tool_gets_its_text():
    events = stream(*call("patch", '{"input":"*** Begin\\n\\"x\\""}'))
    kinds = [event["type"] for event in events[1:-1]]
    assert kinds == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", '*** Begin\n"x"')


def test_a_search_for_tools_is_the_clients_with_values():
    events = stream(*call("tool_search", '{"query":"git"}'))
    assert [event["type"] for event in events[1:-1]] == [
        "response.output_item.added",
        "response.output_item.done",
    ]
    (item,) = events[-1]["response"]["output"]
    assert item["type"] == "tool_search_call"
    assert (item["execution"], item["arguments"]) == ("client", {"query": "git"})


@pytest.mark.parametrize(
    ("finish", "status"), [("stop", "completed"), ("length", "incomplete"), ("error", "failed")]
)
def test_exactly_one_event_tells_the_end(finish, status):
    error = RuntimeError("x") if finish == "error" else None
    done = Done(finish=finish, error=error, tally=TALLY)
    events = stream(TextPiece("x"), done=done)
    ends = {"response.completed", "response.incomplete", "response.failed"}
    assert [e["type"] for e in events if e["type"] in ends] == [f"response.{status}"]
    assert events[-1]["response"]["status"] == status
    reply = whole(TextPiece("x"), done=done)
    assert reply["status"] == status
    assert reply.get("incomplete_details") == (
        {"reason": "max_output_tokens"} if finish == "length" else None
    )
    assert ("error" in reply) == (finish == "error")
    assert reply["output"][0]["status"] == ("completed" if finish == "stop" else "incomplete")


def test_reasoning_that_never_ended_is_incomplete():
    (item,) = whole(TextPiece("", reasoning="hm"), done=Done(finish="length", tally=TALLY))[
        "output"
    ]
    assert (item["type"], item["status"]) == ("reasoning", "incomplete")
