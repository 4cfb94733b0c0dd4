"""Replies taken apart: reasoning, content and calls, however tokens and stop strings cut them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.text.reply import ReplySplitter
from ds4py.text.stream import TextStream
from ds4py.text.tokenizer.deepseek4_tokens import Marker
from ds4py.text.tool_calls.formats import DSML, CallFormat, format_of
from tests.unit.text import tiny_deepseek4 as tiny
from tests.unit.text.replies import CUTS, Reading, cut, read

D = Marker.DSML
BLOCK = (
    f'<{D}tool_calls>\n<{D}invoke name="weather">\n'
    f'<{D}parameter name="city" string="true">Åre 😀</{D}parameter>\n'
    f"</{D}invoke>\n</{D}tool_calls>"
)
WEATHER = ("weather", '{"city":"Åre 😀"}')
HERMES = format_of("tools <tool_call>")
FORMATS = [None, DSML, HERMES, format_of("tools [TOOL_CALLS]")]
FORMATS.append(format_of('tools {"name": function name, "parameters": dictionary'))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hm</think>yes", ("hm", "yes", [])),
        ("hm", ("hm", "", [])),
        ("hm</thi", ("hm</thi", "", [])),
        ("</think>", ("", "", [])),
        (f"hm</think>So:\n\n{BLOCK}", ("hm", "So:", [WEATHER])),
        (f"hm</think>{BLOCK} and more {BLOCK}", ("hm", "", [WEATHER])),
        (f"hm {BLOCK}", (f"hm {BLOCK}", "", [])),
        (f"hm {BLOCK}</think>no", (f"hm {BLOCK}", "no", [])),
        (f"hm</think>a</think>b{BLOCK}", ("hm", "a</think>b", [WEATHER])),
        ("hm</think>a < b \n", ("hm", "a < b \n", [])),
    ],
)
def test_the_parts_of_a_reply(text: str, parts: tuple[str, str, list[tuple[str, str]]]) -> None:
    for pieces in ([text], list(text)):
        reading = read(pieces, DSML, thinking=True)
        assert (reading.reasoning, reading.content, reading.calls) == parts


def test_without_thinking_everything_is_the_answer() -> None:
    reading = read([f"<think>a</think>b\n{BLOCK}"], DSML)
    assert (reading.reasoning, reading.content) == ("", "<think>a</think>b")
    assert (reading.calls, reading.block) == ([WEATHER], f"\n{BLOCK}")


def test_a_model_may_open_its_reasoning_itself() -> None:
    for text in ("\n<think>hm</think>yes", "hm</think>yes"):
        reading = read(list(text), None, may_think=True)
        thought = text.startswith("\n")
        assert (reading.reasoning, reading.content) == (("hm", "yes") if thought else ("", text))
    reading = read(list(f"<think>hm</think>{BLOCK}"), DSML, may_think=True)
    assert (reading.reasoning, reading.calls) == ("hm", [WEATHER])


def test_what_might_have_opened_reasoning_is_content_in_the_end() -> None:
    assert read([f"\n{BLOCK}"], DSML, may_think=True).calls == [WEATHER]
    assert read([" <thi"], DSML, may_think=True) == Reading(content=" <thi")


def test_calls_that_nobody_offered_are_text() -> None:
    assert read([f"a {BLOCK}"], None) == Reading(content=f"a {BLOCK}")


def test_decoding_can_stop_with_the_last_character_of_the_block() -> None:
    reply = ReplySplitter(thinking=False, calls=DSML)
    reply.push(BLOCK[:-1])
    assert not reply.complete
    reply.push(">")
    assert reply.complete
    assert reply.push("more") == []


@pytest.mark.parametrize("tail", ["<", f"<{D}tool_ca", " \n", " <tool_calls"])
def test_what_was_held_back_for_a_block_that_never_came_is_text(tail: str) -> None:
    for ended in (True, False):
        assert read([f"a{tail}"], DSML, ended=ended) == Reading(content=f"a{tail}")


def test_an_answer_is_held_back_only_where_a_block_may_begin() -> None:
    reply = ReplySplitter(thinking=False, calls=DSML)
    pieces = ("a ", "b\n\n", "<", "tool", "_x <b", "> ")
    shown = ["".join(part.text for part in reply.push(piece)) for piece in pieces]  # type: ignore[union-attr]
    assert shown == ["a", " b", "", "", "\n\n<tool_x <b", ">"]


FRAGMENTS = st.sampled_from(
    [
        *("a", " ", "\n", "</think>", "<think>", "</thi", "<", "é😀", "{", "}", "[", "]", ",", '"'),
        *(BLOCK, BLOCK[:30], BLOCK[-20:], "<tool_calls>", "<tool_call>", "</tool_call>"),
        *(
            "[TOOL_CALLS]",
            "[ARGS]",
            '{"name": "f", "arguments": ',
            '{"a": "b\\n😀"}',
            "<|python_tag|>",
        ),
        *('{"name": "g", "parameters": {"a": [1, {}]}}', "f", ";", '{"x":', "null", "\\"),
    ]
)
REPLIES = st.lists(FRAGMENTS, max_size=8).map("".join)


@given(REPLIES, CUTS, st.sampled_from(FORMATS), st.tuples(*[st.booleans()] * 3))
def test_any_cut_gives_the_same_parts(
    text: str, cuts: list[int], calls: CallFormat | None, flags: tuple[bool, bool, bool]
) -> None:
    how = dict(zip(("thinking", "may_think", "ended"), flags, strict=True))
    reading = read([text], calls, **how)
    assert read(list(text), calls, **how) == reading
    assert read(cut(text, cuts), calls, **how) == reading


@given(REPLIES, CUTS, st.sampled_from(FORMATS), st.booleans())
def test_no_text_is_lost_or_shown_twice(
    text: str, cuts: list[int], calls: CallFormat | None, thinking: bool
) -> None:
    reading = read(cut(text, cuts), calls, thinking=thinking, ended=False)
    tag = "</think>" * (thinking and "</think>" in text)
    shown = reading.reasoning + tag + reading.content + reading.raw_block
    assert text.startswith(shown) if reading.complete else shown == text
    assert reading.raw_block.startswith(reading.block)


@given(
    REPLIES, CUTS, st.sampled_from([["Å"], ["😀<", "b"], ["\n</", "think"], ["a", "tool_calls>"]])
)
def test_bytes_in_any_pieces_and_a_stop_string_give_what_the_whole_gives(
    text: str, cuts: list[int], stop: list[str]
) -> None:
    """As the server does it: tokens of bytes, then stop strings, then the parts."""
    written = text.encode()
    places = sorted(min(place, len(written)) for place in cuts)
    pieces = [written[a:b] for a, b in zip([0, *places], [*places, len(written)], strict=True)]
    stream = TextStream(stop)
    shown = [*map(stream.push, pieces), stream.finish()]
    ends = [text.find(s) for s in stop if s in text]
    expected = text[: min(ends)] if ends else text
    assert read(shown, DSML, thinking=True) == read([expected], DSML, thinking=True)


def test_a_reply_that_arrives_in_tokens_is_the_reply() -> None:
    tokenizer = tiny.tokenizer()
    text = f"Å😀 hm</think>So 你好:\n\n{BLOCK}"
    for special in (True, False):
        stream = TextStream()
        ids = tokenizer.encode(text, special=special)
        pieces = [stream.push(tokenizer.token_bytes(id_)) for id_ in ids]
        assert max(map(len, pieces)) < 20
        reading = read(pieces, DSML, thinking=True)
        assert (reading.reasoning, reading.content) == ("Å😀 hm", "So 你好:")
        assert (reading.calls, reading.block) == ([WEATHER], f"\n\n{BLOCK}")
