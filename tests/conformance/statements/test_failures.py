"""Statements 66 to 68: what a failure costs, and what is replayed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ds4py.coordinator import session as session_module
from ds4py.errors import (
    RemoteWorkError,
    RouteIncompleteError,
    TransportError,
)
from tests.by_hand import PROMPT
from tests.clusters import wait_until
from tests.conformance.statements.coordinators import (
    Member,
    abort,
    fleet,
    hops,
    is_replay,
    places,
)
from tests.conformance.statements.peer import (
    ACK,
    ERROR,
    HELLO,
    HIDDEN_STATE,
    LOGITS,
    RESET,
    RESULT,
    WORK,
    Asked,
    Peer,
    driven,
    frame,
    hello,
    refusal,
    result,
    workers,
)
from tests.fake_runner import N_VOCAB, WIDTH
from tests.sockets import Background


def test_statement_066_a_refused_token_is_replayed() -> None:
    """A status other than 0 makes the coordinator send everything again on the same connection."""
    with driven(local="0-1", introduction={"layer_start": 2}) as (c, peer, session):
        running = Background(lambda: session.sync(PROMPT))
        peer.send(RESULT, result(peer.asked()))
        running.result()
        for status in (1, 2**32 - 1):
            running = Background(lambda: session.eval(7))
            first = peer.asked()
            assert first.pos0 == len(session.tokens)
            peer.send(RESULT, refusal(first, b"prefix mismatch", status=status))
            again = peer.asked()
            assert is_replay(again, first, first.pos0 + 1)
            assert again.tokens == (*PROMPT, *[7] * (first.pos0 + 1 - len(PROMPT)))
            peer.send(RESULT, result(again))
            running.result()
        assert len(workers(c)) == 1


def test_statement_066_a_refused_chunk_is_replayed() -> None:
    """A chunk that is refused in a pipelined prefill is replayed on the same connection, too.

    Differs from C, as its quirks advise (docs/spec/wire-protocol.md#quirks Q3): answers that are
    outstanding are waited for, and the connection is not shut down.
    """
    with driven(chunk=2) as (_, peer, session):
        running = Background(lambda: session.sync(PROMPT[:6]))
        asked = [peer.asked() for _ in range(3)]
        assert asked[0].flags & RESET
        for one in asked:
            assert peer.hears_nothing(0.02)
            peer.send(RESULT, refusal(one, b"prefix mismatch"))
        for n, one in enumerate(asked):
            again = peer.asked()
            assert (again.request_id, again.pos0, again.tokens) == (4 + n, one.pos0, one.tokens)
            assert again.flags == one.flags
            peer.send(RESULT, result(again))
        running.result()


def torn(kind: int, body: bytes, size: int) -> Callable[[Peer], None]:
    """Say the first bytes of a frame and no more."""

    def say(peer: Peer) -> None:
        peer.say(frame(kind, body)[:size])
        peer.finish()

    return say


def bad(*args: object, **changes: object) -> Callable[[Peer, Asked], None]:
    """Answer with a RESULT that is wrong somewhere; the arguments are those of `result`."""
    return lambda peer, asked: peer.send(RESULT, result(asked, *args, **changes))  # type: ignore[arg-type]


ONE_ROW = bytes(4 * WIDTH * len(PROMPT))
# the rows of table docs/spec/wire-protocol.md#result but the one for a status, by class
TRANSPORT_ERRORS: list[tuple[str, Callable[[Peer, Asked], None]]] = [
    ("R-CLOSED close", lambda peer, _: peer.sock.close()),
    ("R-CLOSED reset", lambda peer, _: abort(peer)),
    ("R-CLOSED header", lambda peer, asked: torn(RESULT, result(asked), 5)(peer)),
    ("R-CLOSED record", lambda peer, asked: torn(RESULT, result(asked), 30)(peer)),
    (
        "R-CLOSED telemetry",
        lambda peer, asked: torn(RESULT, result(asked, telemetry=bytes(80)), 12 + 40 + 50)(peer),
    ),
    ("R-CLOSED payload", lambda peer, asked: torn(RESULT, result(asked), 12 + 40 + 5)(peer)),
    ("R-CLOSED magic", lambda peer, asked: peer.say(b"DS4E" + frame(RESULT, result(asked))[4:])),
    ("R-FRAME work", lambda peer, asked: peer.send(WORK, result(asked))),
    ("R-FRAME error", lambda peer, _: peer.send(ERROR, b"I give up")),
    ("R-FRAME hello", lambda peer, _: peer.send(HELLO, hello())),
    ("R-FRAME unknown", lambda peer, _: peer.send(77, bytes(100))),
    ("R-FRAME short", lambda peer, asked: peer.send(RESULT, result(asked)[:39])),
    ("R-META multiple", bad(telemetry=bytes(40), telemetry_bytes=39)),
    ("R-META count", bad(telemetry_count=1)),
    ("R-META beyond", bad(telemetry_count=100, telemetry_bytes=4000)),
    ("R-META less", bad(payload_bytes=4 * N_VOCAB - 1)),
    ("R-META more", bad(payload_bytes=4 * N_VOCAB + 1)),
    ("R-REQUEST", bad(request_id=99)),
    ("R-REQUEST zero", bad(request_id=0)),
    ("R-REQUEST status", bad(request_id=99, status=1)),
    ("R-DECODE bits", bad(HIDDEN_STATE, ONE_ROW, bits=12)),
    ("R-DECODE size", bad(HIDDEN_STATE, ONE_ROW[1:], bits=16)),
    ("R-HASH", bad(result_hash=1)),
    ("R-KIND ack", bad(ACK, b"", bits=0)),
    ("R-KIND short logits", bad(LOGITS, bytes(4 * N_VOCAB - 4))),
    ("R-KIND long logits", bad(LOGITS, bytes(4 * N_VOCAB + 4))),
    ("R-KIND empty rows", bad(HIDDEN_STATE, b"")),
    ("R-KIND too many rows", bad(HIDDEN_STATE, ONE_ROW + bytes(4 * WIDTH))),
    ("R-KIND unknown", bad(3)),
]


@pytest.mark.parametrize(
    "damage", [do for _, do in TRANSPORT_ERRORS], ids=[name for name, _ in TRANSPORT_ERRORS]
)
def test_statement_067_transport_errors(damage: Callable[[Peer, Asked], None]) -> None:
    """An answer that cannot be trusted costs its hop the route; a standby gets the replay."""
    members = [Member(3, 5, 1), Member(3, 5, 1, host="127.0.0.2")]
    with fleet(*members, local="0-2") as f:
        first, standby = f.peers
        running = Background(lambda: f.session.sync(PROMPT))
        asked = first.asked()
        damage(first, asked)
        if first.sock.fileno() >= 0:
            assert first.ended()
        again = standby.asked()
        assert is_replay(again, asked, len(PROMPT))
        assert (hops(again)[0].host, places(again)) == (b"127.0.0.2", [1])
        standby.send(RESULT, result(again))
        running.result()
        wait_until(lambda: len(workers(f.cluster)) == 1, "the loss is known")


TWO_HOPS = [Member(0, 2), Member(3, 5, 1), Member(0, 2, host="127.0.0.2")]


def test_statement_067_only_the_failed_hop_is_forgotten() -> None:
    """A transport error forgets the hop that failed, and the replay goes over the others.

    Differs from C: C forgets every hop of the route and closes their connections, so that healthy
    workers lose their sessions (docs/spec/wire-protocol.md#quirks Q6).
    """
    with fleet(*TWO_HOPS) as f:
        first, second, standby = f.peers
        running = Background(lambda: f.session.sync(PROMPT))
        asked = first.asked()
        assert places(asked) == [0, 1]
        abort(first)
        again = standby.asked()
        assert is_replay(again, asked, len(PROMPT))
        assert places(again) == [2, 1]
        standby.send(RESULT, result(again))
        running.result()
        assert second.hears_nothing(0.02)


def test_statement_067_a_later_hop_that_fails() -> None:
    """If a later hop is lost, its error is taken for a loss: the replay goes around the lost one.

    Differs from C: C replays over the dying connection and keeps the dead hop
    (docs/spec/wire-protocol.md#quirks Q7).
    """
    members = [Member(0, 2), Member(3, 5, 1), Member(3, 5, 1, host="127.0.0.2")]
    with fleet(*members) as f:
        first, second, _ = f.peers
        running = Background(lambda: f.session.sync(PROMPT))
        asked = first.asked()
        abort(second)
        wait_until(lambda: len(workers(f.cluster)) == 2, "the loss is known")
        first.send(RESULT, refusal(asked, b"next hop is gone"))
        again = first.asked()
        assert is_replay(again, asked, len(PROMPT))
        assert (places(asked), places(again)) == ([0, 1], [0, 2])
        first.send(RESULT, result(again))
        running.result()


def test_statement_067_no_other_route() -> None:
    """If no complete route is left, the call fails at once, and the workers that live stay.

    Differs from C: a worker that is lost is waited for, 30 s unless told otherwise; here it is told
    not to wait, as C never does.
    """
    with fleet(*TWO_HOPS[:2]) as f:
        first, second = f.peers
        running = Background(lambda: f.session.sync(PROMPT))
        first.asked()
        abort(first)
        with pytest.raises(RouteIncompleteError, match="layers 0-2"):
            running.result()
        assert second.hears_nothing(0.02)
        wait_until(lambda: len(workers(f.cluster)) == 1, "the loss is known")
        assert workers(f.cluster)[0].address.port == 7001


@pytest.fixture
def no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the news that a refusal was the echo of a loss."""
    monkeypatch.setattr(session_module, "_NEWS_SECONDS", 0.02)


@pytest.mark.usefixtures("no_news")
@pytest.mark.parametrize(("chunk", "n_spans"), [(2, 2), (100, 1)])
def test_statement_068_a_stage_that_always_refuses(chunk: int, n_spans: int) -> None:
    """A call that is refused is replayed once; then it fails with the words of the stage."""
    with driven(chunk=chunk) as (_, peer, session):
        running = Background(lambda: session.sync(PROMPT[:2]))
        peer.send(RESULT, result(peer.asked()))
        running.result()
        running = Background(lambda: session.sync(PROMPT[:4]))
        asked = peer.asked()
        assert asked.pos0 == 2
        peer.send(RESULT, refusal(asked, b"no"))
        for again in [peer.asked() for _ in range(n_spans)]:
            peer.send(RESULT, refusal(again, b"never"))
        with pytest.raises(RemoteWorkError, match="never"):
            running.result()
        assert peer.hears_nothing(0.02)


def test_statement_068_every_stage_is_lost() -> None:
    """A call that loses its stage is replayed once: a third worker is not asked any more."""
    members = [Member(0, 5, 1, host=f"127.0.0.{n}") for n in (1, 2, 3)]
    with fleet(*members) as f:
        running = Background(lambda: f.session.sync(PROMPT))
        for peer in f.peers[:2]:
            assert peer.asked().flags & RESET
            abort(peer)
        with pytest.raises(TransportError):
            running.result()
        assert f.peers[2].hears_nothing(0.02)


@pytest.mark.usefixtures("no_news")
def test_statement_068_one_replay_for_each_cause() -> None:
    """A call that was refused and then loses its stage is replayed for either, and no more.

    Differs from C: C spends its one replay on whatever fails first.
    """
    with fleet(Member(0, 5, 1), Member(0, 5, 1, host="127.0.0.2")) as f:
        first, second = f.peers
        running = Background(lambda: f.session.sync(PROMPT))
        asked = first.asked()
        first.send(RESULT, refusal(asked, b"no"))
        again = first.asked()
        assert is_replay(again, asked, len(PROMPT))
        abort(first)
        last = second.asked()
        assert is_replay(last, again, len(PROMPT))
        second.send(RESULT, refusal(last, b"no more"))
        with pytest.raises(RemoteWorkError, match="no more"):
            running.result()
        assert second.hears_nothing(0.02)
