"""`LocalRunner`: one machine's slice with its caches, as `contracts.ModelRunner`.

Owns: the model with its caches, forming and queueing its batches. Refuses to know: prefix hashes,
peers, files. Invariant: a span that is refused changed nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from ds4py.activations import F32, HiddenBatch
from ds4py.contracts import (
    ForwardOutput,
    ForwardRequest,
    ModelCard,
    PendingForward,
    PlainForm,
    SessionId,
)
from ds4py.engine.cache_io import load_shard, save_shard
from ds4py.engine.cuda_graphs import graphed
from ds4py.engine.host_staging import Later, Staging, active, staging_for
from ds4py.engine.kv_pool import KvPool, KvUse
from ds4py.engine.outputs import answers
from ds4py.engine.request_checks import RequestChecks
from ds4py.engine.session_caches import SessionCache, SessionCaches
from ds4py.errors import Ds4Error, ModelError
from ds4py.kernels.cache import CacheTensor, Segment
from ds4py.kernels.cuda.decode_step import DecodeStep, step_numbers
from ds4py.layer_range import LayerRange
from ds4py.models.base import Slice
from ds4py.snapshot import Capacities, read_shard, saved_sizes, write_shard


@dataclass(frozen=True, slots=True)
class _ForwardJob:
    """A span that passed all checks, and its place in the batch."""

    index: int
    work: ForwardRequest
    cache: SessionCache


class _Moment(Protocol):
    """A moment in the work of a device, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether it has come."""


class _Begun(NamedTuple):
    """A batch that was queued, and the moment when all of it has been computed."""

    complete: Later[dict[int, ForwardOutput | Ds4Error]]
    computed: _Moment


class LocalRunner:
    """A slice of one model on one device.

    All methods but the properties must be called on one thread.

    Args:
        model: The slice.
        card: Identity of the whole model.
        layers: Its layers.
        pool: Caches, laid out for the slice.
        device: Where all of it lives.
        n_ctx: Tokens that one session can hold.
        weight_bytes: Packed bytes of the slice's tensors.
        capacities: What saved sessions name of this process; None if their form names nothing.
        staging: How activations come and go; None takes what suits the device.
    """

    def __init__(  # noqa: PLR0913 - the parts that `open_runner` made
        self,
        model: Slice,
        card: ModelCard,
        layers: LayerRange,
        pool: KvPool,
        *,
        device: torch.device,
        n_ctx: int,
        weight_bytes: int,
        capacities: Capacities | None = None,
        staging: Staging | None = None,
    ):
        self._model: Slice | None = model
        self._caches: SessionCaches | None = SessionCaches(pool, model.rewind_floor)
        self._card = card
        self._layers = layers
        self._device = device
        self._n_ctx = n_ctx
        self._n_slots = pool.n_slots
        self._weight_bytes = weight_bytes
        self.capacities = capacities
        self._has_head = model.has_head
        self._can_rewind = model.rewind_floor(n_ctx) == 0
        self._checks = RequestChecks(card, layers, n_ctx, model.has_head)
        self._staging = staging or staging_for(device)
        with active(device):
            self._graphed = graphed(model.recordable, device)
        self._busy_until = 0  # when the last batch was complete, ns

    @property
    def card(self) -> ModelCard:
        """Identity of the whole model."""
        return self._card

    @property
    def layers(self) -> LayerRange:
        """The owned layers."""
        return self._layers

    @property
    def has_head(self) -> bool:
        """Whether `apply_head` can run."""
        return self._has_head

    @property
    def n_ctx(self) -> int:
        """Tokens that one session can hold."""
        return self._n_ctx

    @property
    def n_slots(self) -> int:
        """Sessions that the cache pool can hold at once."""
        return self._n_slots

    @property
    def can_rewind(self) -> bool:
        """Whether a timeline can be cut at any position."""
        return self._can_rewind

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights held by this process, as in the file."""
        return self._weight_bytes

    @property
    def cache_layout(self) -> Sequence[CacheTensor]:
        """One session's cache."""
        return self._open_model().cache_layout()

    @property
    def kv_use(self) -> KvUse:
        """The cache budget and what of it sessions hold."""
        return self._open_caches().pool.use

    @property
    def device(self) -> torch.device:
        """Where the slice lives."""
        return self._device

    @property
    def overlaps(self) -> bool:
        """Whether a batch that was started is complete only later."""
        return self._staging.overlaps

    def run(self, batch: Sequence[ForwardRequest]) -> list[ForwardOutput | Ds4Error]:
        """Evaluate spans; see `contracts.ModelRunner.run`.

        Spans of one token run together, as one batch of the model; longer ones run alone.
        """
        return self.forward_async(batch).complete()

    def forward_async(self, batch: Sequence[ForwardRequest]) -> PendingForward:
        """Queue spans on the device; see `contracts.ModelRunner.forward_async`.

        On the CPU they are complete at once.
        """
        refused: dict[int, Ds4Error] = {}
        alone: list[list[_ForwardJob]] = []
        single: list[_ForwardJob] = []
        for index, work in enumerate(batch):
            try:
                self._checks.check(work, self.length(work.session) or 0)
                end = work.pos0 + len(work.tokens)
                cache = self._open_caches().begin(work.session, end, reset=work.reset)
                job = _ForwardJob(index, work, cache)
            except Ds4Error as error:
                refused[index] = error
                continue
            if len(work.tokens) == 1:
                single.append(job)
            else:
                alone.append([job])
        begun = [self._evaluate(jobs) for jobs in (*alone, single) if jobs]

        def complete() -> list[ForwardOutput | Ds4Error]:
            found: dict[int, ForwardOutput | Ds4Error] = dict(refused)
            for part in begun:
                found |= part.complete()
            return [found[index] for index in range(len(batch))]

        return PendingForward(
            refused=refused,
            complete=complete,
            ready=lambda: all(part.computed.query() for part in begun),
        )

    @torch.inference_mode()
    def apply_head(self, row: HiddenBatch) -> F32:
        """Return logits `f32[V]` for the last row of a hidden batch.

        Raises:
            ModelError: There is no head here, or the batch is empty or of another width.
        """
        self._checks.check_row(row)
        with active(self._device):
            hidden = self._staging.upload(row)[-1:]
            logits: F32 = self._staging.fetch(self._open_model().logits(hidden))()[0]
        return logits

    def length(self, session: SessionId) -> int | None:
        """Return the number of cached tokens, None for an unknown session."""
        cache = None if self._caches is None else self._caches.get(session)
        return None if cache is None else cache.length

    def rewind(self, session: SessionId, n_tokens: int) -> None:
        """Keep the first `n_tokens` of a session; raises as `SessionCaches.rewind`."""
        self._open_caches().rewind(session, n_tokens)

    def reserve(self, session: SessionId, n_tokens: int) -> None:
        """Take memory ahead of spans; see `contracts.ModelRunner.reserve`."""
        self._open_caches().reserve(session, n_tokens)

    @torch.inference_mode()
    def fork(self, source: SessionId, target: SessionId, n_tokens: int) -> None:
        """Copy the first tokens of a session to another; raises as `SessionCaches.fork`."""
        with active(self._device):
            self._open_caches().fork(source, target, n_tokens)

    def save_cache(self, session: SessionId) -> list[memoryview]:
        """Return a copy of a session's cache; see `contracts.ModelRunner.save_cache`."""
        return write_shard(save_shard(self, session))

    def load_cache(self, session: SessionId, n_tokens: int, payload: memoryview) -> None:
        """Replace a session's cache; see `contracts.ModelRunner.load_cache`."""
        sizes = saved_sizes(self._card)
        shard = read_shard(payload, sizes, self._layers, n_ctx=self._n_ctx, n_tokens=n_tokens)
        load_shard(self, session, shard)

    @torch.inference_mode()
    def export_cache(self, session: SessionId) -> tuple[int, list[torch.Tensor]]:
        """Return a session's length and cache in the portable form of `models.base.Slice`.

        Only for models with a `cache_form`.

        Raises:
            ModelError: The session is unknown or empty.
        """
        caches = self._open_caches()
        held = caches.get(session)
        if held is None or not held.length:
            raise ModelError(f"session {session}", got="no tokens", expected="a timeline to save")
        cache = caches.pool.cache(held.slot)
        return held.length, self._open_model().export_cache(cache, held.length)

    @torch.inference_mode()
    def import_cache(
        self, session: SessionId, n_tokens: int, saved: Sequence[torch.Tensor]
    ) -> None:
        """Replace a session's cache by a saved one, or begin a session with it.

        Only for models with a `cache_form`; the caller has checked the tensors' shapes.

        Raises:
            CapacityError: The session is new and every slot is taken, or the cache budget is used
                up; the session is as before.
        """
        caches = self._open_caches()
        held = caches.hold(session, n_tokens)
        held.length = 0  # what is there now is overwritten, whatever happens
        self._open_model().import_cache(caches.pool.cache(held.slot), n_tokens, saved)
        held.length = n_tokens
        # rows that stood in a ring before the last ones are not saved
        held.floor = 0 if isinstance(self._card.cache_form, PlainForm) else n_tokens

    def drop(self, session: SessionId) -> None:
        """Free a session's slot; an unknown session is no error."""
        if self._caches is not None:
            self._caches.drop(session)

    def close(self) -> None:
        """Free weights and caches; idempotent."""
        self._model = self._caches = self._graphed = None

    @torch.inference_mode()
    def _evaluate(self, jobs: Sequence[_ForwardJob]) -> _Begun:
        """Queue one batch of the model; every answer carries the time of the whole batch."""
        started = time.perf_counter_ns()
        with active(self._device):
            hidden = self._forward(jobs)
            for job in jobs:
                end = job.work.pos0 + len(job.work.tokens)
                self._open_caches().extend(job.cache, end)
            works = [job.work for job in jobs]
            outputs = answers(works, hidden, self._open_model().logits, self._staging)
            computed = torch.get_device_module(self._device).Event()
            computed.record()

        def complete() -> dict[int, ForwardOutput | Ds4Error]:
            ready = outputs()
            computed.synchronize()  # also if nothing of the batch was wanted
            done = time.perf_counter_ns()
            # what was queued behind another batch began when that was complete
            eval_usec = (done - max(started, self._busy_until)) // 1000
            self._busy_until = done
            pairs = zip(jobs, ready, strict=True)
            return {job.index: replace(one, eval_usec=eval_usec) for job, one in pairs}

        if self._staging.overlaps:
            return _Begun(complete, computed)
        finished = complete()
        return _Begun(lambda: finished, computed)

    def _forward(self, jobs: Sequence[_ForwardJob]) -> torch.Tensor:
        model, pool = self._open_model(), self._open_caches().pool
        ids = [token for job in jobs for token in job.work.tokens]
        parts = [
            self._staging.upload(job.work.hidden) for job in jobs if job.work.hidden is not None
        ]
        given = torch.cat(parts) if len(parts) > 1 else next(iter(parts), None)
        segments = [
            Segment(pool.cache(job.cache.slot), job.work.pos0, len(job.work.tokens)) for job in jobs
        ]
        if self._graphed is not None and len(ids) == len(jobs):
            numbers = self._staging.integers(step_numbers(ids, segments))
            return self._graphed(DecodeStep(numbers, given))
        tokens = self._staging.integers(ids)
        hidden = model.embed(tokens) if given is None else given
        return model.forward(hidden, tokens, segments)

    def _open_model(self) -> Slice:
        if self._model is None:
            raise ModelError("runner", got="closed", expected="open")
        return self._model

    def _open_caches(self) -> SessionCaches:
        if self._caches is None:
            raise ModelError("runner", got="closed", expected="open")
        return self._caches
