"""Targets that run: a worker and a coordinator on loopback, each among hostile peers.

Owns: the hostile side of every kind of connection, and the honest requests between. Refuses to
know: budgets, files. Invariant: after each input the program has ended or answered what it should,
in time; at the end of all it has kept no thread and no descriptor.

The slices are fake and quick; sockets, threads and queues are the real ones. A worker dials
whatever host a route names, so here it may dial what a target allows and nothing else.
"""

from __future__ import annotations

import gc
import socket
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from random import Random
from typing import Final
from unittest import mock

import numpy as np
import psutil

from ds4py.config import Address
from ds4py.contracts import ModelRunner, Session
from ds4py.coordinator.relay.workers import listener as port_module
from ds4py.coordinator.relay.workers import registration as reception_module
from ds4py.errors import Ds4Error
from ds4py.layer_range import LayerRange, whole_model
from ds4py.transport.sockets import listen
from ds4py.wire.extensions import decode_peer_hello
from ds4py.wire.frames import Frame, FrameType, coordinator_limits
from ds4py.wire.messages import Result, ResultKind, Work, WorkFlags, WorkHeader, decode, encode
from interop.fuzz import corpus
from interop.fuzz.damage import RawFrame, Talk, damage_talk
from interop.fuzz.hostile import (
    RESET,
    SECONDS,
    answered_as,
    call,
    converse,
    fence,
    read_frame,
    say,
    soon,
    watch,
)
from interop.fuzz.pure import plain_reading
from interop.fuzz.target import Target
from tests.by_hand import QUICK, good, serve
from tests.clusters import Cluster, cluster, span, start_worker
from tests.fake_runner import N_VOCAB, WIDTH, FakeRunner, reference_logits
from tests.peers import dial_in, driver, entry, hello, make_work
from tests.sockets import Background, read_to_end

_LARGEST_TALK: Final = 64 << 10
_WHOLE: Final = whole_model(corpus.N_LAYERS)
_SECRET: Final = 0x5EC12E7_5E5510  # a session that no hostile driver can name


class Live(Target):
    """A program that runs between `open` and `close`."""

    deadline = 30.0
    check_every = 20
    sample_every = 50
    bytes_allowed = 16 << 20

    def _open(self) -> None:
        self._threads = set(threading.enumerate())
        self._descriptors = psutil.Process().num_fds()
        self._stack = ExitStack()
        self._stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", RuntimeWarning)  # hostile rows hold any numbers
        self._watch = self._stack.enter_context(watch())
        self._start(self._stack)

    def _start(self, stack: ExitStack) -> None:
        """Start the program; what `stack` gets is undone by `close`."""
        raise NotImplementedError

    def _check(self) -> None:
        assert not self._watch, f"{len(self._watch)} unforeseen exceptions: {self._watch[0]}"
        self._ask()

    def _ask(self) -> None:
        """Raise unless an honest request is answered."""
        raise NotImplementedError

    def _close(self) -> None:
        self._stack.close()
        soon(lambda: not self._left_over(), f"nothing is left over but {self._left_over()}")

    def _left_over(self) -> list[str]:
        gc.collect()
        left = [t.name for t in threading.enumerate() if t not in self._threads]
        n_more = psutil.Process().num_fds() - self._descriptors
        return [*left, *([f"{n_more} descriptors"] if n_more > 0 else [])]


def _talk(rng: Random, talks: Sequence[Talk]) -> bytes:
    """Damage a part of a talk; half of the parts begin where the talk does."""
    talk = rng.choice(talks)
    start = rng.randrange(len(talk)) if rng.random() < 0.5 else 0
    part = list(talk[start : start + rng.choice((1, 2, 3, 6))])
    while len(part) > 1 and sum(len(frame.body) for frame in part) > _LARGEST_TALK:
        part.pop()
    return damage_talk(rng, part, rng.choice(talks))


# --- targets ---------------------------------------------------------------------------------


