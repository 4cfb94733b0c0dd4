"""Conversations as DeepSeek V4 reads them: turns, reasoning, modes, and nothing injected."""

import hashlib
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.errors import ModelError, RequestError
from ds4py.text.chat_formats.choice import chat_for
from ds4py.text.chat_formats.deepseek4 import (
    EFFORTS,
    MAX_EFFORT,
    MAX_MIN_CONTEXT,
    DeepSeek4Chat,
    ThinkMode,
)
from ds4py.text.chat_formats.template import ChatTemplate
from ds4py.text.tokenizer.deepseek4_tokens import Marker
from tests.unit.text import tiny_deepseek4 as tiny
from tests.unit.text.tokenizer.toy_vocabularies import bpe, bpe_metadata

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALL_TEXT = '\n\n<D:tool_calls>\n<D:invoke name="f">\n</D:invoke>\n</D:tool_calls>'
SHORT = [
    ("<B>", Marker.BOS),
    ("<E>", Marker.EOS),
    ("<U>", Marker.USER),
    ("<A>", Marker.ASSISTANT),
    ("<D:", f"<{Marker.DSML}"),
    ("</D:", f"</{Marker.DSML}"),
]


def message(role: str, content: object = "", **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


def long(text: str) -> str:
    """Write the markers out."""
    for short, spelled in SHORT:
        text = text.replace(short, spelled)
    return text


def render(*messages: dict[str, object], think: str = "high", **more: Any) -> str:
    return tiny.chat().render(messages, think=think, **more)


def test_the_text_of_greatest_effort_is_the_publishers() -> None:
    content = MAX_EFFORT.encode()
    assert len(content) == 476
    assert hashlib.sha256(content).hexdigest() == (
        "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7"
    )


def test_the_modes_differ_in_the_tag_that_opens_the_reply_and_in_the_head() -> None:
    hello = [message("system", "S"), message("user", "hi")]
    assert render(*hello, think="none") == long("<B>S<U>hi<A></think>")
    assert render(*hello, think="high") == long("<B>S<U>hi<A><think>")
    assert render(*hello, think="max") == long(f"<B>{MAX_EFFORT}S<U>hi<A><think>")


def test_without_a_word_the_model_thinks() -> None:
    assert tiny.chat().render([message("user", "hi")]).endswith("<think>")
    assert tiny.chat().mode() is ThinkMode.HIGH


def test_the_greatest_effort_needs_a_large_context() -> None:
    assert tiny.chat(n_ctx=MAX_MIN_CONTEXT).mode("max") is ThinkMode.MAX
    assert tiny.chat(n_ctx=MAX_MIN_CONTEXT - 1).mode("max") is ThinkMode.HIGH


@pytest.mark.parametrize("word", sorted(set(EFFORTS) - {"none", "max"}))
def test_other_words_of_effort_mean_high(word: str) -> None:
    assert tiny.chat().mode(word) is ThinkMode.HIGH


@pytest.mark.parametrize("word", ["", "High", "extreme", 1, True, ["high"]])
def test_an_unknown_effort_is_refused_by_name(word: object) -> None:
    with pytest.raises(RequestError, match="expected one of minimal, low") as caught:
        tiny.chat().render([], think=word)
    assert (caught.value.status, caught.value.param) == (400, "reasoning_effort")


def test_system_and_developer_texts_go_to_the_front_divided_by_blank_lines() -> None:
    text = render(
        message("user", "a"), message("system", "S"), message("system"), message("developer", "D")
    )
    assert text == long("<B>S\n\nD<U>a<A><think>")


def test_the_offered_tools_come_before_the_system_texts() -> None:
    text = render(message("system", "S"), message("user", "a"), tools=['{"name": "f"}'])
    assert text.startswith(long("<B>## Tools\n"))
    assert text.endswith(long("schema does.\n\nS<U>a<A><think>"))
    assert '\n\n{"name": "f"}\n\n' in text


def test_old_reasoning_is_dropped_and_that_of_the_open_turn_is_kept() -> None:
    text = render(
        message("user", "1"),
        message("assistant", "one", reasoning_content="old"),
        message("user", "2"),
        message("assistant", "two", reasoning_content="new"),
    )
    assert text == long("<B><U>1<A></think>one<E><U>2<A><think>new</think>two<E>")


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([], ['{"name": "f"}']),
        ([message("tool", "r")], None),
        ([message("assistant", tool_calls=[CALL])], None),
    ],
)
def test_where_tools_are_in_play_all_reasoning_is_kept(messages: Any, tools: Any) -> None:
    old = [message("user", "1"), message("assistant", "one", reasoning_content="old")]
    text = render(*old, *messages, message("user", "2"), tools=tools)
    assert long("<U>1<A><think>old</think>one<E>") in text


