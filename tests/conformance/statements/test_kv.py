"""Statements 38 to 44: which spans may continue a session, and how long it lives.

See docs/spec/wire-protocol.md#kv-sessions, #hash-checks, #evaluation-checks.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ds4py.contracts import ForwardRequest
from ds4py.worker import worker as worker_module
from tests.conformance.statements.peer import (
    BEGIN,
    HELLO,
    INIT,
    OUTPUT_LOGITS,
    RESET,
    SAVE_REQ,
    WHOLE,
    Answer,
    Peer,
    dial,
    door,
    driving,
    token_hash,
    work,
    worker,
)
from tests.fake_runner import card, reference_logits

HELD = [5, 80, 3]
NO_RESET = OUTPUT_LOGITS


def logits_are(answer: Answer, line: list[int]) -> None:
    np.testing.assert_array_equal(np.frombuffer(answer.payload, "<f4"), reference_logits(line))


def continues(peer: Peer, held: list[int], tokens: list[int], **changes: int) -> None:
    """Evaluate a span after `held` and compare with one process that evaluates all."""
    logits_are(peer.check(work(WHOLE, tokens, held, **changes)), [*held, *tokens])


def mismatched(peer: Peer, tokens: list[int], after: list[int], **changes: int) -> None:
    assert peer.refused(work(WHOLE, tokens, after, **changes)) == "worker KV prefix hash mismatch"


# (tokens that the sender believes to be cached, position): the worker has cached `HELD`
OTHERS = [([9, 9, 9], 3), ([5, 80], 3), ([9], 0), ([5, 80, 3, 4], 4), ([9, 9], 2)]


@pytest.mark.parametrize("can_rewind", [False, True])
@pytest.mark.parametrize(("believed", "pos0"), OTHERS)
def test_statement_038_a_mismatch_changes_nothing(
    believed: list[int], pos0: int, can_rewind: bool
) -> None:
    """A span for another prefix than the cached one is refused, and the session goes on as it was.

    A prefix of the cached one is another matter, see the next test.
    """
    with driving(can_rewind=can_rewind) as peer:
        peer.check(work(WHOLE, HELD))
        mismatched(peer, [7], believed, pos0=pos0, flags=NO_RESET)
        continues(peer, HELD, [7])


def test_statement_038_a_shorter_prefix() -> None:
    """A span for a shorter prefix of the session is a mismatch to a stage that cannot be cut.

    Differs from C: a stage whose model allows it cuts its session there and goes on, where C asks
    for a replay. What it computes is what one process computes.
    """
    with driving(can_rewind=False) as peer:
        peer.check(work(WHOLE, HELD))
        mismatched(peer, [7], HELD[:2])
        continues(peer, HELD, [7])
    with driving(can_rewind=True) as peer:
        peer.check(work(WHOLE, HELD))
        continues(peer, HELD[:2], [7])


def test_statement_039_a_reset_stands_though_its_span_is_refused() -> None:
    """RESET_SESSION with another prefix than the empty one is refused, and empties the session."""
    with driving() as peer:
        peer.check(work(WHOLE, HELD))
        mismatched(peer, [7], HELD, flags=NO_RESET | RESET)
        mismatched(peer, [7], HELD)
        continues(peer, [], [8, 9], flags=NO_RESET)


def test_statement_039_a_reset_takes_no_effect_before_the_checks() -> None:
    """A WORK that wire-protocol.md#work refuses before it meets its session does not reset that."""
    with driving() as peer:
        peer.check(work(WHOLE, HELD))
        peer.refused(work(WHOLE, [7], flags=NO_RESET | RESET, result_hash=5))
        continues(peer, HELD, [7])


def test_statement_040_a_reset_starts_at_zero() -> None:
    """RESET_SESSION at another position than 0 is refused, whatever the hashes say."""
    with driving() as peer:
        peer.check(work(WHOLE, HELD))
        for prefix in (INIT, token_hash(HELD)):
            body = work(WHOLE, [7], HELD, prefix_hash=prefix, flags=NO_RESET | RESET)
            assert peer.refused(body)
        continues(peer, [], HELD, flags=NO_RESET)


