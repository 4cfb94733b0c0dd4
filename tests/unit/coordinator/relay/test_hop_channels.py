"""A second connection to the first hop: when it comes, what travels on it, what its loss does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest

from ds4py.config import CoordinatorConfig
from ds4py.contracts import SyncResult
from ds4py.coordinator.relay import hop_channels as lanes_module
from ds4py.coordinator.relay.hop_channels import HopChannels
from ds4py.coordinator.session import ClusterSession
from ds4py.errors import ConnectError, Ds4Error
from ds4py.transport.connection import Connection
from ds4py.transport.sockets import Listener
from ds4py.wire.messages import Work, WorkFlags, encode, error_result
from tests.by_hand import QUICK, WHOLE, ended, good, n_workers, serve
from tests.clusters import ANY_PORT, SOCKETS, Cluster, cluster, start_worker, wait_until
from tests.fake_runner import FakeRunner, reference_logits
from tests.peers import NextHop, dial_in, hello, next_hop, take_work
from tests.sockets import Background

PROMPT = [5, 80, 3, 3, 41, 9, 77, 12]
PATIENT = replace(QUICK, rejoin_timeout=20)


@dataclass
class Scene:
    """A plain worker by hand that holds back the first chunks of a long prompt.

    Args:
        main: Its connection to the coordinator.
        door: Its data port.
        held: The chunks that it has not answered.
        long: The call that waits for them.
        other: Another session.
    """

    cluster: Cluster
    main: Connection
    door: NextHop
    held: list[Work]
    long: Background[SyncResult]
    other: ClusterSession

    def ask(self, *tokens: int) -> Background[SyncResult]:
        """Evaluate a prompt in the other session."""
        return Background(lambda: self.other.sync(tokens))

    def finish(self) -> None:
        """Answer the long prompt, what is held and what follows."""
        for work in self.held:
            self.main.send(encode(good(work)))
        serve(self.main, good)
        self.long.result()


@contextmanager
def scene(config: CoordinatorConfig = PATIENT, *, port: int | None = None) -> Iterator[Scene]:
    """Two sessions, the first one amid a prompt; `port` is another data port than the door's."""
    with ExitStack() as stack:
        door = stack.enter_context(next_hop())
        c = stack.enter_context(cluster([], config=config, chunk=2, window=2))
        listen = door.address.port if port is None else port
        main = stack.enter_context(dial_in(c.port.address, hello(WHOLE, listen_port=listen)))
        c.wait_ready()
        session = stack.enter_context(c.backend.lease(PROMPT))
        other = stack.enter_context(c.backend.lease([1]))
        long = Background(lambda: session.sync(PROMPT))
        held = [take_work(main) for _ in range(2)]
        yield Scene(c, main, door, held, long, other)  # type: ignore[arg-type]


def unused_port() -> int:
    listener = Listener(ANY_PORT, SOCKETS)
    listener.close()
    return listener.address.port


def lanes_of(c: Cluster) -> HopChannels:
    (channels,) = c.coordinator.workers.channels.values()
    return channels


def test_a_token_passes_a_prompt_on_a_connection_of_its_own() -> None:
    with scene() as s:
        for tokens in ([7], [7, 8], [7, 8, 9]):
            asking = s.ask(*tokens)
            lane = s.door.connections[0] if s.door.connections else s.door.accept()
            work = take_work(lane)
            assert work.tokens == (tokens[-1],)
            lane.send(encode(good(work)))
            assert asking.result().logits[0] == work.request_id
        assert not s.long.done
        s.finish()


def test_nothing_is_opened_for_sessions_that_do_not_meet() -> None:
    with scene() as s:
        s.finish()
        assert s.ask(7).result().n_cached == 0
        assert not s.door.connections
        assert lanes_of(s.cluster)._priority is None


def test_chunks_never_travel_on_it() -> None:
    with scene() as s:
        asking = s.ask(7, 8, 9)  # a chunk, and a token behind it
        assert take_work(s.main).tokens == (7, 8)
        assert not s.door.connections
        s.held.clear()
        s.cluster.coordinator.close()
        for call in (asking, s.long):
            with pytest.raises(Ds4Error):
                call.result()


def test_without_a_data_port_tokens_wait_behind_prompts() -> None:
    with scene(port=unused_port()) as s:
        asking = s.ask(7)
        work = take_work(s.main)
        assert work.tokens == (7,)
        s.main.send(encode(good(work)))
        assert asking.result().logits[0] == work.request_id
        s.finish()