class LiveWorker(Live):
    """A worker's data port: whatever a driver says.

    Two workers, one of the generated talks' model and one of the recorded ones', each with talks
    that fit it.
    """

    name = "worker"

    def _make(self, rng: Random) -> bytes:
        fake = rng.random() < 0.6
        return _talk(rng, corpus.to_worker() if fake else corpus.recorded("to worker"))

    def _start(self, stack: ExitStack) -> None:
        stack.enter_context(fence())
        recorded = FakeRunner(
            corpus.RECORDED_SPAN, n_ctx=corpus.RECORDED_CTX, identity=corpus.RECORDED_MODEL
        )
        self._recorded = _started(stack, recorded)
        self._fake = _started(stack, FakeRunner(corpus.TAIL))
        work = make_work((entry(corpus.TAIL),), (), corpus.PROMPT, request_id=1, session=_SECRET)
        self._honest = (
            (self._recorded, corpus.recorded_work()),
            (self._fake, b"".join(map(bytes, encode(work)))),
        )
        self._expected = [self._served(*request) for request in self._honest]

    def _feed(self, data: bytes) -> Sequence[str]:
        is_recorded = data[12:16] == corpus.RECORDED_MODEL.model_id.to_bytes(4)
        answer = converse(self._recorded if is_recorded else self._fake, data)
        asked, _ = plain_reading(data, _ANY)
        frames = _read_answer(answer)
        results = [frame for frame in frames if frame.type == FrameType.RESULT]
        n_works = sum(kind == FrameType.WORK for kind, _, _ in asked)
        assert len(results) <= n_works, f"{len(results)} results for {n_works} spans"
        return [_named(frame) for frame in frames] or ["silence"]

    def _ask(self) -> None:
        for request, expected in zip(self._honest, self._expected, strict=True):
            soon(partial(self._is_served, *request), "hostile drivers give up their slots")
            assert self._served(*request) == expected, "answered otherwise than before"

    def _is_served(self, address: Address, work: bytes) -> bool:
        return self._served(address, work) != b""

    def _served(self, address: Address, work: bytes) -> bytes:
        """Return the payload for an honest span; nothing while hostile sessions take all slots."""
        with call(address) as sock:
            sock.sendall(work)
            frame = read_frame(sock)
        assert frame is not None, "the connection of an honest driver was closed"
        result = Result.decode(memoryview(frame.body))
        assert result.status == 0 or "session slots" in result.text, result.text
        return b"" if result.status else bytes(result.payload)


_ANY: Final = dict.fromkeys(range(300), (1 << 32) - 1)


def _started(stack: ExitStack, runner: ModelRunner) -> Address:
    worker = start_worker(runner)
    stack.callback(worker.close)
    return worker.address


def _read_answer(data: bytes) -> list[Frame]:
    """Return the frames of an answer, which may be cut off where the peer gave us up."""
    limits = coordinator_limits(N_VOCAB, corpus.RECORDED_MODEL.hidden_width, corpus.RECORDED_CTX)
    frames, fault = plain_reading(data, limits)
    assert not fault, f"our side said something that ends in {fault}"
    assert all(not discarded for _, _, discarded in frames), "a frame that nobody knows"
    return [Frame(kind, memoryview(body)) for kind, body, _ in frames]


def _named(frame: Frame) -> str:
    """Decode what our side said; a fault in it is ours."""
    if frame.type >= 256:
        if frame.body:
            decode_peer_hello(frame.body)
        return "extension"
    message = decode(frame)
    status = getattr(message, "status", 0)
    return f"{type(message).__name__}{' refused' if status else ''}"


class LiveDoor(Live):
    """A coordinator's port: whatever somebody says who calls, while a good worker serves."""

    name = "door"

    def _make(self, rng: Random) -> bytes:
        fake = rng.random() < 0.7
        talks = corpus.introductions() if fake else corpus.recorded("from worker")
        return _talk(rng, talks)

    def _start(self, stack: ExitStack) -> None:
        stack.enter_context(mock.patch.object(port_module, "_FIRST_WORD_SECONDS", 0.3))
        stack.enter_context(mock.patch.object(reception_module, "HELLO_SECONDS", 0.3))
        self._cluster = stack.enter_context(cluster(["0-5"], config=QUICK))
        self._cluster.wait_ready()
        self._n_asked = 0

    def _feed(self, data: bytes) -> Sequence[str]:
        frames = _read_answer(converse(self._cluster.port.address, data))
        return [_named(frame) for frame in frames] or ["silence"]

    def _ask(self) -> None:
        coordinator = self._cluster.coordinator
        soon(lambda: len(coordinator.health().stages) == 2, "callers that are gone are forgotten")
        self._n_asked += 1
        tokens = [self._n_asked % N_VOCAB, *corpus.PROMPT]
        with self._cluster.backend.lease(tokens) as session:
            np.testing.assert_array_equal(session.sync(tokens).logits, reference_logits(tokens))


