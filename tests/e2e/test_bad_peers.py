"""Peers that stall, lie, repeat themselves or come and go, over real sockets with fake slices.

What is tested elsewhere and not again here:

- byte by byte at a coordinator's door: `unit/coordinator/relay/test_coordinator`,
`conformance/statements`
  (71); a snapshot that comes or is taken too slowly: `unit/worker/test_kv_transfer`
- callers that say nothing: `conformance/statements` (70, 71); too many connections at once:
  `unit/worker/test_worker`; peers that fall silent later: `unit/coordinator/relay/test_standby`
- the same slice twice, by other hosts or other ds4py: `conformance/statements` (16),
  `unit/peer/test_introductions`, `unit/coordinator/relay/test_registry`
- wildcard addresses: `unit/transport/test_sockets`, `unit/worker/test_forwarding`, and that none
  is advertised `e2e/test_faults`; an unreachable next hop of a hand-made route:
  `unit/worker/test_forwarding`; of a saved session: `unit/coordinator/relay/test_kv_transfer_hops`
- a worker that takes nothing: `unit/coordinator/relay/test_pipeline`; a driver that reads nothing
while
  others are served: `unit/worker/test_worker`
- answers out of order: `unit/coordinator/relay/test_pipeline`, `unit/worker/test_forwarding`; to
nobody's
  question, or for another span: the same
- HTTP and TLS on every port: `e2e/test_faults`; lengths beyond all limits: `conformance/statements`
  (8); anything else that bytes can be: `conformance/test_fuzz`
"""

from __future__ import annotations

import functools
import gc
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from random import Random

import numpy as np
import psutil
import pytest

from ds4py.config import Address, CoordinatorConfig, SocketConfig, WorkerConfig
from ds4py.contracts import ForwardRequest, OutputKind, Session
from ds4py.coordinator.relay.workers import listener as port_module
from ds4py.errors import (
    Ds4Error,
    PeerClosedError,
    RemoteWorkError,
    TransportError,
    TransportTimeoutError,
)
from ds4py.layer_range import LayerSpec
from ds4py.transport.sockets import listen, local_address
from ds4py.wire.frames import FrameType
from ds4py.wire.messages import Result, ResultKind, encode
from ds4py.worker import worker as worker_module
from ds4py.worker.worker import Worker
from tests.by_hand import PROMPT, QUICK, WHOLE, by_hand, ended, good, joined, n_workers, serve
from tests.clusters import ANY_PORT, SOCKETS, Cluster, cluster, span, start_worker, wait_until
from tests.fake_runner import FakeRunner, card, reference_logits
from tests.peers import (
    dial_in,
    driver,
    entry,
    hello,
    logits_for,
    make_work,
    next_hop,
    take_work,
)
from tests.sockets import Background, read_to_end
from tests.unit.peer.extended import exchange, peer_hello

HOP = entry(WHOLE)


@contextmanager
def worker(
    layers: str = "0-5", sockets: SocketConfig = SOCKETS, **fields: object
) -> Iterator[Worker]:
    runner = FakeRunner(span(layers), **fields)  # type: ignore[arg-type]
    config = WorkerConfig(layers=LayerSpec(runner.layers.start, runner.layers.end), listen=ANY_PORT)
    started = Worker(runner, config, sockets)
    started.start()
    try:
        yield started
    finally:
        started.close()


def refused_port() -> Address:
    """An address where nobody listens."""
    free = listen(Address("127.0.0.1", 0))
    address = local_address(free)
    free.close()
    return address


# --- peers that take their time ------------------------------------------------------------------


def test_a_driver_that_says_a_byte_at_a_time_is_served_and_holds_up_nobody() -> None:
    with (
        worker() as w,
        driver(w.address, HOP) as other,
        socket.create_connection((w.address.host, w.address.port)) as slow,
    ):
        line: list[int] = []
        data = b"".join(map(bytes, encode(make_work((HOP,), [], PROMPT, request_id=1, session=9))))
        for n, byte in enumerate(data):
            slow.sendall(bytes([byte]))
            if n % 10 == 0:
                other.check(line, [n % 97])
                line.append(n % 97)
        slow.shutdown(socket.SHUT_WR)
        answer = read_to_end(slow)
        assert len(line) > 10
        assert answer.endswith(reference_logits(PROMPT).tobytes())


