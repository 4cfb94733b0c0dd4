"""The wire equals recorded streams of the C programs: frames, conversations, refusals, codecs."""

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from ds4py import activations
from ds4py.coordinator.relay.answers import (
    AcceptedResult,
    Awaited,
    ExpectedResult,
    FailedResult,
    check_result,
)
from ds4py.coordinator.relay.workers.worker_hello import CoordinatorFacts, check_hello
from ds4py.errors import RemoteProtocolError
from ds4py.layer_range import LayerRange
from ds4py.wire.conversation import ProtocolState, Role
from ds4py.wire.frames import (
    FrameReader,
    FrameType,
    coordinator_limits,
    hello_limits,
    worker_limits,
)
from ds4py.wire.messages import (
    ErrorText,
    Hello,
    Result,
    ResultKind,
    SnapshotBegin,
    SnapshotDone,
    SnapshotRecord,
    Work,
    WorkFlags,
    decode,
    encode,
    error_result,
    forwarded,
)
from ds4py.wire.prefix_hash import prefix_hash
from ds4py.wire.route import decode_route, encode_route
from ds4py.worker.work_frames import AcceptedWork, RefusedWork, WorkerFacts, check_work
from tests import golden
from tests.strategies import attempt, feed, joined, read_frames

N_LAYERS, N_CTX, N_VOCAB, WIDTH = 6, 512, 768, 1024
LIMITS = worker_limits(N_CTX, WIDTH) | coordinator_limits(N_VOCAB, WIDTH, N_CTX) | hello_limits()
SCENARIOS = sorted(
    name[len("wire/") : -len(".json")]
    for name in golden.manifest()
    if re.fullmatch(r"wire/(?!errors)\w+\.json", name)
)
# name in the manifest -> attribute, where they differ
RENAMED = {"session": "session_id", "request": "request_id", "chunk_bytes": "data"}
NO_FIELD = {
    *("offset", "type", "name", "body_bytes", "flag_names", "result_kind_name", "model_name_len"),
    *("payload_offset", "input_hc_offset", "route_offset", "route", "route_return"),
    *("telemetry_count", "telemetry_bytes", "message_bytes"),
}


@cache
def connections(scenario):
    return golden.load_json(f"wire/{scenario}.json")["connections"]


@cache
def stream(scenario, name, direction):
    """Frames of one direction, with their bytes."""
    data = golden.load_bytes(f"wire/{scenario}.{name}.{direction}.bin")
    frames, at = [], 0
    for frame in read_frames(data, LIMITS):
        end = at + 12 + len(frame.body)
        frames.append((frame, data[at:end]))
        at = end
    assert at == len(data)
    return frames


def messages_of(scenario, name, direction):
    return [decode(frame) for frame, _ in stream(scenario, name, direction)]


def number(value):
    return int(value, 16) if isinstance(value, str) and value.startswith("0x") else value


