"""Recorded conversations of ds4 programs against live ds4py programs, and a test of that test."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from ds4py.coordinator import chunk_planner
from ds4py.wire.messages import (
    ErrorText,
    Hello,
    Result,
    SaveRequest,
    SnapshotBegin,
    SnapshotChunk,
    Telemetry,
    Work,
)
from interop.replay import __main__ as command
from interop.replay import performance
from interop.replay.allowed import amended
from interop.replay.compare import compare, settle
from interop.replay.performance import replay
from interop.replay.recording import COORDINATOR, WORKERS, load, scenario_names
from interop.replay.script import script
from interop.replay.steps import Answer, Ask, Hear, HungUp, Say, Start, Stop

CASES = [(name, party) for name in scenario_names() for party in load(name).parties]


@pytest.mark.parametrize(("name", "party"), CASES)
def test_a_live_party_does_what_the_recorded_one_did(name: str, party: str) -> None:
    scenario = load(name)
    report = replay(scenario, party)
    assert report.differences == []
    talks, _ = amended(scenario, party)
    assert report.sent + report.received == sum(len(talk.frames) for talk in talks)
    n_answers = sum(call.name in scenario.logits or call.verb == "save" for call in scenario.calls)
    assert report.compared == report.received + n_answers * (party == COORDINATOR)


def test_every_recording_is_replayed() -> None:
    assert scenario_names() == [
        *("decode_1hop", "hidden_return_16", "hidden_return_32", "hidden_return_8"),
        *("kv_mismatch_1hop", "kv_mismatch_3hop"),
        *("prefill_3hop_16", "prefill_3hop_32", "prefill_3hop_8"),
        *("register", "register_q4", "register_rejected", "resume", "snapshot"),
    ]
    assert len(CASES) == 35


# --- the order of steps ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "party"), CASES)
def test_a_script_keeps_every_connections_order_and_leaves_nothing_out(name, party) -> None:
    talks, _ = amended(load(name), party)
    steps = script(load(name), party, talks)
    for talk in talks:
        spoken = [s for s in steps if isinstance(s, Say | Hear) and s.talk is talk]
        assert [s.message for s in spoken] == [said.message for said in talk.frames]
        assert [type(s) for s in spoken] == [
            Hear if said.by == party else Say for said in talk.frames
        ]


@pytest.mark.parametrize("name", ["prefill_3hop_32", "resume", "kv_mismatch_3hop"])
def test_nothing_is_awaited_before_its_cause_is_said(name) -> None:
    """A worker forwards a span after it came, and relays a result after it came."""
    party = WORKERS[0]
    said = set()
    for step in script(load(name), party, amended(load(name), party)[0]):
        if not isinstance(step, Say | Hear) or not isinstance(step.message, Work | Result):
            continue
        key = type(step.message), step.message.request_id
        if isinstance(step, Say):
            said.add(key)
        elif isinstance(step.message, Work) or len(step.message.telemetry) > 1:
            assert key in said


def test_a_killed_worker_hangs_up_everywhere_and_starts_again_for_its_next_connection() -> None:
    scenario = load("kv_mismatch_3hop")
    steps = script(scenario, WORKERS[1], amended(scenario, WORKERS[1])[0])
    at = [type(step) for step in steps].index(Stop)
    assert [type(step) for step in steps[at : at + 4]] == [Stop, HungUp, HungUp, Start]


def test_a_save_stands_between_the_span_before_and_the_span_after() -> None:
    scenario = load("snapshot")
    steps = script(scenario, WORKERS[0], amended(scenario, WORKERS[0])[0])
    at = next(
        place
        for place, step in enumerate(steps)
        if isinstance(step, Say) and isinstance(step.message, SaveRequest)
    )
    state = steps[at].message.token_hash
    works = [
        (i, s.message) for i, s in enumerate(steps) if isinstance(getattr(s, "message", 0), Work)
    ]
    assert all(place < at for place, work in works if work.result_hash == state)
    session = steps[at].message.session_id
    assert all(
        place > at
        for place, work in works
        if work.prefix_hash == state and work.session_id == session
    )


def test_calls_of_a_coordinator_follow_each_other() -> None:
    for name in scenario_names():
        steps = script(load(name), COORDINATOR, amended(load(name), COORDINATOR)[0])
        spoken = [step for step in steps if isinstance(step, Ask | Answer)]
        expected = [kind(call) for call in load(name).calls for kind in (Ask, Answer)]
        assert spoken == expected


# --- the comparison -------------------------------------------------------------------------------


def message_of(name: str, kind: type, place: int = 0):
    messages = [
        said.message
        for talk in load(name).conversations
        for said in talk.frames
        if isinstance(said.message, kind)
    ]
    return messages[place]


EXAMPLES = {
    "hello": message_of("register", Hello),
    "work": message_of("prefill_3hop_16", Work),
    "ack": message_of("prefill_3hop_16", Result),
    "logits": message_of("decode_1hop", Result),
    "hidden": message_of("hidden_return_8", Result, 2),
    "refusal": message_of("kv_mismatch_1hop", Result, 5),
    "error": message_of("register_rejected", ErrorText),
    "begin": message_of("snapshot", SnapshotBegin),
    "chunk": message_of("snapshot", SnapshotChunk),
}


def other(value):
    """Another value of the same type."""
    match value:
        case int():
            return value + 1
        case bytes() | memoryview() if len(value):
            return type(value)(b"\xff" * 64 + bytes(value)[64:])
        case bytes() | memoryview():
            return type(value)(b"\xff")
        case tuple():
            return value[:-1] if value else (7,)
    raise TypeError(value)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_field_that_changes_is_named(example) -> None:
    message = EXAMPLES[example]
    assert compare(message, message).unlike == []
    for name in (field.name for field in fields(message)):
        if (example, name) == ("begin", "message"):
            continue  # a text may go on: see below
        (unlike,) = compare(
            message, replace(message, **{name: other(getattr(message, name))})
        ).unlike
        shown = {"data": "shard", "telemetry": "telemetry_count"}.get(name, name)
        assert unlike.field.startswith((shown, "logits"))


def test_every_field_of_telemetry_but_its_times_is_compared() -> None:
    result = EXAMPLES["ack"]
    final, relay = result.telemetry
    for place, record in ((0, final), (1, relay)):
        compared = set()
        for name in Telemetry.__slots__:
            records = list(result.telemetry)
            records[place] = replace(record, **{name: getattr(record, name) + 1})
            if compare(result, replace(result, telemetry=tuple(records))).unlike:
                compared.add(name)
        times = {"eval_usec"} | ({"downstream_wait_usec", "forward_send_usec"} if place else set())
        assert compared == set(Telemetry.__slots__) - times


def test_another_message_is_named_with_its_words() -> None:
    (unlike,) = compare(EXAMPLES["hello"], EXAMPLES["error"]).unlike
    assert (unlike.field, unlike.expected) == ("message", "Hello")
    assert "context too small" in unlike.got


def test_a_text_may_go_on_and_nothing_else() -> None:
    error = EXAMPLES["error"]
    assert not compare(error, ErrorText(error.message + b"; do this")).unlike
    assert compare(error, ErrorText(error.message[:-1])).unlike


@pytest.mark.parametrize("part", ["logits", "hidden"])
def test_numbers_may_be_near_but_not_far(part) -> None:
    result = EXAMPLES[part]
    values = np.frombuffer(result.payload, "<f4" if part == "logits" else np.uint8)
    near, far = values.copy(), values.copy()
    near[:2] += 1 if part == "hidden" else 0.3
    far[:400] += 6
    assert not compare(result, replace(result, payload=memoryview(near.tobytes()))).unlike
    assert compare(result, replace(result, payload=memoryview(far.tobytes()))).unlike


def test_numbers_that_are_none_are_far() -> None:
    result = EXAMPLES["logits"]
    nan = np.full(result.payload.nbytes // 4, np.nan, "<f4")
    assert compare(result, replace(result, payload=nan.data.cast("B"))).unlike


def test_relayed_numbers_are_equal() -> None:
    result = message_of("prefill_3hop_32", Result, 4)
    assert len(result.telemetry) == 2
    values = np.frombuffer(result.payload, "<f4").copy()
    values[7] = np.nextafter(values[7], np.float32(9))
    (unlike,) = compare(result, replace(result, payload=values.data.cast("B"))).unlike
    assert unlike.field == "payload[28]"


def test_many_numbers_at_the_limit_are_not_typical() -> None:
    assert not settle({"logits": [0.03, 0.03, 0.39]}).unlike
    assert settle({"logits": [0.03, 0.39, 0.39]}).unlike


# --- a party that does something else -------------------------------------------------------------


def differences(name: str, party: str, **changes: object) -> str:
    report = replay(replace(load(name), **changes), party)  # type: ignore[arg-type]
    assert report.differences
    return "\n".join(report.differences)


@pytest.fixture
def hasty(monkeypatch) -> None:
    """What does not come soon does not come."""
    monkeypatch.setattr(performance, "DEADLINE", 1.5)


def test_a_coordinator_that_packs_cuts_or_asks_otherwise_is_caught(hasty) -> None:
    assert "input_hc_bits: expected 32, got 16" in differences("decode_1hop", COORDINATOR, bits=16)
    found = differences("hidden_return_32", COORDINATOR, chunk=20)
    assert "tokens: expected" in found
    assert "flags: expected" in found
    scenario = load("decode_1hop")
    first, *rest = scenario.calls
    wrong = replace(first, tokens=(*first.tokens[:-1], 7))
    found = differences("decode_1hop", COORDINATOR, calls=(wrong, *rest))
    assert "ctlA-0 Work 0x1: result_hash" in found


def test_a_worker_with_another_context_or_slice_is_caught() -> None:
    assert "ctx_size: expected 512, got 256" in differences("register", WORKERS[0], worker_ctx=256)
    layers = {WORKERS[0]: "2:4"}
    found = differences("decode_1hop", WORKERS[0], worker_layers=layers)
    assert "layer_end: expected 5, got 4" in found
    assert "status: expected 0, got 1" in found


def test_a_coordinator_with_too_much_in_flight_is_caught(monkeypatch) -> None:
    monkeypatch.setattr(chunk_planner, "window_size", lambda *_: 5)
    found = differences("prefill_3hop_32", COORDINATOR)
    assert found == "ctlA-0 Result 0x1: spans in flight: expected at most 4, got more"


def test_a_coordinator_that_waits_too_early_is_caught(monkeypatch, hasty) -> None:
    monkeypatch.setattr(chunk_planner, "window_size", lambda *_: 2)
    assert "ctlA-0 Work 0x3: event" in differences("prefill_3hop_32", COORDINATOR)


def test_a_party_that_says_nothing_ends_the_replay(hasty) -> None:
    found = differences("decode_1hop", COORDINATOR, calls=())
    assert found.count("\n") == 0
    assert found.startswith("ctlA-0 Work 0x1: event")


def test_the_command_shows_a_table_and_fails_if_something_differs(monkeypatch, capsys) -> None:
    assert command.main(["register_rejected"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("scenario")
    assert [line.split()[-4:] for line in table[1:3]] == [["1", "1", "1", "0"]] * 2
    monkeypatch.setattr(command, "load", lambda name: replace(load(name), worker_ctx=64))
    assert command.main(["register_rejected"]) == 1
    assert "ctlA-0 Hello: ctx_size: expected 128, got 64" in capsys.readouterr().out
