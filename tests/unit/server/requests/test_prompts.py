"""From requests to token ids."""

import pytest

from ds4py.errors import RequestError
from ds4py.server.requests.prompts import TextStack, check_fits
from ds4py.server.requests.request import (
    ChatMessage,
    Conversation,
    GenerationRequest,
    PastCall,
)
from ds4py.text.chat_formats.template import ChatTemplate
from ds4py.text.tokenizer.tokenizer import load_tokenizer
from tests.toys import bpe_metadata
from tests.unit.server.support import GREEDY, N_VOCAB, chat_ids, completion_ids, text_stack, writer
from tests.unit.text import tiny_deepseek4 as tiny

V4 = TextStack(tiny.tokenizer(), tiny.chat())
TOOL = '{"function": {"name":"f"}}'


def decoded(prompt, text=None):
    return (text or text_stack()).tokenizer.decode(prompt, special=True).decode()


def of_template(source):
    """A stack whose prompts are what a template makes of them."""
    metadata = {**bpe_metadata(), "tokenizer.chat_template": source}
    tokenizer = load_tokenizer(metadata)
    return TextStack(tokenizer, ChatTemplate.from_metadata(metadata, tokenizer))


def test_a_conversation_is_written_by_the_template():
    prompt = chat_ids(text_stack(), [ChatMessage("system", "s"), ChatMessage("user", "hello")])
    assert decoded(prompt) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_every_part_of_a_conversation_reaches_the_template():
    stack = of_template(
        "{# <tool_call> #}{{ messages|tojson }}{{ tools|tojson }}{{ enable_thinking }}"
    )
    turns = [
        ChatMessage("assistant", "", reasoning="hm", calls=(PastCall("c", "f", '{"a":1}'),)),
        ChatMessage("tool", "r", call_id="c"),
    ]
    assert decoded(chat_ids(stack, turns, think="none", tools=[TOOL]), stack) == (
        '[{"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": '
        '[{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}, '
        '{"role": "tool", "content": "r", "tool_call_id": "c"}]'
        '[{"function": {"name": "f"}}]False'
    )


def test_every_part_of_a_conversation_reaches_deepseek_v4():
    turns = [
        ChatMessage("user", "u"),
        ChatMessage("assistant", "", reasoning="hm", calls=(PastCall("c", "f", '{ "a" : 1.0 }'),)),
        ChatMessage("tool", "r", call_id="c"),
    ]
    text = decoded(chat_ids(V4, turns, tools=[TOOL]), V4)
    assert '\n{"name":"f"}\n' in text
    assert "<think>hm</think>" in text
    assert ' name="a" string="false">1.0<' in text
    assert text.endswith("<tool_result>r</tool_result><｜Assistant｜><think>")  # noqa: RUF001


@pytest.mark.parametrize(("think", "may"), [(None, True), ("high", True), ("none", False)])
def test_a_model_may_open_its_reasoning_unless_the_request_wants_none(think, may):
    stack = of_template("{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}")
    said = Conversation((ChatMessage("user", "hi"),))
    asked = GenerationRequest(prompt=said, think=think, max_tokens=1, sampling=GREEDY)
    prompt = writer(stack).write(asked)
    assert (prompt.thinking, prompt.may_think, prompt.calls) == (False, may, None)


def test_the_usual_system_text_stands_in_front_only_if_asked_for_and_nobody_wrote_one():
    hi = ChatMessage("user", "hi")
    usual = decoded(chat_ids(V4, [hi], default_system=True), V4)
    assert usual.removeprefix("<｜begin▁of▁sentence｜>").startswith("You are a helpful")  # noqa: RUF001
    for role in ("system", "developer"):
        given = [ChatMessage(role, "s"), hi]
        assert chat_ids(V4, given, default_system=True) == chat_ids(V4, given)
    assert "helpful" not in decoded(chat_ids(V4, [hi]), V4)
    plain = chat_ids(text_stack(), [hi])
    assert chat_ids(text_stack(), [hi], default_system=True) == plain


def test_deepseek_v4_answers_a_bare_prompt_as_a_turn():
    wanted = [ChatMessage("system", "You are a helpful assistant"), ChatMessage("user", "hi")]
    for think in (None, "none"):
        prompt = completion_ids(V4, "hi", think=think)
        assert prompt == chat_ids(V4, wanted, think=think)


def test_a_whole_prompt_is_taken_as_it_is():
    text = decoded(chat_ids(V4, [ChatMessage("user", "hi")]), V4)
    assert completion_ids(V4, text, raw=True) == chat_ids(V4, [ChatMessage("user", "hi")])
    assert completion_ids(V4, "hi", raw=True) == tuple(tiny.tokenizer().encode("hi", special=False))


def test_a_text_prompt_is_continued_raw():
    assert decoded(completion_ids(text_stack(), "hello world")) == "hello world"


def test_control_tokens_in_a_raw_prompt_are_recognised():
    assert completion_ids(text_stack(), "<|im_start|>")[0] == 1


def test_a_raw_prompt_begins_with_bos_where_the_model_wants_one():
    metadata = {**bpe_metadata(), "tokenizer.ggml.add_bos_token": True}
    tokenizer = load_tokenizer(metadata)
    stack = TextStack(tokenizer, ChatTemplate.from_metadata(metadata, tokenizer))
    assert completion_ids(stack, "")[:1] == (tokenizer.bos_id,)


def test_token_ids_are_taken_as_they_are():
    assert completion_ids(text_stack(), (5, 0, N_VOCAB - 1)) == (5, 0, N_VOCAB - 1)


@pytest.mark.parametrize("token", [-1, N_VOCAB, 10**30])
def test_foreign_token_ids_are_refused(token):
    with pytest.raises(RequestError, match=f"got token id {token}, expected 0 to 278"):
        completion_ids(text_stack(), (5, token))


def test_a_prompt_must_leave_room_for_one_token():
    check_fits([1] * 9, 10, param="prompt")
    with pytest.raises(RequestError) as caught:
        check_fits([1] * 10, 10, param="messages")
    error = caught.value
    assert error.message == "Prompt has 10 tokens, but the configured context size is 10 tokens"
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "messages")
    assert error.extra == {"n_prompt_tokens": 10, "n_ctx": 10}


def test_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="at least one"):
        check_fits([], 10, param="prompt")
