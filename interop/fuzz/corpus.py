"""Honest bytes to begin with: recorded conversations of C programs, and generated ones.

Owns: reading the recordings, one honest example of everything that ds4py can say. Refuses to know:
damage, sockets. Invariant: everything here is the same in every process.

Generated talks are about the fake model of the tests (six layers, eight values a row), so that they
are small; recorded ones about ds4's tiny model, which `RECORDED_MODEL` describes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final, Literal

import numpy as np

from ds4py.contracts import CacheForm, ModelCard
from ds4py.layer_range import LayerRange, whole_model
from ds4py.snapshot import (
    KV_KINDS,
    CacheSizes,
    Capacities,
    PlainLayer,
    PlainShard,
    PlainSizes,
    SessionState,
    Shard,
    split,
    write_dsv4,
    write_dsvl,
    write_shard,
    write_whole,
)
from ds4py.snapshot.kvc import ABI_DS4, ABI_OWN, Flag, KvcHeader, Reason, crc_of, write_trailer
from ds4py.snapshot.kvc_policy import CacheIdentity
from ds4py.wire.extensions import Alive, Cancel, Drop, Fork, HopLost, PeerHello, encode_peer_hello
from ds4py.wire.frames import Buffer
from ds4py.wire.messages import (
    ErrorText,
    LoadBegin,
    Result,
    ResultKind,
    SaveRequest,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotDone,
    Telemetry,
    WireMessage,
    Work,
    WorkFlags,
    encode,
    error_result,
)
from ds4py.wire.prefix_hash import prefix_hash
from ds4py.wire.route import HopEntry
from interop.fuzz.damage import Talk, cut_frames
from tests.support import golden
from tests.support.clusters import span
from tests.support.fake_runner import N_VOCAB, WIDTH, card
from tests.support.peers import N_CTX, entry, hello, make_work

N_LAYERS: Final = 6
PROMPT: Final = (5, 80, 3, 41, 9)
TAIL: Final = span("2-5")
"""Layers of the worker that the generated talks address."""

REQUEST: Final = 0xF0_52_45_51_55_45_53_54
HASH: Final = 0xF1_54_4F_4B_45_4E_48_53
SESSION: Final = 0xF2_53_45_53_53_49_4F_4E
"""Stand for the request id, the token hash and the session id that only the asked peer learns."""

RECORDED_MODEL: Final = ModelCard(
    model_id=2,
    name="DeepSeek V4 Tiny",
    architecture="deepseek4",
    n_layers=N_LAYERS,
    n_vocab=768,
    hidden_width=1024,
    n_ctx_train=512,
    quant_bits=2,
    cache_form=CacheForm(ratios=(0,) * N_LAYERS, width=1024, index_width=0, window=512),
)
RECORDED_SPAN: Final = LayerRange(2, 3)
RECORDED_CTX: Final = 512

Direction = Literal["to worker", "from worker"]

_STREAM: Final = re.compile(r"wire/\w+\.(ctl|data)[AB]-\d+\.(c2s|s2c)\.bin")


def talk_of(*messages: Iterable[Buffer]) -> Talk:
    """Return encoded messages as frames."""
    return cut_frames(b"".join(bytes(piece) for pieces in messages for piece in pieces))


def said(*messages: WireMessage) -> Talk:
    """Return messages of the stock protocol as frames."""
    return talk_of(*(encode(message) for message in messages))


# --- recorded --------------------------------------------------------------------------------


@cache
def recorded(direction: Direction) -> Sequence[Talk]:
    """Return what recorded programs said, one talk a connection, and single bad requests."""
    talks = [
        cut_frames(golden.load_bytes(name))
        for name in sorted(golden.manifest())
        if (match := _STREAM.fullmatch(name)) and _direction(match) == direction
    ]
    target = "worker" if direction == "to worker" else "coordinator"
    cases = golden.load_json("wire/errors.json")["cases"]
    requests = [_sent(case) for case in cases if case["target"].startswith(target)]
    return [talk for talk in (*talks, *map(cut_frames, requests)) if talk]


def recorded_work() -> bytes:
    """Return a recorded span that needs no next hop and empties its session first."""
    cases = golden.load_json("wire/errors.json")["cases"]
    return _sent(next(case for case in cases if case["name"] == "work_ok_hidden_result"))


def _direction(stream: re.Match[str]) -> Direction:
    dialled_by_worker = stream[1] == "ctl"
    return "from worker" if dialled_by_worker == (stream[2] == "c2s") else "to worker"


def _sent(case: dict[str, Any]) -> bytes:
    if case["sent_hex"] is not None:
        return bytes.fromhex(case["sent_hex"])
    return b"".join(
        bytes.fromhex(part["hex"]) if "hex" in part else bytes(part["zeros"])
        for part in case["sent_parts"]
    )


# --- generated -------------------------------------------------------------------------------


@cache
def to_worker() -> Sequence[Talk]:
    """Return what a driver may say to a worker of `TAIL`."""
    notices = (Alive(), Cancel(1, 2), Drop(7), HopLost("127.0.0.1", 9), _fork())
    greeting = encode_peer_hello(peer_hello("coordinator"))
    return [
        *(_prompt((entry(TAIL),), bits=bits) for bits in (0, 32, 16, 8)),
        _prompt((entry(span("2-3")), entry(span("4-5"))), bits=16),
        said(_work((), PROMPT, 1), _save_request(), _work(PROMPT, (7,), 2)),
        said(*_load(), _work(PROMPT, (7,), 2)),
        talk_of(greeting, *(notice.encode() for notice in notices)),
        talk_of(greeting, encode(_work((), PROMPT, 1)), Cancel(1, 9).encode(), Drop(1).encode()),
        talk_of(greeting, *_forked()),
        said(ErrorText.of("we part")),
    ]


@cache
def introductions() -> Sequence[Talk]:
    """Return what a caller may say at a coordinator's door, and what may follow."""
    plain, extended = hello(whole_model(N_LAYERS)), peer_hello("worker")
    return [
        said(plain),
        talk_of(encode_peer_hello(extended)),
        said(hello(TAIL), Result(request_id=1)),
        talk_of(encode_peer_hello(extended), Alive().encode(), encode(error_result(1, "no"))),
        said(plain, ErrorText.of("good-bye")),
    ]


