"""The feed-forward half as a whole: packed experts, any routing, against a loop over tokens."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4py.gguf import kinds
from ds4py.models.base import DeviceSpec, Take
from ds4py.models.deepseek4.linear import Weights, activation_rounding
from ds4py.models.deepseek4.moe import FeedForward, RoutedExperts, swiglu
from ds4py.models.deepseek4.shape import Shape
from ds4py.quant.formats import FORMATS
from ds4py.quant.tensor import QuantTensor
from tests.quant_blocks import HALF_OFFSETS, any_blocks
from tests.unit.models.deepseek4.support import normal, place, small_shape

X, USED, D, FF, V = 6, 3, 512, 256, 32
LIMIT = 2.0
MIXES = [("IQ2_XXS", "Q2_K"), ("Q4_K", "Q4_K"), ("Q8_0", "Q8_0"), ("F16", "F16"), ("F16", "Q2_K")]
"""Types of (gate and up, down)."""


def blocks(name: str, kind: str, *shape: int) -> QuantTensor:
    """Random weights whose products with unit inputs are about 1."""
    found = FORMATS[kinds.type_id(kind)]
    seed = sum(name.encode())
    raw = any_blocks(found, seed, int(np.prod(shape)) // found.block_values)
    size = 1 if kind == "F16" else {"Q8_0": 74, "IQ2_XXS": 53, "Q2_K": 14, "Q4_K": 258}[kind]
    scales = np.random.default_rng(seed).standard_normal((2, len(raw))) / size * shape[-1] ** -0.5
    for at, values in zip(HALF_OFFSETS[kind], scales, strict=False):
        raw[:, at : at + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)
    return QuantTensor.from_bytes(name, found.type_id, shape, memoryview(raw.tobytes()), "cpu")


def plain(name: str, values: np.ndarray, kind: str) -> QuantTensor:
    data = memoryview(np.ascontiguousarray(values).tobytes())
    return QuantTensor.from_bytes(name, kinds.type_id(kind), values.shape, data, "cpu")


def tensors(mix: tuple[str, str] = MIXES[0], *, by_token: bool = False) -> dict[str, QuantTensor]:
    """All weights of one feed-forward half."""
    rng = np.random.default_rng(5)
    into, out_of = mix
    found = [
        blocks("ffn_gate_exps.weight", into, X, FF, D),
        blocks("ffn_up_exps.weight", into, X, FF, D),
        blocks("ffn_down_exps.weight", out_of, X, D, FF),
        blocks("ffn_gate_shexp.weight", "Q8_0", FF, D),
        blocks("ffn_up_shexp.weight", "Q8_0", FF, D),
        blocks("ffn_down_shexp.weight", "Q8_0", D, FF),
        blocks("ffn_gate_inp.weight", "F16", X, D),
    ]
    if by_token:
        table = np.array([rng.permutation(X)[:USED] for _ in range(V)], np.int32)
        found.append(plain("ffn_gate_tid2eid.weight", table, "I32"))
    return {tensor.name: tensor for tensor in found}


def routed_experts(own: Mapping[str, QuantTensor], where: DeviceSpec) -> RoutedExperts:
    return RoutedExperts(LIMIT, Weights(copies(own), where))


def one_token(
    own: Mapping[str, QuantTensor],
    x: torch.Tensor,
    experts: list[int],
    shares: list[float],
    *,
    act_quant: bool,
) -> torch.Tensor:
    """docs/spec/deepseek4-model.md#feed-forward for one token, expert by expert."""
    into, out_of = own["ffn_gate_exps.weight"], own["ffn_down_exps.weight"]
    round_in, round_mid = (activation_rounding(part.format) for part in (into, out_of))
    if act_quant and round_in is not None:
        x = round_in(x)
    total = torch.zeros(D)
    for expert, share in zip(experts, shares, strict=True):
        gate, up, down = (
            own[f"ffn_{part}_exps.weight"].expert(expert).decode()
            for part in ("gate", "up", "down")
        )
        mid = swiglu(gate @ x, up @ x, LIMIT) * share
        if act_quant and round_mid is not None:
            mid = round_mid(mid)
        total += down @ mid
    return total


def copies(own: dict[str, QuantTensor]) -> Take:
    """Hand out copies: a slice takes the bytes over, and they may change."""

    def take(name: str) -> QuantTensor | None:
        tensor = own.get(name)
        return None if tensor is None else replace(tensor, raw=tensor.raw.clone())

    return take


