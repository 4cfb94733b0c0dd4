"""Who is let in as a worker, who replaces whom, and what is left at the end."""

from __future__ import annotations

import contextlib
import struct
import threading

import psutil
import pytest

from ds4py.coordinator.relay.workers import listener as port_module
from ds4py.coordinator.relay.workers import registration as reception_module
from ds4py.errors import (
    Ds4Error,
    TransportTimeoutError,
)
from ds4py.transport.sockets import connect
from ds4py.wire.frames import FrameType, encode_frame
from ds4py.wire.messages import (
    ErrorText,
    encode,
    error_result,
)
from tests.by_hand import (
    PROMPT,
    WHOLE,
    by_hand,
    ended,
    good,
    joined,
    n_workers,
    serve,
)
from tests.clusters import SOCKETS, cluster, span, wait_until
from tests.fake_runner import N_VOCAB
from tests.peers import dial_in, hello, take_work
from tests.sockets import Background, read_to_end


@pytest.mark.parametrize(
    "first",
    [
        encode_frame(FrameType.HELLO, bytes(39)),
        encode_frame(FrameType.HELLO, bytes(168)),
        encode_frame(FrameType.HELLO, struct.pack(">10I", *[0] * 9, 5) + b"four"),
        encode_frame(FrameType.HELLO, struct.pack(">10I", *[0] * 9, 4) + b"n\0me"),
        encode_frame(FrameType.WORK, b"x"),
        encode_frame(77, b"x"),
        [b"DS4E" + bytes(8)],
        [b"GET / HTTP/1.1\r\n\r\n"],
        [b""],
    ],
    ids=["short", "long", "name-length", "name-nul", "work", "unknown", "magic", "http", "end"],
)
def test_what_is_no_hello_is_closed_in_silence_and_disturbs_nobody(first) -> None:
    with cluster(["0-5"], dial_in=True) as c:
        joined(c, 1)
        with connect(c.port.address, SOCKETS) as sock:
            sock.settimeout(20)
            sock.sendall(b"".join(first))
            with contextlib.suppress(OSError):  # it may be closed already
                sock.shutdown(1)
            assert read_to_end(sock) == b""
        with c.backend.lease(PROMPT) as session:
            session.sync(PROMPT)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_id": 1, "model_name": b"x"}, "model id mismatch"),  # the first fault counts
        ({"model_name": b"other", "n_layers": 9}, "model family mismatch"),
        ({"n_layers": 9, "quant_bits": 3}, "layer count mismatch"),
        ({"quant_bits": 3, "has_output": 2}, "quant profile"),
        ({"has_output": 2, "has_hidden": 2}, "output-head flag"),
        ({"has_hidden": 2, "layer_end": 9}, "hidden-state flag"),
        ({"layer_end": 9, "ctx_size": 1}, "layer range"),
        ({"layer_end": 4, "ctx_size": 1}, "requires final layer"),
        ({"ctx_size": 63, "listen_port": 0}, "context too small"),
        ({"listen_port": 0}, "listen port"),
        ({"listen_port": 65536}, "listen port"),
    ],
)
def test_a_hello_that_does_not_fit_is_told_why(change, words, caplog) -> None:
    with cluster([]) as c, dial_in(c.port.address, hello(WHOLE, **change)) as peer:
        frame = Background(peer.receive).result()
        assert frame is not None
        assert frame.type == FrameType.ERROR
        assert words in ErrorText(bytes(frame.body)).text
        assert Background(peer.receive).result() is None
        assert n_workers(c) == 0
    assert words in caplog.text


def test_acceptance_is_silent() -> None:
    with cluster([]) as c, dial_in(c.port.address, hello(WHOLE)) as peer:
        joined(c, 1)
        with pytest.raises(TransportTimeoutError):
            peer.receive(timeout=0.05)


def test_a_worker_that_never_introduces_itself_is_closed(monkeypatch) -> None:
    monkeypatch.setattr(reception_module, "HELLO_SECONDS", 0.1)
    with cluster([]) as c, connect(c.port.address, SOCKETS) as sock:
        sock.settimeout(20)
        sock.sendall(b"DS4D")
        assert read_to_end(sock) == b""