@cache
def answers() -> Sequence[Talk]:
    """Return what a worker of all layers may answer to a span; see `answering`."""
    logits, rows = np.arange(N_VOCAB, dtype="<f4"), np.ones((len(PROMPT), WIDTH), "<f4")
    return [
        said(_result(ResultKind.LOGITS, logits.tobytes())),
        said(_result(ResultKind.HIDDEN_STATE, rows.tobytes())),
        said(_result(ResultKind.HIDDEN_STATE, bytes(rows.size), bits=8)),
        said(_result(ResultKind.ACK, b"", bits=0)),
        said(error_result(REQUEST, "no room")),
        said(_result(ResultKind.LOGITS, logits.tobytes()), error_result(3, "")),
        said(ErrorText.of("we part")),
    ]


@cache
def transfers() -> Sequence[Talk]:
    """Return what a worker of all layers may answer when its session is saved or loaded."""
    payload = b"".join(write_dsvl(_shard(whole_model(N_LAYERS))))
    begin = SnapshotBegin(
        model_id=card().model_id,
        session_id=SESSION,
        request_id=REQUEST,
        token_hash=HASH,
        layer_start=0,
        layer_end=N_LAYERS - 1,
        payload_bytes=len(payload),
    )
    chunks = [payload[:100], payload[100:]]
    arriving = [SnapshotChunk(REQUEST, memoryview(part)) for part in chunks]
    done = SnapshotDone(REQUEST)
    return [
        said(begin, *arriving, done),
        said(done),
        said(SnapshotDone(REQUEST, 1, b"no room")),
    ]


def peer_hello(role: Literal["coordinator", "worker"]) -> PeerHello:
    """Return an extension hello of the fake model that leaves no field at its default."""
    identity, layers = card(), whole_model(N_LAYERS)
    return PeerHello(
        role=role,
        version="1.2.3",
        build="0badf00d",
        features=("rewind", "cancel", "drop", "hop-lost", "fork", "of-the-future"),
        model_id=identity.model_id,
        model_name=identity.name,
        n_layers=N_LAYERS,
        quant_bits=identity.quant_bits,
        ctx_size=N_CTX,
        layer_start=layers.start,
        layer_end=layers.end,
        has_output=True,
        listen_port=7000,
        weight_bytes=1 << 40,
        alive_timeout=10.0,
        fingerprint="f" * 64,
        nonce="n" * 32,
    )


