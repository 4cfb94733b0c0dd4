"""Statements 45 to 52: answers of a worker, and wire-protocol.md#result row by row."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ds4py.coordinator.relay.answers import AcceptedResult, Awaited, ExpectedResult, check_result
from ds4py.errors import Ds4Error
from ds4py.wire.messages import Result
from tests.by_hand import PROMPT
from tests.clusters import wait_until
from tests.conformance.statements.peer import (
    ACK,
    ACK_ONLY,
    ERROR,
    HASTY,
    HIDDEN_STATE,
    INPUT_HC,
    LOGITS,
    OUTPUT_LOGITS,
    RESET,
    RESULT,
    SOME_LOGITS,
    WHOLE,
    WORK,
    Asked,
    Hop,
    Peer,
    Scene,
    driven,
    driving,
    frame,
    pack_rows,
    refusal,
    result,
    token_hash,
    work,
    workers,
)
from tests.fake_runner import N_VOCAB, WIDTH, embed, fake_head, fake_layer
from tests.sockets import Background
from tests.strategies import attempt

HELD = [1, 2, 3]
LAST, HEADLESS = Hop(3, 5, 1), Hop(3, 5)
RECORD = struct.pack(">10I", 0, 5, 0, 0, len(PROMPT), 1, 0, 0, 36, 388)


def last_rows(tokens: list[int]) -> np.ndarray:
    """Return `[T, W]` as it leaves layers 3 to 5."""
    x = embed(tokens)
    for layer in range(3, 6):
        x = fake_layer(layer, np.zeros((0, WIDTH), np.float32), x)
    return x


@pytest.mark.parametrize(
    ("hop", "flags", "kind", "payload_bytes"),
    [
        (LAST, INPUT_HC | OUTPUT_LOGITS, LOGITS, 4 * N_VOCAB),
        (LAST, INPUT_HC | OUTPUT_LOGITS | ACK_ONLY, ACK, 0),
        (HEADLESS, INPUT_HC, HIDDEN_STATE, 3 * WIDTH * 4),
        (HEADLESS, INPUT_HC | ACK_ONLY, ACK, 0),
    ],
)
def test_statement_045_sizes_of_a_good_answer(
    hop: Hop, flags: int, kind: int, payload_bytes: int
) -> None:
    """Telemetry of 40 bytes a record and the payload fill the body behind the fixed record."""
    with driving("3-5") as peer:
        peer.send(WORK, work(hop, HELD, flags=flags | RESET))
        body = peer.expect(RESULT)
        count, telemetry_bytes, payload = struct.unpack_from(">3I", body, 24)
        assert struct.unpack_from(">I", body, 20) == (kind,)
        assert (count, telemetry_bytes, payload) == (1, 40, payload_bytes)
        assert len(body) == 40 + telemetry_bytes + payload


def test_statement_045_the_record_of_a_hop() -> None:
    """A final hop reports its layers, the span, and what it took in and gave out."""
    with driving("3-5") as peer:
        peer.check(work(LAST, HELD))
        got = peer.check(work(LAST, [7, 8], HELD))
        record = struct.unpack(">10I", got.telemetry)
        assert record[:5] == (3, 5, 0, 3, 2)
        assert record[6:] == (0, 0, 2 * 4 + 2 * WIDTH * 4, 4 * N_VOCAB)


@pytest.mark.parametrize("request_id", [1, 2**63, 2**64 - 1])
def test_statement_046_an_error(request_id: int) -> None:
    """An error has status 1, no hash, kind, width and telemetry, and its text for a payload."""
    with driving() as peer:
        peer.send(WORK, work(WHOLE, HELD, request_id=request_id, flags=0x10))
        body = peer.expect(RESULT)
        text = body[40:]
        assert body == struct.pack(">QQ6I", request_id, 0, 1, 0, 0, 0, len(text), 0) + text
        assert text.decode().isprintable()


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_statement_047_an_acknowledgement(bits: int) -> None:
    """An ACK has the hash of the span and telemetry, and neither payload nor width."""
    with driving("3-5") as peer:
        flags = INPUT_HC | OUTPUT_LOGITS | RESET | ACK_ONLY
        got = peer.check(work(LAST, HELD, flags=flags, input_hc_bits=bits))
        assert got.result_hash == token_hash(HELD)
        assert (got.kind, got.payload_bytes, got.bits) == (ACK, 0, 0)
        assert got.telemetry_count == 1
        assert peer.check(work(LAST, [7], HELD)).kind == LOGITS


@pytest.mark.parametrize("bits", [0, 32, 16, 8])
def test_statement_048_logits(bits: int) -> None:
    """Logits are a binary32 value for each token of the vocabulary, whatever the width of rows."""
    with driving("3-5") as peer:
        got = peer.check(work(LAST, HELD, input_hc_bits=bits))
        assert (got.kind, got.bits, got.payload_bytes) == (LOGITS, 32, 4 * N_VOCAB)
        if bits != 8:
            assert got.payload == fake_head(last_rows(HELD)[-1]).astype("<f4").tobytes()


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_statement_049_hidden_states(bits: int) -> None:
    """A hidden state has the rows of all tokens, packed in the width of the WORK."""
    with driving("3-5") as peer:
        got = peer.check(work(HEADLESS, HELD, input_hc_bits=bits))
        assert (got.kind, got.bits) == (HIDDEN_STATE, bits)
        assert got.payload_bytes == len(HELD) * WIDTH * bits // 8
        if bits != 8:
            assert got.payload == pack_rows(last_rows(HELD), bits)


@pytest.mark.parametrize("bits", [0, 32, 16, 8])
@pytest.mark.parametrize("asked_bits", [32, 16])
def test_statement_050_the_width_of_an_answer(asked_bits: int, bits: int) -> None:
    """A coordinator reads a hidden state in the width that the answer names."""
    headless = {"layer_start": 3, "has_output": 0}
    config = replace(HASTY, activation_bits=asked_bits)
    with driven(config=config, local="0:2", head=True, introduction=headless) as scene:
        asking = Background(lambda: scene.session.sync(PROMPT))
        asked = scene.peer.asked()
        assert (asked.input_hc_bits, asked.flags) == (asked_bits, INPUT_HC | RESET)
        rows = last_rows(PROMPT)
        scene.peer.send(RESULT, result(asked, HIDDEN_STATE, pack_rows(rows, bits), bits))
        expected = fake_head(0 * rows[-1] if bits == 8 else rows[-1])
        np.testing.assert_array_equal(asking.result().logits, expected)


@pytest.mark.parametrize("telemetry", [b"", RECORD, RECORD * 3], ids=len)
def test_statement_051_telemetry_is_optional(telemetry: bytes) -> None:
    """A coordinator takes an answer without telemetry, as well as one with a record of each hop.

    Differs from C: a coordinator takes 64 records at most, because each becomes an object.
    """
    with driven() as (_, peer, session):
        asking = Background(lambda: session.sync(PROMPT))
        peer.send(RESULT, result(peer.asked(), telemetry=telemetry))
        np.testing.assert_array_equal(asking.result().logits, np.arange(N_VOCAB))


# --- table docs/spec/wire-protocol.md#result ------------------------------------------------------

EXPECTED = ExpectedResult(
    result_hash=token_hash(PROMPT),
    n_tokens=len(PROMPT),
    n_vocab=N_VOCAB,
    hidden_width=WIDTH,
    awaited=Awaited.SPAN,
    final_has_output=True,
)


def kind_of(body: bytes, request_id: int = 1) -> str:
    """Return the class of a bad RESULT, of rows 2 to 10."""
    got, kind = attempt(lambda: Result.decode(memoryview(body)))
    if got is None:
        return kind
    if got.request_id != request_id:
        return "R-REQUEST"
    verdict = check_result(got, EXPECTED)
    assert not isinstance(verdict, AcceptedResult)
    return verdict.kind


def route_is_dropped(scene: Scene, asking: Background) -> None:
    """A transport error: the connection ends, its worker is forgotten, the call fails."""
    assert scene.peer.ended()
    with pytest.raises(Ds4Error, match="layers 0-5"):
        asking.result()
    wait_until(lambda: not workers(scene.cluster), "the worker is forgotten")


def is_replayed(peer: Peer, asking: Background) -> None:
    """A remote error: everything is sent again on the same connection, with a reset."""
    again = peer.asked()
    assert (again.request_id, again.pos0, again.tokens) == (2, 0, tuple(PROMPT))
    assert again.flags == OUTPUT_LOGITS | RESET
    peer.send(RESULT, result(again))
    np.testing.assert_array_equal(asking.result().logits, np.arange(N_VOCAB))


HEAD = frame(RESULT, bytes(40))[:12]
ENDINGS: dict[str, Callable[[Asked], bytes]] = {
    "at once": lambda asked: b"",
    "in the header": lambda asked: HEAD[:7],
    "after the header": lambda asked: frame(RESULT, result(asked))[:12],
    "in the record": lambda asked: frame(RESULT, result(asked))[:40],
    "in telemetry": lambda asked: frame(RESULT, result(asked, telemetry=RECORD))[:60],
    "in the payload": lambda asked: frame(RESULT, result(asked))[:-1],
    "in an error": lambda asked: frame(RESULT, refusal(asked, b"no memory"))[:-1],
    "bad magic": lambda asked: b"DS4E" + frame(RESULT, result(asked))[4:],
    "ERROR": lambda asked: frame(ERROR, b"go away"),
    "another type": lambda asked: frame(WORK, result(asked)),
    "unknown type": lambda asked: frame(77, result(asked)),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_statement_052_what_is_no_result(name: str) -> None:
    """A stream that ends (R-CLOSED) or brings no RESULT (R-FRAME) is a transport error."""
    with driven() as scene:
        asking = Background(lambda: scene.session.sync(PROMPT))
        scene.peer.say(ENDINGS[name](scene.peer.asked()))
        scene.peer.finish()
        route_is_dropped(scene, asking)


SHORT_LOGITS = SOME_LOGITS[:-4]
# rows 2 to 10: (class, a good RESULT with these changes)
ROWS: list[tuple[str, dict]] = [
    ("R-META", {"telemetry": RECORD, "telemetry_count": 2}),
    ("R-META", {"telemetry": RECORD, "telemetry_bytes": 39}),
    ("R-META", {"telemetry_count": 0, "telemetry_bytes": 40}),
    ("R-META", {"telemetry_count": 100, "telemetry_bytes": 4000}),
    ("R-META", {"telemetry_count": 2**32 // 40 + 1, "telemetry_bytes": 24}),
    ("R-META", {"payload_bytes": 4 * N_VOCAB - 1}),
    ("R-META", {"payload_bytes": 4 * N_VOCAB + 1}),
    ("R-REQUEST", {"request_id": 0}),
    ("R-REQUEST", {"request_id": 2}),
    ("R-DECODE", {"kind": HIDDEN_STATE, "bits": 12}),
    ("R-DECODE", {"kind": HIDDEN_STATE, "payload": bytes(11), "bits": 32}),
    ("R-DECODE", {"kind": HIDDEN_STATE, "payload": bytes(11), "bits": 0}),
    ("R-DECODE", {"kind": HIDDEN_STATE, "payload": bytes(11), "bits": 16}),
    ("R-HASH", {"result_hash": 0}),
    ("R-HASH", {"result_hash": token_hash(PROMPT[:-1])}),
    ("R-KIND", {"kind": 3}),
    ("R-KIND", {"kind": ACK, "payload": b""}),
    ("R-KIND", {"payload": b""}),
    ("R-KIND", {"payload": SHORT_LOGITS}),
    ("R-KIND", {"kind": HIDDEN_STATE, "payload": b""}),
    ("R-KIND", {"kind": HIDDEN_STATE, "payload": bytes(WIDTH * 4)}),
]


@pytest.mark.parametrize(
    ("kind", "changes"), ROWS, ids=[f"{k} {n}" for n, (k, _) in enumerate(ROWS)]
)
def test_statement_052_each_row_alone(kind: str, changes: dict) -> None:
    """An answer that breaks a row of the table is a transport error, unless it is the hop's own."""
    with driven() as scene:
        asking = Background(lambda: scene.session.sync(PROMPT))
        body = result(scene.peer.asked(), **changes)
        assert kind_of(body) == kind
        scene.peer.send(RESULT, body)
        route_is_dropped(scene, asking)


