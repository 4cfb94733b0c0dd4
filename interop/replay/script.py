"""From a recording and a live party to the one sequence of steps that replays it.

Owns: the order of events over all connections of the live party. Refuses to know: sockets, what a
payload means. Invariant: on each connection the recorded order is kept, and nothing is awaited
before all that causes it has been said.

Recordings hold an order for each connection only. Across connections it follows from what causes
what: a span is forwarded after it came, a result is relayed after it came, a new connection takes
the place of one that ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import pairwise
from operator import itemgetter

from ds4py.wire.messages import Hello, LoadBegin, Result, SaveRequest, WireMessage, Work
from interop.replay.recording import COORDINATOR, Call, Conversation, Scenario
from interop.replay.steps import Answer, Ask, HangUp, Hear, HungUp, Open, Say, Start, Step, Stop


def script(scenario: Scenario, live: str, talks: Sequence[Conversation]) -> list[Step]:
    """Return the steps that replay a recording against one live party.

    Args:
        scenario: The recording.
        live: The party that is replaced.
        talks: The recorded connections of that party, perhaps amended.
    """
    order = _Order(talks, live)
    order.replace_connections()
    order.gather_workers(_homes(scenario))
    order.pass_spans_on()
    order.save_and_load()
    order.call(scenario.calls if live == COORDINATOR else ())
    return list(_steps(order.sorted(), live))


def _homes(scenario: Scenario) -> dict[int, int]:
    """Return each session's first number of control connections."""
    homes: dict[int, int] = {}
    for talk in scenario.conversations:
        for said in talk.frames if talk.is_control else ():
            if isinstance(said.message, Work):
                homes.setdefault(said.message.session_id, talk.number)
    return homes


@dataclass(eq=False, slots=True)
class _Event:
    """Something that happens on a connection, or a call.

    Args:
        number: In the order of creation.
        talk: Where; None for a call.
        what: "open", "close", a frame, or the step of a call.
        after: What must have happened before.
    """

    number: int
    talk: Conversation | None
    what: WireMessage | str | Ask | Answer
    by_live: bool = False
    after: set[_Event] = field(default_factory=set)

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """Sorts events that may happen now: connections end late, and at our wish if possible."""
        closes = self.what == "close"
        return closes, closes and self.by_live, self.number


_Key = tuple[type, int, int]
"""WORK or RESULT, session id, request id."""


