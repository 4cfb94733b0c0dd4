"""Send the chunks of one prefill or decode over a route and collect the answers.

Owns: the loop of the thread that drives a session: fill the window, evaluate own layers, post,
wait, account. Refuses to know: timelines, replay, how routes are found, what an answer must look
like (`answers`). Invariant: when it returns or raises, no request of its own is in flight, or the
link that carried it is closed.

After a cancellation, a chunk that own layers have ahead leaves as well if they could not forget it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import numpy as np

from ds4py.activations import F32, HiddenBatch
from ds4py.contracts import Cancelled, SessionId
from ds4py.coordinator.chunked_prefill import Chunk, Window
from ds4py.coordinator.pipeline import Completed
from ds4py.coordinator.relay.answers import AnswerReader
from ds4py.coordinator.relay.context import RelayContext
from ds4py.coordinator.relay.hop import Link, ReplyBox
from ds4py.coordinator.relay.own_layers import OwnLayers
from ds4py.coordinator.relay.profile import profile_run
from ds4py.coordinator.relay.route import Route, work_flags
from ds4py.errors import (
    CancelledError,
    Ds4Error,
    RemoteWorkError,
    TransportError,
    TransportTimeoutError,
)
from ds4py.tracing.events import now_usec
from ds4py.wire.extensions import CANCEL, Cancel
from ds4py.wire.messages import Work

_CANCEL_POLL_SECONDS: Final = 0.1


class PipelinedRun:
    """One pass of consecutive chunks over a route.

    Args:
        route: The stages.
        context: What all routes share.
        session: The timeline.
        chunks: In order; the last one asks for logits.
        window: Most chunks in flight.
        completed: See `coordinator.pipeline.Completed`.
    """

    def __init__(
        self,
        route: Route,
        context: RelayContext,
        session: SessionId,
        chunks: Sequence[Chunk],
        *,
        window: int,
        completed: Completed,
    ):
        config = context.config
        self._route = route
        self._context = context
        self._session = session
        self._chunks = chunks
        self._size = window
        self._window = Window(len(chunks), window)
        # chunks overlap; a window of 1 is one that the user wants
        self._pipelined = config.prefill.pipeline and len(chunks) > 1 and bool(route.hops)
        self._completed = completed
        self._n_told = 0
        self._box: ReplyBox = ReplyBox()
        self._index_of: dict[int, int] = {}
        self._logits: dict[int, F32] = {}  # of chunks, by index
        self._cancelled: Cancelled | None = None
        self._answer_due = 0.0
        self._posting = threading.Lock()
        self._last_request = 0
        self._link: Link | None = None  # that carried the latest chunk
        self._broken = False
        self._first_failed = len(chunks)
        self._profile = profile_run(
            route.telemetry.trace, session, route.hops, chunks, log_decode=config.decode_profile
        )
        self._answers = AnswerReader(
            route,
            context.card,
            self._profile,
            pipelined=self._pipelined,
            timeout=config.result_timeout,
        )
        self._own: OwnLayers | None = None
        if route.local is not None:
            self._own = OwnLayers(
                route.local,
                session,
                chunks,
                bits=config.activation_bits,
                is_last=not route.hops,
                overlap=self._pipelined or not route.hops,
                timeout=config.result_timeout,
            )

    @property
    def _left_uneven(self) -> bool:
        """Whether some stages may hold spans that others left out, after a `CancelledError`."""
        return self._first_failed < len(self._chunks) and self._route.can_rewind

    def run(self, cancelled: Cancelled | None) -> F32:
        """Evaluate every chunk and return the logits f32 `[n, V]` that they ask for.

        Raises:
            CancelledError: `cancelled` became true; chunks in flight were waited for, but stages
                that can were told to leave out those that had not begun.
            Ds4Error: The first thing that went wrong, or the loss of the link after it.
        """
        route = self._route
        with route.watching(route.hops, self._break_off), self._in_company():
            try:
                self._run(cancelled)
            except TransportError as e:
                raise self._loss(e) from e
            except CancelledError as e:
                raise CancelledError(str(e), uneven=self._left_uneven) from e
            finally:
                if self._own is not None:
                    self._own.abandon()
        if self._profile is not None:
            self._profile.finished()
        rows = [self._logits[index] for index in sorted(self._logits)]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _in_company(self) -> AbstractContextManager[None]:
        """Share the way to the first hop with other prompts while this one is on it."""
        channels = self._route.channels
        return channels.prefilling() if channels is not None and self._pipelined else nullcontext()

    def _run(self, cancelled: Cancelled | None) -> None:
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

    def _loss(self, error: TransportError) -> Ds4Error:
        """Tell the loss of a priority connection from that of a stage.

        While the bulk connection stands, so does the stage, as far as is known: it may be asked
        once more like one that refused. Often the bulk connection turns out to be lost a moment
        later, and that is a loss of its own.
        """
        channels = self._route.channels
        if channels is None or self._link in (channels.bulk, None) or channels.bulk.lost:
            return error
        return RemoteWorkError(f"second connection: {error.what}", hop=self._route.hops[0].name)

    def _must_finish(self, error: Ds4Error) -> bool:
        """Whether own layers are ahead for good, and the other stages have to follow."""
        ahead = self._own is not None and self._own.is_ahead
        return isinstance(error, CancelledError) and ahead and not self._route.can_rewind

    def _at_rest(self, error: Ds4Error) -> bool:
        """Whether a failed run has nothing left to wait for."""
        return not (self._window.in_flight or self._must_finish(error))

    @property
    def _is_token(self) -> bool:
        return len(self._chunks) == len(self._chunks[0].tokens) == 1

    def _may_submit(self) -> bool:
        """Whether the next span may leave, as far as the window and other prompts allow."""
        channels = self._route.channels
        size = self._size if channels is None else channels.share(self._size)
        return self._window.next_chunk is not None and self._window.in_flight < size

    def _call_off(self) -> None:
        """Tell stages that nobody waits for what is in flight."""
        route = self._route
        if self._own is not None:
            self._own.stop_running_ahead()
        if self._window.in_flight:
            notice = Cancel(self._session, self._last_request)
            route.tell(route.may_skip, CANCEL, notice)

    def _break_off(self) -> None:
        """Send no more over a route that has lost a stage, and call off what is on its way there.

        All of it must be evaluated again, so no stage needs to keep up with the others.
        """
        route = self._route
        with self._posting:
            self._broken = True
            last = self._last_request
        if last:
            route.tell(route.hops, CANCEL, Cancel(self._session, last))

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
        channels = self._route.channels
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
        if self._own is None:
            return None
        (output, began), chunk = self._own.evaluate(index), self._chunks[index]
        self._route.record_local(chunk.pos0, len(chunk.tokens), output.eval_usec)
        if self._profile is not None:
            self._profile.local(chunk, began, output.eval_usec)
        if output.logits is not None:
            self._logits[index] = output.logits.reshape(chunk.n_logits, -1)
        return output.hidden

    def _next_work(self, chunk: Chunk, hidden: HiddenBatch | None) -> Work:
        """Return a span that a break cancels from now on, or none after it."""
        with self._posting:
            if self._broken:
                raise RemoteWorkError("a stage is lost", hop="the route")
            work = self._work(chunk, hidden)
            self._last_request = work.request_id
        return work

    def _work(self, chunk: Chunk, hidden: HiddenBatch | None) -> Work:
        context, hop = self._context, self._route.hops[0]
        prefill = context.config.prefill
        ack_early = prefill.pipeline and prefill.ack_only
        return Work(
            model_id=context.card.model_id,
            session_id=self._session,
            request_id=context.next_request_id(),
            prefix_hash=chunk.prefix_hash,
            result_hash=chunk.result_hash,
            pos0=chunk.pos0,
            layer_start=hop.layers.start,
            layer_end=hop.layers.end,
            flags=work_flags(self._route.shape, chunk, ack_early=ack_early),
            input_hc_bits=context.config.activation_bits,
            route_count=len(self._route.hops),
            route_index=0,
            tokens=chunk.tokens,
            input=memoryview(b"") if hidden is None else hidden.data,
            route_blob=memoryview(self._route.blob),
        )

    def _expect_answer(self) -> None:
        self._answer_due = time.monotonic() + self._context.config.result_timeout

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
            logits = self._answers.read(self._chunks[index], reply)
        except Ds4Error:
            self._first_failed = min(index, self._first_failed)
            raise
        finally:
            # an error answers its span as well: it is in flight no more
            self._window.answered(index)
        if logits is not None:
            self._logits[index] = logits
        self._tell_completed(min(self._window.completed, self._first_failed))

    def _give_up(self) -> TransportTimeoutError:
        link = self._route.link
        assert link is not None
        seconds = self._context.config.result_timeout
        link.close(f"no result for {seconds:g} s")
        return TransportTimeoutError(f"no result for {seconds:g} s", peer=str(link.connection.peer))

    def _answered(self, index: int) -> None:
        self._window.answered(index)
        self._tell_completed(self._window.completed)

    def _tell_completed(self, n_chunks: int) -> None:
        if n_chunks > self._n_told:
            self._n_told = n_chunks
            reached = self._chunks[n_chunks - 1]
            self._completed(reached.end, reached.result_hash)


def _graver(first: Ds4Error | None, later: Ds4Error | None) -> Ds4Error | None:
    """Choose between errors of one run: refusals that follow the first one only echo it.

    That goes for a cancelled request too, whose spans may be left out: should a stage have had
    another reason, it will refuse the next span.
    """
    return later if first is None or isinstance(later, TransportError) else first
