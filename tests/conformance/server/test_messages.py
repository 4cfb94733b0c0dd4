"""C44 to C48: replies and events of `/v1/messages`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from ds4py.errors import RemoteWorkError
from tests.conformance.server.peer import (
    CHAT,
    MESSAGES,
    THINK_END,
    asking,
    block,
    call,
    in_bytes,
    model,
    post,
    prompt_of,
    saying,
    served,
)
from tests.support.fakes import FakeBackend

TWO = "\n\n" + block(call("weather", city="Oslo"), call("now"))
SAID = f"Need weather.{THINK_END}Checking é." + TWO
GONE = RemoteWorkError("out of memory", hop="worker1")


def whole(says: str | Sequence[int] | FakeBackend, **members: Any) -> Any:
    fake = says if isinstance(says, FakeBackend) else model(says)
    with served(fake) as (_, port):
        return post(port, MESSAGES, asking(MESSAGES, **members)).json


def stream(says: str | Sequence[int] | FakeBackend, **members: Any) -> list[Any]:
    """The payloads of a stream; every event is named as its type."""
    fake = says if isinstance(says, FakeBackend) else model(says)
    with served(fake) as (_, port):
        events = post(port, MESSAGES, asking(MESSAGES, stream=True, **members)).events
    assert all(event.name == event.data["type"] for event in events)
    return [event.data for event in events]


def blocks(payloads: Sequence[Any]) -> list[Any]:
    """The content that events add up to; blocks must not overlap, and count from 0."""
    content: list[Any] = []
    is_open = False
    for payload in payloads:
        kind = payload["type"]
        if not kind.startswith("content_block"):
            assert not is_open, f"{kind} inside a block"
            continue
        assert payload["index"] == len(content) - is_open
        if kind == "content_block_start":
            content.append({**payload["content_block"], "json": ""})
        else:
            assert is_open
            for name, value in payload.get("delta", {"type": ""}).items():
                if name != "type":
                    content[-1][name.removeprefix("partial_")] += value
        is_open = kind != "content_block_stop"
    for one in content:
        written = one.pop("json")
        if one["type"] == "tool_use":
            one["input"] = json.loads(written) if written.endswith("}") else "half"
    return content


ENDS = [
    ("Hi", {"thinking": {"type": "disabled"}}, "end_turn"),
    (f"Hm{THINK_END}Hi", {}, "end_turn"),
    (f"Hm{THINK_END}", {}, "end_turn"),
    ("only thoughts", {}, "end_turn"),
    (SAID, {"tools": True}, "tool_use"),
    (f"Hm{THINK_END}" + TWO, {"tools": True}, "tool_use"),
    ("think of it and never end", {"max_tokens": 5}, "max_tokens"),
    (f"Hm{THINK_END}" + "go on " * 50, {"max_tokens": 9}, "max_tokens"),
    (SAID, {"tools": True, "max_tokens": 60}, "max_tokens"),
    ("Hi", {"max_tokens": 0}, "max_tokens"),
]


@pytest.mark.parametrize(("says", "members", "reason"), ENDS)
def test_c44_the_order_of_events(says: str, members: Any, reason: str) -> None:
    first, *between, ending, last = stream(says, **members)
    assert first["type"] == "message_start"
    message = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    assert (message["role"], message["type"]) == ("assistant", "message")
    assert message["usage"]["output_tokens"] == 0
    kinds = {"content_block_start", "content_block_delta", "content_block_stop"}
    assert {payload["type"] for payload in between} <= kinds
    assert ending["type"] == "message_delta"
    assert ending["delta"] == {"stop_reason": reason, "stop_sequence": None}
    assert last == {"type": "message_stop"}


@pytest.mark.parametrize(("says", "members", "reason"), ENDS)
def test_c44_blocks_add_up_to_the_whole(says: str, members: Any, reason: str) -> None:
    reply = whole(says, **members)
    content = blocks(stream(says, **members))
    for one in (*content, *reply["content"]):
        for name in ("id", "signature"):
            assert one.pop(name, "some")
    complete = [one for one in content if one["type"] != "tool_use" or reason == "tool_use"]
    assert complete == reply["content"]


@pytest.mark.parametrize("n_before", [3, 20, 120, 180])
def test_c44_blocks_are_closed_when_a_reply_fails(n_before: int) -> None:
    """A reply that breaks off closes its block and ends with an error.

    Differs from ds4: a block could stay open, and the end was reported as `end_turn`.
    """
    fake = model(in_bytes(SAID), failures={n_before: GONE})
    *payloads, last = stream(fake, tools=True)
    is_open = None
    for payload in payloads:
        if payload["type"].startswith("content_block"):
            is_open = payload["type"] != "content_block_stop"
    assert is_open is False
    words = "worker1 refused the work: out of memory"
    assert last == {"type": "error", "error": {"type": "api_error", "message": words}}


def test_c44_a_whole_reply_that_fails_is_an_error() -> None:
    with served(model(in_bytes(SAID), failures={9: GONE})) as (_, port):
        answer = post(port, MESSAGES, asking(MESSAGES))
    assert answer.status == 500
    assert answer.json["error"]["type"] == "api_error"


@pytest.mark.parametrize("streamed", [False, True])
def test_c45_thinking_is_signed(streamed: bool) -> None:
    """A thinking block ends with a signature; a reply of thoughts only gets an empty text.

    Differs from ds4: the names of messages begin with `msg_`, not with `chatcmpl-`.
    """
    text = f"Hm.{THINK_END}"
    content = blocks(stream(text)) if streamed else whole(text)["content"]
    thinking, empty = content
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm.")
    assert thinking["signature"].startswith("msg_")
    assert empty == {"type": "text", "text": ""}


def test_c45_the_signature_comes_just_before_the_end() -> None:
    payloads = stream(SAID, tools=True)
    deltas = [p["delta"]["type"] for p in payloads if p.get("index") == 0 and "delta" in p]
    assert deltas.count("signature_delta") == 1
    assert deltas[-1] == "signature_delta"


def test_c46_a_stop_text_is_named() -> None:
    """A reply that a stop text ended says which one.

    Differs from ds4: it says `end_turn`, as if the model had ended by itself.
    """
    members: Any = {"stop_sequences": ["never", "STOP"], "thinking": {"type": "disabled"}}
    reply = whole(in_bytes("Go and STOP there"), **members)
    assert reply["content"] == [{"type": "text", "text": "Go and "}]
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "STOP")
    ending = stream(in_bytes("Go and STOP there"), **members)[-2]["delta"]
    assert ending == {"stop_reason": "stop_sequence", "stop_sequence": "STOP"}


@pytest.mark.parametrize(("says", "members", "reason"), ENDS)
def test_c46_why_it_ended(says: str, members: Any, reason: str) -> None:
    reply = whole(says, **members)
    assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, None)
    has_call = any(one["type"] == "tool_use" for one in reply["content"])
    assert has_call == (reason == "tool_use")


def test_c47_prompt_tokens_add_up() -> None:
    fake = model(f"Hm{THINK_END}Hi")
    with served(fake) as (_, port):
        prompts = [post(port, CHAT, asking(CHAT)).json["usage"]["prompt_tokens"]]
        replies = [post(port, MESSAGES, asking(MESSAGES)).json["usage"] for _ in range(2)]
        started = post(port, MESSAGES, asking(MESSAGES, stream=True)).payloads[0]["message"]
        counted = post(port, f"{MESSAGES}/count_tokens", asking(MESSAGES)).json["input_tokens"]
    for usage in (*replies, started["usage"]):
        parts = [usage[f"{kind}input_tokens"] for kind in ("", "cache_read_", "cache_creation_")]
        assert sum(parts) == prompts[0] == counted
        assert parts[0] == 0
    assert replies[1]["cache_read_input_tokens"] > 0


@pytest.mark.parametrize("header", ["x-anthropic-billing-header: cc_version=1;", "x-anthropic-"])
def test_c48_what_bills_is_no_part_of_the_prompt(header: str) -> None:
    def prompt(system: Any) -> str:
        fake = model(f"Hm{THINK_END}Hi")
        with served(fake) as (_, port):
            assert post(port, MESSAGES, asking(MESSAGES, system=system)).status == 200
        return prompt_of(fake)

    texts = [{"type": "text", "text": text} for text in ("You are", "an agent.")]
    billed = [{"type": "text", "text": header, "cache_control": {"type": "ephemeral"}}, *texts]
    assert prompt(billed) == prompt(texts)
    assert "You are\nan agent." in prompt(billed)
    assert "x-anthropic" in prompt([*texts, {"type": "text", "text": f"no {header}"}])


def test_c48_only_billing_is_left_out() -> None:
    with saying("Hi") as port:
        both = [{"type": "text", "text": text} for text in ("x-anthropic-billing: 1", "Be kind.")]
        answer = post(port, f"{MESSAGES}/count_tokens", asking(MESSAGES, system=both))
        plain = post(port, f"{MESSAGES}/count_tokens", asking(MESSAGES, system="Be kind."))
        none = post(port, f"{MESSAGES}/count_tokens", asking(MESSAGES))
    counts = [one.json["input_tokens"] for one in (answer, plain, none)]
    assert counts[0] == counts[1] > counts[2]
