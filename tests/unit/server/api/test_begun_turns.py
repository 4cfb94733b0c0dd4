"""Conversations that end with an answer: the model goes on with it."""

import httpx
import pytest

from ds4py.server.requests.prompts import TextStack
from ds4py.server.requests.request import ChatMessage, PastCall
from ds4py.text.chat_formats.template import ChatTemplate
from ds4py.text.tokenizer.deepseek4_tokens import Marker
from tests.fakes import FakeBackend
from tests.unit.server.support import chat_ids, script, server, text_stack
from tests.unit.text import tiny_deepseek4 as tiny

ASK = ChatMessage("user", "Say hello.")
BEGUN = ChatMessage("assistant", "Hello, wo")
DEEPSEEK = TextStack(tiny.tokenizer(), tiny.chat())


def written(stack, *messages, **manner):
    tokens = chat_ids(stack, messages, **manner)
    return b"".join(stack.tokenizer.token_bytes(token, special=True) for token in tokens).decode()


@pytest.mark.parametrize("think", ["none", "high"])
def test_deepseek_goes_on_where_the_answer_ends(think):
    text = written(DEEPSEEK, ASK, BEGUN, think=think)
    assert text.endswith("</think>Hello, wo")


def test_a_template_goes_on_where_the_answer_ends():
    stack = text_stack()
    tokenizer = stack.tokenizer
    end = tokenizer.token_bytes(min(tokenizer.eos_ids), special=True).decode()
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + end + "\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    templated = TextStack(tokenizer, ChatTemplate(source, tokenizer))
    whole = written(templated, ASK)
    assert whole.endswith("[assistant]")
    assert written(templated, ASK, BEGUN).endswith(whole[-12:] + "Hello, wo")


def test_a_format_without_ends_of_turns_opens_another_turn():
    source = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = text_stack().tokenizer
    endless = TextStack(tokenizer, ChatTemplate(source, tokenizer))
    assert written(endless, ASK, BEGUN).endswith("Hello, wo\nassistant:")


def test_calls_are_no_begun_answer():
    call = ChatMessage("assistant", "", calls=(PastCall("id", "f", "{}"),))
    assert written(DEEPSEEK, ASK, call).endswith(Marker.EOS)


def test_a_turn_that_was_begun_is_one_turn_in_what_follows():
    """The second question continues the session: its prompt shows begun and said as one answer."""
    stack = text_stack()
    end = stack.tokenizer.token_bytes(min(stack.tokenizer.eos_ids), special=True).decode()
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + end + "{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    fake = FakeBackend(n_vocab=stack.tokenizer.n_vocab, n_ctx=512, script=script("rld!"))
    templated = TextStack(stack.tokenizer, ChatTemplate(source, stack.tokenizer))

    first = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello, wo"}]
    whole = {"role": "assistant", "content": "Hello, world!"}
    then = [first[0], whole, {"role": "user", "content": "more"}]
    with server(fake, text=templated) as (_, port):
        url = f"http://127.0.0.1:{port}/v1/messages"
        one, two = (
            httpx.post(url, json={"messages": turns, "max_tokens": 9}).json()
            for turns in (first, then)
        )
    assert one["content"] == [{"type": "text", "text": "rld!"}]
    used = one["usage"]
    evaluated = used["cache_read_input_tokens"] + used["cache_creation_input_tokens"]
    assert two["usage"]["cache_read_input_tokens"] >= evaluated + len("rld!") - 1
