"""Workers and coordinators whose device is given spans ahead: timelines, failures, cancellation."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds4py.config import (
    CoordinatorConfig,
    EngineConfig,
    PrefillTuning,
    RouteEntry,
    WorkerTuning,
)
from ds4py.contracts import (
    ForwardOutput,
    ForwardRequest,
    ModelRunner,
    OutputKind,
    Session,
    SessionId,
)
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.session_pool import SessionPool
from ds4py.engine import LocalRunner, open_runner
from ds4py.engine.host_staging import PinnedPool, StreamStaging
from ds4py.errors import CancelledError, CapacityError, ClusterError
from ds4py.layer_range import LayerSpec
from ds4py.stage.executor import wait_for
from ds4py.wire.extensions import Fork
from ds4py.wire.messages import Work
from ds4py.wire.prefix_hash import prefix_hash
from ds4py.worker.worker import Worker
from tests.clusters import SOCKETS, span, start_worker, wait_until
from tests.fake_runner import FakeRunner, reference_logits
from tests.peers import Driver, driver, entry
from tests.toys import toy_llama
from tests.unit.peer.extended import greet

PROMPT = [5, 80, 3, 3, 41, 9, 77, 12]
WHOLE = span("0-5")
ROOMY = WorkerTuning(prefetch_depth=32)
BROKEN = ClusterError("the device has lost it")


def nothing(work: ForwardRequest) -> None:
    """Neither block nor raise."""


class Driven(NamedTuple):
    """A worker, its slice, and a ds4py coordinator that drives it by hand."""

    worker: Worker
    runner: FakeRunner
    driver: Driver

    def together(self, send: Callable[[], object], n_items: int) -> None:
        """Send what makes so many items for the device, and let it look only when all are there."""
        device = self.worker.stage.device
        entered, gate = threading.Event(), threading.Event()
        device.ask(lambda _: (entered.set(), gate.wait(20)))
        assert entered.wait(20)
        try:
            send()
            wait_until(lambda: len(device._queue) == n_items, "all of it is queued")
        finally:
            gate.set()

    def timeline(self, session: int) -> tuple[list[int], bool] | None:
        """Return a session's tokens and whether they are there."""
        device = self.worker.stage.device
        cached = wait_for(
            device.ask(lambda _: self.worker.stage.sessions.get(SessionId(session))), 20
        )
        return None if cached is None else (cached.tokens, cached.valid)


@contextmanager
def driven(**fields: object) -> Iterator[Driven]:
    runner = FakeRunner(WHOLE, **({"overlaps": True} | fields))  # type: ignore[arg-type]
    worker = start_worker(runner, tuning=ROOMY)
    try:
        with driver(worker.address, entry(WHOLE)) as d:
            greet(d.connection)
            yield Driven(worker, runner, d)
    finally:
        worker.close()


def waits_for(event: threading.Event) -> Callable[[ForwardRequest], None]:
    """Block before a span."""

    def before(_: ForwardRequest) -> None:
        assert event.wait(20)

    return before


def fails_at(pos0: int) -> Callable[[ForwardRequest], None]:
    """Lose a span on the device."""

    def arrive(work: ForwardRequest) -> None:
        if work.pos0 == pos0:
            raise BROKEN

    return arrive


def chunks(tokens: Sequence[int], size: int = 2) -> list[tuple[list[int], list[int]]]:
    """Return (tokens before, tokens) of each chunk."""
    return [(list(tokens[:n]), list(tokens[n : n + size])) for n in range(0, len(tokens), size)]


# --- a worker -------------------------------------------------------------------------------------


def test_chunks_of_one_prompt_are_admitted_one_behind_the_other() -> None:
    with driven() as w:
        parts = chunks(PROMPT)
        w.together(lambda: [w.driver.ask(*part) for part in parts], len(parts))
        answers = [w.driver.answer() for _ in parts]
        assert [answer.status for answer in answers] == [0] * len(parts)
        logits = np.frombuffer(answers[-1].payload, "<f4")
        np.testing.assert_array_equal(logits, reference_logits(PROMPT))
        assert w.timeline(1) == (PROMPT, True)


