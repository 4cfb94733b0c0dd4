"""The protocol without sockets: the frame reader, every decoder, the checks, the automata.

Owns: what each of them is given and what must hold. Refuses to know: budgets, files, processes.
Invariant: `feed` depends on its bytes alone, so a saved input fails again.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from random import Random
from typing import Any, Final

import msgspec

from ds4py.coordinator.relay.answers import AcceptedResult, Awaited, ExpectedResult, check_result
from ds4py.coordinator.relay.workers.worker_hello import CoordinatorFacts, check_hello
from ds4py.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from ds4py.wire.conversation import ProtocolState, Role
from ds4py.wire.extensions import decode_notice, decode_peer_hello, encode_peer_hello
from ds4py.wire.frames import (
    MAGIC,
    ExtType,
    Frame,
    FrameReader,
    FrameType,
    coordinator_limits,
    hello_limits,
    worker_limits,
)
from ds4py.wire.messages import Hello, Result, decode, encode
from ds4py.worker.work_frames import AcceptedWork, WorkerFacts, check_work
from interop.fuzz import corpus
from interop.fuzz.damage import (
    TYPES,
    Talk,
    cut_frames,
    damage_body,
    damage_json,
    damage_talk,
)
from interop.fuzz.target import Target
from tests.fake_runner import N_VOCAB, WIDTH, card
from tests.peers import N_CTX

_HEADER: Final = struct.Struct(">4sII")
_SMALL: Final = 6000
_EXTENSIONS: Final = frozenset(map(int, ExtType))


def _small_talks() -> list[Talk]:
    talks = [*corpus.to_worker(), *corpus.introductions(), *corpus.answers(), *corpus.transfers()]
    for talk in (*corpus.recorded("to worker"), *corpus.recorded("from worker")):
        talks += [[frame] for frame in talk[:4] if len(frame.body) <= _SMALL]
    return talks


class Frames(Target):
    """The reader, whatever the bytes and however they are split, against a plain reading."""

    name = "frames"
    bytes_allowed = 1 << 20
    _PARTIES: Final[Sequence[Mapping[int, int]]] = (
        worker_limits(N_CTX, WIDTH),
        coordinator_limits(N_VOCAB, WIDTH, N_CTX),
        hello_limits(),
    )
    _ALL: Final[Mapping[int, int]] = dict(item for party in _PARTIES for item in party.items())
    _LIMITS: Final = (*_PARTIES, _ALL, _ALL, _ALL, _ALL)

    @cached_property
    def _talks(self) -> Sequence[Talk]:
        return _small_talks()

    @cached_property
    def _strangers(self) -> Talk:
        return [frame for talk in self._talks for frame in talk]

    def _make(self, rng: Random) -> bytes:
        return damage_talk(rng, rng.choice(self._talks), self._strangers)

    def _feed(self, data: bytes) -> Sequence[str]:
        salt = zlib.crc32(data)
        limits = self._LIMITS[salt % 7]
        expected, fault = plain_reading(data, limits)
        frames, ended = _read(data, limits, pieces=1 + salt % 5)
        assert ended == fault, f"the stream ended with {ended or 'no fault'}, expected {fault}"
        got = [(frame.type, bytes(frame.body), frame.discarded) for frame in frames]
        assert got == expected, "other frames than stand in the bytes"
        return [*(_decoded(frame) for frame in frames), *([fault] if fault else [])]


def plain_reading(
    data: bytes, limits: Mapping[int, int]
) -> tuple[list[tuple[int, bytes, bool]], str]:
    """Return (type, body, discarded) of every whole frame, and the class of what ends the stream.

    Written from the text of docs/spec/wire-protocol.md#frame-header, #reading-rules, and unlike the
    reader with all bytes at hand.
    """
    frames: list[tuple[int, bytes, bool]] = []
    at = 0
    while len(data) - at >= 4:
        if data[at : at + 4] != MAGIC:
            return frames, "F-MAGIC"
        if len(data) - at < _HEADER.size:
            break
        _, kind, size = _HEADER.unpack_from(data, at)
        if size > limits.get(kind, size):
            return frames, "F-SIZE"
        end = at + _HEADER.size + size
        if end > len(data):
            break
        known = kind in limits
        frames.append((kind, data[end - size : end] if known else b"", not known))
        at = end
    return frames, ""


def _read(data: bytes, limits: Mapping[int, int], *, pieces: int) -> tuple[list[Frame], str]:
    """Read a stream that arrives in pieces of about equal size."""

    def allocate(n_bytes: int) -> bytearray:
        assert n_bytes <= largest, f"{n_bytes} bytes are taken, at most {largest} are legal"
        return bytearray(n_bytes)

    largest = max(limits.values())
    reader = FrameReader(limits, allocate)
    frames: list[Frame] = []
    step = len(data) // pieces + 1
    for start in range(0, len(data), step):
        at, end = start, min(start + step, len(data))
        while at < end:
            place = reader.writable()
            n = min(len(place), end - at)
            place[:n] = data[at : at + n]
            at += n
            try:
                frame = reader.filled(n)
            except RemoteProtocolError as e:
                return frames, e.kind
            if frame is not None:
                frames.append(frame)
    return frames, ""


def _decoded(frame: Frame) -> str:
    """Decode a frame as anyone who gets it would; say how that ended."""
    try:
        if frame.type == ExtType.HELLO and not frame.discarded:
            decode_peer_hello(frame.body)
        elif frame.type in _EXTENSIONS and not frame.discarded:
            decode_notice(frame)
        else:
            decode(frame)
    except RemoteProtocolError as e:
        return _kind(e)
    return f"type {frame.type}"


def _kind(error: RemoteProtocolError) -> str:
    assert error.kind, f"no class: {error}"
    return error.kind


class Messages(Target):
    """Every decoder; what was read can be written, and then stands there as it stood."""

    name = "messages"
    _WITH_TAIL: Final = {FrameType.SNAPSHOT_BEGIN, FrameType.SNAPSHOT_DONE}

    @cached_property
    def _frames(self) -> Talk:
        talks = [*_small_talks(), *5 * [*corpus.to_worker()]]
        return [frame for talk in talks for frame in talk if frame.kind < 256]

    def _make(self, rng: Random) -> bytes:
        frame = rng.choice(self._frames)
        kind = frame.kind if rng.random() < 0.95 else rng.choice(TYPES)
        return kind.to_bytes(4) + damage_body(rng, frame.kind, frame.body)

    def _feed(self, data: bytes) -> Sequence[str]:
        kind, body = int.from_bytes(data[:4]), memoryview(data)[4:]
        try:
            message = decode(Frame(kind, body))
        except RemoteProtocolError as e:
            return [_kind(e)]
        (written,) = cut_frames(b"".join([bytes(piece) for piece in encode(message)]))
        read = bytes(body)
        if kind in self._WITH_TAIL:
            read = read[: len(written.body)]  # ignored: wire-protocol.md#frame-header
        assert written == (kind, read, 0), "not the same after writing it"
        return [type(message).__name__]


class Checks(Target):
    """The tables that accept or refuse spans, results and introductions."""

    name = "checks"
    _WORKERS: Final = (
        WorkerFacts(
            model_id=card().model_id,
            layers=corpus.TAIL,
            n_layers=corpus.N_LAYERS,
            n_ctx=N_CTX,
            n_vocab=N_VOCAB,
            hidden_width=WIDTH,
        ),
        WorkerFacts(
            model_id=corpus.RECORDED_MODEL.model_id,
            layers=corpus.RECORDED_SPAN,
            n_layers=corpus.N_LAYERS,
            n_ctx=corpus.RECORDED_CTX,
            n_vocab=corpus.RECORDED_MODEL.n_vocab,
            hidden_width=corpus.RECORDED_MODEL.hidden_width,
        ),
    )
    _COORDINATOR: Final = CoordinatorFacts(
        model_id=card().model_id, name=card().name, n_layers=corpus.N_LAYERS, n_ctx=N_CTX
    )

    @cached_property
    def _frames(self) -> Talk:
        talks = [*_small_talks(), *5 * [*corpus.to_worker(), *corpus.answers()]]
        return [f for talk in talks for f in talk if f.kind in self._BY_KIND]

    def _make(self, rng: Random) -> bytes:
        frame = rng.choice(self._frames)
        body = damage_body(rng, frame.kind, frame.body)
        if rng.random() < 0.2:
            body = damage_body(rng, frame.kind, body)
        return frame.kind.to_bytes(4) + body

    def _feed(self, data: bytes) -> Sequence[str]:
        check = self._BY_KIND.get(int.from_bytes(data[:4]))
        try:
            return ["no check"] if check is None else check(self, memoryview(data)[4:])
        except RemoteProtocolError as e:
            return [_kind(e)]

    def _work(self, body: memoryview) -> list[str]:
        model_id = int.from_bytes(body[:4])
        facts = self._WORKERS[model_id == self._WORKERS[1].model_id]
        verdict = check_work(body, facts)
        if not isinstance(verdict, AcceptedWork):
            named = int.from_bytes(body[12:20]) if len(body) >= 80 else 0
            assert verdict.request_id == named, f"{verdict} is no answer to request {named}"
            assert verdict.kind, "refused without a class"
            return [verdict.kind]
        hidden, work = verdict.hidden, verdict.work
        if hidden is not None:
            assert hidden.unpack().shape == (work.n_tokens, facts.hidden_width)
        assert max(work.tokens) < facts.n_vocab
        return ["accepted"]

    def _result(self, body: memoryview) -> list[str]:
        result = Result.decode(body)
        outcomes = []
        for awaited in Awaited:
            expected = ExpectedResult(
                result_hash=corpus.HASH,
                awaited=awaited,
                n_tokens=len(corpus.PROMPT),
                n_vocab=N_VOCAB,
                hidden_width=WIDTH,
                final_has_output=False,
            )
            verdict = check_result(result, expected)
            if isinstance(verdict, AcceptedResult) and verdict.hidden is not None:
                assert verdict.hidden.unpack().shape == (expected.n_tokens, WIDTH)
            outcomes.append("accepted" if isinstance(verdict, AcceptedResult) else verdict.kind)
        return outcomes[-1:]

    def _hello(self, body: memoryview) -> list[str]:
        refusal = check_hello(Hello.decode(body), self._COORDINATOR)
        return ["accepted" if refusal is None else refusal.kind]

    def _peer_hello(self, body: memoryview) -> list[str]:
        refusal = check_hello(decode_peer_hello(body), self._COORDINATOR)
        return ["accepted" if refusal is None else refusal.kind]

    _BY_KIND: Final = {
        int(FrameType.WORK): _work,
        int(FrameType.RESULT): _result,
        int(FrameType.HELLO): _hello,
        int(ExtType.HELLO): _peer_hello,
    }


class Conversations(Target):
    """Both automata of a connection: what one side may send, the other takes, and nothing else.

    Two bytes make an event: who says it, and which frame type; the first byte of all chooses who
    dialled.
    """

    name = "conversation"
    _PAIRS: Final = (
        (Role.COORDINATOR_CONTROL, Role.WORKER_CONTROL),
        (Role.DATA_DRIVER, Role.DATA_SERVER),
    )
    _COMMON: Final = (1, *range(3, 10), *range(256, 262))  # no ERROR: nothing follows it

    def _make(self, rng: Random) -> bytes:
        return rng.randbytes(1 + 2 * rng.choice((4, 8, 16)))

    def _feed(self, data: bytes) -> Sequence[str]:
        roles = self._PAIRS[data[0] % 2 if data else 0]
        ends = (ProtocolState(roles[0]), ProtocolState(roles[1]))
        outcomes = []
        for who, what in zip(data[1::2], data[2::2], strict=False):
            kind = self._COMMON[what % 14] if what < 224 else TYPES[what % len(TYPES)]
            outcomes.append(_exchange(ends[who & 1], ends[~who & 1], kind, refused=who & 6 == 0))
        return outcomes


def _exchange(speaker: ProtocolState, listener: ProtocolState, kind: int, *, refused: bool) -> str:
    """Let one side say a frame; return where that leads."""
    before = speaker.state
    told = _fault(lambda: speaker.sent(kind, refused=refused), LocalProtocolError)
    heard = _fault(lambda: listener.received(kind, refused=refused), RemoteProtocolError)
    assert told == heard, f"{told or 'no fault'} here and {heard or 'no fault'} there"
    assert listener.state is speaker.state, f"{speaker.state} here and {listener.state} there"
    assert not told or speaker.state is before, "a refused frame has changed the state"
    return told or speaker.state.name


def _fault(step: Callable[[], None], expected: type[ProtocolError]) -> str:
    try:
        step()
    except expected as e:
        return e.kind
    return ""


class Extensions(Target):
    """The frames between ds4py peers: a hello in JSON, and the notices."""

    name = "extensions"

    @cached_property
    def _hellos(self) -> list[dict[str, Any]]:
        hellos = [corpus.peer_hello("coordinator"), corpus.peer_hello("worker")]
        return [msgspec.json.decode(msgspec.json.encode(hello)) for hello in hellos]

    @cached_property
    def _notices(self) -> Talk:
        frames = [frame for talk in corpus.to_worker() for frame in talk]
        return [frame for frame in frames if frame.kind > ExtType.HELLO]

    def _make(self, rng: Random) -> bytes:
        if rng.random() < 0.25:
            frame = rng.choice(self._notices)
            kind = frame.kind if rng.random() < 0.9 else rng.choice(TYPES)
            return kind.to_bytes(4) + damage_body(rng, frame.kind, frame.body)
        hello, other = rng.sample(self._hellos, 2)
        return ExtType.HELLO.to_bytes(4) + damage_json(rng, hello, other)

    def _feed(self, data: bytes) -> Sequence[str]:
        kind, body = int.from_bytes(data[:4]), memoryview(data)[4:]
        try:
            if kind == ExtType.HELLO:
                hello = decode_peer_hello(body)
                (again,) = cut_frames(b"".join([bytes(p) for p in encode_peer_hello(hello)]))
                assert decode_peer_hello(memoryview(again.body)) == hello
                return ["PeerHello"]
            notice = decode_notice(Frame(kind, body))
        except RemoteProtocolError as e:
            return [_kind(e)]
        (again,) = cut_frames(b"".join([bytes(piece) for piece in notice.encode()]))
        assert again == (kind, bytes(body), 0), "not the same after writing it"
        return [type(notice).__name__]


PURE: Final[Sequence[type[Target]]] = (
    Frames,
    Messages,
    Checks,
    Conversations,
    Extensions,
)
