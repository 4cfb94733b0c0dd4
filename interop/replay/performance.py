"""Perform a script against a live party over loopback.

Owns: sockets, the report. Refuses to know: how steps were ordered, how payloads are compared.
Invariant: it always ends: every wait has a deadline, and a step that cannot happen ends the
performance with a difference that names it.
"""

from __future__ import annotations

import select
import socket
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from ds4py.activations import F32
from ds4py.config import Address
from ds4py.errors import Ds4Error, PeerClosedError
from ds4py.transport.sockets import connect
from ds4py.wire.frames import EXT_HELLO, HEADER_BYTES
from ds4py.wire.messages import ErrorText, Hello, Result, WireMessage, Work, decode, encode
from interop.replay.allowed import Allowed, amended
from interop.replay.compare import (
    Comparison,
    Unlike,
    compare,
    compare_logits,
    compare_saved,
    settle,
)
from interop.replay.live import DEADLINE, SOCKETS, LiveCoordinator, LiveWorker
from interop.replay.names import Names
from interop.replay.recording import COORDINATOR, LIMITS, Conversation, Scenario
from interop.replay.script import script
from interop.replay.steps import Answer, Ask, HangUp, Hear, HungUp, Open, Say, Start, Step, Stop
from tests.sockets import frames_over

_MOMENT: Final = 0.05


@dataclass(slots=True)
class Report:
    """What a replay found.

    Args:
        scenario: Name of the recording.
        live: The party that was live.
        sent: Recorded frames that the live party got.
        received: Frames that it sent.
        compared: Frames with a recorded counterpart, and logits that calls returned.
        distances: Of computed numbers, by what they are.
        differences: What is not as recorded, and where.
        allowed: Deviations that were expected.
    """

    scenario: str
    live: str
    sent: int = 0
    received: int = 0
    compared: int = 0
    distances: dict[str, list[float]] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    allowed: list[Allowed] = field(default_factory=list)

    def note(self, where: str, found: Comparison) -> None:
        """Add what a comparison found."""
        self.differences += [f"{where}: {unlike}" for unlike in found.unlike]
        for what, values in found.distances.items():
            self.distances.setdefault(what, []).extend(values)

    def differ(self, where: str, name: str, expected: object, got: object) -> None:
        """Add one difference."""
        self.note(where, Comparison([Unlike(name, str(expected), str(got))]))


class _EndedError(Exception):
    """The script cannot go on; the report says why."""


def replay(scenario: Scenario, live: str) -> Report:
    """Replay a recording against one live party."""
    report = Report(scenario.name, live)
    talks, report.allowed = amended(scenario, live)
    with ExitStack() as stack:
        stage = _Stage(scenario, live, report, stack)
        for step in script(scenario, live, talks):
            try:
                stage.perform(step)
            except _EndedError:
                break
    report.note("all frames", settle(report.distances))
    return report


class _Line:
    """Our end of one connection."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self.connection = frames_over(sock, LIMITS)

    def receive(self) -> WireMessage | None:
        """Return the next message; None at the end of the stream."""
        try:
            frame = self.connection.receive(timeout=DEADLINE)
        except PeerClosedError:
            return None
        return None if frame is None else decode(frame)

    def has_more(self) -> bool:
        """Whether the peer has said more, or says more in a moment."""
        return bool(select.select([self._sock], [], [], _MOMENT)[0])

    def hang_up(self) -> None:
        """End our direction only, so that the peer's end shows that it has noticed."""
        self._sock.shutdown(socket.SHUT_WR)