def test_spans_behind_one_that_failed_on_the_device_fail_too_and_only_a_reset_goes_on() -> None:
    with driven(arrive=fails_at(2)) as w:
        parts = chunks(PROMPT)
        w.together(lambda: [w.driver.ask(*part) for part in parts], len(parts))
        good, *failed = [w.driver.answer() for _ in parts]
        assert good.status == 0
        assert failed[0].text == str(BROKEN)
        assert "an earlier span of the session failed" in failed[1].text
        assert "mismatch" in failed[2].text, "it was admitted when the failure was known"
        assert w.timeline(1) == (PROMPT[:2], False)
        assert "reset" in w.driver.refused(PROMPT[:2], PROMPT[2:4])
        w.driver.check([], PROMPT)
        assert w.timeline(1) == (PROMPT, True)


def test_a_session_that_begins_anew_behind_a_span_that_fails_is_not_disturbed() -> None:
    with driven(arrive=fails_at(2)) as w:
        w.driver.check([], PROMPT[:2])
        w.together(lambda: [w.driver.ask(PROMPT[:2], [7, 8]), w.driver.ask([], PROMPT[:5])], 2)
        failed, again = w.driver.answer(), w.driver.answer()
        assert (failed.text, again.status) == (str(BROKEN), 0)
        assert w.timeline(1) == (PROMPT[:5], True)
        result = w.driver.check(PROMPT[:5], PROMPT[5:])
        logits = np.frombuffer(result.payload, "<f4")
        np.testing.assert_array_equal(logits, reference_logits(PROMPT))


def test_a_first_span_that_failed_is_admitted_again_without_a_reset() -> None:
    """docs/spec/wire-protocol.md#evaluation-checks, as if the failure had come at once."""
    once = iter([BROKEN])

    def arrive(_: ForwardRequest) -> None:
        if (error := next(once, None)) is not None:
            raise error

    with driven(arrive=arrive) as w:
        assert w.driver.refused([], PROMPT, reset=False) == str(BROKEN)
        w.driver.check([], PROMPT, reset=False)
        assert w.timeline(1) == (PROMPT, True)


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_is_made_of_what_was_delivered(fails: bool) -> None:
    """The head of a session is not given to another one before it is known to be there."""
    with driven(arrive=fails_at(0) if fails else nothing, ready=lambda work: work.pos0 > 0) as w:
        w.driver.ask([], PROMPT)
        wait_until(lambda: w.runner.evaluated == [(0, 8)], "it is on its way")
        w.driver.connection.send(Fork(1, 2, 4, prefix_hash(PROMPT[:4])).encode())
        w.driver.ask(PROMPT[:4], [50, 51], session=2)
        assert [w.driver.answer().status for _ in range(2)] == [int(fails)] * 2
        assert w.runner.forked == ([] if fails else [4])


# --- any interleaving is as one span after the other --------------------------------------------

REFUSED, FAILING = 90, 91


class Step(NamedTuple):
    """A span as an honest or a confused coordinator sends it.

    Args:
        session: 0 to 2.
        tokens: With `REFUSED` the runner refuses them, with `FAILING` the device loses them.
        start: Where it is said to go on: "end", "cut" (before the last token), "again", "wrong".
    """

    session: int
    tokens: list[int]
    start: str


STEPS = st.lists(
    st.builds(
        Step,
        st.integers(0, 2),
        st.lists(st.sampled_from([*range(24), REFUSED, FAILING]), min_size=1, max_size=3),
        st.sampled_from(["end"] * 6 + ["cut", "again", "wrong"]),
    ),
    min_size=1,
    max_size=14,
)


def hooks(*, ahead: bool) -> dict[str, Callable[[ForwardRequest], object]]:
    """Return the same troubles for a runner that gives its answers later, or at once."""

    def fail(work: ForwardRequest) -> None:
        if FAILING in work.tokens:
            raise BROKEN

    def before(work: ForwardRequest) -> None:
        if REFUSED in work.tokens:
            raise CapacityError("rows", needed=2, available=1)
        if not ahead or len(work.tokens) == 1:  # single tokens are run, not started
            fail(work)

    looks = itertools.count()
    return {"before": before, "arrive": fail, "ready": lambda _: next(looks) % 3 == 2}


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Driven, Driven, Iterator[int]]]:
    """A worker that is given spans ahead, one that is not, and numbers for sessions."""
    with ExitStack() as stack:
        ahead, plain = (
            stack.enter_context(driven(overlaps=flag, n_slots=10**6, **hooks(ahead=flag)))
            for flag in (True, False)
        )
        yield ahead, plain, itertools.count(1)


