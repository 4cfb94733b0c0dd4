"""Statements 24 to 37: spans on the wire, every row of wire-protocol.md#work, every route check."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest

from ds4py.contracts import ForwardRequest
from ds4py.layer_range import LayerRange
from ds4py.worker.work_frames import RefusedWork, check_work
from tests.by_hand import PROMPT
from tests.clusters import wait_until
from tests.conformance.statements.peer import (
    HASTY,
    HIDDEN_STATE,
    INPUT_HC,
    LOGITS,
    N_CTX,
    OUTPUT_LOGITS,
    RESET,
    RETURN,
    WHOLE,
    WORK,
    Hop,
    Peer,
    dial,
    driven,
    driving,
    frame,
    read_work,
    route,
    token_hash,
    work,
    worker,
)
from tests.fake_runner import WIDTH, card, embed, fake_layer, reference_logits
from tests.sockets import Background

FIRST, MIDDLE, LAST = Hop(0, 1), Hop(2, 3), Hop(4, 5, 1)
HELD = [1, 2, 3]
Changes = dict[str, int | bytes]


def layers_of(hop: Hop) -> LayerRange:
    return LayerRange(hop.start, hop.end, bool(hop.output))


def rows_after(layers: range, tokens: list[int]) -> np.ndarray:
    """Return `[T, W]` as it leaves these layers."""
    x = embed(tokens)
    for layer in layers:
        x = fake_layer(layer, np.zeros((0, WIDTH), np.float32), x)
    return x


def asked_by_coordinator(bits: int) -> bytes:
    """Return the first frame of a coordinator with layers 0 and 1 to a worker of the others."""
    config = replace(HASTY, activation_bits=bits)
    with driven(config=config, local="0-1", introduction={"layer_start": 2}) as scene:
        asking = Background(lambda: scene.session.sync(PROMPT))
        got = frame(*scene.peer.read())
        scene.peer.sock.close()
        with pytest.raises(Exception, match="layers 2-5"):
            asking.result()
    return got


@pytest.mark.parametrize(("bits", "dtype"), [(32, "<f4"), (16, "<f2")])
def test_statement_024_the_layout_of_a_span(bits: int, dtype: str) -> None:
    """A WORK is the fixed record in the order of the table, then tokens, input and route."""
    got = asked_by_coordinator(bits)
    expected = work(
        Hop(2, 5, 1, b"127.0.0.1", 7000),
        PROMPT,
        session_id=read_work(got[12:]).session_id,
        request_id=1,
        input_hc_bits=bits,
        hidden=rows_after(range(2), PROMPT).astype(dtype).tobytes(),
    )
    assert got == frame(WORK, expected)


def test_statement_025_byte_orders_of_a_coordinator() -> None:
    """Token ids travel big-endian, hidden values little-endian, in what a coordinator sends."""
    asked = read_work(asked_by_coordinator(32)[12:])
    first = rows_after(range(2), PROMPT)[0, 0]
    assert asked.ids[:8] == bytes.fromhex("00000005 00000050")
    assert asked.hidden[:4] == struct.pack("<f", first) != struct.pack(">f", first)


@pytest.mark.parametrize("bits", [32, 16])
def test_statement_025_byte_orders_of_a_worker(bits: int) -> None:
    """A worker reads big-endian tokens and little-endian rows, and answers little-endian rows."""
    swapped = struct.pack("<3I", *HELD)
    with driving("2-3") as peer:
        assert peer.refused(work(MIDDLE, HELD, ids=swapped))
        got = peer.check(work(MIDDLE, HELD, input_hc_bits=bits))
        rows = rows_after(range(2, 4), HELD).astype({32: "<f4", 16: "<f2"}[bits])
        assert got.payload == rows.tobytes()


@pytest.mark.parametrize("bit", range(4, 32))
def test_statement_026_unknown_flags(bit: int) -> None:
    """A flag bit above 0x8 is refused, and the connection goes on."""
    with driving() as peer:
        assert "flags" in peer.refused(work(WHOLE, HELD, flags=OUTPUT_LOGITS | RESET | 1 << bit))
        peer.check(work(WHOLE, HELD))


def test_statement_027_input_goes_with_layers_above_zero() -> None:
    """INPUT_HC is refused by a worker of layer 0, and its absence by any other."""
    with driving("0-1") as peer:
        rows = embed(HELD).astype("<f4").tobytes()
        assert peer.refused(work(FIRST, HELD, flags=INPUT_HC | RESET, hidden=rows))
        peer.check(work(FIRST, HELD))
    with driving("2-3") as peer:
        assert peer.refused(work(MIDDLE, HELD, flags=RESET, hidden=b""))
        peer.check(work(MIDDLE, HELD))


# table docs/spec/wire-protocol.md#work, rows 2 to 23 and 28: for each worker, (class, changes of a
# WORK of one token)
TABLES: dict[Hop, list[tuple[str, Changes]]] = {
    MIDDLE: [
        ("W-SIZES", {"n_tokens": 9}),
        ("W-NOROUTE", {"route_count": 0}),
        ("W-ROUTEIDX", {"route_count": 1, "route_index": 7}),
        ("W-MODEL", {"model_id": 8}),
        ("W-LAYERS", {"layer_end": 4}),
        ("W-FLAGS", {"flags": 0x10}),
        ("W-EMPTY", {"ids": b"", "n_tokens": 0}),
        ("W-CTX", {"pos0": N_CTX + 1}),
        ("W-NOINPUT", {"flags": OUTPUT_LOGITS}),
        ("W-NOHEAD", {"flags": INPUT_HC | OUTPUT_LOGITS}),
        ("W-VOCAB", {"ids": struct.pack(">I", 97)}),
        ("W-HASHMETA", {"result_hash": 5}),
        ("W-BITS", {"input_hc_bits": 12}),
        ("W-HCSIZE", {"hidden": b"odd"}),
        ("W-ROUTE", {"blob": b"junk"}),
        ("W-RLAYERS", {"blob": route(Hop(1, 3))}),
    ],
    FIRST: [
        ("W-INPUT0", {"flags": INPUT_HC}),
        ("W-HASHMETA", {"result_hash": 5}),
        ("W-STRAYHC", {"hidden": b"odd"}),
        ("W-ROUTE", {"blob": b"junk"}),
        ("W-RLAYERS", {"blob": route(Hop(0, 2))}),
        ("W-OUTSIZE", {"input_hc_bits": 12}),
    ],
    LAST: [
        ("W-NOINPUT", {"flags": OUTPUT_LOGITS}),
        ("W-VOCAB", {"ids": struct.pack(">I", 97)}),
        ("W-RLAYERS", {"blob": route(Hop(3, 5))}),
        ("W-RLOGITS", {"blob": route(Hop(4, 5))}),
    ],
}
ALONE = [(hop, kind, changes) for hop, rows in TABLES.items() for kind, changes in rows]
NAMES = [f"{kind} at {hop.start}" for hop, kind, _ in ALONE]
TOGETHER = [(hop, n) for hop, rows in TABLES.items() for n in range(len(rows))]


def refused_as(peer: Peer, w, body: bytes) -> str:
    """Have a span refused and return its class; the worker's words must be those of the class."""
    verdict = check_work(memoryview(body), w._context.facts)
    assert isinstance(verdict, RefusedWork)
    assert peer.refused(body, verdict.request_id) == verdict.text
    return verdict.kind


