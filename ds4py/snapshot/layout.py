"""How large every part of a saved session is.

Owns: the shapes of a layer's tensors and the writer's capacities
(docs/spec/deepseek4-model.md#session-state, #capacities, #dsv4). Refuses to know: bytes, tensors.
Invariant: all shapes follow from the model and the number of tokens alone, so a payload's size is
known before its body is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ds4py.layer_range import LayerRange

OVERLAPPED: Final = 4
"""The ratio whose windows overlap, and whose layers have index rows."""

SCORES: Final = (3, 6)
"""Places, among a layer's tensors, of the compressors' scores."""

EMPTY_SCORE: Final = -1e30
"""Score of a slot without a token: finite, so that every engine reads it."""

_MAX_PREFILL: Final = 4096
_MAX_RAW: Final = 8192
_RAW_STEP: Final = 256
_WORD: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """What a payload depends on, of one model.

    Args:
        ratios: Tokens per compressed row of every layer; 0 for a layer without.
        width: Values of a raw or compressed row.
        index_width: Values of an index row.
        window: Raw rows that a long session keeps.
        n_vocab: Vocabulary size.
    """

    ratios: tuple[int, ...]
    width: int
    index_width: int
    window: int
    n_vocab: int

    @property
    def n_layers(self) -> int:
        """Layers of the whole model."""
        return len(self.ratios)

    def compressed_rows(self, layer: int, n_tokens: int) -> int:
        """Return the compressed rows of a layer after `n_tokens`."""
        ratio = self.ratios[layer]
        return n_tokens // ratio if ratio else 0

    def index_rows(self, layer: int, n_tokens: int) -> int:
        """Return the index rows of a layer after `n_tokens`."""
        return n_tokens // OVERLAPPED if self.ratios[layer] == OVERLAPPED else 0

    def counts(self, layers: LayerRange, n_tokens: int) -> tuple[list[int], list[int]]:
        """Return the compressed rows and the index rows of each layer of a span."""
        return (
            [self.compressed_rows(layer, n_tokens) for layer in layers.indices],
            [self.index_rows(layer, n_tokens) for layer in layers.indices],
        )

    def shapes(self, layer: int, n_tokens: int) -> list[tuple[int, int]]:
        """Return (rows, values) of a layer's tensors, in the order in which they are saved.

        Raw rows; with compression also compressed rows, state, scores; with an index also index
        rows, their state, their scores.
        """
        ratio = self.ratios[layer]
        shapes = [(min(self.window, n_tokens), self.width)]
        if ratio:
            state = _state(ratio, self.width)
            shapes += [(self.compressed_rows(layer, n_tokens), self.width), state, state]
        if ratio == OVERLAPPED:
            state = _state(ratio, self.index_width)
            shapes += [(self.index_rows(layer, n_tokens), self.index_width), state, state]
        return shapes

    def range_bytes(self, layers: LayerRange, n_tokens: int) -> int:
        """Return the bytes of the counts and tensors of some layers."""
        values = sum(
            rows * width for layer in layers.indices for rows, width in self.shapes(layer, n_tokens)
        )
        return _WORD * (2 * len(layers) + values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """What the engine that saved a session had room for.

    Args:
        n_ctx: Tokens that a session could hold.
        prefill_cap: Largest chunk of a prompt, in tokens.
        raw_cap: Raw rows that had room.
        raw_window: Raw rows that a query sees.
        comp_cap: Compressed rows of a layer that had room.
    """

    n_ctx: int
    prefill_cap: int
    raw_cap: int
    raw_window: int
    comp_cap: int

    @classmethod
    def of(
        cls,
        n_ctx: int,
        window: int,
        *,
        prefill_cap: int | None = _MAX_PREFILL,
        raw_cap: int | None = None,
    ) -> Capacities:
        """Return what a C node that was started alike has room for (wire-protocol.md#dsvl).

        The numbers say nothing about our own caches. They are written because a C coordinator
        refuses shards whose capacities differ (docs/spec/wire-protocol.md#quirks Q23): all stages
        of its route need the same context and the same two variables. The default is the rule of
        the GPU engines, since stock CPU nodes refuse to save; a build that saves on the CPU writes
        the window as `raw_cap`.

        Args:
            n_ctx: Tokens that a session can hold.
            window: Raw rows that a query of the model sees.
            prefill_cap: DS4_METAL_PREFILL_CHUNK; None takes the context.
            raw_cap: DS4_METAL_GRAPH_RAW_CAP; None takes the rule. Either is kept between the window
                and the context.
        """
        prefill = n_ctx if prefill_cap is None else min(prefill_cap, n_ctx)
        raw_window = min(window, n_ctx)
        if raw_cap is None:
            rows = min(n_ctx, window + prefill)
            raw_cap = min(-(-rows // _RAW_STEP) * _RAW_STEP, _MAX_RAW)
        return cls(
            n_ctx=n_ctx,
            prefill_cap=prefill,
            raw_cap=min(max(raw_cap, raw_window), n_ctx),
            raw_window=raw_window,
            comp_cap=n_ctx // OVERLAPPED + 2,
        )


def _state(ratio: int, width: int) -> tuple[int, int]:
    """Return the shape of a compressor's state: overlapping windows hold everything twice."""
    views = 2 if ratio == OVERLAPPED else 1
    return views * ratio, views * width
