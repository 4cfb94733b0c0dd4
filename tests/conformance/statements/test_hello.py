"""Statements 9 to 17: introductions, wire-protocol.md#hello row by row, registration, refusals."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from ds4py.config import Address
from ds4py.coordinator.relay.workers.worker_hello import CoordinatorFacts, check_hello
from ds4py.wire.messages import Hello
from tests.by_hand import PROMPT
from tests.clusters import Cluster, cluster, wait_until
from tests.conformance.statements.peer import (
    ERROR,
    HELLO,
    N_CTX,
    RESULT,
    WHOLE,
    WORK,
    Peer,
    dial,
    door,
    driven,
    enlisted,
    frame,
    hello,
    result,
    work,
    worker,
    workers,
)
from tests.fake_runner import card
from tests.sockets import Background, read_exactly, read_to_end
from tests.strategies import attempt

FACTS = CoordinatorFacts(model_id=card().model_id, name="fake", n_layers=6, n_ctx=N_CTX)
Changes = dict[str, int | bytes]

# table docs/spec/wire-protocol.md#hello: (class, changes of an acceptable HELLO); row 1 is the type
# of the frame
SILENT: list[tuple[str, Changes]] = [
    ("H-LENGTH", {"name": b"\0" * 128}),
    ("H-NAMELEN", {"name": b"\0ke", "name_len": 4}),
    ("H-NUL", {"name": b"fa\0e"}),
]
SPOKEN: list[tuple[str, Changes]] = [
    ("H-MODEL-ID", {"model_id": 8}),
    ("H-MODEL-NAME", {"name": b"Fake"}),
    ("H-LAYERS", {"n_layers": 7}),
    ("H-QUANT", {"quant_bits": 3}),
    ("H-OUTFLAG", {"has_output": 2}),
    ("H-HIDFLAG", {"has_hidden": 2}),
    ("H-RANGE", {"layer_start": 6}),
    ("H-OUTRANGE", {"layer_end": 4}),
    ("H-CTX", {"ctx_size": N_CTX - 1}),
    ("H-PORT", {"listen_port": 0}),
]
ROWS = SILENT + SPOKEN
MORE: list[tuple[str, Changes]] = [
    ("H-NAMELEN", {"name_len": 3}),
    ("H-NAMELEN", {"name_len": 128}),
    ("H-MODEL-NAME", {"name": b""}),
    ("H-MODEL-NAME", {"name": b"fake "}),
    ("H-LAYERS", {"n_layers": 5}),
    ("H-RANGE", {"layer_end": 6}),
    ("H-RANGE", {"layer_start": 3, "layer_end": 2, "has_output": 0}),
]


def kind_of(body: bytes) -> tuple[str, str]:
    """Return the class of a refused HELLO and the words for it, which are empty if it is silent."""
    got, kind = attempt(lambda: Hello.decode(memoryview(body)))
    if got is None:
        return kind, ""
    refusal = check_hello(got, FACTS)
    assert refusal is not None
    return refusal.kind, refusal.text


@pytest.fixture(scope="module")
def coordinator() -> Iterator[Cluster]:
    with cluster([]) as c:
        yield c


def introduce(c: Cluster, body: bytes, kind: int = HELLO) -> str:
    """Return the ERROR that a coordinator answers before it closes; empty if it says nothing."""
    with dial(c.port.address) as peer:
        peer.send(kind, body)
        stream = read_to_end(peer.sock)
        assert stream in {b"", frame(ERROR, stream[12:])}
        return stream[12:].decode()


def test_statement_009_the_introduction_of_a_worker() -> None:
    """A HELLO is 40 bytes and the name, which nothing terminates; a worker says it first."""
    with door() as c, worker("3-5", coordinator=c.address, plain=True) as w:
        peer = c.accept()
        port = w.address.port
        body = hello(layer_start=3, listen_port=port)
        assert len(body) == 40 + len("fake")
        assert read_exactly(peer.sock, 12 + len(body)) == frame(HELLO, body)
        assert peer.hears_nothing()


def test_statement_009_another_ds4py_is_asked_for_first() -> None:
    """A worker that was not told to be plain says its HELLO after one connection closed on it.

    Differs from C: a worker first asks a coordinator that it dials whether it is a ds4py too, on a
    connection that one of ds4 closes in silence. A setting forbids it.
    """
    with door() as c, worker("3-5", coordinator=c.address) as w:
        first = c.accept()
        kind, _ = first.read()
        assert kind == 256
        first.sock.close()
        assert c.accept().expect(HELLO) == hello(layer_start=3, listen_port=w.address.port)


@pytest.mark.parametrize("row", range(len(ROWS)), ids=[kind for kind, _ in ROWS])
def test_statement_010_the_first_fault_counts(row: int, coordinator: Cluster) -> None:
    """A HELLO that fails a row of the table and all rows below it is refused for that row."""
    changes: Changes = {}
    for _, fault in reversed(ROWS[row:]):
        changes |= fault
    body = hello(**changes)
    kind, text = kind_of(body)
    assert kind == ROWS[row][0]
    assert introduce(coordinator, body) == text


def test_statement_010_the_type_counts_before_all(coordinator: Cluster) -> None:
    """A frame of another type is closed on in silence, though its body would earn an ERROR."""
    for body in (hello(), hello(model_id=8), b""):
        for kind in (ERROR, WORK, RESULT, 5, 6, 7, 8, 9, 10, 2**32 - 1):
            assert introduce(coordinator, body, kind) == ""


@pytest.mark.parametrize(("kind", "changes"), [*ROWS, *MORE])
def test_statement_011_each_fault_alone(kind: str, changes: Changes, coordinator: Cluster) -> None:
    """Faults of form are closed on in silence, faults of fact are told in an ERROR before that."""
    body = hello(**changes)
    got, text = kind_of(body)
    assert got == kind
    assert bool(text) == (kind not in {name for name, _ in SILENT})
    assert introduce(coordinator, body) == text
    assert not workers(coordinator)


@pytest.mark.parametrize("size", [0, 39])
def test_statement_011_a_short_introduction(size: int, coordinator: Cluster) -> None:
    """A HELLO shorter than its fixed record is closed on in silence."""
    body = hello()[:size]
    assert kind_of(body) == ("H-LENGTH", "")
    assert introduce(coordinator, body) == ""


def refused(c: Cluster, kind: str, **changes: int) -> None:
    """Introduce a worker that is told why it is not accepted."""
    body = hello(**changes)
    got, text = kind_of(body)
    assert (got, introduce(c, body)) == (kind, text)
    assert text


@pytest.mark.parametrize("ctx", [N_CTX, N_CTX + 1, 2**32 - 1])
def test_statement_012_context_enough(ctx: int, coordinator: Cluster) -> None:
    """A worker with the coordinator's context is accepted, with one token less it is refused."""
    with enlisted(coordinator, ctx_size=ctx):
        refused(coordinator, "H-CTX", ctx_size=N_CTX - 1)
    wait_until(lambda: not workers(coordinator), "it left")


