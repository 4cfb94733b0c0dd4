"""One forwarder with a hand-driven next hop: what it holds, and for how long."""

from __future__ import annotations

import threading

import pytest

from ds4py.config import Address
from ds4py.wire.frames import FrameType
from ds4py.wire.messages import Result, Telemetry, Work, encode
from ds4py.worker.forwarder import Forwarder
from tests.support.clusters import span, wait_until
from tests.support.peers import entry, make_work
from tests.support.sockets import Background, connected, read_exactly
from tests.support.strategies import joined

FIRST, LAST = span("0-2"), span("3-5")


def work_with(hidden: memoryview) -> Work:
    """A span for the last hop, whatever its hidden state."""
    return make_work([entry(FIRST), entry(LAST)], [], [5], request_id=3, input=hidden)


def record() -> Telemetry:
    return Telemetry(**dict.fromkeys(Telemetry.__slots__, 0) | {"n_tokens": 1})


@pytest.mark.parametrize("n_bytes", [1 << 16, 1 << 21])
def test_a_span_on_its_way_holds_no_memory_once_it_was_sent(n_bytes: int) -> None:
    """Its answer may take long, and a window of prompt chunks is much memory."""
    replies: list[object] = []
    departed = threading.Event()
    hidden = bytearray(n_bytes)
    with connected({FrameType.RESULT: 1 << 20}) as (connection, peer):
        forwarder = Forwarder(
            Address("127.0.0.1", 9), window=2, dial=lambda *_: connection, reply=replies.append
        )
        frame = joined(encode(work_with(memoryview(hidden))))
        reading = Background(lambda: read_exactly(peer, len(frame)))
        forwarder.forward(work_with(memoryview(hidden)), record(), departed.set)
        assert reading.result() == frame
        assert departed.wait(20)
        wait_until(lambda: can_grow(hidden), "nobody holds a view of the hidden state")
        assert not replies
        peer.sendall(joined(encode(Result(request_id=3))))
        wait_until(lambda: len(replies) == 1, "the answer is relayed")
        forwarder.close()


def can_grow(data: bytearray) -> bool:
    """Whether no view of it exists any more."""
    try:
        data.append(0)
    except BufferError:
        return False
    return True