class LiveAnswers(Live):
    """A coordinator that is answered by a hostile worker.

    Two coordinators: one owns nothing and sends a prompt as one span, the other owns the head and
    sends three, of which the hostile answer is for any.
    """

    name = "answers"

    def _make(self, rng: Random) -> bytes:
        return damage_talk(rng, rng.choice(corpus.answers()), corpus.transfers()[0])

    def _start(self, stack: ExitStack) -> None:
        config = replace(QUICK, rejoin_timeout=0)
        bare = cluster([], config=config)
        with_head = cluster([], local="0:0", head=True, chunk=2, config=config)
        self._routes = (
            (stack.enter_context(bare), _WHOLE),
            (stack.enter_context(with_head), span("1:5")),
        )
        self._port = 0

    def _feed(self, data: bytes) -> Sequence[str]:
        salt = zlib.crc32(data)
        c, layers = self._routes[salt % 2]
        n_honest = salt // 2 % 3 if salt % 2 else 0
        with self._worker(c, layers) as sock, c.backend.lease(corpus.PROMPT) as session:
            answering = Background(lambda: _answer_one(sock, data, n_honest=n_honest))
            session.rewind(0)  # what an earlier worker has answered is not asked again
            outcome = _outcome(lambda: session.sync(corpus.PROMPT))
            answering.result()
        return [outcome]

    @contextmanager
    def _worker(self, c: Cluster, layers: LayerRange) -> Iterator[socket.socket]:
        """Register as a worker; a port of its own tells it from the one before."""
        self._port = self._port % 1000 + 1
        introduction = hello(layers, listen_port=7000 + self._port)
        with call(c.port.address) as sock:
            sock.sendall(b"".join(map(bytes, encode(introduction))))
            _wait_for_stage(c, introduction.listen_port)
            yield sock

    def _ask(self) -> None:
        for c, layers in self._routes:
            with self._worker(c, layers) as sock, c.backend.lease(corpus.PROMPT) as session:
                answering = Background(partial(_answer_honestly, sock))
                session.rewind(0)
                assert session.sync(corpus.PROMPT).logits.shape == (N_VOCAB,)
                sock.shutdown(socket.SHUT_RDWR)
                answering.result()


def _wait_for_stage(c: Cluster, port: int) -> None:
    name = str(Address("127.0.0.1", port))
    soon(lambda: name in {stage.name for stage in c.coordinator.health().stages}, f"{name} joins")


def _answer_one(sock: socket.socket, data: bytes, *, n_honest: int = 0) -> None:
    """Answer some questions well, the next one as the input says, then listen to the end."""
    with suppress(ConnectionError):
        for _ in range(n_honest):
            if (asked := read_frame(sock)) is not None:
                sock.sendall(_honest(asked))
        if (asked := read_frame(sock)) is not None:
            say(sock, answered_as(asked, data))
            read_to_end(sock)


def _answer_honestly(sock: socket.socket) -> None:
    with suppress(ConnectionError):
        while (asked := read_frame(sock)) is not None:
            sock.sendall(_honest(asked))


def _honest(asked: RawFrame) -> bytes:
    """Return what a worker with the head, or one without, answers to a span."""
    body = memoryview(asked.body)
    work = Work.from_body(WorkHeader.decode(body), body)
    answer = good(work)
    if not work.flags & (WorkFlags.ACK_ONLY | WorkFlags.OUTPUT_LOGITS):
        rows = np.ones((work.n_tokens, WIDTH), "<f4").data.cast("B")
        answer = replace(answer, result_kind=ResultKind.HIDDEN_STATE, payload=rows)
    return b"".join(map(bytes, encode(answer)))