def test_an_answer_that_trickles_in_does_not_stretch_the_patience_for_it() -> None:
    config = replace(QUICK, result_timeout=0.4)
    with by_hand(config) as (c, peer, session):
        asking = Background(lambda: session.sync(PROMPT))
        start = time.monotonic()
        answer = b"".join(map(bytes, encode(logits_for(take_work(peer)))))
        with suppress(PeerClosedError):  # we are given up in the middle
            for byte in answer:
                peer.send([bytes([byte])])
                time.sleep(0.02)  # 10 s for the whole answer
        with pytest.raises(Ds4Error):
            asking.result()
        assert time.monotonic() - start < 5
        with dial_in(c.port.address, hello(WHOLE, listen_port=7001)) as better:
            serve(better, good)
            joined(c, 1)
            session.sync(PROMPT)


def test_whoever_only_introduces_itself_costs_nobody_anything() -> None:
    with worker() as w, driver(w.address, HOP) as quiet, driver(w.address, HOP) as other:
        exchange(quiet.connection, peer_hello("coordinator"))
        line = list(PROMPT)
        other.check([], line)
        for token in range(20):
            other.check(line, [token])
            line.append(token)
        quiet.check([], PROMPT, session=2)


def test_a_registered_worker_that_no_route_needs_may_be_silent() -> None:
    with cluster(["0-5"]) as c, dial_in(c.port.address, hello(span("0-2"))) as quiet:
        joined(c, 2)
        with c.backend.lease(PROMPT) as session:
            session.sync(PROMPT)
            for token in range(20):
                session.eval(token)
        assert n_workers(c) == 2
        assert not quiet.closed


def test_a_driver_that_never_reads_is_given_up_after_the_send_deadline() -> None:
    """Its answers fill all buffers; nothing of it is left when the deadline is over."""
    identity = replace(card(), n_vocab=400_000)
    sockets = replace(SOCKETS, send_timeout=0.3)
    with worker(sockets=sockets, identity=identity, n_ctx=4096) as w:
        with driver(w.address, HOP) as deaf:
            with suppress(TransportError):  # it may notice while it still asks
                for n in range(40):
                    deaf.ask([0] * n, [0], session=1)
            wait_until(lambda: w.n_callers == 0, "the deaf driver is given up")
        with driver(w.address, HOP) as other:
            other.connection.expect({FrameType.RESULT: 1 << 24})
            other.check([], [5], session=2)


# --- peers that repeat themselves or answer otherwise than asked ---------------------------------


def test_a_worker_that_registers_over_and_over_is_counted_once() -> None:
    with cluster([]) as c, ExitStack() as stack:
        for _ in range(20):
            peer = stack.enter_context(dial_in(c.port.address, hello(WHOLE)))
            served = threading.Event()
            serve(peer, lambda work, served=served: served.set() or good(work))
            wait_until(lambda served=served: asked(c) and served.is_set(), "the newcomer serves")
            assert n_workers(c) == 1
        stack.close()
        joined(c, 0)


def asked(c: Cluster) -> bool:
    """Whether somebody answers a prompt."""
    with c.backend.lease(PROMPT) as session, suppress(Ds4Error):
        session.rewind(0)
        return session.sync(PROMPT).logits.size > 0
    return False


def test_a_second_introduction_on_one_connection_ends_it() -> None:
    with cluster([]) as c, dial_in(c.port.address, hello(WHOLE)) as peer:
        joined(c, 1)
        peer.send(encode(hello(WHOLE)))
        assert Background(lambda: ended(peer)).result()
        joined(c, 0)


def test_a_second_answer_ends_the_link_and_the_first_one_counts() -> None:
    with by_hand() as (c, peer, session):
        asking = Background(lambda: session.sync(PROMPT))
        answer = logits_for(take_work(peer))
        peer.send([*encode(answer), *encode(replace(answer, status=1))])
        assert asking.result().logits[0] == answer.request_id
        assert Background(lambda: ended(peer)).result()
        joined(c, 0)


def test_a_second_answer_of_a_next_hop_reaches_nobody() -> None:
    hops = (entry(span("0-2")), entry(span("3-5")))
    with next_hop() as hop, worker("0-2") as w, driver(w.address, *hops) as d:
        d.hops = (hops[0], entry(span("3-5"), hop.address))
        d.ask([], PROMPT)
        twice = hop.accept()
        answer = logits_for(take_work(twice))
        twice.send([*encode(answer), *encode(answer)])
        assert d.answer().status == 0
        assert Background(lambda: ended(twice)).result()
        d.ask(PROMPT, [7])
        once = hop.accept()
        once.send(encode(logits_for(take_work(once))))
        assert d.answer().request_id == 2
        with pytest.raises(TransportTimeoutError):
            d.connection.receive(timeout=0.05)


