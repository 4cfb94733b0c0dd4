"""Statements 18 to 23: the prefix hash and the ids, as a coordinator puts them into its WORK."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.errors import RemoteWorkError
from ds4py.wire.prefix_hash import INIT, extend, prefix_hash
from tests.conformance.statements.peer import (
    BEGIN,
    RESET,
    RESULT,
    SAVE_REQ,
    WHOLE,
    Asked,
    Peer,
    door,
    driven,
    driving,
    enlisted,
    refusal,
    result,
    token_hash,
    work,
)
from tests.sockets import Background

# docs/spec/wire-protocol.md#prefix-hash
VECTORS = [
    ((), 0x14650FB0739D0383),
    ((1,), 0x91599A98306C74A2),
    ((1, 2), 0xE90DEE64F8338EA0),
    ((1, 2, 3), 0x6FDEDB25BBB27E53),
    ((1, 2, 3, 4), 0x46740F53C6E47347),
    ((0,), 0x315446A086A23133),
    ((129279,), 0x4CA300642CED76ED),
    ((5, 6, 7, 8), 0xA93424382C940C4F),
    ((100000, 1, 65536), 0x513214840023A9A4),
]
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=8)


def serve(peer: Peer, call) -> Asked:
    """Make a call that takes one span, answer it, and return the span."""
    running = Background(call)
    asked = peer.asked()
    peer.send(RESULT, result(asked))
    running.result()
    return asked


def test_statement_018_the_empty_prefix() -> None:
    """The hash of no tokens is 14650fb0739d0383; a first span has it as its prefix hash."""
    assert prefix_hash(()) == INIT == 0x14650FB0739D0383
    with driven() as (_, peer, session):
        asked = serve(peer, lambda: session.sync([1, 2, 3]))
        assert asked.prefix_hash == 0x14650FB0739D0383


@pytest.mark.parametrize(("tokens", "expected"), VECTORS)
def test_statement_019_vectors(tokens: tuple[int, ...], expected: int) -> None:
    """The hash of (1, 2, 3) is 6fdedb25bbb27e53; so for all of wire-protocol.md#prefix-hash."""
    assert prefix_hash(tokens) == expected


def test_statement_019_on_the_wire() -> None:
    """A span of the tokens 1, 2, 3 has the result hash 6fdedb25bbb27e53, and so has its answer."""
    with driven() as (_, peer, session):
        assert serve(peer, lambda: session.sync([1, 2, 3])).result_hash == 0x6FDEDB25BBB27E53
    with driving() as peer:
        assert peer.check(work(WHOLE, [1, 2, 3])).result_hash == 0x6FDEDB25BBB27E53


@given(TOKENS, TOKENS)
def test_statement_020_two_steps(first: list[int], then: list[int]) -> None:
    """Hashing a prefix and then the rest gives the hash of the whole."""
    assert extend(prefix_hash(first), then) == prefix_hash(first + then) == token_hash(first + then)


def test_statement_020_on_the_wire() -> None:
    """The next span starts from the hash at which the one before it ended."""
    with driven(chunk=2) as (_, peer, session):
        running = Background(lambda: session.sync([1, 2, 3]))
        first, second = peer.asked(), peer.asked()
        for asked in (first, second):
            peer.send(RESULT, result(asked))
        running.result()
        third = serve(peer, lambda: session.eval(4))
        assert [first.result_hash, second.result_hash] == [second.prefix_hash, third.prefix_hash]
        assert third.prefix_hash == 0x6FDEDB25BBB27E53
        assert third.result_hash == 0x46740F53C6E47347


def test_statement_021_ids_of_requests() -> None:
    """Request ids count from 1, also through refusals, replays and new connections."""
    with driven() as (c, peer, session):
        assert serve(peer, lambda: session.sync([1, 2, 3])).request_id == 1
        running = Background(lambda: session.eval(4))
        refused = peer.asked()
        peer.send(RESULT, refusal(refused, b"not now"))
        replayed = peer.asked()
        assert (refused.request_id, replayed.request_id) == (2, 3)
        assert (replayed.pos0, replayed.flags & RESET) == (0, RESET)
        peer.send(RESULT, result(replayed))
        running.result()
        with enlisted(c, listen_port=7001) as other:
            assert serve(other, lambda: session.eval(5)).request_id == 4


def test_statement_021_ids_of_several_sessions() -> None:
    """Request ids never occur twice, whichever session they belong to.

    Differs from C: the count is the coordinator's, not each session's, so that sessions can share a
    connection; workers only echo ids.
    """
    with driven() as (c, peer, session), c.backend.lease([]) as other:
        asked = [serve(peer, lambda s=s: s.sync([1])) for s in (session, other)]
        asked += [serve(peer, lambda s=s: s.eval(2)) for s in (session, other)]
        assert [work.request_id for work in asked] == [1, 2, 3, 4]
        assert len({work.session_id for work in asked}) == 2


def test_statement_022_ids_of_snapshots() -> None:
    """Requests to save a session count from 2^63, and leave those of spans alone."""
    with (
        door() as data_port,
        driven(introduction={"listen_port": data_port.address.port}) as (_, peer, session),
    ):
        serve(peer, lambda: session.sync([1, 2, 3]))
        for n in range(3):
            saving = Background(session.save)
            hop = data_port.accept()
            request = hop.expect(SAVE_REQ)
            assert request[12:20] == (2**63 + n).to_bytes(8, "big")
            text = b"not now"
            begin = request[:20] + bytes(8 + 4) + request[32:40] + bytes(8)
            begin += b"".join(n.to_bytes(4, "big") for n in (1, 0, len(text)))
            hop.send(BEGIN, begin + text)
            with pytest.raises(RemoteWorkError, match="not now"):
                saving.result()
        assert serve(peer, lambda: session.eval(4)).request_id == 2


def test_statement_023_the_id_of_a_session() -> None:
    """A session id is not zero, and stays the same through replays and new connections."""
    with driven() as (c, peer, session):
        first = serve(peer, lambda: session.sync([1, 2, 3]))
        running = Background(lambda: session.eval(4))
        refused = peer.asked()
        peer.send(RESULT, refusal(refused, b"not now"))
        replayed = peer.asked()
        peer.send(RESULT, result(replayed))
        running.result()
        with enlisted(c, listen_port=7001) as other:
            last = serve(other, lambda: session.sync([7]))
        ids = {asked.session_id for asked in (first, refused, replayed, last)}
        assert len(ids) == 1
        assert 0 not in ids
