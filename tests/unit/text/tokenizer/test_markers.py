"""Cutting a text at spelled-out tokens."""

from hypothesis import given
from hypothesis import strategies as st

from ds4py.text.tokenizer.markers import Markers

MARKERS = {"<a>": 1, "<ab>": 2, "<": 3, "[x]": 4, "": 5}


def test_spelled_out_tokens_become_ids_and_the_rest_stays_text() -> None:
    assert list(Markers(MARKERS).cut("hi <a>[x]you")) == ["hi ", 1, 4, "you"]


def test_at_one_place_the_longest_spelling_counts() -> None:
    assert list(Markers(MARKERS).cut("<ab>")) == [2]


def test_a_spelling_that_is_cut_off_is_text_or_a_shorter_one() -> None:
    assert list(Markers(MARKERS).cut("[x<a")) == ["[x", 3, "a"]


def test_without_spellings_everything_is_text() -> None:
    assert list(Markers({}).cut("<a>")) == ["<a>"]
    assert list(Markers({}).cut("")) == []


def test_characters_with_a_meaning_in_patterns_are_ordinary() -> None:
    markers = Markers({"]^": 1, "\\d": 2, "-": 3})
    assert list(markers.cut("a-]^\\d1")) == ["a", 3, 1, 2, "1"]


@given(st.text("<ab>[x]y", max_size=30))
def test_the_pieces_add_up_to_the_text(text: str) -> None:
    spelling = {id_: marker for marker, id_ in MARKERS.items()}
    pieces = list(Markers(MARKERS).cut(text))
    assert "".join(spelling[p] if isinstance(p, int) else p for p in pieces) == text
    assert "" not in pieces


@given(st.text("<ab>[x]y", max_size=30))
def test_no_spelling_is_left_in_the_text_pieces(text: str) -> None:
    for piece in Markers(MARKERS).cut(text):
        if isinstance(piece, str):
            assert not any(marker in piece for marker in MARKERS if marker)
