"""Weights by name, and the one way in which a DeepSeek V4 multiplies with them.

Owns: which products round their input as the C engine does on the CPU
(docs/spec/deepseek4-model.md#activation-forms, #activation-rounding), and how matrices are kept.
Refuses to know: layers. Invariant: inputs and results are float32, whatever the precision of the
product between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from ds4py.layers.linear import PackedLinear
from ds4py.models.base import DeviceSpec, Take
from ds4py.models.deepseek4.rounding import round_q8_0, round_q8_k
from ds4py.quant.formats import QuantFormat
from ds4py.quant.tensor import QuantTensor

Round = Callable[[torch.Tensor], torch.Tensor]


def activation_rounding(kind: QuantFormat) -> Round | None:
    """Return how the C engine rounds what it multiplies with weights of a format; None: not."""
    if kind.block_values == 1:
        return None
    return round_q8_k if kind.block_values % 256 == 0 else round_q8_0


class Linear:
    """`x @ W.T` for one matrix, or for several one below the other.

    Args:
        tensors: Matrices `[N_i, K]`.
        spec: Device, precision, rounding of activations.
    """

    def __init__(self, tensors: Sequence[QuantTensor], spec: DeviceSpec):
        self._parts = [
            (
                rounding if spec.act_quant else None,
                PackedLinear(list(group), dtype=spec.dtype, budget=spec.budget),
            )
            for rounding, group in groupby(tensors, lambda t: activation_rounding(t.format))
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 `[T, sum(N_i)]` for float32 `[T, K]`."""
        parts = [
            product(x if rounding is None else rounding(x)) for rounding, product in self._parts
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class Weights:
    """Hands out the weights of one slice.

    Args:
        take: From the loader.
        spec: Device, precision, rounding of activations.
        prefix: Put before every name.
    """

    def __init__(self, take: Take, spec: DeviceSpec, prefix: str = ""):
        self._take = take
        self._prefix = prefix
        self.spec = spec

    def below(self, prefix: str) -> Weights:
        """Return the weights whose names begin with a further prefix."""
        return Weights(self._take, self.spec, self._prefix + prefix)

    def packed(self, name: str) -> QuantTensor:
        """Return a tensor as it is in the file."""
        tensor = self._take(self._prefix + name)
        assert tensor is not None, f"{self._prefix}{name} was checked before loading"
        return tensor

    def dense(self, name: str) -> torch.Tensor:
        """Return a small tensor in float32: vectors, and matrices whose products stay exact."""
        return self.packed(name).decode(torch.float32)

    def optional(self, name: str) -> torch.Tensor | None:
        """Return a small tensor in float32, None if the file does not have it."""
        tensor = self._take(self._prefix + name)
        return None if tensor is None else tensor.decode(torch.float32)

    def linear(self, *names: str) -> Linear:
        """Return one product of matrices that stand one below the other."""
        return Linear([self.packed(name) for name in names], self.spec)
