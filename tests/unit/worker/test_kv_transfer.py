"""A live worker saves and loads for a hand-driven peer (wire-protocol.md#checklist 87 to 92)."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from ds4py.activations import HiddenBatch
from ds4py.contracts import CacheForm, ForwardRequest, SessionId
from ds4py.errors import PeerClosedError
from ds4py.peer import shard_transfer
from ds4py.snapshot import CacheSizes, Capacities, Shard, write_dsvl
from ds4py.wire.frames import MAX_CHUNK_DATA, FrameType, encode_frame, worker_limits
from ds4py.wire.messages import SnapshotBegin, SnapshotDone, decode, encode
from ds4py.wire.prefix_hash import extend, prefix_hash
from ds4py.worker.connection import DataConnection
from ds4py.worker.worker import Worker
from tests.clusters import span, start_worker, wait_until
from tests.fake_runner import N_VOCAB, WIDTH, FakeRunner, card, reference_logits
from tests.peers import N_CTX, Driver, driver, entry, logits_for, next_hop, take_work
from tests.shard_peers import (
    ALL,
    ID,
    chunk,
    cut,
    ended,
    load_begin,
    pull,
    push,
    reply,
    save_request,
)
from tests.sockets import Background

PROMPT = [5, 80, 3, 41, 9]
OTHER = [7, 7, 12]
WIDE = 131_072
"""Values of a row that make the shard of a prompt larger than two chunks."""


@contextmanager
def serving(runner: FakeRunner | None = None, **fields: object) -> Iterator[tuple[Worker, Driver]]:
    """A worker, and a peer on a data connection."""
    runner = runner or FakeRunner(**fields)  # type: ignore[arg-type]
    worker = start_worker(runner)
    try:
        with driver(worker.address, entry(runner.layers)) as d:
            yield worker, d
    finally:
        worker.close()


def payload_of(tokens: Sequence[int], runner: FakeRunner | None = None) -> bytes:
    """The shard of all layers after some tokens."""
    runner = runner or FakeRunner()
    work = ForwardRequest(
        session=SessionId(9), tokens=tuple(tokens), pos0=0, hidden=None, reset=True
    )
    runner.run([work])
    return b"".join(runner.save_cache(SessionId(9)))


def serves(upstream: DataConnection, d: Driver) -> bool:
    return upstream._connection.peer.port == d.connection.local.port


def logits(result) -> np.ndarray:
    return np.frombuffer(result.payload, "<f4")


# --- saving ---------------------------------------------------------------------------------------


def test_87_a_save_request_of_41_bytes_is_refused_and_the_connection_survives() -> None:
    with serving() as (_, d):
        d.connection.send(encode_frame(FrameType.SNAPSHOT_SAVE_REQ, bytes(41)))
        begin = reply(d.connection)
        assert isinstance(begin, SnapshotBegin)
        assert (begin.status, begin.session_id, begin.request_id) == (1, 0, 0)
        assert begin.text == "invalid distributed snapshot save request"
        d.check([], PROMPT)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_id": 1}, "does not match worker state"),
        ({"layer_start": 1}, "does not match worker state"),
        ({"layer_end": 4}, "does not match worker state"),
        ({"token_count": N_CTX + 1}, "does not match worker state"),
        ({"session_id": 2}, "no distributed session"),
        ({"token_count": 4}, "token count mismatch: worker=5 request=4"),
        ({"token_hash": 3}, "token hash mismatch"),
        ({"token_count": 4, "token_hash": 3}, "token count mismatch"),
        ({"model_id": 1, "session_id": 2}, "does not match worker state"),
    ],
)
def test_a_save_request_that_does_not_fit_is_refused_and_changes_nothing(changes, text) -> None:
    with serving() as (_, d):
        d.check([], PROMPT)
        d.connection.send(encode(save_request(PROMPT, **changes)))
        begin = reply(d.connection)
        assert isinstance(begin, SnapshotBegin)
        assert text in begin.text
        asked = save_request(PROMPT, **changes)
        assert (begin.session_id, begin.request_id) == (asked.session_id, asked.request_id)
        assert (begin.model_id, begin.layer_start, begin.layer_end) == (card().model_id, 0, 5)
        assert (begin.status, begin.token_hash, begin.payload_bytes) == (1, 0, 0)
        result = d.check(PROMPT, [7])
        np.testing.assert_array_equal(logits(result), reference_logits([*PROMPT, 7]))


def test_a_session_without_tokens_is_not_saved() -> None:
    with serving() as (_, d):
        d.check([], PROMPT)
        d.refused([], PROMPT, prefix_hash=5, result_hash=extend(5, PROMPT))  # the reset took effect
        d.connection.send(encode(save_request([])))
        begin = reply(d.connection)
        assert isinstance(begin, SnapshotBegin)
        assert begin.text == "worker session has no tokens to snapshot"


def test_88_90_a_saved_shard_echoes_the_request_and_ends_with_done() -> None:
    with serving() as (worker, d), driver(worker.address) as saver:
        d.check([], PROMPT)
        for request_id in (ID, ID + 1):
            request = save_request(PROMPT, request_id=request_id)
            begin, parts = pull(saver.connection, request)
            for field in ("model_id", "session_id", "request_id", "token_hash"):
                assert getattr(begin, field) == getattr(request, field)
            assert (begin.layer_start, begin.layer_end, begin.token_count) == (0, 5, 0)
            assert b"".join(parts) == payload_of(PROMPT)
        d.check(PROMPT, [7])
        assert b"".join(pull(saver.connection, save_request([*PROMPT, 7]))[1]) == payload_of(
            [*PROMPT, 7]
        )


def wide_runner(**fields: object) -> FakeRunner:
    """A middle slice whose rows are large; nothing in it needs to know the tokens."""
    form = CacheForm(ratios=(0,) * 6, width=WIDE, index_width=0, window=4096)
    identity = replace(card(), hidden_width=WIDE, cache_form=form)
    return FakeRunner(span("1-2"), identity=identity, **fields)  # type: ignore[arg-type]


def wide_payload(tokens: Sequence[int]) -> bytes:
    sizes = CacheSizes(ratios=(0,) * 6, width=WIDE, index_width=0, window=4096, n_vocab=N_VOCAB)
    row = np.arange(WIDE, dtype=np.float32)
    rows = [np.stack([row + k + 1000 * layer for k in range(len(tokens))]) for layer in (1, 2)]
    shard = Shard(
        sizes=sizes,
        layer_range=span("1-2"),
        capacities=Capacities.of(N_CTX, 4096),
        n_tokens=len(tokens),
        layers=[[layer] for layer in rows],
    )
    return b"".join(write_dsvl(shard))


def test_89_a_large_shard_goes_both_ways_in_chunks_of_8_mib() -> None:
    tokens, layers = [3] * 20, span("1-2")
    payload = wide_payload(tokens)
    cuts = [payload[at : at + MAX_CHUNK_DATA] for at in range(0, len(payload), MAX_CHUNK_DATA)]
    with serving(wide_runner()) as (_, d):
        assert not push(d.connection, load_begin(tokens, payload, layers), *cuts).status
        _, parts = pull(d.connection, save_request(tokens, layers))
    assert [len(part) for part in parts] == [MAX_CHUNK_DATA, MAX_CHUNK_DATA, len(cuts[2])]
    assert parts == cuts


def test_no_result_comes_between_the_frames_of_a_shard() -> None:
    """A forwarded span is answered while the shard is on its way over the same connection."""
    tokens, layers = [3] * 20, span("1-2")
    payload = wide_payload(tokens)
    with serving(wide_runner()) as (worker, loader), next_hop() as hop:
        begin = load_begin(tokens, payload, layers, session_id=2)
        assert not push(loader.connection, begin, *cut(payload, MAX_CHUNK_DATA)).status
        with driver(worker.address, entry(layers), entry(span("3-5"), hop.address)) as d:
            hidden = HiddenBatch.pack(np.zeros((1, WIDE), np.float32), 32).data
            work = d.ask([], [7], input=hidden)
            behind = hop.accept()
            behind.expect(worker_limits(N_CTX, WIDE))
            onward = take_work(behind)
            d.connection.send(encode(save_request(tokens, layers, session_id=2)))
            assert isinstance(reply(d.connection), SnapshotBegin)
            (upstream,) = (u for u in worker._upstreams if serves(u, d))
            behind.send(encode(logits_for(onward)))
            wait_until(lambda: len(upstream._outbox._waiting) == 1, "the result waits")
            kinds = [type(reply(d.connection)).__name__ for _ in range(4)]
            assert kinds == ["SnapshotChunk"] * 3 + ["SnapshotDone"]
            assert d.answer().request_id == work.request_id


# --- loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts",
    [
        lambda p: [p],
        lambda p: cut(p, 1),
        lambda p: cut(p, 100),
        lambda p: [b"", p[:7], b"", b"", p[7:]],
        lambda p: [b""] * 1024 + [p],
    ],
    ids=["one", "bytes", "hundreds", "some empty", "many empty"],
)
def test_89_92_a_session_is_loaded_in_chunks_of_any_size_and_continues(parts) -> None:
    payload = payload_of(PROMPT)
    with serving() as (worker, d):
        d.check([], OTHER)  # replaced
        with driver(worker.address) as loader:
            assert not push(loader.connection, load_begin(PROMPT, payload), *parts(payload)).status
        result = d.check(PROMPT, [7])
        np.testing.assert_array_equal(logits(result), reference_logits([*PROMPT, 7]))


def test_several_operations_may_follow_each_other_on_one_connection() -> None:
    payload = payload_of(PROMPT)
    with serving() as (_, d):
        assert not push(d.connection, load_begin(PROMPT, payload), payload).status
        assert pull(d.connection, save_request(PROMPT))[1] == [payload]
        d.check(PROMPT, [7])
        assert not push(d.connection, load_begin(PROMPT, payload), payload).status
        d.check(PROMPT, [8])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokens": (*PROMPT[:-1], N_VOCAB)}, "token id is outside the model vocabulary"),
        ({"token_hash": 1}, "snapshot load token hash mismatch"),
        ({"model_id": 1}, "does not match worker state"),
        ({"layer_start": 1}, "does not match worker state"),
        ({"layer_end": 4}, "does not match worker state"),
        ({"tokens": (3,) * (N_CTX + 1)}, "does not match worker state"),
        ({"payload_bytes": 1 << 63}, f"{1 << 63} bytes, expected"),
        ({"payload_bytes": 2**64 - 1}, "bytes, expected"),
    ],
)
@pytest.mark.parametrize("outstanding", [True, False])
def test_91_a_refused_load_closes_if_a_part_of_the_shard_is_outstanding(
    changes, text, outstanding
) -> None:
    if "tokens" in changes:
        changes = {"token_hash": prefix_hash(changes["tokens"]), **changes}
    if not outstanding:
        if "payload_bytes" in changes:
            text = "0 bytes, expected"
        changes = {**changes, "payload_bytes": 0}
    with serving() as (worker, d), driver(worker.address, entry(ALL)) as loader:
        d.check([], PROMPT)
        done = push(loader.connection, load_begin(PROMPT, payload_of(PROMPT), **changes))
        assert done.status == 1
        assert text in done.text
        if outstanding:
            assert ended(loader.connection)
        else:
            loader.check([], OTHER, session=2)
        d.check(PROMPT, [7])


def test_91_a_record_that_is_too_short_gets_no_answer() -> None:
    with serving() as (_, d):
        d.connection.send(encode_frame(FrameType.SNAPSHOT_LOAD_BEGIN, bytes(59)))
        assert ended(d.connection)


@pytest.mark.parametrize(
    ("at", "value"), [(52, 24), (56, 1), (28, 4)], ids=["token bytes", "message", "count"]
)
@pytest.mark.parametrize("outstanding", [True, False])
def test_91_sizes_that_do_not_fit_are_refused(at, value, outstanding) -> None:
    payload = payload_of(PROMPT)
    frame = bytearray(b"".join(encode(load_begin(PROMPT, payload))))
    frame[12 + at : 16 + at] = struct.pack(">I", value)
    if not outstanding:
        frame[12 + 40 : 12 + 48] = bytes(8)
    with serving() as (_, d):
        d.connection.send([bytes(frame)])
        done = reply(d.connection)
        assert isinstance(done, SnapshotDone)
        assert (done.request_id, done.status) == (ID, 1)
        assert done.text == "invalid distributed snapshot load header"
        if outstanding:
            assert ended(d.connection)
        else:
            d.check([], PROMPT)


HEAD = struct.Struct(">QI")


@pytest.mark.parametrize(
    "frames",
    [
        [encode(chunk(bytes(9), ID + 1))],
        [encode(chunk(bytes(4 * 6 * WIDTH * len(PROMPT) + 100)))],
        [encode_frame(FrameType.SNAPSHOT_CHUNK, HEAD.pack(ID, 8), bytes(9))],
        [encode_frame(FrameType.SNAPSHOT_CHUNK, bytes(11))],
        [encode_frame(FrameType.WORK, bytes(80))],
        [encode_frame(FrameType.SNAPSHOT_BEGIN, bytes(60))],
        [encode_frame(77, bytes(60))],
        [encode(chunk(b""))] * 1025,
        [[struct.pack(">4sII", b"DS4D", FrameType.SNAPSHOT_CHUNK, 12 + MAX_CHUNK_DATA + 1)]],
    ],
    ids=["id", "more", "size", "short", "work", "begin", "unknown", "flood of empty", "too large"],
)
def test_89_a_chunk_that_does_not_belong_is_refused_and_the_session_stays(frames) -> None:
    payload = payload_of(PROMPT)
    with serving() as (worker, d), driver(worker.address) as loader:
        d.check([], OTHER)
        loader.connection.send(encode(load_begin(PROMPT, payload)))
        loader.connection.send(encode(chunk(payload[:50])))
        for frame in frames:
            loader.connection.send(frame)
        done = reply(loader.connection)
        assert isinstance(done, SnapshotDone)
        assert (done.request_id, done.status) == (ID, 1)
        assert ended(loader.connection)
        d.check(OTHER, [7])


@pytest.mark.parametrize("n_bytes", [0, 50, -1])
def test_a_stream_that_ends_in_the_middle_changes_nothing(n_bytes) -> None:
    payload = payload_of(PROMPT)
    with serving() as (worker, d):
        d.check([], OTHER)
        with driver(worker.address) as loader:
            loader.connection.send(encode(load_begin(PROMPT, payload)))
            loader.connection.send(encode(chunk(payload[:n_bytes])))
        wait_until(lambda: worker.n_callers == 1, "the other connection ended")
        d.check(OTHER, [7])


def test_a_shard_that_the_loader_refuses_ends_the_session_but_not_the_connection() -> None:
    payload = payload_of(PROMPT)
    for garbage in (bytes(len(payload)), payload[:40], payload[:52] + bytes(4) + payload[56:]):
        with serving() as (_, d):
            d.check([], OTHER)
            done = push(d.connection, load_begin(PROMPT, garbage), garbage)
            assert done.status == 1
            assert "expected" in done.text
            if len(garbage) == len(payload):
                assert "hash mismatch" in d.refused(OTHER, [7])
            d.check([], PROMPT)


def test_the_loader_wants_room_for_one_more_token() -> None:
    tokens = [3] * N_CTX
    payload = payload_of(tokens)
    with serving() as (_, d):
        assert "context" in push(d.connection, load_begin(tokens, payload), payload).text
        d.check([], PROMPT)


def test_a_load_may_push_out_a_session_that_nobody_holds_but_no_other() -> None:
    payload = payload_of(PROMPT)
    begin = load_begin(PROMPT, payload, session_id=2)
    with serving(n_slots=1) as (worker, d):
        with driver(worker.address, entry(ALL)) as holder:
            holder.check([], OTHER)
            assert "slots" in push(d.connection, begin, payload).text
            holder.check(OTHER, [7])
        wait_until(lambda: worker.n_callers == 1, "the holder ended")
        assert not push(d.connection, begin, payload).status
        d.check(PROMPT, [7], session=2)


def test_a_transfer_whose_connection_was_closed_meanwhile_changes_nothing() -> None:
    """The shard is complete, but the device is busy with another session until after the close."""
    payload, busy, go_on = payload_of(PROMPT), threading.Event(), threading.Event()

    def before(work: ForwardRequest) -> None:
        if work.session == SessionId(5):
            busy.set()
            assert go_on.wait(20)

    with serving(before=before) as (worker, d), driver(worker.address) as loader:
        d.check([], OTHER)
        with driver(worker.address, entry(ALL)) as other:
            other.ask([], PROMPT, session=5)
            assert busy.wait(20)
            loader.connection.send(encode(load_begin(PROMPT, payload)))
            loader.connection.send(encode(chunk(payload)))
            (upstream,) = (u for u in worker._upstreams if serves(u, loader))
            wait_until(lambda: len(worker.stage.device._queue) == 1, "the load waits")
            upstream.close()
            go_on.set()
            assert other.answer().status == 0
        d.check(OTHER, [7])


def test_a_peer_that_sends_too_slowly_is_closed(monkeypatch) -> None:
    monkeypatch.setattr(shard_transfer, "GRACE_SECONDS", 0.2)
    payload = payload_of(PROMPT)
    with serving() as (worker, d), driver(worker.address) as loader:
        d.check([], OTHER)
        loader.connection.send(encode(load_begin(PROMPT, payload)))

        def drip() -> None:
            for byte in payload:
                loader.connection.send(encode(chunk(bytes([byte]))))
                threading.Event().wait(0.02)

        with pytest.raises(PeerClosedError):
            Background(drip).result()
        wait_until(lambda: worker.n_callers == 1, "the slow connection ended")
        d.check(OTHER, [7])


def test_a_peer_that_takes_too_slowly_is_closed(monkeypatch) -> None:
    tokens, layers = [3] * 20, span("1-2")
    payload = wide_payload(tokens)
    with serving(wide_runner()) as (worker, d):
        parts = cut(payload, MAX_CHUNK_DATA)
        assert not push(d.connection, load_begin(tokens, payload, layers), *parts).status
        with monkeypatch.context() as patched, driver(worker.address) as saver:
            patched.setattr(shard_transfer, "GRACE_SECONDS", 0.2)
            patched.setattr(shard_transfer, "_SLOWEST", 1 << 30)
            saver.connection.send(encode(save_request(tokens, layers)))
            wait_until(lambda: worker.n_callers == 1, "the slow connection ended")
        assert pull(d.connection, save_request(tokens, layers))[1] == parts


def test_a_model_without_a_portable_form_says_so() -> None:
    identity = replace(card(), architecture="llama", cache_form=None)
    said = "sessions of llama models have no portable form"
    with serving(identity=identity) as (_, d):
        d.check([], PROMPT)
        d.connection.send(encode(save_request(PROMPT)))
        begin = reply(d.connection)
        assert isinstance(begin, SnapshotBegin)
        assert said in begin.text
        d.check(PROMPT, [7])
        assert said in push(d.connection, load_begin(PROMPT, b"1234")).text
        assert ended(d.connection)


def test_few_shards_are_in_memory_at_once(monkeypatch) -> None:
    """Anyone who comes when all permits are taken waits; the permits come back."""
    payload = payload_of(PROMPT)
    with serving() as (worker, d):
        permits = worker._context.transfers
        while permits.acquire(blocking=False):
            pass
        d.connection.send(encode(load_begin(PROMPT, payload)))
        d.connection.send(encode(chunk(payload)))
        answer = Background(d.connection.receive)
        assert not answer.done
        permits.release()
        frame = answer.result()
        assert frame is not None
        assert decode(frame) == SnapshotDone(ID)
        assert pull(d.connection, save_request(PROMPT))[1] == [payload]
        wait_until(lambda: permits._value == 1, "the permit is back")
