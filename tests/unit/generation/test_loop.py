"""The token loop: budget, end tokens, cancelling, and nothing evaluated in vain."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.config import SamplingParams
from ds4py.errors import CancelledError, CapacityError, RemoteWorkError, RequestError
from ds4py.generation.grammar import Constraint, GrammarKind, GrammarSource
from ds4py.generation.logits_processors import SamplingController, SamplingControls
from ds4py.generation.logprobs import top_logprobs
from ds4py.generation.loop import Finished, FinishReason, GenerationStep, Prefilled, Token, generate
from ds4py.generation.sampling import Sampler
from tests.support.fakes import FakeSession, fake_logits, greedy_tokens
from tests.unit.generation.toys import EOS, MARK, N_VOCAB, Toy

PROMPT = [5, 6, 7]
GREEDY = SamplingParams(temperature=0)


def run(
    session: FakeSession, prompt: list[int] = PROMPT, **options: object
) -> list[GenerationStep]:
    given_options: dict[str, object] = {"sampler": Sampler(GREEDY), "eos_ids": ()} | options
    return list(generate(session, prompt, **given_options))  # type: ignore[arg-type]


def ids(steps: list[GenerationStep]) -> list[int]:
    return [step.id for step in steps if isinstance(step, Token)]


def finish(steps: list[GenerationStep]) -> Finished:
    assert isinstance(steps[-1], Finished)
    return steps[-1]


def test_prompt_then_tokens_then_the_end() -> None:
    steps = run(FakeSession(), max_tokens=4)
    assert [type(step) for step in steps] == [Prefilled, Token, Token, Token, Token, Finished]
    assert ids(steps) == greedy_tokens(PROMPT, 4)
    assert isinstance(steps[0], Prefilled)
    assert (steps[0].n_prompt, steps[0].n_cached) == (3, 0)
    assert (finish(steps).reason, finish(steps).n_tokens) == (FinishReason.LENGTH, 4)


def test_what_the_session_has_is_reported_as_cached() -> None:
    session = FakeSession()
    run(session, max_tokens=1)
    steps = run(session, [*PROMPT, 8, 9], max_tokens=1)
    assert isinstance(steps[0], Prefilled)
    assert (steps[0].n_prompt, steps[0].n_cached) == (5, 3)


@given(st.integers(0, 12))
def test_the_last_token_is_not_evaluated(max_tokens: int) -> None:
    session = FakeSession()
    tokens = ids(run(session, max_tokens=max_tokens))
    assert len(tokens) == max_tokens
    assert session.evaluated == [*PROMPT, *tokens[:-1]]


def test_a_budget_of_nothing_only_evaluates_the_prompt() -> None:
    session = FakeSession()
    steps = run(session, max_tokens=0)
    assert [type(step) for step in steps] == [Prefilled, Finished]
    assert finish(steps).reason is FinishReason.LENGTH
    assert session.evaluated == PROMPT


@pytest.mark.parametrize("eos", [60, 61])
def test_an_end_token_ends_the_reply_and_is_no_part_of_it(eos: int) -> None:
    session = FakeSession(script=[10, 11, eos, 12])
    steps = run(session, eos_ids={60, 61})
    assert ids(steps) == [10, 11]
    assert (finish(steps).reason, finish(steps).n_tokens) == (FinishReason.STOP, 2)
    assert finish(steps).eos_id == eos
    assert eos not in session.evaluated


@pytest.mark.parametrize("max_tokens", [None, 100])
def test_the_context_is_the_largest_budget(max_tokens: int | None) -> None:
    steps = run(FakeSession(n_ctx=8), max_tokens=max_tokens)
    assert len(ids(steps)) == 5
    assert finish(steps).reason is FinishReason.LENGTH


@pytest.mark.parametrize("n_ctx", [2, 3])
def test_a_prompt_that_fills_the_context_is_refused_untouched(n_ctx: int) -> None:
    session = FakeSession(n_ctx=n_ctx)
    with pytest.raises(CapacityError) as caught:
        run(session)
    assert (caught.value.needed, caught.value.available) == (4, n_ctx)
    assert session.n_evaluations == 0


def test_one_token_fits_behind_the_longest_prompt() -> None:
    assert len(ids(run(FakeSession(n_ctx=4)))) == 1


def test_cancelling_during_the_prompt_ends_without_an_error() -> None:
    session = FakeSession(chunk=1)
    polls = iter([False, True])
    steps = run(session, cancelled=lambda: next(polls))
    assert len(steps) == 1
    assert (finish(steps).reason, finish(steps).n_tokens) == (FinishReason.CANCELLED, 0)
    assert session.evaluated == PROMPT[:1]


def test_cancelling_between_tokens_stops_before_the_next_one() -> None:
    session = FakeSession(chunk=8)
    polls = iter([False, False, False, True])  # the prompt, then before each token
    steps = run(session, cancelled=lambda: next(polls))
    assert len(ids(steps)) == 2
    assert (finish(steps).reason, finish(steps).n_tokens) == (FinishReason.CANCELLED, 2)


def test_an_evaluation_that_was_cancelled_ends_the_reply() -> None:
    steps = run(FakeSession(failures={2: CancelledError("stop")}))
    assert len(ids(steps)) == 2
    assert (finish(steps).reason, finish(steps).n_tokens) == (FinishReason.CANCELLED, 2)


@pytest.mark.parametrize("evaluation", [0, 1, 3])
def test_a_failing_stage_is_the_callers_to_handle(evaluation: int) -> None:
    error = RemoteWorkError("out of memory", hop="worker")
    steps: list[GenerationStep] = []
    with pytest.raises(RemoteWorkError):
        steps.extend(run(FakeSession(failures={evaluation: error})))


def test_tokens_before_a_failure_are_delivered() -> None:
    error = RemoteWorkError("out of memory", hop="worker")
    session = FakeSession(failures={2: error})
    events = generate(session, PROMPT, sampler=Sampler(GREEDY), eos_ids=())
    assert [type(next(events)) for _ in range(3)] == [Prefilled, Token, Token]
    with pytest.raises(RemoteWorkError):
        next(events)


def test_closing_the_generator_leaves_the_last_token_unevaluated() -> None:
    session = FakeSession()
    events = generate(session, PROMPT, sampler=Sampler(GREEDY), eos_ids=())
    tokens = ids(list(itertools.islice(events, 4)))
    events.close()
    assert session.evaluated == [*PROMPT, *tokens[:-1]]


def test_nothing_happens_before_the_first_event_is_asked_for() -> None:
    session = FakeSession()
    generate(session, PROMPT, sampler=Sampler(GREEDY), eos_ids=())
    assert session.n_evaluations == 0


def test_progress_is_passed_on() -> None:
    seen: list[tuple[int, int]] = []
    run(FakeSession(chunk=2), max_tokens=0, progress=lambda *step: seen.append(step))
    assert seen == [(2, 3), (3, 3)]


def test_a_seed_repeats_a_sampled_reply() -> None:
    params = SamplingParams(seed=11, temperature=2.0)
    replies = [ids(run(FakeSession(), sampler=Sampler(params), max_tokens=20)) for _ in range(2)]
    assert replies[0] == replies[1]
    assert replies[0] != greedy_tokens(PROMPT, 20)


def steered(**controls: object) -> SamplingController:
    return SamplingController(Sampler(GREEDY), SamplingControls(**controls))  # type: ignore[arg-type]


def choice(*texts: str, started: bool = True) -> Constraint:
    constraint = GrammarSource(Toy()).compile(GrammarKind.CHOICE, json.dumps(texts))
    if started:
        constraint.start()
    return constraint


@pytest.mark.parametrize("max_tokens", [1, 9])
def test_a_text_that_its_grammar_completed_ends_without_another_evaluation(max_tokens: int) -> None:
    session = FakeSession(n_vocab=N_VOCAB)
    steps = run(session, sampler=steered(constraint=choice("x", "y")), max_tokens=max_tokens)
    assert ids(steps) in ([ord("x")], [ord("y")])
    assert (finish(steps).reason, finish(steps).n_tokens) == (FinishReason.STOP, 1)
    assert finish(steps).eos_id is None
    assert session.evaluated == PROMPT


def test_an_end_token_ends_a_text_that_its_grammar_could_extend() -> None:
    session = FakeSession(n_vocab=N_VOCAB, script=[ord("x"), EOS])
    steps = run(session, sampler=steered(constraint=choice("x", "xy")), eos_ids={EOS})
    assert ids(steps) == [ord("x")]
    assert (finish(steps).reason, finish(steps).eos_id) == (FinishReason.STOP, EOS)


def test_a_text_that_can_not_go_on_ends_with_an_error_behind_its_tokens() -> None:
    session = FakeSession(n_vocab=ord("y"))  # no logit for what must come
    events = generate(session, PROMPT, sampler=steered(constraint=choice("xy", "xz")), eos_ids=())
    assert [type(next(events)) for _ in range(2)] == [Prefilled, Token]
    with pytest.raises(RequestError, match="no token of the model can continue"):
        next(events)


def test_tokens_carry_the_log_probabilities_that_were_asked_for() -> None:
    steps = run(FakeSession(), sampler=steered(n_logprobs=3), max_tokens=2)
    first, second = (step for step in steps if isinstance(step, Token))
    assert first.logprobs == top_logprobs(fake_logits(PROMPT), first.id, 3)
    assert second.logprobs == top_logprobs(fake_logits([*PROMPT, first.id]), second.id, 3)
    assert first.logprobs.ranked[0] == (first.id, first.logprobs.chosen)


def test_reasoning_can_be_closed_by_force_and_the_answer_constrained_from_there() -> None:
    """What a server does for a thinking budget of two tokens and a schema."""
    session = FakeSession(n_vocab=N_VOCAB, script=[ord("h"), ord("m"), ord("!")])
    constraint = choice("yes", started=False)
    orders: list[tuple[int, ...]] = []
    sampler = steered(constraint=constraint, forced=lambda: orders.pop() if orders else ())
    said: list[int] = []
    for step in generate(session, PROMPT, sampler=sampler, eos_ids={EOS}):
        if isinstance(step, Token):
            said.append(step.id)
            if len(said) == 2:
                orders.append((ord("."), MARK))
            if step.id == MARK:
                constraint.start()
    assert said[:4] == [*b"hm.", MARK]
    assert Toy().text(said[4:]) == b"yes"
    assert session.evaluated == [*PROMPT, *said[:-1]]