def test_a_port_that_answers_nothing_costs_a_moment_once(monkeypatch) -> None:
    """A firewall drops packets without a word."""
    monkeypatch.setattr(lanes_module, "OPEN_SECONDS", 0.05)
    gone, attempts = threading.Event(), []

    def dial(stopped: Callable[[], bool]) -> Connection:
        attempts.append(stopped)
        assert gone.wait(20)
        raise ConnectError("timed out")

    with scene() as s:
        lanes_of(s.cluster)._dial = dial
        for tokens in ([7], [7, 8]):
            asking = s.ask(*tokens)
            s.main.send(encode(good(take_work(s.main))))
            asking.result()
        assert len(attempts) == 1
        gone.set()
        s.finish()


@pytest.mark.parametrize("how", ["close", "error", "nonsense"])
def test_a_lane_that_breaks_alone_costs_its_own_session_a_replay(how) -> None:
    with scene() as s:
        asking = s.ask(7)
        lane = s.door.accept()
        lane.send(encode(good(take_work(lane))))
        asking.result()
        asking = s.ask(7, 8)
        work = take_work(lane)
        match how:
            case "close":
                lane.close()
            case "error":
                lane.send(encode(error_result(0, "out of order")))
            case "nonsense":
                lane.send([b"this is no frame at all"])
        replayed = take_work(s.main)  # the whole timeline, on the main lane
        assert (replayed.tokens, replayed.pos0) == ((7, 8), 0)
        assert replayed.flags & WorkFlags.RESET_SESSION
        assert replayed.request_id > work.request_id
        s.main.send(encode(good(replayed)))
        assert asking.result().logits[0] == replayed.request_id
        asking = s.ask(7, 8, 9)  # and no second lane soon
        s.main.send(encode(good(take_work(s.main))))
        asking.result()
        assert len(s.door.connections) == 1
        assert n_workers(s.cluster) == 1
        assert not s.long.done
        s.finish()


def test_the_end_of_a_worker_may_show_on_the_lane_first() -> None:
    """The replay meets it again on the main connection: these are not two losses."""
    with scene() as s:
        asking = s.ask(7)
        lane = s.door.accept()
        lane.send(encode(good(take_work(lane))))
        asking.result()
        asking = s.ask(7, 8)
        take_work(lane)
        lane.close()
        assert take_work(s.main).tokens == (7, 8)
        s.main.close()
        with dial_in(s.cluster.port.address, hello(WHOLE)) as again:
            serve(again, good)
            asking.result()
            s.long.result()


def test_the_lane_goes_with_the_main_connection_and_both_sessions_are_replayed() -> None:
    with scene() as s:
        asking = s.ask(7)
        lane = s.door.accept()
        lane.send(encode(good(take_work(lane))))
        asking.result()
        asking = s.ask(7, 8)
        take_work(lane)
        s.main.close()
        assert Background(lambda: ended(lane)).result()
        port = s.door.address.port
        with dial_in(s.cluster.port.address, hello(WHOLE, listen_port=port)) as again:
            serve(again, good)
            asking.result()
            s.long.result()
            assert len(s.door.connections) == 1


def test_the_lane_of_a_displaced_worker_is_closed() -> None:
    with scene() as s:
        asking = s.ask(7)
        lane = s.door.accept()
        take_work(lane)
        with dial_in(s.cluster.port.address, hello(WHOLE, listen_port=unused_port())) as newcomer:
            serve(newcomer, good)
            assert Background(lambda: ended(lane)).result()
            asking.result()
            s.long.result()
            assert not s.main.closed


def test_a_token_without_an_answer_ends_the_link_as_ever() -> None:
    with scene(replace(QUICK, result_timeout=0.3)) as s:
        asking = s.ask(7)
        lane = s.door.accept()
        take_work(lane)
        assert Background(lambda: ended(lane)).result()
        assert Background(lambda: ended(s.main)).result()
        for call in (asking, s.long):
            with pytest.raises(Ds4Error):
                call.result()


def test_closing_ends_the_lane_and_whoever_waits() -> None:
    with scene() as s:
        asking = s.ask(7)
        lane = s.door.accept()
        take_work(lane)
        s.cluster.coordinator.close()
        assert Background(lambda: ended(lane)).result()
        with pytest.raises(Ds4Error):
            asking.result()
        with pytest.raises(Ds4Error):
            s.long.result()


