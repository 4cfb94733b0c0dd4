"""Messages to prompts: templates, fallbacks, refusals, BOS."""

import logging

import numpy as np
import pytest

from ds4py.errors import RequestError
from ds4py.text.chat_formats.template import ChatTemplate, MessageFields, text_of
from ds4py.text.tokenizer.tokenizer import load_tokenizer
from tests.unit.text.tokenizer.toy_vocabularies import bpe, bpe_metadata, spm

HELLO = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
CHATML = (
    "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    "<|im_start|>assistant\n"
)
PLAIN = "system: Be kind.\nuser: Hello\nassistant:"


def template(source: str | None, **values: object) -> ChatTemplate:
    metadata = bpe_metadata(**values)  # type: ignore[arg-type]
    del metadata["tokenizer.chat_template"]
    if source is not None:
        metadata["tokenizer.chat_template"] = source
    return ChatTemplate.from_metadata(metadata, load_tokenizer(metadata))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_models_own_template_is_used() -> None:
    metadata = bpe_metadata()
    chat = ChatTemplate.from_metadata(metadata, load_tokenizer(metadata))
    assert chat.render(HELLO) == CHATML
    assert chat.render(HELLO, add_generation_prompt=False) + "<|im_start|>assistant\n" == CHATML


def test_special_tokens_have_their_names_in_the_template() -> None:
    chat = template("{{ bos_token }}-{{ eos_token }}-{{ unk_token }}-{{ pad_token }}")
    assert chat.render([]) == "<|im_start|>-<|im_end|>-<|endoftext|>-<|im_end|>"


def test_a_token_that_the_file_does_not_name_is_empty_in_the_template() -> None:
    metadata = bpe_metadata()
    del metadata["tokenizer.ggml.padding_token_id"]
    metadata["tokenizer.chat_template"] = "[{{ pad_token }}]"
    assert ChatTemplate.from_metadata(metadata, load_tokenizer(metadata)).render([]) == "[]"


def test_further_variables_reach_the_template() -> None:
    chat = template("{{ enable_thinking }}{{ tools is none }}")
    assert chat.render([], enable_thinking=False) == "FalseTrue"


def test_the_template_sees_the_messages_in_one_form() -> None:
    chat = template("{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}")
    messages: list[MessageFields] = [
        {"content": "no role"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"text": "a"}, {"type": "image"}, {"text": "b"}]},
        {"role": "developer", "content": "rules"},
        {"role": "tool"},
    ]
    in_place = "user=no role;assistant=;user=ab;system=rules;tool=;"
    assert chat.render(messages, system_in_place=True) == in_place
    in_front = "system=rules;user=no role;assistant=;user=ab;tool=;"
    assert chat.render(messages) == in_front


def test_all_system_texts_come_first_as_one_message() -> None:
    chat = template("{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}")
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "hi"},
        {"role": "developer", "content": [{"text": "b"}]},
        {"role": "system", "content": None},
    ]
    assert chat.render(messages) == "system=a\n\nb;user=hi;"
    assert len(chat.render_ids(messages)) < len(chat.render_ids(messages, system_in_place=True))


@pytest.mark.parametrize(
    ("source", "opening"),
    [
        ("{{ tools }}", None),
        ("<tool_call>", None),
        ("{% for tool in tools %}{% endfor %}<tool_call>", "<tool_call>"),
        ("{{ tools }}<tool_call>{{ name }}<arg_key>", None),
        ("{{ tools }}[TOOL_CALLS] [", "[TOOL_CALLS]"),
        (
            '{{ tools }}{"name": function name, "parameters": dictionary of arguments}',
            "<|python_tag|>",
        ),
        ("{{ tools }}<tool_call>\n<function=f>\n<parameter=a>", "<tool_call>"),
    ],
)
def test_the_template_tells_how_calls_are_written(source: str, opening: str | None) -> None:
    found = template(source).call_format
    assert (None if found is None else found.tags[0][0]) == opening
    if found is not None:
        assert opening in found.control_tokens


def test_without_a_template_that_works_there_are_no_calls() -> None:
    assert template(None).call_format is None
    assert template("{% tools <tool_call>").call_format is None


@pytest.mark.parametrize(("source", "may"), [("x", False), ("{{ '</think>' }}", True)])
def test_a_model_whose_template_knows_reasoning_may_open_it(source: str, may: bool) -> None:
    assert template(source).may_think == may


def test_a_template_that_knows_developers_sees_them() -> None:
    chat = template("{% if messages[0].role == 'developer' %}yes{% endif %}")
    assert chat.render([{"role": "developer", "content": ""}]) == "yes"


def test_other_fields_of_a_message_reach_the_template() -> None:
    chat = template("{{ messages[0].reasoning_content }}")
    assert chat.render([{"role": "assistant", "reasoning_content": "hm"}]) == "hm"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("x", "x"),
        (None, ""),
        (7, ""),
        ({"text": "x"}, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"text": 7}, "b", {"text": "c"}], "ac"),
    ],
)
def test_content_is_text_in_any_form(content: object, text: str) -> None:
    assert text_of(content) == text


def test_a_refusal_of_the_template_is_the_clients_error_in_its_words() -> None:
    chat = template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match=r"^roles must alternate$") as caught:
        chat.render(HELLO)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_without_a_template_chatml_is_written_if_the_vocabulary_has_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chat = template(None)
    assert chat.render(HELLO) == CHATML
    assert len(warnings(caplog)) == 1
    assert "no chat template" in warnings(caplog)[0]


