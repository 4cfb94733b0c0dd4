"""Logits in bfloat16 keep the last bits where they matter."""

import numpy as np
import torch

from ds4py.layers.linear import PackedLinear
from ds4py.layers.lm_head import N_SHARPENED, OutputHead
from ds4py.layers.norm import RmsNorm
from ds4py.quant.tensor import QuantTensor

F32, V, W = 0, 300, 64


def head(dtype: torch.dtype) -> tuple[OutputHead, torch.Tensor]:
    values = np.random.default_rng(0).normal(0, 1, (V, W)).astype("<f4")
    # such weights are exact in bfloat16: only sums round
    values = torch.from_numpy(values).bfloat16().float()
    raw = memoryview(values.numpy().tobytes())
    matrix = QuantTensor.from_bytes("output.weight", F32, (V, W), raw, "cpu")
    norm = RmsNorm(torch.ones(W), 1e-5, torch.float32)
    return OutputHead(norm, PackedLinear([matrix], dtype=dtype)), values


def test_leading_logits_are_float32_sums():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, W, generator=generator)
    exact, _ = head(torch.float32)
    fast, _ = head(torch.bfloat16)
    expected, got = exact(hidden), fast(hidden)
    error = (got - expected).abs()
    leading = expected.topk(N_SHARPENED // 2).indices
    assert error.gather(1, leading).max() < 1e-4
    assert 1e-4 < error.max() < 0.3


def test_a_small_vocabulary_is_computed_again_as_a_whole():
    values = torch.eye(8, 32)
    raw = memoryview(values.numpy().tobytes())
    matrix = QuantTensor.from_bytes("output.weight", F32, (8, 32), raw, "cpu")
    norm = RmsNorm(torch.ones(32), 0.0, torch.float32)
    hidden = torch.randn(1, 32)
    got = OutputHead(norm, PackedLinear([matrix], dtype=torch.bfloat16))(hidden)
    torch.testing.assert_close(got, norm(hidden)[:, :8])