def answering(data: bytes, *, request_id: int, token_hash: int, session_id: int) -> bytes:
    """Return an answer that names the request it is for, as far as damage has left it."""
    told = {REQUEST: request_id, HASH: token_hash, SESSION: session_id}
    for stand_in, value in told.items():
        data = data.replace(stand_in.to_bytes(8), value.to_bytes(8))
    return data


def _prompt(hops: Sequence[HopEntry], *, bits: int) -> Talk:
    """A prompt in two chunks, then a token."""
    chunk, rest = PROMPT[:3], PROMPT[3:]
    width = bits or 32
    works = (
        make_work(hops, (), chunk, request_id=1, bits=width, extra_flags=WorkFlags.ACK_ONLY),
        make_work(hops, chunk, rest, request_id=2, bits=width, input_hc_bits=bits),
        make_work(hops, PROMPT, (7,), request_id=(1 << 64) - 1, bits=width),
    )
    return said(*works)


def _work(before: Sequence[int], tokens: Sequence[int], request_id: int) -> Work:
    return make_work((entry(TAIL),), before, tokens, request_id=request_id)


def _fork() -> Fork:
    return Fork(1, 2, len(PROMPT), prefix_hash(PROMPT))


def _forked() -> Iterator[Iterable[Buffer]]:
    """A prompt, and another session that goes on with a copy of it."""
    yield encode(_work((), PROMPT, 1))
    yield _fork().encode()
    yield encode(replace(_work(PROMPT, (7,), 2), session_id=2))


def _save_request() -> SaveRequest:
    return SaveRequest(
        model_id=card().model_id,
        session_id=1,
        request_id=1 << 63,
        token_hash=prefix_hash(PROMPT),
        token_count=len(PROMPT),
        layer_start=TAIL.start,
        layer_end=TAIL.end,
    )


def _load() -> Iterator[LoadBegin | SnapshotChunk]:
    payload = b"".join(write_dsvl(_shard(TAIL)))
    yield LoadBegin(
        model_id=card().model_id,
        session_id=1,
        request_id=1 << 63,
        token_hash=prefix_hash(PROMPT),
        layer_start=TAIL.start,
        layer_end=TAIL.end,
        payload_bytes=len(payload),
        tokens=PROMPT,
    )
    for part in (payload[:100], payload[100:]):
        yield SnapshotChunk(1 << 63, memoryview(part))


def _result(kind: ResultKind, payload: bytes, *, bits: int = 32) -> Result:
    record = Telemetry(
        layer_start=0,
        layer_end=N_LAYERS - 1,
        route_index=0,
        pos0=0,
        n_tokens=len(PROMPT),
        eval_usec=1000,
        input_bytes=0,
        output_bytes=len(payload),
    )
    return Result(
        request_id=REQUEST,
        result_hash=HASH,
        result_kind=kind,
        telemetry=(record,),
        payload=memoryview(payload),
        payload_bits=bits,
    )


# --- saved sessions --------------------------------------------------------------------------

SIZES: Final = CacheSizes(ratios=(0, 4), width=3, index_width=2, window=8, n_vocab=11)
"""A model whose payloads have every kind of part and are small."""

SIZES_CTX: Final = 40


def payload_whole() -> bytes:
    """Return a `DSV4` payload of `SIZES`."""
    tokens = np.arange(13, dtype=np.uint32) % SIZES.n_vocab
    whole = SessionState(
        tokens=tokens,
        logits=np.linspace(-1, 1, SIZES.n_vocab, dtype=np.float32),
        cache=shard_of(SIZES, LayerRange(0, 1), SIZES_CTX, len(tokens)),
    )
    return b"".join(write_dsv4(whole))


def payload_part() -> bytes:
    """Return a `DSVL` payload of layer 1 of `SIZES`."""
    return b"".join(write_dsvl(shard_of(SIZES, LayerRange(1, 1), SIZES_CTX, 13)))


