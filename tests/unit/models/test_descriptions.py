"""Random descriptions of layers against one plain reference, on every backend.

What an architecture may ask for is the product of all switches; here they are thrown together, also
in ways that no published model has, so that a switch works beside every other one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from hypothesis import given, note, settings
from hypothesis import strategies as st

from ds4py.gguf.kinds import type_id
from ds4py.kernels.cache import Segment
from ds4py.kernels.cuda.decode_step import DecodeStep, step_numbers
from ds4py.layer_range import whole_model
from ds4py.layers.block_spec import AttentionSpec, BlockSpec, ExpertsSpec, FeedForwardSpec
from ds4py.layers.cpu_steps import CpuLayers
from ds4py.layers.cuda_steps import CudaLayers
from ds4py.layers.linear import KeepBudget
from ds4py.layers.rope import RopeParams
from ds4py.models.base import DeviceSpec
from ds4py.models.decoder.shape import DecoderShape
from ds4py.models.decoder.slice import DecoderSlice
from ds4py.models.decoder.tensors import Names
from ds4py.quant.tensor import QuantTensor
from tests.unit.models.decoder_reference import Model, ReferenceDecoder, Rules

W, V, N_CTX, EPS = 64, 48, 64, 1e-6
BF16_LIMIT = 0.06
"""Random weights of two layers amplify what bfloat16 and fixed point round; measured: 0.03."""


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


attentions = st.builds(
    AttentionSpec,
    n_head=st.sampled_from([2, 4]),
    n_head_kv=st.sampled_from([1, 2]),
    d_head=st.just(32),
    rope=st.builds(
        RopeParams,
        n_dims=st.sampled_from([0, 16, 32]),
        base=st.sampled_from([100.0, 1e4]),
        scaling=st.just("linear"),
        factor=st.sampled_from([1.0, 4.0]),
    ),
    halves=st.booleans(),
    qk_norm=st.sampled_from(["none", "head", "whole"]),
    biases=st.booleans(),
    scale=st.sampled_from([0.0, 0.3]),
    window=st.sampled_from([0, 1, 7, 16]),
    soft_cap=st.sampled_from([0.0, 2.0]),
    sinks=st.booleans(),
)
dense = st.builds(
    FeedForwardSpec, n_ff=st.sampled_from([32, 96]), activation=st.sampled_from(["silu", "gelu"])
)
experts = st.builds(
    ExpertsSpec,
    n_expert=st.just(5),
    n_used=st.sampled_from([1, 3]),
    n_ff=st.just(32),
    gating=st.sampled_from(["softmax", "sigmoid", "chosen"]),
    normalise=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    n_ff_shared=st.sampled_from([0, 64]),
    activation=st.sampled_from(["silu", "gelu"]),
)


def blocks(halves: st.SearchStrategy) -> st.SearchStrategy[BlockSpec]:
    return st.builds(
        BlockSpec,
        attention=attentions,
        feed_forward=halves,
        norm_before=st.booleans(),
        norm_after=st.booleans(),
        residual_scale=st.sampled_from([1.0, 0.25]),
    ).filter(lambda block: block.norm_before or block.norm_after)


def models(halves: st.SearchStrategy) -> st.SearchStrategy[DecoderShape]:
    return st.builds(
        DecoderShape,
        architecture=st.just("described"),
        n_vocab=st.just(V),
        n_embd=st.just(W),
        norm_eps=st.just(EPS),
        n_ctx_train=st.just(N_CTX),
        blocks=st.lists(blocks(halves), min_size=1, max_size=2).map(tuple),
        embedding_scale=st.sampled_from([1.0, 8.0]),
        logit_scale=st.sampled_from([1.0, 0.5]),
        logit_soft_cap=st.sampled_from([0.0, 3.0]),
        names=st.sampled_from([Names(), Names(ffn_norm="post_attention_norm")]),
    ).map(with_names_apart)


def with_names_apart(shape: DecoderShape) -> DecoderShape:
    """A norm behind the attention already has the other name of the norm before the second half."""
    if any(block.norm_after for block in shape.blocks):
        return replace(shape, names=Names())
    return shape


def tensors(shape: DecoderShape, kind: str, seed: int) -> dict[str, QuantTensor]:
    """Random weights; matrices of a type, and vectors and routers as float32."""
    rng = np.random.default_rng(seed)
    needs = shape.tensor_needs(whole_model(shape.n_layers), lambda name: False, head=True)
    made = {}
    for name, need in needs.items():
        if need.optional and rng.random() < 0.5:
            continue
        spread = 0.5 if name.endswith(".bias") or "sinks" in name else need.shape[-1] ** -0.5
        values = rng.normal(
            1 if "norm" in name else 0, 0.3 if "norm" in name else spread, need.shape
        )
        if name == "rope_freqs.weight":
            values = np.abs(values) + 1
        is_matrix = len(need.shape) > 1 and "gate_inp" not in name
        number = type_id(kind if is_matrix else "F32")
        raw = quantize(values.astype(np.float32), GGMLQuantizationType(number))
        data = memoryview(np.ascontiguousarray(raw).tobytes())
        made[name] = QuantTensor.from_bytes(name, number, need.shape, data, "cpu")
    return made


def plain(shape: DecoderShape, weights: dict[str, QuantTensor]) -> ReferenceDecoder:
    """The same in the reference's own words."""
    values = {name: np.asarray(one.decode(), np.float64) for name, one in weights.items()}
    factors = values.pop("rope_freqs.weight", None)
    own_name = f".{shape.names.ffn_norm}.weight"
    values = {name.replace(own_name, ".ffn_norm.weight"): one for name, one in values.items()}
    layers = []
    for block in shape.blocks:
        own, half = block.attention, block.feed_forward
        rules = Rules(
            n_head=own.n_head, n_kv=own.n_head_kv, d=own.d_head, n_rotated=own.rope.n_dims,
            base=own.rope.base, factor=own.rope.factor, halves=own.halves, qk_norm=own.qk_norm,
            scale=own.scale, window=own.window, cap=own.soft_cap, sinks=own.sinks,
            before=block.norm_before, after=block.norm_after, residual=block.residual_scale,
            gelu=half.activation == "gelu",
        )  # fmt: skip
        if isinstance(half, ExpertsSpec):
            rules = replace(
                rules, n_used=half.n_used, gating=half.gating, normalise=half.normalise,
                expert_scale=half.scale, shared=half.n_ff_shared > 0,
            )  # fmt: skip
        layers.append(replace(rules, factors=factors))
    model = Model(
        eps=EPS, embedding_scale=shape.embedding_scale, logit_scale=shape.logit_scale,
        logit_cap=shape.logit_soft_cap,
    )  # fmt: skip
    return ReferenceDecoder(model, layers, values)


