"""Random weights as packed tensors, for models that run but know nothing.

Owns: distributions, packed blocks with scales that mean something, and making them in pieces.
Refuses to know: architectures. Invariant: a tensor's bytes follow from the seed and its name alone,
so a tensor keeps its bytes whatever else is in the file; and no tensor is in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final
from zlib import crc32

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from ds4py.errors import ConfigError
from ds4py.gguf import kinds
from tools.gguf_writer import Bytes, TensorSource

PIECE_BYTES: Final = 4 << 20
"""About what is made at once."""


@dataclass(frozen=True, slots=True)
class _Codes:
    """Where a block of random bytes needs scales to be weights around zero.

    Args:
        scale: Byte offset of the binary16 scale `d`.
        rms: Root mean square of the weights at `d` = 1, for evenly distributed codes.
        floor: Byte offset of the binary16 `dmin`, if there is one.
        ratio: `dmin / d` that puts the mean at zero.
    """

    scale: int
    rms: float
    floor: int | None = None
    ratio: float = 0.0


# The formats that the `gguf` package cannot write (docs/spec/deepseek4-model.md#q2_k, #q4_k,
# #iq2_xxs).
_CODES: Final = {
    "IQ2_XXS": _Codes(scale=0, rms=53.5),
    "Q2_K": _Codes(scale=80, rms=13.9, floor=82, ratio=1.5),
    "Q4_K": _Codes(scale=0, rms=258.0, floor=2, ratio=7.5),
    "Q6_K": _Codes(scale=208, rms=1365.0),
}


@dataclass(frozen=True, slots=True)
class Weights:
    """Makes the tensors of one file.

    Args:
        seed: Of all of them.
        prefix: Put before every name.
    """

    seed: int
    prefix: str = ""

    def below(self, prefix: str) -> Weights:
        """Return a maker of tensors whose names begin with a further prefix."""
        return replace(self, prefix=self.prefix + prefix)

    def matrix(self, name: str, kind: str, *shape: int, gain: float = 1.0) -> TensorSource:
        """Make weights `[..., out, in]` whose products with unit inputs are about `gain`."""
        return self.normal(name, kind, *shape, std=gain * shape[-1] ** -0.5)

    def norm(self, name: str, n: int) -> TensorSource:
        """Make the F32 weight of a norm: 1 with a spread of 0.2."""
        return self.normal(name, "F32", n, std=0.2, mean=1.0)

    def normal(
        self, name: str, kind: str, *shape: int, std: float, mean: float = 0.0
    ) -> TensorSource:
        """Make normally distributed weights, or evenly distributed codes of the same spread.

        Args:
            name: What follows the prefix.
            kind: Tensor type: one that the `gguf` package can write, or IQ2_XXS, Q2_K, Q4_K, Q6_K.
            shape: Row-major.
            std: Standard deviation.
            mean: Mean; random codes know only 0.

        Raises:
            ConfigError: The rows do not consist of whole blocks.
        """
        type_id = kinds.type_id(kind)
        if shape[-1] % kinds.block_values(type_id):
            raise ConfigError(
                f"tensor {self.prefix}{name}: got rows of {shape[-1]} values, expected a multiple "
                f"of {kinds.block_values(type_id)} for {kind}"
            )
        rows, full = int(np.prod(shape[:-1])), self.prefix + name

        def pieces() -> Iterator[Bytes]:
            rng = _generator(self.seed, full)
            if kind in _CODES:
                n_blocks = rows * shape[-1] // kinds.block_values(type_id)
                return _random_blocks(rng, _CODES[kind], type_id, n_blocks, std)
            return _quantized(rng, type_id, rows, shape[-1], mean, std)

        return TensorSource(full, type_id, shape[::-1], pieces)

    def choices(self, name: str, n_rows: int, n_columns: int, n_choices: int) -> TensorSource:
        """Make rows of I32 numbers below `n_choices`, without repeats inside a row."""
        full = self.prefix + name

        def pieces() -> Iterator[Bytes]:
            rng = _generator(self.seed, full)
            # Steps without a common factor come back to the first number only after all others.
            steps = np.array([k for k in range(1, n_choices + 1) if np.gcd(k, n_choices) == 1])
            first = rng.integers(0, n_choices, (n_rows, 1))
            step = rng.choice(steps, (n_rows, 1))
            yield ((first + step * np.arange(n_columns)) % n_choices).astype("<i4").tobytes()

        return TensorSource(full, kinds.type_id("I32"), (n_columns, n_rows), pieces)


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng((seed, crc32(name.encode())))


def _quantized(
    rng: np.random.Generator, type_id: int, rows: int, columns: int, mean: float, std: float
) -> Iterator[Bytes]:
    at_once = max(1, PIECE_BYTES // (4 * columns))
    for start in range(0, rows, at_once):
        shape = (min(at_once, rows - start), columns)
        values = mean + std * rng.standard_normal(shape, dtype=np.float32)
        yield quantize(values, GGMLQuantizationType(type_id)).tobytes()


def _random_blocks(
    rng: np.random.Generator, codes: _Codes, type_id: int, n_blocks: int, std: float
) -> Iterator[Bytes]:
    size = kinds.block_bytes(type_id)
    at_once = PIECE_BYTES // size
    for start in range(0, n_blocks, at_once):
        count = min(at_once, n_blocks - start)
        words = rng.integers(0, 1 << 64, -(-count * size // 8), dtype=np.uint64)
        blocks = words.view(np.uint8)[: count * size].reshape(count, size)
        # Scales that differ between blocks, so that one taken from the wrong block is noticed.
        scale = (std / codes.rms * rng.uniform(0.7, 1.3, count)).astype("<f2")
        _put(blocks, codes.scale, scale)
        if codes.floor is not None:
            _put(blocks, codes.floor, (scale * np.float32(codes.ratio)).astype("<f2"))
        yield blocks.tobytes()


def _put(blocks: np.ndarray, offset: int, halves: np.ndarray) -> None:
    blocks[:, offset : offset + 2] = halves.view(np.uint8).reshape(-1, 2)