def send_all(w: Driven, steps: Sequence[Step], first: int) -> list[Work]:
    """Send spans as a coordinator does that believes in every one of them."""
    truth: dict[int, list[int]] = {}
    works = []
    for n, step in enumerate(steps):
        held = truth.get(step.session, [])
        start = {"end": len(held), "cut": max(1, len(held) - 1)}.get(step.start, 0)
        before = [89] if step.start == "wrong" else held[:start]
        more = {"session": first + step.session, "request_id": 100 * first + n}
        works.append(w.driver.ask(before, step.tokens, **more))
        if step.start != "wrong":
            truth[step.session] = [*before, *step.tokens]
    return works


def outcome(
    w: Driven, steps: Sequence[Step], first: int, n_called_off: int, *, at_once: bool
) -> tuple[list[list[tuple[int, bytes]]], list[tuple[list[int], bool] | None]]:
    """Return what each session was answered, in order, and which timelines are of use then.

    Args:
        w: The worker.
        steps: What it is sent.
        first: The first of three sessions.
        n_called_off: Steps whose spans are called off, if they are of that one.
        at_once: The device looks only when all are there.
    """
    sessions = [SessionId(first + n) for n in range(3)]
    w.worker.stage.aborted.mark(sessions[0], 100 * first + n_called_off - 1)
    if at_once:
        w.together(lambda: send_all(w, steps, first), len(steps))
    else:
        send_all(w, steps, first)
    answers = {}
    for _ in steps:
        answer = w.driver.answer()
        answers[answer.request_id] = answer
    told = []
    for session in sessions:
        own = [100 * first + n for n, step in enumerate(steps) if first + step.session == session]
        assert [request for request in answers if request in own] == own, "in order"
        told.append([(answers[n].status, bytes(answers[n].payload)) for n in own])
    lines = [w.timeline(session) for session in sessions]
    of_use = [line if line is not None and line[1] else None for line in lines]
    for session, line in zip(sessions, of_use, strict=True):
        # after a reset that came with a refused span, the cache is emptied by the next one
        assert line is None or not line[0] or w.runner.length(session) == len(line[0])
    return told, of_use


@given(STEPS, st.integers(0, 5), st.booleans())
def test_any_interleaving_ends_as_it_does_one_span_after_the_other(
    both, steps, n_called_off, at_once
) -> None:
    ahead, plain, numbers = both
    first = 3 * next(numbers)
    ends = [outcome(w, steps, first, n_called_off, at_once=at_once) for w in (ahead, plain)]
    assert ends[0] == ends[1]


# --- a coordinator with layers of its own ---------------------------------------------------------


def fakes(cuts: Sequence[str], **fields: object) -> list[FakeRunner]:
    """Return slices of the fake model that can be given spans ahead."""
    return [FakeRunner(span(cut), overlaps=True, **fields) for cut in cuts]  # type: ignore[arg-type]


@contextmanager
def own_layers(
    local: ModelRunner,
    behind: Sequence[ModelRunner] = (),
    *,
    result_timeout: float = 20,
    **prefill: object,
) -> Iterator[Session]:
    """A session over a coordinator's slice and workers behind it, in chunks of two tokens."""
    with ExitStack() as stack:
        workers = [start_worker(runner) for runner in behind]
        for worker in workers:
            stack.callback(worker.close)
        config = CoordinatorConfig(
            rejoin_timeout=20,
            result_timeout=result_timeout,
            route=tuple(RouteEntry(w.address) for w in workers),
            prefill=PrefillTuning(chunk=2, **prefill),  # type: ignore[arg-type]
        )
        coordinator = Coordinator(local.card, local.n_ctx, config, SOCKETS, local=local)
        coordinator.start()
        stack.callback(coordinator.close)
        wait_until(lambda: coordinator.health().ready, "the route is complete")
        backend = SessionPool(coordinator, 1)
        yield stack.enter_context(backend.lease(PROMPT))


