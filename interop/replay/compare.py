"""How far a live program's frame is from the recorded one.

Owns: the comparison of two messages, and every tolerance. Refuses to know: sockets, scenarios.
Invariant: a field that the recording determines is compared for equality; only computed numbers may
be near instead of equal, and only times, the tails of texts and the insides of shards are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ds4py import activations
from ds4py.activations import F32
from ds4py.wire.frames import Buffer, printable
from ds4py.wire.messages import Result, ResultKind, Telemetry, WireMessage, Work
from interop.replay.recording import N_LAYERS

_SHARD_HEADER_BYTES: Final = 56  # docs/spec/wire-protocol.md#dsvl
_RELAY_TIMES: Final = {"downstream_wait_usec", "forward_send_usec"}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far computed numbers may be from recorded ones.

    Args:
        typical: For the median of all distances in a replay.
        largest: For each of them.
    """

    typical: float
    largest: float


TOLERANCES: Final[Mapping[str, Tolerance]] = {
    "logits": Tolerance(0.06, 0.4),
    "own head's logits": Tolerance(0.01, 0.06),
    "hidden at 32 bits": Tolerance(0.01, 0.2),
    "hidden at 16 bits": Tolerance(0.01, 0.2),
    "hidden at 8 bits": Tolerance(0.03, 0.2),
    "own cache": Tolerance(0.03, 0.2),
}
"""The C engine's own spread between two builds and between disturbed runs: 8-bit roundings of
activations that land on the other side, rarely another expert or another row.

Logits (deviation about 3.2): RMS of the difference; the recorded runs lie 0.04 to 0.06 apart, up to
0.4 when an expert changes. Of a head alone: the share of its one rounding. Hidden states: RMS of a
row's difference over the RMS of the row; the recorded runs lie 0.01 apart after all layers, and one
row whose expert or index row changes 0.1. At 8 bits some values of a row land one step (up to 1/8)
away: the geometric mean of the spread and a mean step of 0.09. Rows of a cache have been rounded
alike."""


@dataclass(frozen=True, slots=True)
class Unlike:
    """One field that is not as recorded.

    Args:
        field: Its name in the message, or in a part of the message.
        expected: As recorded.
        got: As the live party has it.
    """

    field: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}, got {self.got}"


@dataclass(slots=True)
class Comparison:
    """The outcome of comparing messages.

    Args:
        unlike: Fields that differ.
        distances: Of computed numbers, by what they are (a key of `TOLERANCES`).
    """

    unlike: list[Unlike] = field(default_factory=list)
    distances: dict[str, list[float]] = field(default_factory=dict)

    def equal(self, name: str, expected: object, got: object) -> None:
        """Compare for equality."""
        if expected != got:
            self.unlike.append(Unlike(name, str(expected), str(got)))

    def near(self, name: str, what: str, distances: npt.NDArray[np.float64]) -> None:
        """Compare distances with the largest that is tolerated; NaN is beyond it."""
        self.distances.setdefault(what, []).extend(distances.tolist())
        limit = TOLERANCES[what].largest
        if not np.all(distances <= limit):
            self.unlike.append(Unlike(name, f"{what} within {limit}", f"{distances.max():.3g}"))

    def same_bytes(self, name: str, expected: Buffer, got: Buffer) -> None:
        """Compare bytes for equality, naming the first that differs."""
        own, live = (np.frombuffer(part, np.uint8) for part in (expected, got))
        self.equal(f"{name} bytes", own.size, live.size)
        if own.size == live.size and (unlike := np.flatnonzero(own != live)).size:
            at = int(unlike[0])
            self.equal(f"{name}[{at}]", f"{own[at]:#04x}", f"{live[at]:#04x}")


def settle(distances: Mapping[str, Sequence[float]]) -> Comparison:
    """Compare the median of each kind of distance with what is typical.

    Args:
        distances: Of a whole replay, by what they are.
    """
    found = Comparison()
    for what, values in distances.items():
        typical, median = TOLERANCES[what].typical, float(np.median(values))
        if not median <= typical:
            found.unlike.append(Unlike(f"median of {what}", f"within {typical}", f"{median:.3g}"))
    return found