def test_statement_052_a_short_result() -> None:
    """A RESULT shorter than its fixed record is a transport error (R-FRAME)."""
    with driven() as scene:
        asking = Background(lambda: scene.session.sync(PROMPT))
        scene.peer.asked()
        assert kind_of(bytes(39)) == "R-FRAME"
        scene.peer.send(RESULT, bytes(39))
        route_is_dropped(scene, asking)


@pytest.mark.parametrize("status", [1, 2, 2**32 - 1])
def test_statement_052_an_error_of_the_hop(status: int) -> None:
    """The hop's own error leaves the connection standing: the transcript is replayed over it."""
    with driven() as (_, peer, session):
        asking = Background(lambda: session.sync(PROMPT))
        body = refusal(peer.asked(), b"no memory", status=status)
        assert kind_of(body) == "R-STATUS"
        peer.send(RESULT, body)
        is_replayed(peer, asking)


def test_statement_052_an_error_for_another_request() -> None:
    """An error with a wrong request id, such as 0, is a transport error and not the hop's own."""
    for request_id in (0, 2, 2**63):
        with driven() as scene:
            asking = Background(lambda: scene.session.sync(PROMPT))
            body = refusal(scene.peer.asked(), b"truncated", request_id=request_id)
            assert kind_of(body) == "R-REQUEST"
            scene.peer.send(RESULT, body)
            route_is_dropped(scene, asking)


# all faults at once, mended from the top of the table
WORST = {
    "payload_bytes": 7,
    "request_id": 9,
    "status": 1,
    "kind": HIDDEN_STATE,
    "bits": 12,
    "payload": bytes(12),
    "result_hash": 5,
}
MENDED = ["payload_bytes", "request_id", "status", "bits", "result_hash"]
CLASSES = ["R-META", "R-REQUEST", "R-STATUS", "R-DECODE", "R-HASH", "R-KIND"]


@pytest.mark.parametrize("n", range(len(CLASSES)), ids=CLASSES)
def test_statement_052_the_first_failing_row_decides(n: int) -> None:
    """An answer that breaks a row and all rows below it is judged by that row."""
    changes = {name: value for name, value in WORST.items() if name not in MENDED[:n]}
    with driven() as scene:
        asking = Background(lambda: scene.session.sync(PROMPT))
        body = result(scene.peer.asked(), **changes)
        assert kind_of(body) == CLASSES[n]
        scene.peer.send(RESULT, body)
        if CLASSES[n] == "R-STATUS":
            is_replayed(scene.peer, asking)
        else:
            route_is_dropped(scene, asking)
