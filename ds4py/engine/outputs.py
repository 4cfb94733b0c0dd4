"""From a batch's hidden states to its spans' answers, with as few transfers as possible.

Owns: which rows leave the device, together and in which form. Refuses to know: sessions, caches.
Invariant: one product with the output head for all spans that want logits, one transfer for all
hidden states of the same packing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from ds4py.activations import HiddenBatch
from ds4py.contracts import ForwardOutput, ForwardRequest, OutputKind
from ds4py.engine.host_staging import Later, Staging

Logits = Callable[[torch.Tensor], torch.Tensor]
"""`models.base.Slice.logits`."""


def answers(
    works: Sequence[ForwardRequest], hidden: torch.Tensor, logits: Logits, staging: Staging
) -> Later[list[ForwardOutput]]:
    """Begin to answer spans.

    Args:
        works: The spans.
        hidden: Their hidden states float32 `[T, W]`, one below the other.
        logits: Of the model.
        staging: Of its device.

    Returns:
        The outputs in the order of the spans.
    """
    rows = dict(enumerate(torch.split(hidden, [len(work.tokens) for work in works])))
    wanted: list[Later[Mapping[int, ForwardOutput]]] = []
    final = {
        index: rows[index][-works[index].n_logits :]
        for index in rows
        if works[index].output_kind is OutputKind.LOGITS
    }
    if final:
        wanted.append(_with_logits(final, logits, staging))
    for bits in {work.reply_bits for work in works if work.output_kind is OutputKind.HIDDEN}:
        own = {
            index: part
            for index, part in rows.items()
            if works[index].output_kind is OutputKind.HIDDEN and works[index].reply_bits == bits
        }
        wanted.append(_with_hidden(own, bits, staging))

    def complete() -> list[ForwardOutput]:
        found: dict[int, ForwardOutput] = {}
        for part in wanted:
            found |= part()
        return [found.get(index, ForwardOutput()) for index in rows]

    return complete


def _with_logits(
    rows: Mapping[int, torch.Tensor], logits: Logits, staging: Staging
) -> Later[Mapping[int, ForwardOutput]]:
    ends = list(itertools.accumulate(part.shape[0] for part in rows.values()))
    fetched = staging.fetch(logits(_joined(rows)))

    def complete() -> dict[int, ForwardOutput]:
        parts = np.split(fetched(), ends[:-1])
        return {
            index: ForwardOutput(logits=own[0] if len(own) == 1 else own)
            for index, own in zip(rows, parts, strict=True)
        }

    return complete


def _with_hidden(
    rows: Mapping[int, torch.Tensor], bits: int, staging: Staging
) -> Later[Mapping[int, ForwardOutput]]:
    counts = [part.shape[0] for part in rows.values()]
    fetched = staging.download(_joined(rows), bits)
    return lambda: {
        index: ForwardOutput(hidden=own)
        for index, own in zip(rows, _divided(fetched(), counts), strict=True)
    }


def _joined(rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
    parts = list(rows.values())
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _divided(batch: HiddenBatch, counts: Sequence[int]) -> list[HiddenBatch]:
    """Return consecutive rows as batches of their own; shares the bytes."""
    row_bytes = batch.width * batch.bits // 8
    parts, data = [], batch.data.cast("B")
    start = 0
    for count in counts:
        end = start + count * row_bytes
        parts.append(HiddenBatch(count, batch.width, batch.bits, data[start:end]))
        start = end
    return parts