class _Stage:
    """Everything that stands on our side of one replay.

    Args:
        scenario: The recording.
        live: The party that is live.
        report: Filled on the way.
        stack: Closes what is opened here.
    """

    def __init__(self, scenario: Scenario, live: str, report: Report, stack: ExitStack):
        self._scenario = scenario
        self._live = live
        self._report = report
        self._stack = stack
        self._names = Names()
        self._lines: dict[Conversation, _Line] = {}
        self._listeners = {
            talk.acceptor: stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for talk in scenario.conversations
            if talk.connector == live
        }
        for party, listener in self._listeners.items():
            listener.settimeout(DEADLINE)
            self._names.addresses[party] = Address(*listener.getsockname())
        self._caller = stack.enter_context(ThreadPoolExecutor(1))
        self._party = self._make_party()
        stack.callback(self._party.stop)
        self._start()
        self._joined: set[Conversation] = set()
        self._in_flight: Counter[Conversation] = Counter()
        self._answer: Future[F32 | bytes] | None = None

    def _make_party(self) -> LiveWorker | LiveCoordinator:
        if self._live == COORDINATOR:
            return LiveCoordinator(self._scenario)
        return LiveWorker(self._scenario, self._live, self._names.addresses[COORDINATOR])

    def _start(self) -> None:
        self._party.start()
        self._names.addresses[self._live] = self._party.address

    def perform(self, step: Step) -> None:
        """Do one step.

        Raises:
            _EndedError: No further step makes sense.
        """
        try:
            self._perform(step)
        except (Ds4Error, OSError) as e:
            self._report.differ(_where(step), "event", "it happens", str(e) or type(e).__name__)
            raise _EndedError from e

    def _perform(self, step: Step) -> None:
        match step:
            case Open(talk):
                self._open(talk)
            case Say(talk, message):
                self._say(talk, message)
            case Hear(talk, message):
                self._hear(talk, message)
            case HangUp(talk):
                self._lines[talk].hang_up()
                self._await_end(talk)
                self._count_workers()
            case HungUp(talk):
                self._await_end(talk)
            case Stop():
                self._count_workers()
                self._party.stop()
            case Start():
                self._start()
            case Ask(call):
                self._count_workers()
                assert isinstance(self._party, LiveCoordinator)
                self._answer = self._caller.submit(self._party.perform, call)
            case Answer(call):
                assert self._answer is not None
                self._compare_answer(call.name, self._answer.result(DEADLINE))

    def _open(self, talk: Conversation) -> None:
        if talk.connector == self._live:
            sock = self._accept(self._listeners[talk.acceptor])
        else:
            sock = connect(self._party.address, SOCKETS)
        self._lines[talk] = _Line(sock)
        self._stack.callback(self._lines[talk].connection.close)

    def _accept(self, listener: socket.socket) -> socket.socket:
        """Take a caller; one that offers extensions is turned away as by a C program.

        That discards the offer and closes in silence. The caller comes back at once.
        """
        sock, _ = listener.accept()
        sock.settimeout(DEADLINE)
        header = sock.recv(HEADER_BYTES, socket.MSG_PEEK | socket.MSG_WAITALL)
        frame_type, n_body = (int.from_bytes(header[at : at + 4]) for at in (4, 8))
        if frame_type >= EXT_HELLO:
            with sock:
                sock.recv(HEADER_BYTES + n_body, socket.MSG_WAITALL)
            sock, _ = listener.accept()
        sock.settimeout(None)
        return sock

    def _say(self, talk: Conversation, recorded: WireMessage) -> None:
        sender = talk.acceptor if talk.connector == self._live else talk.connector
        message = self._names.live(recorded, sender, answers=True)
        self._report.sent += 1
        if isinstance(message, Hello):
            self._joined.add(talk)
        if isinstance(message, Result) and self._live == COORDINATOR:
            self._check_window(talk, _where(Say(talk, recorded)))
        self._lines[talk].connection.send(encode(message))

    def _hear(self, talk: Conversation, recorded: WireMessage) -> None:
        where = _where(Hear(talk, recorded))
        got = self._lines[talk].receive()
        if got is None:
            self._report.differ(where, "message", type(recorded).__name__, "the end of the stream")
            raise _EndedError
        self._report.received += 1
        self._report.compared += 1
        if isinstance(got, ErrorText):
            self._joined.discard(talk)
        if self._live == COORDINATOR:
            self._names.learn(recorded, got)
            self._in_flight[talk] += isinstance(got, Work)
            if getattr(got, "session_id", 1) == 0:
                self._report.differ(where, "session_id", "not 0", 0)
        expected = self._names.live(recorded, self._live, answers=False)
        copies = self._live == COORDINATOR
        self._report.note(where, compare(expected, got, copies=copies))
        if type(expected) is not type(got):
            raise _EndedError

    def _check_window(self, talk: Conversation, where: str) -> None:
        """Check that a full window (wire-protocol.md#pipelined-prefill) waits for an answer."""
        window = max(2, min(8, len(self._scenario.worker_layers) + 2))
        if self._in_flight[talk] >= window and self._lines[talk].has_more():
            self._report.differ(where, "spans in flight", f"at most {window}", "more")
        self._in_flight[talk] -= 1

    def _await_end(self, talk: Conversation) -> None:
        while (got := self._lines[talk].receive()) is not None:
            self._report.received += 1
            self._report.differ(talk.name, "message", "the end of the stream", type(got).__name__)
        self._lines[talk].connection.close()
        self._joined.discard(talk)

    def _count_workers(self) -> None:
        """Wait until a live coordinator knows who has come and gone."""
        if isinstance(self._party, LiveCoordinator):
            found = Comparison()
            n = len(self._joined)
            found.equal("registered workers", n, self._party.n_workers(n))
            self._report.note(COORDINATOR, found)

    def _compare_answer(self, name: str, got: F32 | bytes) -> None:
        """Compare what a call returned: exactly, unless our own layers or head computed it."""
        found, scenario = Comparison(), self._scenario
        if isinstance(got, bytes):
            compare_saved(found, scenario.saved, got, scenario.own_cache)
        elif name not in scenario.logits:
            return
        elif scenario.has_remote_head:
            found.same_bytes("logits", scenario.logits[name].tobytes(), got.tobytes())
        else:
            compare_logits(found, scenario.logits[name], got, "own head's logits")
        self._report.compared += 1
        self._report.note(f"call {name}", found)


def _where(step: Step) -> str:
    """Name a step for people."""
    match step:
        case Say(talk, message) | Hear(talk, message):
            request = getattr(message, "request_id", None)
            number = "" if request is None else f" {request:#x}"
            return f"{talk.name} {type(message).__name__}{number}"
        case Open(talk) | HangUp(talk) | HungUp(talk):
            return f"{talk.name} {type(step).__name__}"
        case Ask(call) | Answer(call):
            return f"call {call.name}"
        case _:
            return type(step).__name__
