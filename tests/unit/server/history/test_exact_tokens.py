"""Conversations that come back look different, and are found all the same."""

from hypothesis import given
from hypothesis import strategies as st

from ds4py.server.history.exact_tokens import ExactTokens, common_prefix

PROMPT = (1, 2, 3)
HIDDEN = (*PROMPT, 90, 91, 4, 5)  # reasoning, then the answer
SEEN = (*PROMPT, 4, 5)
END = 7


def transcripts(*kept):
    found = ExactTokens()
    for tokens, *views in kept:
        found.keep(tokens, [lambda seen=seen: seen for seen in views])
    return found


def test_a_prompt_goes_on_from_what_was_really_said():
    found = transcripts((HIDDEN, SEEN))
    assert list(found.paths((*SEEN, END, 8))) == [(*HIDDEN, END, 8)]


def test_another_conversation_is_left_alone():
    found = transcripts((HIDDEN, SEEN))
    assert list(found.paths((*PROMPT, 4, 6, END))) == []
    assert list(found.paths(SEEN)) == [], "nothing follows: it is not a turn that goes on"


def test_what_was_said_as_it_is_shown_needs_no_other_path():
    assert list(transcripts((SEEN, SEEN)).paths((*SEEN, END))) == []


def test_a_view_is_written_once_and_only_when_needed():
    written = []
    found = ExactTokens()
    found.keep(HIDDEN, [lambda: written.append(1) or SEEN])
    assert written == []
    for _ in range(3):
        list(found.paths((*SEEN, END)))
    assert written == [1]


def test_a_format_without_an_end_of_answers_has_no_view():
    assert list(transcripts((HIDDEN, None)).paths((*SEEN, END))) == []


def test_with_and_without_reasoning():
    shown = (*PROMPT, 80, 4, 5)
    found = transcripts((HIDDEN, shown, SEEN))
    assert list(found.paths((*shown, END))) == list(found.paths((*SEEN, END))) == [(*HIDDEN, END)]
    assert found.visible(HIDDEN) == (HIDDEN, shown)
    assert found.visible(HIDDEN[:-1]) == (HIDDEN, shown), "the last token is not evaluated yet"
    assert found.visible(HIDDEN[:-2]) is None
    assert found.visible((*HIDDEN, 1)) is None


def test_memory_is_bounded_and_the_oldest_goes_first():
    found = ExactTokens(max_tokens=10)
    found.keep((1, 2, 3, 4, 5, 6), [lambda: (1,)])
    found.keep((2, 2, 3, 4, 5, 6), [lambda: (2,)])
    assert list(found.paths((1, 9))) == []
    assert list(found.paths((2, 9))) == [(2, 2, 3, 4, 5, 6, 9)]


@given(
    st.lists(st.integers(0, 3), max_size=6),
    st.lists(st.integers(0, 3), max_size=6),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
)
def test_a_path_is_exact_tokens_and_the_rest_of_the_prompt(said, seen, rest):
    prompt = (*seen, *rest)
    for path in transcripts((tuple(said), tuple(seen))).paths(prompt):
        assert path == (*said, *rest)


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_the_common_prefix(a, b):
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]
