"""What a generation thread does, without any thread."""

import pytest

from ds4py.config import SamplingParams
from ds4py.errors import CancelledError, RemoteWorkError, RouteIncompleteError
from ds4py.server.work import Done, Order, Performer, Piece, Started
from tests.unit.server.support import EOS, GREEDY, backend, script, text_stack

PROMPT = (10, 11, 12)


def order(prompt=PROMPT, sampling=GREEDY, stop=(), max_tokens=100):
    return Order(prompt=prompt, sampling=sampling, stop=stop, max_tokens=max_tokens)


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
