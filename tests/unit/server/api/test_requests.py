"""Request bodies: what is read, what is forgiven, what is refused and in which words."""

import contextlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.config import SamplingParams, ServerConfig
from ds4py.errors import RequestError
from ds4py.server.api.chat.request import read_chat
from ds4py.server.api.completions.request import read_completion
from ds4py.server.api.messages.request import read_messages
from ds4py.server.api.responses.request import read_responses
from ds4py.server.requests.request import ChatMessage, PastCall

SAMPLING = SamplingParams(temperature=0.7, top_k=11, top_p=0.9, min_p=0.1, seed=3)
DEFAULTS = ServerConfig(sampling=SAMPLING, max_tokens=1234)
HI = [{"role": "user", "content": "hi"}]


def chat(**fields):
    return read_chat(json.dumps({"messages": HI, **fields}).encode(), DEFAULTS)


def completion(**fields):
    return read_completion(json.dumps(fields).encode(), DEFAULTS)


def refusal(body, read=read_chat):
    with pytest.raises(RequestError) as caught:
        read(body, DEFAULTS)
    assert caught.value.status == 400
    return caught.value


def test_absent_fields_take_the_defaults():
    options = chat()
    assert options.sampling == SAMPLING
    assert (options.model, options.max_tokens, options.stop) == (None, 1234, ())
    assert (options.stream, options.include_usage) == (False, False)


def test_the_servers_word_on_reasoning_counts_if_the_request_has_none():
    config = ServerConfig(think="none")
    for body in ({"messages": HI}, {"messages": HI, "model": "deepseek-reasoner"}):
        wanted = "high" if "model" in body else "none"
        for read in (read_chat, read_messages):
            assert read(json.dumps(body).encode(), config).think == wanted
    assert read_completion(b'{"prompt":"x"}', config).think == "none"
    assert read_responses(b'{"input":"x"}', config).think == "none"


def test_every_field_is_read():
    options = chat(
        model="m", max_tokens=5, temperature=0, top_p=0.5, top_k=7, min_p=0.25, seed=9,
        stop="x", stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    assert options.sampling == SamplingParams(
        temperature=0.0, top_k=7, top_p=0.5, min_p=0.25, seed=9
    )
    assert (options.model, options.max_tokens, options.stop) == ("m", 5, ("x",))
    assert (options.stream, options.include_usage) == (True, True)


def test_null_means_absent_for_every_field():
    names = ["model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k"]
    names += ["min_p", "seed", "stop", "stream", "stream_options", "tools", "reasoning_effort"]
    names += ["think", "thinking", "chat_template_kwargs", "tool_choice", "default_system"]
    assert chat(**dict.fromkeys(names)) == chat()
    assert chat(stream_options={"include_usage": None}) == chat()


def test_null_messages_count_as_missing():
    assert refusal(b'{"messages":null}').message == "missing messages"


def test_unknown_fields_are_ignored_at_any_type():
    assert chat(n=3, functions=[1], echo={"a": 1}, user=None, metadata="x") == chat()


@pytest.mark.parametrize(
    ("given_value", "read"),
    [(0, 0), (-5, 0), (7.0, 7), (2**31, 2**31 - 1), (10**30, 2**31 - 1), (1e18, 2**31 - 1)],
)
def test_counts_are_brought_into_range(given_value, read):
    assert chat(max_tokens=given_value).max_tokens == read
    assert chat(top_k=given_value).sampling.top_k == read


@pytest.mark.parametrize(("given_seed", "read"), [(-1, 0), (2**40, 2**40), (2**70, 2**63 - 1)])
def test_a_seed_has_63_bits(given_seed, read):
    assert chat(seed=given_seed).sampling.seed == read


def test_the_later_of_the_two_budgets_wins():
    assert chat(max_tokens=5, max_completion_tokens=6).max_tokens == 6
    assert chat(max_completion_tokens=6, max_tokens=5).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=None).max_tokens == 5
    assert chat(max_completion_tokens=6).max_tokens == 6


def test_completions_ignore_max_completion_tokens():
    assert completion(prompt="x", max_completion_tokens=6).max_tokens == 1234


def test_of_equal_keys_the_last_wins():
    body = b'{"messages":[{"role":"user","content":"x"}],"top_k":1,"top_k":2}'
    assert read_chat(body, DEFAULTS).sampling.top_k == 2


