"""From a file to a slice on a device; nothing outside the slice is touched.

Owns: checking the directory against what an architecture needs, copying, progress, giving pages
back. Refuses to know: layers' arithmetic. Invariant: every tensor is checked before the first
weight is read, and resident memory follows the slice, not the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from ds4py.config import ActQuant, KvType, Precision
from ds4py.engine.device import choose_dtype, rounds_activations
from ds4py.errors import ModelError
from ds4py.gguf.file import GgufFile
from ds4py.layer_range import LayerRange
from ds4py.layers.linear import KeepBudget
from ds4py.models.base import DeviceSpec, Shape, Slice, TensorNeed
from ds4py.models.registry import load_architecture
from ds4py.quant.formats import FORMATS
from ds4py.quant.tensor import QuantTensor

LoadProgress = Callable[[int, int], None]
"""Called with (bytes of weights loaded, bytes of weights in the slice)."""

KEEP_BYTES: Final = 1 << 30
"""Memory that one process spends on decoded weights in float32, so that small models are fast."""

KV_DTYPES: Final[Mapping[KvType, torch.dtype | None]] = MappingProxyType(
    {
        "auto": None,
        "f32": torch.float32,
        "bf16": torch.bfloat16,
        "f16": torch.float16,
        "q8_0": torch.int8,
    }
)
"""What `DeviceSpec.kv_dtype` is for a type of `EngineConfig`."""

_LAYER: Final = re.compile(r"blk\.(\d{1,9})\.", re.ASCII)


@dataclass(frozen=True, slots=True)
class LoadedSlice:
    """A slice and what it took.

    Args:
        slice: Ready to run.
        weight_bytes: Packed bytes of its tensors, as in the file.
    """

    slice: Slice
    weight_bytes: int


def read_shape(file: GgufFile) -> Shape:
    """Return the shape of the file's model.

    Raises:
        ModelError: Unknown architecture, or metadata that does not make a model.
    """
    name = file.metadata.require_str("general.architecture")
    return load_architecture(name).read_shape(file.metadata)


def load_slice(  # noqa: PLR0913 - each of them is a choice of the user
    file: GgufFile,
    layers: LayerRange,
    device: torch.device,
    precision: Precision,
    *,
    n_ctx: int,
    act_quant: ActQuant = "auto",
    kv_type: KvType = "auto",
    want_head: bool = False,
    progress: LoadProgress | None = None,
) -> LoadedSlice:
    """Load a span of layers.

    Args:
        file: Open; may be closed afterwards.
        layers: Owned layers, inside the model.
        device: Where weights live.
        precision: "f32", or "bf16" or "auto" for speed.
        n_ctx: Positions that the slice must be able to compute.
        act_quant: Rounding of activations, see `EngineConfig`.
        kv_type: Type of cached keys and values, see `EngineConfig`.
        want_head: Load the output head too, if the file has it, without owning it.
        progress: Told after every tensor.

    Raises:
        GgufError: Tensors are missing from the file or lie in missing shards.
        UnsupportedQuantError: A needed tensor has a type without decoder.
        ModelError: Unknown architecture, a shape that does not fit, an unknown tensor in a layer.
    """
    shape = read_shape(file)
    needs, head = _needs(file, shape, layers, want_head=want_head)
    present = {name: need for name, need in needs.items() if name in file.tensors}
    check_tensors(file, shape, layers, needs)
    dtype = choose_dtype(precision)
    keep = KEEP_BYTES if dtype is torch.float32 and device.type == "cpu" else 0
    spec = DeviceSpec(
        device=device,
        dtype=dtype,
        n_ctx=n_ctx,
        budget=KeepBudget(keep),
        act_quant=rounds_activations(act_quant, device, dtype),
        kv_dtype=KV_DTYPES[kv_type],
    )
    total = sum(file.tensors[name].n_bytes for name in present)
    reader = _TensorReader(file, needs, device, total, progress)
    build = load_architecture(shape.architecture).build_slice
    with torch.inference_mode():
        built = build(shape, layers, reader.take, spec, head=head)
    return LoadedSlice(built, total)


def _needs(
    file: GgufFile, shape: Shape, layers: LayerRange, *, want_head: bool
) -> tuple[Mapping[str, TensorNeed], bool]:
    """Return what the slice needs, and whether the head is part of it."""

    def may_have(name: str) -> bool:
        return name in file.tensors or bool(file.missing_shards)

    needs = shape.tensor_needs(layers, may_have, head=layers.has_output)
    if layers.has_output or not want_head:
        return needs, layers.has_output
    with_head = shape.tensor_needs(layers, may_have, head=True)
    parts = [name for name, need in with_head.items() if name not in needs and not need.optional]
    found = [name for name in parts if name in file.tensors]
    if found and not file.missing_shards:
        file.require(parts)  # half a head is a damaged file, not one without
    return (with_head, True) if len(found) == len(parts) else (needs, False)


def check_tensors(
    file: GgufFile, shape: Shape, layers: LayerRange, needs: Mapping[str, TensorNeed]
) -> None:
    """Check presence, type and shape of all needed tensors, and that the layers have no others.

    Raises:
        GgufError, UnsupportedQuantError, ModelError: As `load_slice`.
    """
    required = [name for name, need in needs.items() if not need.optional]
    found = [name for name in needs if name in file.tensors]
    _check_last_layer(file, shape, layers)
    file.require({*required, *found}, can_decode=FORMATS.__contains__)
    for name in found:
        info, need = file.tensors[name], needs[name]
        if not need.fits(info.shape):
            raise ModelError(f"tensor {name}", got=f"shape {info.shape}", expected=need.shape)
        if need.types and info.type_name not in need.types:
            expected = " or ".join(need.types)
            raise ModelError(f"tensor {name}", got=f"type {info.type_name}", expected=expected)
    for name in file.tensors:
        match = _LAYER.match(name)
        if match and int(match[1]) in layers and name not in needs:
            raise ModelError(
                f"tensor {name}",
                got="a weight that would be ignored",
                expected=f"only the tensors of architecture {shape.architecture}; "
                "the file is of a variant that ds4py does not compute",
            )


def _check_last_layer(file: GgufFile, shape: Shape, layers: LayerRange) -> None:
    """Explain a layer that the metadata counts but nobody stored, as converters leave it behind."""
    last = shape.n_layers - 1
    if last not in layers or file.missing_shards:
        return
    if not any(name.startswith(f"blk.{last}.") for name in file.tensors):
        raise ModelError(
            f"metadata key {shape.architecture}.block_count",
            got=f"{shape.n_layers} layers, but the file has no tensor of layer {last}",
            expected="the number of stored layers; if the count includes a next-token-prediction "
            f"layer, the key {shape.architecture}.nextn_predict_layers must say so",
        )


class _TensorReader:
    """Hands tensors to a slice and counts them."""

    def __init__(
        self,
        file: GgufFile,
        needs: Mapping[str, TensorNeed],
        device: torch.device,
        total: int,
        progress: LoadProgress | None,
    ):
        self._file = file
        self._needs = needs
        self._device = device
        self._total = total
        self._done = 0
        self._progress = progress

    def take(self, name: str) -> QuantTensor | None:
        """Copy one tensor to the device; None if the file does not have it."""
        info = self._file.tensors.get(name)
        if info is None:
            return None
        with self._file.raw(name) as data:
            need = self._needs[name]
            # both are equal, except for axes of length 1
            shape = info.shape if need.more_rows else need.shape
            tensor = QuantTensor.from_bytes(name, info.type_id, shape, data, self._device)
        self._file.release(name)
        self._done += info.n_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)
        return tensor
