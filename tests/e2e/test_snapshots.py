"""A saved session goes on anywhere, to the last bit; and as the recorded ds4 processes saved it."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4py.activations import F32
from ds4py.config import CoordinatorConfig, EngineConfig, KvType, WorkerConfig
from ds4py.contracts import SessionId
from ds4py.coordinator.relay.coordinator import Coordinator
from ds4py.coordinator.session import ClusterSession
from ds4py.engine import open_runner
from ds4py.engine.open import read_model
from ds4py.errors import RemoteWorkError, SnapshotError, TransportError
from ds4py.layer_range import LayerRange, LayerSpec
from ds4py.snapshot import CacheSizes, Shard, read_dsvl
from ds4py.snapshot.layout import EMPTY_SCORE, SCORES
from ds4py.transport.sockets import connect
from ds4py.wire.frames import FrameType, encode_frame
from ds4py.worker.worker import Worker
from tests.e2e.cuts import coordinator_of
from tests.e2e.support import ANY_PORT, SOCKETS, engine, route
from tests.support import golden
from tests.support.processes import Launcher, wait_for
from tests.support.sockets import Background, read_exactly
from tests.support.toys import toy_llama

MODEL = golden.path("tiny-a.gguf")
N_CTX = 256
THREE = ["0-1", "2-3", "4:output"]
NEXT = (7, 300, 12, 9, 9, 761)


def model() -> EngineConfig:
    return engine(MODEL, n_slots=2, n_ctx=N_CTX)


def new_session(coordinator: Coordinator) -> ClusterSession:
    return ClusterSession(SessionId(77), coordinator, coordinator.config)


def go_on(session: ClusterSession) -> list[F32]:
    return [session.eval(token).copy() for token in NEXT]


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    """130 tokens: past the window, with compressed rows of both kinds and open windows."""
    ids: list[int] = golden.load_json("prompts.json")["prompts"]["len130"]["ids"]
    return ids


@pytest.fixture(scope="module")
def saved(prompt: list[int], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[F32]]:
    """A session that three stages saved after a prompt and a token, and what they said next."""
    path = tmp_path_factory.mktemp("sessions") / "chat.dsv4"
    with coordinator_of(model(), None, THREE) as cluster:
        session = new_session(cluster)
        session.sync(prompt)
        session.eval(4)
        path.write_bytes(b"".join(session.save()))
        return path, go_on(session)


@pytest.mark.parametrize(
    ("local", "cuts"),
    [
        pytest.param("0:output", [], id="one process"),
        pytest.param(None, ["0:output"], id="one worker"),
        pytest.param("0-2", ["3:output"], id="two processes"),
        pytest.param("0-0", ["1-4", "5:output"], id="three others"),
    ],
)
def test_a_session_of_three_stages_goes_on_in_any_other_split(
    local: str | None, cuts: list[str], prompt: list[int], saved: tuple[Path, list[F32]]
) -> None:
    path, expected = saved
    payload = memoryview(path.read_bytes())
    with coordinator_of(model(), local, cuts) as cluster:
        session = new_session(cluster)
        session.load(payload)
        assert session.sync([*prompt, 4]).n_cached == len(prompt) + 1
        assert b"".join(session.save()) == payload
        for got, want in zip(go_on(session), expected, strict=True):
            np.testing.assert_array_equal(got, want)
        session.sync([5, 6])  # so that nothing can be reused
        session.sync(prompt)
        session.eval(4)
        assert b"".join(session.save()) == payload, "evaluated here, the bytes are the same"


# --- plain keys and values ------------------------------------------------------------------------

LLAMA_PROMPT = [3 + (7 * k * k + k) % 250 for k in range(40)]


def llama(path: Path, kv_type: KvType) -> EngineConfig:
    return replace(engine(path, n_slots=2, n_ctx=64), kv_type=kv_type)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_llama(
        tmp_path_factory.mktemp("toy") / "toy.gguf", n_vocab=768, n_ctx=64, quant="Q8_0"
    )


@pytest.mark.parametrize("kv_type", ["f32", "bf16", "f16", "q8_0"])
def test_a_llama_goes_on_in_any_other_split(toy: Path, kv_type: KvType) -> None:
    """Saved by a coordinator with layers and two workers; never read but to be loaded."""
    model = llama(toy, kv_type)
    with coordinator_of(model, "0-0", ["1-2", "3:output"]) as cluster:
        session = new_session(cluster)
        session.sync(LLAMA_PROMPT)
        session.eval(4)
        payload = b"".join(session.save())
        expected = go_on(session)
    for local, cuts in (("0:output", []), (None, ["0-1", "2:output"])):
        with coordinator_of(model, local, cuts) as cluster:
            session = new_session(cluster)
            session.load(payload)
            loaded = session.sync([*LLAMA_PROMPT, 4])
            assert loaded.n_cached == len(LLAMA_PROMPT) + 1
            assert b"".join(session.save()) == payload
            for got, want in zip(go_on(session), expected, strict=True):
                np.testing.assert_array_equal(got, want)
            back = session.sync([*LLAMA_PROMPT[:20], 5])
            assert back.n_cached == 20, "all rows are there: it can be cut back anywhere"


@pytest.mark.parametrize(
    ("local", "cuts"), [("0:output", []), (None, ["0-1", "2:output"])], ids=["alone", "workers"]
)
def test_a_llama_with_another_type_of_keys_and_values_says_how_to_start(
    toy: Path, local: str | None, cuts: list[str]
) -> None:
    with coordinator_of(llama(toy, "f16"), None, ["0:output"]) as cluster:
        session = new_session(cluster)
        session.sync(LLAMA_PROMPT)
        payload = b"".join(session.save())
    with coordinator_of(llama(toy, "bf16"), local, cuts) as cluster:
        session = new_session(cluster)
        expected = session.sync(LLAMA_PROMPT).logits.copy()
        with pytest.raises(
            (SnapshotError, RemoteWorkError), match=r"f16 keys .* expected bf16; start with"
        ):
            session.load(payload)
        assert session.tokens == ()
        np.testing.assert_array_equal(session.sync(LLAMA_PROMPT).logits, expected)


def test_a_damaged_llama_is_refused_and_the_session_goes_on(toy: Path, tmp_path: Path) -> None:
    other = toy_llama(tmp_path / "toy.gguf", n_vocab=768, n_ctx=64, n_ff=64)
    with coordinator_of(llama(toy, "auto"), "0-1", ["2:output"]) as cluster:
        session = new_session(cluster)
        session.sync(LLAMA_PROMPT)
        payload = b"".join(session.save())
        for broken in (payload[:-1], payload[:60], b"", payload + b"x", b"DSV4" + payload[4:]):
            with pytest.raises(SnapshotError, match="DPKV payload: "):
                session.load(broken)
        assert session.sync(LLAMA_PROMPT).n_cached == len(LLAMA_PROMPT)
    with (
        coordinator_of(llama(other, "auto"), "0:output", []) as cluster,
        pytest.raises(SnapshotError, match=r"model id is \d+, expected \d+; load it with"),
    ):
        new_session(cluster).load(payload)
    short = replace(llama(toy, "auto"), n_ctx=len(LLAMA_PROMPT))
    with (
        coordinator_of(short, "0:output", []) as cluster,
        pytest.raises(SnapshotError, match="start with a context of at least 41 tokens"),
    ):
        new_session(cluster).load(payload)


# --- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["save", "load"])
def test_a_worker_killed_in_the_middle_costs_the_operation_only(
    operation: str, prompt: list[int], saved: tuple[Path, list[F32]], tmp_path: Path
) -> None:
    payload = memoryview(saved[0].read_bytes())
    card, n_ctx = read_model(model())
    options = ("-m", MODEL, "-c", N_CTX, "--precision", "f32", "--dist-layers", "3:output")
    with Launcher(tmp_path) as launch:
        listen = ("--dist-role", "worker", "--dist-listen")
        worker = launch.worker(*listen, "127.0.0.1:0", *options)
        local = open_runner(model(), LayerSpec.parse("0-2"), want_head=True)
        config = CoordinatorConfig(route=route(worker), result_timeout=60, rejoin_timeout=60)
        cluster = Coordinator(card, n_ctx, config, SOCKETS, local=local)
        try:
            cluster.start()
            wait_for(lambda: cluster.health().ready, "the route is complete")
            session = new_session(cluster)
            session.sync([*prompt, 4])
            worker.program.pause()
            attempt = Background(
                session.save if operation == "save" else lambda: session.load(payload)
            )
            worker.program.kill()
            with pytest.raises(TransportError):
                attempt.result()
            launch.worker(*listen, worker.address, *options)
            session.sync([*prompt, 4, 5])
            assert read_tokens(session.save()) == [*prompt, 4, 5]
        finally:
            cluster.close()


def read_tokens(pieces: Sequence[memoryview]) -> list[int]:
    """The token ids of a saved session: behind 13 words, as many as the eighth says."""
    words = np.frombuffer(b"".join(pieces)[: 4 * (13 + N_CTX)], "<u4")
    return words[13 : 13 + words[7]].tolist()


# --- the recorded processes -----------------------------------------------------------------------

RECORDED = golden.load_json("wire/snapshot.json")
RECORDED_CTX = 512
SIZES = CacheSizes(
    ratios=(0, 0, 4, 128, 4, 128), width=160, index_width=128, window=16, n_vocab=768
)
N_SAVED = 44
RAW_CAP = 4
"""Word of a header: the recorded processes computed on the CPU, where it is the window."""


def stream(connection: str, way: str) -> tuple[bytes, list[dict[str, Any]]]:
    """The bytes of one direction of a recorded connection, and its frames."""
    entry = next(c for c in RECORDED["connections"] if c["name"] == connection)[way]
    return golden.load_bytes(f"wire/{entry['file']}"), entry["frames"]


@contextmanager
def recorded_worker(layers: str, *, raw_cap: int | None = None) -> Iterator[Worker]:
    """Ours in the place of a recorded worker."""
    config = EngineConfig(
        model=MODEL, device="cpu", precision="f32", n_ctx=RECORDED_CTX, threads=1, raw_cap=raw_cap
    )
    span = LayerSpec.parse(layers)
    worker = Worker(open_runner(config, span), WorkerConfig(layers=span, listen=ANY_PORT), SOCKETS)
    worker.start()
    try:
        yield worker
    finally:
        worker.close()


@contextmanager
def talking(worker: Worker) -> Iterator[socket.socket]:
    with connect(worker.address, SOCKETS) as sock:
        sock.settimeout(20)
        yield sock


def work_up_to(sock: socket.socket, connection: str, n_frames: int) -> bytes:
    """Replay the first spans of a recorded connection; what came back."""
    sent, frames = stream(connection, "c2s")
    end = frames[n_frames]["offset"] if n_frames < len(frames) else len(sent)
    _, replies = stream(connection, "s2c")
    sock.sendall(sent[:end])
    return read_exactly(sock, sum(12 + frame["body_bytes"] for frame in replies[:n_frames]))


def test_a_recorded_save_request_is_served_with_the_recorded_shard() -> None:
    """Evaluated from the recorded hidden states; for rounding see test_session_payloads."""
    asked, _ = stream("dataB-1", "c2s")
    expected, (begin, chunk, done) = stream("dataB-1", "s2c")
    for raw_cap in (SIZES.window, None):
        with recorded_worker("4:output", raw_cap=raw_cap) as worker, talking(worker) as sock:
            work_up_to(sock, "dataB-0", 7)
            with talking(worker) as saver:
                saver.sendall(asked)
                got = read_exactly(saver, len(expected))
        start, end = chunk["payload_offset"], done["offset"]
        assert got[:start] == expected[:start]
        assert got[end:] == expected[end:]
        ours, theirs = got[start:end], expected[start:end]
        words = [np.frombuffer(raw[:56], "<u4").tolist() for raw in (ours, theirs)]
        if raw_cap is None:  # the rule of GPU nodes: all of so short a context
            assert (words[0][RAW_CAP], words[1][RAW_CAP]) == (RECORDED_CTX, SIZES.window)
            words[0][RAW_CAP] = words[1][RAW_CAP]
        assert words[0] == words[1]
        compare(shard(ours), shard(theirs))
    assert begin["payload_bytes"] == f"0x{len(theirs):016x}"


def shard(raw: bytes) -> Shard:
    return read_dsvl(raw, SIZES, LayerRange(4, 5), n_ctx=RECORDED_CTX, n_tokens=N_SAVED)


def compare(got: Shard, expected: Shard) -> None:
    """All tensors are near; slots that nothing reads any more are empty here and stale there."""
    for mine, theirs in zip(got.layers, expected.layers, strict=True):
        for place, tensor in enumerate(mine):
            full = np.ones(len(tensor), bool)
            for scores in SCORES:
                if place in (scores - 1, scores):
                    full = (mine[scores] != np.float32(EMPTY_SCORE)).any(axis=1)
            if full.any():
                error = np.square(tensor[full] - theirs[place][full]).mean()
                assert error < 0.01 * np.square(theirs[place][full]).mean(), place


def test_a_recorded_load_is_taken_and_the_recorded_spans_go_on() -> None:
    asked, _ = stream("dataB-2", "c2s")
    expected, _ = stream("dataB-2", "s2c")
    with recorded_worker("4:output") as worker:
        with talking(worker) as sock:
            sock.sendall(asked)
            assert read_exactly(sock, len(expected)) == expected
        with talking(worker) as sock:
            got = work_up_to(sock, "dataB-3", 4)
    recorded, frames = stream("dataB-3", "s2c")
    chosen = [240, *RECORDED["results"]["after_load"]]
    for frame, following in zip(frames, [*chosen[2:], None], strict=True):
        at = slice(frame["payload_offset"], frame["offset"] + 12 + frame["body_bytes"])
        ours, theirs = (np.frombuffer(raw[at], "<f4") for raw in (got, recorded))
        assert got[frame["offset"] :][:12] == recorded[frame["offset"] :][:12]
        assert np.sqrt(np.square(ours - theirs).mean()) < 0.03 * theirs.std()
        assert following in (None, int(ours.argmax()))


def test_a_recorded_load_of_middle_layers_is_taken_and_saved_again() -> None:
    asked, (begin, chunk) = stream("dataA-1", "c2s")
    expected, _ = stream("dataA-1", "s2c")
    request = b"".join(
        (
            (2).to_bytes(4, "big"),
            *(int(begin[name], 16).to_bytes(8, "big") for name in ("session", "request")),
            int(begin["token_hash"], 16).to_bytes(8, "big"),
            *(n.to_bytes(4, "big") for n in (N_SAVED, 2, 3)),
        )
    )
    with recorded_worker("2:3", raw_cap=SIZES.window) as worker, talking(worker) as sock:
        sock.sendall(asked)
        assert read_exactly(sock, len(expected)) == expected
        sock.sendall(b"".join(encode_frame(FrameType.SNAPSHOT_SAVE_REQ, request)))
        got = read_exactly(sock, 72 + 24 + chunk["chunk_bytes"] + 28)
    sent = asked[chunk["payload_offset"] :]
    layers = LayerRange(2, 3)
    pair = [
        read_dsvl(raw, SIZES, layers, n_ctx=RECORDED_CTX, n_tokens=N_SAVED)
        for raw in (got[96:-28], sent)
    ]
    assert got[96 : 96 + 56] == sent[:56]
    compare(*pair)


CASES = [
    case
    for case in golden.load_json("wire/errors.json")["cases"]
    if case["name"].startswith("snapshot")
]


@pytest.fixture(scope="module")
def middle() -> Iterator[Worker]:
    with recorded_worker("2:3") as worker:
        yield worker


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_bad_requests_are_answered_as_the_recorded_worker_did(
    case: dict[str, Any], middle: Worker
) -> None:
    """Byte for byte, except for the words about a shard of garbage."""
    reply = bytes.fromhex(case["reply_hex"])
    with talking(middle) as sock:
        sock.sendall(bytes.fromhex(case["sent_hex"]))
        if case["name"] == "snapshot_load_garbage_payload":
            head = read_exactly(sock, 12 + 16)
            assert head[:8] + head[12:24] == reply[:8] + reply[12:24]
            read_exactly(sock, int.from_bytes(head[24:], "big"))
        else:
            assert read_exactly(sock, len(reply)) == reply
        assert survives(sock) == (not case["closed_by_peer"])


def survives(sock: socket.socket) -> bool:
    """Whether a worker still answers: a span that is too short gets an error."""
    try:
        sock.sendall(b"".join(encode_frame(FrameType.WORK, b"short")))
        return bool(sock.recv(1))
    except OSError:
        return False