@pytest.mark.parametrize(
    ("stop", "read"),
    [("a", ("a",)), ("", ()), ([], ()), (["a", "", 3, None, {"b": 1}, "c"], ("a", "c"))],
)
def test_stop_is_a_string_or_a_list_of_which_strings_count(stop, read):
    assert chat(stop=stop).stop == read


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        (None, ""),
        (5, ""),
        ({"text": "x"}, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"], "abc"),
        ([{"type": "image_url", "image_url": {"url": "data:"}}, {"text": "a"}, 4, None], "a"),
        ([{"type": "text", "text": 5}], ""),
    ],
)
def test_content_forms(content, text):
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    assert read_chat(body, DEFAULTS).prompt.messages == (ChatMessage("user", text),)


def test_roles_are_mapped_and_unknown_ones_dropped():
    roles = ["system", "developer", "user", None, "assistant", "tool", "function", "narrator"]
    body = json.dumps({"messages": [{"role": role, "content": "x"} for role in roles]}).encode()
    read = [message.role for message in read_chat(body, DEFAULTS).prompt.messages]
    assert read == ["system", "developer", "user", "user", "assistant", "tool", "tool"]


def test_a_missing_role_is_the_user():
    assert read_chat(b'{"messages":[{"content":"x"}]}', DEFAULTS).prompt.messages[0].role == "user"


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("text", "text"),
        ("", ""),
        (["a", "b"], "a"),
        ([[1], "a"], "a"),
        ([1, 2, 3], (1, 2, 3)),
        ([[1, 2], [3]], (1, 2)),
        ([], ()),
    ],
)
def test_prompt_forms(prompt, read):
    assert completion(prompt=prompt).prompt.content == read


@pytest.mark.parametrize("prompt", [[1.5], [True], [None], [{"a": 1}], [[1, "x"]], 5, {"a": 1}])
def test_other_prompts_are_refused(prompt):
    error = refusal(json.dumps({"prompt": prompt}).encode(), read_completion)
    assert error.param == "prompt"


def test_what_is_missing_is_named():
    assert refusal(b"{}").message == "missing messages"
    assert refusal(b"{}", read_completion).message == "missing prompt"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  \n",
        b"hello",
        b"{",
        b'{"messages":[',
        b'{"messages":[]} trailing',
        b'{"messages":[],}',
        b"null",
        b"[]",
        b'"text"',
        b"3",
        b"\xff\xfe",
        b"\x00" * 100,
        b'{"model":"\xff"}',
        b'{"messages":[{"content":"raw \x01 control"}]}',
        b'{"temperature":NaN,"messages":[{}]}',
        b'{"temperature":1e999,"messages":[{}]}',
        b'{"messages":[{"content":"\\ud8"}]}',
        b"GET / HTTP/1.1\r\n\r\n",
        b"<html></html>",
    ],
)
def test_what_is_no_json_object_is_refused(body):
    for read in (read_chat, read_completion):
        assert refusal(body, read).message.startswith("invalid JSON request")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 5), ("max_tokens", "5"), ("max_tokens", [1]), ("temperature", "hot"),
        ("top_p", {}), ("top_k", True), ("seed", "x"), ("stop", 5), ("stop", {}),
        ("stream", "yes"), ("stream", 1), ("stream_options", []), ("think", "yes"),
        ("thinking", "enabled"), ("reasoning_effort", 3), ("tools", {}), ("tools", "none"),
        ("chat_template_kwargs", []), ("default_system", "x"),
    ],
)  # fmt: skip
def test_wrong_types_name_the_field(field, value):
    error = refusal(json.dumps({"messages": HI, field: value}).encode())
    assert error.param == field
    assert f"{field}: expected" in error.message
    assert "got" in error.message


@pytest.mark.parametrize("messages", ["hi", {"role": "user"}, [5], ["hi"], [[]]])
def test_messages_of_another_form_are_refused(messages):
    error = refusal(json.dumps({"messages": messages}).encode())
    assert (error.param or "").startswith("messages")


def test_no_usable_message_is_refused():
    assert "empty list" in refusal(b'{"messages":[]}').message
    assert "no known role" in refusal(b'{"messages":[{"role":"narrator"}]}').message


