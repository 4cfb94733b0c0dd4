"""What a coordinator makes of what a worker says of itself.

Owns: the table of docs/spec/wire-protocol.md#hello in its order, with the words that a refused
worker reads, and the record of one that is not refused (docs/design/protocol-extensions.md).
Refuses to know: who dials whom, what follows. Invariant: the first failing row decides, and no
record is made of a worker that was refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ds4py.config import Address
from ds4py.coordinator.relay.workers.registry import LinkId, WorkerRecord
from ds4py.layer_range import LayerRange
from ds4py.peer.known_peers import PeerIdentityLog
from ds4py.peer.liveness import agreed_timeout
from ds4py.wire.extensions import PeerHello
from ds4py.wire.frames import printable
from ds4py.wire.messages import Hello

Faults = Iterator[tuple[str, str]]
"""(class name of the spec, text for the peer), the first one counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a peer is not accepted.

    Args:
        kind: Class name of the spec, such as "H-CTX".
        text: One line for the peer.
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorFacts:
    """What a HELLO is compared with; `n_ctx` 0 accepts any context."""

    model_id: int
    name: str
    n_layers: int
    n_ctx: int


def check_hello(hello: Hello | PeerHello, facts: CoordinatorFacts) -> Refusal | None:
    """Go through rows 5 to 14 of the table in wire-protocol.md#hello; rows 1 to 4 are decoding.

    Args:
        hello: What a worker said, in plain or in extended form.
        facts: Of this coordinator.

    Returns:
        None if the worker may serve.
    """
    for kind, text in _hello_faults(hello, facts):
        return Refusal(kind=kind, text=text)
    return None


def _hello_faults(hello: Hello | PeerHello, facts: CoordinatorFacts) -> Faults:
    ours = facts.name.encode("utf-8", errors="replace")
    name = hello.model_name
    theirs = name if isinstance(name, bytes) else name.encode("utf-8", errors="replace")
    same_file = "; start both with the same model"
    if hello.model_id != facts.model_id:
        both = f"worker={hello.model_id} coordinator={facts.model_id}"
        yield "H-MODEL-ID", f"model id mismatch: {both}{same_file}"
    if theirs != ours:
        both = f"worker={printable(theirs)} coordinator={printable(ours)}"
        yield "H-MODEL-NAME", f"model family mismatch: {both}{same_file}"
    if hello.n_layers != facts.n_layers:
        both = f"worker={hello.n_layers} coordinator={facts.n_layers}"
        yield "H-LAYERS", f"layer count mismatch: {both}{same_file}"
    if hello.quant_bits not in {2, 4}:
        yield "H-QUANT", f"unsupported worker quant profile Q{hello.quant_bits}"
    if hello.has_output > 1:
        yield "H-OUTFLAG", f"invalid worker output-head flag {hello.has_output}"
    if hello.has_hidden > 1:
        yield "H-HIDFLAG", f"invalid worker hidden-state flag {hello.has_hidden}"
    yield from _range_faults(hello, facts)
    if facts.n_ctx and hello.ctx_size < facts.n_ctx:
        both = f"worker={hello.ctx_size} coordinator={facts.n_ctx}"
        hint = f"; start the worker with a context of at least {facts.n_ctx} tokens"
        yield "H-CTX", f"worker context too small: {both}{hint}"
    # an extended peer that was dialled is reached where it was dialled, and names no port
    if hello.listen_port is not None and not 1 <= hello.listen_port <= 65535:
        yield "H-PORT", f"invalid worker data listen port {hello.listen_port}"


def _range_faults(hello: Hello | PeerHello, facts: CoordinatorFacts) -> Faults:
    """Rows 11 and 12."""
    start, end = hello.layer_start, hello.layer_end
    if start is None or end is None:
        yield "H-RANGE", f"worker names no layers of the {facts.n_layers} layers"
    elif not start <= end < facts.n_layers:
        yield (
            "H-RANGE",
            f"invalid worker layer range {start}:{end} for {facts.n_layers} layers",
        )
    elif hello.has_output and end + 1 != facts.n_layers:
        where = f"range={start}:{end} layers={facts.n_layers}"
        yield "H-OUTRANGE", f"worker output head requires final layer: {where}"


class RegistrarHost(Protocol):
    """What both ways to a worker need of the coordinator."""

    known_peers: PeerIdentityLog

    def introduce(self) -> PeerHello:
        """Return our half of the handshake."""

    def facts(self) -> CoordinatorFacts:
        """Return what a worker's half is compared with."""

    def new_link_id(self) -> LinkId:
        """Return a name for a new link."""


def refusal_of(hello: PeerHello, facts: CoordinatorFacts) -> str | None:
    """Return why a ds4py cannot serve as a worker, in words for both logs."""
    if hello.role != "worker":
        return "is no worker"
    refusal = check_hello(hello, facts)
    return None if refusal is None else refusal.text


def layers_of(hello: PeerHello) -> LayerRange:
    """Return the layers of a worker that was not refused."""
    assert hello.layer_start is not None
    assert hello.layer_end is not None
    return LayerRange(hello.layer_start, hello.layer_end, hello.has_output)


def register(
    host: RegistrarHost, hello: PeerHello, address: Address, *, dialled: bool
) -> WorkerRecord:
    """Make the acquaintance of a worker that was not refused, and describe it.

    Args:
        host: The coordinator.
        hello: What the worker says.
        address: Where other stages reach it.
        dialled: We connected to it, not it to us.
    """
    record = WorkerRecord(
        link=host.new_link_id(),
        address=address,
        layers=layers_of(hello),
        n_ctx=hello.ctx_size,
        has_hidden=hello.has_hidden,
        dialled=dialled,
        features=frozenset(hello.features),
        weight_bytes=hello.weight_bytes,
        alive_timeout=agreed_timeout(host.introduce().alive_timeout, hello.alive_timeout),
    )
    host.known_peers.meet(record.name, hello)
    return record
