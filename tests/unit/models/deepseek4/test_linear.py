"""Which products round their input, and what stays float32."""

import numpy as np
import pytest
import torch

from ds4py.models.deepseek4.hyper import HyperConnection, HyperHead
from ds4py.models.deepseek4.linear import Linear, activation_rounding
from ds4py.models.deepseek4.rounding import round_q8_0, round_q8_k
from ds4py.quant.formats import FORMATS
from tests.unit.models.deepseek4.support import (
    MODES,
    Sessions,
    known_shape,
    normal,
    place,
    prompt,
    tensor,
    tiny,
    weights,
)

BY_NAME = {kind.name: kind for kind in FORMATS.values()}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("F32", "F16", "BF16"), None),
        (("Q8_0", "Q4_0", "Q5_1", "MXFP4", "IQ4_NL"), round_q8_0),
        (("IQ2_XXS", "Q2_K", "Q4_K", "Q6_K", "IQ4_XS"), round_q8_k),
    ],
)
def test_the_format_of_the_weights_says_how_activations_are_rounded(names, expected):
    assert [activation_rounding(BY_NAME[name]) for name in names] == [expected] * len(names)


@pytest.mark.parametrize("act_quant", [False, True])
def test_point_35_binary16_weights_multiply_unrounded_activations(act_quant):
    matrix, x = normal(40, 64).half().numpy(), normal(5, 64, seed=1)
    got = Linear([tensor("m", matrix)], place(act_quant=act_quant))(x)
    expected = x.double() @ torch.tensor(matrix).double().t()
    assert torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_point_33_q8_0_weights_multiply_int8_activations_with_float32_scales():
    matrix, x = tensor("m", normal(40, 64).numpy(), "Q8_0"), normal(5, 64, seed=1)
    exact = matrix.decode().double().t()
    rounded = Linear([matrix], place(act_quant=True))(x)
    assert torch.allclose(rounded.double(), round_q8_0(x).double() @ exact, rtol=1e-5, atol=1e-5)
    plain = Linear([matrix], place())(x)
    assert torch.allclose(plain.double(), x.double() @ exact, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(plain, rounded, rtol=1e-4, atol=1e-4)


def test_matrices_of_several_formats_round_each_for_itself():
    whole = normal(30, 64).numpy()
    parts = [
        tensor("a", whole[:10], "Q8_0"),
        tensor("b", whole[10:20], "F32"),
        tensor("c", whole[20:], "Q8_0"),
    ]
    where, x = place(act_quant=True), normal(4, 64, seed=1)
    got = Linear(parts, where)(x)
    assert torch.equal(got, torch.cat([Linear([part], where)(x) for part in parts], 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_float32_in_every_precision(dtype):
    got = Linear([tensor("m", normal(8, 32).numpy(), "Q8_0")], place(dtype))(normal(2, 32))
    assert got.dtype is torch.float32


def test_point_35_hyper_connections_are_float32_in_every_precision():
    shape = known_shape(2)
    own = {
        "fn.weight": normal(24, shape.hidden_width).half().numpy(),
        "scale.weight": np.ones(3, np.float32),
        "base.weight": normal(24, seed=1).numpy(),
    }
    hidden = normal(4, shape.hidden_width, seed=2)
    exact, fast = (
        HyperConnection.load(shape, weights(own, where=place(dtype))).split(hidden)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert torch.equal(exact[0], fast[0])
    assert torch.equal(exact[1].residual, fast[1].residual)
    head = {
        "fn.weight": normal(4, shape.hidden_width).half().numpy(),
        "scale.weight": np.ones(1, np.float32),
        "base.weight": normal(4, seed=1).numpy(),
    }
    exact_head, fast_head = (
        HyperHead.load(shape, weights(head, where=place(dtype)))(hidden)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert torch.equal(exact_head, fast_head)


@pytest.mark.parametrize("mode", MODES)
def test_point_36_a_model_leaves_the_precision_of_products_at_its_highest(mode):
    Sessions(tiny(mode)).feed(prompt()[:5])
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


def test_a_name_is_the_prefix_and_what_stands_below_it():
    own = weights({"blk.3.a.x": np.ones(2, np.float32)}).below("blk.3.").below("a.")
    assert own.dense("x").tolist() == [1, 1]
    assert own.optional("y") is None
