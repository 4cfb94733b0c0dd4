"""Bodies of `/v1/responses`: docs/spec/server-and-cli.md#responses, C17, C18, C42."""

import json

import pytest

from ds4py.config import SamplingParams, ServerConfig
from ds4py.errors import RequestError
from ds4py.generation.grammar import GrammarKind
from ds4py.server.api.responses.request import read_responses
from ds4py.server.history.pending_tools import PendingTools
from ds4py.server.requests.request import (
    ChatMessage,
    Conversation,
    OutputFormat,
    PastCall,
    Toolbox,
    ToolName,
)

SAMPLING = SamplingParams(temperature=0.7, top_k=11, top_p=0.9, min_p=0.1, seed=3)
DEFAULTS = ServerConfig(sampling=SAMPLING, max_tokens=1234)


def read(given="hi", **fields):
    return read_responses(json.dumps({"input": given, **fields}).encode(), DEFAULTS)


def turns(*items):
    return read(list(items)).prompt.messages


def refusal(given="hi", **fields):
    with pytest.raises(RequestError) as caught:
        read(given, **fields)
    assert caught.value.status == 400
    return caught.value


def say(role, text, **more):
    return {"type": "message", "role": role, "content": text, **more}


def test_a_text_is_one_message_behind_the_instructions():
    asked = read(instructions="Be brief.")
    assert asked.prompt.messages == (ChatMessage("system", "Be brief."), ChatMessage("user", "hi"))


def test_every_field_is_read():
    options = read(
        model="m", max_output_tokens=5, temperature=0, top_p=0.5, top_k=1, seed=8, stop=["x"],
        stream=True, reasoning={"effort": "max", "summary": "auto"},
    )  # fmt: skip
    assert options.sampling == SamplingParams(
        temperature=0.0, top_k=11, top_p=0.5, min_p=0.1, seed=3
    ), "top_k, seed and stop are not of this dialect"
    assert (options.model, options.max_tokens, options.stop) == ("m", 5, ())
    assert (options.stream, options.think) == (True, "max")


def test_the_later_of_the_two_budgets_wins():
    assert read(max_tokens=1, max_output_tokens=2).max_tokens == 2
    assert read(max_output_tokens=2, max_tokens=1).max_tokens == 1


@pytest.mark.parametrize(
    ("summary", "shown"),
    [("auto", True), ("concise", True), ("detailed", True), ("none", False), (None, False)],
)
def test_reasoning_is_shown_only_if_asked_for(summary, shown):
    assert read(reasoning={"summary": summary}).show_reasoning is shown
    assert read().show_reasoning is False


def test_a_round_with_a_tool():
    found = turns(
        say("user", [{"type": "input_text", "text": "Oslo?"}]),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "ask"}],
         "content": [{"type": "reasoning_text", "text": "it"}], "encrypted_content": "x"},
        say("assistant", [{"type": "output_text", "text": "Checking."}], status="completed"),
        {"type": "function_call", "name": "f", "call_id": "c1", "arguments": '{"a": 1}'},
        {"type": "function_call", "name": "g", "namespace": "ns__", "call_id": "c2",
         "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "dry"},
        {"type": "function_call_output", "call_id": "c1",
         "output": [{"type": "input_text", "text": "14 C"}]},
    )  # fmt: skip
    assert found == (
        ChatMessage("user", "Oslo?"),
        ChatMessage(
            "assistant",
            "Checking.",
            reasoning="ask\nit",
            calls=(PastCall("c1", "f", '{"a": 1}'), PastCall("c2", "ns__g", "{}")),
        ),
        ChatMessage("tool", "dry", call_id="c2"),
        ChatMessage("tool", "14 C", call_id="c1"),
    )


def test_an_answer_after_an_answer_is_a_turn_of_its_own():
    found = turns(say("assistant", "one"), say("assistant", "two"))
    assert [turn.content for turn in found] == ["one", "two"]


def test_reasoning_alone_is_an_empty_turn():
    found = turns({"type": "reasoning", "summary": []}, say("user", "x"))
    assert found == (ChatMessage("assistant", ""), ChatMessage("user", "x"))


def test_other_kinds_of_calls_and_results():
    found = turns(
        {"type": "custom_tool_call", "name": "patch", "call_id": "c1", "input": 'a "b"'},
        {"type": "local_shell_call", "call_id": "c2", "action": {"command": ["ls"]}},
        {"type": "tool_search_call", "call_id": "c3", "arguments": {"q": 1}},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
        {"type": "local_shell_call_output", "call_id": "c2", "output": "files"},
        {"type": "tool_search_output", "call_id": "c3", "tools": [{"name": "h"}]},
        {"type": "compaction"},
    )
    calls = found[0].calls
    assert [call.name for call in calls] == ["patch", "local_shell", "tool_search"]
    assert json.loads(calls[0].arguments) == {"input": 'a "b"'}
    assert json.loads(calls[1].arguments) == {"command": ["ls"]}
    assert [turn.content for turn in found[1:3]] == ["ok", "files"]
    assert (found[3].role, found[3].call_id, len(found)) == ("tool", "c3", 4)