def test_without_chatml_tokens_lines_of_role_and_text_are_written() -> None:
    chat = ChatTemplate(None, spm())
    assert chat.render(HELLO) == PLAIN
    assert chat.render(HELLO, add_generation_prompt=False) == "system: Be kind.\nuser: Hello\n"


def test_a_template_that_does_not_compile_is_replaced_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chat = template("{% for %}")
    assert chat.render(HELLO) == CHATML
    assert "does not compile" in warnings(caplog)[0]


def test_a_template_that_fails_is_replaced_for_that_prompt_and_warned_about_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chat = template("{% if messages[0].role == 'system' %}{{ 1 / 0 }}{% endif %}fine")
    assert chat.render(HELLO) == CHATML
    assert chat.render(HELLO) == CHATML
    assert chat.render(HELLO[1:]) == "fine"
    assert len(warnings(caplog)) == 1
    assert "ZeroDivisionError" in warnings(caplog)[0]


def test_control_tokens_of_the_template_become_tokens() -> None:
    metadata = bpe_metadata()
    tokenizer = load_tokenizer(metadata)
    ids = ChatTemplate.from_metadata(metadata, tokenizer).render_ids(HELLO)
    assert ids == tokenizer.encode(CHATML, special=True)
    assert ids.count(1) == 3


@pytest.mark.parametrize("source", ["{{ bos_token }}hello", "hello"])
def test_bos_stands_in_front_once_whoever_writes_it(source: str) -> None:
    hello = bpe().encode("hello", special=True)
    assert template(source, add_bos_token=True).render_ids([]) == [1, *hello]


def test_bos_of_the_template_is_kept_though_the_file_does_not_ask_for_it() -> None:
    assert template("{{ bos_token }}", add_bos_token=False).render_ids([]) == [1]
    assert template("x", add_bos_token=False).render_ids([]) == bpe().encode("x", special=True)


@pytest.mark.parametrize(
    ("think", "seen"), [(None, ""), ("none", "False"), ("low", "True"), ("max", "True")]
)
def test_a_template_sees_whether_to_think_only_if_somebody_said_so(
    think: str | None, seen: str
) -> None:
    assert template("{{ enable_thinking }}").render([], think=think) == seen


def test_a_template_sees_tools_as_values() -> None:
    chat = template(
        "{% for tool in tools %}{{ tool.function.name }}={{ tool|tojson }};{% endfor %}"
    )
    tool = '{"type":"function", "function": {"name": "f", "more": 1e2}}'
    assert chat.render([], tools=[tool]) == (
        'f={"type": "function", "function": {"name": "f", "more": 100.0}};'
    )
    assert template("{{ tools is none }}").render([], tools=[]) == "True"


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [('{"a": "b"}', "b"), ({"a": "b"}, "b"), ("{broken", ""), (None, "")],
)
def test_a_template_sees_the_arguments_of_past_calls_as_values(
    arguments: object, seen: str
) -> None:
    chat = template("{{ messages[0].tool_calls[0].function.arguments.a }}")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert chat.render([{"role": "assistant", "tool_calls": [call]}]) == seen


def test_calls_of_no_known_form_reach_the_template_as_they_are() -> None:
    chat = template("{{ messages[0].tool_calls }}")
    assert chat.render([{"role": "assistant", "tool_calls": [7, {"function": 8}]}]) == (
        "[7, {'function': 8}]"
    )


@pytest.mark.parametrize(
    ("source", "opened"),
    [
        ("<think>", True),
        ("{{ 'a<think>\\n' }}", True),
        ("<think></think>", False),
        ("<think> a", False),
        ("x", False),
        ("", False),
    ],
)
def test_a_prompt_that_ends_with_the_opening_tag_opens_the_reasoning(
    source: str, opened: bool
) -> None:
    chat = template(source)
    assert chat.opens_reasoning(chat.render_ids([])) == opened


def test_reasoning_whose_end_no_text_would_show_is_not_told_apart() -> None:
    metadata = bpe_metadata()
    tokens, types = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
    metadata[tokens] = [*metadata[tokens], "</think>"]  # type: ignore[misc]
    metadata[types] = np.append(metadata[types], 3)  # type: ignore[arg-type]
    for source in ("<think>", "<think></think>"):
        metadata["tokenizer.chat_template"] = source
        chat = ChatTemplate.from_metadata(metadata, load_tokenizer(metadata))
        assert not chat.opens_reasoning(chat.render_ids([]))
        assert not chat.may_think


def test_a_bare_prompt_is_continued_as_it_is() -> None:
    chat = template("unused", add_bos_token=True)
    assert chat.completion_ids("<|im_end|>hello", think="high") == [
        1,
        2,
        *bpe().encode("hello", special=False),
    ]
    assert (chat.default_system, chat.call_format) == ("", None)


@pytest.mark.parametrize(
    "tool",
    [
        '{"type":"function","function":{"name":"f","description":"d","parameters":{"a":1}}}',
        '{"type":"function","name":"f","description":"d","parameters":{"a":1}}',
        '{"name":"f","description":"d","input_schema":{"a":1}}',
    ],
)
def test_a_template_sees_tools_of_every_api_alike(tool: str) -> None:
    chat = template("{{ tools | tojson }}")
    wanted = '[{"type": "function", "function": {"name": "f", "description": "d", '
    assert chat.render(HELLO, tools=[tool]) == wanted + '"parameters": {"a": 1}}}]'