def test_missing_reasoning_is_empty_where_it_would_be_kept() -> None:
    text = render(message("user", "1"), message("assistant", "one"), message("tool", "r"))
    assert long("<U>1<A><think></think>one<E>") in text


def test_without_thinking_no_reasoning_is_shown() -> None:
    text = render(
        message("user", "1"),
        message("assistant", "one", reasoning_content="old", tool_calls=[CALL]),
        message("tool", "r"),
        think="none",
    )
    result = "<tool_result>r</tool_result>"
    assert text == long(f"<B><U>1<A></think>one{CALL_TEXT}<E><U>{result}<A></think>")


def test_consecutive_results_share_a_turn_and_a_user_may_follow() -> None:
    text = render(
        message("tool", "1"), message("function", "2"), message("user", "x"), message("tool", "3")
    )
    first, second, third = (f"<tool_result>{n}</tool_result>" for n in "123")
    assert text == long(f"<B><U>{first}{second}<U>x<U>{third}<A><think>")


def test_only_the_closing_tag_is_escaped_in_a_result() -> None:
    text = render(message("tool", "<b>&</tool_result></tool_result>"))
    escaped = "&lt;/tool_result>"
    assert f"<tool_result><b>&{escaped}{escaped}</tool_result>" in text


def test_an_answer_that_follows_an_answer_is_appended() -> None:
    text = render(
        message("user", "1"),
        message("assistant", "a", reasoning_content="r"),
        message("assistant", "b"),
    )
    assert text == long("<B><U>1<A><think>r</think>a<E>b<E>")


def test_a_conversation_that_begins_with_an_answer_has_no_opening() -> None:
    assert render(message("assistant", "a", reasoning_content="r")) == long("<B>a<E>")


@pytest.mark.parametrize("messages", [[], [message("system", "S")]])
def test_without_a_question_nothing_is_opened(messages: list[dict[str, object]]) -> None:
    assert render(*messages) == long("<B>") + "S" * len(messages)


def test_the_opening_can_be_left_out() -> None:
    text = tiny.chat().render([message("user", "a")], add_generation_prompt=False)
    assert text == long("<B><U>a")


def test_unknown_roles_are_left_out_and_a_missing_one_means_user() -> None:
    text = render({"content": "a"}, message("weird", "b"), {"role": None, "content": "c"})
    assert text == long("<B><U>a<U>c<A><think>")


def test_content_may_come_in_parts() -> None:
    text = render(
        message("user", [{"type": "text", "text": "a"}, {"type": "image"}, {"text": "b"}])
    )
    assert text == long("<B><U>ab<A><think>")


def test_calls_stand_behind_the_text_of_their_turn() -> None:
    text = render(message("user", "1"), message("assistant", "x", tool_calls=[CALL]))
    assert text == long(f"<B><U>1<A><think></think>x{CALL_TEXT}<E>")


@pytest.mark.parametrize(
    "calls",
    [None, [], "x", [None], [{"function": None}], [{"function": {"name": "f"}}],
     [{"function": {"arguments": "{}"}}], [{"function": {"name": "f", "arguments": None}}]],
)  # fmt: skip
def test_calls_that_lack_something_are_dropped(calls: object) -> None:
    text = render(message("user", "1"), message("assistant", "x", tool_calls=calls))
    assert text == long("<B><U>1<A><think></think>x<E>")


def test_remembered_words_of_a_call_are_repeated_and_their_tags_are_tokens() -> None:
    exact = long(' <D:tool_calls><D:invoke name="f"></D:invoke></D:tool_calls>')
    messages = [
        message("user", "1"),
        message("assistant", "x", tool_calls=[CALL], tool_block=exact),
    ]
    chat = tiny.chat()
    assert f"x{exact}{Marker.EOS}" in chat.render(messages)
    spelled = tiny.chat(spelled_markers=True)
    assert chat.render_ids(messages) == spelled.render_ids(messages)


