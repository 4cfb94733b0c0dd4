"""What the RESULT of a chunk is worth to the run that sent it.

Owns: the table of docs/spec/wire-protocol.md#result in its order, the logits in an answer, whether
one that is not admitted costs the connection. Refuses to know: windows, waiting. Invariant: no byte
of an answer is used before it was compared with what was asked; the first failing row decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np

from ds4py.activations import F32, WIDTHS, HiddenBatch
from ds4py.contracts import ModelCard
from ds4py.coordinator.chunked_prefill import Chunk
from ds4py.coordinator.relay.hop import HopReply
from ds4py.coordinator.relay.profile import RunProfile
from ds4py.coordinator.relay.route import Route
from ds4py.errors import Ds4Error, PeerClosedError, RemoteWorkError
from ds4py.stage.executor import wait_for
from ds4py.tracing.events import now_usec
from ds4py.wire.frames import MAX_U32
from ds4py.wire.messages import Result, ResultKind

Faults = Iterator[tuple[str, str]]
"""(class name of the spec, what is wrong), the first one counts."""


class Awaited(Enum):
    """Which answers a span admits (docs/spec/wire-protocol.md#accepted-results, #decode)."""

    CHUNK = "a chunk of a pipelined prefill, not the last"
    LAST_CHUNK = "the last chunk of a pipelined prefill"
    SPAN = "a single span: decode, or prefill without a pipeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedResult:
    """What a RESULT is compared with.

    Args:
        result_hash: Of the WORK.
        n_tokens: Of the WORK.
        n_vocab: Vocabulary size.
        hidden_width: Values per token.
        awaited: Which answers are admitted.
        final_has_output: The route's final entry has the output flag.
    """

    result_hash: int
    n_tokens: int
    n_vocab: int
    hidden_width: int
    awaited: Awaited
    final_has_output: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedResult:
    """A good answer.

    Args:
        kind: What came.
        payload: Little-endian f32 logits, a packed hidden state, or nothing; a view.
        hidden: The hidden state `[T, W]` in the width that the worker chose.
    """

    kind: ResultKind
    payload: memoryview
    hidden: HiddenBatch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedResult:
    """A bad answer.

    Args:
        cause: "remote": the stage refused or failed, replay on the same route. "transport": the
            answer cannot be trusted, the connection must go.
        kind: Class name of the spec; "R-STATUS" for row 7.
        text: The stage's own words, or what is wrong with the answer.
    """

    cause: Literal["remote", "transport"]
    kind: str
    text: str


def check_result(result: Result, expected: ExpectedResult) -> AcceptedResult | FailedResult:
    """Go through rows 7 to 10 of wire-protocol.md#result; rows 1 to 6 are reading and matching."""
    if result.status != 0:
        return FailedResult(cause="remote", kind="R-STATUS", text=result.text or "(no reason)")
    for kind, text in _result_faults(result, expected):
        return FailedResult(cause="transport", kind=kind, text=text)
    kind_of = ResultKind(result.result_kind)
    hidden = None
    if kind_of is ResultKind.HIDDEN_STATE:
        bits = result.payload_bits or 32
        hidden = HiddenBatch(expected.n_tokens, expected.hidden_width, bits, result.payload)
    return AcceptedResult(kind=kind_of, payload=result.payload, hidden=hidden)


def _result_faults(result: Result, expected: ExpectedResult) -> Faults:
    size, bits = result.payload.nbytes, result.payload_bits or 32
    is_hidden = result.result_kind == ResultKind.HIDDEN_STATE
    if is_hidden and size:
        if bits not in WIDTHS:
            yield "R-DECODE", f"RESULT hidden-state of {bits} bits, expected 32, 16 or 8"
        if size % (bits // 8) or size * 32 // bits > MAX_U32:
            yield "R-DECODE", f"RESULT hidden-state of {size} bytes cannot be {bits}-bit values"
    if result.result_hash != expected.result_hash:
        got = f"{result.result_hash:016x}, expected {expected.result_hash:016x}"
        yield "R-HASH", f"RESULT is for another prefix: hash {got}"
    if not _admitted(result, expected, decoded_bytes=size * 32 // bits if is_hidden else size):
        yield (
            "R-KIND",
            f"RESULT of kind {result.result_kind} with {size} bytes does not answer "
            f"{expected.awaited.value} of {expected.n_tokens} tokens",
        )


def _admitted(result: Result, expected: ExpectedResult, *, decoded_bytes: int) -> bool:
    """Row 10: whether the kind and size answer this request."""
    match result.result_kind:
        case ResultKind.ACK:
            return decoded_bytes == 0 and expected.awaited is Awaited.CHUNK
        case ResultKind.LOGITS:
            return decoded_bytes == 4 * expected.n_vocab
        case ResultKind.HIDDEN_STATE:
            pipelined = expected.awaited is not Awaited.SPAN
            if pipelined and expected.final_has_output:
                return False
            return decoded_bytes == 4 * expected.n_tokens * expected.hidden_width
        case _:
            return False


class AnswerReader:
    """Reads the answers of one run.

    Args:
        route: Who answers.
        card: The model.
        profile: Where times are left, if anywhere.
        pipelined: Whether chunks overlap, which decides the admitted answers.
        timeout: Seconds that the coordinator's own device may take for the output head.
    """

    def __init__(
        self,
        route: Route,
        card: ModelCard,
        profile: RunProfile | None,
        *,
        pipelined: bool,
        timeout: float,
    ):
        self._route = route
        self._card = card
        self._pipelined = pipelined
        self._timeout = timeout
        self._profile = profile

    def read(self, chunk: Chunk, reply: HopReply) -> F32 | None:
        """Check one answer; return logits f32 `[n, V]` if the chunk asks for some.

        Raises:
            RemoteWorkError: The stage refused or failed.
            PeerClosedError: The answer cannot be trusted; the link is closed.
        """
        result = reply.result
        assert isinstance(result, Result)
        verdict = check_result(result, self._expected(chunk))
        if isinstance(verdict, FailedResult):
            raise self._failure(verdict)
        self._route.telemetry.record(
            result.telemetry,
            stages=[(hop.layers.start, hop.layers.end) for hop in self._route.hops],
            first_wait_usec=reply.wait_usec,
        )
        if self._profile is not None:
            self._profile.answered(chunk, reply.request_id, reply.wait_usec, result)
        if not chunk.n_logits:
            return None
        if verdict.hidden is None:
            return np.frombuffer(verdict.payload, "<f4")[None]
        began = now_usec()
        logits = self._apply_head(verdict.hidden, chunk.n_logits)
        if self._profile is not None:
            self._profile.head(chunk, began)
        return logits

    def _apply_head(self, hidden: HiddenBatch, n_rows: int) -> F32:
        """Take hidden states for logits; a peer may send some where nobody can use them."""
        local = self._route.local
        if local is None or not self._route.local_head:
            text = "hidden states, expected logits: this coordinator has no output head"
            raise self._failure(FailedResult(cause="transport", kind="R-KIND", text=text))
        ends = range(hidden.rows - n_rows + 1, hidden.rows + 1)
        rows = [local.apply_head(hidden.head(end)) for end in ends]
        return np.stack([wait_for(row, self._timeout) for row in rows])

    def _expected(self, chunk: Chunk) -> ExpectedResult:
        if not self._pipelined:
            awaited = Awaited.SPAN
        else:
            awaited = Awaited.LAST_CHUNK if chunk.n_logits else Awaited.CHUNK
        return ExpectedResult(
            result_hash=chunk.result_hash,
            n_tokens=len(chunk.tokens),
            n_vocab=self._card.n_vocab,
            hidden_width=self._card.hidden_width,
            awaited=awaited,
            final_has_output=self._route.last_has_output,
        )

    def _failure(self, verdict: FailedResult) -> Ds4Error:
        """Return the error of a bad answer; one that cannot be trusted ends the link."""
        link = self._route.link
        assert link is not None
        if verdict.cause == "remote":
            return RemoteWorkError(verdict.text, hop=self._route.hops[0].name)
        link.close(verdict.text)
        return PeerClosedError(verdict.text, peer=str(link.connection.peer))
