"""Answers of stages: in any order, wrong, missing; what is replayed and what is told."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest

from ds4py.activations import HiddenBatch
from ds4py.config import Address, RouteEntry
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.relay.workers.listener import coordinator_port
from ds4py.coordinator.session_pool import SessionPool
from ds4py.errors import (
    CapacityError,
    ClusterError,
    Ds4Error,
    RemoteWorkError,
)
from ds4py.transport.sockets import Listener
from ds4py.wire.messages import (
    Result,
    ResultKind,
    WorkFlags,
    encode,
    error_result,
)
from tests.by_hand import (
    PROMPT,
    QUICK,
    WHOLE,
    by_hand,
    dialling,
    ended,
    good,
    joined,
    n_workers,
    serve,
)
from tests.clusters import SOCKETS, Cluster, cluster, span, start_worker
from tests.fake_runner import N_VOCAB, FakeRunner, card, reference_logits
from tests.peers import dial_in, hello, logits_for, take_work
from tests.sockets import Background


def test_results_are_matched_by_request_id_whatever_their_order() -> None:
    with by_hand(chunk=2, window=3) as (_, peer, session):
        asking = Background(lambda: session.sync(PROMPT[:6]))
        works = [take_work(peer) for _ in range(3)]
        for work in reversed(works):
            peer.send(encode(good(work)))
        assert asking.result().logits[0] == works[-1].request_id
        assert list(session.tokens) == PROMPT[:6]


@pytest.mark.parametrize(
    "bad",
    [
        lambda work: error_result(work.request_id + 7, "whose is this?"),
        lambda work: error_result(0, "truncated"),
        lambda work: replace(logits_for(work), result_hash=1),
        lambda work: replace(logits_for(work), payload=memoryview(b"1234")),
        lambda work: replace(logits_for(work), result_kind=0, payload=memoryview(b"")),
        lambda work: replace(logits_for(work), result_kind=7),
    ],
)
def test_an_answer_that_can_not_be_trusted_ends_the_link_and_the_request_is_replayed(bad) -> None:
    with by_hand(replace(QUICK, rejoin_timeout=20)) as (c, peer, session):
        asking = Background(lambda: session.sync(PROMPT))
        peer.send(encode(bad(take_work(peer))))
        assert Background(lambda: ended(peer)).result()
        with dial_in(c.port.address, hello(WHOLE)) as again:
            work = take_work(again)
            assert work.pos0 == 0
            assert work.flags & WorkFlags.RESET_SESSION
            again.send(encode(logits_for(work)))
            assert asking.result().logits[0] == work.request_id


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_a_hidden_answer_may_have_another_width_than_was_asked_for(bits) -> None:
    rows = np.arange(8, dtype=np.float32)[None]
    with (
        cluster([], local="0:0", head=True) as c,
        dial_in(c.port.address, hello(span("1:5"))) as peer,
    ):
        joined(c, 1)

        def answer(work) -> Result:
            packed = HiddenBatch.pack(np.repeat(rows, work.n_tokens, 0), bits)
            return Result(
                request_id=work.request_id,
                result_hash=work.result_hash,
                result_kind=ResultKind.HIDDEN_STATE,
                payload=packed.data,
                payload_bits=bits,
            )

        serve(peer, answer)
        with c.backend.lease(PROMPT) as session:
            assert session.sync(PROMPT).logits.shape == (N_VOCAB,)


@pytest.mark.parametrize("chunk", [2, 100])
def test_a_mismatch_is_replayed_from_zero_on_the_same_connection(chunk) -> None:
    """Also in a pipelined prefill, where outstanding answers are waited for (Q3)."""
    seen: list = []

    def forgetful(work) -> Result:
        seen.append(work)
        if not work.flags & WorkFlags.RESET_SESSION and work.pos0 and not replayed():
            return error_result(work.request_id, "worker KV prefix hash mismatch")
        return good(work)

    def replayed() -> bool:
        return sum(bool(w.flags & WorkFlags.RESET_SESSION) for w in seen) > 1

    with by_hand(chunk=chunk) as (c, peer, session):
        serve(peer, forgetful)
        session.sync(PROMPT[:1])
        session.sync(PROMPT)
        assert list(session.tokens) == PROMPT
        assert n_workers(c) == 1
        assert not peer.closed
        assert len({w.session_id for w in seen}) == 1
        ids = [w.request_id for w in seen]
        assert ids == list(range(1, len(ids) + 1))


def test_a_stage_that_always_refuses_is_asked_twice_and_its_first_words_are_told() -> None:
    resets: list[int] = []

    def refuse(work) -> Result:
        if work.flags & WorkFlags.RESET_SESSION:
            resets.append(work.request_id)
            return error_result(work.request_id, "no slots left; raise --sessions")
        return error_result(work.request_id, "worker KV prefix hash mismatch")  # its echo

    with by_hand(chunk=2) as (_, peer, session):
        serve(peer, refuse)
        with pytest.raises(RemoteWorkError, match="no slots left") as caught:
            session.sync(PROMPT)
        assert "worker 127.0.0.1:7000 (layers 0-5" in caught.value.hop
        assert len(resets) == 2
        assert not session.tokens


def test_a_failed_request_never_leaves_old_logits_for_a_new_prompt() -> None:
    """Q4: the same prompt must be evaluated again after a failure."""
    healthy = True

    def answer(work) -> Result:
        return good(work) if healthy else error_result(work.request_id, "broken")

    with by_hand() as (_, peer, session):
        serve(peer, answer)
        session.sync(PROMPT)
        healthy = False
        with pytest.raises(RemoteWorkError):
            session.eval(7)
        assert not session.tokens
        with pytest.raises(RemoteWorkError):
            session.sync(PROMPT)
        healthy = True
        assert session.sync(PROMPT).n_cached == 0


def test_a_stage_that_never_answers_fails_the_call_and_the_next_one_works() -> None:
    config = replace(QUICK, result_timeout=0.2)
    with by_hand(config) as (c, peer, session):
        with pytest.raises(Ds4Error) as caught:
            session.sync(PROMPT)
        assert "layers 0-5" in str(caught.value) or "no result for 0.2 s" in str(caught.value)
        assert Background(lambda: _drained(peer)).result()
        with dial_in(c.port.address, hello(WHOLE)) as again:
            joined(c, 1)
            serve(again, good)
            session.sync(PROMPT)
            assert list(session.tokens) == PROMPT


def _drained(connection) -> bool:
    while not ended(connection):
        pass
    return True


def test_a_peer_that_takes_nothing_loses_its_link() -> None:
    """Its socket is full and stays so; without a close, every replay would wait for it again."""
    config = replace(QUICK, rejoin_timeout=0.2, activation_bits=32)
    sockets = replace(SOCKETS, send_timeout=0.2)
    coordinator = Coordinator(card(), 4096, config, sockets)
    backend = SessionPool(coordinator, 1)
    port = coordinator_port(Listener(Address("127.0.0.1", 0), sockets), coordinator)
    port.start()
    with dial_in(port.address, hello(WHOLE, ctx_size=4096)) as deaf:
        c = Cluster(coordinator, backend, port)
        c.wait_ready()
        (link,) = coordinator.workers.links.values()
        link._outbox.put([b"DS4D" + struct.pack(">II", 4, 1 << 28), bytes(1 << 26)])
        with backend.lease([1]) as session, pytest.raises(Ds4Error):
            session.sync([1] * 4000)
        joined(c, 0)
        assert not deaf.closed
    port.close()
    coordinator.close()


def test_a_local_device_that_fails_is_one_clear_error_and_the_session_recovers() -> None:
    def fail(work) -> None:
        if 13 in work.tokens:
            raise RuntimeError("out of memory")

    for cuts, local in (([], "0-5"), (["3-5"], "0-2")):
        with cluster(cuts, local=local, before=fail, chunk=2) as c:
            c.wait_ready()
            with c.backend.lease(PROMPT) as session:
                session.sync(PROMPT)
                with pytest.raises(ClusterError, match="RuntimeError: out of memory"):
                    session.eval(13)
                result = session.sync(PROMPT)
                np.testing.assert_array_equal(result.logits, reference_logits(PROMPT))


def test_a_remote_device_that_fails_is_told_with_its_words() -> None:
    def fail(work) -> None:
        if 13 in work.tokens:
            raise RuntimeError("out of memory")

    with cluster(["0-2", "3-5"], before=fail) as c:
        c.wait_ready()
        with c.backend.lease(PROMPT) as session:
            session.sync(PROMPT)
            with pytest.raises(RemoteWorkError, match="RuntimeError: out of memory"):
                session.eval(13)
            result = session.sync(PROMPT)
            np.testing.assert_array_equal(result.logits, reference_logits(PROMPT))


def test_more_sessions_than_a_stage_has_slots_is_told_to_the_client() -> None:
    """The stage's own words reach anyone who asked; the sessions that stand go on."""
    worker = start_worker(FakeRunner(WHOLE, n_slots=1))
    with dialling(RouteEntry(worker.address)) as c:
        c.wait_ready()
        backend = SessionPool(c.coordinator, 2)
        with backend.lease([1]) as first, backend.lease([2]) as second:
            first.sync(PROMPT)
            with pytest.raises(CapacityError, match=r"session slots.*needed 2, available 1"):
                second.sync(PROMPT)
            np.testing.assert_array_equal(first.eval(7), reference_logits([*PROMPT, 7]))
    worker.close()


def test_a_broken_output_head_is_one_clear_error() -> None:
    with cluster(["1:5"], local="0:0", head=True) as c:
        c.wait_ready()

        def broken(row):
            raise RuntimeError("no head")

        c.coordinator.local.runner.apply_head = broken
        with (
            c.backend.lease(PROMPT) as session,
            pytest.raises(ClusterError, match="RuntimeError: no head"),
        ):
            session.sync(PROMPT)