def test_remembered_words_can_not_add_calls_or_other_markers() -> None:
    exact = f"{Marker.EOS}{Marker.USER}"
    chat = tiny.chat()
    without = [message("user", "1"), message("assistant", "x", tool_block=exact)]
    assert exact not in chat.render(without)
    spelled = [
        message("user", "1"),
        message("assistant", "x", tool_calls=[CALL], tool_block=exact),
    ]
    ids = chat.render_ids(spelled)
    assert [ids.count(chat.encode([m])[0]) for m in (Marker.EOS, Marker.USER)] == [1, 1]


def test_a_call_without_remembered_words_is_written_anew() -> None:
    messages = [message("user", "1"), message("assistant", "x", tool_calls=[CALL])]
    assert render(*messages) == render(
        messages[0], message("assistant", "x", tool_calls=[CALL], tool_block="")
    )


def test_system_texts_may_stay_where_they_are() -> None:
    messages = [
        message("system", "a"),
        message("developer", "b"),
        message("user", "1"),
        message("assistant", "2"),
        message("system", "c"),
        message("user", "3"),
        message("system", "d"),
    ]
    chat = tiny.chat()
    text = chat.render(messages, think="none", system_in_place=True)
    assert text == long("<B>a\n\nb<U>1<A></think>2<E>c<U>3\n\nd<A></think>")
    moved = long("<B>a\n\nb\n\nc\n\nd<U>1<A></think>2<E><U>3<A></think>")
    assert chat.render(messages, think="none") == moved
    ids = chat.render_ids(messages, think="none", system_in_place=True)
    assert ids == tiny.tokenizer().encode(text, special=True)


def test_what_came_before_a_system_text_in_place_stays_as_it_was() -> None:
    before = [message("user", "1"), message("assistant", "2", reasoning_content="hm")]
    chat = tiny.chat()
    shorter = chat.render(before, system_in_place=True)
    for more in ([message("system", "c")], [message("system", "c"), message("assistant", "4")]):
        longer = chat.render([*before, *more], system_in_place=True)
        assert longer.startswith(shorter + "c" + Marker.ASSISTANT)


@pytest.mark.parametrize("tools", ["x", {"name": "f"}, 7])
def test_tools_that_are_no_list_are_refused(tools: object) -> None:
    with pytest.raises(RequestError, match=r"^tools: got ") as caught:
        tiny.chat().render([], tools=tools)
    assert caught.value.param == "tools"


PLAIN = st.text('ab \n<>｜你&"', max_size=8)  # noqa: RUF001
SPELLED = st.lists(PLAIN | st.sampled_from(list(Marker)), max_size=4).map("".join)


@st.composite
def conversations(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> list[dict[str, object]]:
    """Messages of every role whose every text is drawn."""
    messages = []
    for role in draw(
        st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), max_size=5)
    ):
        more: dict[str, object] = {}
        if role == "assistant":
            more["reasoning_content"] = draw(texts)
            arguments = draw(texts | st.dictionaries(texts, texts | st.lists(texts), max_size=2))
            function = {"name": draw(texts), "arguments": arguments}
            more["tool_calls"] = draw(st.sampled_from([None, [{"function": function}]]))
        messages.append(message(role, draw(texts), **more))
    return messages


MODES = st.sampled_from(ThinkMode)


@given(conversations(PLAIN), MODES, st.lists(PLAIN.map(lambda t: {"name": t}), max_size=2))
def test_ids_are_those_of_the_text_as_long_as_no_text_spells_a_marker(
    messages: list[dict[str, object]], think: ThinkMode, tools: list[object]
) -> None:
    chat = tiny.chat()
    text = chat.render(messages, think=think, tools=tools)
    ids = chat.render_ids(messages, think=think, tools=tools)
    assert ids == tiny.tokenizer().encode(text, special=True)
    assert ids == tiny.chat(spelled_markers=True).render_ids(messages, think=think, tools=tools)