@pytest.mark.parametrize(
    "changes",
    [
        {"token_bytes": 8},
        {"n_tokens": 2},
        {"n_tokens": 0},
        {"n_tokens": 2**30 + 3},  # 4 * n is 12 in 32 bits
        {"input_hc_bytes": 95},
        {"route_bytes": 2**32 - 1},
        {"input_hc_bytes": 2**32 - 4, "route_bytes": 41 + 100},  # the sum is right in 32 bits
        {"input_hc_bytes": 0},
    ],
    ids=str,
)
def test_statement_028_sizes_come_first(changes: Changes) -> None:
    """Sizes that do not add up are refused before all other faults that a WORK has."""
    faults: Changes = {}
    for _, fault in reversed(TABLES[MIDDLE][1:]):
        faults |= {name: value for name, value in fault.items() if not isinstance(value, bytes)}
    with worker("2-3") as w, dial(w.address) as peer:
        for others in ({}, faults):
            body = work(MIDDLE, HELD, request_id=42, **(others | changes))
            assert refused_as(peer, w, body) == "W-SIZES"
        peer.check(work(MIDDLE, HELD))


@pytest.mark.parametrize(("hop", "n"), TOGETHER, ids=NAMES)
def test_statement_028_the_first_failing_row_decides(hop: Hop, n: int) -> None:
    """A WORK that fails a row of the table and all rows below it is refused for that row."""
    rows, changes = TABLES[hop][n:], {}
    for _, fault in reversed(rows):
        changes |= fault
    with worker(layers_of(hop)) as w, dial(w.address) as peer:
        assert refused_as(peer, w, work(hop, [7], **changes)) == rows[0][0]


