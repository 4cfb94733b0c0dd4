"""Sessions are saved from any route and loaded into any other; hops that misbehave cost
the operation, never the route."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace

import numpy as np
import pytest

from ds4py.config import Address, CoordinatorConfig, RouteEntry
from ds4py.contracts import ModelCard, SessionId
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.session_pool import SessionPool
from ds4py.errors import (
    RemoteWorkError,
    SnapshotError,
    TransportError,
)
from ds4py.layer_range import LayerRange
from ds4py.snapshot import CacheSizes, read_dsv4, split, write_dsvl
from ds4py.worker.worker import Worker
from tests.by_hand import n_workers
from tests.clusters import DEADLINE, SOCKETS, cluster, span, start_worker, wait_until
from tests.fake_runner import N_VOCAB, FakeRunner, card, reference_logits
from tests.peers import N_CTX, driver
from tests.shard_peers import pull, save_request
from tests.sockets import Background

PROMPT = [5, 80, 3, 3, 41, 9, 77, 12, 1, 0, 96, 33]
MORE = [7, 0, 96]
SIZES = CacheSizes(**asdict(card().saved_form()), n_vocab=N_VOCAB)
CUTS = [
    pytest.param(None, ["0-5"], id="one hop"),
    pytest.param(None, ["0-1", "2-3", "4-5"], id="three hops"),
    pytest.param("0-2", ["3-3", "4-5"], id="own layers and two hops"),
    pytest.param("0-5", [], id="one process"),
]


@contextmanager
def route_over(
    *runners: FakeRunner, local: FakeRunner | None = None, model: ModelCard | None = None
) -> Iterator[tuple[SessionPool, list[Worker]]]:
    """A coordinator over workers that are given as they are."""
    with ExitStack() as stack:
        workers = [start_worker(runner) for runner in runners]
        for worker in workers:
            stack.callback(worker.close)
        entries = tuple(RouteEntry(Address("127.0.0.1", w.address.port)) for w in workers)
        config = CoordinatorConfig(route=entries, rejoin_timeout=DEADLINE, result_timeout=DEADLINE)
        built = Coordinator(model or card(), N_CTX, config, SOCKETS, local=local)
        stack.callback(built.close)
        built.start()
        wait_until(lambda: built.health().ready, "the route is complete")
        yield SessionPool(built, 2), workers


def payload_of(session) -> bytes:
    return b"".join(session.save())


def continues(session, tokens: Sequence[int]) -> None:
    """Decode a few tokens and compare with one process."""
    line = list(tokens)
    for token in MORE:
        line.append(token)
        np.testing.assert_array_equal(session.eval(token), reference_logits(line))


def alone(tokens: Sequence[int] = PROMPT) -> bytes:
    """What one process saves."""
    with cluster([], local="0-5") as c, c.backend.lease(tokens) as session:
        session.sync(tokens)
        return payload_of(session)


# --- whole routes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("local", "cuts"), CUTS)
def test_any_route_saves_the_bytes_of_one_process_and_loads_them(local, cuts) -> None:
    with cluster(cuts, local=local, chunk=5) as c:
        c.wait_ready()
        with c.backend.lease(PROMPT) as session:
            session.sync(PROMPT)
            saved = payload_of(session)
            assert saved == alone()
            continues(session, PROMPT)
            session.load(saved)
            assert list(session.tokens) == PROMPT
            again = session.sync(PROMPT)
            assert again.n_cached == len(PROMPT)
            np.testing.assert_array_equal(again.logits, reference_logits(PROMPT))
            assert payload_of(session) == saved
            continues(session, PROMPT)


def test_a_loaded_session_is_not_evaluated_again() -> None:
    runners = [FakeRunner(span("0-2")), FakeRunner(span("3-5"))]
    with route_over(*runners) as (backend, _), backend.lease(PROMPT) as session:
        session.load(alone())
        continues(session, PROMPT)
    assert [runner.evaluated for runner in runners] == [[(12, 1), (13, 1), (14, 1)]] * 2


def test_saving_changes_nothing_and_copies() -> None:
    with cluster(["0-5"], local=None) as c:
        c.wait_ready()
        with c.backend.lease(PROMPT) as session:
            session.sync(PROMPT)
            pieces = session.save()
            continues(session, PROMPT)
            assert b"".join(pieces) == alone()


def test_94_the_cuts_of_a_saved_session_are_the_shards_of_its_workers() -> None:
    cuts = [span("0-1"), span("2-3"), span("4-5")]
    with (
        route_over(*map(FakeRunner, cuts)) as (backend, workers),
        backend.lease(PROMPT) as session,
    ):
        session.sync(PROMPT)
        whole = read_dsv4(payload_of(session), SIZES, n_ctx=N_CTX)
        for worker, cut in zip(workers, cuts, strict=True):
            with driver(worker.address) as d:
                request = save_request(PROMPT, cut, session_id=session.session_id)
                _, parts = pull(d.connection, request)
            assert b"".join(parts) == b"".join(write_dsvl(split(whole, cut)))


def test_93_shards_with_another_context_are_refused() -> None:
    runners = FakeRunner(span("0-2")), FakeRunner(span("3-5"), n_ctx=2 * N_CTX)
    with route_over(*runners) as (backend, _), backend.lease(PROMPT) as session:
        session.sync(PROMPT)
        with pytest.raises(SnapshotError, match=r"layers 3-5.*ctx is 128, expected 1 to 64"):
            session.save()
        continues(session, PROMPT)


def test_93_shards_with_a_smaller_context_are_refused_as_well() -> None:
    model = replace(card(), cache_form=replace(card().saved_form(), window=40))
    local = FakeRunner(span("0-2"), n_ctx=48, identity=model)
    worker = FakeRunner(span("3-5"), identity=model)
    with (
        route_over(worker, local=local, model=model) as (backend, _),
        backend.lease(PROMPT) as session,
    ):
        session.sync(PROMPT)
        with pytest.raises(SnapshotError, match="ctx 64, expected 48"):
            session.save()


@pytest.mark.parametrize("spoil", ["nothing", "rewind"])
def test_only_an_evaluated_timeline_is_saved(spoil) -> None:
    with cluster([], local="0-5") as c, c.backend.lease(PROMPT) as session:
        if spoil == "rewind":
            session.sync(PROMPT)
            session.rewind(3)
        with pytest.raises(SnapshotError, match="has no logits"):
            session.save()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p[:-1], "bytes, expected"),
        (lambda p: b"XXXX" + p[4:], "magic"),
        (lambda p: b"", "bytes, expected a header"),
        (lambda p: p[:52] + (97).to_bytes(4, "little") + p[56:], "token id 97"),
    ],
)
def test_a_payload_that_is_refused_leaves_the_session_as_it_was(damage, message) -> None:
    with cluster(["0-5"]) as c:
        c.wait_ready()
        with c.backend.lease(PROMPT) as session:
            session.sync(PROMPT)
            with pytest.raises(SnapshotError, match=message):
                session.load(damage(alone()))
            continues(session, PROMPT)


class Refusing(FakeRunner):
    """Takes no session."""

    def load_cache(self, session: SessionId, n_tokens: int, payload: memoryview) -> None:
        raise SnapshotError("not today")


@pytest.mark.parametrize("place", ["own layers", "first hop", "second hop"])
def test_a_load_that_fails_on_a_stage_leaves_the_session_empty_and_a_replay_repairs_it(
    place,
) -> None:
    kinds = {"own layers": (1, 0, 0), "first hop": (0, 1, 0), "second hop": (0, 0, 1)}[place]
    stages = [
        (Refusing if refuses else FakeRunner)(span(layers))
        for refuses, layers in zip(kinds, ["0-1", "2-3", "4-5"], strict=True)
    ]
    with (
        route_over(*stages[1:], local=stages[0]) as (backend, _),
        backend.lease(PROMPT) as session,
    ):
        session.sync([*PROMPT, 50])
        with pytest.raises((RemoteWorkError, SnapshotError), match="not today"):
            session.load(alone())
        assert session.tokens == ()
        result = session.sync(PROMPT)
        assert result.n_cached == 0
        np.testing.assert_array_equal(result.logits, reference_logits(PROMPT))
        continues(session, PROMPT)


def test_a_model_without_a_portable_form_says_so() -> None:
    model = replace(card(), architecture="llama", cache_form=None)
    runner = FakeRunner(identity=model)
    with route_over(runner, model=model) as (backend, _), backend.lease(PROMPT) as session:
        session.sync(PROMPT)
        for operation in (session.save, lambda: session.load(alone())):
            with pytest.raises(SnapshotError, match="sessions of llama models have no portable"):
                operation()
        continues(session, PROMPT)


def test_a_session_is_saved_in_the_middle_of_another_ones_prefill() -> None:
    long = [3 + k % 90 for k in range(60)]
    saved = threading.Event()
    half_way = threading.Event()

    def progress(done: int, _: int) -> None:
        if done >= 30:
            half_way.set()
            assert saved.wait(DEADLINE)

    with cluster(["0-1", "2-3", "4-5"], chunk=2) as c:
        c.wait_ready()
        with c.backend.lease(PROMPT) as one, c.backend.lease(long) as other:
            one.sync(PROMPT)
            prefill = Background(lambda: other.sync(long, progress=progress))
            assert half_way.wait(DEADLINE)
            assert payload_of(one) == alone()
            one.load(alone())
            assert not prefill.done
            saved.set()
            np.testing.assert_array_equal(prefill.result().logits, reference_logits(long))
            continues(one, PROMPT)
        assert n_workers(c) == 3


class Dying(FakeRunner):
    """Ends its worker in the middle of an operation."""

    def __init__(self, layers: LayerRange):
        super().__init__(layers)
        self.die: Callable[[], None] = lambda: None

    def save_cache(self, session: SessionId) -> list[memoryview]:
        self.die()
        return super().save_cache(session)

    def load_cache(self, session: SessionId, n_tokens: int, payload: memoryview) -> None:
        self.die()
        super().load_cache(session, n_tokens, payload)


@pytest.mark.parametrize("operation", ["save", "load"])
def test_a_worker_that_dies_in_the_middle_costs_the_operation_only(operation) -> None:
    dying = Dying(span("3-5"))
    with (
        route_over(FakeRunner(span("0-2")), dying) as (backend, workers),
        backend.lease(PROMPT) as session,
    ):
        session.sync(PROMPT)

        def die() -> None:
            for upstream in list(workers[1]._upstreams):
                upstream._connection.close()
            workers[1]._acceptor.close()

        dying.die = die
        with pytest.raises(TransportError):
            session.save() if operation == "save" else session.load(alone())
        workers[1].close()
        workers.append(start_worker(FakeRunner(span("3-5")), listen=workers[1].address))
        try:
            result = session.sync([*PROMPT, 50])
            np.testing.assert_array_equal(result.logits, reference_logits([*PROMPT, 50]))
            continues(session, [*PROMPT, 50])
        finally:
            workers[-1].close()