def seen(message, field, frame_type):
    """A decoded field as the manifest writes it."""
    name = RENAMED.get(field, field)
    if frame_type == FrameType.RESULT and field in {"message", "payload_bytes"}:
        return message.text if field == "message" else len(message.payload)
    if field == "token_bytes":
        return 4 * len(message.tokens)
    value = getattr(message, name)
    if field == "chunk_bytes":
        return len(value)
    if field in {"message", "model_name"}:
        return value.decode()
    if field == "tokens":
        return list(value)
    if field == "telemetry":
        return [{slot: getattr(record, slot) for slot in record.__slots__} for record in value]
    return value


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_recorded_frame_decodes_to_its_manifest_and_encodes_to_its_bytes(scenario):
    for connection in connections(scenario):
        for direction in ("c2s", "s2c"):
            frames = stream(scenario, connection["name"], direction)
            listed = connection[direction]["frames"]
            assert len(frames) == len(listed)
            for (frame, raw), entry in zip(frames, listed, strict=True):
                message = decode(frame)
                assert joined(encode(message)) == raw
                assert (frame.type, len(frame.body)) == (entry["type"], entry["body_bytes"])
                for field in entry.keys() - NO_FIELD:
                    assert seen(message, field, frame.type) == number(entry[field]), field


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_recorded_route_decodes_and_encodes_to_its_bytes(scenario):
    for connection in connections(scenario):
        for direction in ("c2s", "s2c"):
            for (frame, _), entry in zip(
                stream(scenario, connection["name"], direction),
                connection[direction]["frames"],
                strict=True,
            ):
                if frame.type == FrameType.WORK:
                    work = decode(frame)
                    hops = decode_route(work.route_blob, work.route_count, N_LAYERS)
                    assert encode_route(hops) == work.route_blob
                    assert [
                        (hop.host, hop.port, hop.layer_start, hop.layer_end, int(hop.has_output))
                        for hop in hops
                    ] == [
                        (e["host"], e["port"], e["layer_start"], e["layer_end"], e["flags"])
                        for e in entry["route"]
                    ]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_recorded_conversation_is_legal_on_both_sides(scenario):
    for connection in connections(scenario):
        control = connection["name"].startswith("ctl")
        connector = ProtocolState(Role.WORKER_CONTROL if control else Role.DATA_DRIVER)
        acceptor = ProtocolState(Role.COORDINATOR_CONTROL if control else Role.DATA_SERVER)
        for direction, index in connection["order"]:
            if index == "closed":
                continue
            frame_type = connection[direction]["frames"][index]["type"]
            sender, receiver = (
                (connector, acceptor) if direction == "c2s" else (acceptor, connector)
            )
            sender.sent(frame_type)
            receiver.received(frame_type)


def facts_of(scenario):
    """Worker letter -> facts, from the HELLOs of a scenario."""
    facts = {}
    for connection in connections(scenario):
        if connection["name"].startswith("ctl"):
            hello = messages_of(scenario, connection["name"], "c2s")[0]
            assert isinstance(hello, Hello)
            layers = LayerRange(hello.layer_start, hello.layer_end, bool(hello.has_output))
            facts[connection["name"][3]] = WorkerFacts(
                model_id=2,
                layers=layers,
                n_layers=N_LAYERS,
                n_ctx=hello.ctx_size,
                n_vocab=N_VOCAB,
                hidden_width=WIDTH,
            )
    return facts


def works_and_results(scenario):
    """(worker letter, body of WORK, its RESULT) in order of the requests."""
    for connection in connections(scenario):
        control = connection["name"].startswith("ctl")
        asked, answered = ("s2c", "c2s") if control else ("c2s", "s2c")
        answers = {
            message.request_id: message
            for message in messages_of(scenario, connection["name"], answered)
            if isinstance(message, Result)
        }
        for frame, _ in stream(scenario, connection["name"], asked):
            if frame.type == FrameType.WORK:
                work = decode(frame)
                yield connection["name"][-3], frame.body, answers.get(work.request_id)


RUNNING = [name for name in SCENARIOS if not name.startswith("register")]


@pytest.mark.parametrize("scenario", RUNNING)
def test_every_recorded_work_is_accepted_and_its_answer_is_what_it_asked_for(scenario):
    facts = facts_of(scenario)
    count = 0
    for letter, body, result in works_and_results(scenario):
        accepted = check_work(body, facts[letter])
        assert isinstance(accepted, AcceptedWork)
        if result is None or result.status:
            continue
        count += 1
        if accepted.is_final:
            wanted = ResultKind.HIDDEN_STATE
            wanted = ResultKind.LOGITS if accepted.wants_logits else wanted
            wanted = ResultKind.ACK if accepted.ack_only else wanted
            assert result.result_kind == wanted
            assert len(result.telemetry) == 1
    assert count > 0


