"""What a generation thread does, without any thread."""

import pytest

from ds4py.config import SamplingParams
from ds4py.errors import CancelledError, RemoteWorkError, RouteIncompleteError
from ds4py.server.work import Done, Order, Performer, Piece, Started
from tests.unit.server.support import EOS, GREEDY, backend, script, text_stack

PROMPT = (10, 11, 12)


BLOCK = """<tool_calls><invoke name="f"><parameter name="a" string="false">1</parameter></invoke>
<invoke name="g"></invoke></tool_calls>"""


def order(prompt=PROMPT, sampling=GREEDY, stop=(), max_tokens=100, **parts):
    return Order(prompt=prompt, sampling=sampling, stop=stop, max_tokens=max_tokens, **parts)


def perform(fake, asked, cancelled=lambda: False):
    events = []
    done = Performer(fake, text_stack()).perform(asked, events.append, cancelled)
    return events, done


def shown(events):
    return "".join(event.text for event in events if isinstance(event, Piece))


def test_an_answer_starts_with_the_prompt_and_ends_at_the_end_token():
    events, done = perform(backend("Hello"), order())
    assert events[0] == Started()
    assert shown(events) == "Hello"
    assert (done.finish, done.error) == ("stop", None)
    assert (done.tally.n_prompt, done.tally.n_cached, done.tally.n_completion) == (3, 0, 5)


def thought(events):
    return "".join(event.reasoning for event in events if isinstance(event, Piece))


def called(events):
    return [call for event in events if isinstance(event, Piece) for call in event.calls]


def test_reasoning_comes_apart_and_is_counted():
    events, done = perform(backend("hm</think>Hi"), order(thinking=True))
    assert (thought(events), shown(events), done.finish) == ("hm", "Hi", "stop")
    assert (done.tally.n_completion, done.tally.n_reasoning) == (12, 10)
    assert "<" not in "".join(e.text + e.reasoning for e in events if isinstance(e, Piece))


def test_reasoning_that_never_ends_is_no_answer():
    events, done = perform(backend("hm</thi"), order(thinking=True))
    assert (thought(events), shown(events), done.finish) == ("hm</thi", "", "stop")
    events, done = perform(backend("hm</think>Hi"), order(thinking=True, max_tokens=5))
    assert (thought(events), shown(events), done.finish) == ("hm</t", "", "length")
    assert done.tally.n_reasoning == 5


def test_without_reasoning_tags_are_text():
    events, done = perform(backend("hm</think>Hi"), order())
    assert (thought(events), shown(events)) == ("", "hm</think>Hi")
    assert done.tally.n_reasoning == 0


def test_a_token_of_reasoning_and_answer_makes_two_pieces():
    """A stop text holds back until the end tag, too, is in the same push."""
    asked = order(thinking=True, stop=("Hi there!",))
    events, _ = perform(backend("hm</think>Hi there"), asked)
    assert all(not (event.text and event.reasoning) for event in events[1:])
    assert (thought(events), shown(events)) == ("hm", "Hi there")


def test_stop_texts_are_searched_in_reasoning_too():
    events, done = perform(backend("hm so</think>Hi"), order(thinking=True, stop=(" s",)))
    assert (thought(events), shown(events), done.finish) == ("hm", "", "stop")


def test_what_was_held_back_is_shown_when_a_stop_text_ends_the_answer():
    events, done = perform(backend("a <too END"), order(calls=True, stop=("END",)))
    assert (shown(events), done.finish) == ("a <too ", "stop")


def test_calls_end_the_work():
    fake = backend(f"hm</think>Yes.\n\n{BLOCK} and more")
    events, done = perform(fake, order(thinking=True, calls=True, max_tokens=250))
    assert (thought(events), shown(events), done.finish) == ("hm", "Yes.", "tool_calls")
    first, second = called(events)
    assert (first.name, first.arguments, second.name, second.arguments) == (
        *("f", '{"a":1}'),
        *("g", "{}"),
    )
    assert (first.index, second.index) == (0, 1)
    assert first.id != second.id
    assert all(len(c.id) == 37 and c.id.startswith("call_") for c in (first, second))
    assert [event.calls for event in events[-2:]] == [(first,), (second,)]
    assert done.tally.n_completion == len(f"hm</think>Yes.\n\n{BLOCK}")


def test_a_block_that_its_model_left_open_is_closed():
    events, done = perform(backend(BLOCK[:-10]), order(calls=True, max_tokens=250))
    assert [call.name for call in called(events)] == ["f", "g"]
    assert done.finish == "tool_calls"


@pytest.mark.parametrize("limit", [{"max_tokens": len(BLOCK) - 1}, {"stop": ("</tool_calls",)}])
def test_a_block_that_was_cut_off_calls_nothing(limit):
    asked = order(calls=True, **{"max_tokens": 250, **limit})
    events, done = perform(backend(f"So {BLOCK}"[3:]), asked)
    assert (called(events), shown(events)) == ([], "")
    assert done.finish == ("stop" if asked.stop else "length")


