"""What a request's run counts."""

from ds4py.server.requests.request import CompletionPrompt, GenerationRequest
from ds4py.server.requests.state import RequestState, TokenizedPrompt
from tests.unit.server.support import GREEDY


def state(**parts):
    asked = GenerationRequest(prompt=CompletionPrompt("x"), max_tokens=9, sampling=GREEDY)
    made = RequestState(request=asked, prompt=TokenizedPrompt((1, 2, 3)), **parts)
    made.begin()
    return made


def test_the_first_attempt_says_what_was_cached():
    run = state()
    run.note_prefilled(2)
    run.evaluated = (1, 2, 3, 4, 5)
    run.note_prefilled(4)
    tally = run.tally(7, 1)
    assert (tally.n_prompt, tally.n_cached, tally.n_completion, tally.n_reasoning) == (3, 2, 7, 1)


def test_what_was_loaded_from_disk_counts_as_cached_whatever_the_session_says_later():
    run = state()
    run.n_cached = 1
    run.note_prefilled(3)
    assert run.tally(0, 0).n_cached == 1


def test_times_begin_with_the_run_and_end_now(monkeypatch):
    clock = 10.0
    monkeypatch.setattr("ds4py.server.requests.state.time.monotonic", lambda: clock)
    run = state(deadline=20.0)
    clock = 13.0
    assert (run.tally(0, 0).prefill_seconds, run.tally(0, 0).decode_seconds) == (3.0, 0.0)
    run.note_prefilled(0)
    clock = 20.0
    assert (run.tally(0, 0).prefill_seconds, run.tally(0, 0).decode_seconds) == (3.0, 7.0)
    assert not run.is_late
    clock = 20.1
    assert run.is_late
    assert not state().is_late, "without a deadline nothing is late"