def test_a_worker_that_introduces_itself_byte_by_byte_for_ever_is_closed(monkeypatch) -> None:
    monkeypatch.setattr(reception_module, "HELLO_SECONDS", 0.3)
    drip = b"".join(encode(hello(WHOLE)))[:-1]
    with cluster([]) as c, connect(c.port.address, SOCKETS) as sock:
        sock.settimeout(0.01)
        sock.sendall(drip[:4])
        with contextlib.suppress(ConnectionError):  # closed with bytes that nobody read
            for n in range(4, len(drip)):  # each byte is well within the deadline, all are not
                with contextlib.suppress(TimeoutError):
                    if sock.recv(1) == b"":
                        return
                sock.sendall(drip[n : n + 1])
            pytest.fail("it was listened to for ever")


def test_the_same_host_and_range_replaces_and_the_old_one_stays_connected_in_silence() -> None:
    """Closed, it would dial again and displace its successor, and so on each second."""
    with (
        cluster([]) as c,
        dial_in(c.port.address, hello(WHOLE)) as old,
        dial_in(c.port.address, hello(span("0-2"))) as half,
    ):
        joined(c, 2)
        with dial_in(c.port.address, hello(WHOLE, listen_port=7001)) as new:
            wait_until(
                lambda: "127.0.0.1:7001" in {s.name for s in c.coordinator.health().stages},
                "the newcomer is registered",
            )
            assert n_workers(c) == 2
            serve(new, good)
            with c.backend.lease(PROMPT) as session:
                session.sync(PROMPT)
            with pytest.raises(TransportTimeoutError):
                old.receive(timeout=0.05)
            old.send(encode(error_result(99, "I am still here")))  # nobody cares
        joined(c, 1)
        assert not half.closed


def test_requests_of_a_replaced_worker_go_on_with_its_successor() -> None:
    """A machine that lost its power says no good-bye; its connection stands for hours."""
    with by_hand() as (c, old, session):
        asking = Background(lambda: session.sync(PROMPT))
        take_work(old)
        with dial_in(c.port.address, hello(WHOLE, listen_port=7001)) as new:
            serve(new, good)
            assert asking.result().logits.shape == (N_VOCAB,)


def test_a_lost_link_is_not_planned_with_even_before_its_entry_is_gone() -> None:
    """Those who wait are told first; a replay must not spend itself on the dead link."""
    with cluster([]) as c, dial_in(c.port.address, hello(WHOLE)):
        c.wait_ready()
        pipeline = c.coordinator.ensure_pipeline(after_loss=False, cancelled=None)
        assert pipeline.route.link is not None
        pipeline.route.link.retire("lost")
        assert n_workers(c) == 1
        assert not c.coordinator.is_current(pipeline)
        assert not c.coordinator.health().ready


@pytest.mark.parametrize("dials_in", [False, True])
def test_after_closing_no_thread_and_no_socket_of_ours_is_left(dials_in, monkeypatch) -> None:
    monkeypatch.setattr(reception_module, "HELLO_SECONDS", 600)
    monkeypatch.setattr(port_module, "_FIRST_WORD_SECONDS", 600)
    process = psutil.Process()

    def sockets() -> set[int]:
        return {c.fd for c in process.net_connections("tcp")}

    threads, before = set(threading.enumerate()), sockets()
    with cluster(["0-2", "3-5"], dial_in=dials_in, chunk=2) as c:
        c.wait_ready()
        with c.backend.lease(PROMPT) as session:
            session.sync(PROMPT)
        silent = connect(c.port.address, SOCKETS)
        half = connect(c.port.address, SOCKETS)
        half.sendall(b"DS4D")
        wait_until(lambda: len(c.coordinator._reception._arriving) == 1, "one said its first word")
    wait_until(lambda: set(threading.enumerate()) <= threads, "all threads ended")
    for ours in (silent, half):
        assert read_to_end(ours) == b""
        ours.close()
    assert sockets() <= before


def test_closing_tells_requests_that_wait() -> None:
    with by_hand() as (c, peer, session):
        asking = Background(lambda: session.sync(PROMPT))
        take_work(peer)
        c.coordinator.close()
        c.coordinator.close()
        with pytest.raises(Ds4Error):
            asking.result()


def test_a_worker_that_comes_while_we_close_is_closed() -> None:
    with cluster([]) as c:
        c.coordinator.close()
        with dial_in(c.port.address, hello(WHOLE)) as late:
            assert Background(lambda: ended(late)).result()