def test_statement_029_no_tokens() -> None:
    """A span without tokens is refused."""
    with worker() as w, dial(w.address) as peer:
        assert refused_as(peer, w, work(WHOLE, [])) == "W-EMPTY"
        peer.check(work(WHOLE, HELD))
        assert refused_as(peer, w, work(WHOLE, [], HELD)) == "W-EMPTY"


@pytest.mark.parametrize("held", [1, N_CTX - 1, N_CTX])
def test_statement_030_the_context(held: int) -> None:
    """A span may fill the worker's context to the last token, and not pass it."""
    tokens = [5] * N_CTX
    before, rest = tokens[:held], tokens[held:]
    with worker() as w, dial(w.address) as peer:
        peer.check(work(WHOLE, before))
        assert refused_as(peer, w, work(WHOLE, [*rest, 5], before)) == "W-CTX"
        assert refused_as(peer, w, work(WHOLE, [5], pos0=2**32 - 1)) == "W-CTX"
        if rest:
            peer.check(work(WHOLE, rest, before))


@pytest.mark.parametrize("token", [97, 98, 2**31, 2**32 - 1])
def test_statement_031_the_vocabulary(token: int) -> None:
    """A token id as large as the vocabulary is refused; the largest below it is not."""
    with worker() as w, dial(w.address) as peer:
        assert refused_as(peer, w, work(WHOLE, [1, token, 2])) == "W-VOCAB"
        peer.check(work(WHOLE, [1, 96, 2]))


def test_statement_032_the_result_hash() -> None:
    """A result hash that prefix and tokens do not give is refused, though the session fits."""
    with worker() as w, dial(w.address) as peer:
        peer.check(work(WHOLE, HELD))
        for wrong in (0, token_hash(HELD), token_hash([*HELD, 8])):
            body = work(WHOLE, [7], HELD, result_hash=wrong)
            assert refused_as(peer, w, body) == "W-HASHMETA"
        got = peer.check(work(WHOLE, [7], HELD))
        np.testing.assert_array_equal(
            np.frombuffer(got.payload, "<f4"), reference_logits([*HELD, 7])
        )


def test_statement_033_bits_of_zero() -> None:
    """A width of 0 means 32 bits, and a hidden state in answer says 32."""
    with driving("2-3") as peer:
        got = peer.check(work(MIDDLE, HELD, input_hc_bits=0))
        assert (got.kind, got.bits) == (HIDDEN_STATE, 32)
        assert got.payload == rows_after(range(2, 4), HELD).astype("<f4").tobytes()


def entry(**changes: int | bytes) -> bytes:
    """Bytes of a route entry for `MIDDLE`, then changed."""
    host = changes.pop("host", b"h")
    assert isinstance(host, bytes)
    values = {"host_len": len(host), "port": 9, "start": 2, "end": 3, "flags": 0} | changes
    return struct.pack(">5I", *values.values()) + host


def end(kind: int = 1, host_len: int = 0, port: int = 0, host: bytes = b"") -> bytes:
    return struct.pack(">3I", kind, host_len, port) + host


