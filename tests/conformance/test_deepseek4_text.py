"""DeepSeek V4 text against recordings of the C engine, and against the tokenizer's definition."""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds4py.text.stream import TextStream
from ds4py.text.tokenizer.bpe import BYTE_ALPHABET
from ds4py.text.tokenizer.deepseek4_tokens import Marker
from ds4py.text.tokenizer.pretokenize import split_rule
from tests import golden
from tests.unit.text import tiny_deepseek4 as tiny

RECORDED: dict[str, Any] = golden.load_json("tokens.json")
TOKENIZER = tiny.tokenizer()
TO_CHARACTER = {byte: character for character, byte in BYTE_ALPHABET.items()}


def test_plain_text_has_the_recorded_ids() -> None:
    assert len(RECORDED["text"]) == 79
    for case in RECORDED["text"]:
        assert TOKENIZER.encode(case["text"], special=False) == case["ids"], case


def test_rendered_text_has_the_recorded_ids() -> None:
    for case in RECORDED["rendered_chat"]:
        assert TOKENIZER.encode(case["text"], special=True) == case["ids"], case


def test_tokens_have_the_recorded_bytes() -> None:
    assert len(RECORDED["token_bytes_hex"]) == TOKENIZER.n_vocab
    for id_, spelled in enumerate(RECORDED["token_bytes_hex"]):
        assert TOKENIZER.token_bytes(id_, special=True).hex() == spelled


def test_ids_of_bytes_that_are_no_text_give_these_bytes() -> None:
    """They can be decoded, for a peer may send them; our own texts are always text."""
    for case in RECORDED["raw_bytes"]:
        assert TOKENIZER.decode(case["ids"]).hex() == case["bytes_hex"]


@pytest.mark.parametrize("spelled_markers", [False, True])
def test_prompts_of_one_turn_have_the_recorded_text_and_ids(spelled_markers: bool) -> None:
    chat = tiny.chat(spelled_markers=spelled_markers)
    assert len(RECORDED["chat_prompts"]) == 15
    for case in RECORDED["chat_prompts"]:
        messages = [
            {"role": r, "content": case[k]} for r, k in (("system", "system"), ("user", "prompt"))
        ]
        assert chat.render(messages, think=case["think"]) == case["rendered"]
        assert chat.render_ids(messages, think=case["think"]) == case["ids"], case


def test_one_message_appends_the_recorded_ids() -> None:
    """Those that a conversation can hold; ds4 also appends unknown roles and unread reasoning."""
    chat = tiny.chat()
    before = [{"role": "user", "content": "Hello"}]
    told = [
        case
        for case in RECORDED["messages"]
        if case["role"] != "weird" and not re.match("</?think>", case["content"])
    ]
    assert len(told) == 7
    for case in told:
        message = {"role": case["role"], "content": case["content"]}
        first = before if case["role"] == "assistant" else []
        empty = chat.render_ids(first, add_generation_prompt=False, think="none")
        ids = chat.render_ids([*first, message], add_generation_prompt=False, think="none")
        end = [*TOKENIZER.eos_ids] if case["role"] == "assistant" else []
        assert ids == empty + case["ids"] + end, case


def test_text_that_arrives_token_by_token_is_the_text() -> None:
    for case in RECORDED["text"]:
        stream = TextStream()
        pieces = [stream.push(TOKENIZER.token_bytes(id_)) for id_ in case["ids"]]
        assert "".join(pieces) + stream.finish() == case["text"]
        assert "\ufffd" not in "".join(pieces)


# The definition, docs/spec/deepseek4-model.md#pre-split, #bpe, #entry-points, over characters
# instead of bytes.

Class = Callable[[str], bool]


def is_digit(c: str) -> bool:
    return "0" <= c <= "9"


def is_alpha(c: str) -> bool:
    return c.isascii() and c.isalpha()


def is_letterish(c: str) -> bool:
    return is_alpha(c) or not c.isascii()


def is_punct(c: str) -> bool:
    return "!" <= c <= "~" and not c.isalnum()


def is_newline(c: str) -> bool:
    return c in {"\n", "\r"}


def is_blank(c: str) -> bool:
    return c in set(" \t\n\v\f\r")


def is_cjk(c: str) -> bool:
    return "\u4e00" <= c <= "\u9fa5" or "\u3040" <= c <= "\u30ff"


def run(text: str, at: int, class_: Class) -> int:
    """The length of the run of a class."""
    rest = text[at:]
    return next((n for n, c in enumerate(rest) if not class_(c)), len(rest))


def blank_length(text: str) -> int:
    """Rule 7."""
    length = run(text, 0, is_blank)
    newlines = [n for n in range(length) if is_newline(text[n])]
    if newlines:
        return newlines[-1] + 1
    following = text[length : length + 1]
    word_follows = following and (is_letterish(following) or is_punct(following))
    return length - 1 if word_follows and length > 1 else length