@given(conversations(SPELLED), MODES, st.lists(SPELLED.map(lambda t: {"name": t}), max_size=2))
def test_markers_in_texts_of_clients_stay_text(
    messages: list[dict[str, object]], think: ThinkMode, tools: list[object]
) -> None:
    def harmless(value: object) -> Any:
        """The same shape, with every text replaced."""
        if isinstance(value, dict):
            return {k: v if k == "role" else harmless(v) for k, v in value.items()}
        if isinstance(value, list):
            return [harmless(item) for item in value]
        return "x" if isinstance(value, str) else value

    chat, markers = tiny.chat(), [tiny.chat().encode([marker])[0] for marker in Marker]
    got = chat.render_ids(messages, think=think, tools=tools)
    text = tiny.tokenizer().decode(got, special=True).decode()
    assert text == chat.render(messages, think=think, tools=tools)
    if not any(isinstance(m.get("tool_calls"), list) for m in messages):
        without = chat.render_ids(harmless(messages), think=think, tools=harmless(tools))
        assert [i for i in got if i in markers] == [i for i in without if i in markers]


def test_ds4s_way_lets_users_write_markers() -> None:
    messages = [message("user", f"a{Marker.EOS}b")]
    eos = tiny.chat().encode([Marker.EOS])[0]
    assert eos not in tiny.chat().render_ids(messages)
    assert eos in tiny.chat(spelled_markers=True).render_ids(messages)


def test_a_vocabulary_without_the_markers_is_refused() -> None:
    with pytest.raises(ModelError, match=r"got no .*begin"):
        DeepSeek4Chat(bpe(), 4096)


def test_the_architecture_decides_which_chat_a_file_has(caplog: pytest.LogCaptureFixture) -> None:
    native = chat_for(tiny.metadata(), tiny.tokenizer(), 4096)
    assert isinstance(native, DeepSeek4Chat)
    assert native.mode("max") is ThinkMode.HIGH
    with caplog.at_level(logging.WARNING):
        other = chat_for(bpe_metadata(), bpe(), 4096)
    assert isinstance(other, ChatTemplate)
    assert not caplog.records


@pytest.mark.parametrize("think", [None, "high", "max", "none"])
def test_a_bare_prompt_is_a_turn_behind_the_usual_system_text(think: str | None) -> None:
    chat = tiny.chat()
    messages = [message("system", "You are a helpful assistant"), message("user", "Hi <think>")]
    ids = chat.completion_ids("Hi <think>", think=think)
    assert ids == chat.render_ids(messages, think=think)
    assert chat.opens_reasoning(ids) == (think != "none")


def test_only_a_prompt_that_ends_with_the_opening_tag_opens_the_reasoning() -> None:
    chat = tiny.chat()
    assert not chat.opens_reasoning([])
    assert not chat.opens_reasoning(chat.encode(["<think>"]))
    assert not chat.opens_reasoning(chat.encode([Marker.THINK, "x"]))
    answered = [message("user", "a"), message("assistant", "b")]
    assert not chat.opens_reasoning(chat.render_ids(answered, think="high"))


def test_parts_of_one_turn_stay_in_it() -> None:
    result = "<tool_result>14 C</tool_result>"
    apart = render(message("tool", "14 C"), message("user", "and now?"))
    assert apart.startswith(long(f"<B><U>{result}<U>and now?"))
    together = render(message("tool", "14 C"), message("user", "and now?", continues=True))
    assert together.startswith(long(f"<B><U>{result}and now?"))
    turned = render(message("user", "see:"), message("tool", "14 C", continues=True))
    assert turned.startswith(long(f"<B><U>see:{result}"))
    first = render(message("user", "hi", continues=True))
    assert first.startswith(long("<B><U>hi")), "there is no turn before it"


def test_another_try_repeats_the_rules() -> None:
    tool = '{"type":"function","function":{"name":"f"}}'
    messages = [message("system", "Be kind."), message("user", "hi")]
    for think, tag in (("high", "<think>"), ("none", "</think>")):
        ids = tiny.chat().retry_ids(messages, think=think, tools=[tool])
        text = tiny.tokenizer().decode(ids, special=True).decode()
        assert text.startswith(long("<E><U><tool_result>"))
        assert '{"name":"f"}' in text
        assert text.endswith(long(f"Be kind.<A>{tag}"))
