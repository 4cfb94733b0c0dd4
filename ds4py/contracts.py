"""The seams of ds4py: what a stage does, what a session does, what a server needs.

Owns: the Protocols `ModelRunner`, `Session`, `Backend` and the values that cross them. Refuses to
know: sockets, tensors, HTTP. Invariant: everything here is a frozen value or a Protocol, so both
towers (network, model) can be tested alone.

Axis glossary: `T` tokens in a span, `W` hidden width, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Final, NewType, Protocol

from ds4py.activations import F32, HiddenBatch
from ds4py.errors import Ds4Error, SnapshotError
from ds4py.layer_range import LayerRange

SessionId = NewType("SessionId", int)
"""64-bit, non-zero; names one token timeline on every stage of a route."""

NO_ROOM: Final = "KV cache: "
"""How the words of a `CapacityError` begin that goes away when sessions end.

Between ds4py stages the words are all that a RESULT carries of an error, so anyone who wants to
know whether making room may help looks at this (docs/design/kv-cache.md).
"""

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in the whole prompt); must return at once."""

Cancelled = Callable[[], bool]
"""Polled between chunks and tokens; True asks the work to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheForm:
    """What ds4's form of a session's cache depends on (docs/spec/deepseek4-model.md#payloads).

    Args:
        ratios: Tokens per compressed row of every layer of the model; 0 for a layer without.
        width: Values of a raw or compressed row.
        index_width: Values of an index row.
        window: Raw rows that a long session keeps.
    """

    ratios: tuple[int, ...]
    width: int
    index_width: int
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainForm:
    """What our form of a cache of plain keys and values depends on (docs/spec/kv-payload.md).

    Args:
        n_heads: Key/value heads of a layer.
        width: Values of a key, and of a value, of one head.
    """

    n_heads: int
    width: int


SavedForm = CacheForm | PlainForm
"""How sessions of a model are saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Identity and shape of a model, as far as peers, server and sampler need it.

    Args:
        model_id: 32-bit id on the wire. ds4's own models keep ds4's ids; any other model has
            `0x80000000 | crc32(architecture and shape)`.
        name: Name on the wire, at most 127 bytes of UTF-8.
        architecture: `general.architecture` of the GGUF.
        n_layers: Layers of the whole model.
        n_vocab: Vocabulary size `V`.
        hidden_width: Values per token between layers, `W`.
        n_ctx_train: Context length that the model was trained for, in tokens.
        quant_bits: 2 or 4; informational on the wire.
        fingerprint: Of the file without its weights; empty if unknown. Stages of one route may have
            different ones: a layer may be quantized again.
        cache_form: Of saved sessions; None if the architecture's have no portable form.
    """

    model_id: int
    name: str
    architecture: str
    n_layers: int
    n_vocab: int
    hidden_width: int
    n_ctx_train: int
    quant_bits: int
    fingerprint: str = ""
    cache_form: SavedForm | None = None

    def saved_form(self) -> SavedForm:
        """Return the form of saved sessions.

        Raises:
            SnapshotError: There is none.
        """
        if self.cache_form is None:
            raise SnapshotError(
                f"sessions of {self.architecture} models have no portable form; "
                "evaluate the prompt again"
            )
        return self.cache_form


class OutputKind(Enum):
    """What a stage should hand back for a span."""

    NOTHING = "nothing"
    HIDDEN = "hidden"
    LOGITS = "logits"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRequest:
    """One span of one session, for one stage.

    Args:
        session: Timeline that the span continues.
        tokens: Token ids `[T]`.
        pos0: Absolute position of the first token, 0-based; equals the timeline's length.
        hidden: Output of the previous layer `[T, W]`; None exactly when the slice starts at 0.
        reset: Empty the timeline first.
        output_kind: What to hand back: nothing, hidden states of all rows, or logits of the last
            rows.
        reply_bits: Packing of a hidden reply: 32, 16 or 8.
        n_logits: Rows of which logits are wanted, 1 to `T`.
    """

    session: SessionId
    tokens: tuple[int, ...]
    pos0: int
    hidden: HiddenBatch | None
    reset: bool = False
    output_kind: OutputKind = OutputKind.HIDDEN
    reply_bits: int = 32
    n_logits: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """Answer to one `ForwardRequest`.

    Args:
        hidden: Packed `[T, W]` if asked for.
        logits: `f32[V]` of the last row if asked for, of several rows `f32[n_logits, V]`; owned by
            the receiver.
        eval_usec: Time that the span spent in evaluation, microseconds.
    """

    hidden: HiddenBatch | None = None
    logits: F32 | None = None
    eval_usec: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingForward:
    """Spans on their way through a device.

    Args:
        refused: The errors of those that it was not given, by place in the batch.
        complete: Waits for the others and returns the answers to all, in the order of the batch; to
            be called once, in the order of the starts. What fails only here is the device, and the
            session's cache holds nothing of use from that span on.
        ready: Whether there is hardly anything to wait for any more.
    """

    refused: Mapping[int, Ds4Error]
    complete: Callable[[], list[ForwardOutput | Ds4Error]]
    ready: Callable[[], bool]


class ModelRunner(Protocol):
    """One machine's slice of a model with its caches.

    All methods but the properties must be called on one thread, the device thread.
    """

    @property
    def card(self) -> ModelCard:
        """Identity of the whole model."""

    @property
    def layers(self) -> LayerRange:
        """The owned layers."""

    @property
    def has_head(self) -> bool:
        """Whether `apply_head` can run (always when the span has the output)."""

    @property
    def n_ctx(self) -> int:
        """Tokens that one session can hold."""

    @property
    def n_slots(self) -> int:
        """Sessions that the cache pool can hold at once."""

    @property
    def can_rewind(self) -> bool:
        """Whether a timeline can be cut at any position."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights held by this process."""

    @property
    def overlaps(self) -> bool:
        """Whether spans can be started while others are on their way (`start`)."""

    def run(self, batch: Sequence[ForwardRequest]) -> list[ForwardOutput | Ds4Error]:
        """Evaluate spans of different sessions; answers stand in the order of the batch.

        A session appears at most once in a batch. An unknown session takes a free slot;
        `CapacityError` (`NO_ROOM`) if there is none, or no memory for the tokens. One span's error
        disturbs no other span, and leaves that session's timeline as it was unless the error is the
        device's own.
        """

    def forward_async(self, batch: Sequence[ForwardRequest]) -> PendingForward:
        """Have spans evaluated as by `run` without waiting for the answers (only if `overlaps`).

        For all other methods they are evaluated already: what is asked for next, be it the next
        span of the same session, finds or follows what they leave.
        """

    def apply_head(self, row: HiddenBatch) -> F32:
        """Return logits `f32[V]` for the last row of a hidden batch."""

    def length(self, session: SessionId) -> int | None:
        """Return the number of cached tokens of a session, None if it is unknown."""

    def rewind(self, session: SessionId, n_tokens: int) -> None:
        """Keep the first `n_tokens` of a session (only if `can_rewind`)."""

    def drop(self, session: SessionId) -> None:
        """Free a session's slot; an unknown session is no error."""

    def reserve(self, session: SessionId, n_tokens: int) -> None:
        """Take the memory that a session needs to hold so many tokens, ahead of its spans.

        Args:
            session: Unknown sessions take a free slot.
            n_tokens: If the session holds more already, nothing happens.

        Raises:
            CapacityError: As in `run`; the session is as before.
        """

    def fork(self, source: SessionId, target: SessionId, n_tokens: int) -> None:
        """Let a session begin with a copy of another one's first tokens (only if `can_rewind`).

        Args:
            source: Goes on unchanged.
            target: What it holds is replaced; unknown sessions take a free slot.
            n_tokens: Tokens that are copied.

        Raises:
            ModelError: The source holds fewer tokens.
            CapacityError: As in `run`; both sessions are as before.
        """

    def save_cache(self, session: SessionId) -> list[memoryview]:
        """Return the pieces of a payload, `DSVL` or `DPKL`, with a copy of a session's cache.

        Takes as long as copying the cache from the device, and as much host memory as the payload.

        Raises:
            SnapshotError: The model's sessions have no portable form.
            ModelError: The session is unknown or empty.
        """

    def load_cache(self, session: SessionId, n_tokens: int, payload: memoryview) -> None:
        """Replace a session's cache by such a payload, or begin a session with it.

        Args:
            session: Unknown sessions take a free slot.
            n_tokens: Tokens that the payload must stand for.
            payload: Not kept.

        Raises:
            SnapshotError: The payload is damaged, of another model, other layers, another length
                or another type of keys and values, or leaves no room in the context; the session
                is as before.
            CapacityError: The session is new and there is no free slot.
        """

    def close(self) -> None:
        """Free the device memory; idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncResult:
    """What `Session.sync` did.

    Args:
        logits: `f32[V]` for the token after the prompt.
        n_cached: Leading tokens that were reused instead of evaluated.
    """

    logits: F32
    n_cached: int


class Session(Protocol):
    """One token timeline, wherever its layers are. Used by one thread at a time."""

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens that the caches represent."""

    @property
    def n_ctx(self) -> int:
        """Tokens that the session can hold."""

    def reusable(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens `sync` would not evaluate again; from any thread.

        At least one token is always left over, since the logits come from evaluating the last one.
        """

    def sync(
        self,
        tokens: Sequence[int],
        *,
        progress: Progress | None = None,
        cancelled: Cancelled | None = None,
    ) -> SyncResult:
        """Bring the timeline to exactly `tokens`, reusing whatever prefix it can.

        Raises:
            CapacityError: The prompt is empty or longer than the context; nothing was changed.
            CancelledError: `cancelled` became true; finished chunks stay cached.
            RouteIncompleteError: Some layers have no owner.
            ClusterError: A stage failed and the replay failed too.
            TransportError: A stage was lost and did not come back in time.
        """

    def eval(self, token: int) -> F32:
        """Append one token and return the logits `f32[V]` after it; raises as `sync`."""

    def rewind(self, n_tokens: int) -> None:
        """Forget everything after the first `n_tokens` tokens."""

    def save(self) -> list[memoryview]:
        """Return the pieces of a payload, `DSV4` or `DPKV`: all that is needed to go on elsewhere.

        Its bytes do not depend on how the layers are distributed. The session goes on unchanged,
        and the pieces with it: they are copies.

        Raises:
            SnapshotError: The model's sessions have no portable form, nothing was evaluated since
                the timeline changed, or the stages' parts do not fit together.
            RemoteWorkError: A stage refused.
            RouteIncompleteError: Some layers have no owner.
            TransportError: A stage was lost or too slow.
        """

    def load(self, payload: bytes | memoryview) -> None:
        """Replace the timeline by a saved one; `sync` with the same tokens then costs nothing.

        Args:
            payload: What `save` returned, as a whole; not kept.

        Raises:
            SnapshotError: The payload is damaged, of another model, or too long for the context;
                the session is as before.
            Ds4Error: A stage did not take its part, as in `save`; the session is empty.
        """

    def close(self) -> None:
        """Give the session's memory back; idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatus:
    """One process of the route and how fast it has been.

    Args:
        name: "coordinator" or the worker's address.
        layers: Its layers; None for a coordinator that owns none.
        weight_bytes: Packed weights in its memory; None if a plain peer cannot tell.
        prefill_tokens: Tokens evaluated in spans of more than one token.
        prefill_usec: Time spent on them in evaluation.
        prefill_hop_usec: Time that they spent between the stage before and this one beyond any
            evaluation: wire, queues, codecs. Spans overlap, so it may exceed the time that passed.
        prefill_wait_usec: Time that they waited for the stages behind this one.
        decode_tokens: Tokens evaluated in spans of one token.
        decode_usec: Time spent on them in evaluation.
        decode_hop_usec: As `prefill_hop_usec`.
        decode_wait_usec: As `prefill_wait_usec`.
        busy_usec: Time with at least one span in evaluation: spans of one batch count once.
        input_bytes: Token ids and hidden states that it was sent, as it says itself.
        output_bytes: Hidden states or logits that it made, as it says itself.
        kv_bytes: Cache memory that sessions hold; None if not known, as of other processes.
        kv_budget_bytes: Cache memory that they may hold together; None if not known.
    """

    name: str
    layers: LayerRange | None
    weight_bytes: int | None = None
    prefill_tokens: int = 0
    prefill_usec: int = 0
    prefill_hop_usec: int = 0
    prefill_wait_usec: int = 0
    decode_tokens: int = 0
    decode_usec: int = 0
    decode_hop_usec: int = 0
    decode_wait_usec: int = 0
    busy_usec: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    kv_bytes: int | None = None
    kv_budget_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether requests can be served now.

    Args:
        ready: The whole model is reachable.
        missing: Which layers nobody serves; empty when ready.
        stages: The route in layer order, as far as it is known.
        replays: How often a timeline was evaluated again because a stage refused or was lost.
        route_changes: How often another route was taken, the first one included.
    """

    ready: bool
    missing: str
    stages: tuple[StageStatus, ...] = ()
    replays: int = 0
    route_changes: int = 0


class Backend(Protocol):
    """What the HTTP server and the CLI need to know of everything below them."""

    @property
    def card(self) -> ModelCard:
        """The served model."""

    @property
    def n_ctx(self) -> int:
        """Tokens that one session can hold."""

    def n_cached(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens a session that can be leased now holds, roughly."""

    def lease(
        self, tokens: Sequence[int], *, cancelled: Cancelled | None = None
    ) -> AbstractContextManager[Session]:
        """Borrow the free session in which `tokens` cost least: a conversation that goes on.

        Waits in arrival order while all are busy.

        Raises:
            CancelledError: `cancelled` became true while waiting.
        """

    def health(self) -> Health:
        """Report readiness; never blocks."""
