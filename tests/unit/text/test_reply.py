"""Replies taken apart: reasoning, content and calls, however the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.text.deepseek4_tokens import Marker
from ds4py.text.dsml import ToolCall
from ds4py.text.reply import ReplySplitter

D = Marker.DSML
BLOCK = (
    f'<{D}tool_calls>\n<{D}invoke name="weather">\n'
    f'<{D}parameter name="city" string="true">Oslo</{D}parameter>\n'
    f"</{D}invoke>\n</{D}tool_calls>"
)
WEATHER = ToolCall("weather", '{"city":"Oslo"}')


def split(
    pieces: list[str], *, thinking: bool = True, calls: bool = True, ended: bool = True
) -> tuple[str, str, tuple[ToolCall, ...]]:
    """Reasoning, content and calls of a reply that arrives in pieces."""
    reply = ReplySplitter(thinking=thinking, calls=calls)
    deltas = [reply.push(piece) for piece in pieces]
    rest, found = reply.finish(ended=ended)
    deltas.append(rest)
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), found


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hm</think>yes", ("hm", "yes", ())),
        ("hm", ("hm", "", ())),
        ("hm</thi", ("hm</thi", "", ())),
        ("</think>", ("", "", ())),
        (f"hm</think>So:\n\n{BLOCK}", ("hm", "So:", (WEATHER,))),
        (f"hm</think>{BLOCK} and more {BLOCK}", ("hm", "", (WEATHER,))),
        (f"hm {BLOCK}", (f"hm {BLOCK}", "", ())),
        (f"hm {BLOCK}</think>no", (f"hm {BLOCK}", "no", ())),
        (f"hm</think>a</think>b{BLOCK}", ("hm", "a</think>b", (WEATHER,))),
        ("hm</think>a < b \n", ("hm", "a < b \n", ())),
    ],
)
def test_the_parts_of_a_reply(text: str, parts: tuple[str, str, tuple[ToolCall, ...]]) -> None:
    assert split([text]) == parts
    assert split(list(text)) == parts


def test_without_thinking_everything_is_the_answer() -> None:
    assert split([f"a</think>b\n{BLOCK}"], thinking=False) == ("", "a</think>b", (WEATHER,))


def test_calls_that_nobody_offered_are_text() -> None:
    assert split([f"a {BLOCK}"], thinking=False, calls=False) == ("", f"a {BLOCK}", ())


def test_decoding_can_stop_with_the_last_character_of_the_block() -> None:
    reply = ReplySplitter(thinking=False, calls=True)
    reply.push(BLOCK[:-1])
    assert not reply.complete
    reply.push(">")
    assert reply.complete


def test_a_block_that_can_not_be_read_is_text() -> None:
    text = f"a {BLOCK.replace('invoke', 'x')}"
    assert split(list(text), thinking=False) == ("", text, ())
    assert split([text], thinking=False, ended=False) == ("", text, ())
    assert split([f"{text} and more"], thinking=False) == ("", text, ())


@pytest.mark.parametrize("n_cut", [1, 20, 54])
def test_what_the_model_left_open_is_closed_but_what_was_cut_off_is_not(n_cut: int) -> None:
    text = f"a\n{BLOCK[:-n_cut]}"
    assert split([text], thinking=False) == ("", "a", (WEATHER,))
    assert split([text], thinking=False, ended=False) == ("", "a", ())


@pytest.mark.parametrize("tail", ["<", f"<{D}tool_ca", " \n", " <tool_calls"])
def test_what_was_held_back_for_a_block_that_never_came_is_text(tail: str) -> None:
    for ended in (True, False):
        assert split([f"a{tail}"], thinking=False, ended=ended) == ("", f"a{tail}", ())


FRAGMENTS = st.sampled_from(
    ["a", " ", "\n", "</think>", "</thi", "<", BLOCK, BLOCK[:30], BLOCK[-20:], "<tool_calls>", "é"]
)


@given(
    st.lists(FRAGMENTS, max_size=6).map("".join),
    st.data(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_cut_gives_the_same_parts(
    text: str, data: st.DataObject, thinking: bool, calls: bool, ended: bool
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    how = {"thinking": thinking, "calls": calls, "ended": ended}
    assert split(pieces, **how) == split(list(text), **how)
