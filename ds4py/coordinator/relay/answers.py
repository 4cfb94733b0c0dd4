"""What the RESULT of a chunk is worth to the run that sent it.

Owns: which answers are admitted (docs/spec/wire-protocol.md 2.4), the logits in them, whether an
answer that is not admitted costs the connection. Refuses to know: windows, waiting. Invariant: no
byte of an answer is used before it was compared with what was asked.
"""

from __future__ import annotations

import numpy as np

from ds4py.activations import F32, HiddenBatch
from ds4py.contracts import ModelCard
from ds4py.coordinator.chunked_prefill import Chunk
from ds4py.coordinator.relay.hop import HopReply
from ds4py.coordinator.relay.profile import RunProfile
from ds4py.coordinator.relay.route import Route
from ds4py.errors import Ds4Error, PeerClosedError, RemoteWorkError
from ds4py.peer.validation import Awaited, ExpectedResult, FailedResult, check_result
from ds4py.tracing.events import now_usec
from ds4py.wire.messages import Result


class AnswerReader:
    """Reads the answers of one run.

    Args:
        route: Who answers.
        card: The model.
        pipelined: Whether chunks overlap, which decides the admitted answers.
        profile: Where times are left, if anywhere.
    """

    def __init__(
        self, route: Route, card: ModelCard, profile: RunProfile | None, *, pipelined: bool
    ):
        self._route = route
        self._card = card
        self._pipelined = pipelined
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
        apply_head = self._route.apply_head
        if apply_head is None:
            text = "hidden states, expected logits: this coordinator has no output head"
            raise self._failure(FailedResult(cause="transport", kind="R-KIND", text=text))
        ends = range(hidden.rows - n_rows + 1, hidden.rows + 1)
        return np.stack([apply_head(hidden.head(end)) for end in ends])

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
