"""Layer ranges: how people write them, what they mean, how to cut a model into them.

Owns: `LayerSpec` (text, before the layer count is known) and `LayerRange` (a fact about one model).
Refuses to know: files, peers, bytes on a wire. Invariant: a `LayerRange` is never empty, both ends
are inclusive, and only a span that ends on the last layer may own the output head.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ds4py.errors import ConfigError

_RANGE = re.compile(r"(\d{1,9})([:-])(\d{1,9}|output)", re.ASCII)
_USAGE = "expected A-B, A:B or A:output with A <= B, for example 0-12 or 13:output"


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """A contiguous slice of one model's layers.

    Args:
        start: First owned layer, 0-based.
        end: Last owned layer, inclusive.
        has_output: Whether the slice also owns the final norm and the output head.
    """

    start: int
    end: int
    has_output: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ConfigError(f"layers {self.start}-{self.end}: the range is empty; {_USAGE}")

    def __len__(self) -> int:
        return self.end - self.start + 1

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.start <= layer <= self.end

    def __str__(self) -> str:
        return f"{self.start}-{self.end}" + (" and the output head" if self.has_output else "")

    @property
    def indices(self) -> range:
        """Global layer numbers of the slice."""
        return range(self.start, self.end + 1)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer range as written, before the model's layer count is known.

    `A-B` includes the output head when B turns out to be the last layer. `A:B` never does and
    `A:output` always does, as in ds4 (docs/spec/wire-protocol.md#command-line).
    """

    start: int
    end: int | None  # None: through the last layer and the output head
    head_if_last: bool = False

    @classmethod
    def parse(cls, text: str) -> LayerSpec:
        """Read `A-B`, `A:B` or `A:output`.

        Raises:
            ConfigError: The text has another form or the range is reversed.
        """
        match = _RANGE.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"layers {text!r}: not a layer range; {_USAGE}")
        start, sign, end = int(match[1]), match[2], match[3]
        if end == "output":
            if sign == "-":
                raise ConfigError(f"layers {text!r}: not a layer range; write {start}:output")
            return cls(start, None)
        if int(end) < start:
            raise ConfigError(f"layers {text!r}: the range is reversed; {_USAGE}")
        return cls(start, int(end), head_if_last=sign == "-")

    def resolve(self, n_layers: int) -> LayerRange:
        """Fix the range for a model of `n_layers` layers.

        Raises:
            ConfigError: The range reaches past the last layer.
        """
        last = n_layers - 1
        end = last if self.end is None else self.end
        if self.start > last or end > last:
            raise ConfigError(
                f"layers {self}: the model has layers 0-{last}; choose a range inside them"
            )
        has_output = self.end is None or (self.head_if_last and end == last)
        return LayerRange(self.start, end, has_output)

    def __str__(self) -> str:
        if self.end is None:
            return f"{self.start}:output"
        return f"{self.start}{'-' if self.head_if_last else ':'}{self.end}"


def whole_model(n_layers: int) -> LayerRange:
    """Return the span that owns everything."""
    return LayerRange(0, n_layers - 1, has_output=True)


def describe_missing(first: int, n_layers: int, until: int | None = None) -> str:
    """Name the layers from `first` up to (not including) `until`, or to the output head."""
    if until is not None:
        last = until - 1
        return f"layer {first}" if first == last else f"layers {first}-{last}"
    if first >= n_layers:
        return "the output head"
    last = n_layers - 1
    what = f"layer {first}" if first == last else f"layers {first}-{last}"
    return f"{what} and the output head"


def balanced_cuts(
    layer_bytes: Sequence[int], n_parts: int, head_bytes: int = 0
) -> list[LayerRange]:
    """Cut a model into contiguous spans whose largest one is as small as possible.

    Args:
        layer_bytes: Weight bytes of each layer.
        n_parts: Number of machines, 1 to the number of layers.
        head_bytes: Bytes of the output head, carried by the last span.

    Returns:
        `n_parts` spans in layer order; the last one owns the output head.

    Raises:
        ConfigError: More machines than layers, or none.
    """
    n = len(layer_bytes)
    if not 1 <= n_parts <= n:
        raise ConfigError(f"{n_parts} machines for {n} layers: choose 1 to {n}")
    weights = [*layer_bytes[:-1], layer_bytes[-1] + head_bytes]
    prefix = [0]
    for weight in weights:
        prefix.append(prefix[-1] + weight)
    # best[k][i]: smallest possible largest part when the first i layers make k + 1 parts
    best = [[prefix[i] for i in range(n + 1)]]
    cut_at: list[list[int]] = []
    for k in range(1, n_parts):
        row, cuts = [0] * (n + 1), [0] * (n + 1)
        for i in range(k + 1, n + 1):
            row[i], cuts[i] = min(
                (max(best[k - 1][j], prefix[i] - prefix[j]), j) for j in range(k, i)
            )
        best.append(row)
        cut_at.append(cuts)
    ends = [n]
    for cuts in reversed(cut_at):
        ends.append(cuts[ends[-1]])
    bounds = [0, *reversed(ends)]
    return [LayerRange(a, b - 1, has_output=b == n) for a, b in itertools.pairwise(bounds)]