def test_tools_that_a_search_found_can_be_called():
    item = {"type": "tool_search_output", "call_id": "c", "tools": [{"name": "h"}]}
    asked = read([say("user", "x"), item])
    assert asked.prompt.tools.in_prompt == ('{"name": "h"}',)


def test_tools_of_every_kind():
    tools = [
        {"type": "function", "name": "f", "parameters": {"type": "object"}},
        {"type": "namespace", "name": "ns__", "tools": [{"name": "g", "description": "d"}]},
        {"type": "custom", "name": "patch", "format": {"type": "text"}},
        {"type": "tool_search"},
        {"type": "web_search"},
    ]
    box = read(tools=tools).prompt.tools
    listed = [json.loads(text) for text in box.in_prompt]
    assert [tool["name"] for tool in listed] == ["f", "ns__g", "patch", "tool_search"]
    assert box.in_prompt[0] == json.dumps(tools[0]), "a plain function in the client's own words"
    assert list(listed[2]["parameters"]["properties"]) == ["input"]
    assert box.named("f") == ToolName("function", "f")
    assert box.named("ns__g") == ToolName("function", "g", "ns__")
    assert (box.named("patch").kind, box.named("tool_search").kind) == ("custom", "tool_search")
    assert len(box.sources) == 5
    assert read(tools=tools, tool_choice="none").prompt.tools.in_prompt == ()


RESULT = [{"type": "function_call_output", "call_id": "t", "output": "r"}]
PATCH = '{"type": "custom", "name": "patch"}'


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ["patch"]),
        ({"tools": None}, ["patch"]),
        ({"tools": []}, []),
        ({"tools": [{"name": "f"}]}, ["f"]),
        ({"tool_choice": "none"}, []),
    ],
)
def test_results_alone_go_on_with_what_was_said_and_with_its_tools_unless_the_body_names_some(
    fields, names
):
    pending, said = PendingTools(), ChatMessage("user", "hi")
    pending.keep(["t"], Conversation((said,), Toolbox((PATCH,))))
    body = json.dumps({"input": RESULT, "instructions": "new", **fields}).encode()
    prompt = read_responses(body, DEFAULTS, pending).prompt
    assert prompt.messages == (said, ChatMessage("tool", "r", call_id="t"))
    assert [json.loads(text)["name"] for text in prompt.tools.in_prompt] == names
    assert prompt.tools.named("patch").kind == ("custom" if "patch" in names else "function")


def test_results_of_calls_that_nobody_knows_are_refused():
    with pytest.raises(RequestError, match="call_id 't' is unknown to the live session"):
        read_responses(json.dumps({"input": RESULT}).encode(), DEFAULTS, PendingTools())


def test_the_form_of_an_answer():
    schema = {"type": "object"}
    text = {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": schema}}
    assert read(text=text).output_format == OutputFormat(
        GrammarKind.JSON_SCHEMA, json.dumps(schema), strict=True
    )
    assert read(text={"format": {"type": "text"}}).output_format is None
    assert read(text={"verbosity": "low"}).output_format is None


@pytest.mark.parametrize(
    ("given", "fields", "words"),
    [
        (None, {}, "missing input"),
        ([], {}, "input: got 0 items"),
        ("x", {"previous_response_id": "resp_1"}, "replay the full input"),
        ("x", {"conversation": {"id": "c"}}, "replay the full input"),
        ("x", {"tool_choice": "required"}, "tool_choice=required not supported"),
        ("x", {"tool_choice": {"type": "function"}}, "forced tool_choice not supported"),
        ("x", {"reasoning": {"effort": "ultra"}}, "reasoning.effort"),
        ([say("user", [{"type": "input_image"}])], {}, "input_image"),
        ([{"type": "robot"}], {}, "invalid JSON request: input[0].type"),
        ([say("assistant", "x", status="in_progress")], {}, "invalid JSON request: input[0]"),
        ([{"type": "function_call_output", "output": [{"type": "input_image"}]}], {}, "text"),
        ("x", {"tools": [3]}, "tools[0]"),
        ("x", {"text": {"format": {"type": "json_schema"}}}, "schema"),
    ],
)
def test_refusals(given, fields, words):
    assert words in refusal(given, **fields).message


def test_null_where_nothing_is_meant():
    nothing = ["previous_response_id", "conversation", "tool_choice", "tools", "reasoning", "text"]
    assert read(**dict.fromkeys(nothing)) == read()