@pytest.mark.parametrize("says", ["<tool_calls>nonsense</tool_calls>", "<tool_calls>nonsense"])
def test_a_block_that_can_not_be_read_is_text(says):
    events, done = perform(backend(says), order(calls=True))
    assert (called(events), shown(events), done.finish) == ([], says, "stop")


def test_calls_that_were_not_asked_for_are_text():
    events, done = perform(backend(BLOCK), order(max_tokens=250))
    assert (shown(events), done.finish) == (BLOCK, "stop")


def test_calls_in_reasoning_are_reasoning():
    events, done = perform(backend(BLOCK), order(thinking=True, calls=True, max_tokens=250))
    assert (thought(events), called(events), done.finish) == (BLOCK, [], "stop")


def test_every_token_is_reported_once():
    says = f"hm</think>Yes. {BLOCK}"
    asked = order(thinking=True, calls=True, token_ids=True, max_tokens=250)
    events, _ = perform(backend(says), asked)
    assert [token for event in events[1:] for token in event.tokens] == script(says, end=False)


def test_the_session_is_given_back():
    fake = backend("Hello")
    perform(fake, order())
    assert fake.n_free == 1


def test_a_second_turn_reports_what_was_cached():
    fake = backend("Hi")
    perform(fake, order())
    _, done = perform(fake, order(prompt=(*PROMPT, *script("Hi", end=False), 20)))
    assert (done.tally.n_prompt, done.tally.n_cached) == (6, 5)


def test_the_budget_ends_with_length():
    events, done = perform(backend("Hello"), order(max_tokens=2))
    assert (shown(events), done.finish, done.tally.n_completion) == ("He", "length", 2)


def test_a_budget_of_zero_evaluates_the_prompt_only():
    fake = backend("Hello")
    events, done = perform(fake, order(max_tokens=0))
    assert (events, done.finish, done.tally.n_completion) == ([Started()], "length", 0)
    assert fake.sessions[0].evaluated == list(PROMPT)


def test_a_full_context_ends_with_length():
    fake = backend("Hello world", n_ctx=6)
    _, done = perform(fake, order())
    assert (done.finish, done.tally.n_completion) == ("length", 3)


def test_a_stop_text_is_cut_and_ends_the_work():
    fake = backend("Hello world and more")
    events, done = perform(fake, order(stop=("wor",)))
    assert (shown(events), done.finish) == ("Hello ", "stop")
    assert len(fake.sessions[0].evaluated) == len(PROMPT) + len("Hello wo")


def test_what_a_stop_text_held_back_is_shown_at_the_end():
    events, done = perform(backend("Hello wo"), order(stop=("world",)))
    assert (shown(events), done.finish) == ("Hello wo", "stop")


def test_a_character_is_never_split():
    events, _ = perform(backend("añ€😀"), order())
    assert [event.text for event in events[1:]] == ["a", "ñ", "€", "😀"]


def test_a_cut_character_at_the_end_becomes_a_replacement():
    events, _ = perform(backend(script("a€".encode()[:-1])), order())
    assert shown(events) == "a\ufffd"


def test_the_same_seed_gives_the_same_text():
    sampling = SamplingParams(temperature=1.0, seed=7)
    texts = {shown(perform(backend(None), order(sampling=sampling))[0]) for _ in range(3)}
    assert len(texts) == 1
    other = SamplingParams(temperature=1.0, seed=8)
    assert shown(perform(backend(None), order(sampling=other))[0]) not in texts


def test_a_failure_before_the_first_token_is_raised():
    fake = backend("Hello", failures={0: RouteIncompleteError("layers 2-3", first_missing=2)})
    with pytest.raises(RouteIncompleteError):
        perform(fake, order())
    assert fake.n_free == 1


@pytest.mark.parametrize("error", [RemoteWorkError("lost", hop="worker1"), ZeroDivisionError()])
def test_a_failure_during_decode_keeps_what_was_said(error):
    fake = backend("Hello", failures={3: error})
    events, done = perform(fake, order())
    assert (shown(events), done.finish) == ("Hel", "error")
    assert done.error is error
    assert done.tally.n_completion == 3
    assert fake.n_free == 1


def test_cancelling_before_the_prompt_is_raised():
    with pytest.raises(CancelledError):
        perform(backend("Hello"), order(), cancelled=lambda: True)


def test_cancelling_during_decode_stops_at_the_next_token():
    fake = backend("Hello")
    evaluated = fake.sessions[0].evaluated
    _, done = perform(fake, order(), cancelled=lambda: len(evaluated) >= len(PROMPT) + 2)
    assert isinstance(done.error, CancelledError)
    assert done.tally.n_completion == 2


def test_nobody_listening_stops_the_work():
    fake = backend("Hello")
    events = []

    def emit(event):
        if len(events) == 3:
            raise CancelledError("gone")
        events.append(event)

    done = Performer(fake, text_stack()).perform(order(), emit, lambda: False)
    assert done == Done(finish="error", error=done.error, tally=done.tally)
    assert isinstance(done.error, CancelledError)
    assert EOS not in fake.sessions[0].evaluated
    assert fake.n_free == 1