@pytest.mark.parametrize("value", [2.5, -0.5])
def test_fractions_of_tokens_are_refused(value):
    error = refusal(json.dumps({"messages": HI, "max_tokens": value}).encode())
    assert error.message == f"max_tokens: got {value}, expected a whole number"


def test_a_number_of_thousands_of_digits_is_clamped_or_refused():
    body = b'{"messages":[{"content":"x"}],"max_tokens":' + b"9" * 100_000 + b"}"
    assert refusal(body).param == "max_tokens"


@pytest.mark.parametrize("bracket", [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize("field", [b"ignored", b"stop", b"messages"])
def test_a_nesting_bomb_is_refused(bracket, field):
    bomb = bracket[0] * 100_000 + b"1" + bracket[1] * 100_000
    body = b'{"messages":[{"content":"x"}],"' + field + b'":' + bomb + b"}"
    assert refusal(body).message.startswith("invalid JSON request")


def test_nesting_of_256_levels_is_fine():
    body = b'{"messages":[{"content":"x"}],"ignored":' + b"[" * 255 + b"]" * 255 + b"}"
    assert read_chat(body, DEFAULTS).prompt.messages


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (rb"\ud800", "\ufffd"),
        (rb"a\udfffb", "a\ufffdb"),
        (rb"\ud83d\ude00", "\U0001f600"),
        (rb"\uD83D\uDE00\ud83d", "\U0001f600\ufffd"),
        (rb"\ud800\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\\ud800", r"\ud800"),
        (rb"\u0000x", "\x00x"),
    ],
)
def test_lone_surrogates_become_replacement_characters(escaped, text):
    body = b'{"messages":[{"content":"' + escaped + b'"}]}'
    assert read_chat(body, DEFAULTS).prompt.messages[0].content == text


@pytest.mark.parametrize(
    ("fields", "think"),
    [
        ({}, None),
        ({"think": True}, "high"),
        ({"think": False}, "none"),
        ({"thinking": True}, "high"),
        ({"thinking": False}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "high"),
        ({"thinking": {"type": "adaptive"}}, "high"),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "none"),
        ({"chat_template_kwargs": {"enable_thinking": True, "more": 1}}, "high"),
        ({"chat_template_kwargs": {}}, None),
        ({"reasoning_effort": "minimal"}, "minimal"),
        ({"reasoning_effort": "max"}, "max"),
        ({"reasoning_effort": "none"}, "none"),
        ({"model": "deepseek-chat"}, "none"),
        ({"model": "deepseek-reasoner"}, "high"),
        ({"model": "deepseek-v4-flash"}, None),
        # an effort of none and a switch that is off win over everything
        ({"reasoning_effort": "none", "thinking": {"type": "enabled"}}, "none"),
        ({"reasoning_effort": "max", "thinking": {"type": "disabled"}}, "none"),
        ({"reasoning_effort": "max", "thinking": {"type": "enabled"}}, "max"),
        # a model's name counts only if nothing else switches
        ({"model": "deepseek-chat", "think": True}, "high"),
        ({"model": "deepseek-reasoner", "think": False}, "none"),
        ({"model": "deepseek-chat", "reasoning_effort": "max"}, "none"),
        ({"model": "deepseek-reasoner", "reasoning_effort": "max"}, "max"),
        # of several switches the last one
        ({"think": True, "thinking": False}, "none"),
        ({"thinking": False, "think": True}, "high"),
        ({"think": False, "thinking": None}, "none"),
        ({"chat_template_kwargs": {"enable_thinking": True}, "think": False}, "none"),
        ({"think": False, "chat_template_kwargs": {"enable_thinking": True}}, "high"),
    ],
)
def test_what_a_request_says_about_thinking(fields, think):
    assert chat(**fields).think == think
    assert completion(prompt="x", **fields).think == think


def test_an_unknown_effort_is_refused():
    error = refusal(json.dumps({"messages": HI, "reasoning_effort": "ultra"}).encode())
    assert error.param == "reasoning_effort"
    assert "got 'ultra', expected one of minimal, low" in error.message