@pytest.mark.parametrize("scenario", RUNNING)
def test_every_recorded_result_is_accepted_or_the_stages_own_error(scenario):
    for _, body, result in works_and_results(scenario):
        if result is None:
            continue
        work = decode_work(body)
        route = decode_route(work.route_blob, work.route_count, N_LAYERS)
        expected = ExpectedResult(
            result_hash=work.result_hash,
            n_tokens=work.n_tokens,
            n_vocab=N_VOCAB,
            hidden_width=WIDTH,
            awaited=Awaited.CHUNK if work.flags & WorkFlags.ACK_ONLY else Awaited.SPAN,
            final_has_output=route[-1].has_output,
        )
        got = check_result(result, expected)
        if result.status:
            assert got == FailedResult(cause="remote", kind="R-STATUS", text=result.text)
        else:
            assert isinstance(got, AcceptedResult)


def decode_work(body):
    (frame,) = read_frames(b"DS4D\0\0\0\3" + len(body).to_bytes(4, "big") + bytes(body), LIMITS)
    work = decode(frame)
    assert isinstance(work, Work)
    return work


THREE_STAGES = [name for name in SCENARIOS if name.startswith("prefill_3hop") or name == "resume"]


@pytest.mark.parametrize("scenario", THREE_STAGES)
def test_forwarding_a_recorded_work_gives_the_recorded_next_work(scenario):
    received = {w.request_id: w for w in messages_of(scenario, "ctlA-0", "s2c")}
    sent = stream(scenario, "dataB-0", "c2s")
    assert len(sent) == len(received) > 0
    for frame, raw in sent:
        onward = decode(frame)
        work = received[onward.request_id]
        hop = decode_route(work.route_blob, work.route_count, N_LAYERS)[1]
        assert joined(encode(forwarded(work, hop, onward.input, work.bits))) == raw


@pytest.mark.parametrize("scenario", THREE_STAGES)
def test_relaying_a_recorded_result_gives_the_recorded_upstream_result(scenario):
    downstream = {r.request_id: r for r in messages_of(scenario, "dataB-0", "s2c")}
    count = 0
    for frame, raw in stream(scenario, "ctlA-0", "c2s"):
        if frame.type == FrameType.RESULT:
            upstream = decode(frame)
            relayed = downstream[upstream.request_id].relayed(upstream.telemetry[-1])
            assert joined(encode(relayed)) == raw
            count += 1
    assert count == len(downstream) > 0


@pytest.mark.parametrize("scenario", ["register", "register_q4", "decode_1hop"])
def test_every_recorded_worker_is_accepted(scenario):
    facts = CoordinatorFacts(model_id=2, name="DeepSeek V4 Tiny", n_layers=6, n_ctx=N_CTX)
    for connection in connections(scenario):
        hello = messages_of(scenario, connection["name"], "c2s")[0]
        assert check_hello(hello, facts) is None


def test_the_recorded_rejected_worker_is_rejected_with_the_same_words():
    facts = CoordinatorFacts(model_id=2, name="DeepSeek V4 Tiny", n_layers=6, n_ctx=N_CTX)
    refusal = check_hello(messages_of("register_rejected", "ctlA-0", "c2s")[0], facts)
    said = messages_of("register_rejected", "ctlA-0", "s2c")[0]
    assert refusal is not None
    assert refusal.text.startswith(said.text)


# --- errors.json: hand-made requests with the exact reply of the C programs --------------------

ERRORS = golden.load_json("wire/errors.json")["cases"]
# decided by what stands behind the frames and checks: sessions, the next hop, the shard itself
BEHIND = {
    *("work_prefix_hash_mismatch", "work_next_hop_refused", "work_position_mismatch_after_reset"),
    *("snapshot_save_unknown_session", "snapshot_save_layers", "snapshot_load_token_hash"),
    *("snapshot_load_layers", "snapshot_load_vocab", "snapshot_load_bad_chunk_request"),
    "snapshot_load_garbage_payload",
}


