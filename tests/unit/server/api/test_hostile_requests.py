"""Bodies that are made to take memory or time: refused before they do."""

import json
import random

import pytest

from ds4py.config import ServerConfig
from ds4py.errors import RequestError
from ds4py.server.api import json_body
from ds4py.server.api.chat.request import read_chat
from ds4py.server.api.messages.request import read_messages
from ds4py.server.requests import prompts
from ds4py.server.requests.prompts import excess
from ds4py.server.requests.request import ChatMessage, PastCall
from tests.unit.server.support import GREEDY, text_stack

DEFAULTS = ServerConfig(sampling=GREEDY)
CHAT = {"messages": [{"role": "user", "content": "a"}]}


def read(**members):
    return read_chat(json.dumps(CHAT | members).encode(), DEFAULTS)


# --- values ---------------------------------------------------------------------------------------


@pytest.fixture
def few_values(monkeypatch):
    monkeypatch.setattr(json_body, "MAX_VALUES", 100)


@pytest.mark.parametrize("member", ["messages", "unknown", "stop", "tools"])
def test_a_body_of_too_many_values_is_refused_before_it_is_read(few_values, member):
    body = json.dumps(CHAT | {member: [{}] * 102}).encode()
    with pytest.raises(RequestError, match="at most 100 values"):
        read_chat(body, DEFAULTS)


def test_too_many_texts_are_too_many_values(few_values):
    with pytest.raises(RequestError, match="at most 100 values"):
        read(unknown=[","] * 201)


@pytest.mark.parametrize("text", [",", '\\",', "\\\\,", '",",', "\\,\\"])
def test_commas_in_texts_are_no_values(few_values, text):
    asked = read_chat(
        json.dumps({"messages": [{"role": "user", "content": text * 200}]}).encode(), DEFAULTS
    )
    assert asked.prompt.messages[0].content == text * 200


# --- surrogates -----------------------------------------------------------------------------------

PIECES = (
    "\\\\",
    "\\ud83d",
    "\\uDE00",
    "\\udead",
    "a",
    "u",
    "\\u0041",
    "\\n",
    "ud83d",
    '\\"',
    "\\/",
)


def test_lone_surrogates_become_one_sign_each_and_nothing_else_changes():
    rng = random.Random(3)
    for _ in range(3000):
        inside = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 9)))
        body = f'{{"messages":[{{"content":"\\ud800{inside}"}}]}}'
        got = read_chat(body.encode(), DEFAULTS).prompt.messages[0].content
        wanted = json.loads(f'"\\ud800{inside}"')
        assert got == wanted.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_a_raw_zero_byte_is_still_no_json():
    with pytest.raises(RequestError, match="invalid JSON request"):
        read_chat(b'{"messages":[{"content":"\\ud800\0\0n"}]}', DEFAULTS)


# --- lengths --------------------------------------------------------------------------------------


def test_a_stop_text_is_not_longer_than_any_could_be():
    assert read(stop="x" * 4096).stop == ("x" * 4096,)
    with pytest.raises(RequestError, match="4097 characters"):
        read(stop=["a", "x" * 4097])


def test_tools_are_counted_before_they_are_looked_at():
    with pytest.raises(RequestError, match="10001 tools"):
        read(tools=[0] * 10_001)
    body = json.dumps(CHAT | {"tools": [0] * 10_001}).encode()
    with pytest.raises(RequestError, match="10001 tools"):
        read_messages(body, DEFAULTS)


class TestExcess:
    """Conversations that are refused without being written."""

    @pytest.fixture(autouse=True)
    def no_small_ones(self, monkeypatch):
        monkeypatch.setattr(prompts, "_ALWAYS_EXACT", 0)
        monkeypatch.setattr(prompts, "_SLICE", 100)

    def excess(self, *messages, tools=(), n_ctx=100):
        return excess(text_stack(), messages, tools, n_ctx)

    def test_what_may_fit_is_not_weighed(self):
        assert self.excess(ChatMessage("user", "x" * 800)) is None

    def test_a_text_that_can_not_fit_tells_roughly_how_long_it_is(self):
        text = "x" * 10_000
        exact = len(text_stack().tokenizer.encode(text, special=False))
        assert self.excess(ChatMessage("user", text)) == pytest.approx(exact, rel=0.1)

    def test_only_its_beginning_is_tokenized(self, monkeypatch):
        stack, seen = text_stack(), []
        encode = stack.tokenizer.encode
        monkeypatch.setattr(
            stack.tokenizer, "encode", lambda text, **how: seen.append(text) or encode(text, **how)
        )
        assert self.excess(ChatMessage("user", "x" * 100_000)) > 50_000
        assert sum(map(len, seen)) < 1000

    def test_many_messages_count_together(self):
        assert self.excess(*[ChatMessage("user", "x" * 10)] * 200) is not None

    def test_reasoning_may_be_left_out_of_a_prompt_but_has_an_end(self):
        assert self.excess(ChatMessage("assistant", "x", reasoning="y" * 350)) is None
        assert self.excess(ChatMessage("assistant", "x", reasoning="y" * 2000)) is not None

    def test_arguments_and_tools_count(self):
        call = PastCall("id", "f", "z" * 2000)
        assert self.excess(ChatMessage("assistant", "x", calls=(call,))) is not None
        assert self.excess(ChatMessage("user", "x"), tools=["t" * 2000]) is not None
