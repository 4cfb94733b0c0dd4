"""Statements 91 to 94: loads that are refused, loads that succeed, shards and whole sessions."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest

from ds4py.contracts import CacheForm
from ds4py.errors import SnapshotError
from tests.clusters import cluster
from tests.conformance.statements.peer import (
    CHUNK,
    DONE,
    LOAD_BEGIN,
    N_CTX,
    SOME_LOGITS,
    WHOLE,
    Peer,
    dial,
    door,
    driving,
    token_hash,
    work,
    worker,
)
from tests.conformance.statements.shards import (
    FAKE,
    HOPS,
    ID,
    TOKENS,
    Done,
    Layout,
    chunk,
    done,
    goes_on,
    id_of,
    load_begin,
    pull,
    push,
    read_done,
    read_record,
    save_req,
    saved,
    two_hops,
    whole_session,
)
from tests.fake_runner import N_VOCAB, reference_logits
from tests.sockets import Background

OTHER = [7, 7, 12]
MIXED = CacheForm(ratios=(0, 128, 4, 4, 0, 128), width=8, index_width=4, window=6)
"""Every kind of layer, and more tokens than its window holds."""


# --- 91: a worker refuses to load -----------------------------------------------------------------


def long_by_one(shard: bytes, **changes: int) -> bytes:
    """A request of one token more than the context; its hash is right."""
    return load_begin([3] * (N_CTX + 1), shard, **changes)


Request = Callable[..., bytes]
# table docs/spec/wire-protocol.md#snapshot-begin: the requests that are refused before the shard is
# looked at
LOAD_FAULTS: dict[str, Request] = {
    "L-HEADER token bytes": lambda p, **more: load_begin(TOKENS, p, token_bytes=32, **more),
    "L-HEADER message bytes": lambda p, **more: load_begin(TOKENS, p, message_bytes=1, **more),
    "L-HEADER token count": lambda p, **more: load_begin(TOKENS, p, token_count=8, **more),
    "L-HEADER tail": lambda p, **more: load_begin(TOKENS, p, **more) + b"tail",
    "L-HEADER cut": lambda p, **more: load_begin(TOKENS, p, **more)[:-1],
    "L-VOCAB": lambda p, **more: load_begin([*TOKENS[1:], N_VOCAB], p, **more),
    "L-VOCAB at first": lambda p, **more: load_begin([2**32 - 1, *TOKENS[1:]], p, **more),
    "L-HASH": lambda p, **more: load_begin(TOKENS, p, token_hash=token_hash(OTHER), **more),
    "L-STATE model": lambda p, **more: load_begin(TOKENS, p, model_id=0, **more),
    "L-STATE start": lambda p, **more: load_begin(TOKENS, p, layer_start=1, **more),
    "L-STATE end": lambda p, **more: load_begin(TOKENS, p, layer_end=4, **more),
    "L-STATE context": long_by_one,
}
faults = pytest.mark.parametrize("request_of", LOAD_FAULTS.values(), ids=LOAD_FAULTS)


def is_refused(peer: Peer) -> bool:
    got = read_done(peer.expect(DONE))
    return (got.request_id, got.status) == (ID, 1) and bool(got.message)


@faults
def test_statement_091_a_refusal_with_data_outstanding(request_of: Request) -> None:
    """A LOAD_BEGIN that is refused gets DONE 1, and a close since its shard was not read."""
    with worker() as w, dial(w.address) as other, dial(w.address) as loader:
        other.check(work(WHOLE, OTHER))
        loader.send(LOAD_BEGIN, request_of(saved(*TOKENS)))
        assert is_refused(loader)
        assert loader.ended()
        goes_on(other, OTHER)


@faults
def test_statement_091_a_refusal_without_data(request_of: Request) -> None:
    """A LOAD_BEGIN without a shard that is refused gets DONE 1, and the connection goes on.

    Differs from C: after an id outside the vocabulary, the ids that follow are read as well and not
    taken for a frame (docs/spec/wire-protocol.md#quirks Q21).
    """
    with driving() as peer:
        peer.check(work(WHOLE, OTHER))
        peer.send(LOAD_BEGIN, request_of(b""))
        assert is_refused(peer)
        goes_on(peer, OTHER)


def test_statement_091_a_short_request() -> None:
    """A LOAD_BEGIN shorter than its fixed record is closed on without an answer (L-SHORT)."""
    for size in (59, 0):
        with driving() as peer:
            peer.send(LOAD_BEGIN, load_begin(TOKENS, b"")[:size])
            assert peer.ended()


FOREIGN = Layout(FAKE, WHOLE, len(TOKENS))
# shards of the right size that do not belong (docs/spec/wire-protocol.md#merge-and-split): words of
# their headers
FOREIGN_WORDS = {
    "magic": 0,
    "version": 2,
    "ctx": N_CTX + 1,
    "token_count": len(TOKENS) - 1,
    "layer_start": 1,
    "layer_end": 4,
    "n_layers": 7,
    "head_dim": 9,
    "indexer_head_dim": 1,
    "raw_window": N_CTX - 1,
    "comp_cap": N_CTX // 4 + 3,
    "raw_live": len(TOKENS) + 1,
}


@pytest.mark.parametrize(("word", "value"), FOREIGN_WORDS.items(), ids=FOREIGN_WORDS)
def test_statement_091_a_shard_that_does_not_belong(word: str, value: int) -> None:
    """A shard that came whole and is refused gets DONE 1 and ends its session, not the connection.

    This is class L-LOAD.
    """
    shard = FOREIGN.shard(**{word: value})
    with driving() as peer:
        peer.check(work(WHOLE, TOKENS))
        got = push(peer, load_begin(TOKENS, shard), shard)
        assert (got.request_id, got.status) == (ID, 1)
        assert got.message
        peer.refused(work(WHOLE, [7], TOKENS))
        peer.check(work(WHOLE, OTHER))


def test_statement_091_a_shard_of_another_size() -> None:
    """A shard that is too short is read whole and refused; the connection goes on."""
    shard = saved(*TOKENS)
    for short in (b"", shard[:20], shard[:-1]):
        with driving() as peer:
            parts = [short] if short else []
            assert push(peer, load_begin(TOKENS, short), *parts).status == 1
            peer.check(work(WHOLE, TOKENS))


def test_statement_091_a_shard_that_is_too_long() -> None:
    """A shard that is announced longer than it can be is refused before it comes, with a close.

    Differs from C: C takes all of it first.
    """
    for n_bytes in (len(saved(*TOKENS)) + 1, 1 << 40, 2**64 - 1):
        with driving() as peer:
            peer.send(LOAD_BEGIN, load_begin(TOKENS, b"", payload_bytes=n_bytes))
            assert is_refused(peer)
            assert peer.ended()


@pytest.mark.parametrize("n_bytes", [0, 1, 500, -1])
def test_statement_091_a_stream_that_ends(n_bytes: int) -> None:
    """A stream that ends in the middle of a shard changes nothing and gets no DONE."""
    shard = saved(*TOKENS)
    with worker() as w, dial(w.address) as other, dial(w.address) as loader:
        other.check(work(WHOLE, OTHER))
        loader.send(LOAD_BEGIN, load_begin(TOKENS, shard))
        loader.send(CHUNK, chunk(shard[:n_bytes]))
        loader.finish()
        assert loader.ended()
        goes_on(other, OTHER)


# --- 92: a session goes on where it was saved -----------------------------------------------------


@pytest.mark.parametrize("before", [[], OTHER, TOKENS], ids=["new", "replaced", "the same"])
def test_statement_092_a_loaded_session_goes_on(before: list[int]) -> None:
    """After a load the next span fits behind the loaded tokens, and gets the logits of all."""
    shard = saved(*TOKENS)
    with worker() as w, dial(w.address) as peer, dial(w.address) as loader:
        if before:
            peer.check(work(WHOLE, before))
        assert push(loader, load_begin(TOKENS, shard), shard) == Done(ID, 0, b"")
        if before == OTHER:
            peer.refused(work(WHOLE, [7], before))
        goes_on(peer, TOKENS)
        goes_on(loader, [*TOKENS, 7], 8)


def test_statement_092_sessions_are_loaded_apart() -> None:
    """A load concerns the session that it names, and no other."""
    shard = saved(*TOKENS)
    with driving() as peer:
        peer.check(work(WHOLE, OTHER))
        assert push(peer, load_begin(TOKENS, shard, session_id=2), shard).status == 0
        goes_on(peer, OTHER)
        peer.check(work(WHOLE, [7], TOKENS, session_id=2))
        assert b"".join(pull(peer, save_req([*TOKENS, 7], session_id=2))[1]) == saved(*TOKENS, 7)


@pytest.mark.parametrize("plain", [False, True])
def test_statement_092_on_a_control_connection(plain: bool) -> None:
    """A worker loads over its control connection as well, between the spans of a session."""
    shard = saved(*TOKENS)
    with door() as coordinator, worker(coordinator=coordinator.address, plain=plain):
        peer = coordinator.accept()
        if not plain:
            peer.sock.close()  # on the handshake; the stock protocol follows
            peer = coordinator.accept()
        peer.read()
        peer.check(work(WHOLE, OTHER))
        assert push(peer, load_begin(TOKENS, shard), shard).status == 0
        goes_on(peer, TOKENS)


def test_statement_092_over_a_route() -> None:
    """A session that one process saved goes on over a route of workers."""
    with cluster([], local="0-5") as alone, alone.backend.lease(TOKENS) as session:
        session.sync(TOKENS)
        payload = b"".join(session.save())
    with cluster(["2-3", "4-5"], local="0-1") as c, c.backend.lease(TOKENS) as session:
        c.wait_ready()
        session.load(payload)
        np.testing.assert_array_equal(session.eval(7), reference_logits([*TOKENS, 7]))
        assert [runner.evaluated for runner in c.runners] == [[(len(TOKENS), 1)]] * 2


# --- 93: shards that do not fit together ----------------------------------------------------------


def test_statement_093_workers_with_another_context() -> None:
    """Workers may have more context than the coordinator, but then nothing is saved."""
    with (
        cluster([]) as c,
        worker("0-2", coordinator=c.port.address),
        worker("3-5", coordinator=c.port.address, n_ctx=2 * N_CTX),
        c.backend.lease(TOKENS) as session,
    ):
        c.wait_ready()
        session.sync(TOKENS)
        with pytest.raises(SnapshotError, match="ctx"):
            session.save()
        np.testing.assert_array_equal(session.eval(7), reference_logits([*TOKENS, 7]))


# words of the second shard that must be those of the first
SHARED_WORDS = [
    *(("ctx", N_CTX - 1), ("ctx", N_CTX + 1), ("comp_cap", N_CTX), ("raw_window", N_CTX - 1)),
    *(("token_count", 8), ("n_layers", 5), ("head_dim", 4), ("indexer_head_dim", 4)),
    *(("raw_live", 8), ("raw_cap", 8), ("layer_start", 2), ("layer_end", 4)),
    *(("magic", 0), ("version", 2)),
]


@pytest.mark.parametrize(("word", "value"), SHARED_WORDS)
def test_statement_093_shards_that_differ(word: str, value: int) -> None:
    """Shards that differ in context, window, tokens or model are refused on save, not the route."""
    with two_hops() as scene:
        first, second = scene.shards[0], scene.layouts[1].shard(**{word: value})
        with pytest.raises(SnapshotError):
            scene.saves([first, second])
        scene.goes_on()


@pytest.mark.parametrize(
    ("word", "value"), [("prefill_cap", 32), ("raw_cap", 32), ("comp_cap", 17)]
)
def test_statement_093_shards_that_may_differ(word: str, value: int) -> None:
    """Shards whose writers had room for other numbers of rows, or took other chunks, are joined.

    Differs from C: C refuses shards that differ in `prefill_cap`, `raw_cap` or `comp_cap`, though
    none of these says anything about the tensors; the payload names those of the first stage.
    """
    with two_hops() as scene:
        payload = scene.saves([scene.shards[0], scene.layouts[1].shard(1, **{word: value})])
        assert payload == scene.saves(scene.shards)


# --- 94: shards of a whole session ----------------------------------------------------------------


def tensors(layout: Layout, shard: bytes) -> bytes:
    return shard[56 + 8 * len(layout.ratios) :]


@pytest.mark.parametrize("form", [FAKE, MIXED], ids=["plain", "mixed"])
def test_statement_094_a_session_is_made_of_its_shards(form: CacheForm) -> None:
    """What a route saves holds tokens, logits, counts and all tensors; each hop gets back its own.

    Byte for byte: the shard that is sent to a hop is the one that it was saved from.
    """
    whole = Layout(form, WHOLE, len(TOKENS))
    with two_hops(form) as scene:
        payload = scene.saves(scene.shards)
        values = b"".join(map(tensors, scene.layouts, scene.shards))
        assert payload == whole_session(whole, TOKENS, SOME_LOGITS, values)
        running = Background(lambda: scene.session.load(payload))
        for hop, entrance, shard in zip(HOPS, scene.doors, scene.shards, strict=True):
            peer = entrance.accept()
            request = peer.expect(LOAD_BEGIN)
            got = read_record(request)
            session_id, request_id = got.session_id, ID + 2 + HOPS.index(hop)
            assert request == load_begin(
                TOKENS, shard, hop, session_id=session_id, request_id=request_id
            )
            assert peer.expect(CHUNK) == chunk(shard, request_id)
            peer.send(DONE, done(request_id))
            assert peer.ended()
        running.result()
        np.testing.assert_array_equal(scene.session.sync(TOKENS).logits, np.arange(N_VOCAB))
        assert scene.control.hears_nothing(0.02)


def test_statement_094_other_cuts() -> None:
    """What one route saved is cut for another one into the shards that its workers would save."""
    with cluster(["0-0", "1-4", "5-5"]) as c, c.backend.lease(TOKENS) as session:
        c.wait_ready()
        session.sync(TOKENS)
        payload = b"".join(session.save())
    whole = tensors(Layout(FAKE, WHOLE, len(TOKENS)), saved(*TOKENS))
    with two_hops() as scene:
        running = Background(lambda: scene.session.load(payload))
        at = 0
        for layout, entrance in zip(scene.layouts, scene.doors, strict=True):
            peer = entrance.accept()
            request_id = id_of(peer.expect(LOAD_BEGIN))
            shard = peer.expect(CHUNK)[12:]
            end = at + layout.n_bytes - 56 - 8 * len(layout.ratios)
            assert shard == layout.shard()[: 56 + 24] + whole[at:end]
            at = end
            peer.send(DONE, done(request_id))
        running.result()


def test_statement_094_scores_of_empty_slots() -> None:
    """A session is saved also if the scores of its empty slots are infinite.

    Differs from C: minus infinity in a score is handed on as -1e30, so that shard is not the same
    byte for byte, but one that every engine can compute with.
    """
    with two_hops(MIXED) as scene:
        # of the first hop: two layers' raw rows, and no compressed row but the state of the second
        at = 56 + 8 * 3 + 4 * (2 * 6 * 8 + 128 * 8)
        infinite, finite = (
            scene.shards[0][:at] + struct.pack("<f", score) + scene.shards[0][at + 4 :]
            for score in (-np.inf, -1e30)
        )
        assert scene.saves([infinite, scene.shards[1]]) == scene.saves([finite, scene.shards[1]])
