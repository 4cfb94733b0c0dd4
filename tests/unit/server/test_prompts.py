"""From requests to token ids."""

import pytest

from ds4py.errors import RequestError
from ds4py.server.prompts import TextStack, chat_prompt, check_fits, completion_prompt
from ds4py.server.schema import Message
from ds4py.text.chat import ChatTemplate
from ds4py.text.tokenizer import load_tokenizer
from tests.fakes import FakeBackend
from tests.toys import bpe_metadata
from tests.unit.server.support import N_VOCAB, text_stack

CARD = FakeBackend(n_vocab=N_VOCAB).card


def decoded(prompt):
    return text_stack().tokenizer.decode(prompt, special=True).decode()


def test_a_conversation_is_written_by_the_template():
    prompt = chat_prompt(text_stack(), [Message("system", "s"), Message("user", "hello")])
    assert decoded(prompt) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_text_prompt_is_continued_raw():
    assert decoded(completion_prompt(text_stack(), CARD, "hello world")) == "hello world"


def test_control_tokens_in_a_raw_prompt_are_recognised():
    assert completion_prompt(text_stack(), CARD, "<|im_start|>")[0] == 1


def test_a_raw_prompt_begins_with_bos_where_the_model_wants_one():
    metadata = {**bpe_metadata(), "tokenizer.ggml.add_bos_token": True}
    tokenizer = load_tokenizer(metadata)
    stack = TextStack(tokenizer, ChatTemplate.from_metadata(metadata, tokenizer))
    assert completion_prompt(stack, CARD, "")[:1] == (tokenizer.bos_id,)


def test_token_ids_are_taken_as_they_are():
    assert completion_prompt(text_stack(), CARD, (5, 0, N_VOCAB - 1)) == (5, 0, N_VOCAB - 1)


@pytest.mark.parametrize("token", [-1, N_VOCAB, 10**30])
def test_foreign_token_ids_are_refused(token):
    with pytest.raises(RequestError, match=f"got token id {token}, expected 0 to 278"):
        completion_prompt(text_stack(), CARD, (5, token))


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