def request_of(case):
    if case["sent_hex"] is not None:
        return bytes.fromhex(case["sent_hex"])
    return b"".join(
        bytes.fromhex(part["hex"]) if "hex" in part else bytes(part["zeros"])
        for part in case["sent_parts"]
    )


class PureWorker:
    """A worker without sockets and sessions: frames, conversation and checks only."""

    def __init__(self, facts):
        self.facts = facts
        self.replies = []
        self.accepted = []
        self.closed = False
        self._conversation = ProtocolState(Role.DATA_SERVER)

    def serve(self, data):
        _, fault = attempt(lambda: self._serve(data))
        self.closed |= bool(fault)
        return self

    def _serve(self, data):
        for frame in feed(FrameReader(worker_limits(N_CTX, WIDTH)), data):
            _, fault = attempt(lambda: self._conversation.received(frame.type))  # noqa: B023 - called at once
            if fault:
                self.replies.append(ErrorText.of("unsupported distributed worker frame"))
            self.closed = bool(fault) or frame.type == FrameType.ERROR
            if not self.closed:
                self._handle(frame)
            if self.closed:
                return

    def _handle(self, frame):
        if frame.type == FrameType.WORK:
            got = check_work(frame.body, self.facts)
            if isinstance(got, RefusedWork):
                self.replies.append(error_result(got.request_id, got.text))
            else:
                self.accepted.append(got)
            return
        try:
            self.accepted.append(decode(frame))
        except RemoteProtocolError as error:
            self._refuse_snapshot(frame, error.what.encode())

    def _refuse_snapshot(self, frame, text):
        span = self.facts.layers
        if frame.type == FrameType.SNAPSHOT_LOAD_BEGIN:
            record = SnapshotRecord.decode(frame.body)
            self.replies.append(SnapshotDone(record.request_id, 1, text))
            self.closed = record.payload_bytes > 0
            return
        self.replies.append(
            SnapshotBegin(
                model_id=self.facts.model_id,
                session_id=0,
                request_id=0,
                token_hash=0,
                layer_start=span.start,
                layer_end=span.end,
                payload_bytes=0,
                status=1,
                message=text,
            )
        )


WORKER_CASES = [case for case in ERRORS if case["target"].startswith("worker")]
COORDINATOR_CASES = [case for case in ERRORS if case["target"].startswith("coordinator")]


def worker_of(case):
    last = case["target"].startswith("worker B")
    layers = LayerRange(4, 5, has_output=True) if last else LayerRange(2, 3)
    return PureWorker(
        WorkerFacts(
            model_id=2,
            layers=layers,
            n_layers=N_LAYERS,
            n_ctx=N_CTX,
            n_vocab=N_VOCAB,
            hidden_width=WIDTH,
        )
    )


@pytest.mark.parametrize("case", WORKER_CASES, ids=lambda case: case["name"])
def test_a_worker_decides_each_recorded_request_as_the_c_worker_did(case):
    worker = worker_of(case).serve(request_of(case))
    if case["name"] in BEHIND:
        assert worker.accepted
        assert not worker.replies
        return
    (reply, *_) = case["reply_frames"] or [{}]
    if reply.get("name") == "RESULT" and reply["status"] == 0:
        (accepted,) = worker.accepted
        kinds = {0: accepted.ack_only, 2: accepted.wants_logits}
        assert kinds.get(reply["result_kind"], not any(kinds.values()))
        assert (accepted.is_final, worker.closed) == (True, False)
        return
    assert b"".join(joined(encode(r)) for r in worker.replies).hex() == case["reply_hex"]
    assert worker.closed == case["closed_by_peer"]
    assert not worker.accepted


def coordinator_reply(data):
    """(text of the ERROR or None for silence, closed)."""
    facts = CoordinatorFacts(model_id=2, name="DeepSeek V4 Tiny", n_layers=6, n_ctx=N_CTX)

    def first_message():
        conversation = ProtocolState(Role.COORDINATOR_CONTROL)
        (frame,) = feed(FrameReader(hello_limits()), data)
        conversation.received(frame.type)
        return decode(frame)

    hello, fault = attempt(first_message)
    if fault:
        return None, True
    refusal = check_hello(hello, facts)
    return (refusal.text, True) if refusal else (None, False)


