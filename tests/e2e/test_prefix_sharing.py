"""Sessions whose prompts begin alike: the common head is copied, and no answer shows it.

Counted is what stages evaluate and copy. Which notices a worker heeds: `unit/worker/test_forks`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4py.config import CoordinatorConfig, PrefillTuning, RouteEntry, WorkerConfig
from ds4py.contracts import ForwardRequest, Session
from ds4py.coordinator.prefix_sharing import MIN_SAVED
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.session_pool import SessionPool
from ds4py.errors import CancelledError
from ds4py.layer_range import LayerSpec
from ds4py.runtime import Node, join_cluster, open_listeners, open_node, open_worker
from ds4py.wire.extensions import FORK
from ds4py.worker.worker import Worker
from tests.clusters import ANY_PORT, DEADLINE, Cluster, cluster, span, start_worker, wait_until
from tests.e2e.support import SOCKETS, Alone, endless_toy, engine, route
from tests.fake_runner import FakeRunner, card, reference_logits
from tests.sockets import Background

N_CTX = 256
HEAD = [(7 * k * k + 3 * k) % 97 for k in range(100)]
TAIL = [(5 * k * k + k + 1) % 97 for k in range(70)]
"""Enough for a conversation not to be given up for another one that begins alike."""

FIRST, SECOND = [*HEAD, 5, *TAIL], [*HEAD, 50, *TAIL]
ROUTES: dict[int, tuple[list[str], str | None]] = {
    0: ([], "0-5"),
    1: (["0-5"], None),
    2: (["0-2", "3-5"], None),
    3: (["1-2", "3-4", "5-5"], "0-0"),
}


def runners(c: Cluster) -> list[FakeRunner]:
    """Every stage's, the coordinator's own first."""
    own = [] if c.coordinator.local is None else [c.coordinator.local.runner]
    return [*own, *c.runners]  # type: ignore[list-item]


class Patience:
    """Lets the first stage wait with a span until every stage has copied what it needs.

    A notice that comes after its span, over another connection, costs a replay: to be counted here
    are the usual cases.
    """

    def __init__(self) -> None:
        self.cluster: Cluster | None = None
        self.n_forks = 0

    def __call__(self, work: ForwardRequest) -> None:
        if self.cluster is not None and work.hidden is None:
            stages = runners(self.cluster)
            wait_until(lambda: all(len(r.forked) >= self.n_forks for r in stages), "all copied")


@contextmanager
def patient(n_hops: int, n_sessions: int = 2, **fields: object) -> Iterator[tuple]:
    cuts, local = ROUTES[n_hops]
    patience = Patience()
    options = {"n_ctx": N_CTX, "chunk": 16, "n_sessions": n_sessions, "before": patience, **fields}
    with cluster(cuts, local=local, **options) as c:  # type: ignore[arg-type]
        c.wait_ready()
        patience.cluster = c
        yield c, patience


def check(session: Session, tokens: Sequence[int], n_cached: int) -> None:
    result = session.sync(tokens)
    assert result.n_cached == n_cached
    np.testing.assert_array_equal(result.logits, reference_logits(tokens))


def evaluated(c: Cluster) -> list[int]:
    """How many tokens each stage has evaluated."""
    return [sum(n for _, n in runner.evaluated) for runner in runners(c)]


# --- what is saved -------------------------------------------------------------------------------


@pytest.mark.parametrize("n_hops", ROUTES)
def test_a_new_conversation_copies_the_head_that_another_one_has(n_hops: int) -> None:
    with patient(n_hops) as (c, patience):
        with c.backend.lease(FIRST) as first:
            check(first, FIRST, 0)
        before = evaluated(c)
        patience.n_forks = 1
        with c.backend.lease(SECOND) as second:
            assert second is not first
            check(second, SECOND, len(HEAD))
            np.testing.assert_array_equal(second.eval(9), reference_logits([*SECOND, 9]))
        assert [r.forked for r in runners(c)] == [[len(HEAD)]] * len(runners(c))
        n_new = len(SECOND) - len(HEAD) + 1
        assert [n - b for n, b in zip(evaluated(c), before, strict=True)] == [n_new] * len(before)
        with c.backend.lease(FIRST) as again:  # and the other one has lost nothing
            check(again, [*FIRST, 8], len(FIRST))


@pytest.mark.parametrize("n_hops", [0, 2])
def test_conversations_that_take_turns_evaluate_only_what_is_new(n_hops: int) -> None:
    with patient(n_hops, n_sessions=3) as (c, patience):
        lines = [[*HEAD, 10 * n, *TAIL] for n in range(3)]
        n_held = [0, len(HEAD), len(HEAD)]
        for turn in range(3):
            for n, line in enumerate(lines):
                patience.n_forks = min(2, 3 * turn + n)
                with c.backend.lease(line) as session:
                    check(session, line, n_held[n])
                    n_held[n] = len(line)
                line += [turn, n, 77]
        assert [len(r.forked) for r in runners(c)] == [2] * len(runners(c))


def test_a_prompt_that_another_one_contains_leaves_two_tokens_to_evaluate() -> None:
    """A single one might leave over a second connection, before the notice arrives."""
    with patient(2) as (c, patience), c.backend.lease(HEAD) as first:
        check(first, FIRST, 0)
        patience.n_forks = 1
        with c.backend.lease(HEAD) as second:
            check(second, HEAD, len(HEAD) - 2)


@pytest.mark.parametrize("n_own", [0, 1, 10])
@pytest.mark.parametrize("n_more", [MIN_SAVED - 1, MIN_SAVED])
def test_a_copy_must_save_more_than_its_trouble(n_own: int, n_more: int) -> None:
    with patient(1) as (c, _), c.backend.lease([]) as first, c.backend.lease([]) as second:
        check(first, HEAD, 0)
        if n_own:
            second.sync(HEAD[:n_own])
        n_shared = n_own + n_more
        wanted = [*HEAD[:n_shared], 96 - HEAD[n_shared], 1]
        pays = n_more >= MIN_SAVED
        check(second, wanted, n_shared if pays else n_own)
        assert [r.forked for r in runners(c)] == [[n_shared] if pays else []]


def test_the_longest_head_of_all_sessions_is_copied() -> None:
    with patient(1, n_sessions=4) as (c, _), ExitStack() as stack:
        sessions = [stack.enter_context(c.backend.lease([])) for _ in range(4)]
        for session, n in zip(sessions, (70, 90, 80), strict=False):
            session.sync([*HEAD[:n], 96 - HEAD[n]])
        check(sessions[3], SECOND, 90 if (96 - HEAD[90]) != HEAD[90] else 91)


# --- exact in any interleaving -------------------------------------------------------------------


class Jitter:
    """Lets stages dawdle now and then, differently for each seed: other interleavings."""

    def __init__(self) -> None:
        self._dice = random.Random()

    def seed(self, seed: int) -> None:
        self._dice.seed(seed)

    def __call__(self, _: ForwardRequest) -> None:
        time.sleep(self._dice.choice((0, 0, 0.0005, 0.002)))


@pytest.fixture(scope="module", params=ROUTES, ids=lambda n: f"{n} hops")
def jittery(request: pytest.FixtureRequest) -> Iterator[tuple[Cluster, Jitter]]:
    (cuts, local), jitter = ROUTES[request.param], Jitter()
    with cluster(
        cuts, local=local, n_ctx=N_CTX, n_sessions=4, before=jitter, chunk=16, window=3
    ) as c:
        c.wait_ready()
        yield c, jitter
        assert all(r.forked for r in runners(c)), "no head was ever copied"


ENDS = st.lists(st.integers(0, 96), min_size=1, max_size=12)
STEP = st.one_of(
    st.tuples(st.just("sync"), st.integers(60, 100), ENDS),
    st.tuples(st.just("leave"), st.integers(60, 100), ENDS),  # in the middle of the prompt
    st.tuples(st.just("decode"), st.just(0), ENDS),
    st.tuples(st.just("rewind"), st.integers(1, 90), st.just([])),
)
SCRIPTS = st.lists(st.lists(STEP, min_size=1, max_size=5), min_size=2, max_size=4)


def play(session: Session, script: Sequence[tuple[str, int, list[int]]]) -> None:
    """Do as a script says; after each step the logits are those of one process."""
    for what, n, tokens in script:
        line = list(session.tokens)
        if what == "rewind":
            session.rewind(max(1, len(line) - n))
        elif what == "decode":
            for token in tokens if line else ():
                line.append(token)
                np.testing.assert_array_equal(session.eval(token), reference_logits(line))
        else:
            prompt = [*HEAD[:n], *tokens]
            seen: list[int] = []
            leave = seen if what == "leave" else []
            try:
                result = session.sync(
                    prompt,
                    progress=lambda done, _, seen=seen: seen.append(done),  # type: ignore[misc]
                    cancelled=lambda leave=leave: bool(leave),  # type: ignore[misc]
                )
            except CancelledError:
                assert list(session.tokens) == prompt[: len(session.tokens)]
                continue
            np.testing.assert_array_equal(result.logits, reference_logits(prompt))


@settings(max_examples=10, deadline=None)
@given(scripts=SCRIPTS, seed=st.integers(0, 2**32))
def test_every_session_gets_what_it_would_get_alone(jittery, scripts, seed) -> None:
    c, jitter = jittery
    jitter.seed(seed)
    with c.backend.lease(HEAD) as session:
        session.sync(HEAD)

    def run(script: Sequence[tuple[str, int, list[int]]]) -> None:
        with c.backend.lease([]) as session:
            session.close()
            play(session, [("sync", len(HEAD), [1, 2]), *script])

    for running in [Background(lambda script=script: run(script)) for script in scripts]:
        running.result()


def test_of_a_session_that_is_evaluating_only_complete_rows_are_copied() -> None:
    reached, resume = threading.Event(), threading.Event()
    stages: list[FakeRunner] = []

    def before(work: ForwardRequest) -> None:
        if work.hidden is not None and work.pos0 == 80 and not resume.is_set():
            reached.set()
            assert resume.wait(DEADLINE)
        if work.hidden is None and work.session == other.session_id:
            wait_until(lambda: stages[1].forked == [80], "the second stage has copied it")

    with (
        cluster(["0-2", "3-5"], n_ctx=N_CTX, chunk=16, window=2, before=before) as c,
        c.backend.lease([]) as busy,
        c.backend.lease([]) as other,
    ):
        c.wait_ready()
        stages += runners(c)
        running = Background(lambda: busy.sync(FIRST))
        assert reached.wait(DEADLINE)
        wait_until(lambda: len(busy.tokens) == 80, "what is done is known")
        asking = Background(lambda: other.sync(SECOND))
        wait_until(lambda: stages[0].forked == [80], "it is copied while the other one goes on")
        resume.set()
        np.testing.assert_array_equal(running.result().logits, reference_logits(FIRST))
        result = asking.result()
        np.testing.assert_array_equal(result.logits, reference_logits(SECOND))
        assert result.n_cached == 80


# --- a real model --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return endless_toy(tmp_path_factory.mktemp("sharing") / "toy.gguf", n_ctx=512)


@contextmanager
def node(toy: Path, cuts: Sequence[str], n_sessions: int, *, own: str | None) -> Iterator[Node]:
    """A coordinator and its workers in this process."""
    with ExitStack() as stack:
        served = [
            stack.enter_context(
                open_worker(
                    engine(toy, n_slots=n_sessions),
                    WorkerConfig(layers=LayerSpec.parse(layers), listen=ANY_PORT),
                    SOCKETS,
                )
            )
            for layers in cuts
        ]
        config = CoordinatorConfig(
            route=route(*served),
            n_sessions=n_sessions,
            prefill=PrefillTuning(chunk=32),
            layers=None if own is None else LayerSpec.parse(own),
        )
        listeners = stack.enter_context(open_listeners(config, None, SOCKETS))
        built = stack.enter_context(open_node(engine(toy, n_slots=n_sessions), config, SOCKETS))
        stack.enter_context(join_cluster(built, listeners))
        wait_until(lambda: built.backend.health().ready, "the route is complete")
        yield built


SYSTEM = [3 + (7 * k * k + k) % 250 for k in range(200)]


def greedy(session: Session, prompt: Sequence[int], n_tokens: int) -> tuple[list[int], int]:
    synced = session.sync(prompt)
    answer = [int(np.argmax(synced.logits))]
    while len(answer) < n_tokens:
        answer.append(int(np.argmax(session.eval(answer[-1]))))
    return answer, synced.n_cached


@pytest.mark.parametrize(
    ("cuts", "own"), [(["0-2", "3:output"], None), (["3:output"], "0-2"), ([], "0:output")]
)
def test_sessions_of_a_real_model_say_what_each_would_say_alone(toy: Path, cuts, own) -> None:
    """Float32; the heads come from a session that decodes, and from each other."""
    prompts = [[*SYSTEM, *(5 + (11 * k + n) % 240 for k in range(10 + 9 * n))] for n in range(4)]
    alone = Alone(toy)
    expected = [alone.greedy(prompt, 20) for prompt in prompts]
    alone.close()
    with node(toy, cuts, 4, own=own) as built:
        with built.backend.lease(prompts[0]) as first:
            assert greedy(first, prompts[0], 20) == (expected[0], 0)

            def run(prompt: Sequence[int]) -> tuple[list[int], int]:
                with built.backend.lease(prompt) as session:
                    return greedy(session, prompt, 20)

            calls = [Background(lambda p=prompt: run(p)) for prompt in prompts[1:]]
            answers = [call.result() for call in calls]
        assert [answer for answer, _ in answers] == expected[1:]
        if len(cuts) < 2:  # the notice and the spans come over one connection
            assert [n_cached for _, n_cached in answers] == [len(SYSTEM)] * 3


# --- when it cannot be --------------------------------------------------------------------------


def older(worker: Worker) -> None:
    """Let a worker be a ds4py of before there were copies: it says so, and takes none."""
    hello = worker._context.hello
    features = tuple(word for word in hello.features if word != FORK)
    hello = msgspec.structs.replace(hello, features=features)
    worker._context = replace(worker._context, hello=hello)


@contextmanager
def two_stages(kinds: Sequence[str]) -> Iterator[tuple[Coordinator, list[FakeRunner]]]:
    """A coordinator and two workers, each "ds4py", "older" or "plain"."""
    with ExitStack() as stack:
        entries, fakes = [], []
        for kind, cut in zip(kinds, ("0-2", "3:output"), strict=True):
            fakes.append(FakeRunner(span(cut), n_ctx=N_CTX))
            worker = start_worker(fakes[-1], speaks_extensions=kind != "plain")
            stack.callback(worker.close)
            if kind == "older":
                older(worker)
            layers = LayerSpec.parse(cut) if kind == "plain" else None
            entries.append(RouteEntry(worker.address, layers))
        config = CoordinatorConfig(
            route=tuple(entries), result_timeout=DEADLINE, prefill=PrefillTuning(chunk=16)
        )
        coordinator = Coordinator(card(), N_CTX, config, SOCKETS)
        stack.callback(coordinator.close)
        coordinator.start()
        wait_until(lambda: coordinator.health().ready, "the route is complete")
        yield coordinator, fakes


@pytest.mark.parametrize(
    "kinds", [("plain", "ds4py"), ("ds4py", "plain"), ("older", "ds4py"), ("ds4py", "older")]
)
def test_with_a_stage_that_can_not_copy_nothing_is_asked(kinds: tuple[str, str]) -> None:
    with two_stages(kinds) as (coordinator, fakes):
        backend = SessionPool(coordinator, 2)
        with backend.lease(FIRST) as first, backend.lease(SECOND) as second:
            check(first, FIRST, 0)
            first_request = coordinator._context.next_request_id() + 1
            check(second, SECOND, 0)
            n_requests = coordinator._context.next_request_id() - first_request
            assert n_requests == -(-len(SECOND) // 16), "it was tried"
        assert not any(fake.forked for fake in fakes)


def test_stages_that_can_not_rewind_copy_nothing() -> None:
    with patient(2, can_rewind=False) as (c, _), c.backend.lease([]) as first:
        check(first, FIRST, 0)
        with c.backend.lease([]) as second:
            check(second, SECOND, 0)


@pytest.mark.parametrize("lost", [0, 1])
def test_what_a_lost_stage_held_is_not_asked_of_the_one_that_replaces_it(lost: int) -> None:
    with cluster(["0-2", "3-5"], n_ctx=N_CTX, n_sessions=3, chunk=16) as c:
        c.wait_ready()
        with c.backend.lease(FIRST) as first, c.backend.lease([]) as second:
            check(first, FIRST, 0)
            old = c.workers[lost]
            old.close()
            wait_until(lambda: not c.coordinator.health().ready, "the loss is known")
            c.runners[lost] = FakeRunner(c.runners[lost].layers, n_ctx=N_CTX)
            c.workers[lost] = start_worker(c.runners[lost], listen=old.address)
            c.wait_ready()
            check(second, SECOND, 0)
            assert not any(r.forked for r in runners(c))
            np.testing.assert_array_equal(first.eval(1), reference_logits([*FIRST, 1]))
        with c.backend.lease([]) as third:  # from now on it is known who holds what
            result = third.sync([*HEAD, 90, 91])
            np.testing.assert_array_equal(result.logits, reference_logits([*HEAD, 90, 91]))
        assert runners(c)[0].forked


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("local", [None, "0-1"])
def test_a_stage_that_forgot_the_head_costs_a_replay_and_nothing_else(stage, local) -> None:
    cuts = ["0-2", "3-5"] if local is None else ["2-3", "4-5"]
    with cluster(cuts, local=local, n_ctx=N_CTX, chunk=16) as c:
        c.wait_ready()
        with c.backend.lease([]) as first, c.backend.lease([]) as second:
            check(first, FIRST, 0)
            forgetful = c.workers[stage].stage
            forgetful.end(first.session_id)
            wait_until(lambda: not len(forgetful.sessions), "it is forgotten")
            check(second, SECOND, 0)
            assert not c.runners[stage].forked
            np.testing.assert_array_equal(second.eval(9), reference_logits([*SECOND, 9]))
            np.testing.assert_array_equal(first.eval(9), reference_logits([*FIRST, 9]))


def test_a_notice_that_comes_too_late_for_the_replay_too_fails_no_request() -> None:
    """First it is missing, then it replaces what the replay has done: here, by nothing."""
    stages: list[Worker] = []
    n_disturbed = 0

    def before(work: ForwardRequest) -> None:
        nonlocal n_disturbed
        if work.session == second.session_id and work.pos0 == 48 and not n_disturbed:
            n_disturbed += 1
            for stage in stages:
                stage.stage.end(second.session_id)

    with cluster(["0-2", "3-5"], n_ctx=N_CTX, chunk=16, before=before) as c:
        c.wait_ready()
        with c.backend.lease([]) as first, c.backend.lease([]) as second:
            check(first, FIRST, 0)
            stages += c.workers
            c.workers[1].stage.end(first.session_id)
            check(second, SECOND, 0)
            assert n_disturbed == 1
