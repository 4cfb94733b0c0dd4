"""What ds4py peers tell each other beside the spans: sessions that end, requests that are given up,
stages that are lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from ds4py.config import CoordinatorConfig
from ds4py.contracts import ForwardRequest
from ds4py.errors import CancelledError, TransportTimeoutError
from ds4py.wire.extensions import Cancel, Drop, Fork, HopLost
from ds4py.wire.frames import FrameType
from ds4py.wire.messages import encode
from ds4py.worker.forwarder import Forwarder
from tests.by_hand import QUICK, good, serve
from tests.clusters import DEADLINE, Cluster, cluster, span, start_worker, wait_until
from tests.fake_runner import FakeRunner, reference_logits
from tests.peers import dial_in, driver, entry, hello, logits_for, next_hop, take_work
from tests.sockets import Background
from tests.unit.peer.extended import extended_worker, greet, read_to_close

PROMPT = [5, 80, 3, 3, 41, 9, 77, 12, 1, 0, 96, 33, 60, 2, 8, 19, 25]
WHOLE = entry(span("0-5"))


class Gate:
    """Holds one device until it is opened."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()

    def __call__(self, work: ForwardRequest) -> None:
        self.entered.set()
        assert self.open.wait(20)


# --- a worker, and coordinators by hand ---------------------------------------------------------


def test_a_dropped_session_frees_its_slot_at_once() -> None:
    worker = start_worker(FakeRunner(span("0-5"), n_slots=1))
    with driver(worker.address, WHOLE) as d:
        greet(d.connection)
        d.check([], PROMPT, session=7)
        assert "session slots" in d.refused([], PROMPT, session=8)
        d.connection.send(Drop(9).encode())  # nobody has it
        d.connection.send(Drop(7).encode())
        d.check([], PROMPT, session=8)
        d.connection.send(Drop(8).encode())
        assert "prefix hash" in d.refused(PROMPT, [1], session=7)
        assert not worker.stage.device.runner._rows
    worker.close()


def test_a_drop_waits_for_spans_that_were_sent_before_it() -> None:
    gate = Gate()
    worker = start_worker(FakeRunner(span("0-5"), before=gate))
    with driver(worker.address, WHOLE) as d:
        greet(d.connection)
        d.ask([], [1])
        d.ask([1], [2])
        d.connection.send(Drop(1).encode())
        gate.open.set()
        assert [d.answer().status for _ in range(2)] == [0, 0]
        assert "prefix hash" in d.refused([1, 2], [3])
    worker.close()


def test_spans_that_have_not_begun_are_left_out_and_each_still_gets_its_result() -> None:
    gate = Gate()
    worker = start_worker(FakeRunner(span("0-5"), before=gate))
    with driver(worker.address, WHOLE) as d, driver(worker.address, WHOLE) as other:
        greet(d.connection)
        d.ask([], [1, 1])
        assert gate.entered.wait(20)
        d.ask([1, 1], [2, 2])
        d.ask([1, 1, 2, 2], [3, 3])
        other.ask([], [9], session=2, request_id=2)  # another session: not meant
        d.connection.send(Cancel(1, 3).encode())
        wait_until(lambda: worker.stage.aborted.covers(1, 3), "the notice was read")
        gate.open.set()
        answers = [d.answer() for _ in range(3)]
        assert [(a.request_id, a.status) for a in answers] == [(1, 0), (2, 1), (3, 1)]
        assert answers[1].text == "cancelled"
        assert other.answer().status == 0
        d.check([1, 1], [4])  # the stage stands where it was
        assert worker.stage.device.runner.evaluated == [(0, 2), (0, 1), (2, 1)]
    worker.close()


def test_a_cancel_may_come_before_the_spans_that_it_means() -> None:
    """To a later stage it comes straight from the coordinator, the spans do not."""
    worker = start_worker(FakeRunner(span("0-5")))
    with driver(worker.address, WHOLE) as control, driver(worker.address, WHOLE) as d:
        greet(control.connection)
        control.connection.send(Cancel(1, 2).encode())
        wait_until(lambda: worker.stage.aborted.covers(1, 2), "the notice was read")
        assert [d.refused([], [1]), d.refused([], [2])] == ["cancelled"] * 2
        d.check([], [3])
    worker.close()


