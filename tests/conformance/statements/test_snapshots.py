"""Statements 87 to 90: the frames of sessions that are saved and loaded.

See docs/spec/wire-protocol.md#save-request, #snapshot-begin, #snapshot-chunk, #snapshot-done.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from ds4py.contracts import CacheForm
from ds4py.errors import (
    Ds4Error,
)
from tests.conformance.statements.peer import (
    BEGIN,
    CHUNK,
    DONE,
    LOAD_BEGIN,
    N_CTX,
    SAVE_REQ,
    WHOLE,
    WORK,
    Hop,
    dial,
    driving,
    frame,
    token_hash,
    work,
    worker,
)
from tests.conformance.statements.shards import (
    FAKE,
    ID,
    MOST,
    TOKENS,
    Done,
    Layout,
    begin,
    chunk,
    cut,
    done,
    goes_on,
    id_of,
    load_begin,
    model,
    pull,
    push,
    read_done,
    read_record,
    reply,
    save_req,
    saved,
    two_hops,
)
from tests.fake_runner import card
from tests.sockets import Background

OTHER = [7, 7, 12]
WIDE = CacheForm(ratios=(0,) * 6, width=131_072, index_width=0, window=4096)
"""Half a MiB in a row of a layer."""


# --- 87: a worker refuses to save -----------------------------------------------------------------


@pytest.mark.parametrize("size", [41, 39, 0, 44, 1000])
def test_statement_087_the_length_of_a_save_request(size: int) -> None:
    """A SAVE_REQ of 41 bytes is refused in a BEGIN without ids, and the connection goes on."""
    with driving() as peer:
        peer.check(work(WHOLE, TOKENS))
        peer.send(SAVE_REQ, (save_req(TOKENS) + bytes(size))[:size])
        got = read_record(peer.expect(BEGIN))
        assert (got.status, got.session_id, got.request_id, got.token_hash) == (1, 0, 0, 0)
        assert (got.payload_bytes, got.message_bytes > 0) == (0, True)
        goes_on(peer, TOKENS)


# table docs/spec/wire-protocol.md#save-request: (class, changes of a good request, words)
SAVE_FAULTS: list[tuple[str, dict[str, int], str]] = [
    ("S-STATE model", {"model_id": 0}, "worker state"),
    ("S-STATE start", {"layer_start": 1}, "worker state"),
    ("S-STATE end", {"layer_end": 4}, "worker state"),
    ("S-STATE count", {"token_count": N_CTX + 1}, "worker state"),
    ("S-STATE first", {"model_id": 0, "session_id": 9, "token_count": 1}, "worker state"),
    ("S-NOSESSION", {"session_id": 9}, "no distributed session"),
    ("S-NOSESSION first", {"session_id": 9, "token_count": 1}, "no distributed session"),
    ("S-COUNT", {"token_count": len(TOKENS) - 1}, "token count"),
    ("S-COUNT first", {"token_count": len(TOKENS) + 1, "token_hash": 1}, "token count"),
    ("S-HASH", {"token_hash": 1}, "token hash"),
]


@pytest.mark.parametrize(
    ("changes", "words"),
    [(changes, words) for _, changes, words in SAVE_FAULTS],
    ids=[name for name, _, _ in SAVE_FAULTS],
)
def test_statement_087_requests_that_do_not_fit(changes: dict[str, int], words: str) -> None:
    """A SAVE_REQ that fails a row of the table gets a BEGIN of status 1, and nothing follows."""
    with driving() as peer:
        peer.check(work(WHOLE, TOKENS))
        peer.send(SAVE_REQ, save_req(TOKENS, **changes))
        got = read_record(peer.expect(BEGIN))
        assert words in got.message.decode()
        asked = {"session_id": 1, "request_id": ID} | changes
        assert (got.session_id, got.request_id) == (asked["session_id"], ID)
        assert (got.model_id, got.layer_start, got.layer_end) == (card().model_id, 0, 5)
        assert (got.status, got.token_hash, got.payload_bytes, got.token_count) == (1, 0, 0, 0)
        assert peer.hears_nothing(0.02)
        goes_on(peer, TOKENS)


def test_statement_087_a_session_without_tokens() -> None:
    """A session that was reset and not evaluated has nothing to save (class S-IO)."""
    with driving() as peer:
        peer.check(work(WHOLE, TOKENS))
        peer.refused(work(WHOLE, TOKENS, prefix_hash=5))  # the reset took effect
        peer.send(SAVE_REQ, save_req([]))
        assert b"no tokens" in read_record(peer.expect(BEGIN)).message
        peer.check(work(WHOLE, TOKENS))


# --- 88: BEGIN ------------------------------------------------------------------------------------


def test_statement_088_a_worker_echoes() -> None:
    """A worker's BEGIN repeats session, request, hash and layers, names no tokens and the size."""
    with driving() as peer:
        peer.check(work(WHOLE, TOKENS, session_id=77))
        for request_id in (ID, ID + 1, 5):
            request = save_req(TOKENS, session_id=77, request_id=request_id)
            got, parts = pull(peer, request)
            assert got[:7] == (card().model_id, 77, request_id, token_hash(TOKENS), 0, 0, 5)
            assert got.payload_bytes == sum(map(len, parts))
            assert got[8:] == (0, 0, 0, (), b"")
        peer.check(work(WHOLE, [7], TOKENS, session_id=77))


