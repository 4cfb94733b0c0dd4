"""Replies of `/v1/messages`: docs/spec/server-and-cli.md#messages, C44 to C47."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.errors import RemoteWorkError
from ds4py.server.api.messages.response import MessagesReply
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

TALLY = Tally(n_prompt=10, n_cached=4, n_completion=3)
CALL = [CallOpened(0, "toolu_1", "f"), CallFragment(0, '{"a":'), CallFragment(0, "1}")]
CALL += [CallClosed(0)]


def stream(*events, done=None):
    """All events of a stream as (name, content)."""
    reply = MessagesReply(id="msg_1", model="m")
    frames = [*reply.started(Started(10, 4))]
    for event in events:
        frames += reply.written(event)
    frames += reply.closing(done or Done(finish="stop", tally=TALLY))
    return parsed(frames)


def parsed(frames):
    found = []
    for frame in b"".join(frames).decode().strip().split("\n\n"):
        name, content = frame.split("\n")
        found.append((name.removeprefix("event: "), json.loads(content.removeprefix("data: "))))
    assert all(name == content["type"] for name, content in found)
    return found


def whole(*events, done=None):
    answer = Answer()
    for event in events:
        answer.add(event)
    return MessagesReply(id="msg_1", model="m").whole(
        answer, done or Done(finish="stop", tally=TALLY)
    )


def test_the_order_of_a_reply_with_everything():
    events = stream(
        TextPiece("", reasoning="hm"),
        TextPiece("Yes"),
        *CALL,
        done=Done(finish="tool_calls", tally=TALLY),
    )
    assert [name for name, _ in events] == [
        *("message_start", "content_block_start", "content_block_delta"),
        *("content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    start = events[0][1]["message"]
    assert start["usage"] == {
        "input_tokens": 0,
        "output_tokens": 0,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 6,
    }
    assert (start["content"], start["stop_reason"], start["role"]) == ([], None, "assistant")
    assert events[3][1]["delta"] == {"type": "signature_delta", "signature": "msg_1"}
    assert events[8][1]["content_block"] == {
        "type": "tool_use", "id": "toolu_1", "name": "f", "input": {},
    }  # fmt: skip
    assert events[-2][1] == {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": {"output_tokens": 3},
    }


@given(
    st.lists(st.sampled_from(["reason", "text", "call"]), max_size=6),
    st.sampled_from(["stop", "length", "tool_calls", "error"]),
)
def test_blocks_never_overlap_and_each_is_ended(kinds, finish):
    events, n_calls = [], 0
    for kind in kinds:
        if kind == "call":
            events += [CallOpened(n_calls, f"toolu_{n_calls}", "f"), CallFragment(n_calls, "{}")]
            events += [CallClosed(n_calls)]
            n_calls += 1
        else:
            events.append(TextPiece("x") if kind == "text" else TextPiece("", reasoning="r"))
    error = RuntimeError("broken") if finish == "error" else None
    open_block, n_blocks = None, 0
    for name, content in stream(*events, done=Done(finish=finish, error=error, tally=TALLY)):
        if name == "content_block_start":
            assert (open_block, content["index"]) == (None, n_blocks)
            open_block = content["content_block"]["type"]
        elif name == "content_block_delta":
            assert (open_block is not None, content["index"]) == (True, n_blocks)
        elif name == "content_block_stop":
            assert content["index"] == n_blocks
            open_block, n_blocks = None, n_blocks + 1
    assert open_block is None


def test_reasoning_alone_is_followed_by_an_empty_text():
    events = stream(TextPiece("", reasoning="hm"))
    blocks = [content["content_block"] for _, content in events if "content_block" in content]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert [block["type"] for block in whole(TextPiece("", reasoning="hm"))["content"]] == [
        "thinking",
        "text",
    ]
    assert whole()["content"] == [{"type": "text", "text": ""}]


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [
        ("stop", None, "end_turn"),
        ("stop", "END", "stop_sequence"),
        ("length", None, "max_tokens"),
        ("tool_calls", None, "tool_use"),
    ],
)
def test_why_a_reply_ended(finish, stop, reason):
    done = Done(finish=finish, stop=stop, tally=TALLY)
    reply = whole(TextPiece("x"), done=done)
    assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, stop)
    ((_, last),) = [e for e in stream(TextPiece("x"), done=done) if e[0] == "message_delta"]
    assert last["delta"] == {"stop_reason": reason, "stop_sequence": stop}


def test_a_whole_reply_has_input_as_values_in_the_models_own_text():
    reply = whole(TextPiece("Yes"), *CALL, done=Done(finish="tool_calls", tally=TALLY))
    assert [block["type"] for block in reply["content"]] == ["text", "tool_use"]
    assert bytes(reply["content"][1]["input"]) == b'{"a":1}'


def test_the_three_kinds_of_prompt_tokens_add_up():
    usage = whole(TextPiece("x"))["usage"]
    kinds = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert sum(usage[kind] for kind in kinds) == TALLY.n_prompt


def test_a_generation_that_broke_off_is_an_error():
    error = RemoteWorkError("lost", hop="worker1")
    done = Done(finish="error", error=error, tally=TALLY)
    with pytest.raises(RemoteWorkError):
        whole(TextPiece("x"), done=done)
    events = stream(TextPiece("x"), done=done)
    assert [name for name, _ in events[-2:]] == ["content_block_stop", "error"]
    assert events[-1][1]["error"]["type"] == "api_error"


def test_silence_is_filled_by_pings():
    assert parsed([MessagesReply(id="x", model="m").keepalive("prefill")]) == [
        ("ping", {"type": "ping"})
    ]
