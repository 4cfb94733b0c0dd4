"""Statements 72 to 80: how a prompt is cut, what is in flight, which answers are taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest

from ds4py.config import PrefillTuning, read_environment
from ds4py.errors import RouteIncompleteError
from tests.clusters import cluster
from tests.conformance.statements.coordinators import coordinator_of
from tests.conformance.statements.peer import (
    ACK,
    ACK_ONLY,
    HASTY,
    HIDDEN_STATE,
    INIT,
    INPUT_HC,
    LOGITS,
    OUTPUT_LOGITS,
    RESET,
    RESULT,
    SOME_LOGITS,
    Asked,
    Peer,
    Scene,
    driven,
    enlisted,
    pack_rows,
    result,
    token_hash,
)
from tests.fake_runner import N_VOCAB, WIDTH, card, fake_head, reference_logits
from tests.sockets import Background

SEVEN = [5, 80, 3, 3, 41, 9, 77]
SINGLE = INPUT_HC | OUTPUT_LOGITS
"""Flags of a span for an output worker that needs nothing cleared."""


def output_worker(**options: object):
    """A coordinator with layers 0 and 1, and its worker of the others with the head."""
    return driven(local="0-1", introduction={"layer_start": 2}, **options)  # type: ignore[arg-type]


def headless_worker(**options: object):
    """A coordinator with layers 0 and 1 and the head, and its worker of the others."""
    introduction: dict[str, int | bytes] = {"layer_start": 2, "has_output": 0}
    return driven(local="0-1", head=True, introduction=introduction, **options)  # type: ignore[arg-type]


def good(asked: Asked) -> bytes:
    """What a stage would answer."""
    return result(asked, ACK, b"", 0) if asked.flags & ACK_ONLY else result(asked)


def answered(peer: Peer, n: int, call: Callable[[], object]) -> list[Asked]:
    """Make a call that takes `n` spans and answer them one by one; return the spans."""
    running, asked = Background(call), []
    for _ in range(n):
        asked.append(peer.asked())
        peer.send(RESULT, good(asked[-1]))
    running.result()
    assert peer.hears_nothing(0.01)
    return asked


def rows_of(n: int) -> np.ndarray:
    return np.arange(n * WIDTH, dtype=np.float32).reshape(n, WIDTH)


def hidden(asked: Asked, n_rows: int, bits: int = 32) -> bytes:
    """A RESULT with some rows."""
    return result(asked, HIDDEN_STATE, pack_rows(rows_of(n_rows), bits), bits)


def is_lost(peer: Peer, running: Background) -> bool:
    """Whether the answer ended the connection, and the call with it."""
    assert peer.ended()
    with pytest.raises(RouteIncompleteError):
        running.result()
    return True


# --- 72 to 76: the spans of a prompt --------------------------------------------------------------


@pytest.mark.parametrize(("n_tokens", "chunk"), [(1, 1), (3, 4), (4, 4), (7, 100)])
def test_statement_072_a_span_of_one_chunk(n_tokens: int, chunk: int) -> None:
    """A span that fits into one chunk is sent as a decode is: no ACK, and rows may answer it."""
    with output_worker(head=True, chunk=chunk) as (_, peer, session):
        running = Background(lambda: session.sync(SEVEN[:n_tokens]))
        asked = peer.asked()
        assert (asked.n_tokens, asked.flags) == (n_tokens, SINGLE | RESET)
        peer.send(RESULT, hidden(asked, n_tokens))
        np.testing.assert_array_equal(running.result().logits, fake_head(rows_of(n_tokens)[-1]))


def test_statement_072_one_token_more() -> None:
    """A span one token longer than a chunk is pipelined: both chunks leave before an answer."""
    with output_worker(chunk=4) as (_, peer, session):
        running = Background(lambda: session.sync(SEVEN[:5]))
        asked = [peer.asked(), peer.asked()]
        assert [one.n_tokens for one in asked] == [4, 1]
        assert [one.flags & ACK_ONLY for one in asked] == [ACK_ONLY, 0]
        for one in asked:
            peer.send(RESULT, good(one))
        running.result()


def test_statement_072_the_length_of_a_suffix_counts() -> None:
    """A prompt longer than a chunk, of which a chunk is missing, is not pipelined."""
    with output_worker(chunk=4) as (_, peer, session):
        answered(peer, 1, lambda: session.sync(SEVEN[:3]))
        (asked,) = answered(peer, 1, lambda: session.sync(SEVEN))
        assert (asked.pos0, asked.n_tokens, asked.flags) == (3, 4, SINGLE)


def in_flight(peer: Peer, n: int) -> list[Asked]:
    """Take all spans that come without an answer, which must be `n`."""
    asked = [peer.asked() for _ in range(n)]
    assert peer.hears_nothing()
    return asked


def test_statement_073_seven_tokens_in_chunks_of_two() -> None:
    """For 7 tokens, chunks of 2 and an output worker the flags are 0xf, 0xb, 0xb and 0x3."""
    with output_worker(chunk=2) as (_, peer, session):
        running = Background(lambda: session.sync(SEVEN))
        asked = in_flight(peer, 3)
        peer.send(RESULT, good(asked[0]))
        asked += in_flight(peer, 1)
        for one in asked[1:]:
            peer.send(RESULT, good(one))
        np.testing.assert_array_equal(running.result().logits, np.arange(N_VOCAB))
    assert [one.flags for one in asked] == [0xF, 0xB, 0xB, 0x3]
    assert [one.pos0 for one in asked] == [0, 2, 4, 6]
    assert [one.tokens for one in asked] == [(5, 80), (3, 3), (41, 9), (77,)]
    assert [one.request_id for one in asked] == [1, 2, 3, 4]
    ends = [token_hash(SEVEN[:n]) for n in (2, 4, 6, 7)]
    assert [one.prefix_hash for one in asked] == [INIT, *ends[:3]]
    assert [one.result_hash for one in asked] == ends


@contextmanager
def hops(n_hops: int, n_layers: int = 9, **prefill: object) -> Iterator[Scene]:
    """A coordinator and its workers of one layer each, the last one of all others."""
    config = replace(HASTY, prefill=PrefillTuning(**prefill))  # type: ignore[arg-type]
    with ExitStack() as stack:
        c = stack.enter_context(coordinator_of(card(n_layers), config))
        peers = [
            stack.enter_context(
                enlisted(
                    c,
                    n_layers=n_layers,
                    layer_start=hop,
                    layer_end=n_layers - 1 if hop == n_hops - 1 else hop,
                    has_output=int(hop == n_hops - 1),
                    listen_port=7000 + hop,
                )
            )
            for hop in range(n_hops)
        ]
        yield Scene(c, peers[0], stack.enter_context(c.backend.lease(SEVEN)))


def test_statement_073_a_middle_hop() -> None:
    """A first hop without the head sees the same flags without OUTPUT_LOGITS."""
    with hops(2, chunk=2) as (_, peer, session):
        flags = [one.flags for one in answered(peer, 4, lambda: session.sync(SEVEN))]
    # as in the table, less INPUT_HC: this hop has layer 0
    assert flags == [0xC, 0x8, 0x8, 0x0]


def test_statement_073_real_workers() -> None:
    """A pipelined prefill of real workers says what one process says."""
    with cluster(["2-3", "4-5"], local="0-1", chunk=2) as c, c.backend.lease(SEVEN) as session:
        c.wait_ready()
        np.testing.assert_array_equal(session.sync(SEVEN).logits, reference_logits(SEVEN))
        assert all(runner.evaluated == [(0, 2), (2, 2), (4, 2), (6, 1)] for runner in c.runners)


@pytest.mark.parametrize(
    ("n_hops", "n_chunks", "window"),
    [(1, 12, 3), (2, 12, 4), (5, 12, 7), (6, 12, 8), (7, 12, 8), (9, 12, 8), (1, 2, 2), (9, 5, 5)],
)
def test_statement_074_the_default_window(n_hops: int, n_chunks: int, window: int) -> None:
    """As many chunks are unanswered as there are hops, and two more: at most 8, at most all.

    The lower bound of 2 needs a route without hops, which sends nothing.
    """
    with hops(n_hops, chunk=1) as (_, peer, session):
        running = Background(lambda: session.sync([*SEVEN, *SEVEN][:n_chunks]))
        asked = in_flight(peer, window)
        for n in range(n_chunks):
            peer.send(RESULT, good(asked[n]))
            if len(asked) < n_chunks:
                asked.append(peer.asked())
        running.result()


@pytest.mark.parametrize(("given", "window"), [(1, 1), (2, 2), (64, 7)])
def test_statement_074_a_given_window(given: int, window: int) -> None:
    """A window that is given holds in place of the default, up to the number of chunks."""
    with output_worker(chunk=1, window=given) as (_, peer, session):
        running = Background(lambda: session.sync(SEVEN))
        asked = in_flight(peer, window)
        for n in range(7):
            peer.send(RESULT, good(asked[n]))
            asked += in_flight(peer, 1) if len(asked) < 7 else []
        running.result()


@pytest.mark.parametrize("chunk", [1, 2, 3, 6, 7])
def test_statement_075_the_last_chunk_is_answered(chunk: int) -> None:
    """Every chunk but the last asks for an ACK, of a whole prompt as well as of a suffix."""
    for n_tokens in range(1, 8):
        with output_worker(chunk=chunk) as (_, peer, session):
            for start, end in ((0, n_tokens), (n_tokens, n_tokens + 5)):
                tokens = [*SEVEN, *SEVEN][:end]
                n = -(-(end - start) // chunk)
                asked = answered(peer, n, lambda tokens=tokens: session.sync(tokens))
                acks = [one.flags & ACK_ONLY for one in asked]
                assert acks == [ACK_ONLY] * (n - 1) + [0]


def test_statement_075_acks_may_be_forbidden() -> None:
    """With DS4_DIST_DISABLE_PREFILL_ACK_ONLY no chunk asks for an ACK, though they overlap."""
    tuning = read_environment({"DS4_DIST_DISABLE_PREFILL_ACK_ONLY": ""}).prefill
    assert (tuning.ack_only, tuning.pipeline) == (False, True)
    with output_worker(chunk=2, ack_only=False) as (_, peer, session):
        running = Background(lambda: session.sync(SEVEN[:5]))
        asked = in_flight(peer, 3)
        assert [one.flags for one in asked] == [SINGLE | RESET, SINGLE, SINGLE]
        for one in asked:
            peer.send(RESULT, good(one))
        running.result()


@pytest.mark.parametrize("n_cached", [1, 2, 3])
def test_statement_076_a_suffix(n_cached: int) -> None:
    """What is cached is not sent again: the suffix starts behind it, and nothing is reset."""
    with output_worker(chunk=2) as (_, peer, session):
        answered(peer, -(-n_cached // 2), lambda: session.sync(SEVEN[:n_cached]))
        n = -(-(7 - n_cached) // 2)
        asked = answered(peer, n, lambda: session.sync(SEVEN))
        assert [one.pos0 for one in asked] == [*range(n_cached, 7, 2)]
        assert asked[0].prefix_hash == token_hash(SEVEN[:n_cached])
        assert [one.flags for one in asked] == [SINGLE | ACK_ONLY] * (n - 1) + [SINGLE]
        assert [token for one in asked for token in one.tokens] == SEVEN[n_cached:]


def test_statement_076_nothing_is_missing() -> None:
    """A prompt that is cached whole asks no worker."""
    with output_worker() as (_, peer, session):
        answered(peer, 1, lambda: session.sync(SEVEN))
        assert session.sync(SEVEN).n_cached == 7
        assert peer.hears_nothing()


def test_statement_076_another_prompt() -> None:
    """A prompt that the cached tokens are no prefix of is sent from the start, with a reset."""
    with output_worker(chunk=4) as (_, peer, session):
        answered(peer, 2, lambda: session.sync(SEVEN))
        (asked,) = answered(peer, 1, lambda: session.sync([6, 80, 3]))
        assert (asked.pos0, asked.flags & RESET) == (0, RESET)


# --- 77 to 80: the answers (docs/spec/wire-protocol.md#accepted-results, #decode) -----------------


def chunks(scene: Scene, n: int = 2) -> tuple[Background, list[Asked]]:
    """Begin a pipelined prefill of `n` chunks and take them all."""
    running = Background(lambda: scene.session.sync(SEVEN[: 2 * n]))
    return running, [scene.peer.asked() for _ in range(n)]


def test_statement_077_an_ack_for_the_last_chunk() -> None:
    """The last chunk of a prompt cannot be answered with an ACK, those before it can."""
    with output_worker(chunk=2) as scene:
        running, asked = chunks(scene)
        for one in asked:
            scene.peer.send(RESULT, result(one, ACK, b"", 0))
        assert is_lost(scene.peer, running)


@pytest.mark.parametrize("tokens", [SEVEN, SEVEN[:1]])
def test_statement_077_an_ack_for_a_single_span(tokens: Sequence[int]) -> None:
    """A span on its own cannot be answered with an ACK."""
    with output_worker() as (_, peer, session):
        running = Background(lambda: session.sync(tokens))
        peer.send(RESULT, result(peer.asked(), ACK, b"", 0))
        assert is_lost(peer, running)


def test_statement_077_an_ack_for_a_decode() -> None:
    """A decoded token cannot be answered with an ACK."""
    with output_worker() as (_, peer, session):
        answered(peer, 1, lambda: session.sync(SEVEN))
        running = Background(lambda: session.eval(7))
        peer.send(RESULT, result(peer.asked(), ACK, b"", 0))
        assert is_lost(peer, running)


Answers = Callable[[Asked], bytes]
LATE_ROWS: Answers = lambda one: hidden(one, one.n_tokens)  # noqa: E731

# table docs/spec/wire-protocol.md#accepted-results: (answer to the first chunk, whether it is
# taken)
CHUNK_ANSWERS: dict[str, tuple[Answers, bool]] = {
    "ack": (lambda one: result(one, ACK, b"", 0), True),
    "ack with a payload": (lambda one: result(one, ACK, b"1234", 0), False),
    "logits": (lambda one: result(one, LOGITS, SOME_LOGITS), True),
    "logits of any width": (lambda one: result(one, LOGITS, SOME_LOGITS, 8), True),
    "short logits": (lambda one: result(one, LOGITS, SOME_LOGITS[4:]), False),
    "no logits": (lambda one: result(one, LOGITS, b""), False),
    "unknown": (lambda one: result(one, 3, b""), False),
}
ROWS: dict[str, tuple[Answers, bool]] = {
    "rows": (LATE_ROWS, True),
    "rows of 16 bits": (lambda one: hidden(one, one.n_tokens, 16), True),
    "too few rows": (lambda one: hidden(one, one.n_tokens - 1), False),
    "too many rows": (lambda one: hidden(one, one.n_tokens + 1), False),
    "no rows": (lambda one: result(one, HIDDEN_STATE, b""), False),
}
OF_HEADLESS = CHUNK_ANSWERS | ROWS
OF_OWNER = CHUNK_ANSWERS | {name: (answer, False) for name, (answer, _) in ROWS.items()}


def first_chunk_is_taken(scene: Scene, answer: Answers, last: Answers) -> bool:
    """Answer two chunks, the second one well; whether the call succeeds."""
    running, asked = chunks(scene)
    scene.peer.send(RESULT, answer(asked[0]))
    with suppress(OSError):  # the coordinator may have closed on the first answer
        scene.peer.send(RESULT, last(asked[1]))
    try:
        running.result()
    except RouteIncompleteError:
        assert scene.peer.ended()
        return False
    return True


@pytest.mark.parametrize(("answer", "taken"), OF_OWNER.values(), ids=OF_OWNER)
def test_statement_078_answers_of_an_output_owner(answer: Answers, taken: bool) -> None:
    """A chunk is answered with an ACK or logits; rows are refused if the last hop has the head."""
    with output_worker(chunk=2, head=True) as scene:
        assert first_chunk_is_taken(scene, answer, good) == taken


@pytest.mark.parametrize(("answer", "taken"), OF_HEADLESS.values(), ids=OF_HEADLESS)
def test_statement_078_answers_of_a_headless_hop(answer: Answers, taken: bool) -> None:
    """A chunk may be answered with its rows as well if the last hop has no head."""
    with headless_worker(chunk=2) as scene:
        assert first_chunk_is_taken(scene, answer, LATE_ROWS) == taken


def test_statement_078_rows_for_the_last_chunk() -> None:
    """Rows for the last chunk are refused if the last hop has the head, and taken otherwise."""
    with output_worker(chunk=2, head=True) as scene:
        running, asked = chunks(scene)
        scene.peer.send(RESULT, good(asked[0]))
        scene.peer.send(RESULT, hidden(asked[1], 2))
        assert is_lost(scene.peer, running)
    with headless_worker(chunk=2) as scene:
        running, asked = chunks(scene)
        assert [one.flags for one in asked] == [INPUT_HC | RESET | ACK_ONLY, INPUT_HC]
        scene.peer.send(RESULT, good(asked[0]))
        scene.peer.send(RESULT, hidden(asked[1], 2))
        np.testing.assert_array_equal(running.result().logits, fake_head(rows_of(2)[1]))


def test_statement_079_without_a_pipeline() -> None:
    """With DS4_DIST_DISABLE_PREFILL_PIPELINE spans leave one by one, and none asks for an ACK."""
    assert not read_environment({"DS4_DIST_DISABLE_PREFILL_PIPELINE": ""}).prefill.pipeline
    with output_worker(chunk=3, pipeline=False) as (_, peer, session):
        seen: list[tuple[int, int]] = []
        running = Background(lambda: session.sync(SEVEN, progress=lambda *at: seen.append(at)))
        flags = []
        for n in range(3):
            (asked,) = in_flight(peer, 1)
            flags.append(asked.flags)
            assert seen == [(3, 7), (6, 7)][:n]
            peer.send(RESULT, result(asked))
        running.result()
    assert flags == [SINGLE | RESET, SINGLE, SINGLE]
    assert seen == [(3, 7), (6, 7), (7, 7)]


def test_statement_079_an_ack_without_a_pipeline() -> None:
    """Without a pipeline an ACK answers no span, not even one in the middle of a prompt."""
    with output_worker(chunk=3, pipeline=False) as (_, peer, session):
        running = Background(lambda: session.sync(SEVEN))
        peer.send(RESULT, result(peer.asked(), ACK, b"", 0))
        assert is_lost(peer, running)


def test_statement_080_a_decode() -> None:
    """A decode sends one token behind the cached ones, and nothing else until it is answered."""
    with output_worker(chunk=2) as (_, peer, session):
        answered(peer, 4, lambda: session.sync(SEVEN))
        line = list(SEVEN)
        for token in (11, 0, 96):
            running = Background(lambda token=token: session.eval(token))
            (asked,) = in_flight(peer, 1)
            assert (asked.pos0, asked.tokens, asked.flags) == (len(line), (token,), SINGLE)
            assert asked.prefix_hash == token_hash(line)
            line.append(token)
            assert asked.result_hash == token_hash(line)
            peer.send(RESULT, result(asked))
            np.testing.assert_array_equal(running.result(), np.arange(N_VOCAB))


@pytest.mark.parametrize("bits", [32, 16, 8])
@pytest.mark.parametrize("worker", [output_worker, headless_worker])
def test_statement_080_one_row(worker: Callable, bits: int) -> None:
    """A decode may be answered with one row in any width, whether the last hop has the head."""
    with worker(**({"head": True} if worker is output_worker else {})) as (_, peer, session):
        answered(peer, 1, lambda: session.sync(SEVEN))
        running = Background(lambda: session.eval(11))
        peer.send(RESULT, hidden(peer.asked(), 1, bits))
        row = rows_of(1)[0] if bits > 8 else np.zeros(WIDTH, np.float32)
        np.testing.assert_array_equal(running.result(), fake_head(row))


@pytest.mark.parametrize(
    "answer",
    [
        lambda one: hidden(one, 2),
        lambda one: result(one, HIDDEN_STATE, b""),
        lambda one: result(one, LOGITS, SOME_LOGITS[4:]),
        lambda one: result(one, LOGITS, SOME_LOGITS + bytes(4)),
    ],
    ids=["two rows", "no row", "too few logits", "too many logits"],
)
def test_statement_080_no_row_and_no_logits(answer: Answers) -> None:
    """A decode is not answered with another number of rows or logits."""
    with headless_worker() as (_, peer, session):
        answered(peer, 1, lambda: session.sync(SEVEN))
        running = Background(lambda: session.eval(11))
        peer.send(RESULT, answer(peer.asked()))
        assert is_lost(peer, running)


def test_statement_080_a_row_that_nobody_can_use() -> None:
    """A row for a coordinator that has no head is no answer, and costs the worker its place."""
    with driven() as (_, peer, session):
        running = Background(lambda: session.sync(SEVEN))
        peer.send(RESULT, hidden(peer.asked(), 7))
        assert is_lost(peer, running)
