"""Split rules by name: each family's characteristic cuts."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.text.tokenizer.bpe import BYTE_ALPHABET
from ds4py.text.tokenizer.pretokenize import DEFAULT, RULES, split_rule

SPACE = "\u2423"


def pieces(name: str, text: str) -> list[str]:
    """The pieces of a text, written in bytes again."""
    found = split_rule(name).pre_tokenizer().pre_tokenize_str(text)
    return [bytes(BYTE_ALPHABET[c] for c in piece).decode() for piece, _ in found]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", "It|'s| 12345| don|'|T| \n| x|!!|\n"),
        ("smollm", "It|'s| |1|2|3|4|5| don|'|T| \n| x|!!|\n"),
        ("qwen2", "It|'s| |1|2|3|4|5| don|'T| \n| x|!!\n"),
        ("llama-bpe", "It|'s| |123|45| don|'T| \n| x|!!\n"),
        ("gpt-4o", "It's| |123|45| don'T| \n| x|!!\n"),
        ("tekken", "It|'s| |1|2|3|4|5| don|'T| \n| x|!!\n"),
        ("default", "It|'|s| |123|45| don|'|T| \n| x|!!|\n"),
        ("falcon", "It|'|s| |123|45| don|'|T| \n| x|!!|\n"),
        ("deepseek-v3", "It|'s| |123|45| don|'T| \n| x|!!\n"),
    ],
)
def test_the_family_cuts_words_digits_and_contractions_its_own_way(
    name: str, expected: str
) -> None:
    assert pieces(name, "It's 12345 don'T \n x!!\n") == expected.split("|")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-4o", "CamelCase/path/\n", "Camel|Case|/path|/\n"),
        ("tekken", "CamelCase/path/\n", "Camel|Case|/path|/\n"),
        ("qwen2", "CamelCase/path/\n", "CamelCase|/path|/\n"),
        ("default", "a`(", "a|`|("),
        ("falcon", "a`(", "a|`("),
        ("deepseek-v3", "x你好y 世", "x|你好|y| |世"),
        ("smollm", "½ ⅓ ²³", "½| |⅓| |²|³"),
    ],
)
def test_what_sets_a_family_apart(name: str, text: str, expected: str) -> None:
    assert pieces(name, text) == expected.split("|")


def test_deepseek_4_cuts_the_worked_example_of_the_specification() -> None:
    text = "    int x = a->b(c);\n\n  return 12345 + foo_bar; café 你好abc $x 你"
    expected = (
        "␣␣␣|␣int|␣x|␣=|␣a|->|b|(c|);\n\n|␣|␣return|␣|123|45|␣+|␣foo|_bar|;|␣café|␣你好abc|␣$|x|␣你"
    )
    assert pieces("joyai-llm", text) == expected.replace(SPACE, " ").split("|")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\t\tx", ["\t", "\tx"]),
        ("  \n  7", ["  \n", "  ", "7"]),
        ("你好世界x", ["你好世界", "x"]),
        ("x你好", ["x你好"]),
        ("  ", ["  "]),
        ("\x00\x01", ["\x00", "\x01"]),
        (" 你", [" 你"]),
    ],
)
def test_deepseek_4_follows_the_numbered_rules(text: str, expected: list[str]) -> None:
    assert pieces("joyai-llm", text) == expected


@pytest.mark.parametrize("name", sorted(RULES))
@given(text=st.text(max_size=40))
def test_no_family_loses_a_character(name: str, text: str) -> None:
    assert "".join(pieces(name, text)) == text


@pytest.mark.parametrize("name", sorted(RULES))
def test_long_runs_of_blanks_take_no_more_than_linear_time(name: str) -> None:
    text = " " * 20_000 + "x" + "\t" * 20_000
    assert "".join(pieces(name, text)) == text


def test_an_unknown_name_is_warned_about_and_cut_like_the_default(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert split_rule("no-such-family") is DEFAULT
    assert len(caplog.records) == 1
    assert "'no-such-family' is not known" in caplog.text


def test_a_known_name_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        split_rule("smollm")
    assert not caplog.records