@pytest.mark.parametrize("port", [0, 65536, 2**32 - 1])
def test_statement_013_ports(port: int, coordinator: Cluster) -> None:
    """A data port must be between 1 and 65535."""
    refused(coordinator, "H-PORT", listen_port=port)
    for good in (1, 65535):
        with enlisted(coordinator, listen_port=good):
            assert workers(coordinator)[0].address == Address("127.0.0.1", good)
        wait_until(lambda: not workers(coordinator), "it left")


def test_statement_014_quant_bits(coordinator: Cluster) -> None:
    """Weights of 2 and of 4 bits are accepted side by side, other widths are refused."""
    with (
        enlisted(coordinator, quant_bits=2, layer_end=2, has_output=0),
        enlisted(coordinator, quant_bits=4, layer_start=3),
    ):
        for bits in (0, 1, 3, 8, 2**32 - 1):
            refused(coordinator, "H-QUANT", quant_bits=bits)
        assert len(workers(coordinator)) == 2
    wait_until(lambda: not workers(coordinator), "they left")


def test_statement_015_acceptance_is_silent() -> None:
    """An accepted worker hears nothing before its first WORK."""
    with driven() as (_, peer, session):
        assert peer.hears_nothing(0.2)
        asking = Background(lambda: session.sync(PROMPT))
        peer.send(RESULT, result(peer.asked()))
        asking.result()


def test_statement_016_a_second_registration_replaces_the_first() -> None:
    """A worker of the same host, layers and head takes the place of the one before, at any port.

    The displaced connection is left open and unused, as in C (docs/spec/wire-protocol.md#quirks
    Q2).
    """
    with driven() as (c, old, session), enlisted(c, listen_port=7001) as new:
        (record,) = workers(c)
        assert record.address.port == 7001
        asking = Background(lambda: session.sync(PROMPT))
        new.send(RESULT, result(new.asked()))
        asking.result()
        assert old.hears_nothing()


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        ({"layer_end": 4, "has_output": 0}, "127.0.0.1"),
        ({"layer_start": 1}, "127.0.0.1"),
        ({"has_output": 0}, "127.0.0.1"),
        ({}, "127.0.0.2"),
    ],
    ids=["end", "start", "head", "host"],
)
def test_statement_016_others_stand_beside_it(changes: Changes, source: str) -> None:
    """A worker that differs in host, layers or head replaces nobody."""
    with driven() as (c, old, _), enlisted(c, source=source, **changes):
        assert len(workers(c)) == 2
        assert old.hears_nothing()


def refuse(peer: Peer, text: bytes) -> None:
    peer.expect(HELLO)
    peer.send(ERROR, text)
    assert peer.ended()


def test_statement_017_a_refused_worker_comes_back() -> None:
    """A worker that reads an ERROR closes, waits about a second and introduces itself again."""
    with door() as c, worker(coordinator=c.address, plain=True):
        refuse(c.accept(), b"no room")
        left = time.monotonic()
        again = c.accept()
        assert 0.9 < time.monotonic() - left < 3
        again.expect(HELLO)
        assert again.check(work(WHOLE, PROMPT)).status == 0


@pytest.mark.parametrize("text", [b"", b"no room", b"\xff\0\n" * 1000])
def test_statement_017_an_error_ends_any_connection(text: bytes, caplog) -> None:
    """An ERROR ends a data connection as well, whatever its text, and the worker serves on."""
    with worker() as w:
        with dial(w.address) as peer:
            peer.check(work(WHOLE, PROMPT))
            peer.send(ERROR, text)
            assert peer.ended()
        with dial(w.address) as peer:
            peer.check(work(WHOLE, [7], PROMPT))
    assert all(len(record.getMessage()) < 700 for record in caplog.records)
