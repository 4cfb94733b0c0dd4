"""Saved sessions written from docs/spec/wire-protocol.md#messages and #snapshots alone.

Owns: the frames that carry a shard, the bytes of one. Refuses to know: `ds4py.wire` and
`ds4py.snapshot`. Invariant: as in `peer`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ds4py.contracts import CacheForm, ModelCard, Session
from tests.conformance.statements.coordinators import (
    coordinator_of,
)
from tests.conformance.statements.peer import (
    BEGIN,
    CHUNK,
    DONE,
    LOAD_BEGIN,
    N_CTX,
    RESULT,
    SAVE_REQ,
    WHOLE,
    Door,
    Hop,
    Peer,
    door,
    driving,
    enlisted,
    frame,
    result,
    token_hash,
    work,
    workers,
)
from tests.fake_runner import N_VOCAB, card, reference_logits
from tests.sockets import Background

TOKENS = [5, 80, 3, 3, 41, 9, 77, 12, 1]
FAKE = card().saved_form()
HOPS = [Hop(0, 2), Hop(3, 5, 1)]
ID = 1 << 63
MOST = 8_388_608
"""Bytes of data in one CHUNK."""


def save_req(tokens: Sequence[int], hop: Hop = WHOLE, **changes: int) -> bytes:
    """Body of a good SAVE_REQ (docs/spec/wire-protocol.md#save-request), then changed."""
    values = {
        "model_id": card().model_id,
        "session_id": 1,
        "request_id": ID,
        "token_hash": token_hash(tokens),
        "token_count": len(tokens),
        "layer_start": hop.start,
        "layer_end": hop.end,
    }
    return struct.pack(">IQQQ3I", *(values | changes).values())


class Record(NamedTuple):
    """BEGIN or LOAD_BEGIN (docs/spec/wire-protocol.md#snapshot-begin)."""

    model_id: int
    session_id: int
    request_id: int
    token_hash: int
    token_count: int
    layer_start: int
    layer_end: int
    payload_bytes: int
    status: int
    token_bytes: int
    message_bytes: int
    tokens: tuple[int, ...] = ()
    message: bytes = b""


def read_record(body: bytes) -> Record:
    fixed = struct.unpack_from(">IQQQ3IQ3I", body)
    n, end = fixed[4], 60 + fixed[9]
    assert fixed[9] in {0, 4 * n}
    assert len(body) == end + fixed[10]
    return Record(*fixed, struct.unpack_from(f">{fixed[9] // 4}I", body, 60), body[end:])


def _record(values: dict[str, int], tokens: Sequence[int], message: bytes) -> bytes:
    ids = struct.pack(f">{len(tokens)}I", *tokens)
    return struct.pack(">IQQQ3IQ3I", *values.values()) + ids + message


def begin(
    request: bytes,
    payload: bytes,
    tokens: Sequence[int] = (),
    message: bytes = b"",
    **changes: int,
) -> bytes:
    """Body of a good BEGIN for a SAVE_REQ, then changed."""
    names = ("model_id", "session_id", "request_id", "token_hash")
    model_id, *ids, _, start, end = struct.unpack(">IQQQ3I", request)
    values = dict(zip(names, (model_id, *ids), strict=True)) | {
        "token_count": len(tokens),
        "layer_start": start,
        "layer_end": end,
        "payload_bytes": len(payload),
        "status": 0,
        "token_bytes": 4 * len(tokens),
        "message_bytes": len(message),
    }
    return _record(values | changes, tokens, message)


def load_begin(tokens: Sequence[int], payload: bytes, hop: Hop = WHOLE, /, **changes: int) -> bytes:
    """Body of a good LOAD_BEGIN, then changed."""
    values = {
        "model_id": card().model_id,
        "session_id": 1,
        "request_id": ID,
        "token_hash": token_hash(tokens),
        "token_count": len(tokens),
        "layer_start": hop.start,
        "layer_end": hop.end,
        "payload_bytes": len(payload),
        "status": 0,
        "token_bytes": 4 * len(tokens),
        "message_bytes": 0,
    }
    return _record(values | changes, tokens, b"")


def chunk(data: bytes, request_id: int = ID, n_bytes: int | None = None) -> bytes:
    """Body of a CHUNK (docs/spec/wire-protocol.md#snapshot-chunk)."""
    return struct.pack(">QI", request_id, len(data) if n_bytes is None else n_bytes) + data


class Done(NamedTuple):
    """DONE (docs/spec/wire-protocol.md#snapshot-done)."""

    request_id: int
    status: int
    message: bytes


def read_done(body: bytes) -> Done:
    request_id, status, size = struct.unpack_from(">QII", body)
    assert len(body) == 16 + size
    return Done(request_id, status, body[16:])


def done(request_id: int, status: int = 0, message: bytes = b"", size: int | None = None) -> bytes:
    """Body of a DONE."""
    return struct.pack(">QII", request_id, status, len(message) if size is None else size) + message


def cut(payload: bytes, size: int) -> list[bytes]:
    return [payload[at : at + size] for at in range(0, len(payload), size)]


def transfer(payload: bytes, request_id: int, size: int = MOST) -> bytes:
    """The CHUNK frames of a payload."""
    return b"".join(frame(CHUNK, chunk(part, request_id)) for part in cut(payload, size))


def pull(peer: Peer, request: bytes) -> tuple[Record, list[bytes]]:
    """Save; return BEGIN and what stood in each CHUNK."""
    peer.send(SAVE_REQ, request)
    got = read_record(peer.expect(BEGIN))
    assert got.status == 0, got.message
    parts, missing = [], got.payload_bytes
    while missing:
        body = peer.expect(CHUNK)
        request_id, size = struct.unpack_from(">QI", body)
        assert (request_id, size) == (got.request_id, len(body) - 12)
        assert size <= MOST
        parts.append(body[12:])
        missing -= size
    assert missing == 0
    assert read_done(peer.expect(DONE)) == Done(got.request_id, 0, b"")
    return got, parts


def push(peer: Peer, request: bytes, *parts: bytes) -> Done:
    """Load; return DONE."""
    request_id = struct.unpack_from(">Q", request, 12)[0]
    peer.send(LOAD_BEGIN, request)
    for part in parts:
        peer.send(CHUNK, chunk(part, request_id))
    return read_done(peer.expect(DONE))


@dataclass(frozen=True)
class Layout:
    """What the size of a shard depends on (docs/spec/wire-protocol.md#dsvl).

    Args:
        form: Of the model's caches.
        hop: The layers.
        n_tokens: Evaluated tokens.
    """

    form: CacheForm
    hop: Hop
    n_tokens: int

    @property
    def ratios(self) -> tuple[int, ...]:
        """Of the layers."""
        return self.form.ratios[self.hop.start : self.hop.end + 1]

    @property
    def raw_live(self) -> int:
        """Raw rows of a layer."""
        return min(self.n_tokens, self.form.window, N_CTX)

    @property
    def header(self) -> dict[str, int]:
        """The fourteen words of a worker with the context of these tests."""
        return {
            "magic": int.from_bytes(b"DSVL", "little"),
            "version": 1,
            "ctx": N_CTX,
            "prefill_cap": N_CTX,
            "raw_cap": N_CTX,
            "raw_window": min(self.form.window, N_CTX),
            "comp_cap": N_CTX // 4 + 2,
            "token_count": self.n_tokens,
            "n_layers": len(self.form.ratios),
            "head_dim": self.form.width,
            "indexer_head_dim": self.form.index_width,
            "layer_start": self.hop.start,
            "layer_end": self.hop.end,
            "raw_live": self.raw_live,
        }

    @property
    def counts(self) -> tuple[list[int], list[int]]:
        """Compressed rows and index rows of each layer."""
        compressed = [self.n_tokens // ratio if ratio else 0 for ratio in self.ratios]
        indexed = [self.n_tokens // 4 if ratio == 4 else 0 for ratio in self.ratios]
        return compressed, indexed

    def n_values(self, ratio: int) -> int:
        """Values of all tensors of one layer."""
        n = self.raw_live * self.form.width
        copies = 2 if ratio == 4 else 1
        if ratio:
            n += self.n_tokens // ratio * self.form.width
            n += 2 * copies * copies * ratio * self.form.width
        if ratio == 4:
            n += self.n_tokens // 4 * self.form.index_width
            n += 2 * copies * copies * ratio * self.form.index_width
        return n

    @property
    def n_bytes(self) -> int:
        """Of a shard."""
        return 56 + 8 * len(self.ratios) + 4 * sum(map(self.n_values, self.ratios))

    def shard(self, seed: int = 0, **changes: int) -> bytes:
        """A whole shard of arbitrary values; `changes` are words of the header."""
        head = struct.pack("<14I", *(self.header | changes).values())
        head += np.array(self.counts, "<u4").tobytes()
        n = (self.n_bytes - len(head)) // 4
        return head + np.random.default_rng(seed).normal(size=n).astype("<f4").tobytes()


def whole_session(
    layout: Layout, tokens: Sequence[int], logits: bytes, tensors: bytes, **changes: int
) -> bytes:
    """A DSV4 payload (docs/spec/wire-protocol.md#dsv4); `layout` is that of all layers."""
    words = layout.header | {"magic": int.from_bytes(b"DSV4", "little"), "version": 2}
    del words["layer_start"], words["layer_end"], words["raw_live"]
    words |= {"vocab": N_VOCAB, "raw_live": layout.raw_live} | changes
    head = struct.pack("<13I", *words.values())
    ids = struct.pack(f"<{len(tokens)}I", *tokens)
    return head + ids + logits + np.array(layout.counts, "<u4").tobytes() + tensors


def model(form: CacheForm) -> ModelCard:
    """The small model with other caches."""
    return replace(card(), hidden_width=form.width, cache_form=form)


@functools.cache
def saved(*tokens: int) -> bytes:
    """The shard of a worker of all layers after some tokens."""
    with driving() as peer:
        peer.check(work(WHOLE, tokens))
        return b"".join(pull(peer, save_req(tokens))[1])


def goes_on(peer: Peer, after: Sequence[int], token: int = 7) -> None:
    """One more token must get the logits of one process."""
    logits = np.frombuffer(peer.check(work(WHOLE, [token], after)).payload, "<f4")
    np.testing.assert_array_equal(logits, reference_logits([*after, token]))


# --- a coordinator that saves over hops whose data ports are answered by hand ---------------------


class Saving:
    """A session of two hops, evaluated; their data ports in order; the control connection."""

    def __init__(self, form: CacheForm, session: Session, doors: Sequence[Door], control: Peer):
        self.session = session
        self.doors = doors
        self.control = control
        self.layouts = [Layout(form, hop, len(TOKENS)) for hop in HOPS]

    @functools.cached_property
    def shards(self) -> list[bytes]:
        """What the hops hold."""
        return [layout.shard(seed) for seed, layout in enumerate(self.layouts)]

    def evaluate(self, call: Callable[[], object]) -> None:
        """Answer a call that takes one span."""
        running = Background(call)
        self.control.send(RESULT, result(self.control.asked()))
        running.result()

    def saves(self, shards: Sequence[bytes]) -> bytes:
        """Save; the hops say these shards."""
        running = Background(self.session.save)
        for entrance, shard in zip(self.doors, shards, strict=True):
            hop = entrance.accept()
            hop.say(reply(hop.expect(SAVE_REQ), shard))
            assert hop.ended()
        return b"".join(running.result())

    def goes_on(self) -> None:
        """The route and the session do not know that an operation failed."""
        self.evaluate(lambda: self.session.eval(7))


def id_of(request: bytes) -> int:
    """The request id of a SAVE_REQ or LOAD_BEGIN."""
    return struct.unpack_from(">Q", request, 12)[0]


def reply(request: bytes, payload: bytes, *parts: bytes, **changes: int) -> bytes:
    """All frames of a good reply to a SAVE_REQ; `changes` as in `begin`."""
    chunks = [frame(CHUNK, chunk(part, id_of(request))) for part in parts or cut(payload, MOST)]
    head = frame(BEGIN, begin(request, payload, **changes))
    return head + b"".join(chunks) + frame(DONE, done(id_of(request)))


@contextmanager
def two_hops(form: CacheForm = FAKE) -> Iterator[Saving]:
    with ExitStack() as stack:
        c = stack.enter_context(coordinator_of(model(form)))
        doors = [stack.enter_context(door()) for _ in HOPS]
        peers = [
            stack.enter_context(
                enlisted(
                    c,
                    layer_start=hop.start,
                    layer_end=hop.end,
                    has_output=hop.output,
                    listen_port=entrance.address.port,
                )
            )
            for hop, entrance in zip(HOPS, doors, strict=True)
        ]
        scene = Saving(form, stack.enter_context(c.backend.lease(TOKENS)), doors, peers[0])
        scene.evaluate(lambda: scene.session.sync(TOKENS))
        yield scene
        assert len(workers(c)) == 2
