"""Acceptance of HELLO, WORK and RESULT: every row of the tables, in their order."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.activations import HiddenBatch
from ds4py.coordinator.relay.answers import (
    AcceptedResult,
    Awaited,
    ExpectedResult,
    FailedResult,
    check_result,
)
from ds4py.coordinator.relay.workers.worker_hello import CoordinatorFacts, check_hello
from ds4py.layer_range import LayerRange
from ds4py.wire.extensions import PeerHello
from ds4py.wire.messages import Hello, Result, ResultKind, Work, WorkFlags, encode, error_result
from ds4py.wire.prefix_hash import INIT, extend, prefix_hash
from ds4py.wire.route import HopEntry, encode_route
from ds4py.worker.work_frames import AcceptedWork, RefusedWork, WorkerFacts, check_work
from tests.strategies import hellos, joined, peer_hellos, results, works

WIDTH, VOCAB = 4, 10
MIDDLE = WorkerFacts(
    model_id=7,
    layers=LayerRange(2, 3),
    n_layers=6,
    n_ctx=8,
    n_vocab=VOCAB,
    hidden_width=WIDTH,
)
LAST = replace(MIDDLE, layers=LayerRange(4, 5, has_output=True))
FIRST = replace(MIDDLE, layers=LayerRange(0, 1))
HOP_0 = HopEntry("a", 1, 0, 1)
HOP_1 = HopEntry("b", 2, 2, 3)
HOP_2 = HopEntry("c", 3, 4, 5, has_output=True)
INPUT, LOGITS, ACK = WorkFlags.INPUT_HC, WorkFlags.OUTPUT_LOGITS, WorkFlags.ACK_ONLY
TOKENS = (1, 2, 3)


def work(*route, index=0, tokens=TOKENS, **changes):
    """A legal WORK for `route[index]`, then changed."""
    entry = route[index]
    has_input = entry.layer_start > 0
    flags = (INPUT if has_input else 0) | (LOGITS if entry.has_output else 0)
    fields = {
        "model_id": 7,
        "session_id": 1,
        "request_id": 42,
        "prefix_hash": INIT,
        "result_hash": extend(INIT, tokens),
        "pos0": 0,
        "layer_start": entry.layer_start,
        "layer_end": entry.layer_end,
        "flags": flags,
        "input_hc_bits": 32,
        "route_count": len(route),
        "route_index": index,
        "tokens": tokens,
        "input": memoryview(bytes(len(tokens) * WIDTH * 4 if has_input else 0)),
        "route_blob": memoryview(encode_route(route)),
    }
    return Work(**fields | changes)


def body(message):
    return memoryview(joined(encode(message)))[12:]


def check(message, facts):
    return check_work(body(message), facts)


def test_a_middle_hop_forwards():
    got = check(work(HOP_1, HOP_2), MIDDLE)
    assert isinstance(got, AcceptedWork)
    assert (got.entry, got.next_entry, got.is_final) == (HOP_1, HOP_2, False)
    assert (got.wants_logits, got.ack_only) == (False, False)
    assert got.hidden == HiddenBatch(3, WIDTH, 32, memoryview(bytes(48)))


def test_a_final_hop_answers_with_logits():
    got = check(work(HOP_1, HOP_2, index=1), LAST)
    assert isinstance(got, AcceptedWork)
    assert (got.entry, got.is_final, got.wants_logits, got.ack_only) == (HOP_2, True, True, False)


def test_ack_only_wins_over_logits_on_the_final_hop():
    got = check(work(HOP_2, flags=INPUT | LOGITS | ACK), LAST)
    assert isinstance(got, AcceptedWork)
    assert (got.wants_logits, got.ack_only) == (False, True)


def test_ack_only_suppresses_nothing_on_a_middle_hop():
    got = check(work(HOP_1, HOP_2, flags=INPUT | ACK), MIDDLE)
    assert isinstance(got, AcceptedWork)
    assert not got.ack_only


def test_an_output_owner_may_be_asked_for_hidden_states():
    hop = replace(HOP_2, has_output=False)
    got = check(work(hop), LAST)
    assert isinstance(got, AcceptedWork)
    assert (got.is_final, got.wants_logits, got.ack_only) == (True, False, False)


def test_the_first_slice_takes_tokens_only():
    got = check(work(HOP_0, HOP_1), FIRST)
    assert isinstance(got, AcceptedWork)
    assert got.hidden is None


@pytest.mark.parametrize(("sent", "bits"), [(0, 32), (32, 32), (16, 16), (8, 8)])
def test_the_input_is_read_in_its_own_width(sent, bits):
    message = work(HOP_2, input_hc_bits=sent, input=memoryview(bytes(12 * bits // 8)))
    got = check(message, LAST)
    assert isinstance(got, AcceptedWork)
    assert got.hidden is not None
    assert got.hidden.bits == got.work.bits == bits


def test_a_span_may_fill_the_context_exactly():
    assert isinstance(check(work(HOP_1, pos0=5), MIDDLE), AcceptedWork)


def test_the_accepted_input_is_a_view_into_the_body():
    raw = bytearray(body(work(HOP_1)))
    got = check_work(memoryview(raw), MIDDLE)
    assert isinstance(got, AcceptedWork)
    assert got.hidden is not None
    raw[92] = 9
    assert got.hidden.data[0] == 9


def with_hash(tokens):
    return {"tokens": tokens, "result_hash": extend(INIT, tokens)}


# (class, WORK, worker): the rows of docs/spec/wire-protocol.md#work in their order
REFUSALS = [
    ("W-NOROUTE", work(HOP_1, route_count=0), MIDDLE),
    ("W-ROUTEIDX", work(HOP_1, route_index=1), MIDDLE),
    ("W-MODEL", work(HOP_1, model_id=8), MIDDLE),
    ("W-LAYERS", work(HOP_1, layer_end=4), MIDDLE),
    ("W-LAYERS", work(HOP_1, layer_start=1), MIDDLE),
    ("W-FLAGS", work(HOP_1, flags=0x11), MIDDLE),
    ("W-EMPTY", work(HOP_1, tokens=()), MIDDLE),
    ("W-CTX", work(HOP_1, pos0=6), MIDDLE),
    ("W-CTX", work(HOP_1, pos0=2**32 - 1), MIDDLE),
    ("W-INPUT0", work(HOP_0, flags=INPUT), FIRST),
    ("W-NOINPUT", work(HOP_1, flags=0), MIDDLE),
    ("W-NOHEAD", work(HOP_1, flags=INPUT | LOGITS), MIDDLE),
    ("W-NOTLAST", work(HOP_2, flags=INPUT | LOGITS), replace(LAST, n_layers=7)),
    ("W-VOCAB", work(HOP_1, **with_hash((1, VOCAB, 2))), MIDDLE),
    ("W-VOCAB", work(HOP_1, **with_hash((1, 2**31, 2))), replace(MIDDLE, n_vocab=2**32)),
    ("W-HASHMETA", work(HOP_1, result_hash=prefix_hash((1, 2))), MIDDLE),
    ("W-TOOBIG", work(HOP_1), replace(MIDDLE, hidden_width=2**30)),
    ("W-BITS", work(HOP_1, input_hc_bits=12), MIDDLE),
    ("W-HCSIZE", work(HOP_1, input_hc_bits=16), MIDDLE),
    ("W-STRAYHC", work(HOP_0, input=memoryview(b"x")), FIRST),
    ("W-ROUTE", work(HOP_1, route_blob=memoryview(b"junk")), MIDDLE),
    ("W-RLAYERS", work(HOP_1, route_blob=memoryview(encode_route([HOP_0]))), MIDDLE),
    ("W-RLOGITS", work(HOP_2, flags=INPUT), LAST),
    (
        "W-OUTSIZE",
        work(HOP_0, input_hc_bits=12),
        FIRST,
    ),
]


@pytest.mark.parametrize(
    ("kind", "message", "facts"), REFUSALS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_each_row_refuses_with_its_class_and_the_request(kind, message, facts):
    got = check(message, facts)
    assert isinstance(got, RefusedWork)
    assert (got.kind, got.request_id) == (kind, 42)
    assert got.text


FAULTS = {
    "W-MODEL": {"model_id": 8},
    "W-LAYERS": {"layer_end": 4},
    "W-FLAGS": {"flags": 0x80},
    "W-EMPTY": {"tokens": ()},
    "W-CTX": {"pos0": 9},
    "W-VOCAB": {"tokens": (99,)},
    "W-BITS": {"input_hc_bits": 9},
    "W-ROUTE": {"route_blob": memoryview(b"")},
}


@given(st.sets(st.sampled_from(sorted(FAULTS)), min_size=1))
def test_of_several_faults_the_first_row_is_named(chosen):
    changes = {}
    for kind in reversed([k for k in FAULTS if k in chosen]):
        changes |= FAULTS[kind]
    got = check(work(HOP_1, **changes), MIDDLE)
    assert isinstance(got, RefusedWork)
    assert got.kind == next(kind for kind in FAULTS if kind in chosen)


def test_a_short_record_is_refused_without_a_request():
    got = check_work(body(work(HOP_1))[:79], MIDDLE)
    assert isinstance(got, RefusedWork)
    assert (got.kind, got.request_id) == ("W-TRUNC", 0)


@pytest.mark.parametrize("cut", [80, 91, -1])
def test_sizes_that_do_not_add_up_are_refused_with_the_request(cut):
    got = check_work(body(work(HOP_1))[:cut], MIDDLE)
    assert isinstance(got, RefusedWork)
    assert (got.kind, got.request_id) == ("W-SIZES", 42)


def test_an_unused_bad_width_harms_nobody():
    whole = HopEntry("a", 1, 0, 5, has_output=True)
    facts = replace(MIDDLE, layers=LayerRange(0, 5, has_output=True))
    assert isinstance(check(work(whole, input_hc_bits=12), facts), AcceptedWork)
    assert isinstance(check(work(HOP_0, input_hc_bits=12, flags=ACK), FIRST), AcceptedWork)


@given(works, st.sampled_from([FIRST, MIDDLE, LAST]))
def test_any_work_is_accepted_or_refused_with_a_class(message, facts):
    got = check(message, facts)
    assert isinstance(got, AcceptedWork) or got.kind.startswith("W-")


@given(st.binary(max_size=200))
def test_any_body_is_refused_with_a_class(raw):
    got = check_work(memoryview(raw), MIDDLE)
    assert isinstance(got, RefusedWork)
    assert got.kind.startswith("W-")


@given(st.data())
def test_a_damaged_work_is_accepted_or_refused_with_a_class(data):
    raw = bytearray(body(work(HOP_1, HOP_2)))
    for _ in range(data.draw(st.integers(1, 2))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    got = check_work(memoryview(raw), MIDDLE)
    assert isinstance(got, AcceptedWork) or got.kind.startswith("W-")


COORDINATOR = CoordinatorFacts(model_id=7, name="toy", n_layers=6, n_ctx=8)
HELLO = Hello(
    model_id=7,
    quant_bits=4,
    layer_start=2,
    layer_end=5,
    has_output=1,
    has_hidden=1,
    ctx_size=8,
    n_layers=6,
    listen_port=1,
    model_name=b"toy",
)
PEER = PeerHello(
    role="worker",
    version="1",
    model_id=7,
    model_name="toy",
    n_layers=6,
    quant_bits=4,
    ctx_size=8,
    layer_start=2,
    layer_end=5,
    has_output=True,
)
# (class, changes) in the order of docs/spec/wire-protocol.md#hello
HELLO_FAULTS = [
    ("H-MODEL-ID", {"model_id": 8}),
    ("H-MODEL-NAME", {"model_name": b"boy"}),
    ("H-LAYERS", {"n_layers": 7}),
    ("H-QUANT", {"quant_bits": 3}),
    ("H-OUTFLAG", {"has_output": 2}),
    ("H-HIDFLAG", {"has_hidden": 2}),
    ("H-RANGE", {"layer_start": 6, "layer_end": 6}),
    ("H-CTX", {"ctx_size": 7}),
    ("H-PORT", {"listen_port": 0}),
]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *HELLO_FAULTS,
        ("H-RANGE", {"layer_start": 3, "layer_end": 2}),
        ("H-RANGE", {"layer_end": 6}),
        ("H-OUTRANGE", {"layer_end": 4}),
        ("H-QUANT", {"quant_bits": 0}),
        ("H-QUANT", {"quant_bits": 8}),
        ("H-PORT", {"listen_port": 65536}),
    ],
)
def test_each_row_refuses_a_hello_with_its_class(kind, changes):
    refusal = check_hello(replace(HELLO, **changes), COORDINATOR)
    assert refusal is not None
    assert refusal.kind == kind


@given(st.sets(st.integers(0, len(HELLO_FAULTS) - 1), min_size=1))
def test_a_hello_with_several_faults_is_refused_for_the_first(chosen):
    changes = {}
    for n in chosen:
        changes |= HELLO_FAULTS[n][1]
    refusal = check_hello(replace(HELLO, **changes), COORDINATOR)
    assert refusal is not None
    assert refusal.kind == HELLO_FAULTS[min(chosen)][0]


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({}, {}),
        ({"quant_bits": 2}, {}),
        ({"ctx_size": 9}, {}),
        ({"ctx_size": 1}, {"n_ctx": 0}),
        ({"has_output": 0, "layer_end": 4}, {}),
        ({"has_hidden": 0}, {}),
        ({"listen_port": 65535}, {}),
    ],
)
def test_a_fitting_worker_is_accepted(changes, facts):
    assert check_hello(replace(HELLO, **changes), replace(COORDINATOR, **facts)) is None


def test_a_refused_worker_reads_both_values_and_what_to_do():
    refusal = check_hello(replace(HELLO, ctx_size=7), COORDINATOR)
    assert refusal is not None
    assert "worker=7 coordinator=8" in refusal.text
    assert "context of at least 8 tokens" in refusal.text


def test_a_hostile_name_is_quoted_harmlessly():
    refusal = check_hello(replace(HELLO, model_name=b"a\nb\xff"), COORDINATOR)
    assert refusal is not None
    assert refusal.text.isprintable()


def peer(**changes):
    return PeerHello(**{k: getattr(PEER, k) for k in PEER.__struct_fields__} | changes)


def test_an_extended_worker_passes_the_same_rows():
    assert check_hello(PEER, COORDINATOR) is None
    for kind, changes in HELLO_FAULTS:
        if kind in {"H-OUTFLAG", "H-HIDFLAG", "H-PORT"}:
            continue  # the extended form cannot express these
        named = {k: v.decode() if isinstance(v, bytes) else v for k, v in changes.items()}
        refusal = check_hello(peer(**named), COORDINATOR)
        assert refusal is not None
        assert refusal.kind == kind


def test_a_peer_without_layers_can_not_serve():
    refusal = check_hello(peer(layer_start=None, layer_end=None), COORDINATOR)
    assert refusal is not None
    assert refusal.kind == "H-RANGE"


@given(hellos | peer_hellos)
def test_any_hello_is_accepted_or_refused_with_a_class(hello):
    refusal = check_hello(hello, COORDINATOR)
    assert refusal is None or refusal.kind.startswith("H-")


EXPECTED = ExpectedResult(
    result_hash=5,
    n_tokens=3,
    n_vocab=VOCAB,
    hidden_width=WIDTH,
    awaited=Awaited.SPAN,
    final_has_output=True,
)


def answer(kind, size, bits=32, **changes):
    payload = memoryview(bytes(size))
    fields = {"request_id": 1, "result_hash": 5, "result_kind": kind} | changes
    return Result(payload=payload, payload_bits=bits, **fields)


ACK_RESULT = answer(ResultKind.ACK, 0, 0)
LOGITS_RESULT = answer(ResultKind.LOGITS, 4 * VOCAB)
HIDDEN_RESULT = answer(ResultKind.HIDDEN_STATE, 4 * 3 * WIDTH)


# which kinds are admitted (docs/spec/wire-protocol.md#accepted-results, #decode), with and without
# the output flag on the final entry
@pytest.mark.parametrize(
    ("awaited", "final_has_output", "admitted"),
    [
        (Awaited.CHUNK, True, {"ACK", "LOGITS"}),
        (Awaited.CHUNK, False, {"ACK", "LOGITS", "HIDDEN_STATE"}),
        (Awaited.LAST_CHUNK, True, {"LOGITS"}),
        (Awaited.LAST_CHUNK, False, {"LOGITS", "HIDDEN_STATE"}),
        (Awaited.SPAN, True, {"LOGITS", "HIDDEN_STATE"}),
        (Awaited.SPAN, False, {"LOGITS", "HIDDEN_STATE"}),
    ],
)
def test_each_span_admits_its_kinds(awaited, final_has_output, admitted):
    expected = replace(EXPECTED, awaited=awaited, final_has_output=final_has_output)
    got = {
        ResultKind(result.result_kind).name
        for result in (ACK_RESULT, LOGITS_RESULT, HIDDEN_RESULT)
        if isinstance(check_result(result, expected), AcceptedResult)
    }
    assert got == admitted


def test_logits_come_as_a_view():
    got = check_result(LOGITS_RESULT, EXPECTED)
    assert isinstance(got, AcceptedResult)
    assert got.kind is ResultKind.LOGITS
    assert got.payload is LOGITS_RESULT.payload
    assert got.hidden is None


@pytest.mark.parametrize(("bits", "read_as"), [(0, 32), (32, 32), (16, 16), (8, 8)])
def test_a_hidden_state_is_read_in_the_width_of_the_answer(bits, read_as):
    size = 3 * WIDTH * read_as // 8
    got = check_result(answer(ResultKind.HIDDEN_STATE, size, bits), EXPECTED)
    assert isinstance(got, AcceptedResult)
    assert got.hidden is not None
    assert (got.hidden.rows, got.hidden.bits) == (3, read_as)
    assert np.array_equal(got.hidden.unpack(), np.zeros((3, WIDTH)))


@pytest.mark.parametrize("bits", [0, 16, 99])
def test_bits_of_logits_and_ack_are_not_looked_at(bits):
    chunk = replace(EXPECTED, awaited=Awaited.CHUNK)
    for result in (ACK_RESULT, LOGITS_RESULT):
        got = check_result(replace(result, payload_bits=bits), chunk)
        assert isinstance(got, AcceptedResult)


def test_an_error_is_the_stages_own_and_not_the_connections():
    got = check_result(error_result(1, "no more\nmemory"), EXPECTED)
    assert got == FailedResult(
        cause="remote", kind="R-STATUS", text="no more\N{REPLACEMENT CHARACTER}memory"
    )


def test_an_error_without_words_still_has_a_text():
    got = check_result(error_result(1, ""), EXPECTED)
    assert isinstance(got, FailedResult)
    assert got.text == "(no reason)"


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        ("R-DECODE", replace(HIDDEN_RESULT, payload_bits=12)),
        ("R-DECODE", replace(HIDDEN_RESULT, payload=memoryview(bytes(47)), result_hash=6)),
        ("R-HASH", replace(LOGITS_RESULT, result_hash=6)),
        ("R-HASH", replace(ACK_RESULT, result_hash=6)),
        ("R-KIND", ACK_RESULT),
        ("R-KIND", answer(ResultKind.ACK, 4)),
        ("R-KIND", answer(ResultKind.LOGITS, 4 * VOCAB - 4)),
        ("R-KIND", answer(ResultKind.LOGITS, 0)),
        ("R-KIND", answer(ResultKind.HIDDEN_STATE, 0)),
        ("R-KIND", answer(ResultKind.HIDDEN_STATE, 0, 12)),
        ("R-KIND", answer(ResultKind.HIDDEN_STATE, 4 * 2 * WIDTH)),
        ("R-KIND", answer(ResultKind.HIDDEN_STATE, 4 * 3 * WIDTH, 16)),
        ("R-KIND", answer(3, 0)),
        ("R-KIND", answer(2**32 - 1, 4 * VOCAB)),
    ],
)
def test_an_answer_that_does_not_fit_breaks_the_connection(kind, result):
    got = check_result(result, EXPECTED)
    assert isinstance(got, FailedResult)
    assert (got.cause, got.kind) == ("transport", kind)


def test_status_is_looked_at_before_the_payload():
    got = check_result(replace(HIDDEN_RESULT, status=9, payload_bits=12), EXPECTED)
    assert isinstance(got, FailedResult)
    assert got.cause == "remote"


@given(results, st.sampled_from(Awaited), st.booleans())
def test_any_result_is_accepted_or_classified(result, awaited, final_has_output):
    expected = replace(EXPECTED, awaited=awaited, final_has_output=final_has_output)
    got = check_result(result, expected)
    assert isinstance(got, AcceptedResult) or got.kind.startswith("R-")
