"""A coordinator saves and loads over a worker whose data port is answered by hand.

See docs/spec/wire-protocol.md#snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

import numpy as np
import pytest

from ds4py.config import CoordinatorConfig
from ds4py.coordinator.relay import kv_transfer
from ds4py.coordinator.session import ClusterSession
from ds4py.errors import (
    ClusterError,
    Ds4Error,
    PeerClosedError,
    RemoteWorkError,
    SnapshotError,
    TransportError,
    TransportTimeoutError,
)
from ds4py.snapshot import CacheSizes, Capacities, Shard, read_dsv4, write_dsvl
from ds4py.transport.connection import Connection
from ds4py.wire.frames import FrameType, encode_frame
from ds4py.wire.messages import (
    LoadBegin,
    SaveRequest,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotDone,
    decode,
    encode,
)
from ds4py.wire.prefix_hash import prefix_hash
from tests.by_hand import QUICK, good, joined, n_workers, serve
from tests.clusters import cluster
from tests.fake_runner import N_VOCAB, card
from tests.peers import N_CTX, NextHop, dial_in, hello, next_hop
from tests.shard_peers import ALL
from tests.sockets import Background

PROMPT = [5, 80, 3, 3, 41, 9, 77, 12, 1, 0, 96, 33]
MORE = [7, 0, 96]
SIZES = CacheSizes(**asdict(card().saved_form()), n_vocab=N_VOCAB)


def payload_of(session) -> bytes:
    return b"".join(session.save())


def alone(tokens: Sequence[int] = PROMPT) -> bytes:
    """What one process saves."""
    with cluster([], local="0-5") as c, c.backend.lease(tokens) as session:
        session.sync(tokens)
        return payload_of(session)


@contextmanager
def hop_by_hand(
    config: CoordinatorConfig = QUICK,
) -> Iterator[tuple[ClusterSession, NextHop, Callable[[], int]]]:
    """A session over one worker of all layers, whose data port is answered by the test."""
    with cluster([], config=config) as c, next_hop() as hop:
        introduction = hello(ALL, listen_port=hop.address.port)
        with dial_in(c.port.address, introduction) as peer:
            joined(c, 1)
            serve(peer, good)
            with c.backend.lease(PROMPT) as session:
                session.sync(PROMPT)
                yield session, hop, lambda: n_workers(c)


def shard_of(tokens: Sequence[int], **changes: object) -> bytes:
    rows = np.arange(8 * len(tokens), dtype=np.float32).reshape(-1, 8)
    shard = Shard(
        sizes=SIZES,
        layer_range=ALL,
        capacities=replace(Capacities.of(N_CTX, SIZES.window), **changes),  # type: ignore[arg-type]
        n_tokens=len(tokens),
        layers=[[rows]] * 6,
    )
    return b"".join(write_dsvl(shard))


def taken(connection: Connection) -> SaveRequest | LoadBegin | SnapshotChunk:
    frame = Background(connection.receive).result()
    assert frame is not None
    return decode(frame)  # type: ignore[return-value]


def begin_of(request: SaveRequest, payload: bytes, **changes: object) -> SnapshotBegin:
    fields = {name: getattr(request, name) for name in SaveRequest.__slots__}
    del fields["token_count"]
    fields |= {"payload_bytes": len(payload)} | changes
    return SnapshotBegin(**fields)


def send(connection: Connection, *messages) -> None:
    for message in messages:
        connection.send(encode(message))


def whole_reply(request: SaveRequest, **changes: object) -> list:
    """BEGIN, CHUNK and DONE as they should be, except for some fields of BEGIN."""
    payload = shard_of(PROMPT)
    return [
        begin_of(request, payload, **changes),
        SnapshotChunk(request.request_id, memoryview(payload)),
        SnapshotDone(request.request_id),
    ]


def test_each_operation_has_a_connection_of_its_own_and_ids_from_2_to_the_63() -> None:
    with hop_by_hand() as (session, hop, _):
        for number in range(2):
            saving = Background(session.save)
            connection = hop.accept()
            request = taken(connection)
            assert request == SaveRequest(
                model_id=card().model_id,
                session_id=session.session_id,
                request_id=(1 << 63) + number,
                token_hash=prefix_hash(PROMPT),
                token_count=len(PROMPT),
                layer_start=0,
                layer_end=5,
            )
            send(connection, *whole_reply(request))
            saved = b"".join(saving.result())
            assert Background(connection.receive).result() is None
        loading = Background(lambda: session.load(saved))
        connection = hop.accept()
        begin = taken(connection)
        assert isinstance(begin, LoadBegin)
        assert begin.request_id == (1 << 63) + 2
        assert (begin.tokens, begin.token_hash) == (tuple(PROMPT), prefix_hash(PROMPT))
        assert (begin.session_id, begin.status) == (session.session_id, 0)
        assert taken(connection).data == shard_of(PROMPT)
        send(connection, SnapshotDone(begin.request_id))
        loading.result()
        assert list(session.tokens) == PROMPT


def test_88_a_begin_with_the_tokens_and_a_tail_and_small_chunks_is_accepted() -> None:
    with hop_by_hand() as (session, hop, _):
        saving = Background(session.save)
        connection = hop.accept()
        request, payload = taken(connection), shard_of(PROMPT)
        begin = b"".join(encode(begin_of(request, payload, tokens=tuple(PROMPT))))[12:]
        connection.send(encode_frame(FrameType.SNAPSHOT_BEGIN, begin + b"and a tail"))
        for at in range(0, len(payload), 100):
            send(connection, SnapshotChunk(request.request_id, memoryview(b"")))
            send(connection, SnapshotChunk(request.request_id, memoryview(payload)[at : at + 100]))
        send(connection, SnapshotDone(request.request_id, 0, b"fine"))
        whole = read_dsv4(b"".join(saving.result()), SIZES, n_ctx=N_CTX)
        assert b"".join(write_dsvl(whole.cache)) == payload


BAD_SAVES = [
    pytest.param(
        lambda r: [begin_of(r, b"", status=1, token_hash=0, message=b"too busy\x07")],
        RemoteWorkError,
        "refused the work: too busy\N{REPLACEMENT CHARACTER}",
        id="refused",
    ),
    *(
        pytest.param(
            lambda r, field=field: whole_reply(r, **{field: 3}),
            ClusterError,
            f"BEGIN with {field} 3, expected",
            id=field,
        )
        for field in ("model_id", "session_id", "request_id", "token_hash", "layer_start")
    ),
    pytest.param(
        lambda r: whole_reply(r, tokens=(1, 2)), ClusterError, "BEGIN with 2 tokens", id="tokens"
    ),
    *(
        pytest.param(
            lambda r, n=n: whole_reply(r, payload_bytes=n), ClusterError, f"{n} bytes", id=str(n)
        )
        for n in (0, 1, 1 << 63, 2**64 - 1)
    ),
    pytest.param(
        lambda r: [SnapshotDone(r.request_id)], ClusterError, "DONE in place of", id="no begin"
    ),
    pytest.param(
        lambda r: [whole_reply(r)[0], *[SnapshotChunk(r.request_id, memoryview(b""))] * 1025],
        ClusterError,
        "invalid distributed snapshot chunk",
        id="flood of empty chunks",
    ),
    pytest.param(
        lambda r: [whole_reply(r)[0], SnapshotChunk(r.request_id, memoryview(bytes(9999)))],
        ClusterError,
        "invalid distributed snapshot chunk",
        id="more than announced",
    ),
    pytest.param(
        lambda r: [whole_reply(r)[0], SnapshotDone(r.request_id)],
        ClusterError,
        "DONE in place of SNAPSHOT_CHUNK",
        id="less than announced",
    ),
    pytest.param(
        lambda r: [*whole_reply(r)[:2], SnapshotDone(r.request_id + 1)],
        ClusterError,
        "DONE of request",
        id="another done",
    ),
    pytest.param(
        lambda r: [*whole_reply(r)[:2], SnapshotDone(r.request_id, 1, b"disk full")],
        RemoteWorkError,
        "disk full",
        id="failed at the end",
    ),
    pytest.param(
        lambda r: [*whole_reply(r)[:2], "close"], PeerClosedError, "DONE", id="closed at the end"
    ),
    pytest.param(lambda r: ["close"], PeerClosedError, "closed before", id="closed at once"),
    pytest.param(
        lambda r: [whole_reply(r)[0], "close"], PeerClosedError, "closed before", id="closed early"
    ),
]


@pytest.mark.parametrize(("answers", "error", "message"), BAD_SAVES)
def test_a_hop_that_does_not_save_as_it_should_costs_the_operation_only(
    answers, error, message
) -> None:
    with hop_by_hand() as (session, hop, n_registered):
        saving = Background(session.save)
        connection = hop.accept()
        request = taken(connection)
        try:
            for answer in answers(request):
                connection.close() if answer == "close" else send(connection, answer)
        except TransportError:
            pass  # it hung up on us
        with pytest.raises(error, match=message):
            saving.result()
        assert list(session.tokens) == PROMPT
        assert n_registered() == 1
        session.eval(7)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (shard_of(PROMPT, n_ctx=65), "layers 0-5.*ctx is 65"),
        (shard_of(PROMPT, raw_window=63), "layers 0-5.*raw_window is 63"),
        (shard_of(PROMPT, comp_cap=19), "layers 0-5.*comp_cap is 19"),
        (bytes(len(shard_of(PROMPT))), "layers 0-5.*magic is 0"),
    ],
)
def test_a_shard_that_can_not_be_joined_is_refused(payload, message) -> None:
    with hop_by_hand() as (session, hop, _):
        saving = Background(session.save)
        connection = hop.accept()
        request = taken(connection)
        send(
            connection,
            begin_of(request, payload),
            SnapshotChunk(request.request_id, memoryview(payload)),
            SnapshotDone(request.request_id),
        )
        with pytest.raises(SnapshotError, match=message):
            saving.result()


@pytest.mark.parametrize("operation", ["save", "load"])
def test_a_hop_that_says_nothing_is_given_up(operation, monkeypatch) -> None:
    monkeypatch.setattr(kv_transfer, "transfer_seconds", lambda n_bytes: 0.1)
    with hop_by_hand(replace(QUICK, result_timeout=0.1)) as (session, _, n_registered):
        with pytest.raises(TransportTimeoutError, match="was not done with a session's shard"):
            session.save() if operation == "save" else session.load(alone())
        assert n_registered() == 1
        session.sync([*PROMPT, 4])


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (lambda b: SnapshotDone(b.request_id, 1, b"no room"), RemoteWorkError, "no room"),
        (lambda b: SnapshotDone(b.request_id + 1), ClusterError, "DONE of request"),
        (lambda b: "close", PeerClosedError, "closed before SNAPSHOT_DONE"),
    ],
)
def test_a_hop_that_does_not_load_leaves_the_session_empty(answer, error, message) -> None:
    with hop_by_hand() as (session, hop, n_registered):
        loading = Background(lambda: session.load(alone()))
        connection = hop.accept()
        begin = taken(connection)
        taken(connection)
        said = answer(begin)
        connection.close() if said == "close" else send(connection, said)
        with pytest.raises(error, match=message):
            loading.result()
        assert session.tokens == ()
        assert n_registered() == 1
        session.sync(PROMPT)


def test_a_hop_whose_data_port_is_dead_is_a_transport_error() -> None:
    with hop_by_hand() as (session, hop, _):
        hop.close()
        with pytest.raises(Ds4Error) as caught:
            session.save()
        assert isinstance(caught.value, TransportError)
        session.eval(7)