def test_statement_088_the_shard_of_a_worker() -> None:
    """What a worker sends is the shard of its layers, as wire-protocol.md#dsvl lays it out."""
    hop = Hop(3, 5, 1)
    with driving("3-5") as peer:
        peer.check(work(hop, TOKENS))
        shard = b"".join(pull(peer, save_req(TOKENS, hop))[1])
    layout = Layout(FAKE, hop, len(TOKENS))
    assert shard[:56] == layout.shard()[:56]
    assert len(shard) == len(layout.shard())


ACCEPTED_BEGINS: dict[str, Callable[[bytes, bytes], bytes]] = {
    "no tokens": begin,
    "the tokens": lambda r, p: begin(r, p, TOKENS),
    "other tokens": lambda r, p: begin(r, p, [0] * len(TOKENS)),
    "a message": lambda r, p: begin(r, p, message=b"here it comes"),
    "all": lambda r, p: begin(r, p, TOKENS, b"here it comes") + b"and a tail",
}


@pytest.mark.parametrize("opening", ACCEPTED_BEGINS.values(), ids=ACCEPTED_BEGINS)
def test_statement_088_a_coordinator_accepts(opening: Callable[[bytes, bytes], bytes]) -> None:
    """A coordinator takes a BEGIN that counts no tokens or all; text and a tail are skipped."""
    with two_hops() as scene:
        running = Background(scene.session.save)
        for entrance, shard in zip(scene.doors, scene.shards, strict=True):
            hop = entrance.accept()
            request = hop.expect(SAVE_REQ)
            assert id_of(request) == ID + scene.doors.index(entrance)
            head = frame(BEGIN, opening(request, shard))
            hop.say(head + reply(request, shard)[12 + 60 :])
            assert hop.ended()
        assert len(b"".join(running.result())) > sum(map(len, scene.shards))


REFUSED_BEGINS: dict[str, Callable[[bytes, bytes], bytes]] = {
    **{
        field: lambda r, p, field=field: frame(BEGIN, begin(r, p, **{field: 3}))
        for field in ("model_id", "session_id", "request_id", "token_hash", "layer_start")
    },
    "layer_end": lambda r, p: frame(BEGIN, begin(r, p, layer_end=4)),
    "too few tokens": lambda r, p: frame(BEGIN, begin(r, p, TOKENS[1:])),
    "token bytes": lambda r, p: frame(BEGIN, begin(r, p, token_count=len(TOKENS))),
    "tokens beyond the body": lambda r, p: frame(
        BEGIN, begin(r, p, token_count=len(TOKENS), token_bytes=4 * len(TOKENS))
    ),
    "message beyond the body": lambda r, p: frame(BEGIN, begin(r, p, message_bytes=1)),
    "status": lambda r, p: frame(BEGIN, begin(r, p, message=b"too busy", status=1)),
    "another status": lambda r, p: frame(BEGIN, begin(r, b"", status=2**32 - 1)),
    "short": lambda r, p: frame(BEGIN, begin(r, p)[:59]),
    "type": lambda r, p: frame(LOAD_BEGIN, begin(r, p)),
    "magic": lambda r, p: b"DS4E" + frame(BEGIN, begin(r, p))[4:],
    "no payload": lambda r, p: frame(BEGIN, begin(r, b"")),
}


@pytest.mark.parametrize("opening", REFUSED_BEGINS.values(), ids=REFUSED_BEGINS)
def test_statement_088_a_coordinator_refuses(opening: Callable[[bytes, bytes], bytes]) -> None:
    """A BEGIN that does not echo, does not add up or has a status fails the save, not the route."""
    with two_hops() as scene:
        running = Background(scene.session.save)
        hop = scene.doors[0].accept()
        request = hop.expect(SAVE_REQ)
        rest = reply(request, scene.shards[0])[12 + 60 :]
        hop.say(opening(request, scene.shards[0]) + rest)
        with pytest.raises(Ds4Error):
            running.result()
        assert hop.ended()
        scene.goes_on()


# --- 89: CHUNK ------------------------------------------------------------------------------------

