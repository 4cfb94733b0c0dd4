"""C50 to C57: tool calls in every dialect, and when the model thinks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.conformance.server.peer import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    THINK_END,
    WEATHER,
    D,
    asking,
    block,
    call,
    in_bytes,
    model,
    post,
    prompt_of,
    saying,
    served,
    tokens,
    turns,
)
from tests.conformance.server.replies import DIALECTS, calls, finish, follow_up, texts, usage
from tests.support.fakes import Script


def whole(path: str, says: str | Script, **members: Any) -> Any:
    with saying(says) as port:
        return post(port, path, asking(path, **{"tools": True, **members})).json


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("style", [D, D[1:], ""])
def test_c50_three_ways_to_write_a_block(path: str, style: str) -> None:
    written = block(call("weather", style, city="Oslo", days=("3",)), style=style)
    reply = whole(path, in_bytes(f"Hm{THINK_END}Look:\n\n{written}"))
    (found,) = calls(path, reply)
    assert found[1:] == ("weather", {"city": "Oslo", "days": 3})
    assert texts(path, reply)[1] == "Look:"


PREFIX = {CHAT: "call_", RESPONSES: "call_", MESSAGES: "toolu_"}
TWO = "\n\n" + block(call("weather", city="Oslo"), call("weather", city="Rome"))


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("turned", [False, True])
def test_c51_two_calls_and_their_results_in_any_order(path: str, turned: bool) -> None:
    fake = model(turns(f"Hm{THINK_END}" + TWO, f"So{THINK_END}Warm."))
    with served(fake) as (_, port):
        reply = post(port, path, asking(path, tools=True)).json
        first, second = calls(path, reply)
        results = [(first[0], "9 C"), (second[0], "21 C")]
        body = follow_up(path, reply, results[::-1] if turned else results)
        assert texts(path, post(port, path, body).json)[1] == "Warm."
    assert [one[1:] for one in (first, second)] == [
        ("weather", {"city": "Oslo"}),
        ("weather", {"city": "Rome"}),
    ]
    assert first[0] != second[0]
    for name in (first[0], second[0]):
        assert name.startswith(PREFIX[path])
        assert len(name.removeprefix(PREFIX[path])) == 32
    shown = prompt_of(fake)
    assert (shown.index("9 C</tool_result>") < shown.index("21 C</tool_result>")) != turned


NASTY = "a < b && c > d; echo \"hi\" 'x' \\n\n\ttab 🌧 <b>&amp; </ <｜DSML｜x> </param"  # noqa: RUF001


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("cut", [tokens, in_bytes])
def test_c52_texts_arrive_unchanged(path: str, cut: Any) -> None:
    written = NASTY.replace("&amp;", "&amp;amp;")
    reply = whole(path, cut(f"Hm{THINK_END}" + block(call("weather", city=written))))
    (found,) = calls(path, reply)
    assert found[2] == {"city": NASTY}


@pytest.mark.parametrize("path", DIALECTS)
def test_c53_no_calls_in_thoughts(path: str) -> None:
    reply = whole(path, f"I could write {WEATHER}, but then")
    assert calls(path, reply) == []
    assert finish(path, reply) == "stop"
    closed = whole(path, f"I could write {WEATHER}, but no.{THINK_END}Warm.")
    assert (calls(path, closed), texts(path, closed)[1]) == ([], "Warm.")


@pytest.mark.parametrize("path", DIALECTS)
def test_c54_nothing_follows_a_block(path: str) -> None:
    said = f"Hm{THINK_END}" + WEATHER
    fake = model(tokens(said + " And then I say more. " * 9))
    with served(fake) as (_, port):
        reply = post(port, path, asking(path, tools=True)).json
    assert texts(path, reply)[1] == ""
    assert finish(path, reply) == "tool_calls"
    assert usage(path, reply)[2] == len(tokens(said, end=False))


# --- mending --------------------------------------------------------------------------------------

OPEN = [
    WEATHER.removesuffix(f"</{D}tool_calls>"),
    WEATHER.removesuffix(f"\n</{D}tool_calls>"),
    WEATHER.removesuffix(f"</{D}invoke>\n</{D}tool_calls>"),
]


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("written", OPEN)
def test_c55_missing_closing_tags_are_added(path: str, written: str) -> None:
    reply = whole(path, f"Hm{THINK_END}" + written)
    (found,) = calls(path, reply)
    assert found[1:] == ("weather", {"city": "Oslo", "days": 3})
    assert finish(path, reply) == "tool_calls"


@pytest.mark.parametrize("path", DIALECTS)
def test_c55_what_a_limit_cut_off_is_not_mended(path: str) -> None:
    """A block that the limit cut off is no call.

    Differs from ds4: it adds the closing tags there too, and may execute half a command.
    """
    said = f"Hm{THINK_END}Look:" + OPEN[0]
    limit = {RESPONSES: "max_output_tokens"}.get(path, "max_tokens")
    reply = whole(path, said, **{limit: len(tokens(said, end=False))})
    assert (calls(path, reply), finish(path, reply)) == ([], "length")
    assert texts(path, reply)[1] == "Look:"


BROKEN = "\n\n" + block('<nonsense name="weather">\n')


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("again", [WEATHER, "It is warm."])
def test_c55_one_hidden_retry(path: str, again: str) -> None:
    """A closed block that cannot be read is asked for again; the client sees the second reply."""
    fake = model(turns(f"Hm{THINK_END}Look:" + BROKEN, f"So{THINK_END}" + again))
    with served(fake) as (_, port):
        reply = post(port, path, asking(path, tools=True)).json
    assert [one[1] for one in calls(path, reply)] == ["weather"] * (again == WEATHER)
    assert texts(path, reply)[1] == ("" if again == WEATHER else again)
    assert finish(path, reply) == ("tool_calls" if again == WEATHER else "stop")
    assert BROKEN in prompt_of(fake)
    assert usage(path, reply)[2] == len(tokens(f"So{THINK_END}" + again, end=False))


@pytest.mark.parametrize("path", DIALECTS)
def test_c55_there_is_no_second_retry(path: str) -> None:
    reply = whole(path, f"Hm{THINK_END}Look:" + BROKEN)
    assert (calls(path, reply), finish(path, reply)) == ([], "stop")
    assert texts(path, reply)[1] == "Look:" + BROKEN


@pytest.mark.parametrize("path", DIALECTS)
def test_c55_a_stream_is_not_tried_again(path: str) -> None:
    """In a stream a block that cannot be read is text.

    Differs from ds4: there a stream of chat or messages says nothing of it.
    """
    with saying(f"Hm{THINK_END}Look:" + BROKEN) as port:
        answer = post(port, path, asking(path, tools=True, stream=True))
    assert b"nonsense" in answer.body
    assert b'"tool_use"' not in answer.body
    assert b'"tool_calls"' not in answer.body


# --- replay ---------------------------------------------------------------------------------------

SPACED = "\n" + block(call("weather", city="Oslo", days=(" 3 ",)))
"""A block that nobody would write again in just this way."""


TURNED = '{ "days": 3, "city": "Oslo" }'


def with_turned_members(path: str, reply: Any) -> Any:
    """The reply as a client returns it that keeps no order of members."""
    returned = json.loads(json.dumps(reply))
    if path == CHAT:
        returned["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] = TURNED
    elif path == RESPONSES:
        returned["output"][-1]["arguments"] = TURNED
    else:
        returned["content"][-1]["input"] = json.loads(TURNED)
    return returned


@pytest.mark.parametrize("path", DIALECTS)
def test_c56_calls_are_repeated_as_they_were_sampled(path: str) -> None:
    """A call that comes back with its members in another order is the sampled one in the prompt.

    Differs from ds4: the last token of the block is evaluated with the next prompt, so one token
    less than the total before is cached.
    """
    fake = model(turns(f"Hm{THINK_END}Look:" + SPACED, f"So{THINK_END}Cold."))
    with served(fake) as (_, port):
        reply = post(port, path, asking(path, tools=True)).json
        n_prompt, _, n_said = usage(path, reply)
        (found,) = calls(path, reply)
        body = follow_up(path, with_turned_members(path, reply), [(found[0], "9 C")])
        second = post(port, path, body).json
    assert SPACED in prompt_of(fake)
    assert usage(path, second)[1] >= n_prompt + n_said - 1


@pytest.mark.parametrize("path", DIALECTS)
def test_c56_the_memory_can_be_switched_off(path: str) -> None:
    fake = model(turns(f"Hm{THINK_END}Look:" + SPACED, f"So{THINK_END}Cold."))
    with served(fake, exact_replay=False) as (_, port):
        reply = post(port, path, asking(path, tools=True)).json
        (found,) = calls(path, reply)
        body = follow_up(path, with_turned_members(path, reply), [(found[0], "9 C")])
        assert post(port, path, body).status == 200
    assert SPACED not in prompt_of(fake)
    assert "\n\n" + block(call("weather", days=("3",), city="Oslo")) in prompt_of(fake)


# --- thinking -------------------------------------------------------------------------------------


Opened = Callable[..., str]
"""Sends a request with more members; returns its prompt."""


@contextmanager
def thinking(n_ctx: int) -> Iterator[Opened]:
    """A server with a context that allows some ways to think."""
    fake = model("Hi", n_ctx=n_ctx)
    with served(fake) as (_, port):

        def opened(path: str, **members: Any) -> str:
            assert post(port, path, asking(path, **members)).status == 200
            return prompt_of(fake)

        yield opened


@pytest.fixture(scope="module")
def opened() -> Iterator[Opened]:
    with thinking(393_215) as small:
        yield small


OFF: list[tuple[str, Any]] = [
    *((path, {"reasoning_effort": "none"}) for path in (CHAT, COMPLETIONS, MESSAGES)),
    *((path, {"thinking": {"type": "disabled"}}) for path in (CHAT, COMPLETIONS, MESSAGES)),
    *((path, {"thinking": False}) for path in (CHAT, COMPLETIONS, MESSAGES)),
    *((path, {"think": False}) for path in (CHAT, COMPLETIONS)),
    *((path, {"model": "deepseek-chat"}) for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)),
    (RESPONSES, {"reasoning": {"effort": "none"}}),
    (MESSAGES, {"output_config": {"effort": "none"}}),
    (CHAT, {"reasoning_effort": "none", "thinking": {"type": "enabled"}}),
    (CHAT, {"reasoning_effort": "max", "thinking": {"type": "disabled"}}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
]
ON: list[tuple[str, Any]] = [
    *((path, {}) for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)),
    *((CHAT, {"reasoning_effort": word}) for word in ("minimal", "low", "medium", "high", "xhigh")),
    (CHAT, {"model": "deepseek-reasoner"}),
    (CHAT, {"model": "deepseek-chat", "thinking": {"type": "enabled"}}),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    (MESSAGES, {"thinking": {"type": "adaptive"}}),
    (RESPONSES, {"model": "deepseek-chat", "reasoning": {"effort": "low"}}),
]


@pytest.mark.parametrize(("path", "members"), OFF)
def test_c57_thinking_off(opened: Opened, path: str, members: Any) -> None:
    assert opened(path, **members).endswith(THINK_END)


@pytest.mark.parametrize(("path", "members"), ON)
def test_c57_thinking_on(opened: Opened, path: str, members: Any) -> None:
    assert opened(path, **members) == opened(path)
    assert opened(path).endswith("<think>")


@pytest.mark.parametrize(
    ("path", "members"),
    [
        (CHAT, {"reasoning_effort": "max"}),
        (RESPONSES, {"reasoning": {"effort": "max"}}),
        (MESSAGES, {"output_config": {"effort": "max"}}),
    ],
)
def test_c57_max_needs_a_large_context(opened: Opened, path: str, members: Any) -> None:
    words = "Reasoning Effort: Absolute maximum"
    assert opened(path, **members) == opened(path)
    with thinking(393_216) as large:
        assert words in large(path, **members)
        assert words not in large(path)