NEXT = LAST.encode()
# (route count, blob): every check of docs/spec/wire-protocol.md#route-checks in its order, alone
ROUTES = {
    "no entry": (1, b""),
    "short entry": (1, entry()[:19]),
    "no second entry": (2, entry() + RETURN),
    "host of 0": (1, entry(host=b"") + RETURN),
    "host of 1025": (1, entry(host=b"h" * 1025) + RETURN),
    "host beyond the blob": (1, entry(host_len=14)[:21]),
    "NUL in host": (1, entry(host=b"a\0b") + RETURN),
    "port 0": (1, entry(port=0) + RETURN),
    "port 65536": (1, entry(port=65536) + RETURN),
    "start beyond the model": (1, entry(start=6, end=6) + RETURN),
    "end beyond the model": (1, entry(end=6) + RETURN),
    "end before start": (1, entry(end=1) + RETURN),
    "flag bit 1": (1, entry(flags=2) + RETURN),
    "flag bit 31": (1, entry(flags=1 << 31) + RETURN),
    "logits before the last layer": (1, entry(flags=1) + RETURN),
    "gap": (2, entry() + Hop(5, 5, 1).encode() + RETURN),
    "overlap": (2, entry() + Hop(3, 5, 1).encode() + RETURN),
    "repetition": (2, entry() + entry() + RETURN),
    "no return record": (1, entry()),
    "short return record": (1, entry() + RETURN[:11]),
    "return host of 1025": (1, entry() + end(host_len=1025, host=b"h" * 1025)),
    "return host beyond the blob": (1, entry() + end(host_len=1)),
    "NUL in return host": (1, entry() + end(host_len=1, host=b"\0")),
    "return kind 0": (1, entry() + end(kind=0)),
    "return kind 2": (1, entry() + end(kind=2)),
    "return host": (1, entry() + end(host_len=1, host=b"h")),
    "return port": (1, entry() + end(port=9)),
    "trailing bytes": (1, entry() + RETURN + b"\0"),
}


@pytest.mark.parametrize("name", ROUTES)
def test_statement_034_each_check_of_a_route(name: str) -> None:
    """Whatever is wrong with a route, the answer is an error RESULT that names the request."""
    count, blob = ROUTES[name]
    with worker("2-3") as w, dial(w.address) as peer:
        body = work(MIDDLE, HELD, blob=blob, route_count=count, request_id=2**63 + 7)
        assert refused_as(peer, w, body) == "W-ROUTE"
        peer.check(work(MIDDLE, HELD))


# every fault of docs/spec/wire-protocol.md#route-checks in its order: (words for it, blob of two
# entries that has it and all below)
LATER = Hop(5, 5, 1).encode() + end(2, 9, 1)
FAULTS = [
    ("truncated route entry", entry()[:19]),
    ("host length", entry(host_len=0, host=b"\0", port=0, end=1, flags=3) + LATER),
    ("host contains NUL", entry(host=b"\0", port=0, end=1, flags=3) + LATER),
    ("port", entry(port=0, end=1, flags=3) + LATER),
    ("layer range", entry(end=1, flags=3) + LATER),
    ("flags", entry(flags=3) + LATER),
    ("final layer", entry(flags=1) + LATER),
    ("not contiguous", entry() + LATER),
    ("missing final destination", entry() + NEXT + end(2, 9, 1)[:11]),
    ("destination host length", entry() + NEXT + end(2, 9, 1)),
    ("destination host contains NUL", entry() + NEXT + end(2, 1, 1, b"\0")),
    ("unsupported", entry() + NEXT + end(2, 1, 1, b"h!")),
    ("upstream", entry() + NEXT + end(1, 1, 1, b"h!")),
    ("trailing", entry() + NEXT + end() + b"!"),
]


@pytest.mark.parametrize(("words", "blob"), FAULTS)
def test_statement_034_the_order_of_the_checks(words: str, blob: bytes) -> None:
    """The first fault of a route is told, in the order of wire-protocol.md#route-checks."""
    with driving("2-3") as peer:
        assert words in peer.refused(work(MIDDLE, HELD, blob=blob, route_count=2))


