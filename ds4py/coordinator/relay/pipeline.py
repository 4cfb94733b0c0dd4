"""Send the spans of one prefill or decode over a route and collect the answers.

Owns: the loop of the thread that drives a session: fill the window, evaluate local layers, post,
wait, account. Refuses to know: timelines, replay, how routes are found. Invariant: when it returns
or raises, no request of its own is in flight, or the link that carried it is closed.

Where local layers can be given a span while they evaluate the one before it, they are: one is ahead
of what has left. After a cancellation it leaves as well if the layers could not forget it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from ds4py.activations import F32, HiddenBatch
from ds4py.contracts import (
    Cancelled,
    ForwardOutput,
    ModelCard,
    OutputKind,
    SessionId,
)
from ds4py.coordinator.chunked_prefill import Chunk, Window
from ds4py.coordinator.relay.hop import HopReply, Link, ReplyBox
from ds4py.coordinator.relay.profile import profile_run
from ds4py.coordinator.relay.route import Route
from ds4py.errors import (
    CancelledError,
    Ds4Error,
    PeerClosedError,
    RemoteWorkError,
    TransportError,
    TransportTimeoutError,
)
from ds4py.peer.validation import Awaited, ExpectedResult, FailedResult, check_result
from ds4py.stage.executor import wait_for
from ds4py.stage.session_table import StageRequest
from ds4py.stage.stage import Stage
from ds4py.tracing.events import now_usec
from ds4py.wire.extensions import CANCEL, Cancel
from ds4py.wire.messages import Result, Work

_CANCEL_POLL_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What one call needs besides its spans.

    Args:
        route: The stages.
        session: The timeline.
        card: The model.
        bits: Packing of hidden states on the wire.
        result_timeout: Seconds to wait for one answer.
        next_request_id: Source of request ids.
        decode_profile: Log where the time of one-token spans went.
    """

    route: Route
    session: SessionId
    card: ModelCard
    bits: int
    result_timeout: float
    next_request_id: Callable[[], int]
    decode_profile: bool = False


class _LocalChunk(NamedTuple):
    """A span that the own layers were given.

    Args:
        began: When, in microseconds.
        output: What becomes of it.
    """

    began: int
    output: Future[ForwardOutput]