@pytest.mark.parametrize(
    "swollen",
    [
        lambda r: replace(r, payload=memoryview(bytes(r.payload) + bytes(4))),
        lambda r: replace(r, payload=memoryview(bytes(r.payload) * 2)),
        lambda r: replace(r, result_kind=ResultKind.ACK),
        lambda r: replace(
            r, result_kind=ResultKind.HIDDEN_STATE, payload=memoryview(bytes(6 * 32))
        ),
    ],
    ids=["a value more", "twice", "an ACK with a payload", "a row too many"],
)
def test_a_result_that_is_bigger_than_promised_is_not_used(
    swollen: Callable[[Result], Result],
) -> None:
    with by_hand() as (c, peer, session):
        asking = Background(lambda: session.sync(PROMPT[:5]))
        peer.send(encode(swollen(logits_for(take_work(peer)))))
        with pytest.raises(Ds4Error):
            asking.result()
        joined(c, 0)
        with dial_in(c.port.address, hello(WHOLE)) as better:
            serve(better, good)
            joined(c, 1)
            session.sync(PROMPT[:5])


def test_hidden_states_are_refused_where_nobody_holds_the_head() -> None:
    """They fit the span, and a coordinator with the head would take them.

    See docs/spec/wire-protocol.md#decode.
    """
    with by_hand() as (c, peer, session):
        asking = Background(lambda: session.sync(PROMPT))
        answer = logits_for(take_work(peer))
        rows = memoryview(bytes(len(PROMPT) * card().hidden_width * 4))
        peer.send(encode(replace(answer, result_kind=ResultKind.HIDDEN_STATE, payload=rows)))
        with pytest.raises(Ds4Error):
            asking.result()
        assert not session.tokens
        joined(c, 0)  # like any other answer that cannot be trusted, it costs the worker its place


def test_the_words_of_a_refusal_are_bounded_and_harmless() -> None:
    text = memoryview(b"\x1b[2J\n" * 10_000)
    with by_hand() as (_, peer, session):
        serve(peer, lambda work: Result(request_id=work.request_id, status=1, payload=text))
        with pytest.raises(RemoteWorkError) as caught:
            session.sync(PROMPT)
        assert len(str(caught.value)) < 1000
        assert str(caught.value).isprintable()


# --- addresses and numbers that lead nowhere -----------------------------------------------------


def test_a_worker_at_an_unreachable_address_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "NEXT_HOP_ROUNDS", 2)
    nowhere = refused_port()
    with (
        cluster([], config=QUICK) as c,
        worker_of(c.port.address, "0-2"),
        c.backend.lease(PROMPT) as session,
    ):
        with dial_in(c.port.address, hello(span("3-5"), listen_port=nowhere.port)):
            joined(c, 2)
            with pytest.raises(Ds4Error, match=str(nowhere)):
                session.sync(PROMPT)
        joined(c, 1)
        with worker_of(c.port.address, "3-5"):
            joined(c, 2)
            np.testing.assert_array_equal(session.sync(PROMPT).logits, reference_logits(PROMPT))


@contextmanager
def worker_of(coordinator: Address, layers: str) -> Iterator[Worker]:
    started = start_worker(FakeRunner(span(layers)), coordinator=coordinator)
    try:
        yield started
    finally:
        started.close()


def test_a_route_that_leads_back_to_the_worker_itself_is_refused_by_it() -> None:
    """It dials itself, and as its own next hop finds that it does not own those layers."""
    with worker("0-2") as w:
        with driver(w.address, entry(span("0-2")), entry(span("3-5"), w.address)) as d:
            for n in range(5):
                text = d.refused([], [n], reset=True)
                assert "assigned layers 0:2 but request asked for 3:5" in text
        wait_until(lambda: w.n_callers == 0, "the connection to itself has ended as well")
        with driver(w.address, entry(span("0-2")), entry(span("3-5"), w.address)) as d:
            assert d.refused([], [5])