PARTITIONS: dict[str, Callable[[bytes], list[bytes]]] = {
    "one": lambda p: [p],
    "bytes": lambda p: cut(p, 1),
    "hundreds": lambda p: cut(p, 100),
    "empty ones": lambda p: [b"", p[:7], b"", b"", p[7:]],
    "many empty ones": lambda p: [b""] * 500 + [p],
}


@pytest.mark.parametrize("parts", PARTITIONS.values(), ids=PARTITIONS)
def test_statement_089_chunks_for_a_worker(parts: Callable[[bytes], list[bytes]]) -> None:
    """A worker loads a shard that comes in chunks of any size.

    Differs from C: more than a thousand empty chunks are taken for a flood
    (docs/spec/wire-protocol.md#quirks Q22).
    """
    shard = saved(*TOKENS)
    with driving() as peer:
        assert push(peer, load_begin(TOKENS, shard), *parts(shard)) == Done(ID, 0, b"")
        goes_on(peer, TOKENS)


@pytest.mark.parametrize("parts", PARTITIONS.values(), ids=PARTITIONS)
def test_statement_089_chunks_for_a_coordinator(parts: Callable[[bytes], list[bytes]]) -> None:
    """A coordinator saves a shard that comes in chunks of any size."""
    with two_hops() as scene:
        running = Background(scene.session.save)
        for entrance, shard in zip(scene.doors, scene.shards, strict=True):
            hop = entrance.accept()
            hop.say(reply(hop.expect(SAVE_REQ), shard, *parts(shard)))
        assert scene.shards[0][56 + 24 :] in b"".join(running.result())


BIG = Layout(WIDE, Hop(1, 1), 17)


def test_statement_089_chunks_of_8_mib() -> None:
    """A worker takes chunks of up to 8 MiB, and cuts what it saves at 8 MiB."""
    tokens, shard = [3] * 17, BIG.shard()
    assert MOST < len(shard) < 2 * MOST
    with driving("1-1", identity=model(WIDE)) as peer:
        parts = cut(shard, MOST)
        assert push(peer, load_begin(tokens, shard, BIG.hop), *parts) == Done(ID, 0, b"")
        assert pull(peer, save_req(tokens, BIG.hop))[1] == parts


@pytest.mark.parametrize("size", [MOST + 1, len(BIG.shard())])
def test_statement_089_larger_chunks_for_a_worker(size: int) -> None:
    """A worker refuses a chunk of more than 8 MiB, though the shard is larger than that.

    Differs from C: it does so at the header and does not read the data first, so that a sender that
    goes on may read a reset in place of DONE.
    """
    shard = BIG.shard()
    with driving("1-1", identity=model(WIDE)) as peer:
        peer.send(LOAD_BEGIN, load_begin([3] * 17, shard, BIG.hop))
        peer.say(frame(CHUNK, chunk(shard[:size]))[:12])
        got = read_done(peer.expect(DONE))
        assert (got.request_id, got.status) == (ID, 1)
        assert peer.ended()


def test_statement_089_larger_chunks_for_a_coordinator() -> None:
    """A coordinator refuses a chunk of more than 8 MiB, though the shard is larger than that."""
    with two_hops(WIDE) as scene:
        n_bytes = scene.layouts[0].n_bytes
        assert n_bytes > MOST + 1
        running = Background(scene.session.save)
        hop = scene.doors[0].accept()
        opening = begin(hop.expect(SAVE_REQ), b"", payload_bytes=n_bytes)
        hop.say(frame(BEGIN, opening) + struct.pack(">4sII", b"DS4D", CHUNK, 12 + MOST + 1))
        with pytest.raises(Ds4Error):
            running.result()
        assert hop.ended()
        scene.goes_on()


CHUNK_FAULTS: dict[str, Callable[[bytes], bytes]] = {
    "request": lambda rest: frame(CHUNK, chunk(rest, ID + 1)),
    "more than remains": lambda rest: frame(CHUNK, chunk(rest + b"x")),
    "size too large": lambda rest: frame(CHUNK, chunk(rest, n_bytes=len(rest) + 1)),
    "size too small": lambda rest: frame(CHUNK, chunk(rest, n_bytes=len(rest) - 1)),
    "short": lambda rest: frame(CHUNK, chunk(b"")[:11]),
    "work": lambda rest: frame(WORK, work(WHOLE, TOKENS)),
    "begin": lambda rest: frame(BEGIN, bytes(60)),
    "load": lambda rest: frame(LOAD_BEGIN, load_begin(TOKENS, rest)),
    "unknown": lambda rest: frame(77, bytes(60)),
}


