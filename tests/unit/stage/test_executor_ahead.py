"""A device that is given a chunk while it computes the one before it: what overlaps, what waits."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ds4py.contracts import ForwardOutput, ForwardRequest, ModelRunner, OutputKind, SessionId
from ds4py.errors import CancelledError, CapacityError, ClusterError, Ds4Error
from ds4py.stage.executor import DeviceThread, wait_for
from tests.clusters import span, wait_until
from tests.fake_runner import FakeRunner
from tests.sockets import Background

CHUNK = 2


class Arrivals:
    """The answers of a device, each let go by hand; `awaited` names those that were asked for."""

    def __init__(self) -> None:
        self.awaited: list[tuple[int, int]] = []
        self._gates: defaultdict[tuple[int, int], threading.Event] = defaultdict(threading.Event)

    def __call__(self, work: ForwardRequest) -> None:
        place = int(work.session), work.pos0
        self.awaited.append(place)
        assert self._gates[place].wait(20)

    def let_go(self, session: int, pos0: int) -> None:
        self._gates[session, pos0].set()


class Span:
    """One chunk as `executor.DeviceJob`, whose steps a scene takes note of."""

    def __init__(self, scene: Scene, work: ForwardRequest, refusal: Ds4Error | None):
        self.session, self.is_decode = work.session, len(work.tokens) == 1
        self._scene, self._work, self._refusal = scene, work, refusal

    def admit(self) -> ForwardRequest:
        if self._refusal is not None:
            raise self._refusal
        return self._work

    def started(self) -> None:
        self._scene.queued.append((self.session, self._work.pos0))

    def finish(self, result: ForwardOutput | Ds4Error) -> None:
        self._scene.told.append((self.session, self._work.pos0, result))


class Scene:
    """A device with what it has told, in order.

    Args:
        device: Busy with nothing until `begin`.
        begin: Lets it look at what has been submitted.
    """

    def __init__(self, device: DeviceThread, runner: FakeRunner, begin: Callable[[], None]):
        self.device, self.runner, self.begin = device, runner, begin
        self.queued: list[tuple[int, int]] = []
        self.told: list[tuple[int, int, ForwardOutput | Ds4Error]] = []

    def submit(
        self, session: int, pos0: int = 0, n: int = CHUNK, *, refusal: Ds4Error | None = None
    ) -> None:
        """Submit a span; a refusal is one at its admission."""
        work = ForwardRequest(
            session=SessionId(session),
            tokens=(1,) * n,
            pos0=pos0,
            hidden=None,
            reset=pos0 == 0,
            output_kind=OutputKind.NOTHING,
        )
        assert self.device.submit(Span(self, work, refusal)) is None

    @property
    def order(self) -> list[tuple[int, int]]:
        """Spans that were answered."""
        return [(session, pos0) for session, pos0, _ in self.told]

    def outcomes(self, n: int) -> list[ForwardOutput | Ds4Error]:
        """Wait for so many answers."""
        wait_until(lambda: len(self.told) >= n, f"{n} spans are answered")
        return [result for _, _, result in self.told]


@contextmanager
def scene(**fields: object) -> Iterator[Scene]:
    runner = FakeRunner(span("0-5"), overlaps=True, n_slots=100, **fields)  # type: ignore[arg-type]
    device = DeviceThread(runner)
    gate = threading.Event()
    device.ask(lambda _: gate.wait(20))
    try:
        yield Scene(device, runner, gate.set)
    finally:
        gate.set()
        device.close()


def refuse(session: int, pos0: int, error: Exception) -> Callable[[ForwardRequest], None]:
    """Raise for one span."""

    def step(work: ForwardRequest) -> None:
        if (work.session, work.pos0) == (session, pos0):
            raise error

    return step


def test_the_next_chunk_of_a_session_is_started_before_the_answer_to_the_one_before_it() -> None:
    arrivals = Arrivals()
    with scene(arrive=arrivals) as s:
        for pos0 in (0, 2, 4):
            s.submit(1, pos0)
        s.begin()
        wait_until(lambda: arrivals.awaited == [(1, 0)], "the first answer is waited for")
        assert (s.queued, s.told) == ([(1, 0), (1, 2)], [])
        assert s.runner.evaluated == [(0, 2), (2, 2)], "one is ahead, and no more"
        arrivals.let_go(1, 0)
        wait_until(lambda: arrivals.awaited == [(1, 0), (1, 2)], "the second one is waited for")
        assert (s.queued[2:], s.order) == ([(1, 4)], [(1, 0)])
        arrivals.let_go(1, 2)
        arrivals.let_go(1, 4)
        assert all(isinstance(result, ForwardOutput) for result in s.outcomes(3))
        assert s.order == [(1, 0), (1, 2), (1, 4)]


def test_a_chunk_that_comes_while_another_one_is_computed_is_started_behind_it() -> None:
    arrivals, computed = Arrivals(), threading.Event()
    with scene(arrive=arrivals, ready=lambda _: computed.is_set()) as s:
        s.submit(1)
        s.begin()
        wait_until(lambda: s.queued == [(1, 0)], "the first one is started")
        s.submit(1, 2)
        wait_until(lambda: s.queued == [(1, 0), (1, 2)], "the second one is started")
        arrivals.let_go(1, 0)
        s.outcomes(1)
        assert arrivals.awaited == [(1, 0)]
        arrivals.let_go(1, 2)
        computed.set()
        assert all(isinstance(result, ForwardOutput) for result in s.outcomes(2))


@pytest.mark.parametrize("comes", ["a token", "a call", "the end"])
def test_what_comes_while_a_chunk_is_computed_finds_it_delivered(comes: str) -> None:
    arrivals = Arrivals()
    arrivals.let_go(1, 0)
    seen: list[list[tuple[int, int]]] = []
    with scene(arrive=arrivals, ready=lambda _: False) as s:
        s.submit(1)
        s.begin()
        wait_until(lambda: s.queued == [(1, 0)], "it is started")
        assert s.told == []
        if comes == "a token":
            s.submit(2, n=1)
            s.outcomes(2)
            assert s.order == [(1, 0), (2, 0)]
        elif comes == "a call":
            wait_for(s.device.ask(lambda _: seen.append(list(s.order))), 20)
            assert seen == [[(1, 0)]]
        else:
            s.device.close()
            assert s.order == [(1, 0)]


def test_a_device_that_can_not_say_whether_it_is_done_is_asked_for_the_answer() -> None:
    def ready(_: ForwardRequest) -> bool:
        raise ZeroDivisionError

    with scene(ready=ready) as s:
        s.submit(1)
        s.begin()
        assert isinstance(s.outcomes(1)[0], ForwardOutput)


def test_chunks_of_several_sessions_are_answered_in_the_order_of_their_starts() -> None:
    with scene() as s:
        for session in (1, 2, 3):
            for pos0 in (0, 2):
                s.submit(session, pos0)
        s.begin()
        s.outcomes(6)
        assert s.order == s.queued == [(1, 0), (2, 0), (3, 0), (1, 2), (2, 2), (3, 2)]


def test_a_span_that_the_runner_refuses_does_not_count_and_keeps_its_place() -> None:
    arrivals = Arrivals()
    full = CapacityError("rows", needed=2, available=1)
    with scene(arrive=arrivals, before=refuse(2, 0, full)) as s:
        for session in (1, 2, 3):
            s.submit(session)
        s.begin()
        wait_until(lambda: arrivals.awaited == [(1, 0)], "the first answer is waited for")
        assert s.told == []
        for session in (1, 3):
            arrivals.let_go(session, 0)
        assert s.outcomes(3)[1] is full
        assert s.order == [(1, 0), (2, 0), (3, 0)]
        assert s.queued == [(1, 0), (3, 0)]


@pytest.mark.parametrize("error", [CancelledError("cancelled"), ClusterError("whatever")])
def test_a_refusal_at_the_admission_is_told_after_the_chunk_before_it(error: Ds4Error) -> None:
    with scene() as s:
        s.submit(1)
        s.submit(1, 2, refusal=error)
        s.submit(1, 2)
        s.begin()
        first, refused, last = s.outcomes(3)
        assert refused is error
        assert isinstance(first, ForwardOutput)
        assert isinstance(last, ForwardOutput)


@pytest.mark.parametrize(
    "error", [ClusterError("no memory"), CapacityError("rows", needed=2, available=1)]
)
def test_a_span_that_fails_on_the_device_disturbs_no_other_session(error: Ds4Error) -> None:
    with scene(arrive=refuse(1, 0, error)) as s:
        s.submit(1)
        s.submit(2)
        s.begin()
        failed, fine = s.outcomes(2)
        assert failed is error
        assert isinstance(fine, ForwardOutput)
        assert s.queued == [(1, 0), (2, 0)]


def test_a_device_that_breaks_while_it_starts_or_computes_answers_both_in_order() -> None:
    """What is ahead and what is computed can both break, each with its own words."""
    with scene(
        before=refuse(2, 0, ZeroDivisionError("at the start")),
        arrive=refuse(1, 0, ZeroDivisionError("on the device")),
    ) as s:
        s.submit(1)
        s.submit(2)
        s.submit(3)
        s.begin()
        computed, started, fine = s.outcomes(3)
        assert "on the device" in str(computed)
        assert "at the start" in str(started)
        assert isinstance(fine, ForwardOutput)
        assert s.order == [(1, 0), (2, 0), (3, 0)]
        assert s.queued == [(1, 0), (3, 0)]


def test_a_receiver_that_fails_to_take_note_does_not_end_the_device() -> None:
    class Forgetful(Span):
        def started(self) -> None:
            raise ZeroDivisionError

    with scene() as s:
        work = ForwardRequest(session=SessionId(1), tokens=(1, 1), pos0=0, hidden=None, reset=True)
        s.device.submit(Forgetful(s, work, None))
        s.submit(2)
        s.begin()
        assert all(isinstance(result, ForwardOutput) for result in s.outcomes(2))


@pytest.mark.parametrize("about", [None, 1, 2])
def test_a_call_finds_everything_delivered(about: int | None) -> None:
    """Whatever it is about: a copy may come from any session, and room from all of them."""
    arrivals = Arrivals()
    seen: list[list[tuple[int, int]]] = []
    with scene(arrive=arrivals) as s:
        s.submit(1)
        s.submit(2)

        def look(_: ModelRunner) -> None:
            seen.append(list(s.order))

        s.begin()
        wait_until(lambda: len(arrivals.awaited) == 1, "the first answer is waited for")
        s.device.ask(look, session=None if about is None else SessionId(about))
        s.submit(2, 2)
        for session, pos0 in ((1, 0), (2, 0), (2, 2)):
            arrivals.let_go(session, pos0)
        s.outcomes(3)
    assert seen == [[(1, 0), (2, 0)]]


def test_a_chunk_is_delivered_before_a_token_is_computed() -> None:
    arrivals = Arrivals()
    with scene(arrive=arrivals) as s:
        s.submit(1)
        s.begin()
        wait_until(lambda: arrivals.awaited == [(1, 0)], "the chunk is waited for")
        s.submit(2, n=1)
        assert s.runner.evaluated == [(0, 2)]
        arrivals.let_go(1, 0)
        s.outcomes(2)
        assert s.order == [(1, 0), (2, 0)]


def test_while_another_session_decodes_no_chunk_is_ahead() -> None:
    """Or its next token would wait for two of them."""
    arrivals = Arrivals()
    with scene(arrive=arrivals) as s:
        s.submit(9, n=1)
        for pos0 in (0, 2, 4):
            s.submit(1, pos0)
        s.begin()
        wait_until(lambda: arrivals.awaited == [(1, 0)], "the first chunk is waited for")
        assert s.queued == [(9, 0), (1, 0)]
        s.submit(9, 1, n=1)
        for pos0 in (0, 2, 4):
            arrivals.let_go(1, pos0)
        s.outcomes(5)
        assert s.queued == [(9, 0), (1, 0), (9, 1), (1, 2), (1, 4)]


def test_a_session_that_has_decoded_itself_has_its_next_chunk_ahead() -> None:
    arrivals = Arrivals()
    with scene(arrive=arrivals) as s:
        s.submit(1, n=1)
        for pos0 in (1, 3):
            s.submit(1, pos0)
        s.begin()
        wait_until(lambda: arrivals.awaited == [(1, 1)], "the first chunk is waited for")
        assert s.queued == [(1, 0), (1, 1), (1, 3)]
        for pos0 in (1, 3):
            arrivals.let_go(1, pos0)
        s.outcomes(3)


def test_close_delivers_what_was_started_refuses_what_waits_and_then_frees_the_device() -> None:
    arrivals = Arrivals()
    with scene(arrive=arrivals) as s:
        for pos0 in (0, 2, 4):
            s.submit(1, pos0)
        s.begin()
        wait_until(lambda: arrivals.awaited == [(1, 0)], "the first answer is waited for")
        closing = Background(s.device.close)
        wait_until(lambda: s.device._closed, "close has begun")
        assert not s.runner.closed
        for pos0 in (0, 2):
            arrivals.let_go(1, pos0)
        closing.result()
        *delivered, refused = s.outcomes(3)
        assert all(isinstance(result, ForwardOutput) for result in delivered)
        assert "shutting down" in str(refused)
        assert s.runner.closed


def test_a_runner_that_does_not_overlap_is_asked_as_ever() -> None:
    """Its `start` is not for use: the fake one would say so."""
    device = DeviceThread(FakeRunner(span("0-5")))
    s = Scene(device, device.runner, lambda: None)  # type: ignore[arg-type]
    for pos0 in (0, 2, 4):
        s.submit(1, pos0)
    assert all(isinstance(result, ForwardOutput) for result in s.outcomes(3))
    assert s.queued == s.order == [(1, 0), (1, 2), (1, 4)]
    device.close()
