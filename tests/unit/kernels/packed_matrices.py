"""Packed matrices for the kernels, how far results may be from exact ones, and other processors.

Owns: the derivation of the bounds. Refuses to know: how a kernel computes.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from llvmlite.binding.targets import FeatureMap

from ds4py.gguf import kinds
from ds4py.kernels.cpu import activations as integers
from ds4py.kernels.cpu import attention, fused, gemv, jit
from ds4py.kernels.cpu.activations import quantize
from ds4py.kernels.cpu.blocks import LAYOUTS
from ds4py.kernels.cpu.gemv import PackedRows
from ds4py.kernels.memory import KernelBuffer
from ds4py.quant.formats import format_of
from ds4py.quant.tensor import QuantTensor
from tests.support.quant_blocks import HALF_OFFSETS, any_blocks, finite_blocks

FORMS = tuple(LAYOUTS)
"""Formats that have kernels."""

WITH_SCALES = tuple(form for form, layout in LAYOUTS.items() if layout.scale_bits)
"""Those whose blocks have scales of their own under the binary16 factors."""

CHUNK = 256
"""Activations that share a step."""


def matrix(
    form: str, shape: tuple[int, int], seed: int = 0, *, factors: Sequence[float] | None = None
) -> QuantTensor:
    """Random codes; factors of one size and any sign, or a choice of given ones.

    Without a choice they are between 0.001 and 0.002.
    """
    kind = format_of(kinds.type_id(form), tensor=form)
    n_blocks = shape[0] * shape[1] // kind.block_values
    blocks, rng = any_blocks(kind, seed, n_blocks), np.random.default_rng(seed + 1)
    for at in HALF_OFFSETS[form]:
        some = rng.uniform(1e-3, 2e-3, n_blocks) * rng.choice((-1, 1), n_blocks)
        chosen = some if factors is None else rng.choice(np.array(factors), n_blocks)
        blocks[:, at : at + 2] = chosen.astype("<f2").view(np.uint8).reshape(-1, 2)
    return QuantTensor(form, kind, shape, torch.from_numpy(blocks).view(shape[0], -1))


def wild_matrix(form: str, shape: tuple[int, int], seed: int = 0) -> QuantTensor:
    """Random codes, and factors of all finite sizes: subnormal, huge, zero, negative."""
    kind = format_of(kinds.type_id(form), tensor=form)
    blocks = finite_blocks(kind, seed, shape[0] * shape[1] // kind.block_values)
    return QuantTensor(form, kind, shape, torch.from_numpy(blocks).view(shape[0], -1))


def buffer(tensor: torch.Tensor) -> KernelBuffer:
    """Return contiguous memory of the process as kernels take it."""
    return KernelBuffer(tensor, tensor.dtype, "memory of a test")


def pack(tensor: QuantTensor) -> PackedRows:
    """Return the form that multiplies; the tensor stays as it is."""
    return PackedRows(tensor.raw.clone(), tensor.format.name)


def exact(tensor: QuantTensor) -> torch.Tensor:
    """Return the weights as float64, by the decoders of the formats."""
    return tensor.decode().double()


def activations(n_rows: int, width: int, seed: int = 1) -> torch.Tensor:
    """Return float32 `[T, K]`, rows of different sizes."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.integers(-3, 4, (n_rows, 1))
    return torch.from_numpy((rng.normal(size=(n_rows, width)) * sizes).astype(np.float32))


def multiply(packed: PackedRows, x: torch.Tensor) -> torch.Tensor:
    """Return float32 `[T, N]`."""
    y = torch.full((x.shape[0], packed.n_rows), torch.nan)
    packed.multiply(quantize(x), buffer(y))
    return y


def unit(tensor: QuantTensor) -> torch.Tensor:
    """Return each row's step, float64 `[N, 1]`.

    8000 of them reach the row's largest weight. A factor with the largest scale and code that its
    fields could hold must fit 32000, so a row whose fields are all small gets a coarser step.
    """
    layout, n_rows = LAYOUTS[tensor.format.name], tensor.shape[0]
    step = exact(tensor).abs().amax(1) / 8000
    blocks = tensor.raw.view(-1, layout.n_bytes)
    for factor in layout.factors:
        halves = blocks[:, factor.at : factor.at + 2].contiguous().view(torch.float16).double()
        most = (halves * factor.unit).abs().view(n_rows, -1).amax(1) * 2**factor.n_bits
        step = torch.maximum(step, most / 32000)
    return step.unsqueeze(1)


def weight_steps(form: str) -> float:
    """Return by how many steps a weight may be off.

    Half a step for the factor, half for its product with a scale, if there is one, half for the
    product with the code; the same again for the minimum, which has no code.
    """
    layout = LAYOUTS[form]
    scaled = 1.0 if layout.scale_bits else 0.5
    return scaled + 0.5 + (0.0 if layout.m_at is None else scaled) + 0.02


def activation_error(x: torch.Tensor) -> torch.Tensor:
    """Return by how much each activation may be off: half a 16383th of the largest among 256."""
    parts = [
        part.abs().amax(1, keepdim=True).expand_as(part) for part in x.double().split(CHUNK, 1)
    ]
    return torch.cat(parts, 1) * (0.502 / 16383)


def product_error(tensor: QuantTensor, x: torch.Tensor) -> torch.Tensor:
    """Return by how much each product may be off, float64 `[T, N]`."""
    weights, size, off = exact(tensor).abs(), x.double().abs(), activation_error(x)
    steps = weight_steps(tensor.format.name) * unit(tensor).T
    rounded = 2.0**-20 * (size @ weights.T)  # of some ten additions in float32
    return steps * (size + off).sum(1, keepdim=True) + off @ weights.T + rounded


def for_processor(patch: pytest.MonkeyPatch, name: str, features: FeatureMap | None = None) -> None:
    """Compile all kernels again from now on, for another processor, until the patch is undone."""
    chosen = FeatureMap() if features is None else features
    patch.setattr(jit, "_processor", lambda: (name, chosen))
    for module, kernels in (
        (integers, ("_quantize",)),
        (gemv, ("_fix", "_decode", "_product")),
        (fused, ("_norm", "_gate")),
        (attention, ("attention_kernel",)),
    ):
        for kernel in kernels:
            patch.setattr(module, kernel, cache(getattr(module, kernel).__wrapped__))
