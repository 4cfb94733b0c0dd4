"""Rotary positions: angles per position, and turning pairs of values by them.

Owns: frequencies with their scalings, the table, the rotation of adjacent pairs (the order in which
GGUF files of the llama architecture store the rows of Q and K). Refuses to know: heads' meaning,
caches. Invariant: angles are computed in float64 and rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from ds4py.errors import ModelError
from ds4py.gguf.metadata import Metadata

SCALINGS: Final = ("none", "linear", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParams:
    """How angles grow with the position.

    Args:
        n_dims: Leading values of a head that are rotated; even.
        base: Frequency base.
        scaling: "none", "linear" or "yarn".
        factor: Context extension of the two scalings.
        n_ctx_original: Context before the extension, for "yarn".
        attention_factor: Further factor on the length of rotated vectors, for "yarn".
        beta_fast: Rotations over the original context above which "yarn" leaves a pair alone.
        beta_slow: Rotations below which "yarn" slows a pair down fully.
    """

    n_dims: int
    base: float
    scaling: str = "none"
    factor: float = 1.0
    n_ctx_original: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    @classmethod
    def from_metadata(
        cls, metadata: Metadata, architecture: str, d_head: int, n_ctx_train: int
    ) -> RopeParams:
        """Read the `rope.*` keys of an architecture.

        Raises:
            ModelError: A value is missing, impossible, or a scaling that is not known.
        """
        prefix = f"{architecture}.rope."
        n_dims = metadata.get_int(prefix + "dimension_count", d_head)
        if n_dims % 2 or not 2 <= n_dims <= d_head:
            raise ModelError(
                f"metadata key {prefix}dimension_count",
                got=n_dims,
                expected=f"an even number from 2 to {d_head}",
            )
        old_factor = metadata.get_float(prefix + "scale_linear", None)
        scaling = metadata.get_str(prefix + "scaling.type", "linear" if old_factor else "none")
        if scaling not in SCALINGS:
            raise ModelError(
                f"metadata key {prefix}scaling.type", got=scaling, expected=" or ".join(SCALINGS)
            )
        original = metadata.get_int(prefix + "scaling.original_context_length", n_ctx_train)
        yarn = prefix + "scaling.yarn_"
        return cls(
            n_dims=n_dims,
            base=_positive(metadata, prefix + "freq_base", 10000.0),
            scaling=scaling,
            factor=_positive(metadata, prefix + "scaling.factor", old_factor or 1.0),
            n_ctx_original=original,
            attention_factor=_positive(metadata, prefix + "scaling.attn_factor", 1.0),
            beta_fast=_positive(metadata, yarn + "beta_fast", 32.0),
            beta_slow=_positive(metadata, yarn + "beta_slow", 1.0),
        )


def _positive(metadata: Metadata, key: str, default: float) -> float:
    value = metadata.get_float(key, default)
    if not (value > 0 and math.isfinite(value)):
        raise ModelError(f"metadata key {key}", got=value, expected="a positive number")
    return value


class Rope:
    """The table of one model for all positions of a context.

    Args:
        params: Frequencies.
        n_ctx: Positions in the table.
        device: Where it lives.
        factors: float32 `[n_dims / 2]`, divides the frequencies (the `rope_freqs` tensor), or None.

    Attributes:
        table: Rotations of all positions, complex64 `[n_ctx, 1, n_dims / 2]`.
        n_dims: Leading values of a head that are rotated.
    """

    def __init__(
        self,
        params: RopeParams,
        n_ctx: int,
        device: torch.device,
        factors: torch.Tensor | None = None,
    ):
        frequencies = frequencies_of(params, None if factors is None else factors.cpu())
        angles = torch.arange(n_ctx, dtype=torch.float64).outer(frequencies)
        length = torch.full_like(angles, length_factor(params))
        table = torch.polar(length, angles).to(torch.complex64)
        self.table = table.unsqueeze(1).to(device)  # [n_ctx, 1, n_dims / 2]
        self.n_dims = params.n_dims

    def at(self, pos0: int, n_tokens: int) -> torch.Tensor:
        """Return the rotations of consecutive positions: complex64 `[T, 1, n_dims / 2]`."""
        return self.table[pos0 : pos0 + n_tokens]

    def rotate_(self, heads: torch.Tensor, rotation: torch.Tensor) -> None:
        """Turn the leading pairs of each head in place.

        Args:
            heads: float32 `[T, heads, D]`, last axis contiguous.
            rotation: From `at`.
        """
        T, n_heads, D = heads.shape
        pairs = torch.view_as_complex(heads.view(T, n_heads, D // 2, 2))
        if self.n_dims != D:
            pairs = pairs[..., : self.n_dims // 2]
        pairs.mul_(rotation)


def frequencies_of(params: RopeParams, factors: torch.Tensor | None = None) -> torch.Tensor:
    """Return radians per position of each pair: float64 `[n_dims / 2]`."""
    n = params.n_dims
    plain = params.base ** (-torch.arange(0, n, 2, dtype=torch.float64) / n)
    if factors is not None:
        plain = plain / factors.to(torch.float64)
    if params.scaling == "none":
        return plain
    slowed = plain / params.factor
    if params.scaling == "linear":
        return slowed
    # yarn: pairs that turn often keep their speed, slow ones are slowed, a ramp lies between
    low = max(math.floor(_pair_turning(params, params.beta_fast)), 0)
    high = min(math.ceil(_pair_turning(params, params.beta_slow)), n - 1)
    pair = torch.arange(n // 2, dtype=torch.float64)
    ramp = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)
    return slowed * ramp + plain * (1 - ramp)


def length_factor(params: RopeParams) -> float:
    """Return the factor on the length of rotated vectors."""
    if params.scaling != "yarn":
        return 1.0
    return params.attention_factor * (1.0 + 0.1 * math.log(params.factor))


def _pair_turning(params: RopeParams, rotations: float) -> float:
    """Return the (fractional) pair that makes so many rotations over the original context."""
    wave = params.n_ctx_original / (rotations * 2 * math.pi)
    return params.n_dims * math.log(wave) / (2 * math.log(params.base))