@pytest.mark.parametrize("layers", [(1, 3), (3, 3), (2, 2), (2, 4), (2, 5), (0, 5), (2, 2**32 - 1)])
def test_statement_035_exactly_its_own_layers(layers: tuple[int, int]) -> None:
    """A worker serves its whole range and nothing else, not even a part of it."""
    start, last = layers
    with worker("2-3") as w, dial(w.address) as peer:
        body = work(MIDDLE, HELD, layer_start=start, layer_end=last)
        assert refused_as(peer, w, body) == "W-LAYERS"
        peer.check(work(MIDDLE, HELD))


def test_statement_036_logits_as_the_route_says() -> None:
    """The flag for logits must stand in the WORK and in the route entry, or in neither."""
    with worker("4-5") as w, dial(w.address) as peer:
        for flags, hop in ((INPUT_HC, LAST), (INPUT_HC | OUTPUT_LOGITS, Hop(4, 5))):
            body = work(hop, HELD, flags=flags | RESET)
            assert refused_as(peer, w, body) == "W-RLOGITS"
        assert peer.check(work(LAST, HELD)).kind == LOGITS
        assert peer.check(work(Hop(4, 5), HELD)).kind == HIDDEN_STATE


@pytest.mark.parametrize(("hop", "kind", "changes"), ALONE, ids=NAMES)
def test_statement_037_each_row_alone(hop: Hop, kind: str, changes: Changes) -> None:
    """Every refusal leaves connection and session as they were: the next good span succeeds.

    Differs from C: W-OUTSIZE is found before anything is evaluated, so the session can go on.
    """
    with worker(layers_of(hop)) as w, dial(w.address) as peer:
        peer.check(work(hop, HELD))
        ids = changes.get("ids")
        hashed = {} if not ids else {"result_hash": token_hash([97], token_hash(HELD))}
        assert refused_as(peer, w, work(hop, [7], HELD, **(changes | hashed))) == kind
        peer.check(work(hop, [7], HELD))


def test_statement_037_logits_of_a_worker_that_does_not_end_the_model() -> None:
    """Logits are refused by a worker with a head whose layers are not the last ones."""
    with worker(LayerRange(2, 3, has_output=True)) as w, dial(w.address) as peer:
        body = work(MIDDLE, HELD, flags=INPUT_HC | OUTPUT_LOGITS | RESET)
        assert refused_as(peer, w, body) == "W-NOTLAST"
        peer.check(work(MIDDLE, HELD))


def test_statement_037_rows_that_no_frame_can_hold() -> None:
    """A span whose rows are larger than 4 GiB is refused, however small it comes."""
    wide = replace(card(), hidden_width=2**30)
    with worker("2-3", identity=wide) as w, dial(w.address) as peer:
        for _ in range(2):
            assert refused_as(peer, w, work(MIDDLE, [7])) == "W-TOOBIG"


def test_statement_037_a_session_that_can_not_be_made() -> None:
    """A session beyond what a stage can hold is refused (W-SESSION), and the others go on.

    Differs from C: a C worker has no limit. Sessions whose connection has ended make room.
    """
    with worker(n_slots=1) as w, dial(w.address) as one, dial(w.address) as other:
        one.check(work(WHOLE, HELD, session_id=1))
        for _ in range(2):
            assert "slots" in other.refused(work(WHOLE, HELD, session_id=2))
        one.check(work(WHOLE, [7], HELD, session_id=1))
        one.sock.close()
        body = work(WHOLE, HELD, session_id=2)
        wait_until(lambda: other.ask(body).status == 0, "the first connection made room")


def broken(work: ForwardRequest) -> None:
    """A device that fails on two tokens."""
    if 13 in work.tokens:
        raise RuntimeError("broken")
    if 14 in work.tokens:
        raise MemoryError


@pytest.mark.parametrize(
    ("tokens", "after"), [([13], HELD), ([14], HELD), ([13], [])], ids=["eval", "memory", "reset"]
)
def test_statement_037_a_device_that_fails(tokens: list[int], after: list[int]) -> None:
    """An evaluation or a reset that fails is an error RESULT (W-EVAL, W-OOM, W-RESET)."""
    with driving(before=broken) as peer:
        peer.check(work(WHOLE, HELD))
        assert "the device failed" in peer.refused(work(WHOLE, tokens, after))
        peer.check(work(WHOLE, HELD))
