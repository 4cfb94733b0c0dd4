"""C34: the official clients of OpenAI and Anthropic, streaming and not, against a real server.

The model is scripted, since what matters here is that the clients parse what they get: a warning is
an error in this suite, and so is a value that a typed member refuses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from ds4py.errors import RemoteWorkError, RouteIncompleteError
from tests.conformance.server.peer import (
    ARGUMENTS,
    CHAT_TOOLS,
    MESSAGES_TOOLS,
    RESPONSES_TOOLS,
    THINK_END,
    WEATHER,
    connect,
    get,
    model,
    posting,
    served,
    tokens,
    turns,
    until,
)
from tests.support.fakes import FakeBackend, Gate

SAID = f"Need weather.{THINK_END}Checking é."
CALLED = SAID + WEATHER
ROUNDS = (CALLED, f"So.{THINK_END}It is 9 C.")
USER: Any = [{"role": "user", "content": "Oslo?"}]
GONE = RemoteWorkError("out of memory", hop="worker1")
GIVEN = {"city": "Oslo", "days": 3}


@contextmanager
def openai_client(fake: FakeBackend, **config: Any) -> Iterator[openai.OpenAI]:
    with served(fake, **config) as (_, port), openai_at(port) as client:
        yield client


def openai_at(port: int, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1",
        api_key=key,
        max_retries=0,
        timeout=30,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )


@contextmanager
def anthropic_client(
    fake: FakeBackend, *, key: str = "any", **config: Any
) -> Iterator[anthropic.Anthropic]:
    with served(fake, **config) as (_, port), anthropic_at(port) as client:
        yield client


def anthropic_at(port: int, key: str = "any") -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{port}",
        api_key=key,
        max_retries=0,
        timeout=30,
        http_client=anthropic.DefaultHttpxClient(trust_env=False),
    )


# --- OpenAI: chat and completions -----------------------------------------------------------------


def test_c34_a_chat() -> None:
    with openai_client(model(SAID)) as client:
        reply = client.chat.completions.create(model="m", messages=USER, seed=1, temperature=0)
    message: Any = reply.choices[0].message
    assert (message.content, message.role) == ("Checking é.", "assistant")
    assert message.reasoning_content == "Need weather."
    assert message.tool_calls is None
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(tokens(SAID, end=False))
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    assert reply.usage.completion_tokens_details is not None
    assert reply.usage.completion_tokens_details.reasoning_tokens


def test_c34_a_streamed_chat() -> None:
    with openai_client(model(SAID)) as client:
        stream = client.chat.completions.create(
            model="m", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Checking é."
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == "Need weather."
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []


def test_c34_the_stream_helper_of_chat() -> None:
    with (
        openai_client(model(CALLED)) as client,
        client.chat.completions.stream(model="m", messages=USER, tools=strict_tools()) as stream,
    ):
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert "tool_calls.function.arguments.done" in kinds
    assert final.choices[0].message.tool_calls is not None
    assert final.choices[0].message.tool_calls[0].function.arguments == ARGUMENTS


def strict_tools() -> Any:
    """Tools that the helpers of the client take: they require `strict`."""
    return [
        {"type": "function", "function": {**tool["function"], "strict": True}}  # type: ignore[dict-item]
        for tool in CHAT_TOOLS
    ]


def test_c34_completions() -> None:
    with openai_client(model("upon a time")) as client:
        whole = client.completions.create(model="m", prompt="Once", extra_body={"think": False})
        parts = list(client.completions.create(model="m", prompt="Once", stream=True))
    assert whole.choices[0].text == "upon a time"
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(part.choices[0].text for part in parts) == "upon a time"


@pytest.mark.parametrize("streamed", [False, True])
def test_c34_tools_of_chat_both_ways(streamed: bool) -> None:
    with openai_client(model(turns(*ROUNDS))) as client:
        if streamed:
            with client.chat.completions.stream(
                model="m", messages=USER, tools=strict_tools()
            ) as stream:
                message: Any = stream.get_final_completion().choices[0].message
        else:
            reply = client.chat.completions.create(
                model="m",
                messages=USER,
                tools=CHAT_TOOLS,  # type: ignore[arg-type]
                tool_choice="auto",
            )
            assert reply.choices[0].finish_reason == "tool_calls"
            message = reply.choices[0].message
        (call,) = message.tool_calls
        assert (call.type, call.function.name) == ("function", "weather")
        assert json.loads(call.function.arguments) == GIVEN
        history = [
            *USER,
            message.model_dump(exclude_none=True, exclude={"parsed"}),
            {"role": "tool", "tool_call_id": call.id, "content": "9 C"},
        ]
        answer = client.chat.completions.create(
            model="m",
            messages=history,
            tools=CHAT_TOOLS,  # type: ignore[arg-type]
        )
    assert answer.choices[0].message.content == "It is 9 C."
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens


class City(pydantic.BaseModel):
    name: str
    degrees: int


JSON = '{"name":"Oslo","degrees":9}'


def test_c34_a_parsed_chat() -> None:
    with openai_client(model(f"Hm.{THINK_END}{JSON}")) as client:
        reply = client.chat.completions.parse(model="m", messages=USER, response_format=City)
    assert reply.choices[0].message.parsed == City(name="Oslo", degrees=9)


def test_c34_models() -> None:
    with openai_client(model("Hi")) as client:
        listed = client.models.list().data
        assert [entry.id for entry in listed] == ["deepseek-v4-flash", "deepseek-v4-pro"]
        assert client.models.retrieve("deepseek-v4-pro").owned_by == "ds4.c"
    with anthropic_client(model("Hi")) as other:
        # not this client's own form of a list, but enough of it for the ids
        ids = [entry["id"] for entry in other.get("/v1/models", cast_to=object)["data"]]  # type: ignore[index]
    assert ids == ["deepseek-v4-flash", "deepseek-v4-pro"]


# --- OpenAI: responses ----------------------------------------------------------------------------


def test_c34_a_response() -> None:
    with openai_client(model(SAID)) as client:
        reply = client.responses.create(model="m", input="Oslo?", reasoning={"summary": "auto"})
    reasoning, message = reply.output
    assert reasoning.type == "reasoning"
    assert reasoning.summary[0].text == "Need weather."
    assert message.type == "message"
    assert (reply.output_text, reply.status, reply.error) == ("Checking é.", "completed", None)
    assert reply.usage is not None
    assert reply.usage.output_tokens_details.reasoning_tokens > 0
    assert reply.incomplete_details is None


def test_c34_a_response_that_is_cut_off() -> None:
    with openai_client(model(SAID)) as client:
        reply = client.responses.create(model="m", input="Oslo?", max_output_tokens=2)
    assert reply.status == "incomplete"
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"


def test_c34_a_streamed_response() -> None:
    with openai_client(model(SAID)) as client:
        stream = client.responses.create(model="m", input="Oslo?", stream=True)
        events = list(stream)
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == "Checking é."


def test_c34_the_stream_helper_of_responses() -> None:
    with (
        openai_client(model(CALLED)) as client,
        client.responses.stream(
            model="m",
            input="Oslo?",
            tools=RESPONSES_TOOLS,  # type: ignore[arg-type]
            reasoning={"summary": "auto"},
        ) as stream,
    ):
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.function_call_arguments.done" in kinds
    assert "response.reasoning_summary_text.delta" in kinds
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "Checking é."


@pytest.mark.parametrize("whole_history", [True, False])
@pytest.mark.parametrize("streamed", [False, True])
def test_c34_tools_of_responses_both_ways(streamed: bool, whole_history: bool) -> None:
    asked: Any = {"model": "m", "tools": RESPONSES_TOOLS, "reasoning": {"summary": "auto"}}
    with openai_client(model(turns(*ROUNDS))) as client:
        if streamed:
            with client.responses.stream(input=USER, **asked) as stream:
                reply: Any = stream.get_final_response()
        else:
            reply = client.responses.create(input=USER, **asked)
        call = reply.output[-1]
        assert (call.type, call.name) == ("function_call", "weather")
        assert json.loads(call.arguments) == GIVEN
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "9 C"}
        said = [item.model_dump(exclude_none=True) for item in reply.output]
        history = [*USER, *said, result] if whole_history else [result]
        answer = client.responses.create(input=history, **asked)
    assert answer.output_text == "It is 9 C."
    assert answer.usage.input_tokens_details.cached_tokens > 0


def test_c34_a_parsed_response() -> None:
    with openai_client(model(f"Hm.{THINK_END}{JSON}")) as client:
        reply = client.responses.parse(model="m", input="Oslo?", text_format=City)
    assert reply.output_parsed == City(name="Oslo", degrees=9)


# --- Anthropic ------------------------------------------------------------------------------------


def test_c34_a_message() -> None:
    with anthropic_client(model(SAID)) as client:
        message = client.messages.create(model="claude", max_tokens=500, messages=USER)
    thinking, text = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "Need weather."
    assert thinking.signature
    assert text.type == "text"
    assert text.text == "Checking é."
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == len(tokens(SAID, end=False))
    assert message.usage.cache_creation_input_tokens


def test_c34_the_stream_helper_of_messages() -> None:
    with (
        anthropic_client(model(CALLED)) as client,
        client.messages.stream(
            model="claude",
            max_tokens=500,
            messages=USER,
            tools=MESSAGES_TOOLS,  # type: ignore[arg-type]
        ) as stream,
    ):
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json", "message_stop"} <= kinds
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens == len(tokens(CALLED, end=False))


def test_c34_a_raw_stream_of_messages() -> None:
    with anthropic_client(model(SAID)) as client:
        stream = client.messages.create(model="m", max_tokens=500, messages=USER, stream=True)
        kinds = [event.type for event in stream]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


@pytest.mark.parametrize("streamed", [False, True])
def test_c34_tools_of_messages_both_ways(streamed: bool) -> None:
    asked: Any = {"model": "claude", "max_tokens": 500, "tools": MESSAGES_TOOLS}
    with anthropic_client(model(turns(*ROUNDS))) as client:
        if streamed:
            with client.messages.stream(messages=USER, **asked) as stream:
                message: Any = stream.get_final_message()
        else:
            message = client.messages.create(messages=USER, **asked)
        use = message.content[-1]
        assert (use.type, use.name, use.input) == ("tool_use", "weather", GIVEN)
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "9 C"}
        history = [
            *USER,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ]
        answer = client.messages.create(messages=history, **asked)
    assert answer.content[-1].text == "It is 9 C."
    assert answer.usage.cache_read_input_tokens > 0


def test_c34_tokens_are_counted_before_a_message() -> None:
    asked: Any = {
        "model": "claude",
        "messages": USER,
        "tools": MESSAGES_TOOLS,
        "system": "Be kind.",
    }
    with anthropic_client(model(SAID)) as client:
        counted = client.messages.count_tokens(**asked).input_tokens
        usage = client.messages.create(max_tokens=500, **asked).usage
    assert counted == usage.cache_creation_input_tokens


# --- errors ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """One way to ask: its package, its client for a port, and a request of that client."""

    sdk: Any
    client: Callable[..., Any]
    ask: Callable[..., Any]


CHAT = Kind(
    openai,
    openai_at,
    lambda client, **more: client.chat.completions.create(model="m", messages=USER, **more),
)
RESPONSES = Kind(
    openai,
    openai_at,
    lambda client, **more: client.responses.create(model="m", input="Oslo?", **more),
)
MESSAGES = Kind(
    anthropic,
    anthropic_at,
    lambda client, **more: client.messages.create(model="m", messages=USER, max_tokens=100, **more),
)
KINDS = pytest.mark.parametrize("kind", [CHAT, RESPONSES, MESSAGES])


@KINDS
@pytest.mark.parametrize("stream", [False, True])
def test_c34_bad_requests(kind: Kind, stream: bool) -> None:
    with (
        served(model("Hi", n_ctx=8)) as (_, port),
        kind.client(port) as client,
        pytest.raises(kind.sdk.BadRequestError, match="context size is 8 tokens") as caught,
    ):
        kind.ask(client, stream=stream)
    error = caught.value.body.get("error", caught.value.body)
    assert (error["n_ctx"], error["type"]) == (8, "invalid_request_error")
    if kind.sdk is openai:
        assert caught.value.code == "context_length_exceeded"


@KINDS
def test_c34_keys(kind: Kind) -> None:
    with served(model("Hi"), api_key="sesame") as (_, port):
        with (
            kind.client(port, "wrong") as client,
            pytest.raises(kind.sdk.AuthenticationError, match="no valid API key"),
        ):
            kind.ask(client)
        with kind.client(port, "sesame") as client:
            assert kind.ask(client).id


@KINDS
def test_c34_a_full_queue(kind: Kind) -> None:
    gate = Gate()
    with (
        served(model("Hi", gate=gate), max_queue=0) as (_, port),
        connect(port) as running,
        kind.client(port) as client,
    ):
        running.sendall(posting("/v1/chat/completions", {"messages": USER}))
        gate.wait_reached(1)
        with pytest.raises(kind.sdk.RateLimitError, match="too many requests"):
            kind.ask(client)
        gate.open()
        until(lambda: get(port, "/health").json["requests"]["running"] == 0)


@KINDS
@pytest.mark.parametrize("stream", [False, True])
def test_c34_an_incomplete_route(kind: Kind, stream: bool) -> None:
    missing = RouteIncompleteError("layers 4-7", first_missing=4)
    with (
        served(model("Hi", failures={0: missing})) as (_, port),
        kind.client(port) as client,
        pytest.raises(kind.sdk.APIStatusError, match="layers 4-7") as caught,
    ):
        kind.ask(client, stream=stream)
    assert caught.value.status_code == 503


@KINDS
def test_c34_a_failure_of_the_engine(kind: Kind) -> None:
    with (
        served(model("Hi", failures={0: GONE})) as (_, port),
        kind.client(port) as client,
        pytest.raises(kind.sdk.InternalServerError, match="worker1 refused the work"),
    ):
        kind.ask(client)


@pytest.mark.parametrize("kind", [CHAT, MESSAGES])
def test_c34_a_stream_that_breaks_off_raises(kind: Kind) -> None:
    with served(model(SAID, failures={6: GONE})) as (_, port), kind.client(port) as client:
        stream = kind.ask(client, stream=True)
        with pytest.raises(kind.sdk.APIError, match="worker1 refused the work"):
            list(stream)


def test_c34_a_response_that_breaks_off_has_failed() -> None:
    with served(model(SAID, failures={6: GONE})) as (_, port), openai_at(port) as client:
        events = list(RESPONSES.ask(client, stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"


@KINDS
def test_c34_a_failure_behind_a_sign_of_life_raises(kind: Kind) -> None:
    gate = Gate()
    with (
        served(model("Hi", failures={0: GONE}, gate=gate), keepalive_seconds=0.01) as (_, port),
        kind.client(port) as client,
    ):
        stream = kind.ask(client, stream=True)  # returns with the first sign of life
        gate.open()
        with pytest.raises(kind.sdk.APIError, match="worker1 refused the work"):
            list(stream)