def compare(expected: WireMessage, got: WireMessage, *, copies: bool = False) -> Comparison:
    """Compare two messages field by field.

    Args:
        expected: The recorded one, with what must differ already replaced.
        got: The live one.
        copies: Whether shards are copies of recorded ones; else they were computed, and what they
            hold shows in the logits of anyone who loads them.
    """
    found = Comparison()
    if type(expected) is not type(got):
        found.equal("message", type(expected).__name__, f"{type(got).__name__} {_words(got)}")
        return found
    for name in (item.name for item in fields(expected)):
        own, live = getattr(expected, name), getattr(got, name)
        match name:
            case "input":
                assert isinstance(expected, Work)
                _compare_hidden(found, name, (own, live), expected.bits, expected.n_tokens)
            case "payload":
                assert isinstance(expected, Result)
                _compare_payload(found, expected, live)
            case "telemetry":
                _compare_telemetry(found, own, live)
            case "message":
                _compare_text(found, name, own, live)
            case "data":
                found.equal("chunk_bytes", len(own), len(live))
                n = None if copies else _SHARD_HEADER_BYTES
                found.same_bytes("shard", own[:n], live[:n])
            case "route_blob":
                found.same_bytes(name, own, live)
            case _:
                found.equal(name, own, live)
    return found


def compare_logits(found: Comparison, expected: F32, got: F32, what: str = "logits") -> None:
    """Compare logits that were computed twice."""
    distance = np.sqrt(np.mean(np.square(np.float64(got) - expected), keepdims=True))
    found.near("logits", what, distance)


def compare_saved(found: Comparison, expected: bytes, got: bytes, own: slice) -> None:
    """Compare saved sessions: exactly, except for the cache of layers that were computed twice.

    Args:
        found: Filled here.
        expected: The recorded payload.
        got: The live one.
        own: Where the coordinator's own layers stand.
    """
    found.same_bytes("saved header", expected[: own.start], got[: own.start])
    found.same_bytes("saved shards", expected[own.stop :], got[own.stop :])
    ours, theirs = (np.frombuffer(part[own], "<f4").astype(np.float64) for part in (got, expected))
    if ours.size == theirs.size:
        distance = np.sqrt(np.square(ours - theirs).mean() / np.square(theirs).mean())
        found.near("saved layers", "own cache", np.atleast_1d(distance))


def _words(message: WireMessage) -> str:
    """Return what a message says for people, if it does."""
    return repr(getattr(message, "text", ""))


def _compare_payload(found: Comparison, expected: Result, got: memoryview) -> None:
    relayed = len(expected.telemetry) > 1
    if expected.status:
        _compare_text(found, "payload", expected.payload, got)
    elif relayed or expected.payload.nbytes != got.nbytes:
        found.same_bytes("payload", expected.payload, got)
    elif expected.result_kind == ResultKind.LOGITS:
        compare_logits(found, np.frombuffer(expected.payload, "<f4"), np.frombuffer(got, "<f4"))
    elif expected.result_kind == ResultKind.HIDDEN_STATE:
        rows = expected.telemetry[0].n_tokens
        _compare_hidden(found, "payload", (expected.payload, got), expected.payload_bits, rows)


def _compare_text(found: Comparison, name: str, expected: Buffer, got: Buffer) -> None:
    if not bytes(got).startswith(bytes(expected)):
        found.equal(name, printable(expected), printable(got))


def _compare_hidden(
    found: Comparison, name: str, packed: tuple[memoryview, memoryview], bits: int, rows: int
) -> None:
    expected, got = packed
    if expected.nbytes != got.nbytes or not expected.nbytes:
        found.equal(f"{name} bytes", expected.nbytes, got.nbytes)
        return
    own, live = (np.float64(activations.unpack(part, bits)).reshape(rows, -1) for part in packed)
    distances = np.sqrt(np.square(live - own).mean(1) / np.square(own).mean(1))
    found.near(name, f"hidden at {bits} bits", distances)


def _compare_telemetry(
    found: Comparison, expected: Sequence[Telemetry], got: Sequence[Telemetry]
) -> None:
    """Compare all but times; the final hop waits for nobody, so that two of its times are 0."""
    found.equal("telemetry_count", len(expected), len(got))
    for index, (own, live) in enumerate(zip(expected, got, strict=False)):
        is_final = own.layer_end + 1 == N_LAYERS
        free = {"eval_usec"} if is_final else {"eval_usec", *_RELAY_TIMES}
        for name in own.__slots__:
            if name not in free:
                values: tuple[Any, Any] = getattr(own, name), getattr(live, name)
                found.equal(f"telemetry[{index}].{name}", *values)
