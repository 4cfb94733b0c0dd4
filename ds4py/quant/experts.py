"""Products with one packed matrix per expert, for rows that are grouped by expert.

Owns: grouping, and decoding only the experts that are used. Refuses to know: routing. Invariant:
only packed bytes are kept; what is decoded at a time is one expert, or a bounded piece. On an
accelerator nothing here makes the host wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from ds4py.quant.tensor import QuantTensor


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Rows sorted by their expert.

    Args:
        order: int64 `[M]`: the rows' numbers, expert by expert.
        present: (expert, first, end) of every expert that has rows, in the sorted order.
    """

    order: torch.Tensor
    present: list[tuple[int, int, int]]

    @classmethod
    def of(cls, experts: torch.Tensor, n_experts: int) -> ExpertGroups:
        """Group rows by their expert's number, int64 `[M]`."""
        order = experts.argsort(stable=True)
        counts = experts.bincount(minlength=n_experts).tolist()
        present, start = [], 0
        for expert, count in enumerate(counts):
            if count:
                present.append((expert, start, start + count))
            start += count
        return cls(order, present)


class ExpertProduct:
    """The matrices of all experts for one place in the layer.

    Args:
        tensor: `[X, N, K]`.
        dtype: Type of inputs and results.
    """

    def __init__(self, tensor: QuantTensor, dtype: torch.dtype):
        self._tensor = tensor
        self._dtype = dtype

    def __call__(self, x: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
        """Return `[M, N]` for rows `[M, K]` in the groups' order."""
        y = x.new_empty((x.shape[0], self._tensor.shape[1]))
        for expert, start, end in groups.present:
            y[start:end] = linear(x[start:end], self._tensor.expert(expert).decode(self._dtype))
        return y
