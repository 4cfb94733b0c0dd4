"""Statements 62 to 65 and 69 to 71: which route is taken, and who may knock at the door."""

from __future__ import annotations

import struct
from contextlib import ExitStack

import numpy as np
import pytest

from ds4py.coordinator.relay.workers import listener as port_module
from ds4py.coordinator.relay.workers import registration as reception_module
from ds4py.errors import (
    RouteIncompleteError,
)
from tests.by_hand import PROMPT
from tests.clusters import cluster, wait_until
from tests.conformance.statements.coordinators import (
    Member,
    abort,
    fleet,
    hops,
    is_replay,
    places,
)
from tests.conformance.statements.peer import (
    ERROR,
    HELLO,
    HIDDEN_STATE,
    INPUT_HC,
    N_CTX,
    OUTPUT_LOGITS,
    RESET,
    RESULT,
    WORK,
    Hop,
    dial,
    driven,
    enlisted,
    frame,
    hello,
    refusal,
    result,
    token_hash,
    work,
    worker,
    workers,
)
from tests.fake_runner import WIDTH, fake_head, reference_logits
from tests.sockets import Background

# --- 62 to 65: the search for a route -------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "route"),
    [
        ([Member(0, 1), Member(0, 3), Member(2, 5, 1), Member(4, 5, 1)], [1, 3]),
        ([Member(0, 2), Member(3, 5, 1), Member(0, 5, 1)], [2]),
        ([Member(0, 3), Member(0, 1), Member(2, 5, 1)], [1, 2]),
        ([Member(0, 2), Member(3, 4), Member(3, 3), Member(4, 5, 1)], [0, 2, 3]),
        ([Member(0, 4), Member(0, 2), Member(0, 0), Member(3, 4), Member(1, 5, 1)], [2, 4]),
    ],
    ids=["longer", "longest", "dead end", "dead end behind a hop", "two dead ends"],
)
def test_statement_062_longer_ranges_and_dead_ends(members: list[Member], route: list[int]) -> None:
    """At one layer the longest range is tried first, and a dead end leads back to the next one."""
    for order in (members, members[::-1]):
        with fleet(*order) as f:
            _, got = f.sync()
            assert [order[place] for place in got] == [members[place] for place in route]


@pytest.mark.parametrize("owner", [0, 1])
def test_statement_062_output_owners_first(owner: int) -> None:
    """At one layer, who owns the output head is preferred to who does not."""
    members = [Member(3, 5, int(place == owner)) for place in range(2)]
    with fleet(*members, local="0-2", head=True) as f:
        asked, route = f.sync()
        assert route == [owner]
        assert asked.flags & OUTPUT_LOGITS


@pytest.mark.parametrize(
    ("local", "members"),
    [
        (None, [Member(0, 2), Member(2, 5, 1)]),
        (None, [Member(0, 2), Member(4, 5, 1)]),
        (None, [Member(1, 5, 1)]),
        ("0-2", [Member(2, 5, 1)]),
        ("0-2", [Member(0, 5, 1)]),
        ("0-2", [Member(4, 5, 1)]),
        ("0-2", [Member(3, 4), Member(4, 5, 1)]),
    ],
)
def test_statement_063_no_route(local: str | None, members: list[Member]) -> None:
    """Ranges that overlap or leave a gap make no route: the call fails and nobody is asked."""
    with fleet(*members, local=local) as f:
        with pytest.raises(RouteIncompleteError):
            f.session.sync(PROMPT)
        assert all(peer.hears_nothing(0.02) for peer in f.peers)
        assert len(workers(f.cluster)) == len(members)


def test_statement_063_overlaps_are_not_trimmed() -> None:
    """A range that overlaps the one before it is passed over for one that joins exactly."""
    members = [Member(0, 2), Member(2, 5, 1), Member(1, 5, 1), Member(3, 3), Member(4, 5, 1)]
    with fleet(*members) as f:
        asked, route = f.sync()
        assert route == [0, 3, 4]
        assert (asked.layer_start, asked.layer_end) == (0, 2)