class _Order:
    """The events of one live party, and which must come before which.

    Args:
        talks: All connections of the party.
        live: The party.
    """

    def __init__(self, talks: Sequence[Conversation], live: str):
        self._live = live
        self._events: list[_Event] = []
        self._told: dict[_Key, _Event] = {}  # spans and results that the live party gets
        self._tells: dict[_Key, _Event] = {}  # and those that it sends
        self._line = {talk: self._sequence(talk) for talk in talks}

    def _event(self, talk: Conversation | None, what: WireMessage | str | Ask | Answer) -> _Event:
        event = _Event(len(self._events), talk, what)
        self._events.append(event)
        return event

    def _sequence(self, talk: Conversation) -> list[_Event]:
        """Create the events of one connection, each after the one before it."""
        sessions: dict[int, int] = {}
        line = [self._event(talk, "open")]
        for said in talk.frames:
            event = self._event(talk, said.message)
            event.by_live = said.by == self._live
            if isinstance(said.message, Work):
                sessions[said.message.request_id] = said.message.session_id
            if isinstance(said.message, Work | Result):
                request = said.message.request_id
                side = self._tells if event.by_live else self._told
                side[type(said.message), sessions[request], request] = event
            line.append(event)
        line.append(self._event(talk, "close"))
        line[-1].by_live = talk.closed_by == self._live
        for before, after in pairwise(line):
            after.after.add(before)
        return line

    def _previous(self, talk: Conversation) -> Conversation | None:
        """Return the connection whose place this one takes."""
        return max(
            (
                other
                for other in self._line
                if (other.connector, other.acceptor) == (talk.connector, talk.acceptor)
                and other.number < talk.number
            ),
            key=lambda other: other.number,
            default=None,
        )

    def replace_connections(self) -> None:
        """A connection is made after the end of the one that it replaces, and so is its cause."""
        for talk, line in self._line.items():
            previous = self._previous(talk)
            if previous is None:
                continue
            ended = self._line[previous][-1]
            line[0].after.add(ended)
            for key, event in self._tells.items():
                cause = self._told.get(key)
                if event.talk is talk and cause is not None:
                    cause.after.add(ended)

    def gather_workers(self, home: Mapping[int, int]) -> None:
        """All workers of a time join before a coordinator asks anything, and leave after all.

        Args:
            home: Number of the control connections that a session's spans travel on.
        """
        for talk, line in self._line.items():
            first = line[1].what
            if isinstance(first, SaveRequest | LoadBegin):
                self._join(home[first.session_id], line[0])
            for event in line if talk.is_control else ():
                if isinstance(event.what, Work):
                    self._join(talk.number, event)
            for other in self._line if talk.is_control else ():
                if other.is_control and other.number == talk.number and other is not talk:
                    line[-1].after.add(self._line[other][-2])

    def _join(self, number: int, event: _Event) -> None:
        """Put an event after all introductions on control connections of one number."""
        for talk, line in self._line.items():
            if talk.number == number and isinstance(line[1].what, Hello):
                event.after.add(line[1])

    def pass_spans_on(self) -> None:
        """Forwarded spans and relayed results come after their originals."""
        for key, event in self._tells.items():
            cause = self._told.get(key)
            if cause is None:
                continue
            event.after.add(cause)
            assert event.talk is not None
            opening = self._line[event.talk][:2]
            if event is opening[1]:  # the connection is made for this frame
                opening[0].after.add(cause)

    def save_and_load(self) -> None:
        """A shard moves between the span that leads to its state and the span that goes on."""
        for line in self._line.values():
            first = line[1].what
            if not isinstance(first, SaveRequest | LoadBegin):
                continue
            for (_, session, request), event in [*self._told.items(), *self._tells.items()]:
                work = event.what
                if not isinstance(work, Work) or session != first.session_id:
                    continue
                if work.prefix_hash == first.token_hash:
                    event.after.add(line[-1])
                if work.result_hash == first.token_hash:
                    key = (Result, session, request)
                    line[0].after.add(self._told.get(key) or self._tells[key])

    def call(self, calls: Sequence[Call]) -> None:
        """A call begins before its first effect and ends after its last one."""
        spans = iter(list(self._tells.items()))
        answered: _Event | None = None
        for call in calls:
            ask, answer = self._event(None, Ask(call)), self._event(None, Answer(call))
            if answered is not None:
                ask.after.add(answered)
            is_transfer = call.verb in {"save", "load"}
            effects = self._transfers_of(call) if is_transfer else self._spans_of(call, spans)
            for index, (begin, end) in enumerate(effects):
                if index == 0:  # all that the first effect waits for, the call waits for
                    ask.after.update(before for before in begin.after if before.talk is not None)
                begin.after.add(ask)
                answer.after.add(end)
            answered = answer

    def _spans_of(
        self, call: Call, spans: Iterator[tuple[_Key, _Event]]
    ) -> Iterator[tuple[_Event, _Event]]:
        """Take the spans up to the one that completes the call's timeline, with their results."""
        for key, span in spans:
            answer = self._told[Result, *key[1:]]
            work, result = span.what, answer.what
            assert isinstance(work, Work)
            assert isinstance(result, Result)
            yield span, answer
            if work.pos0 + work.n_tokens == len(call.tokens) and result.status == 0:
                return

    def _transfers_of(self, call: Call) -> Iterator[tuple[_Event, _Event]]:
        """Take the connections that carry the shards of a call, one after the other."""
        kind = SaveRequest if call.verb == "save" else LoadBegin
        firsts = ((line[1].what, line) for line in self._line.values())
        numbered = [(first.request_id, line) for first, line in firsts if isinstance(first, kind)]
        lines = [line for _, line in sorted(numbered, key=itemgetter(0))]
        for before, line in pairwise(lines):
            line[0].after.add(before[-1])
        yield from ((line[0], line[-1]) for line in lines)

    def sorted(self) -> list[_Event]:
        """Return all events in an order that keeps every rule."""
        sorter = TopologicalSorter({event: event.after for event in self._events})
        sorter.prepare()
        waiting: list[tuple[tuple[bool, bool, int], _Event]] = []
        done = []
        while sorter.is_active():
            for event in sorter.get_ready():
                heapq.heappush(waiting, (event.rank, event))
            done.append(heapq.heappop(waiting)[1])
            sorter.done(done[-1])
        return done


def _steps(events: Sequence[_Event], live: str) -> Iterator[Step]:
    """Say of each event who does it; a live party that ends hangs up everywhere at once."""
    opened: list[Conversation] = []
    stopped = False
    for event in events:
        talk, what = event.talk, event.what
        if isinstance(what, Ask | Answer):
            yield what
            continue
        assert talk is not None
        if what == "open":
            if stopped:
                yield Start()
                stopped = False
            opened.append(talk)
            yield Open(talk)
        elif what == "close":
            if talk not in opened:
                continue
            if _ends_process(talk, live):
                yield Stop()
                stopped = True
                yield from (HungUp(other) for other in opened)
                opened.clear()
            else:
                opened.remove(talk)
                yield HungUp(talk) if event.by_live else HangUp(talk)
        else:
            assert not isinstance(what, str)
            yield (Hear if event.by_live else Say)(talk, what)


def _ends_process(talk: Conversation, live: str) -> bool:
    """Whether the live party closed this connection because it ended.

    It also closes after a refusal, and what it had dialled for a connection that has ended.
    """
    serves = talk.is_control or talk.acceptor == live
    return talk.closed_by == live and serves and not talk.refused