@pytest.mark.parametrize("fault", CHUNK_FAULTS.values(), ids=CHUNK_FAULTS)
def test_statement_089_chunks_that_do_not_belong(fault: Callable[[bytes], bytes]) -> None:
    """A frame that is no chunk of the transfer ends it with DONE 1 and a close (class L-CHUNK)."""
    shard = saved(*TOKENS)
    with worker() as w, dial(w.address) as other, dial(w.address) as loader:
        other.check(work(WHOLE, OTHER))
        loader.send(LOAD_BEGIN, load_begin(TOKENS, shard))
        loader.send(CHUNK, chunk(shard[:50]))
        loader.say(fault(shard[50:]))
        got = read_done(loader.expect(DONE))
        assert (got.request_id, got.status) == (ID, 1)
        assert loader.ended()
        goes_on(other, OTHER)


# --- 90: DONE -------------------------------------------------------------------------------------


def test_statement_090_the_end_of_a_save() -> None:
    """A worker ends a shard with a DONE of the request, and says nothing more."""
    with driving() as peer:
        peer.check(work(WHOLE, TOKENS))
        for request_id in (ID, 7):
            pull(peer, save_req(TOKENS, request_id=request_id))
            assert peer.hears_nothing(0.02)


def test_statement_090_the_end_of_a_load() -> None:
    """A worker says DONE when it has all of a shard, not before, and nothing more."""
    shard = saved(*TOKENS)
    with driving() as peer:
        for request_id in (ID, 7):
            peer.send(LOAD_BEGIN, load_begin(TOKENS, shard, request_id=request_id))
            peer.send(CHUNK, chunk(shard[:-1], request_id))
            assert peer.hears_nothing(0.02)
            peer.send(CHUNK, chunk(shard[-1:], request_id))
            assert read_done(peer.expect(DONE)) == Done(request_id, 0, b"")
            assert peer.hears_nothing(0.02)


def test_statement_090_a_coordinator_waits_for_the_end() -> None:
    """A coordinator is done with a hop when its DONE is there; the hop may add words and a tail."""
    with two_hops() as scene:
        running = Background(scene.session.save)
        hops = []
        for entrance, shard in zip(scene.doors, scene.shards, strict=True):
            hops.append(entrance.accept())
            request = hops[-1].expect(SAVE_REQ)
            hops[-1].say(reply(request, shard)[: -12 - 16])
            assert hops[-1].hears_nothing(0.02)
            assert not running.done
            hops[-1].send(DONE, done(id_of(request), message=b"fine") + b"tail")
        payload = b"".join(running.result())
        running = Background(lambda: scene.session.load(payload))
        for entrance in scene.doors:
            hop = entrance.accept()
            request = hop.expect(LOAD_BEGIN)
            hop.expect(CHUNK)
            assert hop.hears_nothing(0.02)
            assert not running.done
            hop.send(DONE, done(id_of(request), message=b"fine") + b"tail")
            assert hop.ended()
        running.result()


BAD_DONES: dict[str, Callable[[int], bytes]] = {
    "request": lambda request_id: frame(DONE, done(request_id + 1)),
    "status": lambda request_id: frame(DONE, done(request_id, 1, b"disk full")),
    "another status": lambda request_id: frame(DONE, done(request_id, 2**32 - 1)),
    "message beyond the body": lambda request_id: frame(DONE, done(request_id, size=1)),
    "short": lambda request_id: frame(DONE, done(request_id)[:15]),
    "type": lambda request_id: frame(CHUNK, chunk(b"", request_id)),
    "close": lambda request_id: b"",
}


@pytest.mark.parametrize("end", BAD_DONES.values(), ids=BAD_DONES)
def test_statement_090_a_save_with_a_bad_end(end: Callable[[int], bytes]) -> None:
    """A shard without the DONE of its request fails the save, not the route.

    See docs/spec/wire-protocol.md#snapshot-done.
    """
    with two_hops() as scene:
        running = Background(scene.session.save)
        hop = scene.doors[0].accept()
        request = hop.expect(SAVE_REQ)
        hop.say(reply(request, scene.shards[0])[: -12 - 16] + end(id_of(request)))
        hop.finish()
        with pytest.raises(Ds4Error):
            running.result()
        assert hop.ended()
        scene.goes_on()


@pytest.mark.parametrize("end", BAD_DONES.values(), ids=BAD_DONES)
def test_statement_090_a_load_with_a_bad_end(end: Callable[[int], bytes]) -> None:
    """A load without the DONE of its request fails; a replay makes the stages agree again."""
    with two_hops() as scene:
        payload = scene.saves(scene.shards)
        running = Background(lambda: scene.session.load(payload))
        hop = scene.doors[0].accept()
        request = hop.expect(LOAD_BEGIN)
        hop.expect(CHUNK)
        hop.say(end(id_of(request)))
        hop.finish()
        with pytest.raises(Ds4Error):
            running.result()
        assert hop.ended()
        scene.evaluate(lambda: scene.session.sync(TOKENS))
