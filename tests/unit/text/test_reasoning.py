"""Reasoning and answer told apart: any cut gives the same, and no piece holds part of the tag."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds4py.text.reasoning import THINK, THINK_END, Delta, ReasoningSplitter, n_begun
from tests.unit.text import tiny_deepseek4 as tiny


def run(pieces: list[str], *, thinking: bool = True) -> list[Delta]:
    """What each push and the final `finish` returned."""
    splitter = ReasoningSplitter(thinking=thinking)
    return [*map(splitter.push, pieces), splitter.finish()]


def joined(deltas: list[Delta]) -> tuple[str, str]:
    reasoning, content = zip(*deltas, strict=True)
    return "".join(reasoning), "".join(content)


TEXTS = st.lists(st.sampled_from([THINK_END, *"<</think>ab"]), max_size=16).map("".join)


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(cut_texts())
@example(["a</th", "ink", ">b"])
@example(["</thin", "</think>"])
@example(["</think></think>"])
def test_any_cut_gives_what_the_whole_gives(pieces: list[str]) -> None:
    reasoning, _, content = "".join(pieces).partition(THINK_END)
    assert joined(run(pieces)) == (reasoning, content)


@given(cut_texts())
def test_what_is_given_out_is_never_taken_back(pieces: list[str]) -> None:
    final, deltas = "".join(pieces).partition(THINK_END), run(pieces)
    for n in range(len(deltas)):
        reasoning, content = joined(deltas[: n + 1])
        assert final[0].startswith(reasoning)
        assert final[2].startswith(content)
        assert content == "" or reasoning == final[0]


@given(cut_texts())
def test_as_little_as_possible_is_held_back(pieces: list[str]) -> None:
    splitter, seen = ReasoningSplitter(thinking=True), ""
    given_out = 0
    for piece in pieces:
        seen += piece
        given_out += len(splitter.push(piece).reasoning)
        if splitter.thinking:
            held = seen[given_out:]
            assert THINK_END.startswith(held)
            assert len(held) < len(THINK_END)


@given(cut_texts())
def test_without_thinking_everything_is_the_answer(pieces: list[str]) -> None:
    assert joined(run(pieces, thinking=False)) == ("", "".join(pieces))


@given(cut_texts(), st.sampled_from(["", " ", "\n<think>", "<think>", "<thin", "<think><think>"]))
def test_a_reply_may_open_its_reasoning_itself(pieces: list[str], beginning: str) -> None:
    text = "".join([beginning, *pieces])
    opened = text.lstrip().startswith(THINK)
    reasoning, _, content = (
        text.partition(THINK)[2].partition(THINK_END) if opened else ("", "", text)
    )
    for given_pieces in ([beginning, *pieces], list(text)):
        splitter = ReasoningSplitter(thinking=False, may_open=True)
        deltas = [*map(splitter.push, given_pieces), splitter.finish()]
        assert joined(deltas) == (reasoning, content)
        assert splitter.thinking == (opened and THINK_END not in text)


def test_the_end_of_the_reasoning_is_told() -> None:
    splitter = ReasoningSplitter(thinking=True)
    splitter.push("a</think")
    assert splitter.thinking
    splitter.push(">")
    assert not splitter.thinking


@pytest.mark.parametrize(
    ("text", "tag", "n"),
    [
        ("", "<ab>", 0),
        ("x<", "<ab>", 1),
        ("<<a", "<ab>", 2),
        ("<ab>", "<ab>", 0),
        ("<x", "<ab>", 0),
        ("aa", "aab", 2),
    ],
)
def test_the_longest_beginning_of_a_tag_is_found(text: str, tag: str, n: int) -> None:
    assert n_begun(text, tag) == n


def test_the_tag_is_found_as_a_token_and_as_plain_characters() -> None:
    tokenizer = tiny.tokenizer()
    for special in (True, False):
        ids = tokenizer.encode("why</think>because", special=special)
        pieces = [tokenizer.token_bytes(id_).decode() for id_ in ids]
        assert joined(run(pieces)) == ("why", "because")