def test_a_worker_of_ours_is_greeted_on_it_and_its_loss_harms_nobody() -> None:
    """Both sides watch the lane, and the sessions on it keep an owner when it breaks."""
    gate = threading.Event()

    def hold(work) -> None:
        if len(work.tokens) > 1 and work.tokens[0] == PROMPT[0]:
            assert gate.wait(20)

    with cluster(["0-5"], before=hold, chunk=2) as c:
        c.wait_ready()
        with c.backend.lease(PROMPT) as first, c.backend.lease([1]) as second:
            second.sync([7, 8, 9])
            long = Background(lambda: first.sync(PROMPT))
            wait_until(lambda: lanes_of(c).bulk.carries_chunks, "the prompt is on its way")
            asking = Background(lambda: second.eval(10))
            wait_until(lambda: lanes_of(c)._priority is not None, "the lane stands")
            gate.set()
            np.testing.assert_array_equal(asking.result(), reference_logits([7, 8, 9, 10]))
            long.result()
            quick = lanes_of(c)._priority
            assert quick is not None
            assert quick._heartbeat is not None
            (worker,) = c.workers
            assert all(u._heartbeat is not None for u in worker._upstreams)
            cached = worker.stage.sessions.get(second.session_id)  # type: ignore[attr-defined]
            assert cached is not None
            assert len(cached.owners) == 2
            quick.connection.close()
            wait_until(lambda: len(worker._upstreams) == 1, "the worker saw it end")
            assert len(cached.owners) == 1
            np.testing.assert_array_equal(second.eval(11), reference_logits([7, 8, 9, 10, 11]))


def test_somebody_else_behind_the_data_port_gets_no_span() -> None:
    """Other layers than those that registered: the machine was set up again meanwhile."""
    gate = threading.Event()

    def hold(work) -> None:
        if len(work.tokens) > 1:
            assert gate.wait(20)

    other = start_worker(FakeRunner(WHOLE))
    with cluster(["0-2", "3-5"], before=hold, chunk=2) as c:
        c.wait_ready()
        (first_hop, _) = sorted(
            c.coordinator.workers.registry.records, key=lambda r: r.layers.start
        )
        channels = c.coordinator.workers.channels[first_hop.link]
        moved = replace(first_hop, address=other.address)
        channels._dial = lambda stopped: lanes_module.dial_priority_channel(
            moved, c.coordinator, stopped
        )
        with c.backend.lease(PROMPT) as first, c.backend.lease([1]) as second:
            long = Background(lambda: first.sync(PROMPT))
            wait_until(lambda: channels.bulk.carries_chunks, "the prompt is on its way")
            asking = Background(lambda: second.sync([7]))
            wait_until(lambda: channels._not_before > 0, "the attempt has failed")
            gate.set()
            np.testing.assert_array_equal(asking.result().logits, reference_logits([7]))
            long.result()
            assert channels._priority is None
    assert not other.stage.device.runner.evaluated  # type: ignore[attr-defined]
    other.close()


def test_prompts_share_the_window() -> None:
    """Together about as many chunks as one alone, one each at least."""
    channels = HopChannels(None, None, timeout=1, alive_timeout=None)  # type: ignore[arg-type]
    shares = []
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(channels.prefilling())
            shares.append(channels.share(4))
    assert shares == [4, 2, 2, 1, 1]
    assert channels.share(4) == 4
    assert channels.share(1) == 1


def test_a_second_prompt_does_not_wait_for_the_whole_first_one() -> None:
    with ExitStack() as stack:
        c = stack.enter_context(cluster([], config=PATIENT, chunk=2, window=4))
        main = stack.enter_context(dial_in(c.port.address, hello(WHOLE)))
        c.wait_ready()
        first = stack.enter_context(c.backend.lease([1]))
        second = stack.enter_context(c.backend.lease([2]))
        prompt = list(range(1, 41))
        asking = [Background(lambda: first.sync(prompt))]
        works = [take_work(main) for _ in range(4)]
        asking.append(Background(lambda: second.sync(prompt[::-1])))
        works += [take_work(main) for _ in range(2)]
        assert [w.pos0 for w in works] == [0, 2, 4, 6, 0, 2]
        assert works[4].session_id == works[5].session_id != works[0].session_id
        for answered, sent in ((works[:3], 8), (works[4:5], 4), (works[3:4], 10)):
            for work in answered:  # three of the first one's four: then it has less than its share
                main.send(encode(good(work)))
            following = take_work(main)
            assert (following.session_id, following.pos0) == (answered[0].session_id, sent)
            works.append(following)
        for work in (works[5], *works[6:]):
            main.send(encode(good(work)))
        serve(main, good)
        for call in asking:
            call.result()