def test_tools_keep_the_clients_own_text():
    tool = b'{ "type":"function",\t"function": {"name":"f", "x": 1.0e2, "y":"\\u00e9"} }'
    body = b'{"messages":[{"content":"x"}],"tools":[' + tool + b', {"name":"g"}]}'
    assert read_chat(body, DEFAULTS).prompt.tools.sources == (tool.decode(), '{"name":"g"}')


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function"}, None, 5])
def test_any_choice_but_none_offers_the_tools(choice):
    assert chat(tools=[{"name": "f"}], tool_choice=choice).prompt.tools.sources == (
        '{"name": "f"}',
    )
    assert chat(tools=[{"name": "f"}, 7], tool_choice="none").prompt.tools.sources == ()


@pytest.mark.parametrize("tool", ["5", '"f"', "[]", "null"])
def test_a_tool_that_is_no_object_is_refused(tool):
    body = b'{"messages":[{"content":"x"}],"tools":[{}, %s]}' % tool.encode()
    error = refusal(body)
    assert error.param == "tools[1]"
    assert error.message.endswith("expected a JSON object")


@pytest.mark.parametrize(
    "field",
    [
        b'"tools":[{"name":"\xff"}]',
        b'"messages":[{"tool_calls":[{"function":{"name":"f","arguments":"\xff"}}]}]',
        b'"messages":[{"tool_calls":[{"function":{"name":"f","arguments":{"a":"\xff"}}}]}]',
    ],
)
def test_raw_json_that_is_not_utf8_is_refused(field):
    assert "UTF-8" in refusal(b'{"messages":[{"content":"x"}],' + field + b"}").message


def test_everything_of_an_assistants_turn_is_read():
    body = rb"""{"messages":[{"role":"assistant","content":null,
        "reasoning_content":"hm","refusal":null,"tool_calls":[
        {"id":"c1","type":"function","function":{"name":"f","arguments":"{\"a\": \u0031}"}},
        {"id":null,"function":{"name":"g","arguments":{"b" : 1.0}}},
        {"id":"c3","function":{"name":"no arguments"}},
        {"id":"c4","function":{"name":"null","arguments":null}},
        {"id":"c5","function":{"arguments":"no name"}},
        {"id":"c6"}]}]}"""
    assert read_chat(body, DEFAULTS).prompt.messages == (
        ChatMessage(
            "assistant",
            "",
            reasoning="hm",
            calls=(PastCall("c1", "f", '{"a": 1}'), PastCall("", "g", '{"b" : 1.0}')),
        ),
    )


def test_a_tools_answer_names_its_call():
    body = b'{"messages":[{"role":"tool","tool_call_id":"c1","content":"x"}]}'
    assert read_chat(body, DEFAULTS).prompt.messages == (ChatMessage("tool", "x", call_id="c1"),)


def test_what_ds4py_adds():
    assert not chat().prompt.default_system
    assert chat(default_system=True).prompt.default_system
    assert not completion(prompt="x").prompt.raw
    assert completion(prompt="x", raw=True).prompt.raw


def test_too_many_stop_texts_are_refused():
    assert (
        "at most 1024"
        in refusal(json.dumps({"messages": HI, "stop": ["x"] * 1025}).encode()).message
    )


def test_too_many_messages_are_refused():
    error = refusal(b'{"messages":[' + b"{}," * 100_000 + b"{}]}")
    assert error.message == "messages: got 100001, expected at most 100000"


def test_a_huge_model_name_is_not_echoed():
    assert refusal(json.dumps({"messages": HI, "model": "x" * 513}).encode()).param == "model"


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body):
    for read in (read_chat, read_completion):
        with contextlib.suppress(RequestError):
            read(body, DEFAULTS)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
_FIELDS = ["messages", "prompt", "max_tokens", "temperature", "top_k", "seed", "stop", "stream"]
_FIELDS += ["think", "thinking", "reasoning_effort", "chat_template_kwargs", "tools", "tool_choice"]


@given(st.dictionaries(st.sampled_from(_FIELDS), _json))
def test_any_values_are_in_range_or_refused(fields):
    body = json.dumps(fields).encode().replace(b"Infinity", b"1e999")
    for read in (read_chat, read_completion):
        try:
            options = read(body, DEFAULTS)
        except RequestError:
            continue
        assert 0 <= options.max_tokens < 2**31
        assert 0 <= options.sampling.top_k < 2**31
        assert 0 <= options.sampling.seed < 2**63
        assert math.isfinite(options.sampling.temperature)
