"""Many sessions over one route: each gets the tokens of a solo run, and nobody waits for long.

What is counted here, not timed: how many chunks of somebody's prompt a stage begins while a token
waits for it. Whose turn it is at one device: `unit/stage/test_scheduler`; the second connection and
its losses: `unit/coordinator/relay/test_hop_channels`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4py.config import CoordinatorConfig, PrefillTuning, WorkerConfig, WorkerTuning
from ds4py.contracts import ForwardRequest, Session
from ds4py.layer_range import LayerSpec
from ds4py.runtime import Node, join_cluster, open_listeners, open_node, open_worker
from ds4py.stage.executor import DeviceThread
from tests.clusters import ANY_PORT, DEADLINE, Cluster, cluster, start_worker, wait_until
from tests.e2e.support import SOCKETS, Alone, endless_toy, engine, route
from tests.fake_runner import FakeRunner, reference_logits
from tests.sockets import Background

ROUTES: dict[int, tuple[list[str], str | None]] = {
    0: ([], "0-5"),
    1: (["0-5"], None),
    2: (["0-2", "3-5"], None),
    3: (["1-2", "3-4", "5-5"], "0-0"),
}
N_SESSIONS = 4


# --- exact in any interleaving -------------------------------------------------------------------


class Jitter:
    """Lets stages dawdle now and then, differently for each seed: other interleavings."""

    def __init__(self) -> None:
        self._dice = random.Random()

    def seed(self, seed: int) -> None:
        self._dice.seed(seed)

    def __call__(self, _: ForwardRequest) -> None:
        time.sleep(self._dice.choice((0, 0, 0.0005, 0.002)))


@pytest.fixture(
    scope="module",
    params=[(hops, batching) for hops in ROUTES for batching in (True, False)],
    ids=lambda p: f"{p[0]} hops, {'batches' if p[1] else 'one by one'}",
)
def jittery(request: pytest.FixtureRequest) -> Iterator[tuple[Cluster, Jitter]]:
    (hops, batching), jitter = request.param, Jitter()
    cuts, local = ROUTES[hops]
    with cluster(
        cuts,
        local=local,
        n_sessions=N_SESSIONS,
        config=CoordinatorConfig(
            batching=batching, rejoin_timeout=DEADLINE, result_timeout=DEADLINE
        ),
        tuning=WorkerTuning(batching=batching),
        before=jitter,
        chunk=3,
    ) as c:
        c.wait_ready()
        yield c, jitter


STEP = st.one_of(
    st.tuples(st.just("sync"), st.lists(st.integers(0, 96), min_size=1, max_size=14)),
    st.tuples(st.just("extend"), st.lists(st.integers(0, 96), min_size=1, max_size=8)),
    st.tuples(st.just("decode"), st.lists(st.integers(0, 96), min_size=1, max_size=5)),
    st.tuples(st.just("rewind"), st.integers(1, 6)),
)
SCRIPTS = st.lists(st.lists(STEP, min_size=1, max_size=6), min_size=2, max_size=N_SESSIONS)


def play(session: Session, script: Sequence[tuple[str, list[int] | int]]) -> None:
    """Do as a script says; after each step the logits are those of one process."""
    line: list[int] = []
    for what, value in script:
        if what == "rewind" or isinstance(value, int):
            assert isinstance(value, int)
            line = line[: max(1, len(line) - value)]
            session.rewind(len(line))
            continue
        if what == "decode" and line:
            for token in value:
                line.append(token)
                np.testing.assert_array_equal(session.eval(token), reference_logits(line))
            continue
        line = [*line, *value] if what == "extend" else list(value)
        np.testing.assert_array_equal(session.sync(line).logits, reference_logits(line))
    assert list(session.tokens) == line or not line


@settings(max_examples=12, deadline=None)
@given(scripts=SCRIPTS, seed=st.integers(0, 2**32))
def test_every_session_gets_what_it_would_get_alone(jittery, scripts, seed) -> None:
    c, jitter = jittery
    jitter.seed(seed)

    def run(script: Sequence[tuple[str, list[int] | int]]) -> None:
        with c.backend.lease([]) as session:
            session.rewind(0)
            play(session, script)

    for running in [Background(lambda script=script: run(script)) for script in scripts]:
        running.result()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return endless_toy(tmp_path_factory.mktemp("many") / "toy.gguf", n_ctx=256)


@contextmanager
def two_workers(toy: Path, n_sessions: int) -> Iterator[Node]:
    """A coordinator over two workers in this process."""
    with ExitStack() as stack:
        served = [
            stack.enter_context(
                open_worker(
                    engine(toy, n_slots=n_sessions),
                    WorkerConfig(layers=LayerSpec.parse(layers), listen=ANY_PORT),
                    SOCKETS,
                )
            )
            for layers in ("0-2", "3:output")
        ]
        config = CoordinatorConfig(
            route=route(*served), n_sessions=n_sessions, prefill=PrefillTuning(chunk=16)
        )
        listeners = stack.enter_context(open_listeners(config, None, SOCKETS))
        built = stack.enter_context(open_node(engine(toy), config, SOCKETS))
        stack.enter_context(join_cluster(built, listeners))
        wait_until(lambda: built.backend.health().ready, "the route is complete")
        yield built


def greedy(session: Session, prompt: Sequence[int], n_tokens: int) -> list[int]:
    answer = [int(np.argmax(session.sync(prompt).logits))]
    while len(answer) < n_tokens:
        answer.append(int(np.argmax(session.eval(answer[-1]))))
    return answer


@pytest.mark.parametrize("n_sessions", [4, 8])
def test_sessions_of_a_real_model_decode_as_each_would_alone(toy: Path, n_sessions: int) -> None:
    """Float32; prompts of all lengths, so that some still come in while others decode."""
    prompts = [
        [3 + (7 * k * k + 11 * n) % 250 for k in range(9 + 20 * n)] for n in range(n_sessions)
    ]
    alone = Alone(toy)
    expected = [alone.greedy(prompt, 24) for prompt in prompts]
    alone.close()
    with two_workers(toy, n_sessions) as built:

        def run(prompt: Sequence[int]) -> list[int]:
            with built.backend.lease(prompt) as session:
                return greedy(session, prompt, 24)

        calls = [Background(lambda p=prompt: run(p)) for prompt in prompts]
        assert [call.result() for call in calls] == expected


# --- nobody waits for long -----------------------------------------------------------------------


@dataclass(frozen=True)
class Begun:
    """A span whose evaluation has begun."""

    stage: int
    session: int
    n_tokens: int


class Stages:
    """Writes down what two stages begin, and holds one of them at its next chunk."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.begun: list[Begun] = []
        self._held: int | None = None
        self._standing = False

    def __call__(self, work: ForwardRequest) -> None:
        stage = int(work.hidden is not None)
        with self._changed:
            self.begun.append(Begun(stage, work.session, len(work.tokens)))
            if stage == self._held and len(work.tokens) > 1:
                self._standing = True
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: self._held is None, DEADLINE)

    def hold(self, stage: int) -> None:
        """Return when it stands still in a chunk."""
        with self._changed:
            self._held, self._standing = stage, False
            assert self._changed.wait_for(lambda: self._standing, DEADLINE)

    def go(self) -> None:
        with self._changed:
            self._held = None
            self._changed.notify_all()

    def after(self, n: int, stage: int) -> list[Begun]:
        """What a stage began after the first `n` of all."""
        with self._changed:
            return [b for b in self.begun[n:] if b.stage == stage]


