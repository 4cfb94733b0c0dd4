"""Reply shapes: exactly the keys of server-and-cli.md#usage, #chat-completions, #completions."""

import json
from dataclasses import replace

import pytest

from ds4py.errors import RemoteWorkError
from ds4py.server.api.chat.response import ChatReply
from ds4py.server.api.completions.response import CompletionReply
from ds4py.server.api.reply import openai_usage, rate, timings_of
from ds4py.server.requests.events import (
    Answer,
    CallClosed,
    CallFragment,
    CallOpened,
    Done,
    LogProb,
    Ranked,
    Started,
    Tally,
    TextPiece,
)

TALLY = Tally(n_prompt=10, n_cached=4, n_completion=3, prefill_seconds=0.5, decode_seconds=0.25)
DONE = Done(finish="stop", tally=TALLY)
FAILED = Done(finish="error", error=RemoteWorkError("lost", hop="worker1"), tally=TALLY)
CHAT = ChatReply(id="chatcmpl-7", created=1780000000, model="m", include_usage=True)
COMPLETION = CompletionReply(id="cmpl-8", created=1780000000, model="m", include_usage=True)
STARTED = Started(10, 4)
CALLS = [
    CallOpened(0, "call_1", "f"),
    CallFragment(0, '{"a"'),
    CallFragment(0, ":1}"),
    CallClosed(0),
    CallOpened(1, "call_2", "g"),
    CallFragment(1, "{}"),
    CallClosed(1),
]
LOGPROB = LogProb(Ranked("a", b"a", -0.5), (Ranked("a", b"a", -0.5), Ranked("b", b"b", -1.5)))


def answer(*events):
    whole = Answer()
    for event in events:
        whole.add(event)
    return whole


def chunks(frames):
    """The JSON of frames, without the end mark."""
    lines = b"".join(frames).decode().split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_usage_counts_cached_and_written_tokens():
    assert openai_usage(TALLY) == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 6},
    }


def test_usage_tells_the_tokens_of_the_reasoning():
    usage = openai_usage(replace(TALLY, n_reasoning=2))
    assert usage == openai_usage(TALLY) | {"completion_tokens_details": {"reasoning_tokens": 2}}


def test_reasoning_and_calls_stand_beside_the_content():
    whole = answer(TextPiece("", reasoning="hm"), *CALLS)
    (choice,) = CHAT.whole(whole, replace(DONE, finish="tool_calls"))["choices"]
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


def test_a_call_streams_as_a_header_and_fragments():
    events = [TextPiece("", reasoning="hm"), *CALLS]
    sent = chunks(frame for event in events for frame in CHAT.written(event))
    assert [chunk["choices"][0]["delta"] for chunk in sent] == [
        {"reasoning_content": "hm"},
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function",
                         "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
        {"tool_calls": [{"index": 1, "id": "call_2", "type": "function",
                         "function": {"name": "g", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
    ]  # fmt: skip


def test_log_probabilities_have_the_shape_of_either_endpoint():
    piece = TextPiece("a", logprobs=(LOGPROB,))
    a, b = ({"token": t, "logprob": p, "bytes": [ord(t)]} for t, p in (("a", -0.5), ("b", -1.5)))
    wanted = {"content": [a | {"top_logprobs": [a, b]}], "refusal": None}
    (chunk,) = chunks(CHAT.written(piece))
    assert chunk["choices"][0]["logprobs"] == wanted
    assert CHAT.whole(answer(piece), DONE)["choices"][0]["logprobs"] == wanted
    legacy = COMPLETION.whole(answer(piece), DONE)["choices"][0]["logprobs"]
    assert (legacy["tokens"], legacy["token_logprobs"]) == (["a"], [-0.5])
    assert legacy["top_logprobs"] == [{"a": -0.5, "b": -1.5}]


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
    assert CHAT.whole(answer(TextPiece("Hello")), DONE) == {
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
        "usage": openai_usage(TALLY),
        "timings": timings_of(TALLY),
    }


def test_a_whole_completion_reply():
    assert COMPLETION.whole(answer(TextPiece("Hello")), DONE) == {
        "id": "cmpl-8",
        "object": "text_completion",
        "created": 1780000000,
        "model": "m",
        "choices": [{"text": "Hello", "index": 0, "finish_reason": "stop"}],
        "usage": openai_usage(TALLY),
        "timings": timings_of(TALLY),
    }


def test_chat_chunks_have_no_usage_but_the_last():
    frames = [*CHAT.started(STARTED), *CHAT.written(TextPiece("a")), *CHAT.closing(DONE)]
    assert frames[-1] == b"data: [DONE]\n\n"
    *sent, last = chunks(frames)
    assert [chunk["choices"][0] for chunk in sent] == [
        {"index": 0, "delta": {"role": "assistant"}, "finish_reason": None},
        {"index": 0, "delta": {"content": "a"}, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": "stop"},
    ]
    assert all(set(chunk) == {"id", "object", "created", "model", "choices"} for chunk in sent)
    assert (last["choices"], last["usage"]) == ([], openai_usage(TALLY))
    assert {chunk["object"] for chunk in [*sent, last]} == {"chat.completion.chunk"}


def test_completion_chunks():
    assert list(COMPLETION.started(STARTED)) == []
    (chunk,) = chunks(COMPLETION.written(TextPiece("a")))
    assert chunk["choices"] == [{"text": "a", "index": 0, "finish_reason": None}]
    end, usage = chunks(COMPLETION.closing(DONE))
    assert end["choices"] == [{"text": "", "index": 0, "finish_reason": "stop"}]
    assert usage["choices"] == []


def test_the_usage_chunk_comes_only_if_asked_for():
    reply = ChatReply(id="x", created=1, model="m")
    assert len(chunks(reply.closing(DONE))) == 1


@pytest.mark.parametrize("reply", [CHAT, COMPLETION])
def test_a_broken_generation_says_why_beside_the_finish_reason(reply):
    for broken in (reply.whole(answer(TextPiece("par")), FAILED), chunks(reply.closing(FAILED))[0]):
        assert broken["choices"][0]["finish_reason"] == "error"
        assert "worker1" in broken["error"]["message"]
        assert broken["error"]["type"] == "server_error"