def _outcome(step: Callable[[], object]) -> str:
    try:
        step()
    except Ds4Error as e:
        return type(e).__name__
    return "served"


class LiveRelay(Live):
    """A worker whose next hop is hostile: each span upstream gets exactly one answer."""

    name = "relay"

    def _make(self, rng: Random) -> bytes:
        return damage_talk(rng, rng.choice(corpus.answers()), corpus.transfers()[0])

    def _start(self, stack: ExitStack) -> None:
        self._listener = stack.enter_context(listen(Address("127.0.0.1", 0)))
        self._listener.settimeout(SECONDS)
        next_hop = Address(*self._listener.getsockname()[:2])
        stack.enter_context(fence({next_hop}))
        self._address = _started(stack, FakeRunner(span("2-3")))
        self._hops = (entry(span("2-3")), entry(span("4-5"), next_hop))

    def _feed(self, data: bytes) -> Sequence[str]:
        with driver(self._address, *self._hops) as asking:
            asking.ask((), corpus.PROMPT)
            asking.ask(corpus.PROMPT, (7,))
            with self._accept() as sock:
                _answer_first(sock, data, n_asked=2)
                answers = [asking.answer(), asking.answer()]
        ids = {answer.request_id for answer in answers}
        assert ids == {1, 2}, f"answers to requests {ids}, expected 1 and 2"
        return ["refused" if answer.status else "served" for answer in answers]

    def _accept(self) -> socket.socket:
        sock, _ = self._listener.accept()
        sock.settimeout(SECONDS)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        return sock

    def _ask(self) -> None:
        with driver(self._address, *self._hops) as asking:
            asking.ask((), corpus.PROMPT)
            with self._accept() as sock:
                _answer_first(sock, corpus.answers()[0][0].encode(), n_asked=1)
                assert asking.answer().status == 0, "an honest answer is not relayed"


def _answer_first(sock: socket.socket, data: bytes, *, n_asked: int) -> None:
    """Wait for some questions, then answer the first of them as the input says."""
    asked = [read_frame(sock) for _ in range(n_asked)]
    assert asked[0] is not None, "the connection to the next hop ended before a span came"
    say(sock, answered_as(asked[0], data))


class LiveShards(Live):
    """A coordinator that saves and loads a session at a hostile worker's data port."""

    name = "shards"

    def _make(self, rng: Random) -> bytes:
        return damage_talk(rng, rng.choice(corpus.transfers()), corpus.answers()[0])

    def _start(self, stack: ExitStack) -> None:
        c = stack.enter_context(cluster([], config=QUICK))
        self._listener = stack.enter_context(listen(Address("127.0.0.1", 0)))
        self._listener.settimeout(SECONDS)
        port = self._listener.getsockname()[1]
        peer = stack.enter_context(dial_in(c.port.address, hello(_WHOLE, listen_port=port)))
        _wait_for_stage(c, port)
        serve(peer, good)
        self._session: Session = stack.enter_context(c.backend.lease(corpus.PROMPT))
        self._payload = corpus.payload_session()

    def _feed(self, data: bytes) -> Sequence[str]:
        answering = Background(lambda: self._answer(data))
        if zlib.crc32(data) % 3:
            self._session.sync(corpus.PROMPT)
            outcome = f"save {_outcome(self._session.save)}"
        else:
            outcome = f"load {_outcome(lambda: self._session.load(self._payload))}"
        answering.result()
        return [outcome]

    def _answer(self, data: bytes) -> None:
        sock, _ = self._listener.accept()
        with sock:
            sock.settimeout(SECONDS)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            _answer_one(sock, data)

    def _ask(self) -> None:
        for talk, step in zip(corpus.transfers(), (self._session.save, self._load), strict=False):
            answering = Background(partial(self._answer, b"".join(f.encode() for f in talk)))
            self._session.sync(corpus.PROMPT)
            step()
            answering.result()

    def _load(self) -> None:
        self._session.load(self._payload)


LIVE: Final[Sequence[type[Target]]] = (LiveWorker, LiveRelay, LiveDoor, LiveAnswers, LiveShards)
