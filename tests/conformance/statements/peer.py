"""A peer written from the tables of docs/spec/wire-protocol.md alone, and ds4py to meet it.

Owns: the byte layouts that the numbered tests of this folder need. Refuses to know: `ds4py.wire`.
Invariant: no frame that a peer sends or reads passes through code of ds4py, so a misreading of the
tables cannot hide on both sides of a test.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from ds4py.config import Address, CoordinatorConfig, WorkerConfig, WorkerTuning
from ds4py.contracts import Session
from ds4py.coordinator.relay.workers.registry import WorkerRecord
from ds4py.layer_range import LayerRange, LayerSpec
from ds4py.worker.worker import Worker
from tests.by_hand import PROMPT
from tests.clusters import ANY_PORT, SOCKETS, Cluster, cluster, registered, span, wait_until
from tests.fake_runner import N_VOCAB, FakeRunner, card, embed
from tests.sockets import DEADLINE, read_exactly, read_to_end

HELLO, ERROR, WORK, RESULT, SAVE_REQ, BEGIN, CHUNK, DONE, LOAD_BEGIN = range(1, 10)
INPUT_HC, OUTPUT_LOGITS, RESET, ACK_ONLY = 1, 2, 4, 8
ACK, HIDDEN_STATE, LOGITS = 0, 1, 2
INIT = 1469598103934665603
N_CTX = 64
SOME_LOGITS = np.arange(N_VOCAB, dtype="<f4").tobytes()
HASTY = CoordinatorConfig(rejoin_timeout=0, result_timeout=3 * DEADLINE)
"""A lost worker fails the call at once, and one that is not lost is waited for longer than a peer
waits for its connection to end."""


def frame(kind: int, body: bytes = b"") -> bytes:
    return struct.pack(">4sII", b"DS4D", kind, len(body)) + body


def token_hash(tokens: Sequence[int], h: int = INIT) -> int:
    for token in tokens:
        for byte in token.to_bytes(4, "little"):
            h = (h ^ byte) * 1099511628211 % 2**64
    return h


class Hop(NamedTuple):
    """One entry of a route (docs/spec/wire-protocol.md#route-plan)."""

    start: int
    end: int
    output: int = 0
    host: bytes = b"127.0.0.1"
    port: int = 9

    def encode(self) -> bytes:
        fixed = (len(self.host), self.port, self.start, self.end, self.output)
        return struct.pack(">5I", *fixed) + self.host


WHOLE = Hop(0, 5, 1)
RETURN = struct.pack(">3I", 1, 0, 0)


def route(*hops: Hop) -> bytes:
    return b"".join(hop.encode() for hop in hops) + RETURN


def hello(**changes: int | bytes) -> bytes:
    """Body of an acceptable HELLO of a worker with every layer, then changed.

    See docs/spec/wire-protocol.md#hello.
    """
    values: dict[str, int | bytes] = {
        "model_id": card().model_id,
        "quant_bits": 4,
        "layer_start": 0,
        "layer_end": 5,
        "has_output": 1,
        "has_hidden": 1,
        "ctx_size": N_CTX,
        "n_layers": 6,
        "listen_port": 7000,
    }
    name = changes.pop("name", b"fake")
    assert isinstance(name, bytes)
    values = values | {"name_len": len(name)} | changes
    return struct.pack(">10I", *values.values()) + name


@dataclass(frozen=True)
class Asked:
    """The fixed record of a WORK in its order, and the three parts behind it.

    See docs/spec/wire-protocol.md#work.
    """

    model_id: int
    session_id: int
    request_id: int
    prefix_hash: int
    result_hash: int
    pos0: int
    n_tokens: int
    layer_start: int
    layer_end: int
    flags: int
    token_bytes: int
    input_hc_bytes: int
    input_hc_bits: int
    route_count: int
    route_index: int
    route_bytes: int
    ids: bytes
    hidden: bytes
    blob: bytes

    @property
    def tokens(self) -> tuple[int, ...]:
        return struct.unpack(f">{self.n_tokens}I", self.ids)


_FIXED = [field.name for field in fields(Asked)][:16]


def read_work(body: bytes) -> Asked:
    values = dict(zip(_FIXED, struct.unpack_from(">IQQQQ11I", body), strict=True))
    parts, at = [], 80
    for size in ("token_bytes", "input_hc_bytes", "route_bytes"):
        parts.append(body[at : at + values[size]])
        at += values[size]
    assert at == len(body)
    return Asked(*values.values(), *parts)


def pack_rows(rows: np.ndarray, bits: int) -> bytes:
    """Rows of small integers in 32 or 16 bits; zeros of the right size in 8.

    See docs/spec/wire-protocol.md#32-bit, #to-binary16.
    """
    kind = {32: "<f4", 0: "<f4", 16: "<f2"}.get(bits)
    return bytes(rows.size) if kind is None else rows.astype(kind).tobytes()


def work(
    hops: Sequence[Hop] | Hop,
    tokens: Sequence[int],
    after: Sequence[int] = (),
    **changes: int | bytes,
) -> bytes:
    """Body of an honest WORK for the first hop, then changed.

    `changes` are fields of `Asked`. The sizes follow changed parts, unless they are changed too.
    """
    hops = [hops] if isinstance(hops, Hop) else hops
    hop, bits = hops[0], changes.get("input_hc_bits", 32)
    assert isinstance(bits, int)
    parts = {
        "ids": struct.pack(f">{len(tokens)}I", *tokens),
        "hidden": pack_rows(embed(tokens), bits) if hop.start else b"",
        "blob": route(*hops),
    }
    ids, hidden, blob = (changes.pop(name, part) for name, part in parts.items())
    prefix = changes.get("prefix_hash", token_hash(after))
    assert isinstance(prefix, int)
    flags = (INPUT_HC if hop.start else 0) | (OUTPUT_LOGITS if hop.output else 0)
    values = {
        "model_id": card().model_id,
        "session_id": 1,
        "request_id": 42,
        "prefix_hash": prefix,
        "result_hash": token_hash(tokens, prefix),
        "pos0": len(after),
        "n_tokens": len(tokens),
        "layer_start": hop.start,
        "layer_end": hop.end,
        "flags": flags if after else flags | RESET,
        "token_bytes": len(ids),
        "input_hc_bytes": len(hidden),
        "input_hc_bits": bits,
        "route_count": len(hops),
        "route_index": 0,
        "route_bytes": len(blob),
    }
    return struct.pack(">IQQQQ11I", *(values | changes).values()) + ids + hidden + blob


class Answer(NamedTuple):
    """A RESULT (docs/spec/wire-protocol.md#result)."""

    request_id: int
    result_hash: int
    status: int
    kind: int
    telemetry_count: int
    telemetry_bytes: int
    payload_bytes: int
    bits: int
    telemetry: bytes
    payload: bytes


def read_result(body: bytes) -> Answer:
    fixed = struct.unpack_from(">QQ6I", body)
    at = 40 + fixed[5]
    return Answer(*fixed, body[40:at], body[at:])


def result(
    asked: Asked,
    kind: int = LOGITS,
    payload: bytes = SOME_LOGITS,
    bits: int = 32,
    telemetry: bytes = b"",
    **changes: int,
) -> bytes:
    """Body of a good RESULT, then changed; `changes` are fields of `Answer`."""
    values = {
        "request_id": asked.request_id,
        "result_hash": asked.result_hash,
        "status": 0,
        "kind": kind,
        "telemetry_count": len(telemetry) // 40,
        "telemetry_bytes": len(telemetry),
        "payload_bytes": len(payload),
        "bits": bits,
    }
    return struct.pack(">QQ6I", *(values | changes).values()) + telemetry + payload


def refusal(asked: Asked, text: bytes, **changes: int) -> bytes:
    """Body of an error RESULT."""
    return result(asked, ACK, text, 0, **({"result_hash": 0, "status": 1} | changes))


class Peer:
    """One end of a connection, byte for byte."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        sock.settimeout(DEADLINE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def say(self, data: bytes, piece: int = 1 << 20) -> None:
        """Send bytes, in pieces that arrive one by one if they are small."""
        for at in range(0, len(data), piece):
            self.sock.sendall(data[at : at + piece])
            time.sleep(0.0002 if piece < 1 << 20 else 0)

    def send(self, kind: int, body: bytes = b"") -> None:
        self.say(frame(kind, body))

    def finish(self) -> None:
        """Say no more, but listen on; the other side may have closed already."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def read(self) -> tuple[int, bytes]:
        """Return type and body of the next frame."""
        head = read_exactly(self.sock, 12)
        assert len(head) == 12, "the connection ended"
        magic, kind, size = struct.unpack(">4sII", head)
        assert magic == b"DS4D"
        body = read_exactly(self.sock, size)
        assert len(body) == size, "the connection ended inside a frame"
        return kind, body

    def expect(self, kind: int) -> bytes:
        """Return the body of the next frame, which must have this type."""
        got, body = self.read()
        assert got == kind, f"type {got}: {body[:60]!r}"
        return body

    def answer(self) -> Answer:
        return read_result(self.expect(RESULT))

    def asked(self) -> Asked:
        return read_work(self.expect(WORK))

    def ask(self, body: bytes) -> Answer:
        self.send(WORK, body)
        return self.answer()

    def check(self, body: bytes) -> Answer:
        """Ask and expect success."""
        got, wanted = self.ask(body), struct.unpack_from(">8xQ8xQ", body, 4)
        assert (got.status, (got.request_id, got.result_hash)) == (0, wanted), got.payload
        return got

    def refused(self, body: bytes, request_id: int = 42) -> str:
        """Ask and expect a refusal; return its words."""
        got = self.ask(body)
        assert got[:6] == (request_id, 0, 1, 0, 0, 0)
        assert (got.payload_bytes, got.bits) == (len(got.payload), 0)
        return got.payload.decode()

    def ended(self) -> bool:
        """Whether the connection ends without another byte."""
        return read_to_end(self.sock) == b""

    def hears_nothing(self, seconds: float = 0.05) -> bool:
        """Whether the connection stands and is silent for a while."""
        self.sock.settimeout(seconds)
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self.sock.settimeout(DEADLINE)
        return False


@contextmanager
def dial(address: Address, source: str = "127.0.0.1") -> Iterator[Peer]:
    target = (address.host, address.port)
    with socket.create_connection(target, DEADLINE, source_address=(source, 0)) as sock:
        yield Peer(sock)


class Door:
    """Where a worker is awaited, by a coordinator or by the hop before."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(DEADLINE)
        self.address = Address(*self._server.getsockname())
        self._peers: list[Peer] = []

    def accept(self) -> Peer:
        peer = Peer(self._server.accept()[0])
        self._peers.append(peer)
        return peer

    def close(self) -> None:
        self._server.close()
        for peer in self._peers:
            peer.sock.close()


@contextmanager
def door() -> Iterator[Door]:
    opened = Door()
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def worker(
    layers: str | LayerRange = "0-5",
    *,
    coordinator: Address | None = None,
    plain: bool = False,
    tuning: WorkerTuning | None = None,
    **runner: object,
) -> Iterator[Worker]:
    """Run a worker of the fake model; `runner` are fields of `FakeRunner`."""
    owned = span(layers) if isinstance(layers, str) else layers
    config = WorkerConfig(
        layers=LayerSpec(owned.start, owned.end),
        listen=ANY_PORT,
        coordinator=coordinator,
        plain=plain,
        tuning=tuning or WorkerTuning(),
    )
    started = Worker(FakeRunner(owned, **runner), config, SOCKETS)  # type: ignore[arg-type]
    started.start()
    try:
        yield started
    finally:
        started.close()


@contextmanager
def driving(layers: str | LayerRange = "0-5", **fields: object) -> Iterator[Peer]:
    """Drive a worker over its data port; `fields` as in `worker`."""
    with worker(layers, **fields) as w, dial(w.address) as peer:  # type: ignore[arg-type]
        yield peer


def workers(c: Cluster) -> tuple[WorkerRecord, ...]:
    """Return who is registered."""
    return registered(c.coordinator)


@contextmanager
def enlisted(c: Cluster, *, source: str = "127.0.0.1", **changes: int | bytes) -> Iterator[Peer]:
    """Register one more worker; `changes` as in `hello`."""
    known = set(workers(c))
    with dial(c.port.address, source) as peer:
        peer.send(HELLO, hello(**changes))
        wait_until(lambda: bool(set(workers(c)) - known), "it is registered")
        yield peer


class Scene(NamedTuple):
    """A coordinator, its one worker, answered by hand, and a session over it."""

    cluster: Cluster
    peer: Peer
    session: Session


@contextmanager
def driven(
    *,
    config: CoordinatorConfig = HASTY,
    local: str | None = None,
    head: bool = False,
    introduction: dict[str, int | bytes] | None = None,
    **prefill: object,
) -> Iterator[Scene]:
    """Be a coordinator's worker; `introduction` are changes of its HELLO."""
    with (
        cluster([], config=config, local=local, head=head, **prefill) as c,
        enlisted(c, **(introduction or {})) as peer,
        c.backend.lease(PROMPT) as session,
    ):
        yield Scene(c, peer, session)