@pytest.mark.parametrize("case", COORDINATOR_CASES, ids=lambda case: case["name"])
def test_a_coordinator_decides_each_recorded_hello_as_the_c_coordinator_did(case):
    text, closed = coordinator_reply(request_of(case))
    assert closed == case["closed_by_peer"]
    said = [frame["message"] for frame in case["reply_frames"]]
    assert len(said) == (text is not None)
    assert text is None or text.startswith(said[0])


def test_all_recorded_requests_are_covered():
    assert len(WORKER_CASES) + len(COORDINATOR_CASES) == 73
    assert {case["name"] for case in WORKER_CASES} >= BEHIND


# --- wire-protocol.md#example-frames --------------------------------------------------------------

SPEC = Path(__file__).parents[2] / "docs/spec/wire-protocol.md"
EXAMPLES = {
    match[1]: bytes.fromhex(match[2].replace("\n", " "))
    for match in re.finditer(
        r"^### (A\.\d+) (?:(?!^###).)*?Flat hex:\n\n```text\n([0-9a-f\s]+)```",
        SPEC.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
}


def test_the_appendix_holds_eleven_frames():
    assert sorted(EXAMPLES) == sorted(f"A.{n}" for n in range(1, 12))


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_frame_decodes_and_encodes_to_its_bytes(name):
    (frame,) = read_frames(EXAMPLES[name], LIMITS)
    assert joined(encode(decode(frame))) == EXAMPLES[name]


def test_the_example_work_is_accepted_by_its_worker():
    (frame,) = read_frames(EXAMPLES["A.2"], LIMITS)
    facts = WorkerFacts(
        model_id=0,
        layers=LayerRange(2, 3, has_output=True),
        n_layers=4,
        n_ctx=64,
        n_vocab=4,
        hidden_width=4,
    )
    accepted = check_work(frame.body, facts)
    assert isinstance(accepted, AcceptedWork)
    assert accepted.wants_logits
    assert accepted.work.flags == 0x7
    assert accepted.work.session_id == 0x1122334455667788
    assert str(accepted.entry) == "127.0.0.1:50123"
    assert accepted.hidden is not None
    expected = [0.0, -0.0, 1.0, -1.5, 0.0999755859375, 448, 1000, 0]
    assert accepted.hidden.unpack().reshape(-1)[:8].tolist() == expected


# --- the codecs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [16, 8])
def test_activations_pack_and_unpack_as_in_the_reference(bits):
    vectors = golden.load_npz("activation_vectors.npz")
    packed = activations.pack(vectors["input"], bits)
    assert packed == vectors[f"f{bits}_packed"].tobytes()
    unpacked = activations.unpack(packed, bits)
    assert unpacked.tobytes() == vectors[f"f{bits}_unpacked"].tobytes()


def test_every_8_bit_code_decodes_as_in_the_reference():
    table = golden.load_npz("activation_vectors.npz")["f8_table"]
    assert activations.unpack(bytes(range(256)), 8).tobytes() == table.tobytes()


def test_every_16_bit_code_decodes_as_in_the_reference():
    table = golden.load_npz("activation_vectors.npz")["f16_table"]
    codes = np.arange(1 << 16, dtype="<u2")
    got = activations.unpack(codes.tobytes(), 16)
    assert np.array_equal(got.view("<u4"), table.view("<u4"))


def test_prefix_hashes_are_those_of_the_reference():
    vectors = golden.load_json("prefix_hashes.json")["vectors"]
    assert len(vectors) > 10
    for vector in vectors:
        assert prefix_hash(vector["tokens"]) == int(vector["hash"], 16)
