"""One connection of the coordinator: every request is answered once, whatever happens to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ds4py.coordinator.relay.hop import Link, ReplyBox
from ds4py.coordinator.relay.workers.registry import LinkId
from ds4py.errors import PeerClosedError, TransportError, TransportTimeoutError
from ds4py.wire.extensions import Alive, Drop
from ds4py.wire.frames import coordinator_limits, encode_frame, worker_limits
from ds4py.wire.messages import ErrorText, Result, encode
from tests.support.clusters import span, wait_until
from tests.support.fake_runner import N_VOCAB, WIDTH
from tests.support.peers import N_CTX, entry, logits_for, make_work, take_work
from tests.support.sockets import Background, frames_over, tcp_pair

LIMITS = coordinator_limits(N_VOCAB, WIDTH, N_CTX)
HOP = entry(span("0-5"))


class Scene:
    """A link whose peer is answered by hand."""

    def __init__(self, ours, theirs, timeout: float, alive_timeout: float | None):
        self.closed: list[TransportError] = []
        self.box: ReplyBox = ReplyBox()
        self.peer = frames_over(theirs, worker_limits(N_CTX, WIDTH))
        connection = frames_over(ours, LIMITS)
        self.link = Link(
            LinkId(1),
            connection,
            send_depth=2,
            timeout=timeout,
            alive_timeout=alive_timeout,
            on_closed=lambda _, cause: self.closed.append(cause),
        )
        self.reading = Background(self.link.run)

    def post(self, request_id: int) -> None:
        self.link.post(make_work([HOP], [], [5], request_id=request_id), self.box)

    def reply(self):
        return self.box.get(timeout=20)


@contextmanager
def scene(timeout: float = 10, alive_timeout: float | None = None) -> Iterator[Scene]:
    with tcp_pair() as (ours, theirs):
        theirs.settimeout(None)
        s = Scene(ours, theirs, timeout, alive_timeout)
        try:
            yield s
        finally:
            s.link.close()
            s.reading.result()
            s.peer.close()


def test_only_spans_of_several_tokens_are_chunks_that_others_wait_behind() -> None:
    """Single tokens take their turns on the stages anyway: they need no second connection."""
    with scene() as s:
        s.post(1)
        assert not s.link.carries_chunks
        s.link.post(make_work([HOP], [], [5, 6], request_id=2), s.box)
        assert s.link.carries_chunks
        for _ in range(2):
            s.peer.send(encode(logits_for(take_work(s.peer))))
        assert [s.reply().request_id for _ in range(2)] == [1, 2]
        assert not s.link.carries_chunks


def test_answers_find_their_request_in_any_order() -> None:
    with scene() as s:
        for n in (1, 2, 3):
            s.post(n)
        works = [take_work(s.peer) for _ in range(3)]
        for n in (2, 0, 1):
            s.peer.send(encode(logits_for(works[n])))
        got = [s.reply() for _ in range(3)]
        assert [r.request_id for r in got] == [3, 1, 2]
        assert all(isinstance(r.result, Result) for r in got)
        assert all(r.wait_usec > 0 for r in got)


def end_by_close(s: Scene) -> None:
    s.peer.close()


def end_by_error(s: Scene) -> None:
    s.peer.send(encode(ErrorText.of("out of order")))


def end_by_nonsense(s: Scene) -> None:
    s.peer.send(encode_frame(77, b"?"))


def end_by_garbage(s: Scene) -> None:
    s.peer.send([b"this is no frame at all"])


def end_by_us(s: Scene) -> None:
    s.link.close("enough")


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (end_by_close, "closed"),
        (end_by_error, "peer said: out of order"),
        (end_by_nonsense, "frame type 77: expected RESULT"),
        (end_by_garbage, "protocol error: frame starts with"),
        (end_by_us, "enough"),
    ],
)
def test_every_pending_request_is_told_of_the_end_and_the_owner_once(end, words) -> None:
    with scene() as s:
        s.post(1)
        s.post(2)
        take_work(s.peer)
        take_work(s.peer)
        assert not s.link.lost
        end(s)
        got = [s.reply(), s.reply()]
        assert s.link.lost  # already now: a replay must not choose this link again
        assert {r.request_id for r in got} == {1, 2}
        for reply in got:
            assert isinstance(reply.result, TransportError)
            assert words in reply.result.what
        with pytest.raises(PeerClosedError, match=words):
            s.post(3)
        s.reading.result()
        s.link.close()
        assert len(s.closed) == 1
        assert not len(s.box)


def test_a_retired_link_tells_those_who_wait_and_stays_connected() -> None:
    with scene() as s:
        s.post(1)
        work = take_work(s.peer)
        s.link.retire("replaced")
        assert "replaced" in s.reply().result.what
        with pytest.raises(PeerClosedError, match="replaced"):
            s.post(2)
        s.peer.send(encode(logits_for(work)))  # late: nobody waits, nobody minds
        s.peer.send(encode(logits_for(work)))
        assert not s.closed
        s.peer.close()
        s.reading.result()
        assert len(s.closed) == 1


def test_a_peer_that_takes_too_little_for_too_long_is_given_up() -> None:
    """It may take a byte now and then; a replay over the same link would wait for it again."""
    with scene(timeout=0.05) as s:
        for _ in range(2):  # one is being sent, one waits: the queue is full
            s.link._outbox.put([bytes(1 << 26)])
            wait_until(lambda: s.link.connection._sending, "the first is being sent")
        s.link._outbox.put([bytes(1 << 26)])
        with pytest.raises(TransportError, match="took no data"):
            s.post(1)
        assert s.link.lost
        assert s.link.connection.closed
        assert not len(s.box)


def test_posts_that_race_with_the_end_are_all_answered_once() -> None:
    for _ in range(20):
        with scene() as s:
            start = threading.Barrier(3)

            def post(base: int, s: Scene = s, start: threading.Barrier = start) -> list[int]:
                start.wait()
                posted = []
                for n in range(base, base + 5):
                    try:
                        s.post(n)
                    except TransportError:
                        continue
                    posted.append(n)
                return posted

            def close(s: Scene = s, start: threading.Barrier = start) -> None:
                start.wait()
                s.link.close()

            first, second, closing = (
                Background(lambda: post(1)),
                Background(lambda: post(10)),
                Background(close),
            )
            expected = {*first.result(), *second.result()}
            closing.result()
            assert {s.reply().request_id for _ in expected} == expected
            assert not len(s.box)


@pytest.mark.parametrize("answered", [False, True])
def test_a_link_that_is_hurried_ends_unless_all_is_answered_soon(answered) -> None:
    with scene() as s:
        s.link.expire_after(0, lambda: s.link.close("nobody waits"))  # nothing to hurry for
        s.post(1)
        work = take_work(s.peer)
        s.link.expire_after(0.1, lambda: s.link.close("no answer after a loss"))
        if answered:
            s.peer.send(encode(logits_for(work)))
            assert isinstance(s.reply().result, Result)
            s.post(2)  # posted later: not meant
            time.sleep(0.2)
            assert not s.link.lost
        else:
            assert "no answer after a loss" in s.reply().result.what
            assert s.link.lost


def test_a_link_hears_signs_of_life_of_peers_that_agreed_to_give_them() -> None:
    with scene() as s:
        s.post(1)
        s.peer.send(Alive().encode())
        assert "EXT_ALIVE: expected RESULT" in s.reply().result.what


def test_a_silent_peer_is_told_from_a_closed_one() -> None:
    """Also if the reader, whom our close has woken, is the first to report the end."""
    with scene(alive_timeout=0.2) as s:
        close = s.link.connection.close

        def close_and_wait() -> None:
            close()
            if threading.current_thread().name.startswith("heartbeat"):
                wait_until(lambda: s.reading.done, "the reader has ended")

        s.link.connection.close = close_and_wait  # type: ignore[method-assign]
        s.post(1)
        assert isinstance(s.reply().result, TransportTimeoutError)
        s.reading.result()
        assert [type(cause) for cause in s.closed] == [TransportTimeoutError]


def test_a_notice_goes_before_the_spans_that_wait_and_never_raises() -> None:
    with scene() as s:
        s.link._outbox.put([bytes(1 << 26)])
        wait_until(lambda: s.link.connection._sending, "the socket is full")
        s.post(1)
        s.link.tell(Drop(7))
        waiting = [bytes(pieces[0][4:8]) for pieces, _ in s.link._outbox._waiting]
        assert waiting == [(259).to_bytes(4, "big"), (3).to_bytes(4, "big")]
        s.link.close()
        s.link.tell(Drop(7))