@pytest.mark.parametrize("can_rewind", [False, True])
@pytest.mark.parametrize("pos0", [0, 2, 4, 60])
def test_statement_040_a_span_starts_where_the_session_ends(pos0: int, can_rewind: bool) -> None:
    """A right prefix hash at a wrong position is refused, and the session goes on."""
    with driving(can_rewind=can_rewind) as peer:
        assert peer.refused(work(WHOLE, HELD, pos0=pos0 or 1))
        peer.check(work(WHOLE, HELD))
        assert peer.refused(work(WHOLE, [7], HELD, pos0=pos0))
        continues(peer, HELD, [7])


@pytest.mark.parametrize("can_rewind", [False, True])
def test_statement_040_after_a_failed_evaluation(can_rewind: bool) -> None:
    """A session whose evaluation failed keeps its tokens, but needs a reset before any of them."""

    def fail_once(work: ForwardRequest) -> None:
        if work.tokens == (13,):
            raise RuntimeError("broken")

    with driving(before=fail_once, can_rewind=can_rewind) as peer:
        peer.check(work(WHOLE, HELD))
        peer.refused(work(WHOLE, [13], HELD))
        mismatched(peer, [7], [9, 9, 9])
        assert "reset" in peer.refused(work(WHOLE, [7], HELD))
        mismatched(peer, [7], HELD[:2])
        mismatched(peer, HELD, [], flags=NO_RESET)
        continues(peer, [], [8])


def test_statement_041_a_new_session_needs_no_reset() -> None:
    """The first span of a new session is accepted at position 0 without RESET_SESSION."""
    with driving() as peer:
        continues(peer, [], HELD, flags=NO_RESET)
        continues(peer, HELD, [7])


def test_statement_042_sessions_outlive_a_control_connection(monkeypatch) -> None:
    """A session can be continued after its control connection has ended.

    Differs from C, as the same statement allows: C frees every session then. The prefix hash makes
    keeping them safe, and it spares the replay that fails in C (docs/spec/wire-protocol.md#quirks
    Q3).
    """
    monkeypatch.setattr(worker_module, "RECONNECT_PAUSE", 0.01)
    with door() as coordinator, worker(coordinator=coordinator.address, plain=True):
        first = coordinator.accept()
        first.expect(HELLO)
        first.check(work(WHOLE, HELD))
        first.sock.close()
        again = coordinator.accept()
        again.expect(HELLO)
        mismatched(again, [7], [9, 9, 9])
        continues(again, HELD, [7])


def test_statement_042_sessions_outlive_a_data_connection() -> None:
    """A session can be continued over another connection than the one that began it."""
    with worker() as w:
        with dial(w.address) as first:
            first.check(work(WHOLE, HELD))
        with dial(w.address) as second:
            continues(second, HELD, [7])


def test_statement_043_sessions_are_independent() -> None:
    """Two session ids have timelines of their own, also when their spans alternate."""
    with driving() as peer:
        lines: dict[int, list[int]] = {1: [], 2: [], 2**64 - 1: []}
        for step in range(6):
            for session, line in lines.items():
                tokens = [step + session % 7, 5]
                continues(peer, line, tokens, session_id=session)
                lines[session] = [*line, *tokens]
        mismatched(peer, [7], lines[1], session_id=2)
        peer.check(work(WHOLE, [4], session_id=1))
        continues(peer, lines[2], [7], session_id=2)


def test_statement_044_asking_for_a_shard_makes_no_session() -> None:
    """SAVE_REQ for an unknown session is refused and leaves no session behind."""
    fixed = (card().model_id, 5, 2**63, token_hash(()), 0, 0, 5)
    with worker(n_slots=1) as w, dial(w.address) as peer:
        for _ in range(3):
            peer.send(SAVE_REQ, struct.pack(">IQQQ3I", *fixed))
            begin = peer.expect(BEGIN)
            assert begin[:20] == struct.pack(">IQQ", *fixed[:3])
            assert begin[48:52] == struct.pack(">I", 1)
        assert len(w.stage.sessions) == 0
        continues(peer, [], HELD, session_id=1)