def loaded(
    shape: DecoderShape, weights: dict[str, QuantTensor], dtype: torch.dtype
) -> DecoderSlice:
    copies = {name: replace(one, raw=one.raw.clone()) for name, one in weights.items()}
    spec = DeviceSpec(
        device=torch.device("cpu"), dtype=dtype, n_ctx=N_CTX, budget=KeepBudget(1 << 24)
    )
    return DecoderSlice.load(shape, whole_model(shape.n_layers), copies.get, spec, head=True)


def cache_of(model: DecoderSlice) -> list[torch.Tensor]:
    """Rows that were never written hold what memory held: here the worst."""
    return [torch.full(part.shape, torch.nan, dtype=part.dtype) for part in model.cache_layout()]


def logits(model: DecoderSlice, tokens: list[int], chunks: list[int]) -> torch.Tensor:
    """Logits after every token, `[N, V]`."""
    cache, found, at = cache_of(model), [], 0
    for length in chunks:
        ids = torch.tensor(tokens[at : at + length])
        hidden = model.forward(model.embed(ids), ids, [Segment(cache, at, length)])
        found.append(model.logits(hidden))
        at += length
    return torch.cat(found)


def distance(got: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.abs(got.double().numpy() - expected).max() / np.ptp(expected))


def refusals(model: DecoderSlice) -> dict[str, str | None]:
    return {backend.name: backend.refusal for backend in model.backends}


seeds = st.integers(0, 1 << 16)


@torch.inference_mode()
@settings(max_examples=40)
@given(shape=models(dense | experts), seed=seeds, chunks=st.permutations([1, 1, 2, 5, 9, 6]))
def test_torch_equals_the_reference_whatever_the_chunks(shape, seed, chunks):
    tokens = np.random.default_rng(seed).integers(0, V, sum(chunks)).tolist()
    weights = tensors(shape, "F32", seed)
    expected = plain(shape, weights).logits(tokens)
    note(shape.canonical())
    assert distance(logits(loaded(shape, weights, torch.float32), tokens, chunks), expected) < 2e-5


@torch.inference_mode()
@settings(max_examples=25)
@given(shape=models(dense), seed=seeds)
def test_kernels_of_the_cpu_are_close_to_the_reference(shape, seed):
    """Single tokens; a choice of experts may change by rounding, so layers are dense here."""
    tokens = np.random.default_rng(seed).integers(0, V, 20).tolist()
    weights = tensors(shape, "Q8_0", seed)
    expected = plain(shape, weights).logits(tokens)
    model = loaded(shape, weights, torch.bfloat16)
    note(shape.canonical())
    assert refusals(model)["kernels of the CPU"] is None
    assert distance(logits(model, tokens, [1] * 20), expected) < BF16_LIMIT


