"""DeepSeek V4 on a GPU: what the C engine recorded, and no layer that waits for the device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ds4py.engine.loader import load_slice
from ds4py.gguf.file import GgufFile
from ds4py.kernels.cache import Segment
from ds4py.layer_range import whole_model
from ds4py.models.deepseek4 import Slice
from tests.support import golden

pytestmark = pytest.mark.cuda

CUDA = torch.device("cuda", 0)
N_LAYERS = 6


def load(variant: str, precision: str, act_quant: str) -> Slice:
    with GgufFile.open(golden.path(f"tiny-{variant}.gguf")) as file:
        loaded = load_slice(
            file, whole_model(N_LAYERS), CUDA, precision, n_ctx=512, act_quant=act_quant
        )  # fmt: skip
    assert isinstance(loaded.slice, Slice)
    return loaded.slice


def new_cache(model: Slice) -> list[torch.Tensor]:
    return [
        torch.full(part.shape, torch.nan, dtype=part.dtype, device=CUDA)
        for part in model.cache_layout()
    ]


def relative_rms(got: torch.Tensor, want: np.ndarray) -> np.ndarray:
    difference = got.cpu().numpy().reshape(want.shape) - want
    return np.linalg.norm(difference, axis=(-2, -1)) / np.linalg.norm(want, axis=(-2, -1))


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("variant", ["a", "b"])
def test_every_half_of_every_layer_gives_the_recorded_state(variant: str) -> None:
    model = load(variant, "f32", "cpu")
    recorded = golden.load_npz(f"hidden_{variant}.npz")
    prompt = golden.load_json("prompts.json")["prompts"]["len5"]["ids"]
    tokens = torch.tensor(prompt, device=CUDA)
    cache = new_cache(model)
    step = model.step([Segment(cache, 0, len(prompt))])
    after_attention, after_layer = recorded["len5_after_attn"], recorded["len5_after_layer"]
    differences = []
    hidden = model.embed(tokens)
    for number, (layer, own) in enumerate(
        zip(model.layers, model.layout.layers(cache), strict=True)
    ):
        state = layer.attention_half(hidden, step, [own])
        differences.append(relative_rms(state, after_attention[number]))
        state = torch.from_numpy(after_attention[number]).to(CUDA).flatten(1)
        state = layer.feed_forward_half(state, tokens)
        differences.append(relative_rms(state, after_layer[number]))
        hidden = torch.from_numpy(after_layer[number]).to(CUDA).flatten(1)
    every = np.concatenate(differences)
    assert np.median(every) < 1e-6
    assert every.max() < 1e-2


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("n_tokens", [1, 300])
def test_no_layer_waits_for_the_device(precision: str, n_tokens: int) -> None:
    model = load("a", precision, "none")
    tokens = torch.arange(3, 3 + n_tokens, device=CUDA)
    segment = Segment(new_cache(model), 0, n_tokens)
    for mode in ("default", "error"):  # the first run uploads tables
        torch.cuda.set_sync_debug_mode(mode)
        try:
            hidden = model.forward(model.embed(tokens), tokens, [segment])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert hidden.isfinite().all()