def piece_length(text: str) -> int:
    """The first rule that applies to the beginning of a text."""
    first, second = text[0], text[1:2]
    if is_digit(first):
        return min(3, run(text, 0, is_digit))
    if is_cjk(first):
        return run(text, 0, is_cjk)
    if is_punct(first) and second and is_alpha(second):
        return 1 + run(text, 1, is_alpha)
    if is_letterish(first):
        return run(text, 0, is_letterish)
    if not is_newline(first) and not is_punct(first) and second and is_letterish(second):
        return 1 + run(text, 1, is_letterish)
    lead = int(first == " " and bool(second) and is_punct(second))
    if lead or is_punct(first):
        end = lead + run(text, lead, is_punct)
        return end + run(text, end, is_newline)
    return blank_length(text) if is_blank(first) else 1


def split(text: str) -> list[str]:
    pieces = []
    while text:
        length = piece_length(text)
        pieces.append(text[:length])
        text = text[length:]
    return pieces


SPELLINGS = tiny.metadata()["tokenizer.ggml.tokens"]
MERGES = tiny.metadata()["tokenizer.ggml.merges"]
assert isinstance(SPELLINGS, list)
assert isinstance(MERGES, list)
IDS = {spelling: id_ for id_, spelling in enumerate(SPELLINGS)}
RANKS = {merge: rank for rank, merge in enumerate(MERGES)}


def merged(piece: str) -> list[int]:
    """6.4: always the merge of the lowest rank, of equal ones the leftmost."""
    symbols = [TO_CHARACTER[byte] for byte in piece.encode()]
    while True:
        found = [(RANKS.get(f"{a} {b}"), n) for n, (a, b) in enumerate(pairwise(symbols))]
        ranked = [(rank, n) for rank, n in found if rank is not None]
        if not ranked:
            return [IDS[symbol] for symbol in symbols]
        n = min(ranked)[1]
        symbols[n : n + 2] = [symbols[n] + symbols[n + 1]]


def raw_ids(text: str) -> list[int]:
    return [id_ for piece in split(text) for id_ in merged(piece)]


def rendered_ids(text: str) -> list[int]:
    """6.5: markers are cut out, the stretches between are tokenized on their own."""
    found = [(text.find(marker), marker) for marker in Marker if marker in text]
    if not found:
        return raw_ids(text)
    start, marker = min(found)
    rest = rendered_ids(text[start + len(marker) :])
    return [*raw_ids(text[:start]), IDS[marker], *rest]


CONTROLS = "".join(map(chr, [*range(0x20), 0x7F, 0x80, 0x85, 0xA0]))
FRAGMENTS = st.one_of(
    st.sampled_from(
        [*Marker, "<", "think>", "\uff5cDSML", "<\uff5cUser", *SPELLINGS[:3], *SPELLINGS[766:]]
    ),
    st.text(" \t\r\n\v\f", min_size=1, max_size=6),
    st.text("0123456789٣½²", min_size=1, max_size=5),
    st.text("你好世界\u4dff\u4e00\u9fa5\u9fa6\u3040\u303f\u30ff\u3100", min_size=1, max_size=4),
    st.text("abcXYZ the in er", min_size=1, max_size=8),
    st.text("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", min_size=1, max_size=5),
    st.text(CONTROLS, min_size=1, max_size=3),
    st.text(
        "éÆßпривет\u0301\u200b\u200d\uff0c\u3002\uff01\u3000عב한😀👩\ufeff\ufffe\U0010ffff",
        min_size=1,
        max_size=4,
    ),
    st.text(max_size=4),
)
TEXTS = st.lists(FRAGMENTS, max_size=10).map("".join)


def pieces(text: str) -> list[str]:
    found = split_rule("joyai-llm").pre_tokenizer().pre_tokenize_str(text)
    return [bytes(BYTE_ALPHABET[c] for c in piece).decode() for piece, _ in found]


@given(TEXTS)
@example("a\nb\n c\r你 \x01é\t!x \t!\x01 1\n \n\n  \r7 !\n\nπ1Ω 世\v界")
@example("    int x = a->b(c);\n\n  return 12345 + foo_bar; café 你好abc $x 你")
def test_text_is_cut_and_merged_by_the_definition(text: str) -> None:
    assert pieces(text) == split(text)
    assert TOKENIZER.encode(text, special=False) == raw_ids(text)


@given(TEXTS)
def test_only_the_seven_markers_are_recognised_in_rendered_text(text: str) -> None:
    assert TOKENIZER.encode(text, special=True) == rendered_ids(text)


@given(TEXTS)
def test_plain_text_never_becomes_a_marker_and_is_what_its_ids_spell(text: str) -> None:
    ids = TOKENIZER.encode(text, special=False)
    assert not any("\uff5c" in SPELLINGS[id_] or "think>" in SPELLINGS[id_] for id_ in ids)
    assert TOKENIZER.decode(ids).decode() == text


@given(TEXTS)
def test_rendered_text_is_what_its_ids_spell(text: str) -> None:
    ids = TOKENIZER.encode(text, special=True)
    assert TOKENIZER.decode(ids, special=True).decode() == text


@pytest.mark.parametrize("character", ["a", "你", " ", "\n", "!", "7", "\x01", "😀"])
def test_long_runs_of_one_character_are_no_exception(character: str) -> None:
    text = character * 3000
    assert pieces(text) == split(text)
    ids = TOKENIZER.encode(text, special=False)
    assert TOKENIZER.decode(ids).decode() == text