EDGES = (0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


@pytest.mark.parametrize("session", EDGES)
def test_ids_at_the_edges_of_64_bits_are_ids_like_any_other(session: int) -> None:
    with worker(n_slots=2) as w, driver(w.address, HOP) as d:
        line: list[int] = []
        for token, request_id in enumerate(EDGES):
            d.check(line, [token], session=session, request_id=request_id)
            line.append(token)
        payload = d.check(line, [7], session=session, request_id=2**64 - 2).payload
        np.testing.assert_array_equal(np.frombuffer(payload, "<f4"), reference_logits([*line, 7]))


# --- many of them --------------------------------------------------------------------------------


def census() -> dict[str, int]:
    """What this process holds that must not grow."""
    gc.collect()
    return {"threads": threading.active_count(), "descriptors": psutil.Process().num_fds()}


def wait_for_census(before: dict[str, int]) -> None:
    wait_until(lambda: all(n <= before[what] for what, n in census().items()), f"again {before}")


def hang_up(address: Address, n: int) -> None:
    """Open a connection and drop it: at once, after half a header, by a reset."""
    with socket.create_connection((address.host, address.port), timeout=20) as sock:
        if n % 3:
            with suppress(ConnectionError):
                sock.sendall(b"DS4D\0\0"[: 2 * n % 7])
        if n % 2:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_thousand_connections_opened_and_dropped_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(port_module, "_FIRST_WORD_SECONDS", 0.2)
    with cluster(["0-5"]) as c:
        c.wait_ready()
        before = census()
        for n in range(1000):
            hang_up(c.port.address if n % 2 else c.workers[0].address, n // 2)
            if n % 32 == 0:
                time.sleep(0.01)  # more than the backlog takes would wait for the system's retries
        wait_for_census(before)
        with c.backend.lease(PROMPT) as session:
            np.testing.assert_array_equal(session.sync(PROMPT).logits, reference_logits(PROMPT))


def flat_over_rounds(one_round: Callable[[int], None], n_rounds: int = 100) -> None:
    """Do something many times and compare threads, descriptors and memory before and after.

    The first rounds do not count for the memory: allocators grow to their size in them.
    """
    process = psutil.Process()
    for n in range(n_rounds // 4):
        one_round(n)
    before, resident = census(), process.memory_info().rss
    for n in range(n_rounds // 4, n_rounds):
        one_round(n)
    wait_for_census(before)
    assert process.memory_info().rss - resident < 8 << 20


def test_a_hundred_drivers_that_come_and_go_leave_a_worker_as_it_was() -> None:
    with worker() as w:

        def one_round(n: int) -> None:
            with driver(w.address, HOP) as d:
                d.check([], [*PROMPT, n % 97], session=n + 1)
                d.check([*PROMPT, n % 97], [7], session=n + 1)
            wait_until(lambda: w.n_callers == 0, "the driver is gone")

        flat_over_rounds(one_round)


def test_a_hundred_workers_that_come_and_go_leave_a_coordinator_as_it_was() -> None:
    with cluster([], config=CoordinatorConfig(rejoin_timeout=20, result_timeout=20)) as c:

        def one_round(n: int) -> None:
            tokens = [*PROMPT, n % 97]
            with worker_of(c.port.address, "0-5"), c.backend.lease(tokens) as session:
                c.wait_ready()
                np.testing.assert_array_equal(session.sync(tokens).logits, reference_logits(tokens))
            joined(c, 0)

        flat_over_rounds(one_round)


CUTS = ["0-0", "1-1", "2-2", "3-3", "4-5"]


@pytest.mark.parametrize("dial_in_", [False, True], ids=["dialled", "dialling"])
def test_five_workers_serve_two_thousand_tokens_of_mixed_sessions_without_a_stall(
    dial_in_: bool,
) -> None:
    """Prompts, single tokens, steps back and fresh starts of four sessions at once."""
    took: list[float] = []
    with cluster(CUTS, dial_in=dial_in_, n_sessions=4, n_ctx=256, chunk=16) as c:
        c.wait_ready()

        def use(number: int) -> None:
            with c.backend.lease([number]) as session:
                took.extend(mixed_use(session, Random(number), 500))

        users = [Background(functools.partial(use, number)) for number in range(4)]
        for user in users:
            user.result()
    assert max(took) < 5


def mixed_use(session: Session, rng: Random, n_tokens: int) -> list[float]:
    """Evaluate so many tokens in steps of all kinds, each checked; return how long each took."""
    alone = FakeRunner(span("0-5"), n_ctx=256, n_slots=1)
    line: list[int] = []
    took, n_done = [], 0
    while n_done < n_tokens:
        if len(line) > 200 or rng.random() < 0.05:
            line = line[: rng.choice((0, 0, len(line) // 2))]
        fresh = [rng.randrange(97) for _ in range(rng.choice((*[1] * 30, 9, 40)))]
        start = time.monotonic()
        if len(fresh) == 1 and list(session.tokens) == line and line:
            logits = session.eval(fresh[0])
        else:
            logits = session.sync([*line, *fresh]).logits
        took.append(time.monotonic() - start)
        np.testing.assert_array_equal(logits, expected(alone, line, fresh))
        line += fresh
        n_done += len(fresh)
    return took


def expected(alone: FakeRunner, line: list[int], fresh: list[int]) -> np.ndarray:
    """What one process says."""
    alone.rewind(1, len(line)) if alone.length(1) else None
    work = ForwardRequest(
        session=1, tokens=tuple(fresh), pos0=len(line), hidden=None, output_kind=OutputKind.LOGITS
    )
    (output,) = alone.run([work])
    return output.logits
