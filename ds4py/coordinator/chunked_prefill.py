"""Cut a prompt into spans and decide when the next one may leave.

Owns: the chunk size that is given, window, flags of each span, the account of what is in flight
(docs/spec/wire-protocol.md#prefill). Refuses to know: sockets, threads, the route's addresses,
what chunks cost.
Invariant: every token is in exactly one span, spans are in order, and no more than `window` spans
are unanswered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds4py.config import PrefillTuning
from ds4py.errors import ConfigError
from ds4py.wire.messages import WorkFlags
from ds4py.wire.prefix_hash import extend


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteShape:
    """What of a route decides flags and windows.

    Args:
        n_hops: Remote hops.
        first_layer: First layer of hop 0; input travels unless it is 0.
        first_is_output: Hop 0 owns the output head.
    """

    n_hops: int
    first_layer: int
    first_is_output: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One unit of work: tokens `[pos0, pos0 + len(tokens))`.

    Args:
        tokens: Token ids.
        pos0: Absolute position of the first one.
        prefix_hash: Hash of all tokens before `pos0`.
        result_hash: Hash including this span.
        flags: WORK flags of the frame to hop 0.
        is_last: Whether the answer must carry logits (or the last hidden state).
    """

    tokens: tuple[int, ...]
    pos0: int
    prefix_hash: int
    result_hash: int
    flags: WorkFlags
    is_last: bool

    @property
    def end(self) -> int:
        """Length of the timeline after this span."""
        return self.pos0 + len(self.tokens)


def prefill_cap(tuning: PrefillTuning, n_ctx: int) -> int:
    """Return the most tokens that one span may have (docs/spec/wire-protocol.md#chunk-size)."""
    return n_ctx if tuning.prefill_cap is None else min(n_ctx, tuning.prefill_cap)


def given_chunk(tuning: PrefillTuning, n_ctx: int) -> int | None:
    """Return the tokens per chunk that the user asked for; None leaves the choice to us.

    Raises:
        ConfigError: The chunk is unparsable or larger than the prefill cap.
    """
    cap = prefill_cap(tuning, n_ctx)
    if isinstance(tuning.chunk, ConfigError):
        raise tuning.chunk
    if tuning.chunk is None:
        return None
    if tuning.chunk > n_ctx:
        return cap
    if tuning.chunk > cap:
        raise ConfigError(
            f"prefill chunk {tuning.chunk}: more than the {cap} tokens that a stage accepts"
        )
    return tuning.chunk


def window_size(tuning: PrefillTuning, n_hops: int, n_chunks: int) -> int:
    """Return how many spans may be unanswered (docs/spec/wire-protocol.md#pipelined-prefill).

    Raises:
        ConfigError: The environment holds an unusable window.
    """
    if isinstance(tuning.window, ConfigError):
        raise tuning.window
    window = tuning.window or max(2, min(8, n_hops + 2))
    return max(1, min(window, n_chunks))


def cut_chunks(
    tokens: Sequence[int],
    start: int,
    start_hash: int,
    *,
    chunk: int,
    shape: RouteShape,
    ack_early: bool,
) -> list[Chunk]:
    """Cut `tokens[start:]` into spans with their flags and hashes.

    See docs/spec/wire-protocol.md#pipelined-prefill, #plain-prefill.

    Args:
        tokens: The whole prompt.
        start: Tokens that are cached already; 0 resets the session on every stage.
        start_hash: Hash of `tokens[:start]`.
        chunk: Tokens per span.
        shape: The route.
        ack_early: Whether spans before the last ask for an ACK instead of their full result.
    """
    chunks: list[Chunk] = []
    prefix = start_hash
    for pos0 in range(start, len(tokens), chunk):
        part = tuple(tokens[pos0 : pos0 + chunk])
        is_last = pos0 + chunk >= len(tokens)
        flags = chunk_flags(shape, reset=pos0 == 0)
        if ack_early and not is_last:
            flags |= WorkFlags.ACK_ONLY
        result = extend(prefix, part)
        chunks.append(
            Chunk(
                tokens=part,
                pos0=pos0,
                prefix_hash=prefix,
                result_hash=result,
                flags=flags,
                is_last=is_last,
            )
        )
        prefix = result
    return chunks


def chunk_flags(shape: RouteShape, *, reset: bool) -> WorkFlags:
    """Return the flags of a frame to hop 0, before ACK_ONLY."""
    flags = WorkFlags(0)
    if shape.first_layer != 0:
        flags |= WorkFlags.INPUT_HC
    if shape.first_is_output:
        flags |= WorkFlags.OUTPUT_LOGITS
    if reset:
        flags |= WorkFlags.RESET_SESSION
    return flags


class Window:
    """The account of spans in flight; answers may come in any order.

    Args:
        n_chunks: Spans of the whole prefill.
        size: Most spans in flight.
    """

    def __init__(self, n_chunks: int, size: int):
        self._n_chunks = n_chunks
        self._size = size
        self._submitted = 0
        self._answered: set[int] = set()
        self._completed = 0

    @property
    def next_chunk(self) -> int | None:
        """Index of the span that may leave now; None if the window is full or all are out."""
        full = self._submitted - len(self._answered) >= self._size
        return None if full or self._submitted >= self._n_chunks else self._submitted

    @property
    def in_flight(self) -> int:
        """Spans submitted and not answered."""
        return self._submitted - len(self._answered)

    @property
    def completed(self) -> int:
        """Leading spans that are all answered."""
        return self._completed

    @property
    def done(self) -> bool:
        """Whether every span is answered."""
        return self._completed == self._n_chunks

    def submitted(self) -> None:
        """Count the chunk `next_chunk` as out."""
        assert self.next_chunk is not None
        self._submitted += 1

    def answered(self, index: int) -> None:
        """Count an answer; each span is answered once."""
        assert index < self._submitted
        assert index not in self._answered
        self._answered.add(index)
        while self._completed in self._answered:
            self._completed += 1
