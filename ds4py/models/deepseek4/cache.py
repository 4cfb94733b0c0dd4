"""One session's cache: rings of recent rows, growing arrays of compressed rows, pending windows.

Owns: how a session's tensors are laid out, rings by position, the portable form
(docs/spec/deepseek4-model.md#kv-cache, #dsv4). Refuses to know: how rows are made. Invariant: what
a layer holds follows from the number of its tokens alone, so there are no counters.

Instead of the C engine's folded compressor state, the projections of the last tokens are kept by
position; with `REWIND_SLACK` tokens more than needed, so that a timeline can be cut back a little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ds4py.kernels.cache import Cache, CacheTensor
from ds4py.layer_range import LayerRange
from ds4py.models.deepseek4.shape import OVERLAPPED, Shape, compressor_width

REWIND_SLACK: Final = 32
"""Tokens by which a timeline can be cut back without evaluating it again."""

NO_SCORE: Final = -1e30
"""Score of a token that is not there; finite, so that differences of two are numbers."""


class Ring:
    """The rows of the last positions.

    Args:
        rows: `[capacity, width]`; row `p % capacity` belongs to position `p`.
    """

    def __init__(self, rows: torch.Tensor):
        self.rows = rows

    def read(self, start: int, end: int) -> torch.Tensor:
        """Return the rows of positions `start` to `end`, oldest first; may share memory."""
        capacity = self.rows.shape[0]
        first, n = start % capacity, end - start
        assert n <= capacity, "only recent rows are held"
        if first + n <= capacity:
            return self.rows[first : first + n]
        return torch.cat((self.rows[first:], self.rows[: first + n - capacity]))

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Store the rows of positions from `start` on; of more than fit, the last ones."""
        capacity = self.rows.shape[0]
        skipped = max(rows.shape[0] - capacity, 0)
        rows, first = rows[skipped:], (start + skipped) % capacity
        before_end = min(rows.shape[0], capacity - first)
        self.rows[first : first + before_end] = rows[:before_end]
        self.rows[: rows.shape[0] - before_end] = rows[before_end:]


@dataclass(frozen=True, slots=True)
class CompressedCache:
    """What one compressor keeps of a session.

    Args:
        ratio: Tokens per row.
        rows: float16 `[rows, width]`: finished rows, row `c` of window `c`.
        kv: float32 ring of the tokens' projections.
        score: float32 ring of the tokens' scores.
    """

    ratio: int
    rows: torch.Tensor
    kv: Ring
    score: Ring

    def pending_from(self, length: int) -> int:
        """Return the oldest position whose projections the next row can need."""
        overlap = self.ratio if self.ratio == OVERLAPPED else 0
        return max(length // self.ratio * self.ratio - overlap, 0)

    def export(self, length: int) -> list[torch.Tensor]:
        """Return finished rows, state kv and state score as the C engine keeps them."""
        rows = self.rows[: length // self.ratio].float()
        return [rows, self._state(self.kv, 0.0, length), self._state(self.score, NO_SCORE, length)]

    def fill(self, length: int, saved: Iterator[torch.Tensor]) -> None:
        """Take what `export` returned."""
        self.rows[: length // self.ratio] = next(saved)
        for ring in (self.kv, self.score):
            slots = next(saved).to(ring.rows.device)
            start = self.pending_from(length)
            ring.write(start, slots[self._slots(start, length)])

    def _state(self, ring: Ring, empty: float, length: int) -> torch.Tensor:
        n_slots = 2 * self.ratio if self.ratio == OVERLAPPED else self.ratio
        state = ring.rows.new_full((n_slots, ring.rows.shape[1]), empty)
        start = self.pending_from(length)
        state[self._slots(start, length)] = ring.read(start, length)
        return state

    def _slots(self, start: int, length: int) -> slice:
        """Return the C engine's slots of the pending tokens.

        With overlap, the previous window comes first, then the tokens of the open one.
        """
        missing = self.ratio if self.ratio == OVERLAPPED and length < self.ratio else 0
        return slice(missing, missing + length - start)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer of one session.

    Args:
        raw: float16 ring of the last rows.
        compressed: Rows for attention, None in layers without compression.
        index: Rows for the indexer, None in layers without.
    """

    raw: Ring
    compressed: CompressedCache | None
    index: CompressedCache | None


class CacheLayout:
    """Which tensors a session of a slice has.

    Args:
        shape: The model.
        layers: The layers.
        n_ctx: Tokens that a session can hold.
    """

    def __init__(self, shape: Shape, layers: LayerRange, n_ctx: int):
        self._shape = shape
        self._ratios = [shape.ratios[layer] for layer in layers.indices]
        self._n_ctx = n_ctx

    def tensors(self) -> list[CacheTensor]:
        """Return all layers' tensors in the order that `layers` takes them."""
        return [tensor for ratio in self._ratios for tensor in self._layer(ratio)]

    def layers(self, cache: Cache) -> list[LayerCache]:
        """Give a session's tensors their meaning."""
        tensors = iter(cache)
        return [self._named(ratio, tensors) for ratio in self._ratios]

    def export(self, cache: Cache, length: int) -> list[torch.Tensor]:
        """Return the portable form: float32 on the CPU, layer by layer."""
        parts: list[torch.Tensor] = []
        for layer in self.layers(cache):
            live = min(self._shape.window, length)
            parts.append(layer.raw.read(length - live, length).float())
            for compressed in (layer.compressed, layer.index):
                parts += compressed.export(length) if compressed else []
        return [part.cpu() for part in parts]

    def fill(self, cache: Cache, length: int, saved: Sequence[torch.Tensor]) -> None:
        """Take the portable form; older rows than it has are gone."""
        parts = iter(saved)
        for layer in self.layers(cache):
            live = min(self._shape.window, length)
            layer.raw.write(length - live, next(parts).to(layer.raw.rows.device))
            for compressed in (layer.compressed, layer.index):
                if compressed:
                    compressed.fill(length, parts)

    def _layer(self, ratio: int) -> Iterator[CacheTensor]:
        shape = self._shape
        yield CacheTensor((shape.window + REWIND_SLACK, shape.d_head), torch.float16)
        if ratio:
            yield from self._compressed(ratio, shape.d_head)
        if ratio == OVERLAPPED:
            yield from self._compressed(ratio, shape.index_width)

    def _compressed(self, ratio: int, width: int) -> Iterator[CacheTensor]:
        pending = (2 * ratio if ratio == OVERLAPPED else ratio) + REWIND_SLACK
        yield CacheTensor((self._n_ctx // ratio + 1, width), torch.float16, token_axis=0)
        yield CacheTensor((pending, compressor_width(ratio, width)), torch.float32)
        yield CacheTensor((pending, compressor_width(ratio, width)), torch.float32)

    def _named(self, ratio: int, tensors: Iterator[torch.Tensor]) -> LayerCache:
        def compressed() -> CompressedCache:
            return CompressedCache(ratio, next(tensors), Ring(next(tensors)), Ring(next(tensors)))

        raw = Ring(next(tensors))
        return LayerCache(
            raw,
            compressed() if ratio else None,
            compressed() if ratio == OVERLAPPED else None,
        )