def test_statement_064_a_headless_end_without_a_head() -> None:
    """A last hop without the head is of no use to a coordinator that has none."""
    with fleet(Member(3, 5), local="0-2") as f, pytest.raises(RouteIncompleteError):
        f.session.sync(PROMPT)
    with fleet(Member(3, 5), Member(3, 3), Member(4, 5, 1), local="0-2") as f:
        assert f.sync()[1] == [1, 2]


def test_statement_064_a_headless_end_with_a_head() -> None:
    """A coordinator with the head takes a headless last hop and runs the head on its last row."""
    rows = np.arange(len(PROMPT) * WIDTH, dtype="<f4").reshape(-1, WIDTH)
    with fleet(Member(3, 5), local="0-2", head=True) as f:
        running = Background(lambda: f.session.sync(PROMPT))
        asked = f.peers[0].asked()
        assert asked.flags == INPUT_HC | RESET
        assert hops(asked)[0].output == 0
        f.peers[0].send(RESULT, result(asked, HIDDEN_STATE, rows.tobytes()))
        np.testing.assert_array_equal(running.result().logits, fake_head(rows[-1]))


def test_statement_064_a_headless_worker() -> None:
    """A route that ends in a headless worker says what one process says."""
    with cluster(["3:5"], local="0-2", head=True) as c, c.backend.lease(PROMPT) as session:
        c.wait_ready()
        np.testing.assert_array_equal(session.sync(PROMPT).logits, reference_logits(PROMPT))


def test_statement_065_no_hidden_states_in_the_middle() -> None:
    """A worker that returns no hidden states is a last hop with the head, or on no route."""
    members = [Member(0, 2, has_hidden=0), Member(3, 5, 1, 0), Member(0, 1), Member(2, 2)]
    with fleet(*members) as f:
        assert f.sync()[1] == [2, 3, 1]
    with fleet(*members[:2]) as f, pytest.raises(RouteIncompleteError):
        f.session.sync(PROMPT)


def test_statement_065_no_hidden_states_at_a_headless_end() -> None:
    """A worker that returns no hidden states is no headless last hop either."""
    with (
        fleet(Member(3, 5, has_hidden=0), local="0-2", head=True) as f,
        pytest.raises(RouteIncompleteError),
    ):
        f.session.sync(PROMPT)


# --- 69: workers that come and go ----------------------------------------------------------------


def test_statement_069_a_better_newcomer() -> None:
    """Anyone who registers between two tokens and makes a better route gets the next span."""
    with fleet(Member(0, 2), Member(3, 5, 1)) as f:
        f.sync()
        with enlisted(f.cluster, listen_port=7002) as new:
            running = Background(lambda: f.session.eval(7))
            asked = new.asked()
            assert (asked.pos0, asked.tokens, asked.flags) == (len(PROMPT), (7,), OUTPUT_LOGITS)
            assert asked.prefix_hash == token_hash(PROMPT)
            assert places(asked) == [2]
            new.send(RESULT, refusal(asked, b"prefix mismatch"))
            again = new.asked()
            assert is_replay(again, asked, len(PROMPT) + 1)
            new.send(RESULT, result(again))
            running.result()
        assert all(peer.hears_nothing(0.02) for peer in f.peers)


def test_statement_069_a_worker_that_leaves() -> None:
    """Anyone who leaves between two tokens is not on the route of the next span."""
    members = [Member(0, 2), Member(3, 5, 1), Member(3, 5, 1, host="127.0.0.2")]
    with fleet(*members) as f:
        assert f.sync()[1] == [0, 1]
        abort(f.peers[1])
        wait_until(lambda: len(workers(f.cluster)) == 2, "the loss is known")
        running = Background(lambda: f.session.eval(7))
        asked = f.peers[0].asked()
        assert (asked.pos0, places(asked)) == (len(PROMPT), [0, 2])
        f.peers[0].send(RESULT, result(asked))
        running.result()


def test_statement_069_an_equal_newcomer() -> None:
    """A newcomer of equal rank changes the plan, but not the route.

    Differs from C: there the newest of equals comes first and captures the running session, which
    has to be replayed (docs/spec/wire-protocol.md#quirks Q11).
    """
    with fleet(Member(0, 5, 1)) as f:
        f.sync()
        with enlisted(f.cluster, source="127.0.0.2", listen_port=7001) as new:
            running = Background(lambda: f.session.eval(7))
            asked = f.peers[0].asked()
            assert (asked.pos0, places(asked)) == (len(PROMPT), [0])
            f.peers[0].send(RESULT, result(asked))
            running.result()
            assert new.hears_nothing(0.02)


