"""Incremental text: any cut of the bytes gives the same text, and no stop string leaks."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds4py.text.stream import TextStream


def run(pieces: list[bytes], stop: list[str]) -> tuple[list[str], TextStream]:
    """What each push and the final `finish` returned."""
    stream = TextStream(stop)
    return [*map(stream.push, pieces), stream.finish()], stream


def expected(content: bytes, stop: list[str]) -> tuple[str, str | None]:
    """The text and the stop string by the definition, looking at everything at once."""
    text = content.decode("utf-8", "replace")
    starts = [(text.find(s), n) for n, s in enumerate(stop) if s and s in text]
    if not starts:
        return text, None
    start, n = min(starts)
    return text[:start], stop[n]


@st.composite
def cut_bytes(draw: st.DrawFn) -> list[bytes]:
    """Bytes, mostly text, in pieces of any size."""
    content = draw(
        st.text("abc", max_size=12).map(str.encode)
        | st.text("aé你😀", max_size=8).map(str.encode)
        | st.binary(max_size=12)
    )
    cuts = sorted(draw(st.lists(st.integers(0, len(content)), max_size=8)))
    return [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]


STOPS = st.lists(st.text("abc", max_size=4) | st.sampled_from(["é", "你😀"]), max_size=4)


@given(cut_bytes(), STOPS)
@example([b"ab", b"c"], ["bc", "abc"])  # the one that begins first is complete last
@example([b"ab", b"x"], ["b", "abc"])  # ... and this one never completes
@example([b"a", b"b", b"c"], ["abc", "ab"])  # both begin together: the first listed
def test_any_cut_gives_what_the_whole_gives(pieces: list[bytes], stop: list[str]) -> None:
    returned, stream = run(pieces, stop)
    assert ("".join(returned), stream.matched) == expected(b"".join(pieces), stop)


@given(cut_bytes(), STOPS)
def test_at_every_moment_the_text_is_a_beginning_of_the_final_one(
    pieces: list[bytes], stop: list[str]
) -> None:
    final, _ = expected(b"".join(pieces), stop)
    returned, _ = run(pieces, stop)
    for n in range(len(returned) + 1):
        assert final.startswith("".join(returned[:n]))


def test_half_a_character_is_held_back() -> None:
    returned, _ = run(["é".encode()[:1], "é".encode()[1:], "😀".encode()[:3]], [])
    assert returned == ["", "é", "", "\ufffd"]


def test_bytes_that_are_no_text_become_the_replacement_character() -> None:
    returned, _ = run([b"a\xff", b"b\xc3", b"c"], [])
    assert returned == ["a\ufffd", "b", "\ufffdc", ""]


def test_the_length_of_the_longest_stop_string_less_one_is_held_back() -> None:
    returned, _ = run([b"abcdef", b"gh"], ["xyz", "q"])
    assert returned == ["abcd", "ef", "gh"]


def test_the_stop_string_and_what_follows_are_left_out() -> None:
    returned, stream = run([b"one END two", b" three"], ["END"])
    assert returned == ["one ", "", ""]
    assert stream.stopped
    assert stream.matched == "END"


def test_a_stop_string_over_several_pieces_is_found() -> None:
    returned, stream = run([b"one E", b"N", b"D two"], ["END"])
    assert "".join(returned) == "one "
    assert stream.stopped


def test_an_unfinished_stop_string_is_given_back_at_the_end() -> None:
    returned, stream = run([b"one EN"], ["END"])
    assert "".join(returned) == "one EN"
    assert not stream.stopped


def test_a_later_stop_string_waits_for_one_that_may_begin_earlier() -> None:
    stream = TextStream(["bc", "abcd"])
    assert stream.push(b"abc") == ""
    assert not stream.stopped
    assert stream.push(b"x") == "a"
    assert stream.matched == "bc"


@pytest.mark.parametrize("stop", [[], [""], ["", ""]])
def test_without_stop_strings_nothing_is_held_back(stop: list[str]) -> None:
    returned, stream = run([b"abc"], stop)
    assert returned == ["abc", ""]
    assert not stream.stopped
