"""Which experts a token gets, with what weight, and the clamped SwiGLU: golden vector B.8."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds4py.models.deepseek4.moe import FeedForward, RoutedExperts, Router, swiglu
from tests.unit.models.deepseek4.support import known_shape, normal, place, small_shape, weights

B8_LOGITS = [2.0, -1, 0.5, 3, -30, 25, 0, 1]
B8_PROBS = [1.4583992, 0.55969787, 0.98695338, 1.7460204, 3.0590232e-7, 5, 0.83255464, 1.1459763]
B8_BIAS = [0, 1.2, 0, -0.5, 0, -4, 0.5, 0]
X = 8


def router(n_used: int, *, layer: int = 0, scale: float = 1.5, **arrays: np.ndarray) -> Router:
    """A router whose inputs are its logits.

    Args:
        n_used: Experts per token.
        layer: Layers 0 and 1 have a table if one is given, layer 2 never has.
        scale: Factor on the weights.
        arrays: `table` and `bias`.
    """
    n_hash = 2 if "table" in arrays else 0
    shape = known_shape(
        2, n_layers=3, n_used=n_used, n_embd=X, n_hash_layers=n_hash, expert_scale=scale
    )
    names = {"table": "ffn_gate_tid2eid.weight", "bias": "exp_probs_b.bias"}
    own = {names[key]: values for key, values in arrays.items()}
    return Router(shape, layer, weights(own | {"ffn_gate_inp.weight": np.eye(X, dtype=np.float32)}))


def route(part: Router, logits: list[float], token: int = 0) -> tuple[list[int], list[float]]:
    experts, shares = part(torch.tensor([logits]), torch.tensor([token]))
    return experts[0].tolist(), shares[0].tolist()


def test_b8_and_point_28_the_root_of_the_softplus_in_every_branch():
    experts, shares = route(router(X, scale=1.0), B8_LOGITS)
    expected = [B8_PROBS[expert] / sum(B8_PROBS) for expert in experts]
    assert shares == pytest.approx(expected, rel=1e-6)
    assert experts == sorted(range(X), key=lambda expert: -B8_PROBS[expert])


@pytest.mark.parametrize("logit", [1000.0, 88.8, 20.1, 19.9, -19.9, -20.1, -80.0, -1000.0])
def test_point_28_neither_large_nor_small_logits_overflow(logit):
    # beside an expert of probability one, the ratio of the weights is the probability
    one = math.log(math.e - 1)
    experts, shares = route(router(2, scale=1.0), [logit, one, *[-2000.0] * 6])
    by_expert = dict(zip(experts, shares, strict=True))
    expected = math.sqrt(logit if logit > 30 else math.log1p(math.exp(logit)))
    assert by_expert[0] / by_expert[1] == pytest.approx(expected, rel=1e-5, abs=1e-30)


def test_b8_and_point_27_the_bias_decides_who_is_chosen_and_nothing_else():
    bias = np.array(B8_BIAS, np.float32)
    experts, shares = route(router(3, bias=bias), B8_LOGITS)
    assert experts == [1, 0, 6]
    assert shares == pytest.approx([0.2945105, 0.76740307, 0.4380865], rel=1e-6)


def test_point_27_a_file_without_bias_ranks_by_probability():
    experts, _ = route(router(3), B8_LOGITS)
    assert experts == [5, 3, 0]


@pytest.mark.parametrize("scale", [1.5, 2.5])
def test_point_27_weights_add_up_to_the_scale_of_the_model(scale):
    _, shares = route(router(3, scale=scale), B8_LOGITS)
    assert sum(shares) == pytest.approx(scale)
    assert [known_shape(model_id).expert_scale for model_id in (0, 1)] == [1.5, 2.5]


def test_point_27_a_tiny_sum_is_replaced_by_its_floor():
    _, shares = route(router(2), [-30.0] * X)
    assert shares == pytest.approx([3.0590232e-7 / 2**-14 * 1.5] * 2, rel=1e-6)


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=X, max_size=X), st.integers(1, X))
def test_point_27_of_equal_experts_the_lower_number_comes_first(logits, n_used):
    experts, _ = route(router(n_used), logits)
    assert experts == sorted(range(X), key=lambda expert: (-logits[expert], expert))[:n_used]


def test_point_29_the_first_layers_take_the_experts_of_the_tokens_own_id_in_their_order():
    table = np.array([[7, 0, 3], [1, 2, 0], [6, 5, 4]], np.int32)
    bias = np.full(X, 100, np.float32)
    hashed = router(3, layer=1, table=table, bias=bias)
    for token in (2, 0, 1):
        experts, shares = route(hashed, B8_LOGITS, token)
        assert experts == table[token].tolist()
        chosen = [B8_PROBS[expert] for expert in experts]
        expected = [1.5 * p / max(sum(chosen), 2**-14) for p in chosen]
        assert shares == pytest.approx(expected, rel=1e-5)


def test_point_29_later_layers_ignore_the_id():
    table = np.array([[7, 0, 3]], np.int32)
    experts, _ = route(router(3, layer=2, table=table), B8_LOGITS)
    assert experts == [5, 3, 0]


def test_point_29_every_token_of_a_batch_has_its_own_row():
    table = np.array([[4, 5], [6, 7]], np.int32)
    part = router(2, table=table)
    experts, _ = part(normal(3, X), torch.tensor([1, 0, 1]))
    assert experts.tolist() == [[6, 7], [4, 5], [6, 7]]


def test_point_35_the_router_computes_in_float32_in_every_precision():
    gate = normal(X, 64).numpy()
    x = normal(50, 64, seed=1)
    shape = small_shape(n_embd=64, n_used=2)
    exact, fast = (
        Router(shape, 0, weights({"ffn_gate_inp.weight": gate}, where=place(dtype)))(
            x, torch.zeros(50, dtype=torch.int64)
        )
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert torch.equal(exact[0], fast[0])
    assert torch.equal(exact[1], fast[1])


# --- experts --------------------------------------------------------------------------------------


def test_b8_and_point_30_the_gate_is_clamped_from_above_only():
    gate, up = torch.tensor([[1.0, 12, -12, -3]]), torch.tensor([[2.0, -11, 11, 0.5]])
    got = swiglu(gate, up, 10.0)
    expected = [1.4621172, -99.995461, -7.3730084e-4, -0.071138814]
    assert got[0].tolist() == pytest.approx(expected, rel=1e-6)


def test_point_30_every_layer_has_the_limit_of_its_own_entry():
    shape = known_shape(2, clamps=(10.0, 1.0, 10.0, 10.0, 10.0, 10.0), n_hash_layers=0, n_used=2)
    x, tokens = 10 * normal(3, 256), torch.zeros(3, dtype=torch.int64)
    loose, tight = (FeedForward(shape, layer, weights(experts()))(x, tokens) for layer in (0, 1))
    assert tight.norm() < loose.norm() / 5


def experts(n_ff: int = 32, width: int = 256) -> dict[str, np.ndarray]:
    sizes = {
        "ffn_gate_inp.weight": (X, width),
        "ffn_gate_exps.weight": (X, n_ff, width),
        "ffn_up_exps.weight": (X, n_ff, width),
        "ffn_down_exps.weight": (X, width, n_ff),
        "ffn_gate_shexp.weight": (n_ff, width),
        "ffn_up_shexp.weight": (n_ff, width),
        "ffn_down_shexp.weight": (width, n_ff),
    }
    return {
        name: normal(*size, seed=k, scale=size[-1] ** -0.5).numpy()
        for k, (name, size) in enumerate(sizes.items())
    }


def test_point_31_the_weight_is_applied_before_the_last_product_and_its_rounding():
    """Sums of halves sit on ties of the int8 grid; a weight of one third moves some of them off."""
    halves = np.array([127, *(0.5 + np.arange(31))], np.float32)
    up = np.zeros((1, 32, 32), np.float32)
    up[0, :, 0] = halves
    gate = np.zeros((1, 32, 32), np.float32)
    gate[0, :, 0] = 128  # silu(128) is 128
    own = {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    own["ffn_down_exps.weight"] = np.eye(32, dtype=np.float32)[None]
    kinds = {"ffn_down_exps.weight": "Q8_0"}
    part = RoutedExperts(1000.0, weights(own, kinds=kinds, where=place(act_quant=True)))
    share = np.float32(1 / 3)
    x = torch.eye(32)[:1]
    got = part(x, torch.tensor([[0]]), torch.tensor([[share]]))[0].numpy()
    before, after = q8_0(128 * halves * share), q8_0(128 * halves) * share
    assert np.abs(before - after).max() > 30, "a step of the grid, or the test proves nothing"
    # Q8_0 holds 1 as 127 times a scale in binary16
    assert got == pytest.approx(before, rel=1e-3)


def q8_0(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max() / np.float32(127)
    return np.rint(x * (np.float32(1) / scale)) * scale


def test_experts_that_are_numbered_anew_give_the_same_result():
    order = [3, 0, 7, 1, 6, 2, 5, 4]
    own = experts()
    own["exp_probs_b.bias"] = normal(X, seed=20, scale=0.3).numpy()
    own["ffn_gate_tid2eid.weight"] = np.array([[5, 2], [0, 7]], np.int32)
    permuted = dict(own)
    for name in ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
        permuted[f"{name}.weight"] = own[f"{name}.weight"][order]
    permuted["exp_probs_b.bias"] = own["exp_probs_b.bias"][order]
    new_number = np.argsort(order).astype(np.int32)
    permuted["ffn_gate_tid2eid.weight"] = new_number[own["ffn_gate_tid2eid.weight"]]
    shape = known_shape(2, n_hash_layers=1, n_used=2)
    x, tokens = normal(20, 256, seed=21), torch.arange(20) % 2
    for layer in (0, 3):
        before, after = (FeedForward(shape, layer, weights(w))(x, tokens) for w in (own, permuted))
        assert torch.allclose(before, after, rtol=1e-4, atol=1e-5)
