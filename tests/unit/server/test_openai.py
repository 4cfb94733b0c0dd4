"""Reply shapes: exactly the keys of docs/spec/server-and-cli.md 1.10 to 1.12."""

from dataclasses import replace

import pytest

from ds4py.errors import RemoteWorkError
from ds4py.server.openai import ChatReply, CompletionReply, rate, timings_of, usage_of
from ds4py.server.work import Call, Done, Piece, Tally

TALLY = Tally(n_prompt=10, n_cached=4, n_completion=3, prefill_seconds=0.5, decode_seconds=0.25)
DONE = Done(finish="stop", tally=TALLY)
FAILED = Done(finish="error", error=RemoteWorkError("lost", hop="worker1"), tally=TALLY)
CHAT = ChatReply("chatcmpl-7", 1780000000, "m")
COMPLETION = CompletionReply("cmpl-8", 1780000000, "m")


def test_usage_counts_cached_and_written_tokens():
    assert usage_of(TALLY) == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 6},
    }


def test_usage_tells_the_tokens_of_the_reasoning():
    usage = usage_of(replace(TALLY, n_reasoning=2))
    assert usage == usage_of(TALLY) | {"completion_tokens_details": {"reasoning_tokens": 2}}


def test_reasoning_and_calls_stand_beside_the_content():
    calls = (Call(0, "call_1", "f", '{"a":1}'), Call(1, "call_2", "g", "{}"))
    done = replace(DONE, finish="tool_calls")
    (choice,) = CHAT.whole(Piece("", reasoning="hm", calls=calls), done)["choices"]
    listed = [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
        {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert choice["message"] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": listed,
    }
    assert choice["finish_reason"] == "tool_calls"
    pieces = [Piece("", reasoning="hm"), Piece("", calls=calls[:1]), Piece("", calls=calls[1:])]
    assert [CHAT.piece(piece)["choices"][0]["delta"] for piece in pieces] == [
        {"reasoning_content": "hm"},
        {"tool_calls": [{"index": 0, **listed[0]}]},
        {"tool_calls": [{"index": 1, **listed[1]}]},
    ]


def test_timings_leave_cached_tokens_out():
    assert timings_of(TALLY) == {
        "prompt_n": 6,
        "prompt_ms": 500.0,
        "prompt_per_second": 12.0,
        "predicted_n": 3,
        "predicted_ms": 250.0,
        "predicted_per_second": 12.0,
    }


@pytest.mark.parametrize(("n", "seconds"), [(0, 1.0), (5, 0.0), (0, 0.0)])
def test_nothing_measured_is_a_rate_of_zero(n, seconds):
    assert rate(n, seconds) == 0.0


def test_a_whole_chat_reply():
    assert CHAT.whole(Piece("Hello"), DONE) == {
        "id": "chatcmpl-7",
        "object": "chat.completion",
        "created": 1780000000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello"},
                "finish_reason": "stop",
            }
        ],
        "usage": usage_of(TALLY),
        "timings": timings_of(TALLY),
    }


def test_a_whole_completion_reply():
    assert COMPLETION.whole(Piece("Hello"), DONE) == {
        "id": "cmpl-8",
        "object": "text_completion",
        "created": 1780000000,
        "model": "m",
        "choices": [{"text": "Hello", "index": 0, "finish_reason": "stop"}],
        "usage": usage_of(TALLY),
        "timings": timings_of(TALLY),
    }


def test_chat_chunks_have_no_usage_but_the_last():
    chunks = [CHAT.opening(), CHAT.piece(Piece("a")), CHAT.closing(DONE)]
    assert [chunk["choices"][0] for chunk in chunks] == [
        {"index": 0, "delta": {"role": "assistant"}, "finish_reason": None},
        {"index": 0, "delta": {"content": "a"}, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": "stop"},
    ]
    assert all(set(chunk) == {"id", "object", "created", "model", "choices"} for chunk in chunks)
    last = CHAT.usage(DONE)
    assert (last["choices"], last["usage"]) == ([], usage_of(TALLY))
    assert {chunk["object"] for chunk in [*chunks, last]} == {"chat.completion.chunk"}


def test_completion_chunks():
    assert COMPLETION.opening() is None
    assert COMPLETION.piece(Piece("a"))["choices"] == [
        {"text": "a", "index": 0, "finish_reason": None}
    ]
    assert COMPLETION.closing(DONE)["choices"] == [
        {"text": "", "index": 0, "finish_reason": "stop"}
    ]
    assert COMPLETION.usage(DONE)["choices"] == []


@pytest.mark.parametrize("reply", [CHAT, COMPLETION])
def test_a_broken_generation_says_why_beside_the_finish_reason(reply):
    for broken in (reply.whole(Piece("par"), FAILED), reply.closing(FAILED)):
        assert broken["choices"][0]["finish_reason"] == "error"
        assert "worker1" in broken["error"]["message"]
        assert broken["error"]["type"] == "server_error"
