"""Statements 53 to 61: a worker between a hop before it and a hop behind it, both made of bytes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest

from ds4py.config import WorkerTuning
from ds4py.worker import worker as worker_module
from ds4py.worker.worker import Worker
from tests.clusters import wait_until
from tests.conformance.statements.peer import (
    ACK_ONLY,
    ERROR,
    INPUT_HC,
    LOGITS,
    OUTPUT_LOGITS,
    RESET,
    RESULT,
    WORK,
    Door,
    Hop,
    Peer,
    dial,
    door,
    driving,
    frame,
    pack_rows,
    read_result,
    refusal,
    result,
    token_hash,
    work,
    worker,
)
from tests.fake_runner import WIDTH, embed, fake_layer

TOKENS = [5, 6, 7]
RECORD = struct.pack(">10I", 3, 5, 1, 0, 3, 123, 0, 0, 108, 388)


class Scene(NamedTuple):
    """A worker of layers 0 to 2 between `up`, which drives it, and anyone who dials `door`."""

    worker: Worker
    up: Peer
    door: Door
    hops: list[Hop]

    def ask(self, tokens: list[int], after: list[int] = [], **changes) -> bytes:  # noqa: B006
        """Send a span and return its body."""
        body = work(self.hops, tokens, after, **changes)
        self.up.send(WORK, body)
        return body

    def ask_many(self, n: int) -> None:
        """Send spans of two tokens with the request ids 1 to n."""
        for k in range(n):
            self.ask([5, 5], [5] * 2 * k, request_id=k + 1)


@contextmanager
def scene(layers: str = "0-2", output: int = 1, **fields: object) -> Iterator[Scene]:
    with door() as behind, worker(layers, **fields) as w, dial(w.address) as up:  # type: ignore[arg-type]
        last = w._context.facts.layers.end
        next_hop = Hop(last + 1, 5, output, b"127.0.0.1", behind.address.port)
        yield Scene(w, up, behind, [Hop(w._context.facts.layers.start, last), next_hop])


def rows_of(layers: range, tokens: list[int]) -> np.ndarray:
    """Return `[T, W]` as it leaves these layers."""
    x = embed(tokens)
    for layer in layers:
        x = fake_layer(layer, np.zeros((0, WIDTH), np.float32), x)
    return x


@pytest.mark.parametrize("bits", [32, 16, 0])
@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("layers", ["0-2", "1-3"])
def test_statement_053_what_is_rewritten(layers: str, output: int, bits: int) -> None:
    """Layers, route index, input with its width and two flags are rewritten, nothing else is."""
    with scene(layers, output) as s:
        s.ask(TOKENS, session_id=7, request_id=2**40, input_hc_bits=bits)
        own, behind = s.hops
        expected = work(
            [behind],
            TOKENS,
            session_id=7,
            request_id=2**40,
            flags=INPUT_HC | RESET | (OUTPUT_LOGITS if output else 0),
            input_hc_bits=bits or 32,
            hidden=pack_rows(rows_of(range(own.start, own.end + 1), TOKENS), bits),
            route_count=2,
            route_index=1,
            blob=work(s.hops, TOKENS, hidden=b"")[80 + 4 * len(TOKENS) :],
        )
        assert s.door.accept().read() == (WORK, expected)


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("extra", [0, RESET, ACK_ONLY, RESET | ACK_ONLY])
def test_statement_054_flags_that_are_kept(extra: int, output: int) -> None:
    """RESET_SESSION and ACK_ONLY go on to the next hop as they came."""
    with scene(output=output) as s:
        s.ask(TOKENS, flags=extra)
        asked = s.door.accept().asked()
        assert asked.flags == INPUT_HC | extra | (OUTPUT_LOGITS if output else 0)
        assert asked.hidden == pack_rows(rows_of(range(3), TOKENS), 32)


@pytest.mark.parametrize("theirs", [b"", RECORD, RECORD * 2], ids=len)
def test_statement_055_the_record_of_a_middle_hop(theirs: bytes) -> None:
    """A middle hop appends its own telemetry record, and copies the rest of the RESULT."""
    with scene() as s:
        s.ask(TOKENS)
        behind = s.door.accept()
        answer = result(behind.asked(), LOGITS, b"any bytes", 12, theirs)
        behind.send(RESULT, answer)
        body = s.up.expect(RESULT)
        got = read_result(body)
        count = len(theirs) // 40 + 1
        assert body[:24] == answer[:24]
        assert struct.unpack_from(">3I", body, 24) == (count, 40 * count, len(b"any bytes"))
        assert (got.telemetry[:-40], got.payload, got.bits) == (theirs, b"any bytes", 12)
        ours = struct.unpack(">10I", got.telemetry[-40:])
        assert ours[:6] == (0, 2, 0, 0, len(TOKENS), 1)
        assert ours[8:] == (4 * len(TOKENS), 4 * WIDTH * len(TOKENS))


@pytest.mark.parametrize("status", [1, 77])
def test_statement_056_an_error_of_the_next_hop(status: int) -> None:
    """An error of the next hop comes back with its status and words, and one record more."""
    with scene() as s:
        s.ask(TOKENS)
        behind = s.door.accept()
        text = b"no \xff memory"
        behind.send(RESULT, refusal(behind.asked(), text, status=status))
        got = s.up.answer()
        assert got[:4] == (42, 0, status, 0)
        assert (got.payload, got.bits, got.telemetry_count) == (text, 0, 1)
        s.ask([8], TOKENS)  # both connections stand
        behind.send(RESULT, result(behind.asked()))
        assert s.up.answer().status == 0


def test_statement_057_the_window() -> None:
    """By default four forwarded requests wait for their answers, and the rest waits for room.

    Ours holds for chunks; single tokens, which hold little memory, have a window of their own.
    """
    with scene(tuning=WorkerTuning(prefetch_depth=8)) as s:
        assert WorkerTuning().forward_window == 4
        s.ask_many(7)
        behind = s.door.accept()
        asked = [behind.asked() for _ in range(4)]
        runner = s.worker.stage.device.runner
        wait_until(lambda: len(runner.evaluated) == 7, "all are evaluated meanwhile")  # type: ignore[attr-defined]
        for n in range(7):
            if len(asked) < 7:
                assert behind.hears_nothing(0.02)
            behind.send(RESULT, result(asked[n]))
            assert s.up.answer().request_id == n + 1
            if len(asked) < 7:
                asked.append(behind.asked())
        assert [a.request_id for a in asked] == [1, 2, 3, 4, 5, 6, 7]


def test_statement_058_an_unreachable_next_hop(monkeypatch) -> None:
    """A next hop that cannot be reached is an error RESULT (W-FWD), and upstream stands.

    The session has advanced all the same (docs/spec/wire-protocol.md#quirks Q37): without a reset,
    the same span is a mismatch.
    """
    monkeypatch.setattr(worker_module, "NEXT_HOP_ROUNDS", 2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    hops = [Hop(0, 2), Hop(3, 5, 1, b"127.0.0.1", port)]
    with driving("0-2", can_rewind=False) as up:
        for _ in range(2):
            assert "refused" in up.refused(work(hops, TOKENS))
        assert up.refused(work(hops, TOKENS, flags=0)) == "worker KV prefix hash mismatch"
        assert "refused" in up.refused(work(hops, [8], TOKENS))


def test_statement_059_a_next_hop_that_closes() -> None:
    """When the next hop closes, the oldest request that it owes an answer gets an error.

    Differs from C: every other pending request gets one too, and the connection upstream stands, as
    statement 61 recommends for an idle close. C leaves them unanswered and shuts it down, so that a
    coordinator replays over a connection that is about to end (docs/spec/wire-protocol.md#quirks
    Q7).
    """
    with scene() as s:
        s.ask_many(3)
        behind = s.door.accept()
        for _ in range(3):
            behind.asked()
        behind.sock.close()
        got = [s.up.answer() for _ in range(3)]
        assert [(a.request_id, a.status, a.result_hash) for a in got] == [
            (1, 1, 0),
            (2, 1, 0),
            (3, 1, 0),
        ]
        s.ask(TOKENS)
        again = s.door.accept()
        again.send(RESULT, result(again.asked()))
        assert s.up.answer().status == 0


GOOD = struct.pack(">QQ6I", 42, token_hash(TOKENS), 0, 0, 0, 0, 0, 0)
NONSENSE = {
    "another type": frame(ERROR, b"go away"),
    "unknown type": frame(77, GOOD),
    "short": frame(RESULT, GOOD[:39]),
    "telemetry count": frame(RESULT, GOOD[:24] + struct.pack(">4I", 1, 0, 0, 0)),
    "telemetry bytes": frame(RESULT, GOOD[:24] + struct.pack(">4I", 0, 40, 0, 0)),
    "payload bytes": frame(RESULT, GOOD[:24] + struct.pack(">4I", 0, 0, 1, 0)),
    "another request": frame(RESULT, struct.pack(">Q", 43) + GOOD[8:]),
    "bad magic": b"DS4E" + frame(RESULT, GOOD)[4:],
    "end inside a frame": frame(RESULT, GOOD)[:-1],
}


@pytest.mark.parametrize("name", NONSENSE)
def test_statement_059_a_next_hop_that_talks_nonsense(name: str) -> None:
    """A next hop that breaks the protocol (D-FRAME, D-META, D-REQUEST) is given up like that."""
    with scene() as s:
        s.ask(TOKENS)
        behind = s.door.accept()
        behind.asked()
        behind.say(NONSENSE[name])
        behind.finish()
        assert behind.ended()
        got = s.up.answer()
        assert (got.request_id, got.status, got.telemetry_count) == (42, 1, 0)


def test_statement_060_an_idle_close_says_nothing_upstream() -> None:
    """When the next hop closes while it owes nothing, no RESULT is made up for upstream.

    Differs from C: C shuts the connection upstream down; statement 61 recommends not to.
    """
    with scene() as s:
        s.ask(TOKENS)
        behind = s.door.accept()
        behind.send(RESULT, result(behind.asked()))
        assert s.up.answer().status == 0
        behind.sock.close()
        assert s.up.hears_nothing(0.1)


def test_statement_061_an_idle_close_is_mended_on_demand() -> None:
    """After an idle close of the next hop the connection upstream goes on, and the next span dials.

    Differs from C: C has shut down the connection upstream by then. This is the recommendation.
    """
    with scene() as s:
        line: list[int] = []
        for token in TOKENS:
            s.ask([token], line)
            line.append(token)
            behind = s.door.accept()
            asked = behind.asked()
            assert asked.result_hash == token_hash(line)
            behind.send(RESULT, result(asked))
            assert s.up.answer().status == 0
            behind.sock.close()
            (upstream,) = s.worker._upstreams
            (forwarder,) = upstream._forwarders._by_address.values()
            wait_until(lambda f=forwarder: f._downstream is None, "the close was seen")
