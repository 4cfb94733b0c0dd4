"""What a generation thread does, without any thread."""

from dataclasses import dataclass, field, replace

import pytest

from ds4py.config import SamplingParams, ServerConfig
from ds4py.errors import CancelledError, RemoteWorkError, RequestError, RouteIncompleteError
from ds4py.generation.grammar import GrammarKind, GrammarSource
from ds4py.generation.logits_processors import LogitBias
from ds4py.server.history.conversations import ConversationMemory
from ds4py.server.requests.events import Answer, Done, Prefilling, Started, TextPiece
from ds4py.server.requests.prompts import PromptWriter, TextStack
from ds4py.server.requests.request import ChatMessage, Conversation, GenerationRequest
from ds4py.server.requests.state import RequestState, TokenizedPrompt
from ds4py.server.requests.worker import GenerationWorker
from ds4py.text.tool_calls.formats import DSML
from tests.fakes import FakeBackend
from tests.unit.server.support import EOS, GREEDY, N_VOCAB, backend, script, text_stack

PROMPT = (10, 11, 12)


BLOCK = """<tool_calls><invoke name="f"><parameter name="a" string="false">1</parameter></invoke>
<invoke name="g"></invoke></tool_calls>"""


def order(prompt=PROMPT, *, calls=False, thinking=False, deadline=None, constraint=None, **asked):
    """A request that was let in; its prompt is what it would be in tokens."""
    said = Conversation((ChatMessage("user", "hi"),))
    request = GenerationRequest(
        **{"prompt": said, "max_tokens": 100, "sampling": GREEDY, **asked},
    )
    tokens = TokenizedPrompt(prompt, thinking=thinking, calls=DSML if calls else None)
    return RequestState(request=request, prompt=tokens, constraint=constraint, deadline=deadline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorder(ConversationMemory):
    """A memory that shows the replies that it is told."""

    told: list = field(default_factory=list)

    def keep(self, conversation, answer, tokens, **how):
        self.told.append((answer, tokens))
        ConversationMemory.keep(self, conversation, answer, tokens, **how)


class Asking:
    """The toy's chat format, with words that ask for another call."""

    def __init__(self, *ids):
        self._ids = list(ids)

    def __getattr__(self, name):
        return getattr(text_stack().chat, name)

    def retry_ids(self, messages, **how):
        return self._ids


def worker(fake, memory=None, chat=None):
    memory = memory or ConversationMemory()
    text = TextStack(text_stack().tokenizer, chat or text_stack().chat)
    return GenerationWorker(fake, PromptWriter(text, fake, ServerConfig(), memory), memory)


def perform(fake, asked, cancelled=lambda: False, memory=None, chat=None):
    """All events but those of the progress, and the end."""
    events = []
    done = worker(fake, memory, chat).perform(asked, events.append, cancelled)
    return [event for event in events if not isinstance(event, Prefilling)], done


def shown(events):
    return "".join(event.text for event in events if isinstance(event, TextPiece))


def test_an_answer_starts_with_the_prompt_and_ends_at_the_end_token():
    events, done = perform(backend("Hello"), order())
    assert events[0] == Started(3, 0)
    assert shown(events) == "Hello"
    assert (done.finish, done.error) == ("stop", None)
    assert (done.tally.n_prompt, done.tally.n_cached, done.tally.n_completion) == (3, 0, 5)


def thought(events):
    return "".join(event.reasoning for event in events if isinstance(event, TextPiece))


def called(events):
    answer = Answer()
    for event in events[1:]:
        answer.add(event)
    return list(answer.calls)


def test_reasoning_comes_apart_and_is_counted():
    events, done = perform(backend("hm</think>Hi"), order(thinking=True))
    assert (thought(events), shown(events), done.finish) == ("hm", "Hi", "stop")
    assert (done.tally.n_completion, done.tally.n_reasoning) == (12, 10)
    assert "<" not in "".join(e.text + e.reasoning for e in events if isinstance(e, TextPiece))


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
    assert done.tally.n_completion == len(f"hm</think>Yes.\n\n{BLOCK}")


def test_a_block_that_its_model_left_open_is_closed():
    events, done = perform(backend(BLOCK[:-10]), order(calls=True, max_tokens=250))
    assert [call.name for call in called(events)] == ["f", "g"]
    assert done.finish == "tool_calls"


@pytest.mark.parametrize("limit", [{"max_tokens": len(BLOCK) - 1}, {"stop": ("</tool_calls",)}])
def test_a_block_that_was_cut_off_calls_nothing(limit):
    asked = order(calls=True, **{"max_tokens": 250, **limit})
    memory = Recorder()
    events, done = perform(backend(f"So {BLOCK}"[3:]), asked, memory=memory)
    assert (memory.told[0][0].calls, shown(events)) == ((), "")
    assert done.finish == ("stop" if asked.request.stop else "length")


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
    assert [
        token for event in events if isinstance(event, TextPiece) for token in event.tokens
    ] == script(says, end=False)


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
    assert (events, done.finish, done.tally.n_completion) == ([Started(3, 0)], "length", 0)
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

    done = worker(fake).perform(order(), emit, lambda: False)
    assert done == Done(finish="error", error=done.error, tally=done.tally)
    assert isinstance(done.error, CancelledError)
    assert EOS not in fake.sessions[0].evaluated
    assert fake.n_free == 1


BROKEN = "<tool_calls>nonsense</tool_calls>"


def test_calls_that_can_not_be_read_are_asked_for_once_more():
    """The second try follows the first one in the session, and only it is shown."""
    fake = backend(script(f"Well. {BROKEN}", end=False) + script(BLOCK, end=False))
    ask = (20, 21, 22)
    fake.sessions[0].sync = _without_restarting_the_script(fake.sessions[0])
    memory = Recorder()
    asked = order(calls=True, max_tokens=250)
    events, done = perform(fake, asked, memory=memory, chat=Asking(*ask))
    assert events.count(Started(3, 0)) == 2
    answer, tokens = memory.told[0]
    assert [call.name for call in answer.calls] == ["f", "g"]
    assert (answer.text, done.finish) == ("", "tool_calls")
    assert done.tally.n_completion == len(BLOCK)
    first = script(f"Well. {BROKEN}", end=False)
    assert tokens == (*PROMPT, *first, *ask, *script(BLOCK, end=False))


def _without_restarting_the_script(session):
    """A sync after which the script goes on as if there had been no new prompt."""
    sync, said = session.sync, len(script(f"Well. {BROKEN}", end=False))

    def steady(tokens, **options):
        before = session.n_prompt
        result = sync(tokens, **options)
        if before:
            session.n_prompt = len(tokens) - said
            return replace(result, logits=session._logits())
        return result

    return steady


def test_one_more_try_is_all(caplog):
    fake = backend(BROKEN)
    events, done = perform(fake, order(calls=True), chat=Asking(20, 21))
    assert events.count(Started(3, 0)) == 2
    assert done.finish == "stop"
    last = len(events) - events[::-1].index(Started(3, 0))
    assert shown(events[last:]) == BROKEN


def test_reasoning_that_uses_up_its_budget_is_cut_short():
    fake = backend("hmmmmmmmmm" * 5)
    asked = order(thinking=True, thinking_budget=7, max_tokens=40)
    events, done = perform(fake, asked)
    assert thought(events) == "hmmmmmm"
    assert shown(events).startswith("mmm"), "the answer follows, whatever the model makes of it"
    end = text_stack().tokenizer.encode("</think>", special=True)
    assert done.tally.n_reasoning == 7 + len(end)


def test_log_probabilities_are_of_the_answer_only():
    asked = order(thinking=True, n_logprobs=2)
    events, _ = perform(backend("hm</think>Hé"), asked)
    found = [one for event in events if isinstance(event, TextPiece) for one in event.logprobs]
    assert b"".join(one.chosen.data for one in found) == "Hé".encode()
    assert [len(one.top) for one in found] == [2, 2, 2]
    assert all(one.top[0] == one.chosen and one.chosen.logprob <= 0 for one in found)
    assert not any(
        event.logprobs for event in events if isinstance(event, TextPiece) and event.reasoning
    )


def test_an_answer_keeps_to_its_grammar_once_the_reasoning_is_over():
    constraint = GrammarSource(text_stack().tokenizer).compile(GrammarKind.REGEX, "[ab]{3}")
    asked = order(thinking=True, constraint=constraint)
    events, done = perform(backend("free</think>bzzzzz"), asked)
    assert thought(events) == "free"
    assert shown(events)[0] == "b"
    assert set(shown(events)) <= {"a", "b"}
    assert (len(shown(events)), done.finish) == (3, "stop")


def test_a_bias_moves_the_choice():
    token = script("x", end=False)[0]
    asked = order(logit_bias=LogitBias(bias={token: 100.0}), max_tokens=2)
    events, _ = perform(FakeBackend(n_vocab=N_VOCAB), asked)
    assert shown(events) == "xx"


def test_a_prompt_beyond_its_time_is_refused_and_an_answer_ends_early(monkeypatch):
    clock = 0.0
    monkeypatch.setattr("ds4py.server.requests.state.time.monotonic", lambda: clock)
    clock = 11.0
    with pytest.raises(RequestError) as caught:
        perform(backend("Hello"), order(deadline=10.0))
    assert (caught.value.status, caught.value.code) == (503, "time_limit")
    clock = 0.0
    fake = backend("Hello world")
    events = []

    def emit(event):
        nonlocal clock
        events.append(event)
        clock = 11.0 if isinstance(event, TextPiece) and event.text == "l" else clock

    done = worker(fake).perform(order(deadline=10.0), emit, lambda: False)
    assert (shown(events), done.finish) == ("Hel", "length")


def test_the_cheapest_of_prompts_with_one_meaning_is_evaluated():
    fake, memory = backend("Hello"), ConversationMemory()
    hidden, seen = (*PROMPT, 30, 31, 32, 33), (*PROMPT, 33)
    memory.exact_tokens.keep(hidden, [lambda: seen])
    fake.sessions[0].sync(hidden)
    done = worker(fake, memory).perform(order((*seen, 40, 41)), lambda _: None, lambda: False)
    assert (done.tally.n_prompt, done.tally.n_cached) == (len(hidden) + 2, len(hidden))
    other = backend("Hello")
    done = worker(other, memory).perform(order((*seen, 40, 41)), lambda _: None, lambda: False)
    assert done.tally.n_prompt == len(seen) + 2, "nothing of it is cached: the short one costs less"


def test_what_a_stream_has_shown_is_not_asked_for_once_more():
    events, done = perform(backend(BROKEN), order(calls=True, stream=True), chat=Asking(20, 21))
    assert events.count(Started(3, 0)) == 1
    assert (shown(events), done.finish) == (BROKEN, "stop")


def test_both_attempts_share_one_budget():
    fake = backend(BROKEN)
    _, done = perform(fake, order(calls=True, max_tokens=len(BROKEN) + 5), chat=Asking(20, 21))
    assert (done.finish, done.tally.n_completion) == ("length", 5)


def test_a_prompt_of_the_same_meaning_that_does_not_fit_is_left_aside():
    fake, memory = backend("Hello", n_ctx=12), ConversationMemory()
    hidden, seen = tuple(range(30, 42)), (*PROMPT, 33)
    memory.exact_tokens.keep(hidden, [lambda: seen])
    fake.sessions[0].sync(hidden[:11])
    done = worker(fake, memory).perform(order((*seen, 40)), lambda _: None, lambda: False)
    assert (done.tally.n_prompt, done.error) == (5, None)