def n_queued(device: DeviceThread) -> int:
    return len(device._queue) + len(device._scheduler)


PROMPT = [(7 * k * k + k) % 97 for k in range(60)]


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("n_prompts", [1, 3])
def test_a_token_waits_for_one_more_chunk_at_most_at_each_stage(stage: int, n_prompts: int) -> None:
    """Also for the first token that meets a prompt, before there is a second connection."""
    stages = Stages()
    with ExitStack() as stack:
        c = stack.enter_context(
            cluster(["0-2", "3-5"], n_sessions=4, before=stages, chunk=2, window=6)
        )
        c.wait_ready()
        device = c.workers[stage].stage.device
        decoding = stack.enter_context(c.backend.lease([1]))
        line = [1, 2, 3]
        decoding.sync(line)
        sessions = [stack.enter_context(c.backend.lease([9])) for _ in range(n_prompts)]
        holding = Background(lambda: stages.hold(stage))
        wait_until(lambda: stages._held is not None, "the stage is to be held")
        prompts = [Background(lambda s=s: s.sync(PROMPT)) for s in sessions]
        holding.result()
        for token in (4, 5, 6):
            calm = settled(lambda: n_queued(device))
            asking = Background(lambda token=token: decoding.eval(token))
            wait_until(lambda calm=calm: n_queued(device) > calm, "the token waits with the chunks")
            before = len(stages.begun)
            stages.go()
            line.append(token)
            np.testing.assert_array_equal(asking.result(), reference_logits(line))
            begun = [span.n_tokens for span in stages.after(before, stage)]
            assert begun.index(1) <= 1, f"it began {begun}"
            if token < 6:
                stages.hold(stage)
        for call, _ in zip(prompts, sessions, strict=True):
            np.testing.assert_array_equal(call.result().logits, reference_logits(PROMPT))


def settled(count: Callable[[], int]) -> int:
    """Wait until nothing more arrives; how many there are."""
    same, last = 0, count()
    while same < 10:
        time.sleep(0.005)
        now = count()
        same, last = (same + 1, last) if now == last else (0, now)
    return last


