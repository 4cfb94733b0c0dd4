"""`LocalRunner`: one machine's slice with its caches, as `contracts.SliceRunner`.

Owns: sessions on this stage (slot, length), the checks of a span before it runs. Refuses to know:
prefix hashes, peers, files. Invariant: a span that is refused changed nothing; a session's length
counts the cache rows that are valid.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ds4py.contracts import ModelCard, SessionId, SliceOutput, SliceWork, Want
from ds4py.engine.cache_io import cache_sizes, load_shard, save_shard
from ds4py.engine.kv_pool import KvPool
from ds4py.engine.transfer import download, upload
from ds4py.errors import CapacityError, Ds4Error, ModelError
from ds4py.hidden import F32, HiddenBatch
from ds4py.models.base import Segment, Slice
from ds4py.snapshot import Capacities, read_dsvl, write_dsvl
from ds4py.spans import LayerSpan


@dataclass(slots=True)
class _Timeline:
    """A session of this stage.

    Args:
        slot: Its place in the pool.
        length: Tokens that the cache holds.
        floor: Shortest length that it can be cut back to, but for 0.
    """

    slot: int
    length: int = 0
    floor: int = 0


@dataclass(frozen=True, slots=True)
class _Job:
    """A span that passed all checks, and its place in the batch."""

    place: int
    work: SliceWork
    timeline: _Timeline


class LocalRunner:
    """A slice of one model on one device.

    All methods but the properties must be called on one thread.

    Args:
        model: The slice.
        card: Identity of the whole model.
        span: Its layers.
        pool: Caches, laid out for the slice.
        device: Where all of it lives.
        n_ctx: Tokens that one session can hold.
        weight_bytes: Packed bytes of the slice's tensors.
        capacities: What saved sessions name; None if the model's have no portable form.
    """

    def __init__(  # noqa: PLR0913 - the parts that `open_runner` made
        self,
        model: Slice,
        card: ModelCard,
        span: LayerSpan,
        pool: KvPool,
        *,
        device: torch.device,
        n_ctx: int,
        weight_bytes: int,
        capacities: Capacities | None = None,
    ):
        self._model: Slice | None = model
        self._pool: KvPool | None = pool
        self._card = card
        self._span = span
        self._device = device
        self._n_ctx = n_ctx
        self._n_slots = pool.n_slots
        self._weight_bytes = weight_bytes
        self.capacities = capacities
        self._has_head = model.has_head
        self._can_rewind = model.rewind_floor(n_ctx) == 0
        self._timelines: dict[SessionId, _Timeline] = {}

    @property
    def card(self) -> ModelCard:
        """Identity of the whole model."""
        return self._card

    @property
    def span(self) -> LayerSpan:
        """The owned layers."""
        return self._span

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
    def device(self) -> torch.device:
        """Where the slice lives."""
        return self._device

    def run(self, batch: Sequence[SliceWork]) -> list[SliceOutput | Ds4Error]:
        """Evaluate spans; see `contracts.SliceRunner.run`.

        Spans of one token run together, as one batch of the model; longer ones run alone.
        """
        answers: dict[int, SliceOutput | Ds4Error] = {}
        single: list[_Job] = []
        for place, work in enumerate(batch):
            try:
                self._check(work)
                job = _Job(place, work, self._timeline(work))
            except Ds4Error as error:
                answers[place] = error
                continue
            if len(work.tokens) == 1:
                single.append(job)
            else:
                answers |= self._evaluate([job])
        if single:
            answers |= self._evaluate(single)
        return [answers[place] for place in range(len(batch))]

    @torch.inference_mode()
    def apply_head(self, row: HiddenBatch) -> F32:
        """Return logits `f32[V]` for the last row of a hidden batch.

        Raises:
            ModelError: There is no head here, or the batch is empty or of another width.
        """
        if not self._has_head:
            raise ModelError(
                "logits", got="a slice without the output head", expected="the last slice"
            )
        if row.rows < 1:
            raise ModelError("hidden state", got="no rows", expected="at least one")
        self._check_width(row)
        hidden = upload(row, self._device)[-1:]
        return self._host_logits(hidden)

    def length(self, session: SessionId) -> int | None:
        """Return the number of cached tokens, None for an unknown session."""
        timeline = self._timelines.get(session)
        return None if timeline is None else timeline.length

    def rewind(self, session: SessionId, n_tokens: int) -> None:
        """Keep the first `n_tokens` of a session.

        Raises:
            ModelError: The session is unknown or shorter, or its cache no longer holds what a
                timeline of that length needs.
        """
        timeline = self._timelines.get(session)
        held = "an unknown session" if timeline is None else f"{timeline.length} tokens"
        if timeline is None or not 0 <= n_tokens <= timeline.length:
            raise ModelError(f"rewind of session {session}", got=held, expected=f">= {n_tokens}")
        if n_tokens and n_tokens < timeline.floor:
            raise ModelError(
                f"rewind of session {session} with {held}",
                got=f"a cut at {n_tokens}",
                expected=f"0, or {timeline.floor} to {timeline.length}: older rows are gone",
            )
        timeline.length = n_tokens

    def save_cache(self, session: SessionId) -> list[memoryview]:
        """Return a copy of a session's cache; see `contracts.SliceRunner.save_cache`."""
        return write_dsvl(save_shard(self, session))

    def load_cache(self, session: SessionId, n_tokens: int, payload: memoryview) -> None:
        """Replace a session's cache; see `contracts.SliceRunner.load_cache`."""
        sizes = cache_sizes(self._card)
        shard = read_dsvl(payload, sizes, self._span, n_ctx=self._n_ctx, n_tokens=n_tokens)
        load_shard(self, session, shard)

    @torch.inference_mode()
    def export_cache(self, session: SessionId) -> tuple[int, list[torch.Tensor]]:
        """Return a session's length and cache in the portable form of `models.base.Slice`.

        Only for models with a `cache_form`.

        Raises:
            ModelError: The session is unknown or empty.
        """
        timeline = self._timelines.get(session)
        if timeline is None or not timeline.length:
            raise ModelError(f"session {session}", got="no tokens", expected="a timeline to save")
        cache = self._open_pool().cache(timeline.slot)
        return timeline.length, self._open_model().export_cache(cache, timeline.length)

    @torch.inference_mode()
    def import_cache(
        self, session: SessionId, n_tokens: int, saved: Sequence[torch.Tensor]
    ) -> None:
        """Replace a session's cache by a saved one, or begin a session with it.

        Only for models with a `cache_form`; the caller has checked the tensors' shapes.

        Raises:
            CapacityError: The session is new and every slot is taken.
        """
        timeline = self._held(session)
        timeline.length = 0  # what is there now is overwritten, whatever happens
        cache = self._open_pool().cache(timeline.slot)
        self._open_model().import_cache(cache, n_tokens, saved)
        timeline.length = timeline.floor = n_tokens

    def drop(self, session: SessionId) -> None:
        """Free a session's slot; an unknown session is no error."""
        timeline = self._timelines.pop(session, None)
        if timeline is not None and self._pool is not None:
            self._pool.release(timeline.slot)

    def close(self) -> None:
        """Free weights and caches; idempotent."""
        self._timelines.clear()
        self._model = self._pool = None

    def _check(self, work: SliceWork) -> None:
        """Refuse a span that can not be evaluated; changes nothing."""
        n_tokens = len(work.tokens)
        if n_tokens < 1:
            raise ModelError("span", got="no tokens", expected="at least one")
        self._check_input(work)
        if work.want is Want.LOGITS and not self._has_head:
            raise ModelError("logits", got=f"layers {self._span}", expected="the output head")
        held = self.length(work.session) or 0
        expected = 0 if work.reset else held
        if work.pos0 != expected:
            raise ModelError(
                f"position of session {work.session}", got=work.pos0, expected=expected
            )
        if work.pos0 + n_tokens > self._n_ctx:
            raise CapacityError(
                "context of the session", needed=work.pos0 + n_tokens, available=self._n_ctx
            )

    def _check_input(self, work: SliceWork) -> None:
        if (work.hidden is None) != (self._span.start == 0):
            got, expected = ("tokens only", "hidden states")[:: 1 if work.hidden is None else -1]
            raise ModelError(f"input of layers {self._span}", got=got, expected=expected)
        if work.hidden is not None:
            self._check_width(work.hidden)
            if work.hidden.rows != len(work.tokens):
                raise ModelError(
                    "hidden state",
                    got=f"{work.hidden.rows} rows",
                    expected=f"{len(work.tokens)}, one for each token",
                )
        if not (min(work.tokens) >= 0 and max(work.tokens) < self._card.n_vocab):
            bad = next(token for token in work.tokens if not 0 <= token < self._card.n_vocab)
            raise ModelError("token id", got=bad, expected=f"0 to {self._card.n_vocab - 1}")

    def _check_width(self, batch: HiddenBatch) -> None:
        if batch.width != self._card.hidden_width:
            raise ModelError(
                "hidden state",
                got=f"{batch.width} values a token",
                expected=self._card.hidden_width,
            )

    def _timeline(self, work: SliceWork) -> _Timeline:
        """Return the session's timeline, emptied if asked for; a new session takes a slot."""
        timeline = self._held(work.session)
        if work.reset:
            timeline.length = 0
        if not timeline.length:
            timeline.floor = 0
        return timeline

    def _held(self, session: SessionId) -> _Timeline:
        timeline = self._timelines.get(session)
        if timeline is None:
            timeline = self._timelines[session] = _Timeline(self._open_pool().acquire())
        return timeline

    @torch.inference_mode()
    def _evaluate(self, jobs: Sequence[_Job]) -> dict[int, SliceOutput]:
        """Run one batch through the model; every answer carries the time of the whole batch."""
        started = time.perf_counter_ns()
        hidden = self._forward(jobs)
        outputs = {}
        row = 0
        for job in jobs:
            job.timeline.length = job.work.pos0 + len(job.work.tokens)
            floor = self._open_model().rewind_floor(job.timeline.length)
            job.timeline.floor = max(job.timeline.floor, floor)
            rows = hidden[row : row + len(job.work.tokens)]
            outputs[job.place] = self._output(job.work, rows)
            row += len(job.work.tokens)
        if self._device.type == "cuda":  # or the time would be that of the launches
            torch.cuda.synchronize(self._device)
        eval_usec = (time.perf_counter_ns() - started) // 1000
        return {place: replace(output, eval_usec=eval_usec) for place, output in outputs.items()}

    def _forward(self, jobs: Sequence[_Job]) -> torch.Tensor:
        model, pool = self._open_model(), self._open_pool()
        ids = [token for job in jobs for token in job.work.tokens]
        tokens = torch.tensor(ids, device=self._device)
        inputs = [job.work.hidden for job in jobs]
        if inputs[0] is None:
            hidden = model.embed(tokens)
        else:
            parts = [upload(part, self._device) for part in inputs if part is not None]
            hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
        segments = [
            Segment(pool.cache(job.timeline.slot), job.work.pos0, len(job.work.tokens))
            for job in jobs
        ]
        return model.forward(hidden, tokens, segments)

    def _output(self, work: SliceWork, hidden: torch.Tensor) -> SliceOutput:
        match work.want:
            case Want.HIDDEN:
                return SliceOutput(hidden=download(hidden, work.reply_bits))
            case Want.LOGITS:
                return SliceOutput(logits=self._host_logits(hidden[-1:]))
            case Want.NOTHING:
                return SliceOutput()

    def _host_logits(self, hidden: torch.Tensor) -> F32:
        logits = self._open_model().logits(hidden)[0].cpu().numpy()
        return logits.astype(np.float32, copy=False)

    def _open_model(self) -> Slice:
        if self._model is None:
            raise ModelError("runner", got="closed", expected="open")
        return self._model

    def _open_pool(self) -> KvPool:
        if self._pool is None:
            raise ModelError("runner", got="closed", expected="open")
        return self._pool