@torch.inference_mode()
@settings(max_examples=15)
@given(shape=models(dense | experts), seed=seeds)
def test_kernels_of_the_cpu_agree_with_torch_to_the_last_rounding(shape, seed):
    """The same layers over the same rows: what is left is fixed point of 15 bits."""
    weights = tensors(shape, "Q8_0", seed)
    fast, exact = loaded(shape, weights, torch.bfloat16), loaded(shape, weights, torch.float32)
    exact_cache = [torch.randn(part.shape, dtype=part.dtype) for part in exact.cache_layout()]
    cache = [part.bfloat16() for part in exact_cache]
    exact_cache = [part.float() for part in cache]
    hidden = torch.randn(2, W, generator=torch.Generator().manual_seed(seed))
    others = [[part.clone() for part in own] for own in (cache, exact_cache)]
    CpuLayers(fast.layers[:1]).run(
        got := hidden.clone(), [Segment(cache[:1], 19, 1), Segment(others[0][:1], 3, 1)]
    )
    first = DecoderSlice(
        shape, exact.layers[:1], dtype=torch.float32, device=torch.device("cpu"),
        embedding=None, head=None,
    )  # fmt: skip
    want = first.forward(
        hidden.clone(),
        torch.zeros(2, dtype=torch.int64),
        [Segment(exact_cache[:1], 19, 1), Segment(others[1][:1], 3, 1)],
    )
    note(shape.canonical())
    added = (want - hidden).norm()
    assert (got - want).norm() < 2e-2 * added


@torch.inference_mode()
@settings(max_examples=12)
@given(shape=models(dense | experts), seed=seeds)
def test_steps_of_a_gpu_equal_the_forward_of_each_session(shape, seed):
    """Triton's interpreter runs the kernels on the CPU."""
    pytest.importorskip("triton", reason="triton is not installed")
    model = loaded(shape, tensors(shape, "F32", seed), torch.float32)
    rng = np.random.default_rng(seed)
    lengths, sessions, twins = (5, 19), [], []
    for length in lengths:
        cache, ids = cache_of(model), torch.from_numpy(rng.integers(0, V, length))
        model.forward(model.embed(ids), ids, [Segment(cache, 0, length)])
        sessions.append(cache)
        twins.append([part.clone() for part in cache])
    tokens = rng.integers(0, V, 2).tolist()
    segments = [Segment(cache, at, 1) for cache, at in zip(sessions, lengths, strict=True)]
    numbers = torch.tensor(step_numbers(tokens, segments))
    got = CudaLayers(model.layers, torch.float32, model.embed).decode_step(
        DecodeStep(numbers, None)
    )
    ids = torch.tensor(tokens)
    own = [Segment(cache, at, 1) for cache, at in zip(twins, lengths, strict=True)]
    want = model.forward(model.embed(ids), ids, own)
    note(shape.canonical())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for cache, twin in zip(sessions, twins, strict=True):
        for part, other in zip(cache, twin, strict=True):
            torch.testing.assert_close(part, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_a_layer_that_kernels_cannot_do_is_refused_with_the_reason():
    attention = AttentionSpec(
        n_head=2, n_head_kv=1, d_head=24, rope=RopeParams(n_dims=8, base=100.0)
    )
    shape = DecoderShape(
        architecture="described", n_vocab=V, n_embd=W, norm_eps=EPS, n_ctx_train=N_CTX,
        blocks=(BlockSpec(attention=attention, feed_forward=FeedForwardSpec(n_ff=32)),),
    )  # fmt: skip
    model = loaded(shape, tensors(shape, "F32", 0), torch.bfloat16)
    told = refusals(model)
    assert told["torch"] is None
    assert "heads of 24 values, 8 of them rotated" in told["kernels of the CPU"]
    assert "only a GPU" in told["recorded steps of the GPU"]


def test_a_matrix_without_packed_product_is_named():
    attention = AttentionSpec(
        n_head=2, n_head_kv=1, d_head=32, rope=RopeParams(n_dims=32, base=100.0)
    )
    shape = DecoderShape(
        architecture="described", n_vocab=V, n_embd=W, norm_eps=EPS, n_ctx_train=N_CTX,
        blocks=(BlockSpec(attention=attention, feed_forward=FeedForwardSpec(n_ff=32)),) * 2,
    )  # fmt: skip
    weights = tensors(shape, "Q8_0", 0)
    weights["blk.1.ffn_down.weight"] = tensors(shape, "F16", 0)["blk.1.ffn_down.weight"]
    told = refusals(loaded(shape, weights, torch.bfloat16))
    assert told["kernels of the CPU"] == (
        "blk.1.ffn_down.weight: the type has no product with packed blocks"
    )


def test_values_of_the_cache_are_refused_by_recorded_steps_only_as_codes():
    from ds4py.layers import cuda_steps

    class Coded:
        class kv:  # noqa: N801
            has_scales = True

    assert "--kv-type" in cuda_steps.refusal([Coded()], torch.device("cuda"))
    assert cuda_steps.refusal([], torch.device("cuda")) is None