def test_a_lost_hop_gets_no_more_patience() -> None:
    """What waits for it is answered at once; the next span dials it again."""
    worker = start_worker(FakeRunner(span("0-2")))
    with next_hop() as hop:
        hops = entry(span("0-2")), entry(span("3-5"), hop.address)
        with driver(worker.address, *hops) as d, driver(worker.address, WHOLE) as control:
            greet(control.connection)
            d.ask([], [1])
            d.ask([1], [2])
            stopped = hop.accept()
            take_work(stopped)
            control.connection.send(HopLost(hop.address.host, 1).encode())  # some other one
            control.connection.send(HopLost(hop.address.host, hop.address.port).encode())
            answers = [d.answer() for _ in range(2)]
            assert [(a.request_id, a.status) for a in answers] == [(1, 1), (2, 1)]
            d.ask([], [3])
            again = hop.accept()
            again.send(encode(logits_for(take_work(again))))
            assert d.answer().status == 0
    worker.close()


def test_a_span_for_a_hop_that_was_forgotten_a_moment_ago_is_answered(monkeypatch) -> None:
    """The choice of the forwarder and the loss of its hop race on two threads."""
    forward = Forwarder.forward

    def forgotten(self, *args) -> None:
        self.close()
        forward(self, *args)

    monkeypatch.setattr(Forwarder, "forward", forgotten)
    worker = start_worker(FakeRunner(span("0-2")))
    with driver(worker.address, entry(span("0-2")), entry(span("3-5"))) as d:
        assert "given up" in d.refused([], [1])
    worker.close()


@pytest.mark.parametrize("notice", [Cancel(1, 1), Drop(1), HopLost("h", 1), Fork(1, 2, 3, 4)])
def test_notices_are_for_peers_that_have_introduced_themselves(notice) -> None:
    worker = start_worker(FakeRunner(span("0-5")))
    with driver(worker.address, WHOLE) as d:
        d.check([], [1])
        d.connection.send(notice.encode())
        frame = Background(d.connection.receive).result()
        assert frame is not None
        assert frame.type == FrameType.ERROR
        assert Background(d.connection.receive).result() is None
    worker.close()


# --- whole clusters -----------------------------------------------------------------------------


def held_sessions(c: Cluster) -> list[int]:
    return [len(w.stage.sessions) for w in c.workers]


@pytest.mark.parametrize("dial_in", [False, True])
def test_a_session_that_ends_is_freed_on_every_stage(dial_in) -> None:
    with cluster(["0-2", "3-5"], dial_in=dial_in) as c:
        c.wait_ready()
        with c.backend.lease([1]) as first, c.backend.lease([2]) as second:
            first.sync([1])
            second.sync([2])
            assert held_sessions(c) == [2, 2]
            first.close()
            wait_until(lambda: held_sessions(c) == [1, 1], "the first is gone everywhere")
            np.testing.assert_array_equal(first.sync(PROMPT).logits, reference_logits(PROMPT))
        c.coordinator.close()
        wait_until(lambda: held_sessions(c) == [0, 0], "a coordinator leaves nothing behind")
        assert not any(w.stage.device.runner._rows for w in c.workers)


def in_flight(c: Cluster) -> int:
    return sum(len(link._pending) for link in c.coordinator.workers.links.values())


@contextmanager
def cancelling(local: str | None, cuts: list[str], **fields: object) -> Iterator[tuple]:
    """A prefill in chunks of 2 whose first remote stage stands at the second span; and its end."""
    reached, resume, stop = (threading.Event() for _ in range(3))

    def before(work: ForwardRequest) -> None:
        if work.pos0 == 2 and (local is None or work.hidden is not None):
            reached.set()
            assert resume.wait(20)

    # three spans fit into a worker's queue, so that it goes on reading
    with cluster(cuts, local=local, chunk=2, window=3, before=before, **fields) as c:  # type: ignore[arg-type]
        c.wait_ready()
        with c.backend.lease(PROMPT) as session:
            prefill = Background(lambda: session.sync(PROMPT, cancelled=stop.is_set))
            assert reached.wait(20)
            wait_until(lambda: in_flight(c) == 3, "the window is full")
            stop.set()
            yield c, session, prefill, resume


@pytest.mark.parametrize("dial_in", [False, True])
@pytest.mark.parametrize(
    ("local", "cuts"), [(None, ["0-5"]), (None, ["0-2", "3-5"]), ("0-1", ["2-3", "4-5"])]
)
def test_stages_leave_out_what_a_client_no_longer_waits_for(local, cuts, dial_in) -> None:
    with cancelling(local, cuts, dial_in=dial_in) as (c, session, prefill, resume):
        session_id = session.session_id
        for worker in c.workers:
            wait_until(lambda w=worker: w.stage.aborted.covers(session_id, 3), "it is told")
        resume.set()
        with pytest.raises(CancelledError):
            prefill.result()
        begun = [len(w.stage.device.runner.evaluated) for w in c.workers]
        assert begun[0] == 2
        assert all(n <= 2 for n in begun)
        assert len(session.tokens) == 2 * min(begun)
        n_cached = session.sync(PROMPT).n_cached
        assert n_cached == 2 * min(begun)
        np.testing.assert_array_equal(session.eval(7), reference_logits([*PROMPT, 7]))
        assert len(c.coordinator.workers.registry.records) == len(cuts)