def test_statement_069_real_workers() -> None:
    """A session goes on exactly when a worker of all layers joins in its middle."""
    with cluster(["0-2", "3-5"], dial_in=True) as c, c.backend.lease(PROMPT) as session:
        c.wait_ready()
        session.sync(PROMPT)
        with worker(coordinator=c.port.address) as new:
            wait_until(lambda: len(workers(c)) == 3, "the newcomer is registered")
            np.testing.assert_array_equal(session.eval(7), reference_logits([*PROMPT, 7]))
            assert new._runner.evaluated == [(0, len(PROMPT) + 1)]


# --- 70 and 71: the door --------------------------------------------------------------------------

STRANGERS = {
    "silence": b"",
    "half a magic": b"DS",
    "half a header": b"DS4D" + bytes(4),
    "half a hello": frame(HELLO, hello())[:-1],
    "magic": b"DS4E" + frame(HELLO, hello())[4:],
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "type": frame(WORK, work(Hop(0, 5, 1), PROMPT)),
    "error": frame(ERROR, b"let me in"),
    "unknown type": frame(2**32 - 1, bytes(5000)),
    "short": frame(HELLO, bytes(39)),
    "long": frame(HELLO, bytes(168)),
    "endless": struct.pack(">4sII", b"DS4D", HELLO, 2**32 - 1) + bytes(9999),
    "name length": frame(HELLO, hello(name_len=5)),
    "name": frame(HELLO, hello(name=b"fa\0e")),
    "model": frame(HELLO, hello(model_id=8)),
    "context": frame(HELLO, hello(ctx_size=N_CTX - 1)),
    "port": frame(HELLO, hello(listen_port=0)),
    "noise": bytes(range(256)) * 40,
}


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_statement_070_strangers_disturb_nobody(stranger: bytes) -> None:
    """Whatever a caller says in place of a good HELLO, or if it says nothing, others go on."""
    with driven() as (c, good, session), dial(c.port.address) as before:
        running = Background(lambda: session.sync(PROMPT))
        asked = good.asked()
        before.say(stranger)
        with dial(c.port.address) as during:
            during.say(stranger)
            good.send(RESULT, result(asked))
            running.result()
            during.finish()
        running = Background(lambda: session.eval(7))
        asked = good.asked()
        assert (asked.pos0, asked.request_id) == (len(PROMPT), 2)
        good.send(RESULT, result(asked))
        running.result()
        with enlisted(c, source="127.0.0.2"):
            assert len(workers(c)) == 2


def test_statement_070_many_silent_callers() -> None:
    """Many callers that say nothing do not keep a worker out."""
    with cluster([]) as c, ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(dial(c.port.address))
        stack.enter_context(enlisted(c))
        assert len(workers(c)) == 1


def test_statement_071_the_limits() -> None:
    """A caller has a bounded number of seconds until its HELLO is there.

    Differs from C, as recommended: a C coordinator waits for ever.
    """
    assert 0 < port_module._FIRST_WORD_SECONDS + reception_module.HELLO_SECONDS <= 60


@pytest.mark.parametrize("said", ["silence", "half a magic", "half a header", "half a hello"])
def test_statement_071_callers_that_keep_us_waiting(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that says nothing, or not all of a HELLO, is closed when its time is up."""
    monkeypatch.setattr(port_module, "_FIRST_WORD_SECONDS", 0.1)
    monkeypatch.setattr(reception_module, "HELLO_SECONDS", 0.1)
    with cluster([]) as c, dial(c.port.address) as peer:
        peer.say(STRANGERS[said])
        assert peer.ended()


def test_statement_071_a_registered_worker_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit ends with the HELLO: a registered worker may be silent for as long as it likes."""
    monkeypatch.setattr(reception_module, "HELLO_SECONDS", 0.1)
    with driven() as (c, peer, session):
        assert peer.hears_nothing(0.3)
        running = Background(lambda: session.sync(PROMPT))
        peer.send(RESULT, result(peer.asked()))
        running.result()
        assert len(workers(c)) == 1