class PipelinedRun:
    """One pass of consecutive spans over a route.

    Args:
        context: Where and how.
        chunks: In order; the last one answers with logits.
        window: Most spans in flight.
        pipelined: Whether spans overlap, which decides the admitted answers.
        completed: Called with the new number of leading spans that every stage has cached.
    """

    def __init__(
        self,
        context: RunContext,
        chunks: list[Chunk],
        *,
        window: int,
        pipelined: bool,
        completed: Callable[[int], None],
    ):
        self._context = context
        self._chunks = chunks
        self._size = window
        self._window = Window(len(chunks), window)
        self._pipelined = pipelined
        self._completed = completed
        self._box: ReplyBox = ReplyBox()
        self._index_of: dict[int, int] = {}
        self._logits: F32 | None = None
        self._cancelled: Cancelled | None = None
        self._answer_due = 0.0
        self._posting = threading.Lock()
        self._last_request = 0
        self._link: Link | None = None  # that carried the latest span
        self._broken = False
        self._first_failed = len(chunks)
        self._ahead: _LocalChunk | None = None
        self._called_off = False
        self._profile = profile_run(
            context.route.telemetry.trace,
            context.session,
            context.route.hops,
            chunks,
            log_decode=context.decode_profile,
        )

    @property
    def left_uneven(self) -> bool:
        """Whether some stages may hold spans that others left out, after a `CancelledError`."""
        return self._first_failed < len(self._chunks) and self._context.route.can_rewind

    def run(self, cancelled: Cancelled | None) -> F32:
        """Evaluate every span and return the logits `f32[V]` after the last one.

        Raises:
            CancelledError: `cancelled` became true; spans in flight were waited for, but stages
                that can were told to leave out those that had not begun.
            Ds4Error: The first thing that went wrong, or the loss of the link after it.
        """
        route = self._context.route
        with route.watching(route.hops, self._break_off), self._in_company():
            try:
                logits = self._run(cancelled)
            except TransportError as e:
                raise self._loss(e) from e
            finally:
                if self._ahead is not None:  # nobody waits for it any more
                    self._ahead.output.cancel()
        if self._profile is not None:
            self._profile.finished()
        return logits

    def _in_company(self) -> AbstractContextManager[None]:
        """Share the way to the first hop with other prompts while this one is on it."""
        channels = self._context.route.channels
        return channels.prefilling() if channels is not None and self._pipelined else nullcontext()

    def _run(self, cancelled: Cancelled | None) -> F32:
        error: Ds4Error | None = None
        self._cancelled = cancelled
        while not self._window.done:
            if error is None and cancelled is not None and cancelled():
                error = CancelledError("the request was cancelled")
                self._call_off()
            if (error is None or self._must_finish(error)) and self._may_submit():
                error = _graver(error, self._guard(self._submit))
                while error is None and len(self._box):
                    error = self._guard(self._collect)
            elif self._window.in_flight:
                error = _graver(error, self._guard(self._collect))
            lost = isinstance(error, TransportError)  # then nothing in flight will be answered
            if lost:
                # over a priority connection that broke alone, the stages would go on with it
                self._break_off()
            if error is not None and (lost or self._at_rest(error)):
                raise error
        assert self._logits is not None
        return self._logits

    def _loss(self, error: TransportError) -> Ds4Error:
        """Tell the loss of a priority connection from that of a stage.

        While the bulk connection stands, so does the stage, as far as is known: it may be asked
        once more like one that refused. Often the bulk connection turns out to be lost a moment
        later, and that is a loss of its own.
        """
        channels = self._context.route.channels
        if channels is None or self._link in (channels.bulk, None) or channels.bulk.lost:
            return error
        return RemoteWorkError(
            f"second connection: {error.what}", hop=self._context.route.hops[0].name
        )

    def _must_finish(self, error: Ds4Error) -> bool:
        """Whether own layers are ahead for good, and the other stages have to follow."""
        cancelled = isinstance(error, CancelledError)
        return cancelled and self._ahead is not None and not self._context.route.can_rewind

    def _at_rest(self, error: Ds4Error) -> bool:
        """Whether a failed run has nothing left to wait for."""
        return not (self._window.in_flight or self._must_finish(error))

    @property
    def _is_token(self) -> bool:
        return len(self._chunks) == len(self._chunks[0].tokens) == 1

    def _may_submit(self) -> bool:
        """Whether the next span may leave, as far as the window and other prompts allow."""
        channels = self._context.route.channels
        size = self._size if channels is None else channels.share(self._size)
        return self._window.next_chunk is not None and self._window.in_flight < size

    def _call_off(self) -> None:
        """Tell stages that nobody waits for what is in flight."""
        self._called_off = True
        route = self._context.route
        if self._window.in_flight:
            notice = Cancel(self._context.session, self._last_request)
            route.tell(route.may_skip, CANCEL, notice)

    def _break_off(self) -> None:
        """Send no more over a route that has lost a stage, and call off what is on its way there.

        All of it must be evaluated again, so no stage needs to keep up with the others.
        """
        route = self._context.route
        with self._posting:
            self._broken = True
            last = self._last_request
        if last:
            route.tell(route.hops, CANCEL, Cancel(self._context.session, last))

    @staticmethod
    def _guard(step: Callable[[], None]) -> Ds4Error | None:
        """Turn a failure into a value, since what is in flight must be waited for first."""
        try:
            step()
        except Ds4Error as e:
            return e
        return None

    def _submit(self) -> None:
        index = self._window.next_chunk
        assert index is not None
        chunk = self._chunks[index]
        hidden = self._evaluate_locally(index)
        channels = self._context.route.channels
        if channels is None:
            self._window.submitted()
            self._answered(index)
            return
        work = self._next_work(chunk, hidden)
        self._index_of[work.request_id] = index
        self._expect_answer()
        began = now_usec()
        self._link = channels.choose(is_token=self._is_token)
        self._link.post(work, self._box)
        if self._profile is not None:
            self._profile.posted(chunk, work.request_id, began)
        self._window.submitted()

    def _evaluate_locally(self, index: int) -> HiddenBatch | None:
        route = self._context.route
        if route.local is None:
            return None
        own = self._ahead or self._begin_locally(route.local, index)
        more = index + 1 < len(self._chunks) and self._may_run_ahead(route)
        self._ahead = self._begin_locally(route.local, index + 1) if more else None
        output = wait_for(own.output, self._context.result_timeout)
        chunk, layers = self._chunks[index], route.local.layers
        route.telemetry.record_local(layers, len(chunk.tokens), output.eval_usec)
        key = layers.start, layers.end
        route.telemetry.costs.add(key, chunk.pos0, len(chunk.tokens), eval_usec=output.eval_usec)
        if self._profile is not None:
            self._profile.local(chunk, own.began, output.eval_usec)
        if output.logits is not None:
            self._logits = output.logits
        return output.hidden

    def _may_run_ahead(self, route: Route) -> bool:
        """Whether own layers may have a span that the others have no place for yet."""
        if route.local is None or not route.local.runner.overlaps:
            return False
        return not self._called_off and (self._pipelined or not route.hops)

    def _begin_locally(self, local: Stage, index: int) -> _LocalChunk:
        """Queue a span for the own layers."""
        chunk, hops = self._chunks[index], self._context.route.hops
        want = (
            OutputKind.HIDDEN
            if hops
            else OutputKind.LOGITS
            if chunk.is_last
            else OutputKind.NOTHING
        )
        request = StageRequest(
            session=self._context.session,
            tokens=chunk.tokens,
            pos0=chunk.pos0,
            prefix_hash=chunk.prefix_hash,
            result_hash=chunk.result_hash,
            reset=chunk.pos0 == 0,
            output_kind=want,
            reply_bits=self._context.bits,
        )
        return _LocalChunk(now_usec(), local.submit(request))

    def _next_work(self, chunk: Chunk, hidden: HiddenBatch | None) -> Work:
        """Return a span that a break cancels from now on, or none after it."""
        with self._posting:
            if self._broken:
                raise RemoteWorkError("a stage is lost", hop="the route")
            work = self._work(chunk, hidden)
            self._last_request = work.request_id
        return work

    def _work(self, chunk: Chunk, hidden: HiddenBatch | None) -> Work:
        context, hop = self._context, self._context.route.hops[0]
        return Work(
            model_id=context.card.model_id,
            session_id=context.session,
            request_id=context.next_request_id(),
            prefix_hash=chunk.prefix_hash,
            result_hash=chunk.result_hash,
            pos0=chunk.pos0,
            layer_start=hop.layers.start,
            layer_end=hop.layers.end,
            flags=chunk.flags,
            input_hc_bits=context.bits,
            route_count=len(context.route.hops),
            route_index=0,
            tokens=chunk.tokens,
            input=memoryview(b"") if hidden is None else hidden.data,
            route_blob=memoryview(context.route.blob),
        )

    def _expect_answer(self) -> None:
        self._answer_due = time.monotonic() + self._context.result_timeout

    def _collect(self) -> None:
        """Wait for one answer and account for it; sometimes return without, to look around."""
        left = self._answer_due - time.monotonic()
        patience = left if self._cancelled is None else min(left, _CANCEL_POLL_SECONDS)
        try:
            reply = self._box.get(patience)
        except queue.Empty:
            if patience < left:
                return
            raise self._give_up() from None
        self._expect_answer()
        if isinstance(reply.result, TransportError):
            raise reply.result
        index = self._index_of.pop(reply.request_id)
        try:
            self._accept(self._chunks[index], reply)
        except Ds4Error:
            self._first_failed = min(index, self._first_failed)
            raise
        finally:
            # an error answers its span as well: it is in flight no more
            self._window.answered(index)
        self._completed(min(self._window.completed, self._first_failed))

    def _give_up(self) -> TransportTimeoutError:
        link = self._context.route.link
        assert link is not None
        seconds = self._context.result_timeout
        link.close(f"no result for {seconds:g} s")
        return TransportTimeoutError(f"no result for {seconds:g} s", peer=str(link.connection.peer))

    def _accept(self, chunk: Chunk, reply: HopReply) -> None:
        """Check one answer and take the logits out of the last one."""
        route = self._context.route
        result = reply.result
        assert isinstance(result, Result)
        verdict = check_result(result, self._expected(chunk))
        if isinstance(verdict, FailedResult):
            raise self._failure(verdict)
        route.telemetry.record(
            result.telemetry,
            stages=[(hop.layers.start, hop.layers.end) for hop in route.hops],
            first_wait_usec=reply.wait_usec,
        )
        if self._profile is not None:
            self._profile.answered(chunk, reply.request_id, reply.wait_usec, result)
        if not chunk.is_last:
            return
        if verdict.hidden is not None:
            began = now_usec()
            self._logits = self._apply_head(verdict.hidden)
            if self._profile is not None:
                self._profile.head(chunk, began)
        else:
            self._logits = np.frombuffer(verdict.payload, "<f4")

    def _apply_head(self, hidden: HiddenBatch) -> F32:
        """Take hidden states for logits; a peer may send some where nobody can use them."""
        apply_head = self._context.route.apply_head
        if apply_head is None:
            text = "hidden states, expected logits: this coordinator has no output head"
            raise self._failure(FailedResult(cause="transport", kind="R-KIND", text=text))
        return apply_head(hidden)

    def _expected(self, chunk: Chunk) -> ExpectedResult:
        if not self._pipelined:
            awaited = Awaited.SPAN
        else:
            awaited = Awaited.LAST_CHUNK if chunk.is_last else Awaited.CHUNK
        return ExpectedResult(
            result_hash=chunk.result_hash,
            n_tokens=len(chunk.tokens),
            n_vocab=self._context.card.n_vocab,
            hidden_width=self._context.card.hidden_width,
            awaited=awaited,
            final_has_output=self._context.route.last_has_output,
        )

    def _failure(self, verdict: FailedResult) -> Ds4Error:
        """Return the error of a bad answer; one that cannot be trusted ends the link."""
        link = self._context.route.link
        assert link is not None
        if verdict.cause == "remote":
            return RemoteWorkError(verdict.text, hop=self._context.route.hops[0].name)
        link.close(verdict.text)
        return PeerClosedError(verdict.text, peer=str(link.connection.peer))

    def _answered(self, index: int) -> None:
        self._window.answered(index)
        self._completed(self._window.completed)


def _graver(first: Ds4Error | None, later: Ds4Error | None) -> Ds4Error | None:
    """Choose between errors of one run: refusals that follow the first one only echo it.

    That goes for a cancelled request too, whose spans may be left out: should a stage have had
    another reason, it will refuse the next span.
    """
    return later if first is None or isinstance(later, TransportError) else first
