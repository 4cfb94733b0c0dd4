"""Bodies of `/v1/messages`: server-and-cli.md#request-fields, #prompts, #thinking-controls."""

import json

import pytest

from ds4py.config import SamplingParams, ServerConfig
from ds4py.errors import RequestError
from ds4py.server.api.messages.request import read_messages
from ds4py.server.history.pending_tools import PendingTools
from ds4py.server.requests.request import ChatMessage, Conversation, PastCall, Toolbox

SAMPLING = SamplingParams(temperature=0.7, top_k=11, top_p=0.9, min_p=0.1, seed=3)
DEFAULTS = ServerConfig(sampling=SAMPLING, max_tokens=1234)
HI = [{"role": "user", "content": "hi"}]


def read(**fields):
    return read_messages(json.dumps({"messages": HI, **fields}).encode(), DEFAULTS)


def turns(*messages):
    return read(messages=list(messages)).prompt.messages


def refusal(**fields):
    with pytest.raises(RequestError) as caught:
        read(**fields)
    assert caught.value.status == 400
    return caught.value


def test_every_field_is_read():
    options = read(
        model="claude", max_tokens=5, temperature=0, top_p=0.5, top_k=7, stream=True,
        stop_sequences=["x", "", 3], min_p=0.9, seed=99,
    )  # fmt: skip
    assert options.sampling == SamplingParams(
        temperature=0.0, top_k=7, top_p=0.5, min_p=0.1, seed=3
    ), "min_p and seed are not of this dialect"
    assert (options.model, options.max_tokens, options.stop) == ("claude", 5, ("x",))
    assert options.stream


def test_a_stop_sequence_may_stand_alone():
    assert read(stop_sequences="END").stop == ("END",)


def test_system_texts_go_first_without_those_that_always_change():
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: 123"},
        {"type": "text", "text": "You are careful."},
        {"type": "text", "text": "Be brief."},
        {"type": "image"},
    ]
    assert read(system=blocks).prompt.messages == (
        ChatMessage("system", "You are careful.\nBe brief."),
        ChatMessage("user", "hi"),
    )
    assert read(system="plain").prompt.messages[0] == ChatMessage("system", "plain")
    assert (
        read(system=None).prompt.messages
        == read(system=[]).prompt.messages
        == (ChatMessage("user", "hi"),)
    )


def test_an_assistants_blocks_become_one_turn():
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "Let me "},
        {"type": "text", "text": "see."},
        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"b": 1.0, "a": [1]}},
        {"type": "redacted_thinking", "data": "x"},
    ]
    written = json.dumps(blocks).replace('{"b": 1.0, "a": [1]}', '{"b" : 1.0,"a":[1]}')
    body = '{"messages":[{"role":"assistant","content":' + written + "}]}"
    (turn,) = read_messages(body.encode(), DEFAULTS).prompt.messages
    assert turn == ChatMessage(
        "assistant",
        "Let me see.",
        reasoning="hm",
        calls=(PastCall("toolu_1", "f", '{"b" : 1.0,"a":[1]}'),),
    ), "arguments are the client's own text"


def test_results_of_tools_keep_their_place_in_the_turn():
    content = [
        {"type": "tool_result", "tool_use_id": "a", "content": "14 C"},
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "dry"}]},
        {"type": "text", "text": "and "},
        {"type": "text", "text": "now?"},
    ]
    assert turns({"role": "user", "content": content}) == (
        ChatMessage("tool", "14 C", call_id="a"),
        ChatMessage("tool", "dry", call_id="b", continues=True),
        ChatMessage("user", "and now?", continues=True),
    )
    assert turns({"role": "user", "content": content[:1]}) == (
        ChatMessage("tool", "14 C", call_id="a"),
    )


def test_strange_contents_and_roles():
    assert turns({"role": "user", "content": None}) == (ChatMessage("user", ""),)
    assert turns({"content": ["a", "b"]}) == (ChatMessage("user", "ab"),)
    found = turns({"role": "robot", "content": "x"}, {"role": "user", "content": "y"})
    assert found == (ChatMessage("user", "y"),)


@pytest.mark.parametrize(
    ("fields", "think"),
    [
        ({}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "high"),
        ({"thinking": {"type": "adaptive"}}, "high"),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}, "none"),
        ({"output_config": {"effort": "max"}}, "max"),
        ({"reasoning_effort": "none", "thinking": {"type": "enabled"}}, "none"),
        ({"output_config": {"effort": "low"}, "reasoning_effort": "none"}, "low"),
        ({"model": "deepseek-chat"}, "none"),
    ],
)
def test_how_much_to_reason(fields, think):
    assert read(**fields).think == think


def test_tools_are_the_clients_own_texts():
    body = b'{"messages":[{"role":"user"}],"tools":[{"name" :"f","input_schema":{}}]}'
    asked = read_messages(body, DEFAULTS)
    assert asked.prompt.tools.sources == ('{"name" :"f","input_schema":{}}',)
    refused = read(tools=[{"name": "f"}], tool_choice={"type": "none"})
    assert refused.prompt.tools == read().prompt.tools == Toolbox()
    assert len(read(tools=[{"name": "f"}], tool_choice={"type": "any"}).prompt.tools.sources) == 1


RESULT = [
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r"}]}
]


@pytest.mark.parametrize(
    ("fields", "tools"),
    [
        ({}, ("{}",)),
        ({"tools": None}, ("{}",)),
        ({"tools": []}, ()),
        ({"tools": [{"a": 1}]}, ('{"a": 1}',)),
        ({"tool_choice": {"type": "none"}}, ()),
    ],
)
def test_results_alone_go_on_with_what_was_said_and_with_its_tools_unless_the_body_names_some(
    fields, tools
):
    pending, said = PendingTools(), ChatMessage("user", "hi")
    pending.keep(["t"], Conversation((said,), Toolbox(("{}",))))
    body = json.dumps({"messages": RESULT, "system": "new", **fields}).encode()
    prompt = read_messages(body, DEFAULTS, pending).prompt
    assert prompt == Conversation((said, ChatMessage("tool", "r", call_id="t")), Toolbox(tools))


def test_results_of_calls_that_nobody_knows_are_refused():
    with pytest.raises(RequestError, match="tool_use_id 't' is unknown to the live session"):
        read_messages(json.dumps({"messages": RESULT}).encode(), DEFAULTS, PendingTools())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": None}, "missing messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot"}]}, "known role"),
        ({"messages": "hi"}, "invalid JSON request: messages"),
        ({"output_config": {"effort": "ultra"}}, "output_config.effort"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"tools": [1]}, "tools[0]"),
        ({"stream": "yes"}, "invalid JSON request: stream"),
    ],
)
def test_refusals(fields, words):
    assert words in refusal(**fields).message