choices = st.lists(
    st.permutations(range(X)).map(lambda order: order[:USED]), min_size=1, max_size=40
)


def error_of(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("mix", MIXES, ids="-".join)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
@settings(max_examples=8, deadline=None)
@given(routing=choices)
def test_routed_experts_give_what_each_token_gets_alone(mix, dtype, limit, routing):
    own = tensors(mix)
    x, shares = normal(len(routing), D), normal(len(routing), USED, seed=1).abs()
    got = routed_experts(own, place(dtype))(x, torch.tensor(routing), shares)
    expected = torch.stack(
        [
            one_token(own, row, experts, share, act_quant=False)
            for row, experts, share in zip(x, routing, shares.tolist(), strict=True)
        ]
    )
    assert got.dtype is torch.float32
    assert error_of(got, expected) < limit


@pytest.mark.parametrize("mix", MIXES, ids="-".join)
def test_inputs_are_rounded_for_the_first_and_for_the_last_product(mix):
    """A sum in another order may move a value over a rounding step, so the median is compared."""
    own = tensors(mix)
    rng = np.random.default_rng(2)
    routing = torch.tensor([rng.permutation(X)[:USED].tolist() for _ in range(24)])
    x, shares = normal(24, D), normal(24, USED, seed=1).abs()
    errors = {}
    for act_quant in (True, False):
        got = routed_experts(own, place(act_quant=act_quant))(x, routing, shares)
        rows = zip(x, routing.tolist(), shares.tolist(), strict=True)
        expected = [one_token(own, *row, act_quant=True) for row in rows]
        errors[act_quant] = np.median([error_of(*pair) for pair in zip(got, expected, strict=True)])
    assert errors[True] < 1e-6
    assert errors[False] > (1e-3 if mix != ("F16", "F16") else -1)


def shape_of(n_hash_layers: int) -> Shape:
    sizes = {"n_embd": D, "n_ff": FF, "n_expert": X, "n_used": USED, "n_vocab": V}
    return small_shape(n_hash_layers=n_hash_layers, clamps=(LIMIT,), **sizes)


@pytest.mark.parametrize("by_token", [False, True])
def test_a_token_gets_the_same_alone_and_among_others(by_token):
    own = tensors(by_token=by_token)
    part = FeedForward(shape_of(int(by_token)), 0, Weights(copies(own), place()))
    x, tokens = normal(50, D), torch.arange(50) % V
    together = part(x, tokens)
    alone = torch.cat([part(x[i : i + 1], tokens[i : i + 1]) for i in range(50)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_the_shared_expert_is_added_once():
    own = tensors()
    shape, x, tokens = shape_of(0), normal(4, D), torch.zeros(4, dtype=torch.int64)
    with_shared = FeedForward(shape, 0, Weights(copies(own), place()))(x, tokens)
    down = own["ffn_down_shexp.weight"]
    silent = own | {down.name: replace(down, raw=torch.zeros_like(down.raw))}
    without = FeedForward(shape, 0, Weights(copies(silent), place()))(x, tokens)
    gate, up = (own[f"ffn_{name}_shexp.weight"].decode() for name in ("gate", "up"))
    shared = swiglu(x @ gate.t(), x @ up.t(), LIMIT) @ down.decode().t()
    torch.testing.assert_close(with_shared - without, shared, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 3, 64])
def test_no_layer_makes_the_host_wait_for_an_accelerator(T, dtype, by_token):
    """Tensors without data stand for a device: asking for a value fails."""
    meta = torch.device("meta")
    own = {
        name: replace(tensor, raw=tensor.raw.to(meta))
        for name, tensor in tensors(by_token=by_token).items()
    }
    # loading may look at values, and does
    table = tensors(by_token=by_token).get("ffn_gate_tid2eid.weight")
    checked = own if table is None else own | {table.name: table}
    weights = Weights(copies(checked), replace(place(dtype), device=meta))
    part = FeedForward(shape_of(int(by_token)), 0, weights)
    if table is not None:
        part._router._table = table.decode(torch.int64).to(meta)
    y = part(torch.empty((T, D), device=meta), torch.empty(T, dtype=torch.int64, device=meta))
    assert (y.shape, y.dtype, y.device) == ((T, D), torch.float32, meta)
