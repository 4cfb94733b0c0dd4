"""Cut a prompt into chunks and decide when the next one may leave.

Owns: the chunk size that is given, the window, the account of what is in flight
(docs/spec/wire-protocol.md#prefill). Refuses to know: sockets, threads, flags of any protocol,
what chunks cost. Invariant: every token is in exactly one chunk, chunks are in order, and no more
than `window` of them are unanswered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ds4py.config import PrefillTuning
from ds4py.errors import ConfigError
from ds4py.wire.prefix_hash import extend


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One unit of work: tokens `[pos0, pos0 + len(tokens))`.

    Args:
        tokens: Token ids.
        pos0: Absolute position of the first one.
        prefix_hash: Hash of all tokens before `pos0`.
        result_hash: Hash including this chunk.
        n_logits: Rows at its end of which logits are wanted; 0 to its length.
    """

    tokens: tuple[int, ...]
    pos0: int
    prefix_hash: int
    result_hash: int
    n_logits: int

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
    tokens: Sequence[int], start: int, start_hash: int, *, chunk: int, n_logits: int = 1
) -> list[Chunk]:
    """Cut `tokens[start:]` into chunks with their hashes (wire-protocol.md#plain-prefill).

    Args:
        tokens: The whole prompt.
        start: Tokens that are cached already; 0 resets the session on every stage.
        start_hash: Hash of `tokens[:start]`.
        chunk: Tokens per chunk.
        n_logits: Rows at the end of the prompt of which logits are wanted; may be more than a
            chunk has.
    """
    chunks: list[Chunk] = []
    prefix, first_wanted = start_hash, len(tokens) - n_logits
    for pos0 in range(start, len(tokens), chunk):
        part = tuple(tokens[pos0 : pos0 + chunk])
        end, result = pos0 + len(part), extend(prefix, part)
        chunks.append(
            Chunk(
                tokens=part,
                pos0=pos0,
                prefix_hash=prefix,
                result_hash=result,
                n_logits=max(0, end - max(pos0, first_wanted)),
            )
        )
        prefix = result
    return chunks


def one_row_each(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Cut chunks so that each asks for logits of its last row only.

    For stages that answer a chunk with one row, as DS4D has it.
    """
    return [part for chunk in chunks for part in _one_row_each(chunk)]


def _one_row_each(chunk: Chunk) -> Iterator[Chunk]:
    rest, prefix = chunk.n_logits, chunk.prefix_hash
    start = 0
    while start < len(chunk.tokens):
        end = len(chunk.tokens) - max(0, rest - 1)
        part = chunk.tokens[start:end]
        result = extend(prefix, part)
        yield Chunk(
            tokens=part,
            pos0=chunk.pos0 + start,
            prefix_hash=prefix,
            result_hash=result,
            n_logits=min(1, rest),
        )
        start, prefix, rest = end, result, rest - 1


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