def test_tokens_that_wait_together_are_one_batch_at_every_stage() -> None:
    """More of them than the chunks that a stage reads ahead."""
    stages = Stages()
    with ExitStack() as stack:
        c = stack.enter_context(cluster(["0-2", "3-5"], n_sessions=4, before=stages, chunk=2))
        c.wait_ready()
        prompt = stack.enter_context(c.backend.lease([9]))
        sessions = [stack.enter_context(c.backend.lease([n])) for n in range(3)]
        lines = [[n, n + 1] for n in range(3)]
        for session, line in zip(sessions, lines, strict=True):
            session.sync(line)
        holding = Background(lambda: stages.hold(0))
        wait_until(lambda: stages._held is not None, "the stage is to be held")
        long = Background(lambda: prompt.sync(PROMPT))
        holding.result()
        device = c.workers[0].stage.device
        calm = settled(lambda: n_queued(device))
        asking = [Background(lambda s=s: s.eval(50)) for s in sessions]
        wait_until(lambda: n_queued(device) == calm + 3, "all three wait")
        stages.go()
        for call, line in zip(asking, lines, strict=True):
            np.testing.assert_array_equal(call.result(), reference_logits([*line, 50]))
        long.result()
        assert max(c.runners[0].batches) == 3


def test_sessions_fill_different_stages_at_the_same_time() -> None:
    """While the last stage is busy with one session's token, the first evaluates another's."""
    held, reached = threading.Event(), threading.Event()

    def hold(work: ForwardRequest) -> None:
        if work.hidden is not None and work.tokens == (50,):
            reached.set()
            assert held.wait(DEADLINE)

    with cluster(["0-2", "3-5"], before=hold) as c:
        c.wait_ready()
        with c.backend.lease([1]) as first, c.backend.lease([2]) as second:
            first.sync([1, 2])
            second.sync([3, 4])
            asking = Background(lambda: first.eval(50))
            assert reached.wait(DEADLINE)
            n_before = len(c.runners[0].evaluated)
            other = Background(lambda: second.eval(51))
            wait_until(lambda: len(c.runners[0].evaluated) > n_before, "the first stage goes on")
            assert not asking.done
            held.set()
            np.testing.assert_array_equal(asking.result(), reference_logits([1, 2, 50]))
            np.testing.assert_array_equal(other.result(), reference_logits([3, 4, 51]))


# --- and after losses ----------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1])
def test_all_sessions_go_on_exactly_after_the_loss_of_a_stage(lost: int) -> None:
    with cluster(["0-2", "3-5"], n_sessions=N_SESSIONS, before=Jitter(), chunk=2) as c:
        c.wait_ready()
        n_done: list[int] = []

        def run(n: int) -> None:
            line = [(k * k + n) % 97 for k in range(4 + 10 * n)]
            with c.backend.lease(line) as session:
                for token in range(20):
                    logits = session.eval(line[-1]) if token else session.sync(line).logits
                    np.testing.assert_array_equal(logits, reference_logits(line))
                    n_done.append(n)
                    line.append(token)

        running = [Background(lambda n=n: run(n)) for n in range(N_SESSIONS)]
        wait_until(lambda: len(n_done) > 8, "several decode")
        old = c.workers[lost]
        old.close()
        c.workers[lost] = start_worker(FakeRunner(c.runners[lost].layers), listen=old.address)
        for call in running:
            call.result()


def test_a_second_connection_that_breaks_costs_its_session_a_replay_and_others_nothing() -> None:
    stages = Stages()
    with ExitStack() as stack:
        c = stack.enter_context(cluster(["0-2", "3-5"], n_sessions=3, before=stages, chunk=2))
        c.wait_ready()
        decoding, prompt, idle = (stack.enter_context(c.backend.lease([n])) for n in range(3))
        decoding.sync([1, 2, 3])
        idle.sync([4, 5, 6])
        holding = Background(lambda: stages.hold(0))
        wait_until(lambda: stages._held is not None, "the stage is to be held")
        long = Background(lambda: prompt.sync(PROMPT))
        holding.result()
        asking = Background(lambda: decoding.eval(7))
        (channels,) = (
            channels
            for channels in c.coordinator.workers.channels.values()
            if channels.bulk.carries_chunks
        )
        wait_until(
            lambda: bool(channels._priority and channels._priority._pending), "the token is on it"
        )
        before = c.coordinator.workers.registry.generation
        assert channels._priority is not None
        channels._priority.connection.close()
        stages.go()
        np.testing.assert_array_equal(asking.result(), reference_logits([1, 2, 3, 7]))
        np.testing.assert_array_equal(long.result().logits, reference_logits(PROMPT))
        np.testing.assert_array_equal(idle.eval(8), reference_logits([4, 5, 6, 8]))
        assert c.coordinator.workers.registry.generation == before
        chunks = [b for b in stages.begun if b.session == prompt.session_id]
        assert len(chunks) == 2 * len(PROMPT) // 2  # at two stages, each of them once