def test_stages_that_can_not_rewind_stay_equal_so_that_what_is_done_is_kept() -> None:
    """The first stage alone leaves spans out; the others do what comes through it."""
    with cancelling(None, ["0-2", "3-5"], can_rewind=False) as (c, session, prefill, resume):
        first, second = c.workers
        wait_until(lambda: first.stage.aborted.covers(session.session_id, 3), "it is told")
        resume.set()
        with pytest.raises(CancelledError):
            prefill.result()
        assert not second.stage.aborted._last
        runners = [w.stage.device.runner for w in c.workers]
        assert [r.evaluated for r in runners] == [[(0, 2), (2, 2)]] * 2
        result = session.sync(PROMPT)
        assert result.n_cached == 4
        np.testing.assert_array_equal(result.logits, reference_logits(PROMPT))


def test_with_own_layers_that_can_not_rewind_nothing_is_left_out() -> None:
    with cancelling("0-1", ["2-5"], can_rewind=False) as (c, session, prefill, resume):
        time.sleep(0.3)  # longer than the look at `cancelled` takes
        resume.set()
        with pytest.raises(CancelledError):
            prefill.result()
        (worker,) = c.workers
        assert not worker.stage.aborted._last
        n_done = len(worker.stage.device.runner.evaluated)
        assert session.sync(PROMPT).n_cached == 2 * n_done > 4
        np.testing.assert_array_equal(session.eval(7), reference_logits([*PROMPT, 7]))


def test_a_cancelled_request_of_plain_workers_waits_for_all_that_was_sent() -> None:
    stop = threading.Event()
    with (
        cluster([], config=QUICK, chunk=2, window=3) as c,
        dial_in(c.port.address, hello(span("0-5"))) as peer,
    ):
        c.wait_ready()
        with c.backend.lease(PROMPT) as session:
            prefill = Background(lambda: session.sync(PROMPT, cancelled=stop.is_set))
            works = [take_work(peer) for _ in range(3)]
            stop.set()
            with pytest.raises(TransportTimeoutError):
                peer.receive(timeout=0.3)
            for work in works:
                peer.send(encode(good(work)))
            with pytest.raises(CancelledError):
                prefill.result()
            assert list(session.tokens) == PROMPT[:6]


def test_after_a_cancel_a_route_that_can_not_rewind_starts_anew() -> None:
    """The stages were left uneven, and now one of them is another that cannot be cut back."""
    with cancelling(None, ["0-5"]) as (c, session, prefill, resume):
        (old,) = c.workers
        wait_until(lambda: old.stage.aborted.covers(session.session_id, 3), "it is told")
        resume.set()
        with pytest.raises(CancelledError):
            prefill.result()
        address = old.address
        old.close()
        wait_until(lambda: not c.coordinator.health().ready, "it is missed")
        c.workers[0] = start_worker(FakeRunner(span("0-5"), can_rewind=False), listen=address)
        c.wait_ready()
        replays = c.coordinator.health().replays
        result = session.sync(PROMPT)
        assert c.coordinator.health().replays == replays  # it is not even tried
        np.testing.assert_array_equal(result.logits, reference_logits(PROMPT))


def test_the_loss_of_a_stage_behind_a_plain_one_ends_the_link_to_the_route() -> None:
    """Nobody can tell the plain one; its answers would be waited for in vain."""
    config = CoordinatorConfig(rejoin_timeout=DEADLINE, result_timeout=60, alive_timeout=0.3)
    with ExitStack() as stack:
        c = stack.enter_context(cluster([], config=config))
        plain = stack.enter_context(dial_in(c.port.address, hello(span("0-2"))))
        silent = stack.enter_context(
            extended_worker(c.port.address, span("3-5"), alive_timeout=0.3)
        )
        c.wait_ready()
        with c.backend.lease(PROMPT) as session:
            asking = Background(lambda: session.sync(PROMPT))
            take_work(plain)
            assert Background(plain.receive).result() is None
            assert Background(lambda: read_to_close(silent)).result()
            plain = stack.enter_context(dial_in(c.port.address, hello(span("0-5"))))
            serve(plain, good)
            asking.result()
