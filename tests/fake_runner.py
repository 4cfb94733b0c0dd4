"""A `ModelRunner` whose layers are integer arithmetic on the rows.

Every value depends on the token, its position, the layer number and all earlier rows of the
session, so a wrong span, order, position, reset or rewind changes the logits. All values are
integers below 251: exact in 32- and 16-bit packing, so equality is equality.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np

from ds4py.activations import F32, HiddenBatch
from ds4py.contracts import (
    NO_ROOM,
    CacheForm,
    ForwardOutput,
    ForwardRequest,
    ModelCard,
    OutputKind,
    PendingForward,
    SessionId,
)
from ds4py.errors import CapacityError, Ds4Error, ModelError
from ds4py.layer_range import LayerRange, whole_model
from ds4py.snapshot import CacheSizes, Capacities, Shard, read_dsvl, write_dsvl

PRIME = 251
WIDTH = 8
N_VOCAB = 97


def card(n_layers: int = 6, name: str = "fake") -> ModelCard:
    """Identity of a fake model."""
    return ModelCard(
        model_id=0x80001234,
        name=name,
        architecture="fake",
        n_layers=n_layers,
        n_vocab=N_VOCAB,
        hidden_width=WIDTH,
        n_ctx_train=4096,
        quant_bits=4,
        cache_form=CacheForm(ratios=(0,) * n_layers, width=WIDTH, index_width=0, window=4096),
    )


def _at_once(work: ForwardRequest) -> None:
    """Keep nobody waiting."""


class FakeRunner:
    """Runs a span of the fake model.

    Args:
        layers: Owned layers; None means all.
        n_ctx: Tokens per session.
        n_slots: Sessions at once.
        kv_budget: Tokens that all sessions may hold together; None is enough for all.
        can_rewind: As in `ModelRunner`.
        has_head: Holds the head without owning it, as a coordinator does.
        before: Called before each evaluation, on the device thread; may raise or block.
        overlaps: Spans can be started; what they leave is there at once, their answers are not.
        ready: Whether there is no need to wait for the answer to a span that was started.
        arrive: Called before the answer to each span that was started, on the thread that waits for
            it; may block, or raise a `Ds4Error` or anything else as a device that breaks.
        identity: Another model than `card` describes; its width is free if layer 0 is not owned.
    """

    def __init__(
        self,
        layers: LayerRange | None = None,
        *,
        n_layers: int = 6,
        n_ctx: int = 64,
        n_slots: int = 4,
        kv_budget: int | None = None,
        can_rewind: bool = True,
        has_head: bool = False,
        name: str = "fake",
        before: Callable[[ForwardRequest], None] = _at_once,
        overlaps: bool = False,
        ready: Callable[[ForwardRequest], bool] = lambda work: True,
        arrive: Callable[[ForwardRequest], None] = _at_once,
        identity: ModelCard | None = None,
    ):
        self.card = identity or card(n_layers, name)
        self.layers = layers or whole_model(n_layers)
        self.has_head = has_head or self.layers.has_output
        self.n_ctx = n_ctx
        self.n_slots = n_slots
        self.kv_budget = n_slots * n_ctx if kv_budget is None else kv_budget
        self.can_rewind = can_rewind
        self.weight_bytes = 1000 * len(self.layers)
        self.closed = False
        self.evaluated: list[tuple[int, int]] = []  # (pos0, n_tokens) of every span
        self.forked: list[int] = []  # n_tokens of every copy
        self.batches: list[int] = []  # spans of every batch
        self.threads: set[int] = set()
        self.overlaps = overlaps
        self._before = before
        self._ready, self._arrive = ready, arrive
        self._rows: dict[SessionId, F32] = {}  # inputs of every layer so far [layers, n, W]

    def run(self, batch: Sequence[ForwardRequest]) -> list[ForwardOutput | Ds4Error]:
        assert len({work.session for work in batch}) == len(batch)
        self.threads.add(threading.get_ident())
        self.batches.append(len(batch))
        return [self._guarded(work) for work in batch]

    def forward_async(self, batch: Sequence[ForwardRequest]) -> PendingForward:
        assert self.overlaps
        answers = self.run(batch)
        refused = {n: e for n, e in enumerate(answers) if isinstance(e, Ds4Error)}

        def complete() -> list[ForwardOutput | Ds4Error]:
            for place, work in enumerate(batch):
                if place not in refused:
                    try:
                        self._arrive(work)
                    except Ds4Error as e:
                        answers[place] = e
            return answers

        def ready() -> bool:
            return all(self._ready(work) for n, work in enumerate(batch) if n not in refused)

        return PendingForward(refused=refused, complete=complete, ready=ready)

    def _guarded(self, work: ForwardRequest) -> ForwardOutput | Ds4Error:
        try:
            return self._run(work)
        except Ds4Error as e:
            return e

    def _run(self, work: ForwardRequest) -> ForwardOutput:
        self._before(work)
        n_layers, n_tokens = len(self.layers), len(work.tokens)
        past = self._rows.get(work.session)
        if past is None:
            past = np.zeros((n_layers, 0, self.card.hidden_width), np.float32)
        self._check_room(work.session, work.pos0 + n_tokens)
        if work.reset:
            past = past[:, :0]
        if work.pos0 != past.shape[1]:
            raise ModelError("pos0", got=work.pos0, expected=past.shape[1])
        if work.pos0 + n_tokens > self.n_ctx:
            raise CapacityError("ctx", needed=work.pos0 + n_tokens, available=self.n_ctx)
        assert (work.hidden is None) == (self.layers.start == 0)
        x = embed(work.tokens) if work.hidden is None else work.hidden.unpack()
        inputs = []
        for index, layer in enumerate(self.layers.indices):
            inputs.append(x)
            x = fake_layer(layer, past[index], x)
        self._rows[work.session] = np.concatenate([past, np.stack(inputs)], axis=1)
        self.evaluated.append((work.pos0, n_tokens))
        if work.output_kind is OutputKind.NOTHING:
            return ForwardOutput(eval_usec=1)
        if work.output_kind is OutputKind.LOGITS:
            rows = [fake_head(row, self.card.n_vocab) for row in x[-work.n_logits :]]
            return ForwardOutput(logits=rows[0] if len(rows) == 1 else np.stack(rows), eval_usec=1)
        return ForwardOutput(hidden=HiddenBatch.pack(x, work.reply_bits), eval_usec=1)

    def apply_head(self, row: HiddenBatch) -> F32:
        return fake_head(row.unpack()[-1])

    def length(self, session: SessionId) -> int | None:
        rows = self._rows.get(session)
        return None if rows is None else rows.shape[1]

    def rewind(self, session: SessionId, n_tokens: int) -> None:
        assert self.can_rewind
        self._rows[session] = self._rows[session][:, :n_tokens]

    def drop(self, session: SessionId) -> None:
        self._rows.pop(session, None)

    def reserve(self, session: SessionId, n_tokens: int) -> None:
        self._check_room(session, n_tokens)

    def _check_room(self, session: SessionId, n_tokens: int) -> None:
        held = {other: rows.shape[1] for other, rows in self._rows.items() if other != session}
        if len(held) >= self.n_slots:
            raise CapacityError(f"{NO_ROOM}slots", needed=len(held) + 1, available=self.n_slots)
        left = self.kv_budget - sum(held.values())
        if n_tokens > left:
            raise CapacityError(f"{NO_ROOM}tokens", needed=n_tokens, available=left)

    def fork(self, source: SessionId, target: SessionId, n_tokens: int) -> None:
        assert self.can_rewind
        rows = self._rows.get(source)
        if rows is None or rows.shape[1] < n_tokens:
            raise ModelError("fork", got=self.length(source), expected=f">= {n_tokens}")
        self._check_room(target, n_tokens)
        self._rows[target] = rows[:, :n_tokens].copy()
        self.forked.append(n_tokens)

    def save_cache(self, session: SessionId) -> list[memoryview]:
        rows, sizes = self._rows.get(session), self._sizes()
        if rows is None or not rows.shape[1]:
            raise ModelError("session", got="no tokens", expected="a timeline to save")
        shard = Shard(
            sizes=sizes,
            layer_range=self.layers,
            capacities=Capacities.of(self.n_ctx, sizes.window),
            n_tokens=rows.shape[1],
            layers=[[layer] for layer in rows.copy()],
        )
        return write_dsvl(shard)

    def load_cache(self, session: SessionId, n_tokens: int, payload: memoryview) -> None:
        shard = read_dsvl(payload, self._sizes(), self.layers, n_ctx=self.n_ctx, n_tokens=n_tokens)
        self._check_room(session, n_tokens)
        self._rows[session] = np.stack([raw for (raw,) in shard.layers])

    def _sizes(self) -> CacheSizes:
        return CacheSizes(**asdict(self.card.saved_form()), n_vocab=self.card.n_vocab)

    def close(self) -> None:
        self.closed = True


def embed(tokens: Sequence[int]) -> F32:
    """Return `[T, W]`."""
    columns = np.arange(1, WIDTH + 1)
    return ((np.array(tokens)[:, None] + 3) * columns % PRIME).astype(np.float32)


def fake_layer(layer: int, past: F32, x: F32) -> F32:
    """Mix each row with the sum of all rows up to it and with its position."""
    sums = np.cumsum(np.concatenate([past, x]), axis=0)[len(past) :]
    position = np.arange(len(past), len(past) + len(x))[:, None]
    return ((5 * x + 3 * sums + 7 * layer + position) % PRIME).astype(np.float32)


def fake_head(row: F32, n_vocab: int = N_VOCAB) -> F32:
    """Return logits `[V]`."""
    weights = (np.arange(n_vocab)[:, None] * np.arange(2, len(row) + 2) + 1) % PRIME
    return (weights @ row % PRIME).astype(np.float32)


def reference_logits(tokens: Sequence[int], n_layers: int = 6) -> F32:
    """Return what one process says after `tokens`."""
    x = embed(tokens)
    for layer in range(n_layers):
        x = fake_layer(layer, np.zeros((0, WIDTH), np.float32), x)
    return fake_head(x[-1])