@pytest.mark.parametrize(("layers", "cuts"), [("0-5", []), ("0-1", ["2-3", "4-5"])])
def test_own_layers_are_given_the_next_chunk_while_the_one_before_it_is_computed(
    layers, cuts
) -> None:
    seen: list[int] = []

    def more(work: ForwardRequest) -> bool:
        return len(local.evaluated) > min(work.pos0 // 2 + 1, 3)

    local = FakeRunner(
        span(layers),
        overlaps=True,
        ready=more,
        arrive=lambda _: seen.append(len(local.evaluated)),
    )
    with own_layers(local, fakes(cuts)) as session:
        logits = session.sync(PROMPT).logits
        np.testing.assert_array_equal(logits, reference_logits(PROMPT))
        np.testing.assert_array_equal(session.eval(7), reference_logits([*PROMPT, 7]))
    assert seen == [2, 3, 4, 4]


def test_own_layers_are_not_ahead_where_nothing_is_to_overlap() -> None:
    seen: list[int] = []
    local = FakeRunner(
        span("0-1"), overlaps=True, arrive=lambda _: seen.append(len(local.evaluated))
    )
    with own_layers(local, fakes(["2-5"]), pipeline=False) as session:
        session.sync(PROMPT)
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize("can_rewind", [True, False])
@pytest.mark.parametrize(("layers", "cuts"), [("0-5", []), ("0-1", ["2-5"])])
def test_after_a_cancellation_what_is_done_is_kept_though_own_layers_were_ahead(
    layers, cuts, can_rewind
) -> None:
    """Layers that cannot be cut back keep what they were given, so all others follow."""
    gone = threading.Event()

    def ready(work: ForwardRequest) -> bool:
        return work.pos0 != 2 or len(local.evaluated) == 3

    def arrive(work: ForwardRequest) -> None:
        if work.pos0 == 2:
            gone.set()

    local = FakeRunner(
        span(layers), overlaps=True, can_rewind=can_rewind, ready=ready, arrive=arrive
    )
    others = fakes(cuts, can_rewind=can_rewind)
    with own_layers(local, others) as session:
        with pytest.raises(CancelledError):
            session.sync(PROMPT, cancelled=gone.is_set)
        n_kept = len(session.tokens)
        assert n_kept <= 4 if can_rewind else n_kept == 6
        result = session.sync(PROMPT)
        np.testing.assert_array_equal(result.logits, reference_logits(PROMPT))
        assert result.n_cached == n_kept
        assert session._source.health().replays == 0  # type: ignore[attr-defined]


def test_a_span_ahead_is_left_out_when_nobody_waits_for_it_any_more() -> None:
    resume = threading.Event()
    local = FakeRunner(WHOLE, overlaps=True, before=waits_for(resume))
    with own_layers(local, result_timeout=0.05) as session:
        try:
            with pytest.raises(ClusterError, match="no answer within"):
                session.sync(PROMPT)
        finally:
            resume.set()
        device = session._source.local.device  # type: ignore[attr-defined]
        wait_for(device.ask(lambda _: None, session=session.session_id), 20)  # type: ignore[attr-defined]
        assert local.evaluated == [(0, 2)]


def test_a_prompt_is_evaluated_anew_after_own_layers_failed_on_the_device() -> None:
    broken = [BROKEN]

    def arrive(work: ForwardRequest) -> None:
        if work.pos0 == 2 and broken:
            raise broken.pop()

    local = FakeRunner(span("0-1"), overlaps=True, arrive=arrive)
    with own_layers(local, fakes(["2-5"])) as session:
        with pytest.raises(ClusterError, match="has lost it"):
            session.sync(PROMPT)
        logits = session.sync(PROMPT).logits
        np.testing.assert_array_equal(logits, reference_logits(PROMPT))


def test_real_slices_that_are_given_spans_ahead_say_what_one_process_says(tmp_path) -> None:
    """Their copies go over streams, which do everything at once here, where there is no GPU."""
    config = EngineConfig(
        model=toy_llama(tmp_path / "m.gguf", n_layers=3), precision="f32", threads=1, n_slots=2
    )
    plain = open_runner(config)
    device = torch.device("cpu")

    def ahead(layers: str) -> LocalRunner:
        runner = open_runner(config, LayerSpec.parse(layers))
        memory = PinnedPool(1 << 20, lambda n: torch.empty(n, dtype=torch.uint8))
        runner._staging = StreamStaging(device, memory)
        return runner

    for before, tokens in chunks(PROMPT):
        work = ForwardRequest(
            session=SessionId(1),
            tokens=tuple(tokens),
            pos0=len(before),
            hidden=None,
            output_kind=OutputKind.LOGITS,
        )
        (alone,) = plain.run([work])
    assert isinstance(alone, ForwardOutput)
    with own_layers(ahead("0:0"), [ahead("1:1"), ahead("2:output")]) as session:
        np.testing.assert_array_equal(session.sync(PROMPT).logits, alone.logits)
