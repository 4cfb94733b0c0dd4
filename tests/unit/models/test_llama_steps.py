"""Decode steps as a GPU runs them equal the ordinary ones, in Triton's interpreter."""

from pathlib import Path

import pytest
import torch

from ds4py.gguf.file import GgufFile
from ds4py.kernels.cache import Segment
from ds4py.kernels.cuda.decode_step import DecodeStep, step_numbers
from ds4py.layer_range import whole_model
from ds4py.layers.cuda_steps import CudaLayers
from ds4py.layers.linear import KeepBudget
from ds4py.models.base import DeviceSpec
from ds4py.models.decoder.slice import DecoderSlice
from ds4py.models.llama import read_shape
from ds4py.quant.tensor import QuantTensor
from tests.support.toys import toy_llama

pytest.importorskip("triton", reason="triton is not installed")


def load(path: Path) -> DecoderSlice:
    spec = DeviceSpec(
        device=torch.device("cpu"), dtype=torch.float32, n_ctx=64, budget=KeepBudget(1 << 24)
    )
    with GgufFile.open(path) as file:
        shape = read_shape(file.metadata)

        def take(name: str) -> QuantTensor | None:
            info = file.tensors.get(name)
            if info is None:
                return None
            with file.raw(name) as data:
                return QuantTensor.from_bytes(name, info.type_id, info.shape, data, spec.device)

        return DecoderSlice.load(shape, whole_model(shape.n_layers), take, spec, head=True)


@torch.inference_mode()
def test_a_step_of_two_sessions_equals_the_forward_of_each(tmp_path):
    model = load(toy_llama(tmp_path / "m.gguf", n_ctx=64))
    stepping = CudaLayers(model.layers, torch.float32, model.embed)
    caches = [
        [torch.zeros(part.shape, dtype=part.dtype) for part in model.cache_layout()]
        for _ in range(2)
    ]
    for cache, length in zip(caches, (5, 9), strict=True):
        ids = torch.arange(10, 10 + length)
        model.forward(model.embed(ids), ids, [Segment(cache, 0, length)])
    copies = [[part.clone() for part in cache] for cache in caches]
    tokens = [17, 23]
    segments = [Segment(cache, at, 1) for cache, at in zip(caches, (5, 9), strict=True)]
    numbers = torch.tensor(step_numbers(tokens, segments))
    got = stepping.decode_step(DecodeStep(numbers, None))
    ids = torch.tensor(tokens)
    own = [Segment(cache, at, 1) for cache, at in zip(copies, (5, 9), strict=True)]
    expected = model.forward(model.embed(ids), ids, own)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    for cache, copy in zip(caches, copies, strict=True):
        for part, other in zip(cache, copy, strict=True):
            torch.testing.assert_close(part, other, rtol=1e-4, atol=1e-5)