def payload_session() -> bytes:
    """Return a `DSV4` payload of the fake model."""
    whole = SessionState(
        tokens=np.array(PROMPT, np.uint32),
        logits=np.zeros(N_VOCAB, np.float32),
        cache=_shard(whole_model(N_LAYERS)),
    )
    return b"".join(write_dsv4(whole))


def shard_of(sizes: CacheSizes, layers: LayerRange, n_ctx: int, n_tokens: int) -> Shard:
    """Return a cache whose values say nothing."""
    return Shard(
        sizes=sizes,
        layer_range=layers,
        capacities=Capacities.of(n_ctx, sizes.window),
        n_tokens=n_tokens,
        layers=[
            [np.full(shape, 0.5, np.float32) for shape in sizes.shapes(layer, n_tokens)]
            for layer in layers.indices
        ],
    )


PLAIN: Final = PlainSizes(model_id=0x80001234, n_layers=4, n_heads=2, width=8, n_vocab=11)
"""A model with plain keys and values, whose layers are of every type in `plain_whole`."""

PLAIN_PART: Final = LayerRange(2, 3)


def plain_whole() -> bytes:
    """Return a `DPKV` payload of `PLAIN`."""
    return b"".join(write_whole(_plain(tuple(KV_KINDS))))


def plain_part() -> bytes:
    """Return a `DPKL` payload of `PLAIN_PART`, as a single stage holds it."""
    return b"".join(write_shard(split(_plain(("q8_0",) * PLAIN.n_layers), PLAIN_PART)))


def _plain(kinds: Sequence[str]) -> SessionState[PlainShard]:
    tokens = np.arange(5, dtype=np.uint32)
    layers = [
        PlainLayer(KV_KINDS[kind], [np.ones(shape, dtype) for dtype, shape in arrays])
        for kind in kinds
        for arrays in [PLAIN.arrays(KV_KINDS[kind], len(tokens))]
    ]
    return SessionState(
        tokens=tokens,
        logits=np.linspace(-1, 1, PLAIN.n_vocab, dtype=np.float32),
        cache=PlainShard(
            sizes=PLAIN,
            layer_range=whole_model(PLAIN.n_layers),
            n_tokens=len(tokens),
            layers=layers,
        ),
    )


# --- files of the disk cache -----------------------------------------------------------------

KEY: Final = "You are kind.\nUser: hi — tell me of the sea".encode()
"""The text of all the files."""

TOOLS: Final = {b"call_1": b"<tool_call>\xff</tool_call>", "tööl".encode(): b""}

OWNERS: Final = {
    abi: CacheIdentity(
        model_id=model_id,
        quant_bits=2,
        abi=abi,
        n_ctx=64,
        model="m" * 32,
        tokenizer="bpe",
    )
    for abi, model_id in ((ABI_DS4, 1), (ABI_OWN, 0x8000FA4E))
}
"""Who may load the files, by their payload's kind."""


@cache
def cache_files() -> Sequence[bytes]:
    """Return files of ours and of ds4's, with tool calls and without."""
    kinds = ((ABI_OWN, True), (ABI_DS4, True), (ABI_DS4, False))
    return [_kvc(abi, tools, sealed=sealed) for abi, sealed in kinds for tools in (TOOLS, {})]


def _kvc(abi: int, tools: dict[bytes, bytes], *, sealed: bool) -> bytes:
    owner, payload = OWNERS[abi], bytes(range(100))
    header = KvcHeader(
        n_tokens=13,
        ctx=40,
        payload_bytes=len(payload),
        key_bytes=len(KEY),
        created=1_780_000_000,
        last_used=1_780_000_001,
        hits=2,
        reason=Reason.COLD,
        flags=Flag.TOOL_MAP if tools else Flag.NONE,
        quant_bits=owner.quant_bits,
        model_id=owner.model_byte,
        abi=abi,
    ).encode()
    seal = owner.seal(crc_of([KEY, payload])) if sealed else None
    return b"".join([header, KEY, payload, write_trailer(header, tools, seal)])


def _shard(layers: LayerRange) -> Shard:
    form = card().saved_form()
    sizes = CacheSizes(
        ratios=form.ratios,
        width=form.width,
        index_width=form.index_width,
        window=form.window,
        n_vocab=N_VOCAB,
    )
    return shard_of(sizes, layers, N_CTX, len(PROMPT))
