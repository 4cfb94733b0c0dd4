"""Hand-driven peers over real sockets: a driver of a worker, a next hop, a dialling worker."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ds4py.activations import HiddenBatch
from ds4py.config import Address
from ds4py.layer_range import LayerRange
from ds4py.transport.connection import Connection
from ds4py.transport.connector import Connector
from ds4py.transport.sockets import Listener
from ds4py.wire.frames import FrameType, coordinator_limits, worker_limits
from ds4py.wire.messages import Hello, Result, ResultKind, Work, WorkFlags, WorkHeader, encode
from ds4py.wire.prefix_hash import extend, prefix_hash
from ds4py.wire.route import HopEntry, encode_route
from tests.fake_runner import N_VOCAB, WIDTH, card, embed
from tests.sockets import SOCKETS, Background, frames_over

ANYWHERE = Address("127.0.0.1", 9)
N_CTX = 64


def entry(layers: LayerRange, address: Address = ANYWHERE) -> HopEntry:
    return HopEntry(address.host, address.port, layers.start, layers.end, layers.has_output)


def make_work(
    hops: Sequence[HopEntry],
    before: Sequence[int],
    tokens: Sequence[int],
    /,
    *,
    request_id: int,
    session: int = 1,
    reset: bool | None = None,
    extra_flags: int = 0,
    bits: int = 32,
    **changes: object,
) -> Work:
    """An honest span for hop 0 of a route; `changes` replace fields of it."""
    first = hops[0]
    flags = WorkFlags(extra_flags)
    hidden = memoryview(b"")
    if first.layer_start:
        flags |= WorkFlags.INPUT_HC
        hidden = HiddenBatch.pack(embed(tokens), bits).data
    if first.has_output:
        flags |= WorkFlags.OUTPUT_LOGITS
    if reset if reset is not None else not before:
        flags |= WorkFlags.RESET_SESSION
    prefix = prefix_hash(before)
    fields: dict[str, object] = {
        "model_id": card().model_id,
        "session_id": session,
        "request_id": request_id,
        "prefix_hash": prefix,
        "result_hash": extend(prefix, tokens),
        "pos0": len(before),
        "layer_start": first.layer_start,
        "layer_end": first.layer_end,
        "flags": flags,
        "input_hc_bits": bits,
        "route_count": len(hops),
        "route_index": 0,
        "tokens": tuple(tokens),
        "input": hidden,
        "route_blob": memoryview(encode_route(hops)),
    }
    return Work(**(fields | changes))  # type: ignore[arg-type]


class Driver:
    """Drives one worker over a data connection, span by span."""

    def __init__(self, connection: Connection, hops: Sequence[HopEntry]):
        self.connection = connection
        self.hops = tuple(hops)
        self._ids = itertools.count(1)

    def ask(self, before: Sequence[int], tokens: Sequence[int], /, **more: object) -> Work:
        """Send a span and return it."""
        more.setdefault("request_id", next(self._ids))
        work = make_work(self.hops, before, tokens, **more)  # type: ignore[arg-type]
        self.connection.send(encode(work))
        return work

    def answer(self) -> Result:
        """Wait for the next RESULT."""
        frame = Background(self.connection.receive).result()
        assert frame is not None, "the worker closed the connection"
        assert frame.type == FrameType.RESULT
        return Result.decode(frame.body)

    def check(self, before: Sequence[int], tokens: Sequence[int], /, **more: object) -> Result:
        """Ask and expect success."""
        work = self.ask(before, tokens, **more)
        result = self.answer()
        assert (result.request_id, result.status) == (work.request_id, 0), result.text
        assert result.result_hash == work.result_hash
        return result

    def refused(self, before: Sequence[int], tokens: Sequence[int], /, **more: object) -> str:
        """Ask and expect an error for this request; return its text."""
        work = self.ask(before, tokens, **more)
        result = self.answer()
        assert (result.request_id, result.status) == (work.request_id, 1)
        assert (result.result_hash, result.result_kind, result.payload_bits) == (0, 0, 0)
        return result.text


@contextmanager
def driver(address: Address, *hops: HopEntry) -> Iterator[Driver]:
    """Connect to a worker's data port."""
    limits = coordinator_limits(N_VOCAB, WIDTH, N_CTX)
    connection = Connector(SOCKETS).connect(address, limits)
    try:
        yield Driver(connection, hops)
    finally:
        connection.close()


class NextHop:
    """A worker behind a worker, answered by hand."""

    def __init__(self) -> None:
        self._listener = Listener(Address("127.0.0.1", 0), SOCKETS)
        self.address = self._listener.address
        self.connections: list[Connection] = []

    def accept(self) -> Connection:
        sock = Background(self._listener.accept).result()
        assert sock is not None
        connection = frames_over(sock, worker_limits(N_CTX, WIDTH))
        self.connections.append(connection)
        return connection

    def close(self) -> None:
        self._listener.close()
        for connection in self.connections:
            connection.close()


@contextmanager
def next_hop() -> Iterator[NextHop]:
    hop = NextHop()
    try:
        yield hop
    finally:
        hop.close()


def take_work(connection: Connection) -> Work:
    """Wait for a WORK."""
    frame = Background(connection.receive).result()
    assert frame is not None, "the connection ended"
    assert frame.type == FrameType.WORK
    return Work.from_body(WorkHeader.decode(frame.body), frame.body)


def logits_for(work: Work) -> Result:
    """A good answer with logits that name their request."""
    logits = np.full(N_VOCAB, work.request_id, "<f4")
    return Result(
        request_id=work.request_id,
        result_hash=work.result_hash,
        result_kind=ResultKind.LOGITS,
        payload=logits.data.cast("B"),
        payload_bits=32,
    )


def hello(layers: LayerRange, **changes: object) -> Hello:
    """An acceptable introduction of a worker of the fake model."""
    identity = card()
    fields: dict[str, object] = {
        "model_id": identity.model_id,
        "quant_bits": identity.quant_bits,
        "layer_start": layers.start,
        "layer_end": layers.end,
        "has_output": int(layers.has_output),
        "has_hidden": 1,
        "ctx_size": N_CTX,
        "n_layers": identity.n_layers,
        "listen_port": 7000,
        "model_name": identity.name.encode(),
    }
    return Hello(**(fields | changes))  # type: ignore[arg-type]


@contextmanager
def dial_in(address: Address, introduction: Hello) -> Iterator[Connection]:
    """Register as a worker, as a stock one does."""
    limits = worker_limits(N_CTX, WIDTH)
    connection = Connector(SOCKETS).connect(address, limits)
    try:
        connection.send(encode(introduction))
        yield connection
    finally:
        connection.close()
