"""C22 to C33, C35 and C36: replies of chat and completions, whole and in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from ds4py.cli.client import client as cli_command
from ds4py.layer_range import LayerSpec
from ds4py.text.tokenizer.deepseek4_tokens import Marker
from tests import golden
from tests.conformance.server.peer import (
    ARGUMENTS,
    CHAT,
    COMPLETIONS,
    THINK_END,
    WEATHER,
    Answer,
    D,
    asking,
    in_bytes,
    model,
    post,
    prompt_of,
    saying,
    served,
    tokens,
)
from tests.e2e.support import LocalServer, command, coordinator
from tests.fakes import Script

SAID = f"Need weather.{THINK_END}Checking: é 🌧." + WEATHER
USAGE = {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}
CUTS: list[Callable[[str], list[int]]] = [tokens, in_bytes]


def whole(says: str | Script, **members: Any) -> Any:
    with saying(says) as port:
        return post(port, CHAT, asking(CHAT, **members)).json


def chunks(says: str | Script, path: str = CHAT, **members: Any) -> list[Any]:
    with saying(says) as port:
        return checked(post(port, path, asking(path, stream=True, **members)))


def checked(answer: Answer) -> list[Any]:
    """The chunks of a stream without its `[DONE]`, which must be the last and only one."""
    assert all(event.name is None and event.comment is None for event in answer.events)
    *payloads, done = answer.payloads
    assert done == "[DONE]"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in payloads}) == 1
    return payloads


def deltas(payloads: Sequence[Any]) -> list[Any]:
    return [chunk["choices"][0]["delta"] for chunk in payloads if chunk["choices"]]


def joined(payloads: Sequence[Any], key: str) -> str:
    return "".join(delta.get(key, "") for delta in deltas(payloads))


# --- chat -----------------------------------------------------------------------------------------


def test_c22_the_members_of_a_reply() -> None:
    """Exactly the members of server-and-cli.md#chat-completions; a content is a string, also empty.

    Differs from ds4: there is a member `timings`, and reasoning tokens are told in
    `usage.completion_tokens_details`.
    """
    reply = whole(f"Need weather.{THINK_END}" + WEATHER, tools=True, model="m")
    assert reply.keys() == {"id", "object", "created", "model", "choices", "usage", "timings"}
    assert (reply["id"], reply["object"], reply["model"]) == ("chatcmpl-1", "chat.completion", "m")
    (choice,) = reply["choices"]
    assert choice.keys() == {"index", "message", "finish_reason"}
    assert (choice["index"], choice["finish_reason"]) == (0, "tool_calls")
    message = choice["message"]
    assert message.keys() == {"role", "content", "reasoning_content", "tool_calls"}
    assert (message["role"], message["content"]) == ("assistant", "")
    assert message["reasoning_content"] == "Need weather."
    (call,) = message["tool_calls"]
    assert call.keys() == {"id", "type", "function"}
    assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}
    assert reply["usage"].keys() == USAGE | {"completion_tokens_details"}


def test_c22_what_is_empty_is_left_out() -> None:
    reply = whole("Hi", think=False)
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "Hi"}
    usage = reply["usage"]
    assert usage.keys() == USAGE
    assert usage["completion_tokens"] == len(tokens("Hi", end=False))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    details = usage["prompt_tokens_details"]
    assert details == {"cached_tokens": 0, "cache_write_tokens": usage["prompt_tokens"]}


def test_c22_ids_count_over_all_routes() -> None:
    with saying("Hi") as port:
        ids = [post(port, path, asking(path)).json["id"] for path in (CHAT, COMPLETIONS, CHAT)]
    assert ids == ["chatcmpl-1", "cmpl-2", "chatcmpl-3"]


def test_c22_reasoning_that_never_ends_is_reasoning() -> None:
    """Reasoning that is cut off stands in `reasoning_content`.

    Differs from ds4: there a reply that is not streamed has it in `content`.
    """
    reply = whole("Let me think about that", max_tokens=3)
    message = reply["choices"][0]["message"]
    assert (message["content"], reply["choices"][0]["finish_reason"]) == ("", "length")
    assert message["reasoning_content"]


def test_c23_the_order_of_a_stream() -> None:
    payloads = chunks(SAID, tools=True, stream_options={"include_usage": True})
    assert {chunk["object"] for chunk in payloads} == {"chat.completion.chunk"}
    *stream, finish, usage = payloads
    kinds = [next(iter(delta)) for delta in deltas(stream)]
    assert all(len(delta) == 1 for delta in deltas(stream))
    assert list(dict.fromkeys(kinds)) == ["role", "reasoning_content", "content", "tool_calls"]
    assert kinds == sorted(kinds, key=list(dict.fromkeys(kinds)).index)  # no kind comes back
    assert kinds.count("role") == 1
    assert {chunk["choices"][0]["finish_reason"] for chunk in stream} == {None}
    assert finish["choices"] == [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]
    assert usage["choices"] == []
    opened, *fragments = [
        delta["tool_calls"][0] for delta in deltas(stream) if "tool_calls" in delta
    ]
    assert opened.keys() == {"index", "id", "type", "function"}
    assert opened["function"] == {"name": "weather", "arguments": ""}
    assert len(fragments) > 1
    assert all(part.keys() == {"index", "function"} for part in fragments)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("asked", [True, False, None])
def test_c24_the_usage_chunk(path: str, asked: bool | None) -> None:
    options = {} if asked is None else {"stream_options": {"include_usage": asked}}
    payloads = chunks("Hi", path, **options)
    holders = [chunk for chunk in payloads if "usage" in chunk]
    if not asked:
        assert not holders
        return
    assert holders == payloads[-1:]
    assert holders[0]["choices"] == []
    assert holders[0]["usage"]["completion_tokens"] == len(tokens("Hi", end=False))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "text",
    [
        SAID,
        "Hm\n\n" + THINK_END + "\n\n Hi  \n",
        THINK_END + "Hi",
        "never closed",
        f"a{THINK_END}1 < 2 <tool_ca <{D}tool",
        f'x{THINK_END}<tool_calls><invoke name="weather"><parameter name="city" string="true">'
        'a &lt; b\n</parameter></invoke><invoke name="now"></invoke></tool_calls>',
    ],
)
def test_c25_a_stream_adds_up_to_the_whole(text: str, cut: Callable[[str], list[int]]) -> None:
    message = whole(cut(text), tools=True)["choices"][0]["message"]
    payloads = chunks(cut(text), tools=True)
    for key in ("content", "reasoning_content"):
        assert joined(payloads, key) == message.get(key, "")
    calls: dict[int, dict[str, str]] = {}
    for delta in deltas(payloads):
        for part in delta.get("tool_calls", ()):
            made = calls.setdefault(part["index"], {"name": "", "arguments": ""})
            made["name"] += part["function"].get("name", "")
            made["arguments"] += part["function"]["arguments"]
    assert list(calls.values()) == [call["function"] for call in message.get("tool_calls", ())]


@pytest.mark.parametrize("thinking", [False, True])
def test_c26_characters_are_never_split(thinking: bool) -> None:
    text = "é€🌧 naïve 日本"
    key = "reasoning_content" if thinking else "content"
    payloads = chunks(in_bytes(text), think=thinking)
    pieces = [delta[key] for delta in deltas(payloads) if key in delta]
    assert "".join(pieces) == text
    assert len(pieces) == len(text)  # one character a chunk, none of them damaged


def test_c27_the_end_of_thinking_never_shows() -> None:
    payloads = chunks(in_bytes(f"Hm < a{THINK_END}Hi"))
    assert (joined(payloads, "reasoning_content"), joined(payloads, "content")) == ("Hm < a", "Hi")
    pieces = [text for delta in deltas(payloads) for text in delta.values()]
    assert not [piece for piece in pieces if piece in ("</", "k>", THINK_END) or "think" in piece]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_c28_stop_texts_never_show(path: str, cut: Callable[[str], list[int]]) -> None:
    members: Any = {"stop": ["never said", "STOP", 7, "", "STO"], "think": False}
    payloads = chunks(cut("One STEP, then STOP it"), path, **members)
    if path == CHAT:
        pieces = [delta.get("content", "") for delta in deltas(payloads)]
    else:
        pieces = [chunk["choices"][0]["text"] for chunk in payloads]
    assert "".join(pieces) == "One STEP, then "
    assert payloads[-1]["choices"][0]["finish_reason"] == "stop"


def test_c28_stop_texts_count_in_reasoning_too() -> None:
    reply = whole(in_bytes(f"Hm, halt now{THINK_END}Hi"), stop="halt")
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, ", "")


def test_c29_no_tokens_asked_for() -> None:
    reply = whole("Hi", max_tokens=0)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": ""}
    assert reply["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ('"max_completion_tokens":2', 2),
        ('"max_tokens":5,"max_completion_tokens":2', 2),
        ('"max_completion_tokens":2,"max_tokens":5', 5),
        ('"max_completion_tokens":2,"max_tokens":null', 2),
    ],
)
def test_c30_the_later_limit_wins(limits: str, most: int) -> None:
    body = f'{{"messages":[{{"role":"user","content":"x"}}],"think":false,{limits}}}'
    with saying(in_bytes("abcdefghij")) as port:
        reply = post(port, CHAT, body.encode()).json
    assert reply["usage"]["completion_tokens"] == most
    assert reply["choices"][0]["message"]["content"] == "abcdefghij"[:most]
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.fixture(scope="module")
def real() -> Iterator[LocalServer]:
    """The tiny DeepSeek V4 with its weights, in this process."""
    path = golden.path("tiny-a.gguf")
    with coordinator(path, layers=LayerSpec.parse("0:output"), n_sessions=1) as server:
        server.wait_ready()
        yield server


def sampled(server: LocalServer, **members: Any) -> str:
    body = asking(CHAT, think=False, max_tokens=24, **members)
    text = post(server.address.port, CHAT, body).json["choices"][0]["message"]["content"]
    assert text
    return str(text)


def test_c31_a_seed_repeats_a_reply(real: LocalServer) -> None:
    first, second = (sampled(real, seed=7) for _ in range(2))
    others = [sampled(real, seed=seed) for seed in (8, 9)]
    assert first == second
    assert set(others) != {first}


def test_c32_greedy_here_and_in_the_cli(
    real: LocalServer, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    served_text = sampled(real, temperature=0)
    capfdbinary.readouterr()
    asked = ["-m", golden.path("tiny-a.gguf"), "-p", "Oslo?", "--nothink", "--temp", "0"]
    status = command(cli_command, "ds4py-cli", *asked, "-sys", "", "-n", "24", "--precision", "f32")
    assert status == 0
    assert capfdbinary.readouterr().out.decode(errors="replace").strip() == served_text.strip()


@pytest.mark.parametrize("stream", [False, True])
def test_c33_a_full_context_is_a_length(stream: bool) -> None:
    fake = model([5], n_ctx=64)  # says one word for ever
    with served(fake) as (_, port):
        answer = post(port, CHAT, asking(CHAT, stream=stream, max_tokens=100_000))
    last = checked(answer)[-1] if stream else answer.json
    assert last["choices"][0]["finish_reason"] == "length"
    assert len(fake.sessions[0].tokens) <= 64


# --- completions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["Once", ["Once", "Twice"], [7, "Once"]])
def test_c35_the_form_of_a_completion(prompt: Any) -> None:
    fake = model(f"Hm{THINK_END}upon")
    with served(fake) as (_, port):
        reply = post(port, COMPLETIONS, {"prompt": prompt}).json
    assert reply["id"] == "cmpl-1"
    assert reply["object"] == "text_completion"
    (choice,) = reply["choices"]
    assert choice == {"text": f"Hm{THINK_END}upon", "index": 0, "finish_reason": "stop"}
    system = "You are a helpful assistant"
    assert prompt_of(fake).startswith(f"{Marker.BOS}{system}{Marker.USER}Once{Marker.ASSISTANT}")


def test_c35_the_stream_of_a_completion() -> None:
    payloads = chunks(f"Hm{THINK_END}upon", COMPLETIONS)
    assert {chunk["object"] for chunk in payloads} == {"text_completion"}
    assert "".join(chunk["choices"][0]["text"] for chunk in payloads) == f"Hm{THINK_END}upon"
    *stream, last = [chunk["choices"][0] for chunk in payloads]
    assert {choice["finish_reason"] for choice in stream} == {None}
    assert last == {"text": "", "index": 0, "finish_reason": "stop"}


def test_c35_token_ids_are_a_prompt() -> None:
    """A list of token ids is the prompt itself.

    Differs from ds4: it reads such a list as empty text.
    """
    fake = model("Hi")
    with served(fake) as (_, port):
        assert post(port, COMPLETIONS, {"prompt": [5, 6, 7]}).json["usage"]["prompt_tokens"] == 3
    assert fake.sessions[0].tokens[:3] == (5, 6, 7)


@pytest.mark.parametrize("members", [{"think": False}, {"thinking": {"type": "disabled"}}])
def test_c36_without_thinking_there_is_no_tag(members: Any) -> None:
    def text(says: str, **more: Any) -> str:
        fake = model(says)
        with served(fake) as (_, port):
            said = post(port, COMPLETIONS, asking(COMPLETIONS, **more)).json["choices"][0]["text"]
        opened = prompt_of(fake).endswith("<think>")
        return f"{'open' if opened else 'closed'}: {said}"

    assert text(f"Hm{THINK_END}Hi") == f"open: Hm{THINK_END}Hi"
    assert text("Hi", **members) == "closed: Hi"
