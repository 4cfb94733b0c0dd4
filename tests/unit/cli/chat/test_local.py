"""A conversation with a model of this process: exact tokens, stopped answers, other contexts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from ds4py.api.chat import next_turn_ids
from ds4py.api.events import Event, Figures, Piece
from ds4py.cli.chat.conversation import ChatHistory
from ds4py.cli.chat.local import LocalPartner
from ds4py.config import CoordinatorConfig, SamplingParams
from ds4py.errors import CapacityError, ConfigError, Ds4Error, RequestError
from ds4py.runtime import Node, open_node
from ds4py.text.chat_formats.template import ChatTemplate
from ds4py.text.tokenizer.deepseek4_tokens import Marker
from ds4py.text.tokenizer.tokenizer import load_tokenizer
from tests.e2e.support import GREEDY, SOCKETS, endless_toy, engine
from tests.support import golden
from tests.support.toys import CHATML, bpe_metadata
from tests.unit.text import tiny_deepseek4

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set first = '<<' + messages[0]['content'] + '>>' %}"
    "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}"
    "<|im_start|>{{ first if loop.first else '' }}[{{ m['content'] | trim }}]"
    "{% else %} {{ m['content'] }} <|im_end|>{% endif %}{% endfor %}"
)
STRICT = "{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"


def template(source: str | None) -> ChatTemplate:
    return ChatTemplate(source, load_tokenizer(bpe_metadata()))


@pytest.mark.parametrize(
    ("source", "appended"),
    [
        (CHATML, "<|im_end|>\n<|im_start|>user\nAnd why?<|im_end|>\n<|im_start|>assistant\n"),
        (LLAMA2, " <|im_end|><|im_start|>[And why?]"),
        (None, "<|im_end|>\n<|im_start|>user\nAnd why?<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
@pytest.mark.parametrize("system", [None, "", "Be brief."])
def test_a_question_appends_what_the_format_writes_behind_an_answer(
    source: str | None, appended: str, system: str | None
) -> None:
    tokenizer = load_tokenizer(bpe_metadata())
    ids = next_turn_ids(template(source), system, "And why?", None)
    assert ids == tokenizer.encode(appended, special=True)


def test_a_format_without_control_tokens_ends_answers_with_a_line_break() -> None:
    metadata = bpe_metadata()
    metadata["tokenizer.ggml.token_type"] = np.ones(279, np.int32)
    tokenizer = load_tokenizer(metadata)
    ids = next_turn_ids(ChatTemplate(None, tokenizer), None, "And why?", None)
    assert tokenizer.decode(ids) == b"\nuser: And why?\nassistant:"


@pytest.mark.parametrize(
    ("think", "opening"), [(None, "<think>"), ("high", "<think>"), ("none", "</think>")]
)
def test_deepseeks_markers_close_the_answer_and_open_the_next(think, opening) -> None:
    chat, spelled = tiny_deepseek4.chat(), tiny_deepseek4.tokenizer()
    ids = next_turn_ids(chat, "S", "And <think> why?", think)
    assert spelled.decode(ids, special=True).decode() == (
        f"{Marker.EOS}{Marker.USER}And <think> why?{Marker.ASSISTANT}{opening}"
    )
    asked = [{"role": "user", "content": "And <think> why?"}]
    assert ids[1:] == chat.render_ids(asked, think=think)[1:]  # what it wrote is no marker


def test_a_format_that_refuses_conversations_is_heard() -> None:
    with pytest.raises(RequestError, match="one at a time"):
        next_turn_ids(template(STRICT), None, "And why?", None)


# --- with a model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return endless_toy(tmp_path_factory.mktemp("model") / "toy.gguf", n_layers=2, n_ctx=512)


class Opener:
    """Opens nodes over the toy and counts them."""

    def __init__(self, model: Path):
        self._model = model
        self.node: Node
        self.opened: list[int | None] = []
        self.n_open = 0

    @contextmanager
    def __call__(self, n_ctx: int | None) -> Iterator[Node]:
        self.opened.append(n_ctx)
        if n_ctx == 13:
            raise CapacityError("memory", needed=13, available=0)
        config = engine(self._model, n_slots=1, n_ctx=n_ctx)
        with open_node(config, CoordinatorConfig(n_sessions=1), SOCKETS, whole=True) as self.node:
            self.n_open += 1
            yield self.node
            self.n_open -= 1


@pytest.fixture(scope="module")
def opener(model: Path) -> Opener:
    return Opener(model)


@pytest.fixture
def partner(opener: Opener) -> Iterator[LocalPartner]:
    opener.opened.clear()
    built = LocalPartner(opener, GREEDY, 6, lambda _: None)
    yield built
    built.close()
    assert opener.n_open == 0


def quiet(_: int, __: int) -> None: ...


def ids(events: Sequence[Event]) -> list[int]:
    return [i for event in events if isinstance(event, Piece) for i in event.ids]


def text(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Piece))


def test_an_answer_enters_the_next_prompt_as_the_tokens_that_were_sampled(
    partner: LocalPartner, opener: Opener
) -> None:
    talk = ChatHistory()
    first = list(partner.reply(talk, "hello the world", quiet))
    talk.add("hello the world", text(first))
    second = list(partner.reply(talk, "and why?", quiet))
    chat = opener.node.text.chat
    start = chat.render_ids([{"role": "user", "content": "hello the world"}])
    whole = [*start, *ids(first), *next_turn_ids(chat, None, "and why?", None)]
    said, figures = ids(second), second[-1]
    assert isinstance(figures, Figures)
    assert (figures.n_prompt, figures.n_cached) == (len(whole), len(start) + len(ids(first)) - 1)
    with opener.node.backend.lease(()) as session:
        assert list(session.tokens) == [*whole, *said[:-1]]


def stopping_at(events: Iterator[Event], n_pieces: int, stop: Callable[[], None]) -> list[Event]:
    """Read some pieces, press Ctrl+C, and read the rest."""
    begun = list(islice(events, n_pieces))
    stop()
    return [*begun, *events]


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_keeps_what_was_said_with_its_end_mark(
    partner: LocalPartner, opener: Opener
) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    stopped = stopping_at(partner.reply(ChatHistory(), "hello", quiet), 2, ctrl_c)
    assert len(ids(stopped)) == 2
    assert isinstance(stopped[-1], Figures)
    assert (stopped[-1].finish, stopped[-1].n_generated) == ("cancelled", 2)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    talk = ChatHistory()
    talk.add("hello", text(stopped))
    figures = list(partner.reply(talk, "why?", quiet))[-1]
    chat = opener.node.text.chat
    asked = chat.render_ids([{"role": "user", "content": "hello"}])
    n_appended = len(next_turn_ids(chat, None, "why?", None))
    assert isinstance(figures, Figures)
    assert figures.n_prompt == len(asked) + 2 + n_appended


def test_ctrl_c_before_the_first_token_takes_the_question_back(partner: LocalPartner) -> None:
    pressed: list[None] = []

    def press(_: int, __: int) -> None:
        if not pressed:  # the second time it ends the process
            pressed.append(ctrl_c())

    events = list(partner.reply(ChatHistory(), "hello", press))
    assert ids(events) == []
    (figures,) = (event for event in events if isinstance(event, Figures))
    again = list(partner.reply(ChatHistory(), "hello", quiet))[-1]
    assert isinstance(again, Figures)
    assert (figures.finish, again.finish) == ("cancelled", "length")
    assert again.n_prompt == figures.n_prompt


def test_a_terminate_signal_keeps_its_meaning_during_an_answer(partner: LocalPartner) -> None:
    before = signal.getsignal(signal.SIGTERM)
    events = partner.reply(ChatHistory(), "hello", quiet)
    next(events)
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.getsignal(signal.SIGINT) != signal.default_int_handler
    events.close()
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_another_context_keeps_the_conversation(partner: LocalPartner, opener: Opener) -> None:
    first = list(partner.reply(ChatHistory(), "hello", quiet))
    talk = ChatHistory()
    talk.add("hello", text(first))
    partner.resize(128)
    assert (opener.opened, partner.status().n_ctx) == ([None, 128], 128)
    figures = list(partner.reply(talk, "why?", quiet))[-1]
    assert isinstance(figures, Figures)
    assert (figures.n_cached, figures.n_prompt > len(ids(first))) == (0, True)


@pytest.mark.parametrize(
    ("n_ctx", "words"),
    [(4, "has 24 tokens already"), (24, "has 24 tokens already"), (513, "at most the model's 512")],
)
def test_an_impossible_context_changes_nothing(
    n_ctx: int, words: str, partner: LocalPartner, opener: Opener
) -> None:
    list(partner.reply(ChatHistory(), "hello", quiet))
    with pytest.raises(ConfigError, match=words):
        partner.resize(n_ctx)
    assert (opener.opened, partner.status().n_ctx) == ([None], 512)


def test_a_context_that_can_not_be_had_leaves_the_one_before(
    partner: LocalPartner, opener: Opener
) -> None:
    with pytest.raises(Ds4Error, match="memory"):
        partner.resize(13)
    assert (opener.opened, partner.status().n_ctx) == ([None, 13, 512], 512)
    assert len(ids(list(partner.reply(ChatHistory(), "hello", quiet)))) == 6


def test_reasoning_that_was_cut_off_is_closed_before_the_next_question() -> None:
    opener = Opener(golden.path("tiny-a.gguf"))
    partner = LocalPartner(opener, GREEDY, 3, lambda _: None)
    first = list(partner.reply(ChatHistory(), "hello", quiet))
    talk = ChatHistory(think="none")
    talk.add("hello", text(first))
    list(partner.reply(talk, "why?", quiet))
    chat, tokenizer = opener.node.text.chat, opener.node.text.tokenizer
    messages = [{"role": "system", "content": chat.default_system}]
    asked = chat.render_ids([*messages, {"role": "user", "content": "hello"}])
    (closed,) = tokenizer.encode(Marker.THINK_END, special=True)
    with opener.node.backend.lease(()) as session:
        tokens = list(session.tokens)
    partner.close()
    expected = [*asked, *ids(first), closed, *next_turn_ids(chat, None, "why?", "none")]
    assert tokens[: len(expected)] == expected


def test_what_was_replaced_is_written_anew_from_its_texts(
    partner: LocalPartner, opener: Opener
) -> None:
    list(partner.reply(ChatHistory(), "hello", quiet))
    talk = ChatHistory("Be brief.")
    talk.add("a", "b")
    partner.forget()
    figures = list(partner.reply(talk, "c", quiet))[-1]
    messages = [{"role": "system", "content": "Be brief."}, *talk.turns]
    prompt = opener.node.text.chat.render_ids([*messages, {"role": "user", "content": "c"}])
    assert isinstance(figures, Figures)
    assert figures.n_prompt == len(prompt)


def test_a_seed_makes_a_chat_reproducible_and_its_answers_differ(opener: Opener) -> None:
    def told() -> list[list[int]]:
        partner = LocalPartner(opener, SamplingParams(seed=7), 6, lambda _: None)
        answers = []
        for _ in range(2):
            answers.append(ids(list(partner.reply(ChatHistory(), "hello", quiet))))
            partner.forget()
        partner.close()
        return answers

    once, again = told(), told()
    assert once == again
    assert once[0] != once[1]


def test_the_status_is_the_nodes(partner: LocalPartner) -> None:
    list(partner.reply(ChatHistory(), "hello", quiet))
    status = partner.status()
    assert (status.model, status.where, status.missing) == ("toy llama", "in this process", "")
    (stage,) = status.stages
    assert stage.layers == "layers 0-1 + head"
    assert min(stage.prefill_per_second, stage.decode_per_second) > 0
